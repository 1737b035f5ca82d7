"""Take memory from sequences, and decide how they come back: computed again, or swapped in."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NamedTuple

from vmserve.scheduler.base import StepInProgress
from vmserve.scheduler.rooms import release_memory
from vmserve.scheduler.sequence import SequenceStatus

if TYPE_CHECKING:
    from collections.abc import Collection

    from vmserve.memory.base import KVMemory
    from vmserve.scheduler.base import Totals
    from vmserve.scheduler.families import Families
    from vmserve.scheduler.order import Order
    from vmserve.scheduler.regime_keeper import RegimeKeeper
    from vmserve.scheduler.rooms import Rooms
    from vmserve.scheduler.sequence import Sequence

__all__ = ["CopiesOut", "Preempter", "Preemption", "PreemptionCosts", "PreemptionPolicy"]

logger = logging.getLogger(__name__)

Preemption = Literal["auto", "recompute", "swap"]
#: Weight of a new measurement in a running average.
_NEWEST = 0.2


class PreemptionCosts(NamedTuple):
    """Predicted seconds of a victim's way out and back."""

    recompute: float
    swap: float


@dataclass(slots=True)
class PreemptionPolicy:
    """Compares swapping at the measured copy bandwidth with computing at the measured prefill
    speed.

    After SOSP'23 PagedAttention, sections 4.5 and 7.3. The initial values hold until there are
    measurements: one core copies 4 GB/s; a small model prefills 2,000 tokens/s on two cores.
    """

    preemption: Preemption = "auto"
    copy_bytes_per_second: float = 4e9
    prefill_tokens_per_second: float = 2e3

    def costs(self, num_tokens: int, num_bytes: int) -> PreemptionCosts:
        """Costs of both ways for a victim with ``num_tokens`` computed, in ``num_bytes``."""
        return PreemptionCosts(
            num_tokens / self.prefill_tokens_per_second,
            2 * num_bytes / self.copy_bytes_per_second,
        )

    def swaps(self, num_tokens: int, num_bytes: int) -> bool:
        if self.preemption != "auto":
            return self.preemption == "swap"
        costs = self.costs(num_tokens, num_bytes)
        return costs.swap < costs.recompute

    def copied(self, num_bytes: int, seconds: float) -> None:
        """Learn from a measured copy."""
        if num_bytes and seconds > 0:
            self.copy_bytes_per_second += _NEWEST * (
                num_bytes / seconds - self.copy_bytes_per_second
            )

    def prefilled(self, num_tokens: int, seconds: float) -> None:
        """Learn from a measured step that mostly read prompts."""
        if seconds > 0:
            self.prefill_tokens_per_second += _NEWEST * (
                num_tokens / seconds - self.prefill_tokens_per_second
            )


class CopiesOut:
    """Swaps out in the background: only sequences that need a victim's pages wait for its copy.

    One step is planned without them. After that the copies are waited for, so that no sequence
    is left out for longer.
    """

    def __init__(self, memory: KVMemory, rooms: Rooms, policy: PreemptionPolicy) -> None:
        self._memory = memory
        self._rooms = rooms
        self._policy = policy
        self._num_bytes = 0
        self._began = 0.0
        self._left_out = False

    def swap_out(self, memory_ids: list[int], num_bytes: int) -> bool:
        """Swap the sequences out; returns whether their pages are free, now or after the copies."""
        if not self._memory.is_copying:
            self._num_bytes = 0
            self._began = time.perf_counter()
            self._left_out = False
        if not self._memory.swap_out(memory_ids):
            return False
        self._num_bytes += num_bytes
        if not self._memory.is_copying:
            self._policy.copied(self._num_bytes, time.perf_counter() - self._began)
        return True

    def leave_out(self, step: StepInProgress) -> StepInProgress:
        """The step without sequences that need more memory and without beams, which go together.

        Empty if there was such a step since the copies began.
        """
        kept = StepInProgress()
        if self._left_out:
            return kept
        self._left_out = True
        for sequence, num_new in step:
            has = self._rooms.blocks(sequence, sequence.num_computed)
            wants = self._rooms.blocks(sequence, sequence.num_computed + num_new)
            if has == wants and sequence.start is None and not sequence.request.is_gang:
                kept.append((sequence, num_new))
        return kept

    def finish(self) -> None:
        """Wait for the copies, and measure them unless they had ended before."""
        if self._memory.finish_copies():
            self._policy.copied(self._num_bytes, time.perf_counter() - self._began)


