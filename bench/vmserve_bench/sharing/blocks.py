"""Memory saved by sharing within a request (PagedAttention, figure 15).

All requests wait at the start; each is answered by several samples, or by beams, of the forced
length. Counted in each step of the engine, once the step has its memory.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

from vmserve.config import EngineConfig
from vmserve.memory.base import Regime
from vmserve.sampling import BeamSearchParams, SamplingParams
from vmserve_bench.lab.table import SectionResult, Table
from vmserve_bench.sharing.count import parallel_from_lengths, percent
from vmserve_bench.sharing.record import Recorder, WatchedEngine, replay
from vmserve_bench.sharing.reference import PAPER_BLOCK_TOKENS, PAPER_SAVED_PERCENT
from vmserve_bench.workloads.shapes import get_workload, prompts

if TYPE_CHECKING:
    from collections.abc import Sequence

    from vmserve.sampling import GenerationParams
    from vmserve_bench.lab.report import Report
    from vmserve_bench.sharing.section import Options
    from vmserve_bench.workloads.shapes import RequestShape

__all__ = ["METHODS", "Method", "run", "run_engine"]

Method = Literal["parallel", "beam"]
METHODS: tuple[Method, ...] = ("parallel", "beam")
#: Sequences at once: 16 requests of the widest kind, 48 of the narrowest.
MAX_NUM_SEQS = 96
#: Distance of counted steps: requests which last long differ little from one step to the next.
_EVERY = {"alpaca": 1, "sharegpt": 4}
_REQUESTS = {"alpaca": 64, "sharegpt": 40}
#: Number of requests whose lengths are counted, for the workload as a whole.
_POPULATION = 20_000


def run(options: Options, report: Report) -> SectionResult:
    """Run each workload, method and width once, and replay it for each block size."""
    runs: list[dict[str, Any]] = []
    total = len(options.workloads) * len(METHODS) * len(options.widths)
    for workload in options.workloads:
        shapes = get_workload(workload)(
            options.num_requests or _REQUESTS.get(workload, 16), options.seed
        )
        for method in METHODS:
            for width in options.widths:
                runs.append(_measure(workload, shapes, method, width, options))
                report(len(runs) / total)
    data = {"max_num_seqs": MAX_NUM_SEQS, "block_sizes": list(options.block_sizes), "runs": runs}
    return SectionResult(data, (_widths_table(runs), _sizes_table(runs, options.block_sizes)))


def run_engine(
    shapes: Sequence[RequestShape],
    method: Method,
    width: int,
    *,
    seed: int = 0,
    every: int = 1,
    block_tokens: int = PAPER_BLOCK_TOKENS,
    model: str | None = None,
) -> tuple[Recorder, WatchedEngine]:
    """Run all requests to their end; return the closed engine's record.

    Raises RuntimeError where memory was short: a recording of that would not be general.
    """
    engine = WatchedEngine(
        EngineConfig(
            model=model,
            kv_regime="paged",
            enable_prefix_caching=False,
            block_size=block_tokens,
            max_num_seqs=MAX_NUM_SEQS,
            max_model_len=2048,
            kv_cache_memory="1GiB",
        )
    )
    recorder = engine.watch = Recorder(engine.memory, every)
    vocab = engine.model_config.vocab_size
    reserved = range(8)  # the embedded model's special tokens, and a few more
    for shape, prompt in zip(shapes, prompts(shapes, vocab, seed, reserved=reserved), strict=True):
        params = _params(method, width, shape, seed)
        engine.add_request(str(shape.index), prompt, params)
    while engine.has_unfinished:
        if engine.step().failures:
            raise RuntimeError("a request failed: memory is short, use fewer requests")
    preempted = engine.scheduler.num_preemptions_total
    engine.close()
    if preempted:
        raise RuntimeError(f"{preempted} preemptions: memory is short, use fewer requests")
    return recorder, engine


def _params(method: Method, width: int, shape: RequestShape, seed: int) -> GenerationParams:
    if method == "beam":
        return BeamSearchParams(
            beam_width=width,
            max_tokens=shape.num_output_tokens,
            ignore_eos=True,
            detokenize=False,
        )
    return SamplingParams(
        n=width,
        temperature=1.0,
        seed=seed + shape.index,
        max_tokens=shape.num_output_tokens,
        ignore_eos=True,
        detokenize=False,
    )


def _measure(
    workload: str, shapes: list[RequestShape], method: Method, width: int, options: Options
) -> dict[str, Any]:
    recorder, engine = run_engine(
        shapes,
        method,
        width,
        seed=options.seed,
        every=_EVERY.get(workload, 1),
        model=options.blocks_model,
    )
    steps, measured = recorder.steps, recorder.tally
    again = replay(steps, PAPER_BLOCK_TOKENS)
    if again != measured:
        raise RuntimeError(f"the engine counted {measured}, its replay {again}")
    page_tokens = engine.memory.layout.page_tokens
    sizes = []
    for block_tokens in options.block_sizes:
        tally = measured if block_tokens == PAPER_BLOCK_TOKENS else replay(steps, block_tokens)
        if method == "beam":
            saved = sum(common // block_tokens for step in steps for common in step.prefixes)
            analytic = percent(saved, tally.listed)
        else:
            listed, saved = parallel_from_lengths(shapes, width, block_tokens)
            analytic = percent(saved, listed)
        sizes.append(
            {
                "block_tokens": block_tokens,
                "by": "engine" if tally is measured else "replay",
                **tally.to_dict(),
                "analytic_percent": analytic,
                "workload_percent": _whole_workload(workload, method, width, block_tokens, options),
            }
        )
    return {
        "workload": workload,
        "method": method,
        "width": width,
        "num_requests": len(shapes),
        "num_steps": len(steps),
        "mean_input_tokens": sum(shape.num_input_tokens for shape in shapes) / len(shapes),
        "mean_output_tokens": sum(shape.num_output_tokens for shape in shapes) / len(shapes),
        "max_sequences": max(len(step.live) for step in steps),
        "paper_percent": list(PAPER_SAVED_PERCENT.get((workload, method), ())),
        "sizes": sizes,
        "virtual": {
            "page_tokens": page_tokens,
            **replay(steps, PAPER_BLOCK_TOKENS, Regime.VIRTUAL, page_tokens).to_dict(),
        },
    }


def _whole_workload(
    workload: str, method: Method, width: int, block_tokens: int, options: Options
) -> float | None:
    """Compute from the lengths of many requests; not possible for beams."""
    if method == "beam":
        return None
    many = get_workload(workload)(_POPULATION, options.seed)
    listed, saved = parallel_from_lengths(many, width, block_tokens)
    return percent(saved, listed)


def _widths_table(runs: list[dict[str, Any]]) -> Table:
    rows = []
    for run in runs:
        at = [size for size in run["sizes"] if size["block_tokens"] == PAPER_BLOCK_TOKENS]
        if not at:
            continue
        [size] = at
        low_high = run["paper_percent"]
        whole = size["workload_percent"]
        rows.append(
            (
                f"{run['workload']}, {run['method']}",
                str(run["width"]),
                f"{size['saved_percent']:.1f}",
                f"{size['mean_step_percent']:.1f}",
                f"{size['analytic_percent']:.1f}",
                _quotient(size["saved_percent"], size["analytic_percent"]),
                "" if whole is None else f"{whole:.1f}",
                f"{low_high[0]} to {low_high[1]}" if low_high else "",
                f"{run['virtual']['saved_percent']:.1f}",
            )
        )
    pages = runs[0]["virtual"]["page_tokens"]
    return Table(
        f"memory saved by sharing, percent, blocks of {PAPER_BLOCK_TOKENS} tokens",
        (
            "requests",
            "width",
            "saved",
            "mean of steps",
            "analytic",
            "saved / analytic",
            f"analytic, {_POPULATION:,} requests",
            "paper, widths 2 to 6",
            f"virtual, pages of {pages}",
        ),
        tuple(rows),
        "saved: 1 - distinct / listed blocks, both summed over steps; analytic: from lengths alone "
        "(parallel) or from the beams' tokens. The paper's: OPT-13B, its own traces.",
    )


def _sizes_table(runs: list[dict[str, Any]], block_sizes: Sequence[int]) -> Table:
    return Table(
        "memory saved by sharing, percent, by tokens of a block (in brackets: analytic)",
        ("requests", "width", *(str(size) for size in block_sizes)),
        tuple(
            (
                f"{run['workload']}, {run['method']}",
                str(run["width"]),
                *(
                    f"{size['saved_percent']:.1f} ({size['analytic_percent']:.1f})"
                    for size in run["sizes"]
                ),
            )
            for run in runs
        ),
    )


def _quotient(measured: float, analytic: float) -> str:
    return f"{measured / analytic:.3f}" if analytic else "-"
