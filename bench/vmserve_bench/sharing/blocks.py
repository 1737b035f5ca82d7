"""Memory saved by sharing within a request (PagedAttention, figure 15).

All requests wait at the start; each is answered by several samples, or by beams, of the forced
length. Counted in each step of the engine, once the step has its memory.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from vmserve.config import EngineConfig
from vmserve.memory.base import Regime
from vmserve.sampling import BeamSearchParams, SamplingParams
from vmserve_bench.lab.table import SectionResult, table_of
from vmserve_bench.sharing.record import WatchedEngine, described, percent, replay, run_to_end
from vmserve_bench.workloads.shapes import get_workload, prompts

if TYPE_CHECKING:
    from collections.abc import Sequence

    from vmserve_bench.lab.report import Report
    from vmserve_bench.sharing.options import Options
    from vmserve_bench.workloads.shapes import RequestShape

__all__ = ["parallel_from_lengths", "run", "run_engine"]

_METHODS = ("parallel", "beam")
#: The paper's figure 15, OPT-13B: percent of blocks saved by sharing, at the least and the most of
#: the widths.
PAPER_SAVED_PERCENT = {
    ("alpaca", "parallel"): (6.1, 9.8),
    ("alpaca", "beam"): (37.6, 55.2),
    ("sharegpt", "parallel"): (16.2, 30.5),
    ("sharegpt", "beam"): (44.3, 66.3),
}
#: Sequences at once: 16 requests of the widest kind, 48 of the narrowest.
MAX_NUM_SEQS = 96
#: The paper's, where it does not vary them.
BLOCK_TOKENS = 16
#: Requests, and distance of counted steps: long requests differ little from one to the next.
_RUNS = {"alpaca": (64, 1), "sharegpt": (40, 4)}
#: Requests whose lengths are counted, for the workload as a whole.
_POPULATION = 20_000


def run(options: Options, report: Report) -> SectionResult:
    """Run each workload, method and width once, and replay it for each block size."""
    runs: list[dict[str, Any]] = []
    total = len(options.workloads) * len(_METHODS) * len(options.widths)
    for workload in options.workloads:
        for method in _METHODS:
            for width in options.widths:
                runs.append(_measure(workload, method, width, options))
                report(len(runs) / total)
    data = {"max_num_seqs": MAX_NUM_SEQS, "block_sizes": list(options.block_sizes), "runs": runs}
    rows = [{**one, **size} for one in runs for size in one["sizes"]]
    columns = ["workload", "method", "width", "block_tokens", "saved_percent", "mean_step_percent"]
    columns += ["analytic_percent", "workload_percent", "paper_percent", "virtual/saved_percent"]
    table = table_of("memory saved by sharing, percent", rows, columns)
    return SectionResult(data, (table,))


def run_engine(
    shapes: Sequence[RequestShape],
    method: str,
    width: int,
    *,
    seed: int = 0,
    every: int = 1,
    model: str | None = None,
) -> WatchedEngine:
    """Run all requests to their end; return the closed engine.

    Raises RuntimeError where memory was short: a recording of that would not be general.
    """
    config = EngineConfig(
        model=model,
        kv_regime="paged",
        enable_prefix_caching=False,
        block_size=BLOCK_TOKENS,
        max_num_seqs=MAX_NUM_SEQS,
        max_model_len=2048,
        kv_cache_memory="1GiB",
    )
    engine = WatchedEngine(config, every)
    vocab = engine.model_config.vocab_size
    reserved = range(8)  # the embedded model's special tokens, and a few more
    for shape, prompt in zip(shapes, prompts(shapes, vocab, seed, reserved=reserved), strict=True):
        forced: dict[str, Any] = {"max_tokens": shape.num_output_tokens, "ignore_eos": True}
        forced["detokenize"] = False
        sampling = SamplingParams(n=width, temperature=1.0, seed=seed + shape.index, **forced)
        beams = BeamSearchParams(beam_width=width, **forced)
        params = beams if method == "beam" else sampling
        engine.add_request(str(shape.index), prompt, params)
    run_to_end(engine)
    preempted = engine.scheduler.totals.preemptions
    engine.close()
    if preempted:
        raise RuntimeError(f"{preempted} preemptions: memory is short, use fewer requests")
    return engine


def parallel_from_lengths(
    shapes: Sequence[RequestShape], width: int, block_tokens: int
) -> tuple[int, int]:
    """Blocks listed and blocks saved by ``width`` samples of each request, summed over steps.

    A prompt of p tokens is computed in one step by one sequence. In each of the m - 1 steps that
    compute generated tokens (the last one needs no keys and values) all ``width`` sequences list
    the blocks of their length and share the floor(p / block) full ones of the prompt. The partial
    block after them is copied as soon as it is written, which is in the first of these steps, so
    that no step shares it.
    """
    prompts = np.array([shape.num_input_tokens for shape in shapes])
    outputs = np.array([shape.num_output_tokens for shape in shapes])

    def blocks_up_to(lengths: Any) -> Any:
        """Sum of ceil(k / block) for k = 1 .. length."""
        full, rest = lengths // block_tokens, lengths % block_tokens
        return block_tokens * full * (full + 1) // 2 + rest * (full + 1)

    decoding = width * (blocks_up_to(prompts + outputs - 1) - blocks_up_to(prompts))
    saved = (outputs - 1) * (width - 1) * (prompts // block_tokens)
    return int((-(-prompts // block_tokens) + decoding).sum()), int(saved.sum())


def _measure(workload: str, method: str, width: int, options: Options) -> dict[str, Any]:
    num_requests, every = _RUNS.get(workload, (16, 1))
    draw = get_workload(workload)
    shapes = draw(options.num_requests or num_requests, options.seed)
    engine = run_engine(
        shapes, method, width, seed=options.seed, every=every, model=options.blocks_model
    )
    steps = engine.recorded
    if replay(steps, BLOCK_TOKENS) != engine.counts:
        raise RuntimeError("the engine counted other blocks than its replay")
    sizes = []
    for block_tokens in options.block_sizes:
        counts, whole = replay(steps, block_tokens), None
        if method == "beam":
            listed = sum(listed for listed, _ in counts)
            saved = sum(common // block_tokens for step in steps for common in step.prefixes)
        else:
            many, shared = parallel_from_lengths(
                draw(_POPULATION, options.seed), width, block_tokens
            )
            whole = percent(shared, many)
            listed, saved = parallel_from_lengths(shapes, width, block_tokens)
        sizes.append(
            {
                "block_tokens": block_tokens,
                "by": "engine" if block_tokens == BLOCK_TOKENS else "replay",
                **described(counts),
                "analytic_percent": percent(saved, listed),
                "workload_percent": whole,
            }
        )
    pages = engine.memory.layout.page_tokens
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
            "page_tokens": pages,
            **described(replay(steps, BLOCK_TOKENS, Regime.VIRTUAL, pages)),
        },
    }
