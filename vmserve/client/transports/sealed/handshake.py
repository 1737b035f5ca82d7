"""How a server and an engine prove to each other that both know a key, and get keys of a session.

Server: hello (version, ephemeral X25519 key). Engine: hello. Server: proof. Engine: verdict and
proof. Both hellos have one fixed length, so that nothing that a stranger sends is parsed. Proofs
and keys are HKDF-SHA256 of what the ephemeral keys agree on, salted with the shared key, for both
hellos and the prover's role: none can be replayed or sent back. Whoever learns the shared key
later cannot decrypt what was recorded.
"""

from __future__ import annotations

import enum
import hmac
import socket
import struct
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from vmserve.errors import ConfigurationError, VmserveError
from vmserve.system.files import warn_if_shared
from vmserve.version import __version__

__all__ = [
    "HANDSHAKE_SECONDS",
    "CutShortError",
    "HandshakeError",
    "SessionKeys",
    "TakenError",
    "Verdict",
    "greet_engine",
    "greet_server",
    "read_key",
]

#: Version that changes with messages or frames.
PROTOCOL = 2
#: Seconds of the whole handshake, for both sides together.
HANDSHAKE_SECONDS = 5.0
_SHORTEST_KEY = 16
_LONGEST_KEY = 4096

_MAGIC = b"vmserve\0"
#: Magic, protocol, version of vmserve, ephemeral key.
_HELLO = struct.Struct(">8sH32s32s")
_PROOF_BYTES = 32


class HandshakeError(VmserveError):
    """The other side cannot be talked to; the message says why, and names no secret."""


class CutShortError(HandshakeError):
    """The other side ended the connection before it said anything that can be understood."""


class TakenError(HandshakeError):
    """The engine serves another server."""


class Verdict(enum.IntEnum):
    """What the engine says to a server's proof."""

    WELCOME = 0
    TAKEN = 1
    WRONG_KEY = 2


@dataclass(frozen=True, slots=True)
class SessionKeys:
    """Keys of the frames of one connection, for each direction."""

    to_engine: bytes
    from_engine: bytes


def read_key(path: Path, option: str) -> bytes:
    """Read a shared key: the file's text without white space around it.

    Raises :class:`~vmserve.errors.ConfigurationError`, which never shows the key.
    """
    try:
        with path.open("rb") as file:
            key = file.read(_LONGEST_KEY + 1).strip()
    except OSError as error:
        raise ConfigurationError(f"{option}: cannot read {path}: {error.strerror}") from error
    if not _SHORTEST_KEY <= len(key) <= _LONGEST_KEY:
        raise ConfigurationError(
            f"{option}: the key in {path} must have {_SHORTEST_KEY} to {_LONGEST_KEY} bytes: make "
            "one with `openssl rand -hex 32`"
        )
    warn_if_shared(path, option)
    return key


def greet_engine(sock: socket.socket, key: bytes) -> SessionKeys:
    """Do the server's part on a connected socket. Raises :class:`HandshakeError`."""
    stream = _Deadline(sock, "the engine")
    ephemeral = X25519PrivateKey.generate()
    ours = _hello(ephemeral)
    stream.send(ours)
    theirs = stream.receive(_HELLO.size)
    _check_hello(theirs, "the engine")
    agreed = _Agreed(key, ephemeral, theirs, ours + theirs)
    stream.send(agreed.derive(b"server"))
    [code] = stream.receive(1)
    proof = stream.receive(_PROOF_BYTES)
    if code == Verdict.WRONG_KEY:
        raise HandshakeError("the engine has another key: give both sides the same key file")
    if not hmac.compare_digest(proof, agreed.derive(b"engine" + bytes([code]))):
        raise HandshakeError("the engine does not know the key: it may be an impostor")
    if code == Verdict.TAKEN:
        raise TakenError("the engine serves another server; an engine has one at a time")
    return agreed.session()


