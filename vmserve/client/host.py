"""An engine that listens on TCP and serves one server at a time."""

from __future__ import annotations

import contextlib
import logging
import queue
import select
import socket
import threading
import time
from collections import Counter
from pathlib import Path

import msgspec

from vmserve.client.codec import decode_to_engine, encode
from vmserve.client.messages import (
    LINK_SERIAL,
    Abort,
    Add,
    Ask,
    FromEngine,
    Ping,
    Pong,
    Reply,
    Shutdown,
    Unpin,
)
from vmserve.client.questions import check_question
from vmserve.client.service import EngineService, ready_message
from vmserve.client.transports.sealed.handshake import (
    HandshakeError,
    SessionKeys,
    TakenError,
    greet_server,
)
from vmserve.client.transports.sealed.identity import digest_of, tokenizer_files
from vmserve.client.transports.sealed.link import prepare_socket
from vmserve.client.transports.sealed.stream import BrokenSealError, Opener, Sealer
from vmserve.engine.engine import LLMEngine
from vmserve.errors import ConfigurationError, EngineDeadError
from vmserve.models.hub import EMBEDDED_NAME

__all__ = ["EngineHost"]

logger = logging.getLogger(__name__)

#: Seconds of silence after which a server counts as gone: it pings each second.
_SILENT_SECONDS = 20.0
#: Connections that have not proved that they know the key.
_MOST_STRANGERS = 16
_PIECE_BYTES = 1 << 20
_PAUSE_SECONDS = 0.05


class EngineHost:
    """Serves ``engine`` to those who connect to ``listener`` and know ``key``, one after another.

    When a server leaves, dies or is silent, its requests are aborted and its pins released; cached
    prefixes stay for the next. :meth:`run` belongs to the thread that owns the engine.
    """

    def __init__(self, engine: LLMEngine, listener: socket.socket, key: bytes) -> None:
        self._engine = engine
        self._listener = listener
        self._key = key
        ready = ready_message(engine)
        self._tokenizer = Path(ready.tokenizer)
        try:
            self._digest = digest_of(tokenizer_files(self._tokenizer))
        except ConfigurationError as error:  # servers that have it themselves can do without
            logger.warning("servers have to be given the tokenizer: %s", error)
            self._digest = ""
        model = engine.config.model
        self._name = EMBEDDED_NAME if model is None else Path(model).name
        #: Servers that may have the engine; None: stop.
        self._guests: queue.SimpleQueue[tuple[socket.socket, SessionKeys, str] | None] = (
            queue.SimpleQueue()
        )
        self._strangers = _Strangers()
        #: Lock held for the server that is served.
        self._seat = threading.Lock()
        self._service: EngineService | None = None
        self._is_stopping = False

    def run(self) -> None:
        """Serve until :meth:`stop`. Raises what the engine raises, which is then unusable."""
        threading.Thread(target=self._listen, name="vmserve-door", daemon=True).start()
        try:
            while (guest := self._guests.get()) is not None and not self._is_stopping:
                sock, keys, peer = guest
                try:
                    with sock:
                        self._serve(sock, keys, peer)
                finally:
                    self._seat.release()
        finally:
            with contextlib.suppress(OSError):
                self._listener.shutdown(socket.SHUT_RDWR)  # wakes the other thread
            self._listener.close()

    def stop(self) -> None:
        """End :meth:`run` after the current step. A signal's handler may call it."""
        self._is_stopping = True
        self._guests.put(None)
        if (service := self._service) is not None:
            with contextlib.suppress(EngineDeadError):
                service.post(Shutdown())

    # -- who connects -------------------------------------------------------------------

    def _listen(self) -> None:
        while True:
            try:
                sock, address = self._listener.accept()
            except OSError:
                if self._listener.fileno() < 0:
                    return
                time.sleep(_PAUSE_SECONDS)  # no descriptor is left, or it ended before it was taken
                continue
            self._strangers.enter(sock, address[0])
            peer = f"{address[0]}:{address[1]}"
            threading.Thread(target=self._greet, args=(sock, peer), daemon=True).start()

    def _greet(self, sock: socket.socket, peer: str) -> None:
        try:
            try:
                prepare_socket(sock)
                keys = greet_server(
                    sock,
                    self._key,
                    lambda: self._seat.acquire(blocking=False),
                    self._seat.release,
                    heard=lambda: self._strangers.heard(sock),
                )
            finally:
                self._strangers.leave(sock)
        except (TakenError, HandshakeError, OSError) as error:
            logger.warning("%s: %s", peer, error)
            sock.close()
        else:
            self._guests.put((sock, keys, peer))

    # -- one server ---------------------------------------------------------------------

    def _serve(self, sock: socket.socket, keys: SessionKeys, peer: str) -> None:
        logger.info("serving %s", peer)
        sock.settimeout(_SILENT_SECONDS)
        guest = _Guest(sock, keys, peer, self._tokenizer)
        service = guest.service = self._service = EngineService(self._engine, guest.send)
        guest.send(
            msgspec.structs.replace(
                ready_message(self._engine),
                tokenizer=self._digest,
                name=self._name,
            )
        )
        reader = threading.Thread(target=guest.read, name="vmserve-messages", daemon=True)
        reader.start()
        if self._is_stopping:
            guest.leave()
        try:
            service.run()
        finally:
            self._service = None
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
        service.unpin_all()
        reader.join()
        logger.info("%s has left", peer)


