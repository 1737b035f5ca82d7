"""API keys: every route needs one, but for a short list of exceptions.

A key belongs to somebody with a name, its *tenant*. Tenants do not see what others leave in the
KV cache: each has prefixes of its own, and pages are scrubbed when they change hands.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from vmserve.errors import ConfigurationError

__all__ = ["ApiKey", "Caller", "KeyRing", "read_key_file"]

_DIGEST_CHARS = 64
_MAX_NAME_CHARS = 128


@dataclass(frozen=True, slots=True)
class ApiKey:
    """``digest``: SHA-256 of the key, in hexadecimal; the key itself is not kept."""

    name: str
    digest: str

    @classmethod
    def of(cls, name: str, key: str) -> ApiKey:
        return cls(name, hashlib.sha256(key.encode()).hexdigest())


@dataclass(frozen=True, slots=True)
class Caller:
    """Who sends a request: ``name`` is "" where no key is needed. ``secret``: what salts are
    derived from; empty where prefixes are shared."""

    name: str = ""
    secret: bytes = b""

    def cache_salt(self, given: str) -> str:
        """The salt of a request that asks for ``given``: nobody else can have the same."""
        if not self.secret:
            return given
        return hmac.new(self.secret, given.encode(), hashlib.sha256).hexdigest()

    @property
    def isolation(self) -> str:
        """Whose memory it uses; "" shares with all."""
        return self.name if self.secret else ""


class KeyRing:
    """Compares keys in constant time; without any, everything is accepted."""

    def __init__(self, keys: Iterable[ApiKey], *, share_prefix_cache: bool = False) -> None:
        self._keys = tuple((key.name, bytes.fromhex(key.digest)) for key in keys)
        # Made anew each time: a salt is of no use outside this process and the engine's.
        root = secrets.token_bytes(32)
        self._callers = {
            name: Caller(
                name,
                b"" if share_prefix_cache else hmac.digest(root, name.encode(), hashlib.sha256),
            )
            for name, _ in self._keys
        }

    @property
    def callers(self) -> list[Caller]:
        """Everybody who has a key, or the one that all are where nobody needs one."""
        return list(self._callers.values()) or [Caller()]

    def caller(self, authorization: bytes | None) -> Caller | None:
        """Whose key it is, or None if it is nobody's.

        ``authorization``: the header's value, ``Bearer <key>``.
        """
        if not self._keys:
            return Caller()
        scheme, _, key = (authorization or b"").partition(b" ")
        # Digests are of one length, so that a comparison tells nothing of a key's length.
        given = hashlib.sha256(key.strip()).digest()
        # Every key is compared: stopping at a match would tell which one it was.
        matches = [hmac.compare_digest(given, digest) for _, digest in self._keys]
        if scheme.lower() != b"bearer" or not any(matches):
            return None
        return self._callers[self._keys[matches.index(True)][0]]


def read_key_file(path: Path) -> tuple[ApiKey, ...]:
    """Lines ``name:key``, or ``name:sha256:<64 hexadecimal digits>``; ``#`` begins a comment line.

    Several lines may have one name. Raises :class:`~vmserve.errors.ConfigurationError`, which
    never shows a key.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise ConfigurationError(f"api_key_file: cannot read {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigurationError(f"api_key_file: {path} is not UTF-8 text") from error
    keys = [
        _parse(path, number, line.strip())
        for number, line in enumerate(lines, start=1)
        if line.strip() and not line.strip().startswith("#")
    ]
    if not keys:
        raise ConfigurationError(f"api_key_file: {path} has no key: write lines name:key")
    return tuple(keys)


def _parse(path: Path, number: int, line: str) -> ApiKey:
    # Stripped, as what comes in a header is: "name: key" is natural to write.
    name, key = (part.strip() for part in line.partition(":")[::2])
    kind, _, digest = key.partition(":")
    where = f"api_key_file: line {number} of {path}"
    if not (name and key) or len(name) > _MAX_NAME_CHARS or not name.isprintable():
        raise ConfigurationError(
            f"{where} is not name:key with a name of 1 to {_MAX_NAME_CHARS} characters"
        )
    if kind != "sha256":
        return ApiKey.of(name, key)
    if len(digest) != _DIGEST_CHARS or not set(digest.lower()) <= set("0123456789abcdef"):
        raise ConfigurationError(f"{where}: sha256: must be followed by 64 hexadecimal digits")
    return ApiKey(name, digest.lower())
