"""The PagedAttention paper's figures on the real engine; see ``served`` for what is compared."""

from __future__ import annotations

import statistics
from dataclasses import replace
from typing import TYPE_CHECKING

from vmserve_bench import sharing
from vmserve_bench.kernels.sections import Options as KernelOptions
from vmserve_bench.kernels.sections import blocks as kernel_blocks
from vmserve_bench.lab.table import SectionResult, Table
from vmserve_bench.papers.fleet import Fleet
from vmserve_bench.papers.points import Points, RealOptions, shuffled
from vmserve_bench.papers.reference import (
    PAPER_BATCHES,
    PAPER_BEAM_GAIN,
    PAPER_EXISTING_SHARE,
    PAPER_PAGED_SHARE,
    PAPER_RATE_OVER_MAX,
    PAPER_RATE_OVER_ORACLE,
    PAPER_REQUESTS_OVER_MAX,
    PAPER_REQUESTS_OVER_ORACLE,
)
from vmserve_bench.papers.served import (
    BASELINES,
    CONTEXT,
    POOL_TOKENS,
    SCALE,
    SYSTEMS,
    System,
    make_jobs,
    record,
    scaled,
)
from vmserve_bench.sharing.prefix import translation_shapes
from vmserve_bench.sharing.reference import PAPER_PREFIX_SPEEDUP, SHOT_TOKENS
from vmserve_bench.workloads.shapes import RequestShape, alpaca, sharegpt

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from vmserve_bench.lab.report import Report

__all__ = ["REAL_PAGED"]

_NOTE = (
    f"This machine's processor; lengths, context ({CONTEXT}) and pool ({POOL_TOKENS:,} tokens) "
    f"are the paper's over {SCALE}. A processor gains less from a larger batch than a GPU: what "
    "runs at once compares with the paper, rates do not."
)
_TRACES = "Medians of rounds, each with a trace of its own."
#: Shares of the rate that vmserve sustains with all requests at once.
_RATES = (0.5, 0.7, 0.85, 1.0)
#: Divisor of lengths in quick runs.
_QUICK_SCALE = 32


def _warm(fleet: Fleet, systems: Sequence[System], shapes: Sequence[RequestShape]) -> None:
    """Warm up: lazy setup is done, and pools have grown."""
    for system in systems:
        fleet.serve(system, make_jobs(shapes[:4], fleet.vocabulary(), 1))


def _saturated(
    options: RealOptions,
    report: Report,
    shapes: Sequence[RequestShape],
    systems: Mapping[str, System],
) -> Points:
    """Serve all requests at once with each system, in rounds."""
    points = Points()
    with Fleet(options.model) as fleet:
        _warm(fleet, list(systems.values()), shapes)
        jobs = make_jobs(shapes, fleet.vocabulary(), options.seed)
        for name in shuffled(list(systems), options.rounds, options.seed, report):
            record(points, name, fleet.serve(systems[name], jobs))
    points.values = {name: points.values[name] for name in systems}
    return points


def _sharegpt(
    options: RealOptions, num_requests: int = 200, seed: int | None = None
) -> list[RequestShape]:
    seed = options.seed if seed is None else seed
    drawn = sharegpt(options.pick(num_requests, 10), seed, request_rate=1.0)
    return scaled(drawn, options.pick(SCALE, _QUICK_SCALE))


def figure_2(options: RealOptions, report: Report) -> SectionResult:
    """Share of KV memory that holds token states, all requests there at once."""
    points = _saturated(options, report, _sharegpt(options), SYSTEMS)
    low, high = PAPER_EXISTING_SHARE
    rows = tuple(
        (
            name,
            points.cell(name, "states_share"),
            points.cell(name, "at_once"),
            f"{low} to {high} %" if name in BASELINES else f"above {PAPER_PAGED_SHARE} %",
        )
        for name in points.values
    )
    title = "Figure 2, real engine: share of the pool that holds token states, ShareGPT"
    note = (
        f"{_NOTE} Here of the whole pool, what is free while a request waits included; the "
        "paper's is of what is allocated."
    )
    table = Table(title, ("system", "token states", "requests at once", "paper"), rows, note)
    return SectionResult(points.to_dict(), (table,))


