"""The socket that a server listens on: made before anything that takes its time."""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import socket
import ssl
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from vmserve.errors import ConfigurationError, VmserveError
from vmserve.server.config import ServerConfig
from vmserve.server.limits import MAX_SEND_BYTES
from vmserve.system.hosts import warn_of_loopback

__all__ = [
    "ConnectionLimits",
    "bind",
    "cannot_bind",
    "check_certificate",
    "raise_descriptor_limit",
    "url_of",
]

#: Descriptors kept for everything but connections, or half of all where there are few.
_OTHER_DESCRIPTORS: Final = 256
#: Bound of the default, however many descriptors there are: each connection takes some kilobytes.
_MOST_CONNECTIONS: Final = 16_384


def raise_descriptor_limit() -> int:
    """Raise this process's limit of open files to what it may be, and return what it is.

    The soft limit is often 1,024 for the sake of ``select``, which nothing here uses.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        # Refused where the system's own maximum (fs.nr_open) was lowered since.
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]


@dataclass(frozen=True, slots=True)
class ConnectionLimits:
    """Connections open at once: in all, and from one address."""

    total: int
    per_address: int

    @classmethod
    def of(cls, config: ServerConfig) -> ConnectionLimits:
        """The limits asked for, or those that follow from how many files may be open.

        Raises :class:`~vmserve.errors.ConfigurationError` for more than those.
        """
        descriptors, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        room = descriptors - min(_OTHER_DESCRIPTORS, descriptors // 2)
        total = config.max_connections or min(room, _MOST_CONNECTIONS)
        if total > room:
            raise ConfigurationError(
                f"max_connections: {total} are more than the limit of {descriptors} open files "
                f"leaves room for, {room}: raise it (ulimit -n), or lower --max-connections"
            )
        return cls(total, config.max_connections_per_address or max(1, total // 4))


def bind(config: ServerConfig) -> socket.socket:
    """A bound socket, so that a port in use is known before a model is loaded.

    It does not listen yet: until the server is ready, connections are refused.

    Raises :class:`~vmserve.errors.VmserveError`.
    """
    if config.uds is not None:
        return _bind_unix(Path(config.uds))
    family = socket.AF_INET6 if ":" in config.host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    # Connections inherit it, and asyncio sets it only where the protocol is named. Without it a
    # reply of two writes waits 40 ms for the client's acknowledgement of the first one.
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, MAX_SEND_BYTES)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((config.host, config.port))
    except (OSError, UnicodeError) as error:
        listener.close()
        raise cannot_bind(f"{config.host}:{config.port}", error) from error
    warn_of_loopback(config.host, listener.getsockname()[0], "give --host an address, or 0.0.0.0")
    return listener


def _bind_unix(path: Path) -> socket.socket:
    try:
        _remove_stale(path)
    except OSError as error:
        raise cannot_bind(str(path), error) from error
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        previous = os.umask(0o177)
        try:
            listener.bind(str(path))
        finally:
            os.umask(previous)
    except OSError as error:
        listener.close()
        raise cannot_bind(str(path), error) from error
    return listener


def _remove_stale(path: Path) -> None:
    """Remove a socket that no one listens on any more; anything else is left alone."""
    try:
        if not stat.S_ISSOCK(path.stat().st_mode):
            raise ConfigurationError(
                f"uds: {path} is there and no socket: choose another path, or remove it"
            )
    except FileNotFoundError:
        return
    with contextlib.closing(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)) as probe:
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            path.unlink()


def cannot_bind(where: str, error: OSError | UnicodeError) -> VmserveError:
    """The error for whoever asked for the address."""
    if isinstance(error, OSError) and error.errno == errno.EADDRINUSE:
        return VmserveError(f"{where} is in use by another process: choose another --port or --uds")
    # Python's own errors (a path of more than 107 bytes) have a text and no number.
    reason = (error.strerror or str(error)) if isinstance(error, OSError) else "not a host name"
    return ConfigurationError(f"cannot listen on {where}: {reason}")


def check_certificate(config: ServerConfig) -> None:
    """Raises :class:`~vmserve.errors.ConfigurationError` for files that TLS cannot use."""
    if config.ssl_certfile is None:
        return
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(
            config.ssl_certfile, config.ssl_keyfile
        )
    except OSError as error:  # an ssl.SSLError is one
        raise ConfigurationError(
            f"ssl_certfile: {config.ssl_certfile} and {config.ssl_keyfile} cannot be used: "
            f"{error.strerror or 'not a certificate and its key in PEM form'}"
        ) from error


def url_of(listener: socket.socket, *, tls: bool = False) -> str:
    """Where clients reach ``listener``."""
    if listener.family == socket.AF_UNIX:
        return f"unix:{listener.getsockname()}"
    scheme = "https" if tls else "http"
    host, port = listener.getsockname()[:2]
    return f"{scheme}://{f'[{host}]' if listener.family == socket.AF_INET6 else host}:{port}"
