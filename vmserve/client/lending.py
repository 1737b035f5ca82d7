"""Lend the memory of one pool to the engines of several clients.

:class:`~vmserve.pool.shares.Shares` decides. :class:`KVPool` sends its orders to the engines, and
passes on what they answer.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass

from vmserve.client.client import Client
from vmserve.client.messages import Lend, MemoryReport
from vmserve.errors import ConfigurationError, EngineDeadError
from vmserve.numbers.sizes import format_size, parse_size
from vmserve.options import rules
from vmserve.pool.shares import Borrower, Order, Shares

__all__ = ["KVPool", "PoolMember"]

logger = logging.getLogger(__name__)

#: Seconds that a new member waits for others to give up what its floor needs.
_JOIN_SECONDS = 30.0


@dataclass(frozen=True, slots=True)
class PoolMember:
    """How a member of a pool stands. Sizes in use are as its engine last reported them.

    ``granted_bytes``: what it may have committed; the sum over all members never exceeds the pool.
    ``wanted_bytes``: what it would like to have. ``num_recalls``: how often it was asked to give
    something back, ``recalled_bytes``: what it gave back. ``num_needs``: how often requests of it
    were short of memory, ``waited_seconds``: for how long.
    """

    name: str
    weight: float
    floor_bytes: int
    cap_bytes: int
    granted_bytes: int
    committed_bytes: int
    used_bytes: int
    wanted_bytes: int
    is_short: bool
    is_idle: bool
    num_recalls: int
    recalled_bytes: int
    num_needs: int
    waited_seconds: float


class _Loan:
    """One client's part in a pool."""

    def __init__(self, pool: KVPool, name: str, client: Client, least_bytes: int) -> None:
        self._pool = pool
        self.name = name
        self.client = client
        #: Least that a floor may be, in bytes.
        self.least_bytes = least_bytes
        #: Future that is done when the floor is granted.
        self.granted: Future[None] = Future()
        self.short_since: float | None = None
        self.waited_seconds = 0.0

    def report(self, report: MemoryReport) -> None:
        self._pool.report(self, report)

    def lost(self) -> None:
        self._pool.lost(self)

    def revived(self) -> None:
        self._pool.revived(self)

    def is_short(self, member: Borrower) -> None:
        """Measure how long it is short."""
        now = time.monotonic()
        if self.short_since is not None:
            self.waited_seconds += now - self.short_since
        self.short_since = now if member.needs else None


