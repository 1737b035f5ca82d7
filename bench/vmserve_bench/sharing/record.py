"""Record an engine's memory operations by step, and replay them with other blocks.

Neither the schedule nor a token depends on the size of a block, as long as memory is not short. So
one run of the engine is recorded. A memory of its own for each other block size repeats its forks,
growths and releases. At the engine's own size both must count the same.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from vmserve.engine.engine import LLMEngine
from vmserve.memory.base import Fork, Growth, MemoryPlan, Regime
from vmserve.memory.layout import HOST_GRANULARITY, plan_layout
from vmserve.memory.manager import MemoryManager, MemoryOptions
from vmserve_bench.sharing.count import Tally, common_prefixes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from vmserve.config import EngineConfig
    from vmserve.scheduler.base import StepPlan
    from vmserve.scheduler.sequence import Sequence

__all__ = ["ForkOf", "Recorder", "Step", "WatchedEngine", "count_memory", "replay"]

#: Head dimension in a replay, whose K and V take 256 bytes a token.
_HEAD_DIM = 64
_POOL_BYTES = 1 << 30


class ForkOf(NamedTuple):
    child: int
    parent: int
    num_tokens: int


@dataclass(frozen=True, slots=True)
class Step:
    """Operations of a step; sequences have numbers of the recording, never reused.

    ``prefixes``: :func:`~vmserve_bench.sharing.count.common_prefixes` of each request's sequences.
    """

    forks: tuple[ForkOf, ...]
    #: Sequences, and their tokens from this step on.
    growths: tuple[tuple[int, int], ...]
    live: tuple[int, ...]
    counted: bool = True
    prefixes: tuple[int, ...] = ()


class WatchedEngine(LLMEngine):
    """Engine that reports each step, with every sequence that has memory, to ``watch``."""

    def __init__(self, config: EngineConfig) -> None:
        super().__init__(config)
        self.watch: Callable[[StepPlan, list[Sequence]], None] | None = None

    def _mark_scheduled(self, plan: StepPlan) -> None:
        if self.watch is not None:
            requests = self._requests.values()
            everyone = (sequence for request in requests for sequence in request.sequences)
            self.watch(plan, [seq for seq in everyone if seq.memory_id is not None])
        super()._mark_scheduled(plan)


@dataclass(slots=True)
class Recorder:
    """Counts and records the steps of an engine; each ``every``-th one is counted."""

    memory: MemoryManager
    every: int = 1
    steps: list[Step] = field(default_factory=list)
    tally: Tally = field(default_factory=Tally)
    _numbers: dict[Sequence, int] = field(default_factory=dict)
    #: Numbers of the last step's sequences, by the memory's ids.
    _by_id: dict[int, int] = field(default_factory=dict)

    def __call__(self, plan: StepPlan, sequences: list[Sequence]) -> None:
        by_id = {}
        for sequence in sequences:
            assert sequence.memory_id is not None
            number = self._numbers.setdefault(sequence, len(self._numbers))
            by_id[sequence.memory_id] = number
        known = self._by_id | by_id  # a parent can be gone by now
        forks = []
        for op in plan.memory.ops:
            if not isinstance(op, Fork):
                raise TypeError(f"a recording is of forks and growths only, got {op}")
            forks.append(ForkOf(known[op.seq], known[op.parent], op.num_tokens))
        counted = len(self.steps) % self.every == 0
        if counted:
            count_memory(self.memory, by_id, Regime.PAGED, self.tally)
        self.steps.append(
            Step(
                tuple(forks),
                tuple((by_id[growth.seq], growth.num_tokens) for growth in plan.memory.growths),
                tuple(by_id.values()),
                counted,
                _prefixes(sequences) if counted else (),
            )
        )
        self._by_id = by_id


def count_memory(memory: MemoryManager, seqs: Iterable[int], regime: Regime, tally: Tally) -> None:
    """Add the blocks (pages in the virtual regime) that all sequences list now.

    Raises RuntimeError if the memory's own count of what is in use is another one.
    """
    lists = [memory.blocks(seq) for seq in seqs]
    stats = memory.stats()
    used = stats.used_blocks
    if regime is Regime.VIRTUAL:
        lists = [np.unique(blocks // stats.blocks_per_page) for blocks in lists]
        used = stats.used_pages
    distinct = int(np.unique(np.concatenate(lists)).size)
    if distinct != used:
        raise RuntimeError(f"sequences list {distinct} distinct blocks, memory counts {used}")
    tally.add(sum(blocks.size for blocks in lists), distinct)


def replay(
    steps: list[Step],
    block_tokens: int,
    regime: Regime = Regime.PAGED,
    page_tokens: int | None = None,
) -> Tally:
    """Replay forks, growths and releases in a memory with blocks of this size."""
    layout = plan_layout(
        1,
        1,
        _HEAD_DIM,
        "float16",
        HOST_GRANULARITY,
        page_tokens=page_tokens or max(block_tokens, 16),
        block_tokens=block_tokens,
    )
    before: tuple[int, ...] = ()
    most = 1
    for step in steps:
        most = max(most, len({*before, *step.live}))
        before = step.live
    memory = MemoryManager(
        layout,
        num_slots=most,
        max_len=max(length for step in steps for _, length in step.growths),
        limit_bytes=_POOL_BYTES,
        options=MemoryOptions(zero_pages="never"),
    )
    try:
        return _replay(steps, memory, regime)
    finally:
        memory.close()


def _replay(steps: list[Step], memory: MemoryManager, regime: Regime) -> Tally:
    tally = Tally()
    opened: dict[int, int] = {}
    for step in steps:
        for number in step.live:
            if number not in opened:
                memory_id = memory.open(regime=regime)
                assert memory_id is not None
                opened[number] = memory_id
        forks = [Fork(opened[fork.child], opened[fork.parent], fork[2]) for fork in step.forks]
        growths = [Growth(opened[number], length) for number, length in step.growths]
        plan = memory.plan(growths, forks)
        if not isinstance(plan, MemoryPlan):
            raise RuntimeError(f"the replay's pool is too small: use fewer requests ({plan})")
        memory.complete(memory.apply(plan))
        for number in opened.keys() - set(step.live):
            memory.release(opened.pop(number))
        if step.counted:
            count_memory(memory, opened.values(), regime, tally)
    return tally


def _prefixes(sequences: list[Sequence]) -> tuple[int, ...]:
    """Shareable positions of beams; samples keep their own, even if equal by chance."""
    gangs: dict[str, list[list[int]]] = {}
    for sequence in sequences:
        if sequence.request.is_gang:
            gangs.setdefault(sequence.request.request_id, []).append(sequence.tokens)
    return tuple(common for gang in gangs.values() for common in common_prefixes(gang))
