"""Turn the command's options into workloads: requests, load and scale."""

from __future__ import annotations

import dataclasses
import itertools
import math
import re
import statistics
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vmserve.errors import ConfigurationError
from vmserve_bench.ab.client import Load
from vmserve_bench.ab.experiment import Workload
from vmserve_bench.ab.jobs import fit, ideal_hit_rate, with_arrivals
from vmserve_bench.ab.metrics import Slo
from vmserve_bench.ab.search import RateSearch
from vmserve_bench.ab.traces import HASH_BLOCK_TOKENS, at_rate, read_prompts, read_trace
from vmserve_bench.ab.traffic import Kind, get_kind, text_jobs
from vmserve_bench.lab.suite import numbers
from vmserve_bench.workloads.texts import TEXTS

if TYPE_CHECKING:
    from collections.abc import Callable

    from vmserve.text.tokenizer import Tokenizer
    from vmserve_bench.ab.jobs import Job

__all__ = [
    "PROMPTS_OUTPUT",
    "TEXT_OUTPUT",
    "LoadOptions",
    "check_positive",
    "duration",
    "fresh_output",
    "make_search",
    "make_workloads",
    "objectives",
    "sources",
    "within_context",
]

#: Tokens of an answer to a conversation of text, and to one of the user's prompts.
TEXT_OUTPUT, PROMPTS_OUTPUT = 192, 64
_DURATION = re.compile(r"(\d+(?:\.\d*)?|\.\d+)\s*(s|ms|us)?")
_UNITS = {"s": 1.0, None: 1.0, "ms": 1e-3, "us": 1e-6}


@dataclass(frozen=True, slots=True)
class LoadOptions:
    """Load options as given; None where left out. ``concurrency``: numbers between commas."""

    concurrency: str | None = None
    rate: float | None = None
    burstiness: float | None = None
    search: bool = False

    def check(self, slo_given: bool) -> None:
        """Raises ConfigurationError for options that exclude each other, or are of no use."""
        check_positive(rate=self.rate, burstiness=self.burstiness)
        if self.concurrency is not None and self.rate is not None:
            raise ConfigurationError(
                "--concurrency (closed loop) and --rate (open loop) exclude each other: give one"
            )
        if self.search and (self.concurrency is not None or self.rate is not None):
            raise ConfigurationError("--search finds the rate: leave --rate and --concurrency out")
        if self.search and not slo_given:
            raise ConfigurationError(
                "--search needs an objective: give --slo-ttft, --slo-tpot or both, e.g. 200ms"
            )
        if self.burstiness is not None and self.rate is None and not self.search:
            raise ConfigurationError("--burstiness is about arrivals: give --rate or --search too")


def sources(
    workloads: list[str],
    trace: Path | None,
    prompts: Path | None,
    *,
    num_requests: int | None,
    usual: int = 0,
    block_tokens: int = HASH_BLOCK_TOKENS,
    num_output_tokens: int | None = None,
    tokenizer: Tokenizer | None = None,
) -> list[Kind]:
    """Kinds of requests, by name and of files. Text takes a tokenizer.

    ``num_requests`` None: as many as the workload was published with, else ``usual``; of a trace
    all. ``num_output_tokens``: of answers to texts. Raises ConfigurationError for an unknown
    workload or a file that cannot be read.
    """
    found = []
    for name in workloads:
        if name in TEXTS:
            assert tokenizer is not None
            kind = _of_text(name, num_output_tokens or TEXT_OUTPUT, tokenizer)
        else:
            kind = get_kind(name)
        count = num_requests or kind.num_requests or usual
        found.append(dataclasses.replace(kind, num_requests=count))
    if trace is not None:
        jobs = read_trace(trace, block_tokens)[:num_requests]
        found.append(Kind(trace.stem, "", None, lambda _, seed: jobs, has_times=True))
    if prompts is not None:
        assert tokenizer is not None
        given = read_prompts(prompts, tokenizer.encode, num_output_tokens or PROMPTS_OUTPUT)
        found.append(Kind(prompts.stem, "", None, lambda _, seed: given))
    return found


def _of_text(name: str, num_output: int, tokenizer: Tokenizer) -> Kind:
    def encode_chat(message: str) -> list[int]:
        if not tokenizer.chat_template_text:
            return tokenizer.encode(message)
        return tokenizer.apply_chat_template([{"role": "user", "content": message}])[1]

    def make(num_requests: int, seed: int) -> list[Job]:
        return text_jobs(name, num_requests, seed, num_output, encode_chat)

    return Kind(name, "", None, make)


