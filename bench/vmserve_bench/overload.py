"""Does throughput collapse when more is asked for than the KV cache holds?

A closed loop of clients, each with one request at a time, whose requests at their full length need
``load`` times the pool. Throughput is counted between the moment when a quarter of the requests has
ended and the moment when the last one is sent, so that all clients are there throughout.

Twice: the simulated engine (OPT-13B on an A100 40GB, ShareGPT's lengths), and the real engine on
this machine's processor with the embedded model and a tiny pool.
"""

from __future__ import annotations

import itertools
import random
import statistics
import time
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from vmserve.config import EngineConfig
from vmserve.engine.engine import LLMEngine
from vmserve.sampling import SamplingParams
from vmserve_bench.lab.table import SectionResult, Table
from vmserve_bench.papers.figures import COPIES_PER_BLOCK, SECONDS_PER_COPY
from vmserve_bench.simulation import SimulatedEngine, SimulationConfig, asked
from vmserve_bench.simulation.devices import OPT_13B_A100
from vmserve_bench.workloads.shapes import lognormal, prompts, sharegpt

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from vmserve_bench.lab.report import Report
    from vmserve_bench.workloads.shapes import RequestShape

__all__ = ["LOADS", "Measured", "num_clients", "real", "run", "simulated"]

LOADS = (0.5, 1.0, 2.0, 4.0)
Preempts = Literal["recompute", "swap"]
Regime = Literal["virtual", "paged"]
Kind = Literal["simulated", "real"]
#: Goal at 1, 2 and 4 times the pool, as a share of the best point.
GOAL = 0.9

#: Requests of a run.
_NUM_REQUESTS: Mapping[Kind, int] = {"simulated": 600, "real": 96}
_REAL_POOL_TOKENS = 1024
_REAL_CONTEXT = 512


@dataclass(frozen=True, slots=True)
class Measured:
    """``tokens_per_second``: generated ones, of the window; seconds of the engine's own clock."""

    load: float
    num_clients: int
    tokens_per_second: float
    window_s: float
    num_preemptions: int
    num_swaps: int
    num_steps: int

    def to_dict(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self.__dataclass_fields__}


def num_clients(load: float, pool_tokens: int, shapes: Sequence[RequestShape]) -> int:
    """Number of clients whose requests take ``load`` times the pool on average."""
    tokens = sum(shape.num_input_tokens + shape.num_output_tokens for shape in shapes)
    return max(1, round(load * pool_tokens * len(shapes) / tokens))


class _Window:
    """Window from a quarter of the answers until nothing is left to send."""

    def __init__(self, num_requests: int) -> None:
        self._from = num_requests // 4
        self.began: tuple[float, int] | None = None
        self.ended: tuple[float, int] | None = None

    def look(self, now: float, num_generated: int, num_ended: int, num_left: int) -> None:
        if self.began is None and num_ended >= self._from:
            self.began = (now, num_generated)
        if self.ended is None and not num_left:
            self.ended = (now, num_generated)

    @property
    def seconds(self) -> float:
        assert self.began is not None
        assert self.ended is not None
        return self.ended[0] - self.began[0]

    @property
    def tokens_per_second(self) -> float:
        """Raises ``ValueError`` where the window is empty."""
        if self.began is None or self.ended is None or self.seconds <= 0:
            raise ValueError("too few requests for so many clients: nothing was measured")
        return (self.ended[1] - self.began[1]) / self.seconds


def simulated(
    load: float, preempts: Preempts, regime: Regime, *, num_requests: int, seed: int = 0
) -> Measured:
    device = OPT_13B_A100
    shapes = sharegpt(num_requests, seed)
    clients = num_clients(load, device.kv_tokens, shapes)
    config = SimulationConfig.of(
        device,
        regime=regime,
        preemption=preempts,
        swap_bytes=4 * device.kv_bytes if preempts == "swap" else 0,
        seconds_per_swap_run=COPIES_PER_BLOCK * SECONDS_PER_COPY,
        prefix_caching=False,
        max_num_seqs=256,
    )
    left = deque(asked(shapes, seed=seed))
    window = _Window(num_requests)
    num_generated = 0
    with SimulatedEngine(config) as engine:
        while left or engine.has_unfinished:
            while left and len(engine.open_names) < clients:
                engine.add(left.popleft())
            before = len(engine.run.steps)
            engine.step()
            num_generated += sum(step.num_generated for step in engine.run.steps[before:])
            window.look(engine.now, num_generated, len(engine.run.requests), len(left))
    counters = engine.run.counters
    return Measured(
        load,
        clients,
        window.tokens_per_second,
        window.seconds,
        counters["num_preemptions_total"],
        counters["num_swapped_out_total"],
        engine.num_steps,
    )


