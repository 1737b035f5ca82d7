"""Record an engine's memory operations by step, and replay them with other blocks.

Neither the schedule nor a token depends on the size of a block, as long as memory is not short. So
one run of the engine is recorded. A memory of its own for each other block size repeats its forks,
growths and releases. At the engine's own size both must count the same.
"""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from vmserve.engine.engine import LLMEngine
from vmserve.memory.base import Fork, Growth, MemoryPlan, Regime
from vmserve.memory.layout import HOST_GRANULARITY, plan_layout
from vmserve.memory.manager import MemoryManager, MemoryOptions

if TYPE_CHECKING:
    from collections.abc import Iterable

    from vmserve.config import EngineConfig
    from vmserve.scheduler.base import StepPlan
    from vmserve.scheduler.sequence import Sequence

__all__ = ["Step", "WatchedEngine", "common_prefixes", "described", "percent", "replay"]

#: Of each counted step: blocks that all sequences list, and distinct ones.
Counts = list[tuple[int, int]]


class Step(NamedTuple):
    """Operations of a step on sequences, which have any names that are never reused."""

    #: Child, parent, and tokens in common.
    forks: list[tuple[Any, Any, int]]
    #: Sequences, and their tokens from this step on.
    growths: list[tuple[Any, int]]
    live: list[Any]
    counted: bool = True
    #: :func:`common_prefixes` of each request's beams.
    prefixes: list[int] = []  # noqa: RUF012


def percent(part: float, whole: float) -> float:
    """Percentage; 0 of nothing."""
    return 100.0 * part / whole if whole else 0.0


def described(counts: Counts) -> dict[str, Any]:
    """Two averages: of sums, so that a step counts for what it lists, and of steps' ratios."""
    listed, distinct = (sum(column) for column in zip(*counts, strict=True))
    return {
        "num_steps": len(counts),
        "listed": listed,
        "distinct": distinct,
        "saved_percent": percent(listed - distinct, listed),
        "mean_step_percent": percent(sum(1 - d / n for n, d in counts), len(counts)),
    }


class WatchedEngine(LLMEngine):
    """Engine that counts and records its steps; each ``every``-th one is counted."""

    def __init__(self, config: EngineConfig, every: int = 1) -> None:
        super().__init__(config)
        self.recorded: list[Step] = []
        self.counts: Counts = []
        self._every = every
        self._known: dict[int, Sequence] = {}
        scheduled = self._figures.scheduled

        def record(plan: StepPlan) -> None:
            self._record(plan)
            scheduled(plan)

        self._figures.scheduled = record  # type: ignore[method-assign]

    def _record(self, plan: StepPlan) -> None:
        requests = self._requests.values()
        live = {
            sequence.memory_id: sequence
            for request in requests
            for sequence in request.sequences
            if sequence.memory_id is not None
        }
        known = self._known | live  # a parent can be gone by now
        forks = []
        for op in plan.memory.ops:
            if not isinstance(op, Fork):
                raise TypeError(f"a recording is of forks and growths only, got {op}")
            forks.append((known[op.seq], known[op.parent], op.num_tokens))
        growths = [(live[growth.seq], growth.num_tokens) for growth in plan.memory.growths]
        counted = len(self.recorded) % self._every == 0
        prefixes: list[int] = []
        if counted:
            self.counts.append(count_memory(self.memory, live, Regime.PAGED))
            for request in requests:  # samples keep their own, even if equal by chance
                if request.is_gang:
                    beams = [s.tokens for s in request.sequences if s.memory_id is not None]
                    prefixes += common_prefixes(beams)
        self.recorded.append(Step(forks, growths, list(live.values()), counted, prefixes))
        self._known = live


def run_to_end(engine: LLMEngine) -> dict[str, list[int]]:
    """Tokens of the first answer to each request. Raises RuntimeError where one failed."""
    done = {}
    while engine.has_unfinished:
        result = engine.step()
        if result.failures:
            raise RuntimeError(f"a request failed: {result.failures[0].error}")
        for output in result.outputs:
            if output.finished:
                done[output.request_id] = list(output.outputs[0].token_ids)
    return done


def common_prefixes(histories: Iterable[list[int]]) -> list[int]:
    """Tokens that each history but one has in common with its neighbour in lexical order.

    What sequences with these histories can share at most: floor(p / block) blocks for each p.
    (In a trie with the histories as leaves, each but the first branches off at such a depth.)
    """
    return [
        next(
            (at for at, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b))
        )
        for a, b in pairwise(sorted(histories))
    ]


def count_memory(memory: MemoryManager, seqs: Iterable[int], regime: Regime) -> tuple[int, int]:
    """Blocks (pages in the virtual regime) that all sequences list now, and distinct ones.

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
    return sum(blocks.size for blocks in lists), distinct


def replay(
    steps: list[Step],
    block_tokens: int,
    regime: Regime = Regime.PAGED,
    page_tokens: int | None = None,
) -> Counts:
    """Replay forks, growths and releases in a memory with blocks of this size."""
    memory = MemoryManager(
        plan_layout(
            *(1, 1, 64, "float16", HOST_GRANULARITY),
            page_tokens=page_tokens or max(block_tokens, 16),
            block_tokens=block_tokens,
        ),
        num_slots=max(len({*a.live, *b.live}) for a, b in pairwise([steps[0], *steps])),
        max_len=max(length for step in steps for _, length in step.growths),
        limit_bytes=1 << 30,
        options=MemoryOptions(zero_pages="never"),
    )
    counts: Counts = []
    opened: dict[Any, int] = {}
    for step in steps:
        for sequence in step.live:
            if sequence not in opened:
                seq = memory.open(regime=regime)
                assert seq is not None
                opened[sequence] = seq
        forks = [Fork(opened[child], opened[parent], n) for child, parent, n in step.forks]
        growths = [Growth(opened[sequence], length) for sequence, length in step.growths]
        plan = memory.plan(growths, forks)
        if not isinstance(plan, MemoryPlan):
            raise RuntimeError(f"the replay's pool is too small: use fewer requests ({plan})")
        memory.complete(memory.apply(plan))
        for sequence in opened.keys() - set(step.live):
            memory.release(opened.pop(sequence))
        if step.counted:
            counts.append(count_memory(memory, opened.values(), regime))
    memory.close()
    return counts
