"""Speedup of computing a common prefix once (PagedAttention, figure 16).

Requests shaped like translations with examples: a prefix of 80 or 341 tokens that all have in
common, 40 to 60 tokens of their own, 40 to 60 tokens out. The same requests with and without the
prefix cache, in neighbouring pairs; the cache is empty at the start of each run.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from vmserve.config import EngineConfig
from vmserve.engine.engine import LLMEngine
from vmserve.memory.base import Regime
from vmserve.models.hub import is_embedded
from vmserve.sampling import SamplingParams
from vmserve_bench.lab.rounds import PairedResult, compare
from vmserve_bench.lab.table import SectionResult, Table
from vmserve_bench.sharing.reference import PAPER_PREFIX_SPEEDUP, SHOT_TOKENS
from vmserve_bench.workloads.shapes import RequestShape, prompts

if TYPE_CHECKING:
    from vmserve_bench.lab.report import Report
    from vmserve_bench.sharing.section import Mode, Options

__all__ = ["Runner", "run", "translation_shapes"]

_REQUESTS = 8


def run(options: Options, report: Report) -> SectionResult:
    """Both regimes, both prefixes, all requests at once and one after the other."""
    cases: list[dict[str, Any]] = []
    total = len(Regime) * len(SHOT_TOKENS) * len(options.modes)
    for regime in Regime:
        with_cache, without = (_engine(options, regime, caching=on) for on in (True, False))
        for shots, num_prefix in SHOT_TOKENS.items():
            shapes = translation_shapes(options.num_requests or _REQUESTS, num_prefix, options.seed)
            for mode in options.modes:
                a, b = (Runner(engine, shapes, mode) for engine in (with_cache, without))
                case = _compare(a, b, options)
                cases.append({"regime": regime.value, "shots": shots, "mode": mode, **case})
                report(len(cases) / total)
        model = _describe(with_cache)
        with_cache.close()
        without.close()
    return SectionResult({"model": model, "cases": cases}, (_table(cases, model["name"]),))


def translation_shapes(num_requests: int, num_prefix: int, seed: int) -> list[RequestShape]:
    """One prefix for all; own input and output of 40 to 60 tokens, uniform."""
    rng = np.random.default_rng([seed, num_prefix])
    lengths = rng.integers(40, 61, size=(num_requests, 2)).tolist()
    return [
        RequestShape(num_prefix + own, out, 0.0, index, 0, num_prefix)
        for index, (own, out) in enumerate(lengths)
    ]


@dataclass(slots=True)
class Runner:
    """All requests through one engine; calling it answers them, from an empty prefix cache."""

    engine: LLMEngine
    shapes: list[RequestShape]
    mode: Mode

    def clear(self) -> None:
        self.engine.memory.clear_cache()

    def __call__(self) -> list[list[int]]:
        """The tokens of each request."""
        done: dict[str, list[int]] = {}
        vocab = self.engine.model_config.vocab_size
        for shape, prompt in zip(
            self.shapes, prompts(self.shapes, vocab, reserved=range(8)), strict=True
        ):
            params = SamplingParams(
                temperature=0.0,
                max_tokens=shape.num_output_tokens,
                ignore_eos=True,
                detokenize=False,
            )
            self.engine.add_request(str(shape.index), prompt, params)
            if self.mode == "in turn":
                self._drain(done)
        self._drain(done)
        return [done[str(shape.index)] for shape in self.shapes]

    def hit_rate(self) -> float:
        """Prompt tokens found in the cache, of all prompt tokens, in a run from an empty one."""
        self.clear()
        before = self.engine.stats()["prefix_cache_hits_total"]
        self()
        found = self.engine.stats()["prefix_cache_hits_total"] - before
        return found / sum(shape.num_input_tokens for shape in self.shapes)

    def _drain(self, done: dict[str, list[int]]) -> None:
        while self.engine.has_unfinished:
            result = self.engine.step()
            if result.failures:
                raise RuntimeError(f"a request failed: {result.failures[0].error}")
            for output in result.outputs:
                if output.finished:
                    done[output.request_id] = list(output.outputs[0].token_ids)


def _engine(options: Options, regime: Regime, *, caching: bool) -> LLMEngine:
    return LLMEngine(
        EngineConfig(
            model=None if options.model is None else str(options.model),
            kv_regime=regime.value,
            enable_prefix_caching=caching,
            max_model_len=512,
            kv_cache_memory="512MiB",
        )
    )


def _describe(engine: LLMEngine) -> dict[str, Any]:
    config = engine.model_config
    name = "embedded" if is_embedded(engine.config.model) else "Llama-shaped, random weights"
    return {
        "name": name,
        "num_layers": config.num_layers,
        "vocab_size": config.vocab_size,
        "kv_dtype": engine.memory.layout.dtype,
    }


def _compare(a: Runner, b: Runner, options: Options) -> dict[str, Any]:
    a.clear()
    expected, got = b(), a()
    same = sum(x == y for x, y in zip(expected, got, strict=True))
    paired: PairedResult = compare(
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
        "paired": paired.to_dict(),
    }


def _table(cases: list[dict[str, Any]], model: str) -> Table:
    return Table(
        f"throughput with a shared prefix, {model}",
        (
            "regime, prefix, requests",
            "with, requests/s",
            "without",
            "speedup, 99 % interval",
            "pairs",
            "hit rate",
            "same tokens",
            "paper, over Orca (Oracle)",
        ),
        tuple(
            (
                f"{case['regime']}, {case['prefix_tokens']}, {case['num_requests']} {case['mode']}",
                f"{case['requests_per_s_with']:.2f}",
                f"{case['requests_per_s_without']:.2f}",
                _interval(case["paired"]),
                f"{case['paired']['num_pairs']}",
                f"{case['hit_rate']:.1%}",
                f"{case['requests_with_same_tokens']} of {case['num_requests']}",
                f"{PAPER_PREFIX_SPEEDUP[case['shots']]:.2f}",
            )
            for case in cases
        ),
        "Ours against itself without the cache; the paper's against another system, LLaMA-13B on "
        "a GPU, under load: not the same question.",
    )


def _interval(paired: dict[str, Any]) -> str:
    low, high = paired["ratio_99_low"], paired["ratio_99_high"]
    return f"{paired['ratio_b_to_a']:.2f} [{low:.2f}, {high:.2f}]"