class Preempter:
    """Sends sequences back to where they came from: to the queue, to their family, to the host."""

    def __init__(
        self,
        memory: KVMemory,
        order: Order,
        families: Families,
        rooms: Rooms,
        regimes: RegimeKeeper,
        copies: CopiesOut,
        policy: PreemptionPolicy,
        totals: Totals,
    ) -> None:
        self._memory = memory
        self._order = order
        self._families = families
        self._rooms = rooms
        self._regimes = regimes
        self._copies = copies
        self._policy = policy
        self._totals = totals

    def preempt(self, victims: list[Sequence], *, may_swap: bool = True) -> None:
        """Take the memory of one request's sequences; they come back later."""
        request = victims[0].request
        if not (may_swap and self._swap_out(victims)):
            for sequence in reversed(victims):
                if sequence.status is SequenceStatus.RUNNING:  # else it left with its parent
                    self.back_to_waiting(sequence)
        for sequence in victims:
            sequence.was_preempted = True
        request.metrics.num_preemptions += 1
        self._totals.preemptions += 1
        logger.debug("preempted %d sequences of %s", len(victims), request.request_id)

    def _swap_out(self, victims: list[Sequence]) -> bool:
        """Swap the victims to host memory; returns whether they are there or on their way."""
        if any(seq.start is not None or seq.num_computed == 0 for seq in victims):
            return False  # nothing to copy yet, or not in memory
        sources = {seq.memory_id for seq in victims}
        if any(seq.is_fork_of(sources) for seq in self._order.running):
            return False
        num_blocks = sum(self._rooms.blocks(seq, seq.num_computed) for seq in victims)
        num_bytes = num_blocks * self._rooms.block_bytes
        if not self._policy.swaps(sum(seq.num_computed for seq in victims), num_bytes):
            return False
        memory_ids = [seq.memory_id for seq in victims if seq.memory_id is not None]
        if not self._copies.swap_out(memory_ids, num_bytes):
            return False
        for sequence in victims:
            self._order.leave(sequence)
            self._order.swap(sequence)
        self._totals.swaps += len(victims)
        return True

    def back_to_waiting(self, sequence: Sequence) -> None:
        """Return the sequence to the waiting ones, with those that were to fork from it."""
        self._regimes.forget(sequence)
        memory_id = sequence.memory_id
        self.compute_again(sequence)
        self._send_back_forks({memory_id})

    def compute_again(self, sequence: Sequence) -> None:
        """Release its memory, and let it wait for another start."""
        self._order.leave(sequence)
        release_memory(self._memory, sequence)
        sequence.num_computed = 0
        self._families.wait(sequence)

    def back_to_host(self, sequence: Sequence) -> None:
        """Leave a sequence in host memory that was to be swapped in."""
        self._order.leave(sequence)
        sequence.start = None
        self._order.swap(sequence)

    def drop_donors(self) -> bool:
        """Release finished sequences that others were to fork from; returns whether there were
        any."""
        donors = self._families.donors
        if not donors:
            return False
        self._send_back_forks({donor.memory_id for donor in donors})
        self._families.drop_donors()
        return True

    def _send_back_forks(self, sources: Collection[int | None]) -> None:
        """Return sequences to the waiting ones that the next plan would fork from ``sources``."""
        for child in list(self._order.running):
            # One that was another pending fork's child has left already.
            if child.status is SequenceStatus.RUNNING and child.is_fork_of(sources):
                self.back_to_waiting(child)