def figure_13(options: RealOptions, report: Report) -> SectionResult:
    """Requests that run at once, all of them there at once."""
    points = _saturated(options, report, _sharegpt(options), SYSTEMS)
    theirs = {**PAPER_BATCHES["sharegpt"], "vmserve, paged": PAPER_BATCHES["sharegpt"]["paper"]}
    rows = tuple(
        (
            name,
            points.cell(name, "at_once"),
            points.ratio(name, "Orca (Oracle)", "at_once"),
            points.ratio(name, "Orca (Max)", "at_once"),
            f"{theirs[name]:.1f}" if name in theirs else "-",
        )
        for name in points.values
    )
    table = Table(
        "Figure 13, real engine: requests that run at once, ShareGPT",
        ("system", "at once", "over Orca (Oracle)", "over Orca (Max)", "paper, at 2 requests/s"),
        rows,
        f"{_NOTE} The paper: {PAPER_REQUESTS_OVER_ORACLE} times Orca (Oracle), "
        f"{PAPER_REQUESTS_OVER_MAX} times Orca (Max).",
    )
    return SectionResult(points.to_dict(), (table,))


def _by_rate(
    options: RealOptions,
    report: Report,
    title: str,
    draw: Callable[[int], list[RequestShape]],
    note: str,
) -> SectionResult:
    """Normalized latency by Poisson rate, as shares of the rate that vmserve sustains.

    ``draw``: a trace by its seed. Each round has one of its own, the same for all systems.
    """
    points = Points()
    seeds = [options.seed + index for index in range(options.rounds)]
    traces = [draw(seed) for seed in seeds]
    rates = _RATES[1:2] if options.quick else _RATES
    with Fleet(options.model) as fleet:
        _warm(fleet, list(SYSTEMS.values()), traces[0])
        vocabulary = fleet.vocabulary()
        ours = SYSTEMS["vmserve, paged"]
        best = statistics.median(
            fleet.serve(ours, make_jobs(shapes, vocabulary, seed)).requests_per_s
            for shapes, seed in zip(traces, seeds, strict=True)
        )
        runs = [(name, rate) for rate in rates for name in SYSTEMS]
        drawn = shuffled(runs, options.rounds, options.seed, report)
        for index, (name, rate) in enumerate(drawn):
            turn = index // len(runs)
            jobs = make_jobs(traces[turn], vocabulary, seeds[turn], rate=rate * best)
            served = fleet.serve(SYSTEMS[name], jobs)
            record(points, f"{name}, rate {rate:g}", served)
    rows = tuple(
        (
            name,
            *(points.cell(f"{name}, rate {rate:g}", "normalized_s") for rate in rates),
            *(points.cell(f"{name}, rate {rate:g}", "at_once") for rate in rates[-1:]),
        )
        for name in SYSTEMS
    )
    columns = (
        "system",
        *(f"at {rate * best:.3g} requests/s" for rate in rates),
        "at once, at the last",
    )
    data = {**points.to_dict(), "best_requests_per_s": best}
    return SectionResult(data, (Table(title, columns, rows, note),))


def figure_12(options: RealOptions, report: Report) -> SectionResult:
    """Request rate against normalized latency, ShareGPT's lengths."""
    (a, b), (c, d) = PAPER_RATE_OVER_ORACLE, PAPER_RATE_OVER_MAX
    return _by_rate(
        options,
        report,
        "Figure 12, real engine: normalized latency (a token) by request rate, ShareGPT",
        lambda seed: _sharegpt(options, 140, seed),
        f"{_NOTE} {_TRACES} The paper's rates at similar latency: {a} to {b} times Orca "
        f"(Oracle), {c:g} to {d:g} times Orca (Max).",
    )


def figure_17(options: RealOptions, report: Report) -> SectionResult:
    """Conversations: each request has its history as prompt, whose last half context counts."""
    return _by_rate(
        options,
        report,
        "Figure 17, real engine: normalized latency (a token) by request rate, conversations",
        lambda seed: scaled(chat_shapes(options.pick(120, 10), seed), options.pick(1, 8)),
        f"{_NOTE} {_TRACES} Prompts are conversations of ShareGPT's lengths, cut to the last "
        f"{CONTEXT // 2} tokens, and no KV cache is kept between their turns, as in the paper.",
    )


