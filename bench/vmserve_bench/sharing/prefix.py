"""Speedup of computing a common prefix once (PagedAttention, figure 16).

The same requests with and without the prefix cache, in neighbouring pairs; the cache is empty at
the start of each run.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product
from typing import TYPE_CHECKING, Any

import numpy as np

from vmserve.config import EngineConfig
from vmserve.engine.engine import LLMEngine
from vmserve.memory.base import Regime
from vmserve.models.hub import is_embedded
from vmserve.sampling import SamplingParams
from vmserve_bench.lab.rounds import compare
from vmserve_bench.lab.table import SectionResult, table_of
from vmserve_bench.sharing.record import run_to_end
from vmserve_bench.workloads.shapes import RequestShape, prompts

if TYPE_CHECKING:
    from vmserve_bench.lab.report import Report
    from vmserve_bench.sharing.options import Options

__all__ = ["SHOT_TOKENS", "Runner", "run", "translation_shapes"]

#: The paper's figure 16: tokens of the common prefix, WMT16 English to German, LLaMA-13B; and
#: throughput over Orca (Oracle), another system, not over itself without sharing.
SHOT_TOKENS = {"one-shot": 80, "five-shot": 341}
_PAPER_SPEEDUP = {"one-shot": 1.67, "five-shot": 3.58}


def translation_shapes(num_requests: int, num_prefix: int, seed: int) -> list[RequestShape]:
    """One prefix for all, as of examples; own input and output of 40 to 60 tokens, uniform."""
    rng = np.random.default_rng([seed, num_prefix])
    lengths = rng.integers(40, 61, size=(num_requests, 2)).tolist()
    return [
        RequestShape(num_prefix + own, out, 0.0, index, 0, num_prefix)
        for index, (own, out) in enumerate(lengths)
    ]


@dataclass(frozen=True, slots=True)
class Runner:
    """All requests through one engine; calling it answers them."""

    engine: LLMEngine
    shapes: list[RequestShape]
    mode: str

    def clear(self) -> None:
        self.engine.memory.clear_cache()

    def __call__(self) -> list[list[int]]:
        """The tokens of each request."""
        done: dict[str, list[int]] = {}
        vocab = self.engine.model_config.vocab_size
        all_prompts = prompts(self.shapes, vocab, reserved=range(8))
        for shape, prompt in zip(self.shapes, all_prompts, strict=True):
            params = SamplingParams(
                temperature=0.0,
                max_tokens=shape.num_output_tokens,
                ignore_eos=True,
                detokenize=False,
            )
            self.engine.add_request(str(shape.index), prompt, params)
            if self.mode == "in turn":
                done |= run_to_end(self.engine)
        done |= run_to_end(self.engine)
        return [done[str(shape.index)] for shape in self.shapes]

    def hit_rate(self) -> float:
        """Prompt tokens found in the cache, of all prompt tokens, in a run from an empty one."""
        self.clear()
        before = self.engine.stats()["prefix_cache_hits_total"]
        self()
        found = self.engine.stats()["prefix_cache_hits_total"] - before
        return found / sum(shape.num_input_tokens for shape in self.shapes)


def run(options: Options, report: Report) -> SectionResult:
    """Both regimes, both prefixes, all requests at once and one after the other."""
    cases: list[dict[str, Any]] = []
    runs = list(product(SHOT_TOKENS.items(), options.modes))
    for regime in Regime:
        engines = [
            LLMEngine(
                EngineConfig(
                    model=None if options.model is None else str(options.model),
                    kv_regime=regime.value,
                    enable_prefix_caching=caching,
                    max_model_len=512,
                    kv_cache_memory="512MiB",
                )
            )
            for caching in (True, False)
        ]
        for (shots, num_prefix), mode in runs:
            shapes = translation_shapes(options.num_requests or 8, num_prefix, options.seed)
            cached, uncached = (Runner(engine, shapes, mode) for engine in engines)
            case = {"regime": regime.value, "shots": shots, "mode": mode}
            cases.append({**case, **_compare(cached, uncached, options)})
            report(len(cases) / (len(Regime) * len(runs)))
        engine = engines[0]
        embedded = is_embedded(engine.config.model)
        model = {
            "name": "embedded" if embedded else "Llama-shaped, random weights",
            "num_layers": engine.model_config.num_layers,
            "vocab_size": engine.model_config.vocab_size,
            "kv_dtype": engine.memory.layout.dtype,
        }
        for engine in engines:
            engine.close()
    columns = ["regime", "prefix_tokens", "mode", "requests_per_s_with", "requests_per_s_without"]
    columns += ["hit_rate", "requests_with_same_tokens", "times", "times_interval"]
    paper = ", ".join(f"{name} {times}" for name, times in _PAPER_SPEEDUP.items())
    note = f"The paper, over another system, LLaMA-13B on a GPU, under load: {paper} times."
    table = table_of(f"throughput with a shared prefix, {model['name']}", cases, columns, note)
    return SectionResult({"model": model, "cases": cases}, (table,))


def _compare(a: Runner, b: Runner, options: Options) -> dict[str, Any]:
    a.clear()
    same = sum(x == y for x, y in zip(a(), b(), strict=True))
    paired = compare(
        a,
        b,
        pairs=options.pairs,
        warmup=1,
        labels=("with prefix cache", "without"),
        setup=a.clear,  # the other has no cache
        seed=options.seed,
    )
    count = len(a.shapes)
    return {
        "num_requests": count,
        "prefix_tokens": a.shapes[0].num_prefix_tokens,
        "requests_with_same_tokens": same,
        "hit_rate": a.hit_rate(),
        "requests_per_s_with": count / paired.median_a_s,
        "requests_per_s_without": count / paired.median_b_s,
        "times": paired.ratio,
        "times_interval": [paired.ratio_low, paired.ratio_high],
        "paired": paired.to_dict(),
    }
