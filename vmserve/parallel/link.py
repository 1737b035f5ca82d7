"""Messages between rank 0 and a rank: plain data, and descriptors on one host."""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from typing import Any

import msgspec

from vmserve.errors import ConfigurationError, EngineDeadError, UnsupportedError, VmserveError

__all__ = ["Link", "RankOrders", "refused"]

_MOST_BYTES = 8 << 20
_ERRORS: dict[str, type[VmserveError]] = {
    kind.__name__: kind for kind in (ConfigurationError, UnsupportedError, VmserveError)
}


class RankOrders(msgspec.Struct, frozen=True, kw_only=True):
    """What a rank loads, and with what it computes."""

    rank: int
    size: int
    parent_pid: int
    cpus: tuple[int, ...]
    log_level: int
    path: str
    dtype: str
    max_model_len: int
    native: bool
    quantization: str
    device: str
    kv_driver: str
    attention_backend: str
    board_bytes: int


class Link:
    """One end of a pair of sockets. ``send`` raises ``OSError`` once the other end is closed."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _MOST_BYTES)

    @staticmethod
    def pair() -> tuple[socket.socket, socket.socket]:
        return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)

    def send(self, message: Any, descriptors: Sequence[int] = ()) -> None:
        socket.send_fds(self.sock, [msgspec.msgpack.encode(message)], descriptors)

    def receive(self) -> tuple[Any, list[int]]:
        """The message and its descriptors, which are the caller's.

        Raises :class:`~vmserve.errors.EngineDeadError` if the other end is closed, and what
        :func:`refused` made a message of.
        """
        try:
            data, descriptors, _, _ = socket.recv_fds(self.sock, _MOST_BYTES, 1)
        except ConnectionResetError:
            data, descriptors = b"", []
        if not data:
            raise EngineDeadError("its process has ended")
        message = msgspec.msgpack.decode(data)
        if isinstance(message, dict) and "refused" in message:
            kind, text = message["refused"]
            raise _ERRORS.get(kind, VmserveError)(text)
        for descriptor in descriptors:
            os.set_inheritable(descriptor, False)
        return message, descriptors

    def close(self) -> None:
        self.sock.close()


def refused(error: Exception) -> dict[str, Any]:
    """The message that raises ``error`` at the other end."""
    kind = next((k.__name__ for k in type(error).__mro__ if k.__name__ in _ERRORS), "VmserveError")
    return {"refused": (kind, str(error))}
