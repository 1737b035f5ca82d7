"""Both papers' figures on the real engine; see ``served`` for what is compared.

vAttention's (names with a v) are numbered as in the scripts of its published artifact. Where that
paper has paged FlashAttention and FlashInfer kernels against its own, these have this engine's
paged kernels against its virtual ones; lengths are what a processor reads in seconds.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from vmserve.models import ModelConfig, resolve_model
from vmserve.sampling import SamplingParams
from vmserve_bench.kernels import sections as kernels
from vmserve_bench.lab.report import Report
from vmserve_bench.lab.statistics import summarize
from vmserve_bench.lab.table import SectionResult
from vmserve_bench.papers.points import Points
from vmserve_bench.papers.served import (
    CONTEXT,
    POOL_TOKENS,
    SCALE,
    SYSTEMS,
    Fleet,
    Job,
    Run,
    System,
    make_jobs,
    scaled,
)
from vmserve_bench.sharing import blocks
from vmserve_bench.sharing.options import Options as SharingOptions
from vmserve_bench.sharing.prefix import SHOT_TOKENS, translation_shapes
from vmserve_bench.workloads.shapes import RequestShape, alpaca, azure_code, sharegpt

if TYPE_CHECKING:
    from vmserve.engine.engine import LLMEngine

__all__ = ["FIGURES", "RealOptions"]


@dataclass(frozen=True, slots=True)
class RealOptions:
    """``quick`` measures little, to see that everything runs. ``model``: of the engine."""

    quick: bool = False
    seed: int = 0
    model: str | None = None

    @property
    def rounds(self) -> int:
        return 1 if self.quick else 3

    def pick(self, full: Any, quick: Any) -> Any:
        return quick if self.quick else full

    @property
    def context(self) -> int:
        """Longest sequence of the model."""
        return ModelConfig.from_directory(resolve_model(self.model)).max_position_embeddings


# -- PagedAttention: requests of a trace ------------------------------------------------------


def _chats(options: RealOptions, seed: int, num_requests: int = 200) -> list[RequestShape]:
    drawn = sharegpt(options.pick(num_requests, 10), seed, request_rate=1.0)
    return scaled(drawn, options.pick(SCALE, 32))


def _conversations(options: RealOptions, seed: int) -> list[RequestShape]:
    return scaled(chat_shapes(options.pick(120, 10), seed), options.pick(1, 8))


def chat_shapes(num_requests: int, seed: int, turns: int = 4) -> list[RequestShape]:
    """Turns of conversations, whose history is the prompt, cut to the last half context.

    They arrive as independent requests would. No KV cache is kept between them, as in the paper.
    """
    shapes, history = [], 0
    for index, shape in enumerate(scaled(sharegpt(num_requests, seed, request_rate=1.0))):
        history = shape.num_input_tokens + (history if index % turns else 0)
        output = min(shape.num_output_tokens, CONTEXT // 2)
        shapes.append(
            replace(shape, num_input_tokens=min(history, CONTEXT // 2), num_output_tokens=output)
        )
        history += output
    return shapes


def _up_to(shapes: list[RequestShape], most: int) -> list[RequestShape]:
    return [shape for shape in shapes if shape.num_input_tokens + shape.num_output_tokens <= most]


def _at_once(
    systems_of: Callable[[RealOptions], Mapping[str, System]],
    options: RealOptions,
    report: Report,
    *,
    pool_tokens: int = POOL_TOKENS,
) -> Points:
    """ShareGPT's requests, all there at once."""
    with Fleet(options.model, pool_tokens=pool_tokens) as fleet:
        jobs = make_jobs(_chats(options, options.seed), fleet.vocabulary, options.seed)
        runs = {name: (system, [jobs]) for name, system in systems_of(options).items()}
        return fleet.measure(runs, options.rounds, options.seed, report)


def _block_sizes(options: RealOptions) -> dict[str, System]:
    sizes = options.pick((4, 8, 16, 32, 64, 128), (4, 16))
    return {f"blocks of {size}": System("paged", options=(("block_size", size),)) for size in sizes}


def _preemptions(options: RealOptions) -> dict[str, System]:
    return {
        f"blocks of {size}, {how}": System(
            "paged", options=(("block_size", size), ("preemption", how), ("swap_space", space))
        )
        for size in options.pick((4, 16, 64), (4, 16))
        for how, space in (("recompute", 0), ("swap", "256MiB"))
    }