def real(
    load: float, preempts: Preempts, regime: Regime, *, num_requests: int, seed: int = 0
) -> Measured:
    """Run the embedded model with a pool of 1,024 tokens and requests of 128 on average."""
    shapes = lognormal(
        num_requests,
        seed,
        mean_in=64,
        mean_out=64,
        sigma_in=0.6,
        sigma_out=0.6,
        max_total_tokens=_REAL_CONTEXT,
    )
    engine = _real_engine(preempts, regime)
    stats = engine.memory.stats()
    pool_tokens = stats.limit_pages * stats.page_tokens
    clients = num_clients(load, pool_tokens, shapes)
    vocabulary = engine.model_config.vocab_size
    left = deque(zip(shapes, prompts(shapes, vocabulary, seed), strict=True))
    window = _Window(num_requests)
    num_steps = num_ended = 0
    while left or engine.has_unfinished:
        while left and len(engine.request_ids) < clients:
            shape, prompt = left.popleft()
            params = SamplingParams(
                max_tokens=shape.num_output_tokens, ignore_eos=True, detokenize=False, temperature=0
            )
            engine.add_request(str(shape.index), prompt, params)
        result = engine.step()
        if result.failures:
            raise result.failures[0].error
        num_ended += sum(output.finished for output in result.outputs)
        num_steps += 1
        generated = engine.counters.generation_tokens
        window.look(time.perf_counter(), generated, num_ended, len(left))
    scheduler = engine.scheduler
    measured = Measured(
        load,
        clients,
        window.tokens_per_second,
        window.seconds,
        scheduler.num_preemptions_total,
        scheduler.num_swaps_total,
        num_steps,
    )
    engine.close()
    return measured


def _real_engine(preempts: Preempts, regime: Regime) -> LLMEngine:
    # Four layers, K and V of two heads of 64 in float32, in pages of 32 tokens.
    page_bytes = 32 * 2 * 2 * 64 * 4
    return LLMEngine(
        EngineConfig(
            dtype="float32",
            kv_regime=regime,
            kv_page_size=page_bytes,
            kv_cache_memory=_REAL_POOL_TOKENS // 32 * 4 * page_bytes,
            max_model_len=_REAL_CONTEXT,
            max_num_seqs=128,
            enable_prefix_caching=False,
            preemption=preempts,
            swap_space="64MiB" if preempts == "swap" else 0,
        )
    )


def run(
    kinds: Sequence[Kind],
    report: Report,
    *,
    seed: int = 0,
    rounds: int = 3,
    loads: Sequence[float] = LOADS,
    num_requests: int | None = None,
) -> SectionResult:
    """Measure all loads, preemptions and regimes of each kind.

    ``rounds``: of the real engine, whose times differ from run to run; each serves the same
    requests at every load, in a drawn order. The simulated one has one: its times are computed.
    ``num_requests``: of each run; None: those of the kind.
    """
    data: dict[str, Any] = {}
    tables = []
    for index, kind in enumerate(kinds):

        def report_kind(done: float, index: int = index) -> None:
            report((index + done) / len(kinds))

        count = num_requests or _NUM_REQUESTS[kind]
        kind_rounds = 1 if kind == "simulated" else rounds
        cells = _measure(kind, kind_rounds, seed, report_kind, loads, count)
        for (regime, preempts, load), runs in cells.items():
            name = f"{kind}, {regime}, {preempts}"
            data.setdefault(name, {})[f"{load:g}"] = [one.to_dict() for one in runs]
        tables.append(_table(kind, cells))
    return SectionResult(data, tuple(tables))


def _measure(
    kind: Kind,
    rounds: int,
    seed: int,
    report: Report,
    loads: Sequence[float],
    num_requests: int,
) -> dict[tuple[Regime, Preempts, float], list[Measured]]:
    function: Callable[..., Measured] = simulated if kind == "simulated" else real
    # The real engine takes seconds for each run: one regime there.
    regimes: tuple[Regime, ...] = ("paged", "virtual") if kind == "simulated" else ("paged",)
    both: tuple[Preempts, ...] = ("recompute", "swap")
    cells: dict[tuple[Regime, Preempts, float], list[Measured]] = {
        cell: [] for cell in itertools.product(regimes, both, loads)
    }
    if kind == "real":
        real(1.0, "recompute", "paged", num_requests=32, seed=seed)  # warm
    order, done = list(cells), 0
    shuffle = random.Random(seed).shuffle
    for _ in range(rounds):
        shuffle(order)
        for regime, preempts, load in order:
            measured = function(load, preempts, regime, num_requests=num_requests, seed=seed)
            cells[regime, preempts, load].append(measured)
            done += 1
            report(done / (rounds * len(order)))
    return cells


def _table(kind: Kind, cells: dict[tuple[Regime, Preempts, float], list[Measured]]) -> Table:
    def rate(runs: list[Measured]) -> float:
        return statistics.median(one.tokens_per_second for one in runs)

    rows = []
    for (regime, preempts, load), runs in cells.items():
        best = max(rate(each) for cell, each in cells.items() if cell[:2] == (regime, preempts))
        rates = sorted(one.tokens_per_second for one in runs)
        rows.append(
            (
                f"{regime}, {preempts}",
                f"{load:g}",
                str(runs[0].num_clients),
                f"{rate(runs):,.0f}"
                + (f" ({rates[0]:,.0f} to {rates[-1]:,.0f})" * (len(runs) > 1)),
                f"{100 * rate(runs) / best:.0f} %",
                str(runs[0].num_steps),
                str(runs[0].num_preemptions),
                str(runs[0].num_swaps),
            )
        )
    what = "OPT-13B on an A100 40GB, simulated" if kind == "simulated" else "this machine's CPU"
    return Table(
        f"Throughput by load ({what})",
        ("way", "load", "clients", "tokens/s", "of the best", "steps", "preemptions", "swapped"),
        tuple(rows),
        f"Goal: {100 * GOAL:.0f} % at loads of 1, 2 and 4."
        + (" Medians of the rounds, and their range." if kind == "real" else ""),
    )
