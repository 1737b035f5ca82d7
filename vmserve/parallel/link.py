"""Messages between rank 0 and a rank: plain data, and descriptors on one host."""

from __future__ import annotations

import contextlib
import os
import socket
import struct
from collections.abc import Sequence
from typing import Any, Protocol

import msgspec

from vmserve.errors import EngineDeadError
from vmserve.system.packed_errors import pack_error, unpack_error

__all__ = ["ByteWire", "Link", "PairLink", "RankOrders", "TcpLink", "refused"]

_MOST_BYTES = 8 << 20
_LENGTH = struct.Struct("<I")
#: Seconds after which a host that vanished without a word is noticed, and between two probes.
_SILENCE, _PROBE_SECONDS = 20, 5


class RankOrders(msgspec.Struct, frozen=True, kw_only=True):
    """What a rank loads, and with what it computes."""

    rank: int
    size: int
    parent_pid: int
    #: CPUs that the rank may use; none: all.
    cpus: tuple[int, ...]
    log_level: int
    path: str
    dtype: str
    kv_dtype: str
    max_model_len: int
    #: Whether the native decoder computes; else torch does.
    native: bool
    #: Port of the store, on this host, where torch's ranks find each other.
    store_port: int
    quantization: str
    device: str
    kv_driver: str
    attention_backend: str
    board_bytes: int


class Link(Protocol):
    """One end. ``send`` raises ``OSError`` once the other end is closed."""

    sock: socket.socket

    def send(self, message: Any, descriptors: Sequence[int] = ()) -> None: ...

    def receive(self) -> tuple[Any, list[int]]:
        """The message and its descriptors, which are the caller's.

        Raises :class:`~vmserve.errors.EngineDeadError` if the other end is closed, and what
        :func:`refused` made a message of.
        """
        ...

    def close(self) -> None: ...


class PairLink:
    """A link on one host: half of a pair without a name, which a new process inherits."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _MOST_BYTES)

    @staticmethod
    def pair() -> tuple[socket.socket, socket.socket]:
        return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)

    def send(self, message: Any, descriptors: Sequence[int] = ()) -> None:
        socket.send_fds(self.sock, [msgspec.msgpack.encode(message)], descriptors)

    def receive(self) -> tuple[Any, list[int]]:
        try:
            data, descriptors, _, _ = socket.recv_fds(self.sock, _MOST_BYTES, 1)
        except ConnectionResetError:
            data, descriptors = b"", []
        for descriptor in descriptors:
            os.set_inheritable(descriptor, False)
        return _told(data), descriptors

    def close(self) -> None:
        self.sock.close()


class TcpLink:
    """A link between hosts: frames with their length. It is for a network that is trusted: it is
    neither authenticated nor encrypted, like the connections of torch.distributed."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        sock.settimeout(None)
        for level, option, value in (
            (socket.IPPROTO_TCP, socket.TCP_NODELAY, 1),
            (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
            (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _PROBE_SECONDS),
            (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, _PROBE_SECONDS),
            (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, _SILENCE // _PROBE_SECONDS - 1),
            (socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _SILENCE * 1000),
        ):
            sock.setsockopt(level, option, value)

    def send(self, message: Any, descriptors: Sequence[int] = ()) -> None:
        assert not descriptors, "they do not go to other hosts"
        data = msgspec.msgpack.encode(message)
        self.sock.sendall(_LENGTH.pack(len(data)) + data)

    def receive(self) -> tuple[Any, list[int]]:
        try:
            (length,) = _LENGTH.unpack(self._read(_LENGTH.size) or b"\0\0\0\0")
            data = self._read(length) if length <= _MOST_BYTES else b""
        except OSError:
            data = b""
        return _told(data), []

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self.sock.shutdown(socket.SHUT_RDWR)
        self.sock.close()

    def _read(self, num_bytes: int) -> bytes:
        """Read as many bytes; none at the end."""
        data = b""
        while len(data) < num_bytes:  # with a time limit on the socket MSG_WAITALL does not wait
            more = self.sock.recv(num_bytes - len(data), socket.MSG_WAITALL)
            if not more:
                return b""
            data += more
        return data


class ByteWire:
    """A link of bytes alone, for :mod:`vmserve.memory.relay`."""

    def __init__(self, link: TcpLink) -> None:
        self._link = link

    def send(self, message: bytes) -> None:
        self._link.send(message)

    def receive(self) -> bytes:
        message, _ = self._link.receive()
        assert isinstance(message, bytes)
        return message

    def close(self) -> None:
        self._link.close()


def _told(data: bytes) -> Any:
    if not data:
        raise EngineDeadError("its process has ended")
    message = msgspec.msgpack.decode(data)
    if isinstance(message, dict) and "refused" in message:
        raise unpack_error(message["refused"])
    return message


def refused(error: Exception) -> dict[str, Any]:
    """The message that raises ``error`` at the other end."""
    return {"refused": pack_error(error)}
