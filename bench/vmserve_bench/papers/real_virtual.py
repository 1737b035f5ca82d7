"""Figures of the vAttention paper on the real engine: the two views of one pool.

Numbers are those of the ASPLOS 2025 paper, as the scripts of its published artifact give them.
Where that paper has paged FlashAttention and FlashInfer kernels against its own, these have this
engine's paged kernels against its virtual ones; lengths are what a processor reads in seconds.
"""

from __future__ import annotations

import itertools
import time
from typing import TYPE_CHECKING, Any, NamedTuple

from vmserve.models import ModelConfig, resolve_model
from vmserve.sampling import SamplingParams
from vmserve_bench.kernels.sections import Options as KernelOptions
from vmserve_bench.kernels.sections import blocks as kernel_blocks
from vmserve_bench.kernels.sections import prefill as kernel_prefill
from vmserve_bench.lab.statistics import summarize
from vmserve_bench.lab.table import SectionResult, Table
from vmserve_bench.papers.fleet import Fleet
from vmserve_bench.papers.points import Points, RealOptions, shuffled
from vmserve_bench.papers.served import Job, System, make_jobs, record, scaled
from vmserve_bench.workloads.shapes import azure_code

if TYPE_CHECKING:
    from collections.abc import Callable

    from vmserve.engine.engine import LLMEngine
    from vmserve_bench.lab.report import Report

__all__ = ["REAL_VIRTUAL"]

_VIEWS = {"paged": System("paged"), "virtual": System("virtual")}
_BLOCK_TOKENS, _PAGE_TOKENS = 16, 64
#: Steps of one engine, then of the next, so that drift meets all alike.
_BLOCK_STEPS = 10
_HERE = "This machine's processor."


def _fleet(options: RealOptions, context: int, num_seqs: int) -> Fleet:
    """Memory for all requests, so that nothing is preempted."""
    return Fleet(
        options.model,
        context=context,
        pool_tokens=num_seqs * (context + _PAGE_TOKENS),
        block_tokens=_BLOCK_TOKENS,
        page_tokens=_PAGE_TOKENS,
    )


def _context(options: RealOptions) -> int:
    """Context length of the model."""
    return ModelConfig.from_directory(resolve_model(options.model)).max_position_embeddings


def _step(engine: LLMEngine) -> float:
    began = time.perf_counter()
    result = engine.step()
    seconds = time.perf_counter() - began
    if result.failures:
        raise result.failures[0].error
    return seconds


def _prompt(num_tokens: int, first: int, vocabulary: int) -> list[int]:
    """A prompt; those of different ``first`` have no common prefix."""
    return [8 + (first + 7 * place) % (vocabulary - 8) for place in range(num_tokens)]


def _fill(engine: LLMEngine, batch: int, num_prompt: int, num_output: int, name: str) -> None:
    """Step until ``batch`` requests decode, each after ``num_prompt`` tokens."""
    vocabulary = engine.model_config.vocab_size
    params = SamplingParams(
        temperature=0.0, max_tokens=num_output, ignore_eos=True, detokenize=False
    )
    for index in range(batch):
        engine.add_request(f"{name}{index}", _prompt(num_prompt, index, vocabulary), params)
    computed = engine.counters.generation_tokens
    while engine.scheduler.num_waiting or engine.counters.generation_tokens - computed < 4 * batch:
        _step(engine)


def _clear(engine: LLMEngine) -> None:
    for name in list(engine.request_ids):
        engine.abort(name)
    engine.step()  # finds nothing to do, and gives memory back


class _Steps(NamedTuple):
    """``seconds`` of each; ``waited``: driver calls that they waited for."""

    seconds: list[float]
    waited: int