def _by_rate(
    draw: Callable[[RealOptions, int], list[RequestShape]], options: RealOptions, report: Report
) -> Points:
    """Poisson arrivals at shares of the rate that vmserve sustains with all requests at once.

    Each round has a trace of its own, the same for all systems.
    """
    seeds = range(options.seed, options.seed + options.rounds)
    traces = {seed: draw(options, seed) for seed in seeds}
    with Fleet(options.model) as fleet:

        def jobs(rate: float | None = None) -> list[list[Job]]:
            words = fleet.vocabulary
            return [make_jobs(shapes, words, seed, rate=rate) for seed, shapes in traces.items()]

        best = fleet.best(SYSTEMS["vmserve, paged"], jobs())
        runs = {
            f"{name}, rate {rate:g}": (system, jobs(rate * best))
            for rate in options.pick((0.5, 0.7, 0.85, 1.0), (0.7,))
            for name, system in SYSTEMS.items()
        }
        points = fleet.measure(runs, options.rounds, options.seed, report)
    points.more["best_requests_per_s"] = best
    return points


def _samples_and_beams(options: RealOptions, report: Report) -> Points:
    """Alpaca's lengths as they are, as a quarter would be a few tokens; none of the longest."""
    ways = {"basic sampling": (1, False)}
    for what, is_beam in (("samples", False), ("beams", True)):
        ways |= {f"{width} {what}": (width, is_beam) for width in options.pick((2, 4, 6), (2,))}
    drawn = scaled(alpaca(options.pick(120, 8), options.seed), options.pick(1, 8))
    shapes = _up_to(drawn, CONTEXT // 2)
    runs: dict[str, Run] = {}
    with Fleet(options.model) as fleet:
        for way, (width, is_beam) in ways.items():
            fewer = shapes[: max(8, len(shapes) // width)]
            jobs = make_jobs(fewer, fleet.vocabulary, options.seed, width=width, is_beam=is_beam)
            for name in ("vmserve, paged", "Orca (Oracle)"):
                runs[f"{way}, {name}"] = SYSTEMS[name], [jobs]
        return fleet.measure(runs, 1, options.seed, report)


def _common_prefix(options: RealOptions, report: Report) -> Points:
    """A prefix that is computed once, or each time, or kept by Orca each time."""
    cached = (("enable_prefix_caching", True),)
    systems = {
        "vmserve, paged, prefix cache": System("paged", options=cached),
        "vmserve, virtual, prefix cache": System("virtual", options=cached),
        "vmserve, paged, none": System("paged"),
        "Orca (Oracle)": SYSTEMS["Orca (Oracle)"],
    }
    runs: dict[str, Run] = {}
    with Fleet(options.model) as fleet:
        for shots, num_prefix in SHOT_TOKENS.items():
            shapes = translation_shapes(options.pick(64, 4), num_prefix, options.seed)
            jobs = make_jobs(shapes, fleet.vocabulary, options.seed)
            runs |= {f"{shots}, {name}": (system, [jobs]) for name, system in systems.items()}
        return fleet.measure(runs, options.rounds, options.seed, report)


# -- vAttention: the two views of one pool ----------------------------------------------------

_VIEWS = {"paged": System("paged"), "virtual": System("virtual")}


def _roomy(options: RealOptions, context: int, num_seqs: int) -> Fleet:
    """Memory for all requests, so that nothing is preempted."""
    room = num_seqs * (context + 64)
    return Fleet(options.model, context=context, pool_tokens=room, block_tokens=16, page_tokens=64)


def _prompt(num_tokens: int, first: int, vocabulary: int) -> list[int]:
    """A prompt; those of different ``first`` have no common prefix."""
    return [8 + (first + 7 * place) % (vocabulary - 8) for place in range(num_tokens)]


def _step(engine: LLMEngine) -> float:
    began = time.perf_counter()
    result = engine.step()
    seconds = time.perf_counter() - began
    if result.failures:
        raise result.failures[0].error
    return seconds


def _timed_steps(
    engines: dict[str, LLMEngine], batch: int, num_prompt: int, num_steps: int
) -> dict[str, dict[str, float]]:
    """Time steps that decode ``batch`` requests, ten of each engine in turn: drift meets all."""
    # The first ones to decode do so until the last prompt is read.
    params = SamplingParams(
        temperature=0.0, max_tokens=3 * num_steps + 8 * batch, ignore_eos=True, detokenize=False
    )

    def waited(engine: LLMEngine) -> int:
        return int(engine.memory.stats().unhidden_calls_total)

    for engine in engines.values():
        for index in range(batch):
            prompt = _prompt(num_prompt, index, engine.model_config.vocab_size)
            engine.add_request(str(index), prompt, params)
        enough = engine.counters.generation_tokens + 4 * batch
        while engine.scheduler.num_waiting or engine.counters.generation_tokens < enough:
            _step(engine)
    before = {name: waited(engine) for name, engine in engines.items()}
    times: dict[str, list[float]] = {name: [] for name in engines}
    for _ in range(0, num_steps, 10):
        for name, engine in engines.items():
            times[name] += [_step(engine) for _ in range(10)]
    found = {}
    for name, engine in engines.items():
        steps = summarize(times[name])
        found[name] = {
            "tokens_per_s": batch / steps.median,
            "step_p50_s": steps.median,
            "step_p99_s": steps.p99,
            "step_max_s": steps.max,
            "calls_unhidden": waited(engine) - before[name],
        }
        for request in list(engine.request_ids):
            engine.abort(request)
        engine.step()  # finds nothing to do, and gives memory back
    return found


def _decoding(
    case: str,
    systems: Mapping[str, System],
    batches: Sequence[int],
    num_prompt: int,
    num_steps: int,
    options: RealOptions,
    report: Report,
) -> Points:
    """Steps that decode batches. ``case``: a point's name, of ``{batch}`` and ``{system}``."""
    room = 4 * num_steps + 12 * max(batches)
    num_prompt = min(num_prompt, options.context - room)
    with _roomy(options, num_prompt + room, max(batches)) as fleet:
        points = Points(token_bytes=fleet.token_bytes)
        engines = {name: fleet.engine(system) for name, system in systems.items()}
        _timed_steps(engines, batches[0], num_prompt, num_steps)  # the pools grow
        for index, batch in enumerate(batches, 1):
            found = _timed_steps(engines, batch, num_prompt, num_steps)
            for system, metrics in found.items():
                demand = metrics["tokens_per_s"] * fleet.token_bytes
                name = case.format(batch=batch, system=system)
                points.add(name, **metrics, kv_bytes_per_s=demand)
            report(index / len(batches))
    return points


def _memory_demand(options: RealOptions, report: Report) -> Points:
    batches = options.pick((1, 2, 4, 8, 16, 32, 64, 128), (1, 2))
    length, steps, only = options.pick(128, 16), options.pick(60, 10), {"": _VIEWS["virtual"]}
    return _decoding("batch of {batch}", only, batches, length, steps, options, report)


def _long_contexts(options: RealOptions, report: Report) -> Points:
    batches, length = options.pick((1, 4, 8, 16), (1, 2)), options.pick(2048, 32)
    case, steps = "batch of {batch}, {system}", options.pick(100, 10)
    return _decoding(case, _VIEWS, batches, length, steps, options, report)


def _mapping(options: RealOptions, report: Report) -> Points:
    """Steps that map pages themselves, against a mapper that maps ahead, in rounds."""
    pages = ("page_tokens", 16)
    ways = {
        "overlapped": System("virtual", options=(pages,)),
        "synchronous": System("virtual", options=(pages, ("kv_mapper", "off"))),
    }
    batches = options.rounds * options.pick((16,), (2,))
    return _decoding("{system}", ways, batches, 64, options.pick(300, 20), options, report)


def _prompts_alone(options: RealOptions, report: Report) -> Points:
    """Seconds until a prompt's first token, by length and view."""
    wanted = options.pick((256, 1024, 2048, 4096), (32, 64))
    lengths = [length for length in wanted if length + 16 <= options.context]
    with _roomy(options, lengths[-1] + 16, 1) as fleet:
        runs = {
            f"{n:,} tokens, {view}": (system, [[Job("0", _prompt(n, n, fleet.vocabulary), 1)]])
            for n in lengths
            for view, system in _VIEWS.items()
        }
        points = fleet.measure(runs, 2 * options.rounds, options.seed, report)
    for case, metrics in points.cases.items():
        num_tokens = len(runs[case][1][0][0].prompt)
        metrics["tokens_per_s"] = [num_tokens / seconds for seconds in metrics["e2e_p50_s"]]
    return points


def _long_prompts(loads: tuple[float, ...], options: RealOptions, report: Report) -> Points:
    """Azure's code requests over 8, in the place of summaries of long texts, by view.

    All are there at once, or they arrive at shares of the rate that this takes.
    """
    drawn = azure_code(options.pick(64, 6), options.seed, request_rate=1.0, burstiness=1.0)
    shapes = _up_to(scaled(drawn, 8), 1024)
    with _roomy(options, 1024, 32) as fleet:
        jobs = make_jobs(shapes, fleet.vocabulary, options.seed)
        if not loads:
            runs = {view: (system, [jobs]) for view, system in _VIEWS.items()}
            return fleet.measure(runs, 2 * options.rounds, options.seed, report)
        best = fleet.best(_VIEWS["paged"], [jobs])
        runs = {}
        for load in options.pick(loads, loads[-1:]):
            jobs = make_jobs(shapes, fleet.vocabulary, options.seed, rate=load * best)
            runs |= {f"{load:g} of the most, {view}": (_VIEWS[view], [jobs]) for view in _VIEWS}
        points = fleet.measure(runs, options.rounds, options.seed, report)
    points.more["best_requests_per_s"] = best
    return points


# -- the figures ------------------------------------------------------------------------------

_NOTE = (
    f"Context ({CONTEXT}), pool ({POOL_TOKENS:,} tokens) and ShareGPT's lengths are the paper's "
    f"over {SCALE}. A processor gains less from a larger batch than a GPU: what runs at once "
    "compares with the paper, rates do not."
)


@dataclass(frozen=True)
class Figure:
    """``metrics``: columns of the table of points; the first also as a ratio ``over`` others."""

    name: str
    what: str
    measure: Callable[[RealOptions, Report], Points | SectionResult]
    metrics: str = ""
    over: tuple[str, ...] = ()

    @property
    def title(self) -> str:
        paper, number = "vAttention, figure" if self.is_v else "Figure", self.name.lstrip("v")
        return f"{paper} {number}, real engine: {self.what}"

    @property
    def is_v(self) -> bool:
        return self.name.startswith("v")

    def __call__(self, options: RealOptions, report: Report) -> SectionResult:
        found = self.measure(options, report)
        if isinstance(found, SectionResult):
            return found
        note = "This machine's processor." if self.is_v else _NOTE
        table = found.table(self.title, self.metrics.split(), self.over, note)
        return SectionResult({"cases": found.cases, **found.more}, (table,))


def _kernels(section: str, options: RealOptions, report: Report) -> SectionResult:
    measure = kernels.SUITE.sections[section]
    result = measure(kernels.Options(options.quick, options.seed), report)
    return SectionResult({"kernel": dict(result.data)}, result.tables)


def _saved_by_sharing(options: RealOptions, report: Report) -> SectionResult:
    wanted = SharingOptions(
        num_requests=options.pick(12, 4),
        workloads=options.pick(("alpaca", "sharegpt"), ("alpaca",)),
        widths=options.pick((2, 4, 6), (2,)),
        block_sizes=(16,),
        seed=options.seed,
        blocks_model=options.model,
    )
    return blocks.run(wanted, report)


def _kernel_and_engine(options: RealOptions, report: Report) -> SectionResult:
    kernel, engine = _kernels("blocks", options, report), _BLOCKS(options, report)
    return SectionResult({**kernel.data, **engine.data}, (*kernel.tables, *engine.tables))


_all_at_once = partial(_at_once, lambda _: SYSTEMS)
_RATES = "normalized_s requests_per_s at_once"
_BLOCKS = Figure(
    "18",
    "block sizes, all there at once; and bench kernels --section blocks",
    partial(_at_once, _block_sizes),
    "requests_per_s normalized_s at_once preemptions",
)
_LIST = [
    Figure("2", "share of the pool that holds tokens", _all_at_once, "states_share at_once"),
    Figure("12", "ShareGPT by rate", partial(_by_rate, partial(_chats, num_requests=140)), _RATES),
    Figure("13", "all there at once", _all_at_once, "at_once", ("Orca (Oracle)", "Orca (Max)")),
    Figure(
        "14",
        "Alpaca, all there at once; Orca computes a prompt for each sample",
        _samples_and_beams,
        "requests_per_s at_once",
        ("Orca (Oracle)",),
    ),
    Figure("15", "bench sharing --section blocks", _saved_by_sharing),
    Figure(
        "16",
        "a common prefix, of one example or five",
        _common_prefix,
        "requests_per_s at_once prefix_hit_rate",
        ("Orca (Oracle)",),
    ),
    Figure("17", "conversations by rate", partial(_by_rate, _conversations), _RATES),
    replace(_BLOCKS, measure=_kernel_and_engine),
    Figure(
        "19",
        "recomputing and swapping, half of the pool",
        partial(_at_once, _preemptions, pool_tokens=POOL_TOKENS // 2),
        "normalized_s preemptions swaps",
        ("swap",),
    ),
    Figure("v2", "bench kernels --section prefill", partial(_kernels, "prefill")),
    Figure("v3", "bench kernels --section blocks", partial(_kernels, "blocks")),
    Figure("v4", "decoding by batch", _memory_demand, "tokens_per_s step_p50_s kv_bytes_per_s"),
    Figure("v6", "a prompt alone", _prompts_alone, "tokens_per_s e2e_p50_s", ("paged",)),
    Figure("v7", "decoding", _long_contexts, "tokens_per_s step_p50_s", ("paged",)),
    Figure("v8", "long prompts", partial(_long_prompts, ()), "requests_per_s", ("paged",)),
    Figure(
        "v9",
        "long prompts that come one by one",
        partial(_long_prompts, (0.6, 0.8)),
        "e2e_p50_s e2e_p90_s at_once",
    ),
    Figure(
        "v11",
        "decoding steps while pages of 16 tokens are mapped",
        _mapping,
        "step_p50_s step_p99_s step_max_s calls_unhidden",
    ),
]
FIGURES = {figure.name: figure for figure in _LIST}
