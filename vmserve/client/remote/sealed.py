"""Frames that nobody without the session's key can make, change, repeat or leave out.

Each has a head (its length, and a MAC of number and length) and a tag (a MAC of number and
payload): a length is checked before anything is kept for it. They are authenticated, not secret.
"""

from __future__ import annotations

import hmac
import struct
from collections.abc import Iterator

from vmserve.client.framing import MAX_FRAME_BYTES, check_length
from vmserve.errors import VmserveError

__all__ = ["BrokenSealError", "Opener", "Sealer"]

_HEAD_MAC_BYTES = 8
_TAG_BYTES = 16
_LENGTH = struct.Struct("<I")
_NUMBERED = struct.Struct("<cQI")
_HEAD_BYTES = _LENGTH.size + _HEAD_MAC_BYTES


class BrokenSealError(VmserveError):
    """What came is not what the other side sent."""


def _mac(key: bytes, kind: bytes, number: int, length: int, payload: bytes = b"") -> bytes:
    return hmac.digest(key, _NUMBERED.pack(kind, number, length) + payload, "sha256")


class Sealer:
    """Makes the frames of one direction. Only one thread may send at a time."""

    def __init__(self, key: bytes) -> None:
        self._key = key
        self._number = 0

    def seal(self, payload: bytes) -> bytes:
        """Make the next frame. Raises :class:`~vmserve.errors.FrameTooLargeError`."""
        length = len(payload)
        check_length(length)
        number, self._number = self._number, self._number + 1
        head = _mac(self._key, b"h", number, length)[:_HEAD_MAC_BYTES]
        tag = _mac(self._key, b"p", number, length, payload)[:_TAG_BYTES]
        return b"".join((_LENGTH.pack(length), head, payload, tag))


class Opener:
    """Checks the frames of one direction, from pieces of any length."""

    def __init__(self, key: bytes) -> None:
        self._key = key
        self._number = 0
        self._buffer = bytearray()
        self._is_head_checked = False

    def feed(self, data: bytes) -> Iterator[bytes]:
        """The payloads that ``data`` completes. Raises :class:`BrokenSealError`."""
        buffer = self._buffer
        buffer += data
        while len(buffer) >= _HEAD_BYTES:
            (length,) = _LENGTH.unpack_from(buffer)
            if not self._is_head_checked:
                mac = _mac(self._key, b"h", self._number, length)[:_HEAD_MAC_BYTES]
                found = bytes(buffer[_LENGTH.size : _HEAD_BYTES])
                if length > MAX_FRAME_BYTES or not hmac.compare_digest(mac, found):
                    raise BrokenSealError(self._problem())
                self._is_head_checked = True
            end = _HEAD_BYTES + length
            if len(buffer) < end + _TAG_BYTES:
                return
            payload = bytes(buffer[_HEAD_BYTES:end])
            tag = _mac(self._key, b"p", self._number, length, payload)[:_TAG_BYTES]
            if not hmac.compare_digest(tag, bytes(buffer[end : end + _TAG_BYTES])):
                raise BrokenSealError(self._problem())
            del buffer[: end + _TAG_BYTES]
            self._number += 1
            self._is_head_checked = False
            yield payload

    def _problem(self) -> str:
        return f"frame {self._number} was changed on its way, repeated or left out"
