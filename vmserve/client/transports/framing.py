"""Messages on a stream socket: four bytes of length (little-endian), then the message."""

from __future__ import annotations

import socket
import struct
from collections.abc import Iterator

from vmserve.errors import FrameTooLargeError

__all__ = [
    "MAX_FRAME_BYTES",
    "FrameReader",
    "check_length",
    "frame",
    "receive_frame",
    "send_frame",
]

#: Most bytes of a message in either direction.
MAX_FRAME_BYTES = 256 << 20

_LENGTH = struct.Struct("<I")


def frame(payload: bytes) -> bytes:
    """Put the length before a message. Raises :class:`FrameTooLargeError`."""
    check_length(len(payload))
    return _LENGTH.pack(len(payload)) + payload


def send_frame(sock: socket.socket, payload: bytes) -> None:
    """Send a message; blocks until the system has taken all of it.

    Raises ``OSError`` and :class:`FrameTooLargeError`.
    """
    sock.sendall(frame(payload))


def receive_frame(sock: socket.socket) -> bytes | None:
    """Receive a message from a blocking socket; None at its end, also within a message.

    Raises ``OSError`` and :class:`FrameTooLargeError`.
    """
    head = _receive(sock, _LENGTH.size)
    if head is None:
        return None
    (length,) = _LENGTH.unpack(head)
    check_length(length)
    return _receive(sock, length)


def _receive(sock: socket.socket, num_bytes: int) -> bytes | None:
    data = bytearray(num_bytes)
    view = memoryview(data)
    while view:
        num_read = sock.recv_into(view)
        if num_read == 0:
            return None
        view = view[num_read:]
    return bytes(data)


class FrameReader:
    """Puts messages together from pieces of any length."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> Iterator[bytes]:
        """The messages that ``data`` completes. Raises :class:`FrameTooLargeError`."""
        buffer = self._buffer
        buffer += data
        begin = 0
        while len(buffer) - begin >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(buffer, begin)
            check_length(length)
            end = begin + _LENGTH.size + length
            if len(buffer) < end:
                break
            yield bytes(buffer[begin + _LENGTH.size : end])
            begin = end
        del buffer[:begin]


def check_length(length: int) -> None:
    """Raise :class:`FrameTooLargeError` for a message that is longer than any may be."""
    if length > MAX_FRAME_BYTES:
        raise FrameTooLargeError(
            f"a message of {length} bytes between server and engine is above the limit of "
            f"{MAX_FRAME_BYTES}: ask for fewer log-probabilities"
        )