def _decoding(
    engines: dict[str, LLMEngine], batch: int, num_prompt: int, num_steps: int
) -> dict[str, _Steps]:
    """Time steps that decode ``batch`` requests, blocks of the engines' steps in turn."""
    # The first ones to decode do so until the last prompt is read.
    num_output = 3 * num_steps + 8 * batch
    for engine in engines.values():
        _fill(engine, batch, num_prompt, num_output, f"{batch}-")
    before = {name: _unhidden(engine) for name, engine in engines.items()}
    times: dict[str, list[float]] = {name: [] for name in engines}
    for _ in range(0, num_steps, _BLOCK_STEPS):
        for name, engine in engines.items():
            times[name] += [_step(engine) for _ in range(_BLOCK_STEPS)]
    waited = {name: _unhidden(engine) - before[name] for name, engine in engines.items()}
    for engine in engines.values():
        _clear(engine)
    return {name: _Steps(seconds, waited[name]) for name, seconds in times.items()}


def _unhidden(engine: LLMEngine) -> int:
    return int(engine.memory.stats().unhidden_calls_total)


def _add_steps(points: Points, case: str, batch: int, steps: _Steps, **more: float) -> None:
    summary = summarize(steps.seconds)
    points.add(
        case,
        tokens_per_s=batch / summary.median,
        step_p50_s=summary.median,
        step_p99_s=summary.p99,
        step_max_s=summary.max,
        calls_unhidden=steps.waited,
        **more,
    )


def figure_4(options: RealOptions, report: Report) -> SectionResult:
    """Decoding throughput by batch, and the KV memory that it asks for."""
    batches = (1, 2) if options.quick else (1, 2, 4, 8, 16, 32, 64, 128)
    steps = options.pick(60, 10)
    points = Points()
    num_prompt = options.pick(128, 16)
    context = num_prompt + 4 * steps + 8 * batches[-1]
    with _fleet(options, context, batches[-1]) as fleet:
        engine = fleet.engine(_VIEWS["virtual"])
        for index, batch in enumerate(batches):
            done = _decoding({"": engine}, batch, num_prompt, steps)[""]
            demand = batch / summarize(done.seconds).median * fleet.token_bytes
            _add_steps(points, f"batch of {batch}", batch, done, kv_bytes_per_s=demand)
            report((index + 1) / len(batches))
        token_bytes = fleet.token_bytes
    rows = tuple(
        (
            case,
            *(points.cell(case, name) for name in ("tokens_per_s", "step_p50_s")),
            f"{points.median(case, 'kv_bytes_per_s') / 1e6:.3g}",
        )
        for case in points.values
    )
    table = Table(
        "vAttention, figure 4, real engine: decoding, and the KV memory that it asks for",
        ("", "tokens/s", "step", "MB of KV cache a second"),
        rows,
        f"{_HERE} {token_bytes:,} bytes a token. The paper, three models on A100s: at most 600 to "
        "750 MB/s.",
    )
    return SectionResult({**points.to_dict(), "token_bytes": token_bytes}, (table,))


def figure_6(options: RealOptions, report: Report) -> SectionResult:
    """A prompt alone: tokens/s until its first token, by length and view."""
    wanted = (32, 64) if options.quick else (256, 1024, 2048, 4096)
    lengths = [length for length in wanted if length + 16 <= _context(options)]
    points = Points()
    with _fleet(options, lengths[-1] + 16, 1) as fleet:
        vocabulary = fleet.vocabulary()
        for system in _VIEWS.values():
            fleet.serve(system, [Job("0", _prompt(lengths[0], 1, vocabulary), 1)])
        runs = list(itertools.product(lengths, _VIEWS))
        for length, view in shuffled(runs, 2 * options.rounds, options.seed, report):
            job = Job("0", _prompt(length, length, vocabulary), 1)
            served = fleet.serve(_VIEWS[view], [job])
            points.add(
                f"{length:,} tokens, {view}",
                tokens_per_s=length / served.seconds,
                e2e_p50_s=served.seconds,
            )
    points.values = {f"{a:,} tokens, {b}": points.values[f"{a:,} tokens, {b}"] for a, b in runs}
    rows = tuple(
        (
            f"{length:,}",
            *(points.cell(f"{length:,} tokens, {view}", "tokens_per_s") for view in _VIEWS),
            points.ratio(
                f"{length:,} tokens, virtual", f"{length:,} tokens, paged", "tokens_per_s"
            ),
        )
        for length in lengths
    )
    table = Table(
        "vAttention, figure 6, real engine: tokens/s of a prompt alone",
        ("prompt", *_VIEWS, "virtual / paged"),
        rows,
        f"{_HERE} The paper: 2K to 192K tokens on A100s.",
    )
    return SectionResult(points.to_dict(), (table,))