def make_workloads(
    source: Kind, options: LoadOptions, *, max_len: int, scale: float | None
) -> list[Workload]:
    """One load for all rounds, or one for each number of requests at once.

    Raises ConfigurationError for prompts that do not fit.
    """
    jobs, described = _fitted(source, options, max_len, scale)
    at_once = () if options.concurrency is None else numbers("concurrency", options.concurrency)
    is_open = options.rate is not None or (source.has_times and not at_once)
    loads = [Load(True)] if is_open else [Load(False, n) for n in at_once or source.concurrencies]
    return [
        Workload(
            f"{source.name} at {load.concurrency}" if len(loads) > 1 else source.name,
            lambda seed: jobs(seed, options.rate, is_open),
            load,
            {**described, "load": _told(source, load, options)},
        )
        for load in loads
    ]


def make_search(
    source: Kind,
    options: LoadOptions,
    *,
    max_len: int,
    scale: float | None,
    goodput: float,
    steps: int,
) -> RateSearch:
    """Raises ConfigurationError for prompts that do not fit."""
    jobs, described = _fitted(source, options, max_len, scale)
    described["load"] = f"burstiness {options.burstiness or source.burstiness:.3g}"
    return RateSearch(
        source.name,
        lambda seed, rate: jobs(seed, rate, rate is not None),
        goodput,
        steps,
        described,
    )


def _fitted(
    source: Kind, options: LoadOptions, max_len: int, scale: float | None
) -> tuple[Callable[[int, float | None, bool], list[Job]], dict[str, Any]]:
    """``jobs(seed, rate, is_open)``, and what the first round's are.

    ``num_requests`` may differ a little from round to round, where conversations run out of
    context. ``may_end``: answers may end before their last token. ``ideal_hit_rate``: of a trace
    that names its blocks.
    """
    if scale is None:
        scale = 1.0 if source.context is None else min(1.0, max_len / source.context)
    factor = scale

    def jobs(seed: int, rate: float | None, is_open: bool) -> list[Job]:
        found = fit(source.make(source.num_requests or 0, seed), factor, max_len)
        if source.has_times and is_open:
            return found if rate is None else at_rate(found, rate)
        burstiness = options.burstiness or source.burstiness
        return with_arrivals(found, rate, burstiness, seed) if is_open else found

    first = jobs(0, None, False)
    return jobs, {
        "num_requests": len(first),
        "mean_input_tokens": statistics.fmean(job.shape.num_input_tokens for job in first),
        "mean_output_tokens": statistics.fmean(job.shape.num_output_tokens for job in first),
        "may_end": any(job.may_end for job in first),
        "decoding": sorted({str(job.decoding) for job in first}),
        "ideal_hit_rate": ideal_hit_rate(first),
        "max_len": max_len,
        "scale": scale,
    }


def _told(source: Kind, load: Load, options: LoadOptions) -> str:
    if not load.is_open:
        return "all at once" if load.concurrency is None else f"{load.concurrency} at a time"
    if source.has_times:
        rate = options.rate
        return "at its own times" if rate is None else f"its own arrivals at {rate:g}/s"
    return f"{options.rate:g}/s with burstiness {options.burstiness or source.burstiness:.3g}"


def objectives(ttft: str | None, tpot: str | None) -> Slo:
    """Parse ``--slo-ttft`` and ``--slo-tpot``."""
    return Slo(
        None if ttft is None else duration("--slo-ttft", ttft),
        None if tpot is None else duration("--slo-tpot", tpot),
    )


def duration(option: str, text: str) -> float:
    """Parse seconds, e.g. ``200ms``, ``0.2s`` or ``0.2``. Raises ConfigurationError."""
    match = _DURATION.fullmatch(text.strip())
    if match is None or not float(match.group(1)) > 0:
        raise ConfigurationError(f"{option}: {text!r} is no duration: write e.g. 200ms or 0.2s")
    return float(match.group(1)) * _UNITS[match.group(2)]


def check_positive(**numbers: float | None) -> None:
    """Raises ConfigurationError for an option's number that is not finite and above 0."""
    for name, value in numbers.items():
        if value is not None and not (math.isfinite(value) and value > 0):
            raise ConfigurationError(
                f"--{name.replace('_', '-')}: {value:g} is not a number above 0"
            )


def within_context(max_len: int | None, longest: int, usual: int, told: str) -> int:
    """``--max-len``, else ``usual``. Raises ConfigurationError above the ``longest``."""
    if max_len is not None and max_len > longest:
        raise ConfigurationError(f"--max-len: {max_len} is above the {longest} tokens that {told}")
    return max_len or usual


def fresh_output(name: str) -> Path:
    """A new path in the current directory; never one that exists."""
    stem = f"{name}-{datetime.now(UTC).date().isoformat()}"
    ends = itertools.chain([""], (f"-{count}" for count in itertools.count(2)))
    return next(path for end in ends if not (path := Path(f"{stem}{end}")).exists())