def greet_server(
    sock: socket.socket,
    key: bytes,
    claim: Callable[[], bool],
    release: Callable[[], None],
    heard: Callable[[], None] = lambda: None,
) -> SessionKeys:
    """Do the engine's part on an accepted socket. ``heard`` is called when the server has begun.

    ``claim`` is asked, once the server has proved that it knows the key, whether it may have the
    engine; ``release`` is called if it went away before that. Raises :class:`HandshakeError`
    and :class:`TakenError`.
    """
    stream = _Deadline(sock, "the server")
    theirs = stream.receive(_HELLO.size)
    heard()
    if not theirs.startswith(_MAGIC):
        raise HandshakeError("what connected is no vmserve server")
    ephemeral = X25519PrivateKey.generate()
    ours = _hello(ephemeral)
    stream.send(ours)  # also to another version: each side says so
    _check_hello(theirs, "the server")
    agreed = _Agreed(key, ephemeral, theirs, theirs + ours)
    proof = stream.receive(_PROOF_BYTES)
    if not hmac.compare_digest(proof, agreed.derive(b"server")):
        stream.send(bytes([Verdict.WRONG_KEY]) + bytes(_PROOF_BYTES))
        raise HandshakeError("the server has another key: give both sides the same key file")
    verdict = Verdict.WELCOME if claim() else Verdict.TAKEN
    try:
        stream.send(bytes([verdict]) + agreed.derive(b"engine" + bytes([verdict])))
    except BaseException:
        if verdict is Verdict.WELCOME:
            release()
        raise
    if verdict is Verdict.TAKEN:
        raise TakenError("refused: this engine serves another server")
    return agreed.session()


def _hello(ephemeral: X25519PrivateKey) -> bytes:
    public = ephemeral.public_key().public_bytes_raw()
    return _HELLO.pack(_MAGIC, PROTOCOL, __version__.encode()[:32], public)


def _check_hello(data: bytes, whose: str) -> None:
    magic, protocol, version, _ = _HELLO.unpack(data)
    if magic != _MAGIC:
        raise HandshakeError(f"{whose} is no vmserve: something else listens there")
    theirs = version.rstrip(b"\0").decode("ascii", "replace")
    if (protocol, theirs) != (PROTOCOL, __version__[:32]):
        shown = "".join(each if each.isprintable() else "?" for each in theirs)
        raise HandshakeError(
            f"{whose} is vmserve {shown} (protocol {protocol}), this is {__version__} (protocol "
            f"{PROTOCOL}): install the same version on both machines"
        )


class _Agreed:
    """What both sides can compute, and nobody else, once each has the other's hello."""

    def __init__(
        self, key: bytes, ephemeral: X25519PrivateKey, their_hello: bytes, hellos: bytes
    ) -> None:
        *_, public = _HELLO.unpack(their_hello)
        try:
            self._shared = ephemeral.exchange(X25519PublicKey.from_public_bytes(public))
        except ValueError as error:  # a point with which all agree on the same
            raise HandshakeError("the other side sent a key that is none") from error
        self._key = key
        self._hellos = hellos

    def derive(self, label: bytes) -> bytes:
        """32 bytes for one purpose."""
        info = b"vmserve " + label + b"\0" + self._hellos
        derived: bytes = HKDF(SHA256(), _PROOF_BYTES, self._key, info).derive(self._shared)
        return derived

    def session(self) -> SessionKeys:
        return SessionKeys(self.derive(b"frames to engine"), self.derive(b"frames from engine"))


class _Deadline:
    """Sends and receives on a socket until one deadline for all."""

    def __init__(self, sock: socket.socket, whose: str) -> None:
        self._sock = sock
        self._whose = whose
        self._end = time.monotonic() + HANDSHAKE_SECONDS

    def _arm(self) -> None:
        left = self._end - time.monotonic()
        if left <= 0:
            raise TimeoutError
        self._sock.settimeout(left)

    def send(self, data: bytes) -> None:
        try:
            self._arm()
            self._sock.sendall(data)
        except OSError as error:
            raise self._failure(error) from error

    def receive(self, num_bytes: int) -> bytes:
        data = b""
        try:
            while len(data) < num_bytes:
                self._arm()
                more = self._sock.recv(num_bytes - len(data))
                if not more:
                    raise ConnectionResetError
                data += more
                if not _MAGIC.startswith(data[: len(_MAGIC)]) and num_bytes == _HELLO.size:
                    raise HandshakeError(f"{self._whose} does not speak vmserve's protocol")
        except OSError as error:
            raise self._failure(error) from error
        return data

    def _failure(self, error: OSError) -> HandshakeError:
        if isinstance(error, TimeoutError):
            return HandshakeError(
                f"{self._whose} did not answer within {HANDSHAKE_SECONDS:g} s: is it vmserve?"
            )
        if isinstance(error, ConnectionError):
            return CutShortError(
                f"{self._whose} closed the connection during the handshake: too many others "
                "connect to it, or it is no vmserve"
            )
        return HandshakeError(f"the connection failed: {error.strerror or error}")
