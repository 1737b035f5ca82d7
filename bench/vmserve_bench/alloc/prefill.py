"""Time until a prompt's pages can be written: plan and apply of one growth.

After figure 10 of vAttention's preprint.

Four states that a pool can be in when the prompt arrives:

* ``parked slot``: an earlier request of that length ended and its pages are still mapped in its
  slot (deferred reclamation): the newcomer adopts it;
* ``free pages``: no deferred reclamation, the pages are free and adjacent: one map call per group;
* ``scattered pages``: the same after a busy time, no two free pages adjoin: a call per page and
  group, the worst case;
* ``new memory``: the pool has not grown yet and takes the memory from the system first.

What ending the earlier request cost (release) is reported too: without deferred reclamation
that is where the unmapping is.
"""

from __future__ import annotations

from time import perf_counter_ns
from typing import TYPE_CHECKING, Any, Literal

from vmserve import _core
from vmserve_bench.alloc.pool import grow, growths, open_pool, open_sequences
from vmserve_bench.alloc.section import Options
from vmserve_bench.lab.rounds import compare_many
from vmserve_bench.lab.statistics import summarize
from vmserve_bench.lab.table import SectionResult, Table, microseconds

if TYPE_CHECKING:
    from vmserve_bench.lab.report import Report

__all__ = ["WAYS", "Prefiller", "run"]

Way = Literal["parked slot", "free pages", "scattered pages", "new memory"]
WAYS: tuple[Way, ...] = ("parked slot", "free pages", "scattered pages", "new memory")

PAGE_TOKENS = 64
TOKEN_BYTES = 1024  # of one layer: 2 KV heads of 128 in bfloat16, pages of 64 KiB
PROMPTS = (1024, 2048, 4096, 8192, 16384)


class Prefiller:
    """One pool in one of the four states; :meth:`ready` restores it, :meth:`run` is timed."""

    def __init__(self, way: Way, prompt_tokens: int, num_groups: int) -> None:
        self.way = way
        self._rows_length = prompt_tokens
        num_pages = prompt_tokens // PAGE_TOKENS
        scattered = way == "scattered pages"
        self._memory = open_pool(
            page_tokens=PAGE_TOKENS,
            token_bytes=TOKEN_BYTES,
            num_groups=num_groups,
            max_pages=num_pages * (2 if scattered else 1),
            max_seqs=2,
            max_len=prompt_tokens,
            deferred_reclamation=way == "parked slot",
            seal_read_only=False,
            prefix_caching=False,
        )
        self.release_ns: list[int] = []
        self.map_calls = 0
        if scattered:
            self._scatter(num_pages)
        self._open()
        self.run()
        self.ready()
        self.release_ns.clear()

    def ready(self) -> None:
        if self._memory.length(self._seq) == 0:
            return
        self._memory.complete(self._memory.begun_epoch)
        start = perf_counter_ns()
        self._memory.release(self._seq)
        self.release_ns.append(perf_counter_ns() - start)
        if self.way == "new memory":
            self._memory.trim(0, drop_idle=True)
        self._open()

    def run(self) -> None:
        before = self._memory.stats()
        grow(self._memory, growths([self._seq], [self._rows_length]))
        after = self._memory.stats()
        self.map_calls = after.map_calls_total - before.map_calls_total
        self.arena_map_calls = after.arena_map_calls_total - before.arena_map_calls_total

    def close(self) -> None:
        self.ready()
        self._memory.check()
        self._memory.close()

    def _open(self) -> None:
        (self._seq,) = open_sequences(self._memory, [_core.View.VIRTUAL])

    def _scatter(self, num_pages: int) -> None:
        """Leave every second page with a sequence that lives on."""
        keep, give = open_sequences(self._memory, [_core.View.VIRTUAL] * 2)
        for page in range(1, num_pages + 1):
            for seq in (keep, give):
                epoch = grow(self._memory, growths([seq], [page * PAGE_TOKENS]))
                self._memory.complete(epoch)
        self._memory.release(give)


def run(options: Options, report: Report) -> SectionResult:
    """Median and p95 by prompt length and state of the pool, interleaved."""
    prompts, rounds, num_groups = (PROMPTS[:1], 3, 2) if options.quick else (PROMPTS, 20, 16)
    rows: list[dict[str, Any]] = []
    for index, prompt in enumerate(prompts):
        rows += _measure(prompt, num_groups, rounds, options.seed)
        report((index + 1) / len(prompts))
    data = {
        "page_tokens": PAGE_TOKENS,
        "token_bytes": TOKEN_BYTES,
        "num_groups": num_groups,
        "rounds": rounds,
        "prompts": rows,
    }
    return SectionResult(data, (_table(rows, num_groups),))


def _measure(prompt: int, num_groups: int, rounds: int, seed: int) -> list[dict[str, Any]]:
    pools = {way: Prefiller(way, prompt, num_groups) for way in WAYS}

    def setup() -> None:
        for pool in pools.values():
            pool.ready()

    compared = compare_many(
        {way: pool.run for way, pool in pools.items()},
        rounds=rounds,
        warmup=0,
        setup=setup,
        seed=seed,
    )
    rows = []
    for way, pool in pools.items():
        if way == compared.baseline:
            paired = None
            times = next(iter(compared.against.values())).times_ns_a
        else:
            paired = compared.against[way]
            times = paired.times_ns_b
        pool.ready()
        rows.append(
            {
                "prompt_tokens": prompt,
                "state": way,
                "median_ns": summarize(times).median,
                "p95_ns": summarize(times).p95,
                "release_median_ns": summarize(pool.release_ns).median,
                "slot_map_calls": pool.map_calls,
                "arena_map_calls": pool.arena_map_calls,
                "times_the_parked_slot": paired and paired.ratio,
                "times_99": paired and [paired.ratio_low, paired.ratio_high],
            }
        )
        pool.close()
    return rows


def _table(rows: list[dict[str, Any]], num_groups: int) -> Table:
    return Table(
        "a prompt's pages, by the state of the pool",
        (
            "prompt",
            "pool",
            "us: median / p95",
            "against the parked slot",
            "map calls",
            "release, us",
        ),
        tuple(
            (
                f"{row['prompt_tokens']:,}",
                row["state"],
                f"{microseconds(row['median_ns'])} / {microseconds(row['p95_ns'])}",
                f"{row['times_the_parked_slot']:,.1f} x" if row["times_the_parked_slot"] else "",
                f"{row['slot_map_calls'] + row['arena_map_calls']:,}",
                microseconds(row["release_median_ns"]),
            )
            for row in rows
        ),
        f"{num_groups} layer groups, pages of {PAGE_TOKENS} tokens and "
        f"{PAGE_TOKENS * TOKEN_BYTES >> 10} KiB a group.",
    )
