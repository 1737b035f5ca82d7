"""How a server and an engine prove to each other that both know a key.

Server: hello (version, nonce). Engine: hello. Server: proof. Engine: verdict and proof. Both hellos
have one fixed length, so that nothing that a stranger sends is parsed. A proof is an HMAC of both
hellos under the prover's role, so that none can be replayed or sent back.
"""

from __future__ import annotations

import enum
import hmac
import secrets
import socket
import struct
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from vmserve.errors import ConfigurationError, VmserveError
from vmserve.version import __version__

__all__ = [
    "HANDSHAKE_SECONDS",
    "HandshakeError",
    "SessionKeys",
    "TakenError",
    "Verdict",
    "greet_engine",
    "greet_server",
    "read_key",
]

#: Changes when messages or frames do.
PROTOCOL = 1
#: Both sides have so long in all.
HANDSHAKE_SECONDS = 5.0
_SHORTEST_KEY = 16
_LONGEST_KEY = 4096

_MAGIC = b"vmserve\0"
#: Magic, protocol, version of vmserve, nonce.
_HELLO = struct.Struct(">8sH32s32s")
_PROOF_BYTES = 32
_DIGEST = "sha256"


class HandshakeError(VmserveError):
    """The other side cannot be talked to; the message says why, and names no secret."""


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
    return key


def greet_engine(sock: socket.socket, key: bytes) -> SessionKeys:
    """Do the server's part on a connected socket. Raises :class:`HandshakeError`."""
    stream = _Deadline(sock, "the engine")
    ours = _hello()
    stream.send(ours)
    theirs = stream.receive(_HELLO.size)
    _check_hello(theirs, "the engine")
    transcript = ours + theirs
    stream.send(_mac(key, b"server", transcript))
    [code] = stream.receive(1)
    proof = stream.receive(_PROOF_BYTES)
    if code == Verdict.WRONG_KEY:
        raise HandshakeError("the engine has another key: give both sides the same key file")
    if not hmac.compare_digest(proof, _mac(key, b"engine" + bytes([code]), transcript)):
        raise HandshakeError("the engine does not know the key: it may be an impostor")
    if code == Verdict.TAKEN:
        raise TakenError("the engine serves another server; an engine has one at a time")
    return _session(key, transcript)


def greet_server(
    sock: socket.socket, key: bytes, claim: Callable[[], bool], release: Callable[[], None]
) -> SessionKeys:
    """Do the engine's part on an accepted socket.

    ``claim`` is asked, once the server has proved that it knows the key, whether it may have the
    engine; ``release`` is called if it went away before it heard so. Raises :class:`HandshakeError`
    and :class:`TakenError`.
    """
    stream = _Deadline(sock, "the server")
    theirs = stream.receive(_HELLO.size)
    if not theirs.startswith(_MAGIC):
        raise HandshakeError("what connected is no vmserve server")
    ours = _hello()
    stream.send(ours)  # also to another version: each side says so
    _check_hello(theirs, "the server")
    transcript = theirs + ours
    proof = stream.receive(_PROOF_BYTES)
    if not hmac.compare_digest(proof, _mac(key, b"server", transcript)):
        stream.send(bytes([Verdict.WRONG_KEY]) + bytes(_PROOF_BYTES))
        raise HandshakeError("the server has another key: give both sides the same key file")
    verdict = Verdict.WELCOME if claim() else Verdict.TAKEN
    try:
        stream.send(bytes([verdict]) + _mac(key, b"engine" + bytes([verdict]), transcript))
    except BaseException:
        if verdict is Verdict.WELCOME:
            release()
        raise
    if verdict is Verdict.TAKEN:
        raise TakenError("refused: this engine serves another server")
    return _session(key, transcript)


def _hello() -> bytes:
    return _HELLO.pack(_MAGIC, PROTOCOL, __version__.encode()[:32], secrets.token_bytes(32))


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


def _mac(key: bytes, label: bytes, transcript: bytes) -> bytes:
    return hmac.digest(key, b"vmserve " + label + b"\0" + transcript, _DIGEST)


def _session(key: bytes, transcript: bytes) -> SessionKeys:
    return SessionKeys(
        _mac(key, b"frames to engine", transcript), _mac(key, b"frames from engine", transcript)
    )


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
            return HandshakeError(
                f"{self._whose} closed the connection: is it vmserve of this version?"
            )
        return HandshakeError(f"the connection failed: {error.strerror or error}")