def figure_7(options: RealOptions, report: Report) -> SectionResult:
    """Decoding throughput after long contexts, by batch and view."""
    batches = (1, 2) if options.quick else (1, 4, 8, 16)
    steps = options.pick(100, 10)
    room = 4 * steps + 12 * batches[-1]
    num_prompt = min(options.pick(2048, 32), _context(options) - room)
    points = Points()
    context = num_prompt + room
    with _fleet(options, context, batches[-1]) as fleet:
        engines = {name: fleet.engine(view) for name, view in _VIEWS.items()}
        for index, batch in enumerate(batches):
            for view, done in _decoding(engines, batch, num_prompt, steps).items():
                _add_steps(points, f"batch of {batch}, {view}", batch, done)
            report((index + 1) / len(batches))
    rows = tuple(
        (
            f"{batch} behind {num_prompt:,} tokens",
            *(points.cell(f"batch of {batch}, {view}", "tokens_per_s") for view in _VIEWS),
            points.ratio(f"batch of {batch}, virtual", f"batch of {batch}, paged", "tokens_per_s"),
        )
        for batch in batches
    )
    table = Table(
        "vAttention, figure 7, real engine: tokens/s of decoding",
        ("batch", *_VIEWS, "virtual / paged"),
        rows,
        f"{_HERE} Medians of {steps} steps, blocks of both views in turn. The paper: batches of 1 "
        "to 32 behind 16K tokens on A100s; its preprint: up to 1.99 times vLLM's kernel.",
    )
    return SectionResult(points.to_dict(), (table,))


_LONG_CONTEXT = 1024
#: Divisor of Azure's code requests, whose prompts have 7,436 tokens at the 99th percentile.
_LONG_SCALE = 8


def _long_jobs(options: RealOptions, vocabulary: int, rate: float | None = None) -> list[Job]:
    """Long prompts and short answers, like summaries."""
    drawn = azure_code(options.pick(64, 6), options.seed, request_rate=1.0, burstiness=1.0)
    shapes = [
        shape
        for shape in scaled(drawn, _LONG_SCALE)
        if shape.num_input_tokens + shape.num_output_tokens <= _LONG_CONTEXT
    ]
    return make_jobs(shapes, vocabulary, options.seed, rate=rate)


def figure_8(options: RealOptions, report: Report) -> SectionResult:
    """Long prompts and short answers, all there at once, by view."""
    points = Points()
    with _fleet(options, _LONG_CONTEXT, 32) as fleet:
        jobs = _long_jobs(options, fleet.vocabulary())
        for system in _VIEWS.values():
            fleet.serve(system, jobs[:4])
        for view in shuffled(list(_VIEWS), 2 * options.rounds, options.seed, report):
            record(points, view, fleet.serve(_VIEWS[view], jobs))
    points.values = {view: points.values[view] for view in _VIEWS}
    rows = tuple(
        (view, points.cell(view, "requests_per_s"), points.ratio(view, "paged", "requests_per_s"))
        for view in _VIEWS
    )
    table = Table(
        "vAttention, figure 8, real engine: long prompts, all there at once",
        ("view", "requests/s", "over paged"),
        rows,
        f"{_HERE} Azure's code requests over {_LONG_SCALE}, in the place of summaries of 64K to "
        "192K tokens. The preprint, end to end: 1.22 and 1.29 times paged FlashAttention-2 and "
        "FlashInfer.",
    )
    return SectionResult(points.to_dict(), (table,))


