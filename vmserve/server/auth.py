"""API keys: every route needs one, but for a short list of exceptions."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Iterable

__all__ = ["KeyRing"]


class KeyRing:
    """Compares keys in constant time; without any, everything is accepted."""

    def __init__(self, keys: Iterable[str]) -> None:
        # Digests are of one length, so that a comparison tells nothing of a key's length.
        self._digests = tuple(_digest(key.encode()) for key in keys)

    def tenant(self, authorization: bytes | None) -> str | None:
        """A name for whose key it is ("" where no key is needed), or None if it is nobody's.

        ``authorization``: the header's value, ``Bearer <key>``.
        """
        if not self._digests:
            return ""
        scheme, _, key = (authorization or b"").partition(b" ")
        given = _digest(key.strip())
        # Every key is compared: stopping at a match would tell which one it was.
        matches = [hmac.compare_digest(given, digest) for digest in self._digests]
        if scheme.lower() != b"bearer" or not any(matches):
            return None
        return f"key-{matches.index(True)}"


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()
