"""API keys. Every route needs one, with few exceptions.

A key belongs to somebody with a name, its *tenant*. Tenants do not see what others leave in the
KV cache: each has prefixes of its own, and pages are scrubbed when they change hands.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from collections.abc import Iterable
from dataclasses import dataclass, fields
from pathlib import Path

from vmserve.errors import ConfigurationError
from vmserve.options import read_text
from vmserve.system.files import warn_if_shared

__all__ = ["ApiKey", "Caller", "KeyLimits", "KeyRing", "read_key_file"]

_DIGEST_CHARS = 64
_MAX_NAME_CHARS = 128


@dataclass(frozen=True, slots=True)
class KeyLimits:
    """Limits of a tenant: running sequences, requests that wait or run, and tokens a minute.

    Tokens are those of prompts and answers. None: no limit.
    """

    sequences: int | None = None
    requests: int | None = None
    tokens_per_minute: int | None = None

    def or_else(self, default: KeyLimits) -> KeyLimits:
        """Fill limits that are None from ``default``."""
        return KeyLimits(
            *(
                getattr(default if getattr(self, each.name) is None else self, each.name)
                for each in fields(self)
            )
        )


@dataclass(frozen=True, slots=True)
class ApiKey:
    """``digest``: SHA-256 of the key, in hexadecimal; the key itself is not kept."""

    name: str
    digest: str
    limits: KeyLimits = KeyLimits()

    @classmethod
    def of(cls, name: str, key: str, limits: KeyLimits = KeyLimits()) -> ApiKey:
        return cls(name, hashlib.sha256(key.encode()).hexdigest(), limits)


_LIMITS = tuple(each.name for each in fields(KeyLimits))


@dataclass(frozen=True, slots=True)
class Caller:
    """The sender of a request: ``name`` is "" where no key is needed. ``secret``: what salts are
    derived from; empty where prefixes are shared."""

    name: str = ""
    secret: bytes = b""

    def cache_salt(self, given: str) -> str:
        """Return the salt for ``given``; no other tenant can have the same."""
        if not self.secret:
            return given
        return hmac.new(self.secret, given.encode(), hashlib.sha256).hexdigest()

    @property
    def isolation(self) -> str:
        """The tenant whose pages the request may use; "" shares with all."""
        return self.name if self.secret else ""


class KeyRing:
    """Compare keys in constant time; accept every request if there are no keys."""

    def __init__(
        self, keys: Iterable[ApiKey], *, share_prefix_cache: bool = False, secret: bytes = b""
    ) -> None:
        self._keys = tuple((key.name, bytes.fromhex(key.digest)) for key in keys)
        # Made anew each time unless prefixes outlive the process: else a salt is of no use outside
        # this process and the engine's.
        root = secret or secrets.token_bytes(32)
        self._callers = {
            name: Caller(
                name,
                b"" if share_prefix_cache else hmac.digest(root, name.encode(), hashlib.sha256),
            )
            for name, _ in self._keys
        }

    @property
    def callers(self) -> list[Caller]:
        """All tenants; without keys, the one tenant that every request belongs to."""
        return list(self._callers.values()) or [Caller()]

    def caller(self, authorization: bytes | None) -> Caller | None:
        """Return the tenant of a key, or None for an unknown key.

        ``authorization``: the header's value, ``Bearer <key>``.
        """
        if not self._keys:
            return Caller()
        scheme, _, key = (authorization or b"").partition(b" ")
        # Digests are of one length, so that a comparison reveals nothing of a key's length.
        given = hashlib.sha256(key.strip()).digest()
        # Every key is compared: stopping at a match would reveal which one it was.
        matches = [hmac.compare_digest(given, digest) for _, digest in self._keys]
        if scheme.lower() != b"bearer" or not any(matches):
            return None
        return self._callers[self._keys[matches.index(True)][0]]


def read_key_file(path: Path) -> tuple[ApiKey, ...]:
    """Lines ``name:key``, or ``name:sha256:<64 hexadecimal digits>``; ``#`` begins a comment line.

    After the name may stand limits: ``name sequences=16 requests=64 tokens-per-minute=100000:key``.
    Several lines may have one name; what one of them limits holds for all.

    Raises :class:`~vmserve.errors.ConfigurationError`, which never shows a key.
    """
    lines = read_text(path, "api_key_file").splitlines()
    warn_if_shared(path, "api_key_file")
    keys = [
        _parse(path, number, line.strip())
        for number, line in enumerate(lines, start=1)
        if line.strip() and not line.strip().startswith("#")
    ]
    if not keys:
        raise ConfigurationError(f"api_key_file: {path} has no key: write lines name:key")
    limits: dict[str, KeyLimits] = {}
    for key in keys:
        known = limits.setdefault(key.name, KeyLimits())
        limits[key.name] = known.or_else(key.limits)
        if key.limits.or_else(known) != limits[key.name]:
            raise ConfigurationError(
                f"api_key_file: lines of {key.name!r} in {path} give different limits: write each "
                "limit once"
            )
    return tuple(ApiKey(key.name, key.digest, limits[key.name]) for key in keys)


def _parse(path: Path, number: int, line: str) -> ApiKey:
    # Stripped, as what comes in a header is: "name: key" is natural to write.
    who, key = (part.strip() for part in line.partition(":")[::2])
    kind, _, digest = key.partition(":")
    where = f"api_key_file: line {number} of {path}"
    name, limits = _parse_limits(who, where)
    if not (name and key) or len(name) > _MAX_NAME_CHARS or not name.isprintable():
        raise ConfigurationError(
            f"{where} is not name:key with a name of 1 to {_MAX_NAME_CHARS} characters"
        )
    if kind != "sha256":
        return ApiKey.of(name, key, limits)
    if len(digest) != _DIGEST_CHARS or not set(digest.lower()) <= set("0123456789abcdef"):
        raise ConfigurationError(f"{where}: sha256: must be followed by 64 hexadecimal digits")
    return ApiKey(name, digest.lower(), limits)


def _parse_limits(who: str, where: str) -> tuple[str, KeyLimits]:
    """The name, and the limits that follow it: words with a ``=``, but for the first word."""
    words = who.split()
    given: dict[str, int] = {}
    while len(words) > 1 and "=" in words[-1]:
        option, _, number = words.pop().partition("=")
        name = option.replace("-", "_")
        if name not in _LIMITS or name in given:
            raise ConfigurationError(
                f"{where}: {option}= is no limit, or is given twice; there are "
                f"{', '.join(each.replace('_', '-') for each in _LIMITS)}"
            )
        if not (number.isascii() and number.isdigit()) or int(number) < 1:
            raise ConfigurationError(f"{where}: {option}={number[:20]} is not a number from 1 on")
        given[name] = int(number)
    return (" ".join(words) if given else who), KeyLimits(**given)
