"""How ranks that torchrun or srun has started find rank 0, and which connections they have.

The launcher's store has the address at which rank 0 listens. Each rank opens a connection for what
it receives, and one for each driver of its memory.
"""

from __future__ import annotations

import os
import secrets
import selectors
import socket
import time
from collections import deque
from datetime import timedelta
from typing import Any

import torch.distributed as distributed

from vmserve.errors import DriverError
from vmserve.parallel.launched import Placement
from vmserve.parallel.link import TcpLink
from vmserve.system.hosts import warn_of_loopback

__all__ = ["Host", "Visitor", "local_store", "ranks_store"]

_distributed: Any = distributed
_KEY = "rank-0"
#: Seconds in which all ranks have to come.
_SECONDS = 600
#: Seconds in which a rank that has begun its hello has to end it.
_HELLO_SECONDS = 5.0
#: Most connections that have not said who they are. One more ends the oldest.
_MOST_SILENT = 64


def local_store() -> tuple[Any, int]:
    """A store for ranks of this host, and its port."""
    store = _distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    return store, store.port


def ranks_store(port: int) -> Any:
    """The same for another rank."""
    return _distributed.TCPStore("127.0.0.1", port, is_master=False)


def _launcher_store(placement: Placement) -> Any:
    # torchrun has a store already, which outlives a start of the ranks.
    given = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    try:
        store = _distributed.TCPStore(
            placement.host,
            placement.port,
            is_master=placement.rank == 0 and not given,
            wait_for_workers=False,
            timeout=timedelta(seconds=_SECONDS),
        )
    except RuntimeError as error:
        raise DriverError(
            f"rank {placement.rank} of {placement.size} found no store at {placement.host}:"
            f"{placement.port} (MASTER_ADDR, MASTER_PORT): {error}"
        ) from error
    start = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return _distributed.PrefixStore(f"vmserve/{start}", store)


class Host:
    """Rank 0, to which the others come."""

    def __init__(self, placement: Placement) -> None:
        self.store = _launcher_store(placement)
        self.address = socket.gethostbyname(placement.host)
        self._size = placement.size
        self._token = secrets.token_hex(16)
        warn_of_loopback(placement.host, self.address, "set MASTER_ADDR to an address")
        self._listener = socket.create_server((self.address, 0))
        #: The listener, and connections that have said nothing, in the order in which they came.
        self._listener.setblocking(False)
        self._door = selectors.DefaultSelector()
        self._door.register(self._listener, selectors.EVENT_READ)
        self._silent: deque[socket.socket] = deque()
        #: Links that came before they were asked for.
        self._waiting: dict[tuple[str, int], TcpLink] = {}
        self.store.set(_KEY, f"{self._listener.getsockname()[1]} {self._token}")

    def accept(self, what: str, rank: int) -> TcpLink:
        """The connection of a rank; "orders" or "memory". No other rank's keeps it waiting."""
        end = time.monotonic() + _SECONDS
        while (what, rank) not in self._waiting:
            ready = self._door.select(max(0.0, end - time.monotonic()))
            if not ready:
                raise DriverError(
                    f"rank {rank} of {self._size} did not come within {_SECONDS} s: did it start?"
                )
            for key, _ in ready:
                if key.data is None:
                    self._admit()
                elif key.data in self._silent:
                    self._hear(self._dismiss(key.data))
        return self._waiting.pop((what, rank))

    def _admit(self) -> None:
        try:
            sock, _ = self._listener.accept()
        except (BlockingIOError, ConnectionError):
            return  # it has gone again
        self._silent.append(sock)
        self._door.register(sock, selectors.EVENT_READ, sock)
        if len(self._silent) > _MOST_SILENT:
            self._dismiss(self._silent[0]).close()

    def _dismiss(self, sock: socket.socket) -> socket.socket:
        """Return one of the silent connections, which nothing reads any more."""
        self._silent.remove(sock)
        self._door.unregister(sock)
        return sock

    def _hear(self, sock: socket.socket) -> None:
        """Keep the connection of a rank, end one of others."""
        link = TcpLink(sock)
        sock.settimeout(_HELLO_SECONDS)
        try:
            hello, _ = link.receive()
        except Exception:  # noqa: BLE001 - whatever a stranger sends
            hello = None
        match hello:
            case [str(token), str(kind), int(number)] if secrets.compare_digest(
                token.encode(), self._token.encode()
            ):
                sock.settimeout(None)
                self._waiting[kind, number] = link
            case _:
                link.close()

    def close(self) -> None:
        while self._silent:
            self._dismiss(self._silent[0]).close()
        self._door.close()
        self._listener.close()


class Visitor:
    """Another rank."""

    def __init__(self, placement: Placement) -> None:
        self.store = _launcher_store(placement)
        self._rank = placement.rank
        port, self._token = self.store.get(_KEY).decode().split()
        self._address = placement.host, int(port)

    def connect(self, what: str) -> TcpLink:
        link = TcpLink(socket.create_connection(self._address))
        link.send([self._token, what, self._rank])
        return link
