"""Times ``Sampler.sample`` of the vmserve that is importable: for turns with another commit's.

    python benchmarks/sampling/one.py; /other/checkout/.venv/bin/python benchmarks/sampling/one.py

Prints microseconds per call, the least of as many as fit into 0.4 s each, on one thread: greedy
and at temperature 1, logits from a normal distribution with a deviation of 3.
"""

from __future__ import annotations

import time

import vmserve
from vmserve.sampling import Sampler, SamplingParams, SamplingRow

import torch  # isort: skip  after vmserve, which sets how torch's threads wait

SIZES = ((2048, 1), (2048, 64), (4096, 1), (32_000, 1), (32_000, 16), (151_936, 1), (151_936, 16))


def least_us(vocab: int, num_rows: int, temperature: float) -> float:
    logits = 3 * torch.randn(num_rows, vocab, generator=torch.Generator().manual_seed(0))
    params = SamplingParams(temperature=temperature, max_tokens=None)
    rows = [SamplingRow(params, i, 0, [1, 1], 1, frozenset()) for i in range(num_rows)]
    sampler = Sampler(vocab)
    best = float("inf")
    end = time.perf_counter() + 0.4
    while time.perf_counter() < end:
        start = time.perf_counter()
        sampler.sample(logits, rows)
        best = min(best, time.perf_counter() - start)
    return best * 1e6


if __name__ == "__main__":
    torch.set_num_threads(1)
    print(vmserve.__file__)
    for vocab, num_rows in SIZES:
        greedy, drawn = (least_us(vocab, num_rows, temperature) for temperature in (0.0, 1.0))
        print(f"{vocab:,} x {num_rows}: greedy {greedy:,.0f}, temperature 1 {drawn:,.0f}")
