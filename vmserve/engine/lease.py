"""The engine's part in a shared pool: what it may take, what it would like, what it gives back.

The pool (:mod:`vmserve.client.lending`) sends orders, which are carried out between two steps. The
engine rarely reports what it has and wants: when it becomes short or is not any more, and when
requests begin and end. It also reports when requests hold much more or less than was reported, and
when it can give back what it could not before.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from vmserve.errors import DriverError, OutOfMemoryError
from vmserve.pool.shares import Holding

if TYPE_CHECKING:
    from vmserve.engine.draft_model import DraftModel
    from vmserve.engine.pins import PinnedPrefixes
    from vmserve.memory.longest import LongestSequence
    from vmserve.memory.manager import MemoryManager
    from vmserve.scheduler.base import Scheduler

__all__ = ["Lease"]

logger = logging.getLogger(__name__)

#: Seconds that steps wait for requested memory before a sequence is preempted.
_WAIT_SECONDS = 0.05
#: Seconds that a request waits before it fails, if it needs more than the pool has lent.
_LONGEST_WAIT_SECONDS = 2.0
#: Looks per reading of statistics.
_LOOKS = 16
#: Age up to which the memory of requests is kept, in seconds: the next ones are likely to need it.
_LATELY_SECONDS = 1.0


class Lease:
    """The KV memory that an engine has from a pool; its own until the first order comes.

    ``drafting``: models that draft, whose KV caches have a part of it that stays as it is.
    """

    def __init__(
        self,
        memory: MemoryManager,
        scheduler: Scheduler,
        pins: PinnedPrefixes,
        longest: LongestSequence,
        clock: Callable[[], float],
        drafting: Sequence[DraftModel] = (),
    ) -> None:
        #: Whether the memory is a pool's.
        self.is_lent = False
        self._drafting = drafting
        self._memory = memory
        self._scheduler = scheduler
        self._pins = pins
        self._longest = longest
        self._clock = clock
        self._page_bytes = memory.layout.total_page_bytes
        #: Limits in bytes, and whether requests may be preempted for them; oldest first.
        self._orders: list[tuple[int, bool]] = []
        self._reported = Holding(0, 0, 0, 0, is_short=False, is_idle=True)
        self._news: list[tuple[Holding, bool]] = []
        #: Whether the last order could not be met.
        self._has_refused = False
        #: Time since which memory is under way: it was asked for, or some came and more is wanted.
        self._asked_at: float | None = None
        #: Time since which a request would have failed.
        self._stuck_at: float | None = None
        self._num_looks = 0
        #: Look until which memory is enough for the steps between two looks.
        self._next_look = 0
        #: Look at which statistics are read again.
        self._next_use = 0
        #: Most bytes that requests held in this stretch of time and in the one before.
        self._most_used = [0, 0]
        self._stretch_ends = 0.0

    @property
    def least_bytes(self) -> int:
        """What the longest sequence needs besides pinned prefixes and the draft model."""
        return self._longest.least_bytes(self._pins.num_pages) + self._draft_bytes

    # -- orders -------------------------------------------------------------------------

    @property
    def has_orders(self) -> bool:
        return bool(self._orders)

    def order(self, limit_bytes: int, *, reclaim: bool) -> None:
        """Note an order of the pool, for :meth:`obey`."""
        self.is_lent = True
        self._orders.append((limit_bytes, reclaim))

    def obey(self) -> None:
        """Carry out the orders. No step may be in flight."""
        while self._orders:
            limit_bytes, reclaim = self._orders.pop(0)
            before = self._limit_bytes
            self._take(limit_bytes, reclaim=reclaim)
            after = self._limit_bytes
            self._has_refused = after > limit_bytes
            reported = self._reported
            if after > before and reported.is_short:
                self._asked_at = self._clock()  # more may come
            self._tell(self._holding(reported.wanted_bytes, reported.is_short), is_answer=True)

    def _take(self, limit_bytes: int, *, reclaim: bool) -> None:
        if limit_bytes < self._limit_bytes:
            while reclaim and self._used_bytes() > limit_bytes and self._scheduler.give_way():
                pass
            kept = self._used_bytes() if reclaim else self._kept_bytes(self._used_bytes())
            limit_bytes = min(self._limit_bytes, max(limit_bytes, kept, self.least_bytes))
        try:
            self._memory.set_limit(limit_bytes - self._draft_bytes)
        except (OutOfMemoryError, DriverError) as error:
            logger.warning("the pool keeps its pages for now: %s", error)

    # -- what steps ask -----------------------------------------------------------------

    def may_come(self, *, is_last_resort: bool = False) -> bool:
        """Whether a step that has no memory should wait, because some may come.

        ``is_last_resort``: otherwise a request fails.
        """
        if not self.is_lent:
            return False
        now = self._clock()
        if self._asked_at is None:
            self._asked_at = now
        if not is_last_resort:
            return now < self._asked_at + _WAIT_SECONDS
        if self._stuck_at is None:
            self._stuck_at = now
        return now < self._stuck_at + _LONGEST_WAIT_SECONDS

    # -- reports to the pool --------------------------------------------------------------

    def take_news(self, *, is_idle: bool) -> list[tuple[Holding, bool]]:
        """What to report to the pool since the last call, and whether it answers an order."""
        if not self.is_lent:
            return []
        self._look(is_idle)
        news, self._news = self._news, []
        return news

    def _look(self, is_idle: bool) -> None:
        reported = self._reported
        # Of the last step, however often its engine looks before the next one.
        starved = self._scheduler.awaits_memory
        if not starved:
            self._stuck_at = None
        if is_idle != reported.is_idle:
            self._asked_at = self._stuck_at = None
            self._tell(self._holding(0, is_short=False, is_idle=is_idle))
            self._next_use = 0  # requests that have just begun hold nothing yet
            return
        self._num_looks += 1
        if reported.committed_bytes > self._limit_bytes:
            self._tell_if_lower()
        is_calm = not (starved or reported.is_short or self._scheduler.num_waiting)
        if is_idle or (is_calm and self._num_looks < self._next_look):
            return
        with self._memory.without_waiting():
            available = self._memory.available_pages()
        margin = self._margin
        if available > 8 * margin:
            self._next_look = self._num_looks + 4
        if starved or available < margin or self._scheduler.num_waiting:
            self._look_for_shortage(available, margin, starved)
        elif reported.is_short:
            self._asked_at = None
            self._tell(self._holding(0, is_short=False))
        elif self._num_looks >= self._next_use:
            self._next_use = self._num_looks + _LOOKS
            self._look_at_use()

    def _look_for_shortage(self, available: int, margin: int, starved: bool) -> None:
        reported, page = self._reported, self._page_bytes
        if reported.is_short and not starved and self._num_looks % 4:
            return  # the forecast takes longer than the rest
        pages = self._memory.limit_pages - available + margin + self._scheduler.wanted_pages()
        if starved:
            pages = max(pages, self._memory.limit_pages + margin)
        wanted = min(pages, self._memory.max_pages) * page + self._draft_bytes
        is_short = wanted > self._limit_bytes
        if not is_short and not reported.is_short:
            return
        grew = wanted > reported.wanted_bytes // 4 * 5
        fell = wanted < reported.wanted_bytes // 4 * 3
        if is_short == reported.is_short and not grew and not fell:
            return
        if not is_short:
            self._asked_at = None
        elif self._asked_at is None:
            self._asked_at = self._clock()
        self._tell(self._holding(wanted, is_short=is_short))

    def _look_at_use(self) -> None:
        """Ask for more where the prefix cache would fill it; offer what was refused; report what
        requests hold if that is half more or less than was reported."""
        now = self._holding(0, is_short=False)
        reported = self._reported
        step = now.limit_bytes // _LOOKS
        if self._has_refused and self._kept_bytes(now.used_bytes) + step <= now.limit_bytes:
            self._has_refused = False
            self._tell(now)
        elif (
            now.committed_bytes + step > now.limit_bytes
            and reported.wanted_bytes <= now.limit_bytes
        ):
            self._tell(self._holding(now.limit_bytes + 4 * step, is_short=False))
        elif abs(now.used_bytes - reported.used_bytes) > reported.used_bytes // 2:
            self._tell(replace(now, wanted_bytes=reported.wanted_bytes))

    def _tell_if_lower(self) -> None:
        committed = self._committed_bytes
        if committed < self._reported.committed_bytes:
            self._tell(self._holding(self._reported.wanted_bytes, self._reported.is_short))

    def _tell(self, holding: Holding, *, is_answer: bool = False) -> None:
        self._reported = holding
        self._news.append((holding, is_answer))

    # -- counts: with the draft model's part ----------------------------------------------

    @property
    def _draft_bytes(self) -> int:
        return sum(each.limit_bytes for each in self._drafting)

    @property
    def _limit_bytes(self) -> int:
        return self._memory.limit_bytes + self._draft_bytes

    @property
    def _committed_bytes(self) -> int:
        return self._memory.committed_bytes + self._draft_bytes

    @property
    def _margin(self) -> int:
        """Pages for the next steps of running sequences, and those that admission leaves free."""
        return 1 + self._scheduler.num_running + self._memory.limit_pages // 64

    def _kept_bytes(self, used_bytes: int) -> int:
        """What is not given back unless requests are preempted for it.

        While requests run, that is as much as they held lately. Otherwise two busy models would
        take the same memory from each other with each request that begins.
        """
        self._note_use(used_bytes)
        held = used_bytes if self._reported.is_idle else max(self._most_used)
        return held + self._margin * self._page_bytes

    def _note_use(self, used_bytes: int) -> None:
        now = self._clock()
        if now >= self._stretch_ends:
            is_next = now < self._stretch_ends + _LATELY_SECONDS
            self._most_used = [0, self._most_used[0] if is_next else 0]
            self._stretch_ends = now + _LATELY_SECONDS
        self._most_used[0] = max(self._most_used[0], used_bytes)

    def _used_bytes(self) -> int:
        stats = self._memory.stats()
        pages = stats.committed_pages - stats.free_pages - stats.idle_pages
        return pages * self._page_bytes + self._draft_bytes

    def _holding(self, wanted_bytes: int, is_short: bool, is_idle: bool | None = None) -> Holding:
        used_bytes = self._used_bytes()
        self._note_use(used_bytes)
        return Holding(
            self._limit_bytes,
            self._committed_bytes,
            used_bytes,
            wanted_bytes,
            is_short,
            self._reported.is_idle if is_idle is None else is_idle,
        )
