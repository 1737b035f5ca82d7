"""A server's connection to an engine on another machine."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import time
from collections import deque
from collections.abc import Callable
from typing import Any, TypeAlias

import msgspec

from vmserve.client.codec import decode_from_engine, encode
from vmserve.client.messages import Ask, FromEngine, Ready, Reply, ToEngine
from vmserve.client.transports.process import SocketLink
from vmserve.client.transports.sealed.handshake import (
    HANDSHAKE_SECONDS,
    CutShortError,
    HandshakeError,
    SessionKeys,
    TakenError,
    greet_engine,
)
from vmserve.client.transports.sealed.identity import MOST_TOKENIZER_BYTES, SentFile, digest_of
from vmserve.client.transports.sealed.stream import BrokenSealError, Opener, Sealer
from vmserve.errors import ConfigurationError, EngineDeadError, VmserveError
from vmserve.models.loader import Progress

__all__ = ["Place", "SealedChannel", "parse_address", "prepare_socket"]

logger = logging.getLogger(__name__)

_PIECE_BYTES = 1 << 20
#: Pauses before a handshake that was cut short is tried again.
_PAUSES_SECONDS = (0.1, 0.3, 1.0)

#: Address of an engine: ``HOST:PORT``, or a function that finds it, which may block and raise an
#: error.
Place: TypeAlias = str | Callable[[], str]


def parse_address(text: str, option: str) -> tuple[str, int]:
    """Read ``HOST:PORT``, or ``[IPV6]:PORT``. Raises :class:`ConfigurationError`."""
    host, _, port = text.rpartition(":")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    elif ":" in host:
        host = ""
    if not host or not (port.isascii() and port.isdigit() and int(port) < 2**16):
        raise ConfigurationError(f"{option}: {text!r} is not HOST:PORT, e.g. 10.0.0.2:8100")
    return host, int(port)


def prepare_socket(sock: socket.socket) -> None:
    """Send small messages at once, and have the system find out that the other side is gone."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)


class SealedChannel:
    """One connection, made by :meth:`wait_ready`: what a process is to an engine on one machine."""

    pid = 0

    def __init__(self, place: Place, key: bytes) -> None:
        self._place = place
        #: Address for messages.
        self.address = place if isinstance(place, str) else "an unknown address"
        self._key = key
        self._sock: socket.socket | None = None
        self._is_closed = False
        self._received: deque[FromEngine] = deque()

    def wait_ready(self, progress: Progress) -> Ready:
        """Connect, prove the key and receive what the model is.

        A handshake that is cut short, as where many connect at once, is tried again. Raises
        :class:`~vmserve.errors.EngineDeadError` if there is no such engine, and
        :class:`~vmserve.client.transports.sealed.handshake.HandshakeError`.
        """
        if not isinstance(self._place, str):
            self.address = self._place()
        for pause in _PAUSES_SECONDS:
            try:
                return self._enter()
            except CutShortError:
                time.sleep(pause)
        return self._enter()

    def _enter(self) -> Ready:
        try:
            where = parse_address(self.address, "engine")
            sock = socket.create_connection(where, HANDSHAKE_SECONDS)
        except OSError as error:
            why = "no answer" if isinstance(error, TimeoutError) else error.strerror or error
            raise EngineDeadError(f"no engine at {self.address}: {why}") from error
        self._sock = sock
        if self._is_closed:  # by another thread, while there was no connection to close
            sock.close()
            raise EngineDeadError("the connection was closed meanwhile")
        try:
            prepare_socket(sock)
            keys = greet_engine(sock, self._key)
            self._sealer, self._opener = _ends(keys)
            match self._next():
                case Ready() as ready:
                    return ready
                case other:
                    raise EngineDeadError(f"it began with a {type(other).__name__}")
        except VmserveError as error:
            sock.close()
            kinds = (EngineDeadError, TakenError, CutShortError, HandshakeError)
            kind = next((each for each in kinds if isinstance(error, each)), EngineDeadError)
            raise kind(f"{self.address}: {error}") from error

    def fetch_tokenizer(self, digest: str) -> list[SentFile]:
        """Ask for the files with this digest, before the event loop has the connection.

        Raises :class:`~vmserve.errors.ConfigurationError` if they are not those, or cannot be sent.
        """
        assert self._sock is not None
        self._sock.sendall(self._sealer.seal(encode(Ask(0, "tokenizer_files", {}))))
        while not isinstance(answer := self._next(), Reply):
            pass
        if answer.error is not None:
            raise ConfigurationError(f"{self.address}: {answer.error}")
        files = msgspec.convert(answer.value, list[SentFile])
        if sum(len(each.content) for each in files) > MOST_TOKENIZER_BYTES:
            raise ConfigurationError(f"{self.address}: its tokenizer is above the limit")
        if digest_of(files) != digest:
            raise ConfigurationError(f"{self.address}: its tokenizer's files changed: restart it")
        return files

    def _next(self) -> FromEngine:
        assert self._sock is not None
        self._sock.settimeout(HANDSHAKE_SECONDS)
        try:
            while not self._received:
                data = self._sock.recv(_PIECE_BYTES)
                if not data:
                    raise EngineDeadError("the engine closed the connection")
                self._received.extend(map(decode_from_engine, self._opener.feed(data)))
        except (OSError, msgspec.DecodeError) as error:
            raise EngineDeadError(f"the connection failed: {error}") from error
        return self._received.popleft()

    def link(self) -> SealedSocketLink:
        assert self._sock is not None
        return SealedSocketLink(
            self._sock, self.address, self._sealer, self._opener, self._received
        )

    def kill(self) -> None:
        """End the connection; the event loop then sees its end."""
        if self._sock is not None:
            with contextlib.suppress(OSError):
                self._sock.shutdown(socket.SHUT_RDWR)

    def reap(self, seconds: float) -> int:
        return 0

    def close(self) -> None:
        self._is_closed = True
        self.kill()
        if self._sock is not None:
            self._sock.close()


def _ends(keys: SessionKeys) -> tuple[Sealer, Opener]:
    return Sealer(keys.to_engine), Opener(keys.from_engine)


class SealedSocketLink(SocketLink):
    """Sends messages in sealed frames. A frame that was changed on its way ends the connection."""

    def __init__(
        self,
        sock: socket.socket,
        address: str,
        sealer: Sealer,
        opener: Opener,
        received: deque[FromEngine],
    ) -> None:
        super().__init__(sock)
        self._address = address
        self._sealer = sealer
        self._opener = opener
        self._received = received

    async def connect(self) -> None:
        self._sock.setblocking(False)
        await asyncio.get_running_loop().create_connection(lambda: self, sock=self._sock)

    def send(self, message: ToEngine) -> None:
        if self._stream is None:
            raise EngineDeadError("the engine is not connected")
        self._stream.write(self._sealer.seal(encode(message)))

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        while self._received:
            self._receive(self._received.popleft())

    def data_received(self, data: bytes) -> None:
        try:
            for payload in self._opener.feed(data):
                self._receive(decode_from_engine(payload))
        except (BrokenSealError, msgspec.DecodeError) as error:
            logger.error("the connection to the engine at %s broke: %s", self._address, error)
            self._abort()

    def _abort(self) -> None:
        stream: Any = self._stream
        if stream is not None:
            stream.abort()
