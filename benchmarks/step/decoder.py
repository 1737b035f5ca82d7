"""A decoding step of the native decoder on a CPU: how much of it is the forward pass, and the rest.

    python benchmarks/step/decoder.py MODEL_DIRECTORY [--quantization none,int8] [--num-seqs 1,16]
        [--context 500] [--steps 60] [--repeats 3]

Engines of all the quantizations live in one process and step in turns, so that what disturbs one
disturbs all. Microseconds, 25th percentile of the steps (medians of a busy machine say how busy it
is); `attention` is part of `forward`. `benchmarks/peers/checkpoint.py` writes models.
"""

from __future__ import annotations

import argparse
import os
import random
import time
from typing import Any

import numpy as np

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # before torch is loaded

from vmserve.config import EngineConfig
from vmserve.engine.engine import LLMEngine
from vmserve.models.native import NativeDecoder
from vmserve.sampling import SamplingParams


class TimedCore:
    """The C++ decoder, with a stopwatch around its forward pass."""

    def __init__(self, core: Any) -> None:
        self._core = core
        self.seconds = self.attention = 0.0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._core, name)

    def forward(self, *args: Any) -> Any:
        began = time.perf_counter()
        result = self._core.forward(*args)
        self.seconds = time.perf_counter() - began
        self.attention = sum(result[1])  # seconds of each part of the batch
        return result


def opened(model: str, quantization: Any, num_seqs: int, max_len: int) -> LLMEngine:
    """An engine whose decoder is timed."""
    engine = LLMEngine(
        EngineConfig(
            model=model,
            quantization=quantization,
            linear_backend="native",
            kv_regime="virtual",
            max_num_seqs=num_seqs,
            max_model_len=max_len,
            enable_prefix_caching=False,
        )
    )
    network = engine.runner.model.network
    assert isinstance(network, NativeDecoder), "linear_backend says so"
    network._core = TimedCore(network._core)  # type: ignore[assignment]
    return engine


def decode(engine: LLMEngine, num_seqs: int, context: int, steps: int) -> list[list[float]]:
    """Seconds of steps in which every sequence decodes: whole, forward, attention, the rest."""
    numbers, core = random.Random(0), engine.runner.model.network._core
    params = SamplingParams(max_tokens=steps + 8, temperature=0, ignore_eos=True)
    for index in range(num_seqs):
        vocab = range(5, engine.model_config.vocab_size)
        engine.add_request(f"{index}", numbers.choices(vocab, k=context), params)
    times = []
    while engine.has_unfinished:
        counters = engine.counters
        before = counters.generation_tokens, counters.tokens_computed
        began = time.perf_counter()
        engine.step()
        taken = time.perf_counter() - began
        after = counters.generation_tokens, counters.tokens_computed
        if all(b - a == num_seqs for a, b in zip(before, after, strict=True)):
            times.append([taken, core.seconds, core.attention, taken - core.seconds])
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("--quantization", default="none,int8")
    parser.add_argument("--num-seqs", default="1,16")
    parser.add_argument("--context", type=int, default=500)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    counts = [int(text) for text in options.num_seqs.split(",")]
    max_len = options.context + options.steps + 16
    names = options.quantization.split(",")
    engines = {name: opened(options.model, name, max(counts), max_len) for name in names}
    for num_seqs in counts:
        times: dict[str, list[list[float]]] = {name: [] for name in names}
        for _ in range(options.repeats):
            for name, engine in engines.items():
                times[name] += decode(engine, num_seqs, options.context, options.steps)
        for name, found in times.items():
            quarter = np.percentile(found, 25, axis=0, method="lower") * 1e6
            parts = zip(("step", "forward", "attention", "rest"), quarter, strict=True)
            told = "  ".join(f"{part} {microseconds:7.0f}" for part, microseconds in parts)
            print(f"{num_seqs:3d} sequences, {name:5}: {told}", flush=True)


if __name__ == "__main__":
    main()
