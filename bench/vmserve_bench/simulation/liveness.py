"""Check that every request ends: random workloads on the simulated engine.

    python -m vmserve_bench.simulation.liveness --workloads 10000 --seed 0

Each workload is one seed: a pool little larger than the longest sequence, an odd budget, requests
of every kind, aborts, conversions, and, until some step, a driver that refuses calls and kernels
that fail. A third of the engines have their memory from a pool, which lends and recalls it at
random steps. Then the faults stop, and

1. every request ends within :func:`step_bound` steps;
2. each step computes a token, ends a request, or waits for memory that may come, for at most three
   seconds in all;
3. only a beam search may fail, for lack of memory (its beams run at once); requests that were there
   during faults are excused;
4. of requests with one sequence and equal rank that were neither preempted nor aborted, first
   tokens come in the order of arrival;
5. the memory's conservation laws always hold, and at the end no page, sequence or block on the host
   is in use, nothing is held back, and the pool is healthy.
"""

from __future__ import annotations

import argparse
import itertools
import json
import logging
import random
import sys
import time
import traceback
from collections import Counter, defaultdict
from dataclasses import dataclass
from typing import Any, NamedTuple

from vmserve import _core
from vmserve.memory.base import Health, Regime
from vmserve.memory.layout import KVLayout, plan_layout
from vmserve.scheduler.profile import DeviceProfile, KernelCosts
from vmserve_bench.simulation.engine import SimulatedEngine, SimulationConfig
from vmserve_bench.simulation.records import RequestRecord
from vmserve_bench.simulation.requests import Asked

__all__ = ["Violation", "Workload", "check_many", "check_workload", "step_bound"]

_KERNELS = KernelCosts(call=1e-4, sequence=1e-6, read=1e-7, pair=1e-8)
_PROFILE = DeviceProfile(
    name="liveness", virtual=_KERNELS, paged=_KERNELS, step=1e-3, weights=1e-3, token=1e-5,
    map_page=1e-5, map_page_hidden=0.0, copy_bytes_per_second=1e10, swap_bytes_per_second=1e9,
)  # fmt: skip
#: Seconds from one step without memory to the next, and those after which none may wait.
_PAUSE, _LONGEST_WAIT = 0.01, 3.0
#: Bytes of a token: one layer, one head of 64 in float32.
_TOKEN_BYTES = 2 * 64 * 4


class Violation(AssertionError):
    """A property that did not hold; the text names it."""


@dataclass(frozen=True, slots=True)
class Workload:
    """All events of a workload, drawn from one seed."""

    seed: int
    config: SimulationConfig
    #: Requests by the step before which they arrive.
    arrivals: dict[int, list[Asked]]
    #: (event, name of the request) by step.
    events: dict[int, list[tuple[str, str]]]
    #: Step before which faults of driver and kernels come.
    faults_until: int
    #: Orders of a pool by step: the part lent of what is more than the least, and whether requests
    #: are preempted for the rest. Empty: the memory is its own.
    lends: dict[int, tuple[float, bool]]

    @property
    def requests(self) -> list[Asked]:
        return [what for group in self.arrivals.values() for what in group]


def draw(seed: int) -> Workload:
    rng = random.Random(seed)
    block_tokens = rng.choice([8, 16])
    page_tokens = block_tokens * rng.choice([1, 2, 4])
    layout = plan_layout(
        1, 1, 64, "float32", 4096, page_tokens=page_tokens, block_tokens=block_tokens
    )
    max_len = rng.choice([48, 96, 160])
    config = _config(rng, layout, max_len)
    heads = [[rng.randrange(500) for _ in range(max_len)] for _ in range(3)]
    last_arrival = rng.choice([0, 10, 60])
    requests = [_request(rng, str(i), heads, config) for i in range(rng.randint(3, 14))]
    arrivals: dict[int, list[Asked]] = defaultdict(list)
    for what in requests:
        arrivals[rng.randint(0, last_arrival)].append(what)
    events: dict[int, list[tuple[str, str]]] = defaultdict(list)
    for _ in range(rng.choice([0, 0, 2, 8])):
        name = rng.choice(requests).name
        events[rng.randint(1, last_arrival + 60)].append(("abort", name))
    for _ in range(rng.choice([0, 0, 3, 12])):
        name, regime = rng.choice(requests).name, rng.choice(list(Regime)).value
        events[rng.randint(1, last_arrival + 60)].append((regime, name))
    faults_until = rng.choice([0, 0, last_arrival + rng.randint(5, 60)])
    lends: dict[int, tuple[float, bool]] = {}
    if rng.random() < 0.33:
        for when in (0, *(rng.randint(1, last_arrival + 60) for _ in range(rng.choice([0, 2, 8])))):
            lends[when] = rng.choice([0.0, 1.0, rng.random()]), rng.random() < 0.4
    return Workload(seed, config, dict(arrivals), dict(events), faults_until, lends)