def figure_9(options: RealOptions, report: Report) -> SectionResult:
    """Long prompts at Poisson arrivals, by rate and view."""
    points = Points()
    loads = (0.8,) if options.quick else (0.6, 0.8)
    with _fleet(options, _LONG_CONTEXT, 32) as fleet:
        vocabulary = fleet.vocabulary()
        jobs = _long_jobs(options, vocabulary)
        for system in _VIEWS.values():
            fleet.serve(system, jobs[:4])
        best = fleet.serve(_VIEWS["paged"], jobs).requests_per_s
        runs = list(itertools.product(loads, _VIEWS))
        for load, view in shuffled(runs, options.rounds, options.seed, report):
            jobs = _long_jobs(options, vocabulary, load * best)
            record(points, f"{load:g} of the most, {view}", fleet.serve(_VIEWS[view], jobs))
    points.values = {
        case: points.values[case] for case in (f"{a:g} of the most, {b}" for a, b in runs)
    }
    rows = tuple(
        (case, *(points.cell(case, name) for name in ("e2e_p50_s", "e2e_p90_s", "at_once")))
        for case in points.values
    )
    table = Table(
        "vAttention, figure 9, real engine: latency of long prompts that come one by one",
        (f"rate ({best:.3g} requests/s at most), view", "p50", "p90", "at once"),
        rows,
        f"{_HERE} Poisson arrivals, Azure's code requests over {_LONG_SCALE}, in the place of "
        "summaries of 16K to 64K tokens.",
    )
    return SectionResult({**points.to_dict(), "best_requests_per_s": best}, (table,))


def figure_11(options: RealOptions, report: Report) -> SectionResult:
    """Decoding steps that map pages themselves, against a mapper that maps ahead."""
    pages = ("page_tokens", 16)
    ways = {
        "overlapped": System("virtual", options=(pages,)),
        "synchronous": System("virtual", options=(pages, ("kv_mapper", "off"))),
    }
    batch, num_prompt, steps = options.pick(16, 2), 64, options.pick(300, 20)
    points = Points()
    rounds = options.rounds
    with _fleet(options, num_prompt + 4 * steps + 12 * batch, batch) as fleet:
        engines = {name: fleet.engine(way) for name, way in ways.items()}
        _decoding(engines, batch, num_prompt, steps)  # the pools grow
        for index in range(rounds):
            for name, done in _decoding(engines, batch, num_prompt, steps).items():
                _add_steps(points, name, batch, done)
            report((index + 1) / rounds)
    metrics = ("step_p50_s", "step_p99_s", "step_max_s", "calls_unhidden")
    rows = tuple((name, *(points.cell(name, metric) for metric in metrics)) for name in ways)
    table = Table(
        f"vAttention, figure 11, real engine: decoding steps of {batch}, pages of 16 tokens",
        ("mapping", "median", "p99", "longest", "driver calls waited for"),
        rows,
        f"{_HERE} {steps} steps a round, blocks of both in turn. The paper: "
        "synchronous mapping gives spikes of 5 to 20 ms, overlapping hides them.",
    )
    return SectionResult(points.to_dict(), (table,))


def _kernels(
    section: Callable[[KernelOptions, Report], SectionResult], note: str
) -> Callable[[RealOptions, Report], SectionResult]:
    """A section of ``bench kernels``, with what the paper says about it."""

    def run(options: RealOptions, report: Report) -> SectionResult:
        result = section(KernelOptions(quick=options.quick, seed=options.seed), report)
        *others, last = result.tables
        told = Table(last.title, last.columns, last.rows, f"{last.note} {note}".strip())
        data: dict[str, Any] = {"kernel": dict(result.data)}
        return SectionResult(data, (*others, told))

    return run


REAL_VIRTUAL: dict[str, Callable[[RealOptions, Report], SectionResult]] = {
    "v2": _kernels(
        kernel_prefill, "The paper's paged prefill kernels on an A100: 24 to 28 % slower."
    ),
    "v3": _kernels(kernel_blocks, "The paper: vLLM's decode kernel by block size, on an A100."),
    "v4": figure_4,
    "v6": figure_6,
    "v7": figure_7,
    "v8": figure_8,
    "v9": figure_9,
    "v11": figure_11,
}
