"""Times the sampler's C++ core against torch, in turns within one process.

    python benchmarks/sampling/run.py [--vocab 4096,32000,151936] [--rows 1,16,256]
        [--seconds 0.2] [--threads 1] [--flat] [--out DIRECTORY]

README.md says what the logits are, and those of ``--flat``. Each figure is the least of many
runs, so that what else the machine does counts little. ``--out -`` keeps nothing.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from typing import Any

from vmserve.sampling import Sampler, SamplingParams, SamplingRow
from vmserve_bench.lab import script

import torch  # isort: skip  after vmserve, which sets how torch's threads wait

from vmserve.sampling.torch_sampler import TorchSampler

PENALTIES = {"presence_penalty": 0.5, "frequency_penalty": 0.5, "repetition_penalty": 1.1}
CASES: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "temperature 1": {},
    "temperature 0.7": {"temperature": 0.7},
    "top-p 0.9": {"top_p": 0.9},
    "top-k 40": {"top_k": 40},
    "min-p 0.05": {"min_p": 0.05},
    "penalties": PENALTIES,
    "penalties in one row": {},
    "logprobs 5": {"logprobs": 5},
}
COLUMNS = {
    "vocabulary": "{vocab:,}",
    "rows": "{rows}",
    "request": "{case}",
    "torch, µs": "{torch_us:,.0f}",
    "core, µs": "{core_us:,.0f}",
    "times faster": lambda row: f"{row['torch_us'] / row['core_us']:.1f}",
}


def main() -> None:
    args = script.parser(
        __doc__, vocab="4096,32000,151936", rows="1,16,256", seconds=0.2, threads=1, flat=False,
        out="",
    ).parse_args()  # fmt: skip
    torch.set_num_threads(args.threads)
    results = []
    sizes = (map(int, each.split(",")) for each in (args.vocab, args.rows))
    for vocab, num_rows in itertools.product(*sizes):
        logits = make_logits(vocab, num_rows, args.flat)
        results += [measured(name, logits, args.seconds) for name in CASES]
    table = script.table_of("the sampler, microseconds a call", results, COLUMNS)
    script.publish(__file__, args, [table], {"results": results})


def measured(name: str, logits: torch.Tensor, seconds: float) -> dict[str, Any]:
    """Microseconds per call."""
    num_rows, vocab = logits.shape
    rows = [make_row(i, vocab, CASES[name]) for i in range(num_rows)]
    if name == "penalties in one row":
        rows[-1] = make_row(num_rows, vocab, PENALTIES)
    core, torch_ = Sampler(vocab), TorchSampler(vocab)
    core_us, torch_us = in_turns(
        [lambda: core.sample(logits, rows), lambda: torch_.sample(logits, rows)], seconds
    )
    return {
        "case": name,
        "vocab": vocab,
        "rows": num_rows,
        "core_us": round(core_us, 1),
        "torch_us": round(torch_us, 1),
    }


def make_logits(vocab: int, num_rows: int, flat: bool) -> torch.Tensor:
    generator = torch.Generator().manual_seed(vocab)
    noise = torch.randn(num_rows, vocab, generator=generator)
    if flat:
        return 3 * noise
    ranks = torch.rand(num_rows, vocab, generator=generator).argsort(dim=-1) + 1
    return -1.5 * ranks.float().log() + 0.5 * noise


def make_row(i: int, vocab: int, params: dict[str, Any]) -> SamplingRow:
    """Row in the middle of an answer: 200 tokens of prompt, 100 of output."""
    tokens = [(31 * i + 7 * j) % vocab for j in range(300)]
    given = SamplingParams(max_tokens=None, **params)
    return SamplingRow(
        given, seed=i, index=0, tokens=tokens, num_prompt=200, stop_ids=frozenset([0])
    )


def in_turns(calls: list[Callable[[], object]], seconds: float) -> list[float]:
    """The least time of each call in microseconds; four turns at least."""
    best = [float("inf")] * len(calls)
    end = time.perf_counter() + seconds * len(calls)
    for turn in itertools.count():
        if turn >= 4 and time.perf_counter() >= end:
            return best
        for i, call in enumerate(calls):
            start = time.perf_counter()
            call()
            best[i] = min(best[i], (time.perf_counter() - start) * 1e6)
    raise AssertionError


if __name__ == "__main__":
    main()