def _config(rng: random.Random, layout: KVLayout, max_len: int) -> SimulationConfig:
    longest = layout.pages_for(max_len)
    pages = longest + rng.choice([0, 0, 1, longest, 4 * longest])
    max_num_seqs = rng.choice([1, 2, 3, 4, 8])
    swap_tokens = rng.choice([0, 0, max_len, 100 * max_len])
    mapper: Any = rng.choice(["manual", "off"])
    return SimulationConfig(
        layout=layout,
        limit_bytes=pages * layout.total_page_bytes,
        profile=_PROFILE,
        max_model_len=max_len,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max(max_num_seqs, rng.choice([1, 7, 16, 64, 256])),
        watermark=rng.choice([0.0, 0.01, 0.1, 0.3]),
        regime=rng.choice(["auto", "virtual", "paged"]),
        preemption=rng.choice(["auto", "recompute", "swap"]),
        swap_bytes=swap_tokens * _TOKEN_BYTES,
        prefix_caching=rng.random() < 0.6,
        mapper=mapper,
        lookahead_tokens=rng.choice([0, 8, 16]),
        policy=rng.choice(["fcfs", "fcfs", "priority", "priority"]),
        priority_max_wait=rng.choice([0.01, 0.03, 60.0]),
        fair_sharing=rng.random() < 0.4,
        check_every=rng.choice([1, 3]),
    )


