"""How ranks that torchrun or srun has started find rank 0, and which connections they have.

The launcher's store has the address at which rank 0 listens. Each rank opens a connection for what
it is told, and one for each driver of its memory.
"""

from __future__ import annotations

import os
import secrets
import socket
from datetime import timedelta
from typing import Any

import torch.distributed as distributed

from vmserve.errors import DriverError
from vmserve.parallel.launched import Placement
from vmserve.parallel.link import TcpLink

__all__ = ["Host", "Visitor", "local_store", "ranks_store"]

_distributed: Any = distributed
_KEY = "rank-0"
#: In which all ranks have to come.
_SECONDS = 600


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
        self._listener = socket.create_server((self.address, 0))
        self._listener.settimeout(_SECONDS)
        #: Those that came before they were asked for.
        self._waiting: dict[tuple[str, int], TcpLink] = {}
        self.store.set(_KEY, f"{self._listener.getsockname()[1]} {self._token}")

    def accept(self, what: str, rank: int) -> TcpLink:
        """The connection of a rank; "orders" or "memory"."""
        while (what, rank) not in self._waiting:
            try:
                sock, _ = self._listener.accept()
            except TimeoutError:
                raise DriverError(
                    f"rank {rank} of {self._size} did not come within {_SECONDS} s: did it start?"
                ) from None
            link = TcpLink(sock)
            hello, _ = link.receive()
            match hello:
                case [str(token), str(kind), int(number)] if secrets.compare_digest(
                    token, self._token
                ):
                    self._waiting[kind, number] = link
                case _:  # not of these ranks
                    link.close()
        return self._waiting.pop((what, rank))

    def close(self) -> None:
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
