"""Times the sampler's C++ core against torch, in turns within one process.

    python benchmarks/sampling/run.py [--vocab 4096,32000,151936] [--rows 1,16,256]
        [--seconds 0.2] [--threads 1] [--flat] [--out DIRECTORY]

Logits follow Zipf's law with an exponent of 1.5 and some noise, as a language model's roughly do
(0.9 of the weight lies on about 60 tokens); ``--flat`` draws them from a normal distribution with
a deviation of 3, whose nucleus is a twentieth of the vocabulary. Each figure is the least of many
runs, so that what else the machine does counts little. Writes ``results/<date>-<cpu>/`` beside
this file, or prints only with ``--out -``; an earlier result is never overwritten.
"""

from __future__ import annotations

import argparse
import itertools
import time
from collections.abc import Callable
from typing import Any

from vmserve_bench.lab.machine import cpu_model
from vmserve_bench.lab.report import keep, results_directory
from vmserve_bench.lab.table import markdown_table

from vmserve.sampling import Sampler, SamplingParams, SamplingRow

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


def main() -> None:
    args = parse()
    torch.set_num_threads(args.threads)
    sizes = itertools.product(numbers(args.vocab), numbers(args.rows))
    results = []
    for vocab, num_rows in sizes:
        logits = make_logits(vocab, num_rows, args.flat)
        results += [measured(name, logits, args.seconds) for name in CASES]
    table = markdown(results)
    print(table)
    if args.out != "-":
        described = {"arguments": vars(args), "cpu": cpu_model(), "results": results}
        keep(results_directory(__file__, root=args.out), described, table + "\n")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--vocab", default="4096,32000,151936")
    parser.add_argument("--rows", default="1,16,256")
    parser.add_argument("--seconds", type=float, default=0.2, help="for each figure")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--flat", action="store_true")
    parser.add_argument("--out", default="", help="a directory, or - to print only")
    return parser.parse_args()


def numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


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
    return SamplingRow(
        params=SamplingParams(max_tokens=None, **params),
        seed=i,
        index=0,
        tokens=[(31 * i + 7 * j) % vocab for j in range(300)],
        num_prompt=200,
        stop_ids=frozenset([0]),
    )


def in_turns(calls: list[Callable[[], object]], seconds: float) -> list[float]:
    """The least time of each call in microseconds."""
    best = [float("inf")] * len(calls)
    num_turns = 0
    end = time.perf_counter() + seconds * len(calls)
    while num_turns < 4 or time.perf_counter() < end:
        for i, call in enumerate(calls):
            start = time.perf_counter()
            call()
            best[i] = min(best[i], (time.perf_counter() - start) * 1e6)
        num_turns += 1
    return best


def markdown(results: list[dict[str, Any]]) -> str:
    head = ("vocabulary", "rows", "request", "torch, µs", "core, µs", "times faster")
    rows = (
        (
            f"{r['vocab']:,}", str(r["rows"]), r["case"], f"{r['torch_us']:,.0f}",
            f"{r['core_us']:,.0f}", f"{r['torch_us'] / r['core_us']:.1f}",
        )
        for r in results
    )  # fmt: skip
    return "\n".join(markdown_table(head, rows, 3))


if __name__ == "__main__":
    main()