def _request(
    rng: random.Random, name: str, heads: list[list[int]], config: SimulationConfig
) -> Asked:
    max_len = config.max_model_len
    output = rng.choice([1, 2, rng.randint(1, max_len // 2), rng.randint(1, max_len - 1)])
    room = max_len - output
    head = rng.choice(heads)[: rng.randint(0, room)]
    own = rng.randint(0 if head else 1, min(room - len(head), rng.choice([1, 8, room])) or 1)
    prompt = (head + [rng.randrange(500) for _ in range(own)])[:room]
    kind = rng.choice(["one", "one", "one", "choices", "beams"])
    width = min(rng.randint(2, 4), config.max_num_seqs) if kind == "beams" else 0
    choices = rng.randint(2, 5) if kind == "choices" else 1
    return Asked(
        name=name,
        prompt=tuple(prompt),
        outputs=(output, *(rng.randint(1, output) for _ in range(choices - 1))),
        beam_width=width,
        priority=rng.randint(0, 2),
        salt=rng.choice([b"", b"", b"other"]),
        tenant=rng.choice(["one", "one", "two", "three"]),
        seed=rng.randrange(4),
    )


def step_bound(requests: list[Asked]) -> int:
    """Most steps that these may take once faults have stopped: 8 for each of their tokens.

    Without preemption, one step for each token would do: every step computes at least one.
    """
    tokens = sum((len(r.prompt) + r.max_output) * r.num_branches for r in requests)
    return 8 * tokens + 100


class _Life:
    """One workload while it runs."""

    def __init__(self, workload: Workload) -> None:
        self.workload = workload
        self.rng = random.Random(-1 - workload.seed)
        self.faults: _core.FaultInjectingDriver | None = None
        self.engine = SimulatedEngine(workload.config, wrap_driver=self._wrap)
        self.num_faults = self.num_waits = 0
        #: Seconds for which memory has been waited for.
        self.waited = 0.0
        self.excused: set[str] = set()

    def _wrap(self, driver: _core.PageDriver) -> _core.PageDriver:
        self.faults = _core.FaultInjectingDriver(driver)
        return self.faults

    def run(self) -> None:
        """Raises :class:`Violation`, or any other error."""
        workload, engine = self.workload, self.engine
        assert self.faults is not None
        coming = dict(workload.arrivals)
        bound = workload.faults_until + max(coming) + step_bound(workload.requests)
        step = 0
        while coming or engine.has_unfinished:
            for what in coming.pop(step, []):
                engine.add(what)
            for event, name in workload.events.get(step, []):
                if event == "abort":
                    engine.abort(name)
                else:
                    engine.convert(name, Regime(event))
            if step < workload.faults_until:
                self._disturb()
            elif step == workload.faults_until:
                self.faults.disarm()
                engine.fail_next_batch = False
            if step in workload.lends:
                self._lend(*workload.lends[step])
            if engine.has_unfinished:
                self._step(is_calm=step >= workload.faults_until)
            step += 1
            if step > bound + self.num_waits:
                raise Violation(f"after {step} steps {engine.open_names} have not ended")
        self.faults.disarm()
        self._check_end()

    def _disturb(self) -> None:
        """Let something fail in the next step, at random."""
        assert self.faults is not None
        chance = self.rng.random()
        if chance < 0.3:
            self.faults.arm(self.rng.randint(1, 12), forever=self.rng.random() < 0.3)
        elif chance < 0.5:
            self.faults.disarm()
        self.engine.fail_next_batch = self.rng.random() < 0.02
        self.num_faults += chance < 0.3 or self.engine.fail_next_batch
        self.excused.update(self.engine.open_names)

    def _lend(self, part: float, reclaim: bool) -> None:
        engine = self.engine.engine
        most, least = self.workload.config.limit_bytes, engine.pool.lease.least_bytes
        engine.lend(least + int(part * (most - least)), reclaim=reclaim)

    def _step(self, *, is_calm: bool) -> None:
        run, engine = self.engine.run, self.engine.engine
        before = len(run.steps), len(run.requests)
        engine.memory_news()  # a service reports before a step and after it
        self.engine.step()
        engine.memory_news()
        is_same = before == (len(run.steps), len(run.requests))
        if engine.awaits_memory:
            self.num_waits += 1
            self.waited += _PAUSE
            self.engine.now += _PAUSE
            if self.waited > _LONGEST_WAIT:
                raise Violation(f"step {self.engine.num_steps} waits for memory that does not come")
            return
        if not is_same:
            self.waited = 0.0
        elif is_calm:
            raise Violation(f"step {self.engine.num_steps} computed nothing and ended nobody")
        if len(run.steps) > before[0] and run.steps[-1].num_tokens < 1:
            raise Violation(f"step {self.engine.num_steps} has no tokens")

    def _check_end(self) -> None:
        records = self.engine.run.requests
        asked = {what.name: what for what in self.workload.requests}
        if sorted(record.name for record in records) != sorted(asked):
            raise Violation("requests did not end once each")
        # Orders are kept within a rank, and within a tenant if tenants share fairly.
        config, queues = self.workload.config, defaultdict(list)
        for record in records:
            what = asked[record.name]
            if record.end == "failed" and not what.beam_width and record.name not in self.excused:
                raise Violation(f"request {record.name} failed, and nothing was wrong with it")
            if record.end == "finished" and not what.beam_width:
                _equal("tokens of a request", record.num_output, sum(what.outputs))
            if what.num_branches == 1:
                rank = what.priority if config.policy == "priority" else 0
                queues[rank, what.tenant if config.fair_sharing else ""].append(record)
        for queue in queues.values():
            _check_order(queue)
        self._check_memory()

    def _check_memory(self) -> None:
        memory = self.engine.memory
        memory.trim()
        memory._core.settle_mapper()
        memory.check()
        stats = memory.stats()
        for name in (
            "used_pages", "waiting_pages", "held_pages", "quarantined_pages", "pending_repairs",
            "num_seqs", "swapped_seqs", "swap_blocks",
        ):  # fmt: skip
            _equal(f"{name} at the end", getattr(stats, name), 0)
        _equal("health at the end", memory.health, Health.HEALTHY)
        _equal("sequences that run", self.engine.scheduler.num_running, 0)
        _equal("sequences that wait", self.engine.scheduler.num_waiting, 0)


def _equal(what: str, is_value: object, should: object) -> None:
    if is_value != should:
        raise Violation(f"{what}: {is_value}, not {should}")


def _check_order(records: list[RequestRecord]) -> None:
    """Check that first tokens come in the order of arrival, without preempted requests."""
    served = [
        (r.order, r.first_token, r.name)
        for r in records
        if r.end == "finished" and not r.num_preemptions and r.first_token
    ]
    for (_, before, first), (_, token, second) in itertools.pairwise(sorted(served)):
        if token < before:
            raise Violation(
                f"request {second} came after {first} and has its first token before: "
                f"{token:.6f} and {before:.6f} s"
            )


def check_workload(seed: int) -> Counter[str]:
    """Run one workload; returns counts of events. Raises :class:`Violation`."""
    workload = draw(seed)
    life = _Life(workload)
    life.run()
    engine = life.engine
    tally: Counter[str] = Counter(
        workloads=1, steps=engine.num_steps, faults=life.num_faults, waits=life.num_waits
    )
    tally.update(record.end for record in engine.run.requests)
    engine.close()
    tally.update(engine.run.counters)
    return tally


class Report(NamedTuple):
    """``violations``: by seed, the end of the traceback."""

    tally: Counter[str]
    violations: dict[int, str]


def check_many(first_seed: int, num_workloads: int, *, progress_s: float = float("inf")) -> Report:
    """Check every seed from ``first_seed`` on, and continue after violations."""
    report = Report(Counter(), {})
    reported = time.monotonic()
    for count, seed in enumerate(range(first_seed, first_seed + num_workloads), 1):
        try:
            report.tally.update(check_workload(seed))
        except Exception:  # noqa: BLE001  whatever goes wrong is what is looked for
            report.violations[seed] = traceback.format_exc(limit=-6)
        if time.monotonic() - reported > progress_s:
            reported = time.monotonic()
            told = f"{report.tally['steps']} steps, {len(report.violations)} violations"
            print(f"{count} workloads, {told}", file=sys.stderr, flush=True)
    return report


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workloads", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0, help="of the first workload")
    arguments = parser.parse_args()
    report = check_many(arguments.seed, arguments.workloads, progress_s=30.0)
    for seed, text in report.violations.items():
        print(f"--- seed {seed}\n{text}")
    print(json.dumps({"violations": len(report.violations), **report.tally}, indent=1))
    return 1 if report.violations else 0


if __name__ == "__main__":
    logging.getLogger("vmserve").setLevel(logging.CRITICAL)  # faults are intended, and counted
    sys.exit(main())