class KVPool:
    """Memory that the KV caches of several models share: bytes, of which each takes what it needs.

    What one model does not use, another can have; what it caches is evicted for it, and under
    pressure requests are preempted, so that models share by weight and none falls below its floor.

        pool = KVPool("4GiB")
        with LLM("a", kv_pool=pool) as first, LLM("b", kv_pool=pool, kv_weight=2) as second:
            ...

    Any thread may call it. On a GPU each process has a context of its own besides.

    Raises :class:`~vmserve.errors.ConfigurationError` for what is no size.
    """

    def __init__(self, size: int | str) -> None:
        self._shares = Shares(parse_size(size, "size"))
        self._loans: dict[str, _Loan] = {}
        self._lock = threading.RLock()
        self._outbox: deque[Order] = deque()
        #: Whether this thread sends.
        self._sending = threading.local()

    @property
    def size_bytes(self) -> int:
        return self._shares.size

    @property
    def free_bytes(self) -> int:
        """Bytes that nobody was granted."""
        with self._lock:
            return max(0, self._shares.free)

    def __contains__(self, name: object) -> bool:
        return name in self._loans

    def state(self) -> list[PoolMember]:
        """How each member stands, in order of joining."""
        with self._lock:
            return [self._row(member) for member in self._shares.members.values()]

    def _row(self, member: Borrower) -> PoolMember:
        loan, holding = self._loans[member.name], member.holding
        loan.is_short(member)
        return PoolMember(
            member.name,
            member.weight,
            member.floor,
            member.cap,
            member.granted,
            holding.committed_bytes,
            holding.used_bytes,
            holding.wanted_bytes,
            member.needs,
            holding.is_idle,
            member.num_recalls,
            member.recalled_bytes,
            member.num_needs,
            loan.waited_seconds,
        )

    # -- members ------------------------------------------------------------------------

    @classmethod
    async def around(cls, client: Client, name: str) -> KVPool:
        """Make a pool of the memory that the engine of ``client`` has for itself.

        The engine goes on meanwhile. Raises :class:`~vmserve.errors.ConfigurationError` for one
        whose memory cannot be lent, and :class:`~vmserve.errors.EngineDeadError`.
        """
        limit_bytes, least_bytes = await client.ask("kv_bounds")
        client.borrow(least_bytes)
        pool = cls(limit_bytes)
        with pool._lock:
            pool._loans[name] = client.lender = _Loan(pool, name, client, least_bytes)
            pool._outbox += pool._shares.adopt(name, floor=least_bytes)
        pool._deliver()
        return pool

    def unused_name(self, name: str) -> str:
        """``name``, with a number if a member has it."""
        names = (f"{name}-{number}" for number in itertools.count(2))
        return next(each for each in itertools.chain([name], names) if each not in self)

    async def join(
        self,
        client: Client,
        name: str,
        *,
        weight: float = 1.0,
        floor: int | str | None = None,
        cap: int | str | None = None,
        pinned: Sequence[int] = (),
        timeout: float = _JOIN_SECONDS,
    ) -> None:
        """Lend memory to a client's engine; wait until others have given up what its floor needs.

        ``floor``: what it always has; at least, and by default, what its longest sequence needs
        besides its pinned prefixes. ``cap``: the most that it may have (default: the whole pool).
        ``pinned``: tokens of each prefix that will be pinned, besides those that were before.

        Raises :class:`~vmserve.errors.ConfigurationError` for a name in use, for floors that do not
        fit, and if others do not give their memory back in ``timeout`` seconds.
        """
        await client.start()
        least = await client.least_kv_bytes(pinned)
        with self._entered(client, name, least, weight, floor, cap, timeout) as granted:
            await asyncio.wait_for(asyncio.wrap_future(granted), timeout)

    def join_now(
        self,
        client: Client,
        name: str,
        *,
        weight: float = 1.0,
        floor: int | str | None = None,
        cap: int | str | None = None,
        timeout: float = _JOIN_SECONDS,
    ) -> None:
        """:meth:`join` for callers without an event loop."""
        least = client.resolved.kv_limit_bytes
        with self._entered(client, name, least, weight, floor, cap, timeout) as granted:
            granted.result(timeout)

    @contextlib.contextmanager
    def _entered(
        self,
        client: Client,
        name: str,
        least_bytes: int,
        weight: float,
        floor: int | str | None,
        cap: int | str | None,
        timeout: float,
    ) -> Iterator[Future[None]]:
        """Enter a member and wait for its floor in the block; it leaves if that does not come."""
        loan = self._enter(client, name, least_bytes, weight, floor, cap)
        try:
            yield loan.granted
        except TimeoutError:
            raise self._refusal(loan, timeout) from None
        except BaseException:
            self.leave(name)
            raise

    def _enter(
        self,
        client: Client,
        name: str,
        least_bytes: int,
        weight: float,
        floor: int | str | None,
        cap: int | str | None,
    ) -> _Loan:
        rules.check({"lent_name": name, "lent_memory": client.facts.kv_cache_memory})
        floor_bytes = _raised(name, floor, least_bytes)
        cap_bytes = None if cap is None else parse_size(cap, "kv_cap")
        loan = _Loan(self, name, client, least_bytes)
        with self._lock:
            orders = self._shares.join(name, weight=weight, floor=floor_bytes, cap=cap_bytes)
            self._loans[name] = loan
            client.lender = loan
            self._outbox += orders
        self._deliver()
        return loan

    def _refusal(self, loan: _Loan, timeout: float) -> ConfigurationError:
        """The error of a member that did not get its floor, which leaves."""
        with self._lock:
            held = ", ".join(
                f"{format_size(member.granted)} ({member.name})"
                for member in self._shares.members.values()
                if member.name != loan.name
            )
            needed = self._shares.members[loan.name].floor
        self.leave(loan.name)
        return ConfigurationError(
            f"{loan.name} needs {format_size(needed)} of the pool of "
            f"{format_size(self.size_bytes)}, and others have not given it back within "
            f"{timeout:g} s: {held}"
        )

    def leave(self, name: str) -> None:
        """Take everything back from an engine that has ended. Unknown names are ignored."""
        with self._lock:
            loan = self._loans.pop(name, None)
            if loan is None:
                return
            loan.client.lender = None
            self._outbox += self._shares.leave(name)
        self._deliver()

    def set(
        self,
        name: str,
        *,
        weight: float | None = None,
        floor: int | str | None = None,
        cap: int | str | None = None,
    ) -> None:
        """Change a member's terms while it serves.

        Raises ``KeyError`` for an unknown name, and :class:`~vmserve.errors.ConfigurationError` for
        floors that do not fit, a floor below what the longest sequence needs, and a cap below the
        floor or below what requests use now.
        """
        with self._lock:
            loan = self._loans[name]
            floor_bytes = None if floor is None else parse_size(floor, "kv_floor")
            if floor_bytes is not None and floor_bytes < loan.least_bytes:
                raise ConfigurationError(_too_low(name, floor_bytes, loan.least_bytes))
            self._outbox += self._shares.change(
                name,
                weight=weight,
                floor=floor_bytes,
                cap=None if cap is None else parse_size(cap, "kv_cap"),
            )
        self._deliver()

    def least_bytes(self, name: str) -> int:
        """What the longest sequence and the pinned prefixes of a member need."""
        return self._loans[name].least_bytes

    def check(
        self,
        name: str,
        least_bytes: int,
        *,
        weight: float,
        floor: int | str | None,
        cap: int | str | None,
        size: int | str | None = None,
    ) -> None:
        """Check the terms of one that is no member now, and needs ``least_bytes`` when it is.

        ``size``: what the pool is going to have. Whether the floor fits next to those of others is
        known when it joins. Raises :class:`~vmserve.errors.ConfigurationError`.
        """
        pool = Shares(self.size_bytes if size is None else parse_size(size, "size"))
        cap_bytes = None if cap is None else parse_size(cap, "kv_cap")
        pool.join(name, weight=weight, floor=_raised(name, floor, least_bytes), cap=cap_bytes)

    def resize(self, size: int | str) -> None:
        """Change the pool's size while it is used. Less holds when the members have answered.

        Raises :class:`~vmserve.errors.ConfigurationError` for less than floors and running requests
        take.
        """
        with self._lock:
            self._outbox += self._shares.resize(parse_size(size, "size"))
        self._deliver()

    # -- what engines report ----------------------------------------------------------------

    def report(self, loan: _Loan, report: MemoryReport) -> None:
        with self._lock:
            if self._loans.get(loan.name) is not loan:
                return
            self._outbox += self._shares.report(
                loan.name, report.holding, is_answer=report.is_answer
            )
            loan.is_short(self._shares.members[loan.name])
        self._deliver()

    def lost(self, loan: _Loan) -> None:
        with self._lock:
            if self._loans.get(loan.name) is loan:
                self._outbox += self._shares.lost(loan.name)
        self._deliver()

    def revived(self, loan: _Loan) -> None:
        with self._lock:
            if self._loans.get(loan.name) is loan:
                self._outbox += self._shares.revived(loan.name)
        self._deliver()

    def _deliver(self) -> None:
        """Send the orders, without the lock: an idle engine is served by this very thread."""
        if getattr(self._sending, "is_on", False):
            return  # what an engine answered meanwhile is sent by the loop below
        self._sending.is_on = True
        try:
            self._send_all()
        finally:
            self._sending.is_on = False

    def _send_all(self) -> None:
        while True:
            with self._lock:
                if not self._outbox:
                    return
                order = self._outbox.popleft()
                loan = self._loans.get(order.name)
            if loan is None:
                continue
            with contextlib.suppress(EngineDeadError):  # it is reported as lost
                loan.client.lend(Lend(order.limit_bytes, order.reclaim))
            with self._lock:
                if not loan.granted.done():
                    loan.granted.set_result(None)


def _raised(name: str, floor: int | str | None, least_bytes: int) -> int:
    """``floor``, or ``least_bytes`` if that is more or there is none."""
    floor_bytes = least_bytes if floor is None else parse_size(floor, "kv_floor")
    if floor_bytes < least_bytes:
        logger.warning("%s: it has that", _too_low(name, floor_bytes, least_bytes))
    return max(floor_bytes, least_bytes)


def _too_low(name: str, floor_bytes: int, least_bytes: int) -> str:
    """What is said of a floor with which a model could not serve its longest request."""
    return (
        f"{name}: a floor of {format_size(floor_bytes)} does not hold its longest sequence and "
        f"pinned prefixes: {format_size(least_bytes)} or more"
    )
