"""Accept connections within limits, in total and by address; pause when the system has no room.

asyncio's own loop tries again at once when ``accept`` fails, as often as the backlog is long, and
logs each failure.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import ipaddress
import logging
import socket
import ssl
from collections import Counter
from collections.abc import Callable
from typing import Final

from vmserve.server.errors import ApiError
from vmserve.server.limits import HEAD_TIMEOUT_SECONDS
from vmserve.server.net.connection import GuardedProtocol, refusal
from vmserve.server.net.listen import ConnectionLimits

__all__ = ["Acceptor", "Tally", "counted_address"]

logger = logging.getLogger(__name__)

_BACKLOG: Final = 2048
#: Connections that are accepted before other work of the event loop has its turn.
_BATCH: Final = 64
#: Seconds for which nothing is accepted after the system had no room for a connection.
_PAUSE_SECONDS: Final = 1.0
_NO_ROOM: Final = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})
#: Failures of one connection, not of the listener (Linux passes pending network errors on).
_GONE: Final = (BlockingIOError, InterruptedError)


class Acceptor:
    """Accepts connections on ``listener`` and has each served by a new protocol.

    Beyond ``limits.total`` nothing is accepted until a connection ends: newcomers wait in the
    listener's backlog. One more than ``limits.per_address`` from an address is answered with 429.
    uvicorn treats it as one of its servers. Everything runs on the event loop.
    """

    def __init__(
        self,
        listener: socket.socket,
        make_protocol: Callable[[], GuardedProtocol],
        tls: ssl.SSLContext | None,
        limits: ConnectionLimits,
    ) -> None:
        self._listener = listener
        self._make_protocol = make_protocol
        self._tls = tls
        self._limits = limits
        self._loop = asyncio.get_running_loop()
        self._open: dict[GuardedProtocol, str] = {}
        self._by_address: Counter[str] = Counter()
        self._resuming: asyncio.TimerHandle | None = None
        self._is_full = False
        self._is_closed = False
        self._connecting: set[asyncio.Task[None]] = set()
        self._failed = Tally(self._loop, "cannot accept connections")
        self._full = Tally(self._loop, "no further connections are accepted for now")
        self._refused = Tally(self._loop, "connections refused")

    def listen(self) -> None:
        """Let the system queue connections. Raises :class:`OSError` if the port was taken."""
        self._listener.listen(_BACKLOG)
        self._listener.setblocking(False)

    def start(self) -> None:
        """Begin to accept with the next turn of the event loop."""
        self._loop.add_reader(self._listener, self._accept)

    def close(self) -> None:
        """Stop accepting; open connections stay."""
        self._is_closed = True
        self._stop()
        for tally in (self._failed, self._full, self._refused):
            tally.close()

    async def wait_closed(self) -> None:
        """Return at once: uvicorn waits for the connections itself."""

    def _stop(self) -> None:
        self._loop.remove_reader(self._listener)
        if self._resuming is not None:
            self._resuming.cancel()
            self._resuming = None

    def _resume(self) -> None:
        self._resuming = None
        self.start()

    def _accept(self) -> None:
        for _ in range(_BATCH):
            if len(self._open) >= self._limits.total:
                self._full.add(f"{len(self._open)} are open, the most (--max-connections)")
                self._is_full = True
                self._stop()
                return
            try:
                connection, peer = self._listener.accept()
            except _GONE:
                return
            except OSError as error:
                self._failed.add(
                    f"{error.strerror or error}; {len(self._open)} are open: raise the limit of "
                    "open files (ulimit -n), or lower --max-connections"
                )
                if error.errno in _NO_ROOM:
                    self._stop()
                    self._resuming = self._loop.call_later(_PAUSE_SECONDS, self._resume)
                    return
                continue
            self._take(connection, peer)

    def _take(self, connection: socket.socket, peer: object) -> None:
        connection.setblocking(False)
        address = counted_address(peer)
        if address and self._by_address[address] >= self._limits.per_address:
            self._refused.add(
                f"{address} has {self._limits.per_address} open, the most for one address "
                "(--max-connections-per-address)"
            )
            self._refuse(connection)
            return
        protocol = self._make_protocol()
        self._open[protocol] = address
        self._by_address[address] += 1
        protocol.on_lost = lambda: self._release(protocol)
        task = self._loop.create_task(self._connect(connection, protocol))
        self._connecting.add(task)
        task.add_done_callback(self._connecting.discard)

    async def _connect(self, connection: socket.socket, protocol: GuardedProtocol) -> None:
        try:
            await self._loop.connect_accepted_socket(
                lambda: protocol,
                connection,
                ssl=self._tls,
                ssl_handshake_timeout=None if self._tls is None else HEAD_TIMEOUT_SECONDS,
            )
        except OSError as error:  # of TLS: the protocol has never had a connection
            logger.debug("a connection failed: %s", error)
            self._release(protocol)

    def _release(self, protocol: GuardedProtocol) -> None:
        address = self._open.pop(protocol, None)
        if address is None:
            return
        self._by_address[address] -= 1
        if not self._by_address[address]:
            del self._by_address[address]
        if self._is_full and not self._is_closed:
            self._is_full = False
            self.start()

    def _refuse(self, connection: socket.socket) -> None:
        with connection:
            if self._tls is not None:
                return
            text = (
                f"Your address has {self._limits.per_address} connections open, the most for one "
                "address: close some, or reuse them."
            )
            with contextlib.suppress(OSError):
                connection.send(refusal(ApiError(429, text, headers={"retry-after": "1"})))
                # What has come already is read: with it unread, closing would send a reset.
                connection.recv(64 * 1024)


def counted_address(peer: object) -> str:
    """Return what connections are counted by: an IPv4 address, or an IPv6 network of 64 bits.

    A subscriber has all addresses of such a network. Loopback and Unix sockets give "" and are not
    counted: a reverse proxy may bring all clients through them.
    """
    if not isinstance(peer, tuple):
        return ""
    address = ipaddress.ip_address(peer[0].partition("%")[0])
    if isinstance(address, ipaddress.IPv6Address):
        address = address.ipv4_mapped or address
    if address.is_loopback:
        return ""
    if isinstance(address, ipaddress.IPv4Address):
        return str(address)
    return str(ipaddress.ip_network((address, 64), strict=False))


class Tally:
    """Log a frequent event at most once a second, with its count."""

    def __init__(self, loop: asyncio.AbstractEventLoop, what: str) -> None:
        self._loop = loop
        self._what = what
        self._why = ""
        self._count = 0
        self._timer: asyncio.TimerHandle | None = None

    def add(self, why: str) -> None:
        self._count += 1
        self._why = why
        if self._timer is None:
            self._log()

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _log(self) -> None:
        self._timer = None
        if self._count:
            times = f" ({self._count} times)" if self._count > 1 else ""
            logger.warning("%s%s: %s", self._what, times, self._why)
            self._count = 0
            self._timer = self._loop.call_later(1.0, self._log)
