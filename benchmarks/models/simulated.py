"""Two simulated engines over a pool against two with half of it each: what the policy costs.

    python -m benchmarks.models.simulated [--seeds 8]

The engines, their schedulers, leases and the pool are the real ones; steps take virtual time, so
nothing depends on the machine. Orders reach an engine between two of its steps. Requests come all
at once, or from half as many clients, which ask again when they have their answer.
"""

from __future__ import annotations

import itertools
import random
import statistics
from types import SimpleNamespace
from typing import Any, NamedTuple, cast

import vmserve
from vmserve.client.client import Client
from vmserve.client.messages import Lend, MemoryReport
from vmserve.config import LEAST
from vmserve.memory.layout import plan_layout
from vmserve.numbers.dtypes import DType
from vmserve.scheduler.profile import DeviceProfile, KernelCosts
from vmserve_bench.lab import script
from vmserve_bench.simulation.engine import SimulatedEngine, SimulationConfig
from vmserve_bench.simulation.requests import VOCAB_SIZE, Asked

_NUM_REQUESTS, _PROMPTS, _ANSWERS = 64, (32, 160), (20, 140)
#: How long an engine sleeps that waits for memory.
_PAUSE = 2e-4
#: 4 KiB a token, pages of 64.
_LAYOUT = plan_layout(8, 2, 32, DType.FLOAT32, 4096, layers_per_group=1, page_bytes=32768)
_TOKEN_BYTES = _LAYOUT.total_page_bytes // _LAYOUT.page_tokens
_KERNELS = KernelCosts(call=1e-5, sequence=2e-6, read=5e-8, pair=2e-8)
#: Seconds to read the weights, and of a token: where many tokens cost much more than one, and
#: where they cost next to nothing more.
_DEVICES = {"CPU": (1.5e-3, 1.5e-4), "GPU": (8e-3, 2e-5)}
#: Tokens of a prompt and of its answer.
Job = tuple[int, int]


class Outcome(NamedTuple):
    seconds: float
    num_tokens: int
    num_preemptions: int


class Engine:
    """One engine and the requests that it still gets; to a pool it is a client."""

    def __init__(
        self, device: str, limit: int, jobs: list[Job], pool: vmserve.KVPool | None
    ) -> None:
        weights, token = _DEVICES[device]
        profile = DeviceProfile(
            name=device, virtual=_KERNELS, paged=_KERNELS, step=1e-4, weights=weights, token=token,
            map_page=0.0, map_page_hidden=0.0, copy_bytes_per_second=5e9, swap_bytes_per_second=5e9,
        )  # fmt: skip
        config = SimulationConfig(
            layout=_LAYOUT, limit_bytes=limit, profile=profile, max_model_len=512, max_num_seqs=32,
            regime="paged", mapper="off",
        )  # fmt: skip
        self.sim = SimulatedEngine(config)
        self._jobs = list(enumerate(jobs))
        self._random = random.Random(len(jobs))
        self.lender: Any = None
        if pool is not None:
            least = self.sim.engine.kv_bounds()[1]
            self.sim.memory.set_limit(least)
            self.facts = SimpleNamespace(kv_cache_memory=LEAST)
            self.resolved = SimpleNamespace(kv_limit_bytes=least)
            pool.join_now(cast("Client", self), pool.unused_name("engine"))

    def lend(self, order: Lend) -> None:
        """Carry out an order of the pool."""
        self.sim.engine.lend(order.limit_bytes, reclaim=order.reclaim)
        if not self.sim.has_unfinished:
            self.flush()

    def flush(self) -> None:
        """Tell the pool what is new."""
        for holding, is_answer in self.sim.engine.memory_news():
            self.lender.report(MemoryReport(holding, is_answer))

    def add(self, count: int) -> None:
        for number, (num_prompt, num_answer) in self._jobs[:count]:
            prompt = tuple(self._random.randrange(VOCAB_SIZE) for _ in range(num_prompt))
            asked = Asked(name=f"{number}", prompt=prompt, outputs=(num_answer,), seed=number)
            self.sim.add(asked)
        del self._jobs[:count]

    def step(self, *, asks_again: bool) -> None:
        self.flush()  # which carries out orders, as a service does before each step
        before, num_open = self.sim.now, len(self.sim.open_names)
        self.sim.step()
        if asks_again:
            self.add(num_open - len(self.sim.open_names))
        self.flush()
        if self.sim.now == before:
            self.sim.now += _PAUSE


def serve(device: str, jobs: list[list[Job]], *, shares: bool, asks_again: bool) -> Outcome:
    size = _NUM_REQUESTS // 4 * (sum(_PROMPTS) + sum(_ANSWERS)) // 2 * _TOKEN_BYTES
    pool = vmserve.KVPool(size) if shares else None
    engines = [Engine(device, size if shares else size // 2, each, pool) for each in jobs]
    for engine, each in zip(engines, jobs, strict=True):
        engine.add(max(1, len(each) // 4) if asks_again else len(each))
    for engine in engines:
        engine.flush()
    while running := [each for each in engines if each.sim.has_unfinished]:
        min(running, key=lambda each: each.sim.now).step(asks_again=asks_again)
    runs = [each.sim for each in engines]
    outcome = Outcome(
        max(sim.now for sim in runs),
        sum(step.num_tokens for sim in runs for step in sim.run.steps),
        sum(sim.scheduler.totals.preemptions for sim in runs),
    )
    for sim in runs:
        sim.close()
    return outcome


def measured(device: str, split: tuple[int, int], asks_again: bool, seeds: int) -> dict[str, Any]:
    """Means over the seeds, pool : halves."""
    outcomes = []
    for seed in range(seeds):
        chance = random.Random(seed)
        jobs = [
            [
                (chance.randrange(*_PROMPTS), chance.randrange(*_ANSWERS))
                for _ in range(2 * count if asks_again else count)
            ]
            for count in split
        ]
        ways = (serve(device, jobs, shares=each, asks_again=asks_again) for each in (False, True))
        outcomes.append(tuple(ways))
    speeds = [halves.seconds / pool.seconds for halves, pool in outcomes]
    mean = statistics.mean
    return {
        "device": device,
        "split": f"{split[0]} : {split[1]}",
        "come": "clients" if asks_again else "at once",
        "speed": f"{mean(speeds):.3f} ({min(speeds):.3f} to {max(speeds):.3f})",
        "tokens": mean(pool.num_tokens / halves.num_tokens for halves, pool in outcomes),
        "before": mean(halves.num_preemptions for halves, _ in outcomes),
        "after": mean(pool.num_preemptions for _, pool in outcomes),
    }


def main() -> None:
    args = script.parser(__doc__, seeds=8, devices=tuple(_DEVICES)).parse_args()
    cases = itertools.product(args.devices, ((32, 32), (60, 4)), (False, True))
    columns = {
        "device": "{device}",
        "requests": "{split}",
        "come": "{come}",
        "speed, pool : halves": "{speed}",
        "tokens": "{tokens:.3f}",
        "preemptions": "{before:.1f}, {after:.1f}",
    }
    rows = (measured(*case, args.seeds) for case in cases)
    note = "Tokens computed, pool : halves; preemptions with halves and with a pool."
    script.show(script.table_of("two engines over a pool, simulated", rows, columns, note))


if __name__ == "__main__":
    main()
