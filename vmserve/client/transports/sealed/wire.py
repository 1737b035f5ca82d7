"""Messages over a connected socket between two hosts that have proved one key to each other."""

from __future__ import annotations

import contextlib
import socket
from collections import deque

from vmserve.client.transports.sealed.stream import Opener, Sealer

__all__ = ["SealedWire"]

#: Seconds after which a host that vanished without a word is noticed.
_SILENCE = 20
_PROBE_AFTER, _PROBE_EVERY = 5, 5
_READ_BYTES = 1 << 16


class SealedWire:
    """A :class:`~vmserve.memory.relay.Wire`. One thread sends and receives; any may close it."""

    def __init__(self, sock: socket.socket, send_key: bytes, receive_key: bytes) -> None:
        """Keys: of each direction, as the handshake gives them."""
        sock.settimeout(None)
        for level, option, value in (
            (socket.IPPROTO_TCP, socket.TCP_NODELAY, 1),
            (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
            (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _PROBE_AFTER),
            (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, _PROBE_EVERY),
            (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, _SILENCE // _PROBE_EVERY - 1),
            (socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _SILENCE * 1000),
        ):
            sock.setsockopt(level, option, value)
        self._sock = sock
        self._sealer = Sealer(send_key)
        self._opener = Opener(receive_key)
        self._received: deque[bytes] = deque()

    def send(self, message: bytes) -> None:
        """Raises ``OSError`` if the other side is gone."""
        self._sock.sendall(self._sealer.seal(message))

    def receive(self) -> bytes:
        """Wait for a message. Raises ``OSError`` if the other side is gone or its host silent, and
        :class:`~vmserve.client.transports.sealed.stream.BrokenSealError`."""
        while not self._received:
            data = self._sock.recv(_READ_BYTES)
            if not data:
                raise ConnectionResetError("the other side has closed the connection")
            self._received.extend(self._opener.feed(data))
        return self._received.popleft()

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)
        self._sock.close()
