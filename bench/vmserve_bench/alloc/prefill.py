"""Time until a prompt's pages can be written (vAttention's preprint, figure 10): plan and apply.

What ending the request before cost (release) is there too: without deferred reclamation that is
where the unmapping is.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from vmserve import _core
from vmserve_bench.alloc.pool import grow, growths, open_pool, open_sequences
from vmserve_bench.alloc.section import Options, Times
from vmserve_bench.lab.rounds import turns
from vmserve_bench.lab.statistics import paired_effects, summarize
from vmserve_bench.lab.table import SectionResult, table_of

if TYPE_CHECKING:
    from vmserve_bench.lab.report import Report

__all__ = ["WAYS", "Prefiller", "run"]

#: States of the pool when the prompt arrives.
WAYS = (
    # A request of that length ended, and its pages are mapped in the slot that is adopted.
    "parked slot",
    # No deferred reclamation, and free pages are adjacent: a map call per group.
    "free pages",
    # No two free pages adjoin: a call per page and group, the worst case.
    "scattered pages",
    # The pool has not grown yet, and takes the memory from the system first.
    "new memory",
)
PAGE_TOKENS = 64
TOKEN_BYTES = 1024  # of one layer: 2 KV heads of 128 in bfloat16, pages of 64 KiB
PROMPTS = (1024, 2048, 4096, 8192, 16384)


class Prefiller:
    """One pool in one of the states, to which it returns."""

    def __init__(self, way: str, prompt_tokens: int, num_groups: int) -> None:
        self._way, self._prompt_tokens, self.times = way, prompt_tokens, Times()
        num_pages = prompt_tokens // PAGE_TOKENS
        self.memory = open_pool(
            page_tokens=PAGE_TOKENS,
            token_bytes=TOKEN_BYTES,
            num_groups=num_groups,
            max_pages=num_pages * (2 if way == "scattered pages" else 1),
            max_seqs=2,
            max_len=prompt_tokens,
            deferred_reclamation=way == "parked slot",
            seal_read_only=False,
            prefix_caching=False,
        )
        if way == "scattered pages":  # every second page is that of a sequence that lives on
            keep, give = open_sequences(self.memory, [_core.View.VIRTUAL] * 2)
            for page in range(1, num_pages + 1):
                for seq in (keep, give):
                    rows = growths([seq], [page * PAGE_TOKENS])
                    self.memory.complete(grow(self.memory, rows))
            self.memory.release(give)
        self.run()
        self.times.clear()

    def run(self) -> None:
        """A prompt comes, and its request ends."""
        memory, before = self.memory, self.memory.stats()
        (seq,) = open_sequences(memory, [_core.View.VIRTUAL])
        self.times.take("growth", grow, memory, growths([seq], [self._prompt_tokens]))
        now = memory.stats()
        self.slot_calls = now.map_calls_total - before.map_calls_total
        self.arena_calls = now.arena_map_calls_total - before.arena_map_calls_total
        memory.complete(memory.begun_epoch)
        self.times.take("release", memory.release, seq)
        if self._way == "new memory":
            memory.trim(0, drop_idle=True)


def run(options: Options, report: Report) -> SectionResult:
    """Median and p95 by prompt length and state of the pool."""
    prompts, rounds, num_groups = (PROMPTS[:1], 3, 2) if options.quick else (PROMPTS, 20, 16)
    rows: list[dict[str, Any]] = []
    for index, prompt in enumerate(prompts):
        rows += _measure(prompt, num_groups, rounds, options.seed)
        report((index + 1) / len(prompts))
    pages = {"page_tokens": PAGE_TOKENS, "token_bytes": TOKEN_BYTES, "num_groups": num_groups}
    table = table_of("a prompt's pages, by the state of the pool", rows, tuple(rows[0]))
    return SectionResult({**pages, "rounds": rounds, "prompts": rows}, (table,))


def _measure(prompt: int, num_groups: int, rounds: int, seed: int) -> list[dict[str, Any]]:
    pools = {way: Prefiller(way, prompt, num_groups) for way in WAYS}
    for pool in turns(pools.values(), rounds, seed):
        pool.run()
    rows = []
    for way, pool in pools.items():
        times, yardstick = pool.times["growth"], pools["parked slot"].times["growth"]
        [effect] = paired_effects(np.log(np.divide(times, yardstick))[None], seed=seed)
        rows.append(
            {
                "prompt_tokens": prompt,
                "state": way,
                "median_ns": summarize(times).median,
                "p95_ns": summarize(times).p95,
                "release_median_ns": summarize(pool.times["release"]).median,
                "slot_map_calls": pool.slot_calls,
                "arena_map_calls": pool.arena_calls,
                "times_the_parked_slot": effect.ratio,
                "times_99": [effect.low, effect.high],
            }
        )
    for pool in pools.values():
        pool.memory.check()
        pool.memory.close()
    return rows
