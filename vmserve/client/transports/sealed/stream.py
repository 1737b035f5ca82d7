"""Frames that nobody without the session's key can read, make, change, repeat or leave out.

Each has a head, which is its length, and a body. Both are sealed by ChaCha20-Poly1305 (RFC 8439)
with nonces that count, as in the frames of BOLT 8: a length is checked before anything is kept for
it.
"""

from __future__ import annotations

import itertools
import struct
from collections.abc import Iterator

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305

from vmserve.client.transports.framing import MAX_FRAME_BYTES, check_length
from vmserve.errors import VmserveError

__all__ = ["BrokenSealError", "Opener", "Sealer"]

_TAG_BYTES = 16
_LENGTH = struct.Struct("<I")
_HEAD_BYTES = _LENGTH.size + _TAG_BYTES
#: Four zero bytes, and a number that no other text under the key has.
_NONCE = struct.Struct("<4xQ")


class BrokenSealError(VmserveError):
    """What came is not what the other side sent."""


class Sealer:
    """Makes the frames of one direction. ``key``: 32 bytes. Only one thread may send at a time."""

    def __init__(self, key: bytes) -> None:
        self._cipher = ChaCha20Poly1305(key)
        self._numbers = itertools.count()

    def seal(self, payload: bytes) -> bytes:
        """Make the next frame. Raises :class:`~vmserve.errors.FrameTooLargeError`."""
        length = len(payload)
        check_length(length)
        return self._encrypt(_LENGTH.pack(length)) + self._encrypt(payload)

    def _encrypt(self, text: bytes) -> bytes:
        sealed: bytes = self._cipher.encrypt(_NONCE.pack(next(self._numbers)), text, None)
        return sealed


class Opener:
    """Checks and decrypts the frames of one direction, from pieces of any length."""

    def __init__(self, key: bytes) -> None:
        self._cipher = ChaCha20Poly1305(key)
        self._number = 0
        self._buffer = bytearray()
        #: Length of the frame that has begun; None: its head has not come yet.
        self._length: int | None = None

    def feed(self, data: bytes) -> Iterator[bytes]:
        """The payloads that ``data`` completes. Raises :class:`BrokenSealError`."""
        self._buffer += data
        while True:
            if self._length is None:
                if (head := self._take(_HEAD_BYTES)) is None:
                    return
                (self._length,) = _LENGTH.unpack(head)
                if self._length > MAX_FRAME_BYTES:
                    raise BrokenSealError(f"a frame of {self._length} bytes is above the limit")
            if (payload := self._take(self._length + _TAG_BYTES)) is None:
                return
            self._length = None
            yield payload

    def _take(self, num_bytes: int) -> bytes | None:
        """Decrypt the next bytes; None if they are not all there."""
        if len(self._buffer) < num_bytes:
            return None
        sealed = bytes(memoryview(self._buffer)[:num_bytes])
        del self._buffer[:num_bytes]
        try:
            text: bytes = self._cipher.decrypt(_NONCE.pack(self._number), sealed, None)
        except InvalidTag:
            raise BrokenSealError(
                f"frame {self._number // 2} was changed on its way, repeated or left out"
            ) from None
        self._number += 1
        return text