def chat_shapes(num_requests: int, seed: int, turns: int = 4) -> list[RequestShape]:
    """The turns of conversations, in the order of arrival that independent requests would have."""
    drawn = scaled(sharegpt(num_requests, seed, request_rate=1.0))
    shapes, history = [], 0
    for index, shape in enumerate(drawn):
        if index % turns == 0:
            history = 0
        history += shape.num_input_tokens
        output = min(shape.num_output_tokens, CONTEXT // 2)
        shapes.append(
            replace(shape, num_input_tokens=min(history, CONTEXT // 2), num_output_tokens=output)
        )
        history += output
    return shapes


def figure_14(options: RealOptions, report: Report) -> SectionResult:
    """Parallel samples and beams, Alpaca's lengths, all requests there at once."""
    points = Points()
    systems = ("vmserve, paged", "Orca (Oracle)")
    ways = [(1, False), *((width, beam) for beam in (False, True) for width in (2, 4, 6))]
    if options.quick:
        ways = [(1, False), (2, False), (2, True)]
    # Lengths as they are, as a quarter of them would be a few tokens; and none of the longest.
    shapes = [
        shape
        for shape in scaled(alpaca(options.pick(120, 8), options.seed), options.pick(1, 8))
        if shape.num_input_tokens + shape.num_output_tokens <= CONTEXT // 2
    ]
    with Fleet(options.model) as fleet:
        _warm(fleet, [SYSTEMS[name] for name in systems], shapes)
        runs = [(name, width, beam) for width, beam in ways for name in systems]
        for name, width, beam in shuffled(runs, 1, options.seed, report):
            jobs = make_jobs(
                shapes[: max(8, len(shapes) // width)],
                fleet.vocabulary(),
                options.seed,
                width=width,
                is_beam=beam,
            )
            case = f"{_way(width, beam)}, {name}"
            record(points, case, fleet.serve(SYSTEMS[name], jobs))
    rows = tuple(
        (
            way,
            *(points.cell(f"{way}, {name}", "requests_per_s") for name in systems),
            points.ratio(f"{way}, {systems[0]}", f"{way}, {systems[1]}", "requests_per_s"),
            *(points.cell(f"{way}, {name}", "at_once") for name in systems),
            points.ratio(f"{way}, {systems[0]}", f"{way}, {systems[1]}", "at_once"),
        )
        for way in (_way(*each) for each in ways)
    )
    columns = ("sampling", *(f"{name}, requests/s" for name in systems), "ratio")
    table = Table(
        "Figure 14, real engine: Alpaca, all requests there at once",
        (*columns, *(f"{name}, at once" for name in systems), "ratio"),
        rows,
        f"{_NOTE} Lengths here are not divided. Orca has memory for each sequence, and computes "
        "a prompt for each sample; for beams it has the memory alone. The paper, OPT-13B, rates: "
        f"{PAPER_BEAM_GAIN[0]} times in basic sampling to {PAPER_BEAM_GAIN[1]} with 6 beams.",
    )
    return SectionResult(points.to_dict(), (table,))


def _way(width: int, is_beam: bool) -> str:
    if width == 1:
        return "basic sampling"
    return f"{width} beams" if is_beam else f"{width} samples"


def figure_15(options: RealOptions, report: Report) -> SectionResult:
    """Memory that sharing within a request saves: the section blocks of ``bench sharing``."""
    wanted = sharing.Options(
        num_requests=options.pick(12, 4),
        workloads=("alpaca",) if options.quick else ("alpaca", "sharegpt"),
        widths=(2,) if options.quick else (2, 4, 6),
        block_sizes=(16,),
        seed=options.seed,
        blocks_model=options.model,
    )
    return sharing.SUITE.sections["blocks"](wanted, report)


def figure_16(options: RealOptions, report: Report) -> SectionResult:
    """Requests with a common prefix: computed once, each time, or kept by Orca each time."""
    points = Points()
    cached = (("enable_prefix_caching", True),)
    systems = {
        "vmserve, paged, prefix cache": System("paged", options=cached),
        "vmserve, virtual, prefix cache": System("virtual", options=cached),
        "vmserve, paged, none": System("paged"),
        "Orca (Oracle)": SYSTEMS["Orca (Oracle)"],
    }
    shapes = {
        shots: translation_shapes(options.pick(64, 4), num_prefix, options.seed)
        for shots, num_prefix in SHOT_TOKENS.items()
    }
    with Fleet(options.model) as fleet:
        vocabulary = fleet.vocabulary()
        runs = [(shots, name) for shots in shapes for name in systems]
        for shots, name in shuffled(runs, options.rounds, options.seed, report):
            engine = fleet.engine(systems[name])
            if systems[name].options:
                engine.memory.clear_cache()
            before = engine.stats()["prefix_cache_hits_total"]
            record(
                points,
                f"{shots}, {name}",
                fleet.serve(systems[name], make_jobs(shapes[shots], vocabulary, options.seed)),
            )
            hits = engine.stats()["prefix_cache_hits_total"] - before
            num_prompt = sum(shape.num_input_tokens for shape in shapes[shots])
            points.add(f"{shots}, {name}", prefix_hit_rate=hits / num_prompt)
    points.values = {case: points.values[case] for case in (f"{a}, {b}" for a, b in runs)}
    rows = tuple(
        (
            f"{shots} ({SHOT_TOKENS[shots]} tokens), {name}",
            points.cell(f"{shots}, {name}", "requests_per_s"),
            points.ratio(f"{shots}, {name}", f"{shots}, Orca (Oracle)", "requests_per_s"),
            points.cell(f"{shots}, {name}", "at_once"),
            points.cell(f"{shots}, {name}", "prefix_hit_rate"),
            f"{PAPER_PREFIX_SPEEDUP[shots]:.2f}" if "prefix cache" in name else "-",
        )
        for shots, name in runs
    )
    table = Table(
        "Figure 16, real engine: requests/s with a common prefix, all there at once",
        (
            "prefix, system",
            "requests/s",
            "over Orca (Oracle)",
            "at once",
            "prefix hits",
            "paper, LLaMA-13B",
        ),
        rows,
        f"This machine's processor; a pool of {POOL_TOKENS:,} tokens, lengths as in the paper.",
    )
    return SectionResult(points.to_dict(), (table,))


def figure_18(options: RealOptions, report: Report) -> SectionResult:
    """Block sizes: the kernel by itself, and the engine with all requests there at once."""
    sizes = (4, 16) if options.quick else (4, 8, 16, 32, 64, 128)
    systems = {
        f"blocks of {size}": System("paged", options=(("block_size", size),)) for size in sizes
    }
    points = _saturated(options, lambda done: report(0.5 * done), _sharegpt(options), systems)
    rows = tuple(
        (
            name,
            points.cell(name, "requests_per_s"),
            points.cell(name, "normalized_s"),
            points.cell(name, "at_once"),
            points.cell(name, "preemptions"),
        )
        for name in points.values
    )
    table = Table(
        "Figure 18b, real engine: block sizes, ShareGPT, all requests there at once",
        ("", "requests/s", "normalized latency (a token)", "at once", "preemptions"),
        rows,
        f"{_NOTE} Blocks of 16 here are the paper's of {16 * SCALE}. The paper: 16 to 128 are "
        "best on ShareGPT.",
    )
    alone = kernel_blocks(
        KernelOptions(quick=options.quick, seed=options.seed),
        lambda done: report(0.5 + 0.5 * done),
    )
    data = {**points.to_dict(), "kernel": dict(alone.data)}
    return SectionResult(data, (*alone.tables, table))


def figure_19(options: RealOptions, report: Report) -> SectionResult:
    """Recomputing against swapping, by block size, in half of the pool."""
    sizes = (4, 16) if options.quick else (4, 16, 64)
    systems = {
        f"blocks of {size}, {how}": System(
            "paged",
            options=(
                ("block_size", size),
                ("preemption", how),
                ("swap_space", "256MiB" if how == "swap" else 0),
            ),
        )
        for size in sizes
        for how in ("recompute", "swap")
    }
    points = Points()
    shapes = _sharegpt(options)
    with Fleet(options.model, pool_tokens=POOL_TOKENS // 2) as fleet:
        _warm(fleet, list(systems.values()), shapes)
        jobs = make_jobs(shapes, fleet.vocabulary(), options.seed)
        for name in shuffled(list(systems), options.rounds, options.seed, report):
            record(points, name, fleet.serve(systems[name], jobs))
    points.values = {name: points.values[name] for name in systems}
    rows = tuple(
        (
            f"blocks of {size}",
            *(
                points.cell(f"blocks of {size}, {how}", metric)
                for metric in ("normalized_s", "preemptions")
                for how in ("recompute", "swap")
            ),
            points.cell(f"blocks of {size}, swap", "swaps"),
            points.ratio(f"blocks of {size}, recompute", f"blocks of {size}, swap", "normalized_s"),
        )
        for size in sizes
    )
    table = Table(
        "Figure 19b, real engine: normalized latency (a token), ShareGPT, all there at once",
        (
            "",
            "recompute",
            "swap",
            "preemptions, recompute",
            "preemptions, swap",
            "swapped out",
            "recompute / swap",
        ),
        rows,
        f"This machine's processor and a pool of {POOL_TOKENS // 2:,} tokens; lengths are the "
        f"paper's over {SCALE}. The paper: recomputing never costs more than 20 % over swapping.",
    )
    return SectionResult(points.to_dict(), (table,))


REAL_PAGED: dict[str, Callable[[RealOptions, Report], SectionResult]] = {
    "2": figure_2,
    "12": figure_12,
    "13": figure_13,
    "14": figure_14,
    "15": figure_15,
    "16": figure_16,
    "17": figure_17,
    "18": figure_18,
    "19": figure_19,
}