class _Strangers:
    """Connections that have proved nothing yet. One that is too many ends another.

    That is one of the address that has most: whoever opens many only shuts out himself. Of those it
    is the oldest that has said nothing, which a server does at once, or else the oldest.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        #: Hosts of connections, in order of arrival.
        self._hosts: dict[socket.socket, str] = {}
        self._heard: set[socket.socket] = set()

    def enter(self, sock: socket.socket, host: str) -> None:
        with self._lock:
            self._hosts[sock] = host
            if len(self._hosts) <= _MOST_STRANGERS:
                return
            [(busiest, _)] = Counter(self._hosts.values()).most_common(1)
            its = [each for each, whose in self._hosts.items() if whose == busiest]
            ended = next((each for each in its if not self._has_spoken(each)), its[0])
            self._forget(ended)
            with contextlib.suppress(OSError):
                ended.shutdown(socket.SHUT_RDWR)  # its thread closes it

    def heard(self, sock: socket.socket) -> None:
        """Note a first message; the thread may have had to wait for a processor to read it."""
        with self._lock:
            if sock in self._hosts:
                self._heard.add(sock)

    def _has_spoken(self, sock: socket.socket) -> bool:
        waiting = select.poll()
        waiting.register(sock, select.POLLIN)
        return sock in self._heard or bool(waiting.poll(0))

    def leave(self, sock: socket.socket) -> None:
        with self._lock:
            self._forget(sock)

    def _forget(self, sock: socket.socket) -> None:
        self._hosts.pop(sock, None)
        self._heard.discard(sock)


class _Guest:
    """The connection to one server. When it breaks, the service is asked to end."""

    service: EngineService

    def __init__(self, sock: socket.socket, keys: SessionKeys, peer: str, tokenizer: Path) -> None:
        self._sock = sock
        self._sealer = Sealer(keys.from_engine)
        self._opener = Opener(keys.to_engine)
        self._peer = peer
        self._tokenizer = tokenizer
        self._sending = threading.Lock()
        self._is_broken = False

    def leave(self) -> None:
        with contextlib.suppress(EngineDeadError):
            self.service.post(Shutdown())

    def send(self, message: FromEngine) -> None:
        """Send, or drop if the server is gone. Any thread may call it.

        Raises :class:`~vmserve.errors.FrameTooLargeError`.
        """
        data = encode(message)
        with self._sending:
            if self._is_broken:
                return
            sealed = self._sealer.seal(data)
            try:
                self._sock.sendall(sealed)
            except OSError:
                self._is_broken = True  # the next frame would begin within this one
        if self._is_broken:
            self.leave()

    def read(self) -> None:
        try:
            while data := self._sock.recv(_PIECE_BYTES):
                for payload in self._opener.feed(data):
                    self._take(payload)
        except TimeoutError:
            logger.warning("nothing was heard of %s for %g s", self._peer, _SILENT_SECONDS)
        except (BrokenSealError, msgspec.DecodeError) as error:
            logger.error("the connection to %s broke: %s", self._peer, error)
        except (OSError, EngineDeadError):
            pass  # it ended, or the service did
        self.leave()

    def _take(self, payload: bytes) -> None:
        message = decode_to_engine(payload)
        match message:
            case Ask(question="tokenizer_files"):
                self._send_tokenizer(message.serial)
                return
            case Ask():
                try:
                    check_question(message)
                except ConfigurationError as error:
                    self.send(Reply(message.serial, None, error))
                    return
            case Ping():
                self.send(Pong(LINK_SERIAL))
            case Add() | Abort() | Unpin() | Shutdown():
                pass
            case _:
                raise msgspec.DecodeError(f"a {type(message).__name__} is not for this engine")
        self.service.post(message)

    def _send_tokenizer(self, serial: int) -> None:
        try:
            self.send(Reply(serial, tokenizer_files(self._tokenizer)))
        except (ConfigurationError, OSError) as error:
            self.send(Reply(serial, None, ConfigurationError(str(error))))
