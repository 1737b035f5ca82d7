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
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # before torch is loaded

from vmserve.config import EngineConfig
from vmserve.engine.engine import LLMEngine
from vmserve.models.native import NativeDecoder
from vmserve.sampling import SamplingParams

if TYPE_CHECKING:
    from collections.abc import Sequence

PARTS = ("step", "forward", "attention", "rest")


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


@dataclass(slots=True)
class Subject:
    name: str
    engine: LLMEngine
    core: TimedCore
    times: dict[str, list[float]] = field(default_factory=dict)

    @staticmethod
    def open(model: str, quantization: str, num_seqs: int, max_len: int) -> Subject:
        config = EngineConfig(
            model=model,
            quantization=quantization,  # type: ignore[arg-type]
            linear_backend="native",
            kv_regime="virtual",
            max_num_seqs=num_seqs,
            max_model_len=max_len,
            enable_prefix_caching=False,
        )
        engine = LLMEngine(config)
        network = engine.runner.model.network
        assert isinstance(network, NativeDecoder), "linear_backend says so"
        core = TimedCore(network._core)
        network._core = core  # type: ignore[assignment]
        return Subject(quantization, engine, core)

    def decode(self, num_seqs: int, context: int, steps: int) -> None:
        """Time the steps in which every sequence decodes."""
        numbers = random.Random(0)
        vocab = self.engine.model_config.vocab_size
        params = SamplingParams(max_tokens=steps + 8, temperature=0, ignore_eos=True)
        for i in range(num_seqs):
            prompt = [numbers.randrange(5, vocab) for _ in range(context)]
            self.engine.add_request(f"{i}", prompt, params)
        while self.engine.has_unfinished:
            before = self.engine.counters.generation_tokens
            computed = self.engine.counters.tokens_computed
            began = time.perf_counter()
            self.engine.step()
            taken = time.perf_counter() - began
            counters = self.engine.counters
            if (
                counters.generation_tokens - before
                == num_seqs
                == counters.tokens_computed - computed
            ):
                forward, attention = self.core.seconds, self.core.attention
                for part, seconds in zip(
                    PARTS, (taken, forward, attention, taken - forward), strict=True
                ):
                    self.times.setdefault(part, []).append(seconds)

    def line(self) -> str:
        """Format microseconds of each part, and drop the times."""
        times, self.times = self.times, {}
        quarter = {part: sorted(each)[len(each) // 4] * 1e6 for part, each in times.items()}
        return "  ".join(f"{part} {quarter[part]:7.0f}" for part in PARTS)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("--quantization", default="none,int8")
    parser.add_argument("--num-seqs", default="1,16")
    parser.add_argument("--context", type=int, default=500)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args(arguments)
    counts = [int(text) for text in options.num_seqs.split(",")]
    max_len = options.context + options.steps + 16
    subjects = [
        Subject.open(options.model, name, max(counts), max_len)
        for name in options.quantization.split(",")
    ]
    for num_seqs in counts:
        for _ in range(options.repeats):
            for subject in subjects:
                subject.decode(num_seqs, options.context, options.steps)
        for subject in subjects:
            print(f"{num_seqs:3d} sequences, {subject.name:5}: {subject.line()}", flush=True)


if __name__ == "__main__":
    main()
