"""Turn the command's options into workloads: requests, load and scale."""

from __future__ import annotations

import re
import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vmserve.errors import ConfigurationError
from vmserve_bench.ab.client import Load
from vmserve_bench.ab.experiment import Workload
from vmserve_bench.ab.jobs import fit, ideal_hit_rate, with_arrivals
from vmserve_bench.ab.metrics import Slo
from vmserve_bench.ab.search import RateSearch
from vmserve_bench.ab.traces import HASH_BLOCK_TOKENS, at_rate, read_prompts, read_trace
from vmserve_bench.ab.traffic import get_kind, text_jobs
from vmserve_bench.lab.suite import numbers
from vmserve_bench.workloads.texts import TEXTS

if TYPE_CHECKING:
    from collections.abc import Callable

    from vmserve.text.tokenizer import Tokenizer
    from vmserve_bench.ab.jobs import Job
    from vmserve_bench.ab.traffic import Kind

__all__ = [
    "EMBEDDED_MAX_LEN",
    "PROMPTS_OUTPUT",
    "TEXT_OUTPUT",
    "LoadOptions",
    "Source",
    "duration",
    "make_search",
    "make_workloads",
    "objectives",
    "sources",
]

#: Context that workloads are scaled to on the embedded model: two cores serve it in seconds.
EMBEDDED_MAX_LEN = 1024
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

    @property
    def concurrencies(self) -> tuple[int, ...]:
        """Raises ConfigurationError for what is no number."""
        return () if self.concurrency is None else numbers("concurrency", self.concurrency)

    def check(self, slo_given: bool) -> None:
        """Raises ConfigurationError for options that exclude each other, or are of no use."""
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


@dataclass(frozen=True, slots=True)
class Source:
    """Source of requests: ``make(seed)`` gives them unscaled.

    ``has_times``: they bring arrivals of their own. ``context`` None: lengths stay as they are,
    cut to the context, unless ``--scale`` is given.
    """

    name: str
    make: Callable[[int], list[Job]]
    context: int | None
    concurrencies: tuple[int | None, ...] = (None,)
    burstiness: float = 1.0
    has_times: bool = False


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
) -> list[Source]:
    """Make sources of workloads by name, and of files. Text takes a tokenizer.

    ``num_requests`` None: as many as the workload was published with, else ``usual``; of a trace
    all. ``num_output_tokens``: of answers to texts. Raises ConfigurationError for an unknown
    workload or a file that cannot be read.
    """
    found = []
    for name in workloads:
        if name in TEXTS:
            assert tokenizer is not None
            num_output = num_output_tokens or TEXT_OUTPUT
            found.append(_of_text(name, num_requests or usual, num_output, tokenizer))
        else:
            found.append(_of_kind(name, num_requests, usual))
    if trace is not None:
        jobs = read_trace(trace, block_tokens)[:num_requests]
        found.append(Source(trace.stem, lambda seed: jobs, None, has_times=True))
    if prompts is not None:
        assert tokenizer is not None
        given = read_prompts(prompts, tokenizer.encode, num_output_tokens or PROMPTS_OUTPUT)
        found.append(Source(prompts.stem, lambda seed: given, None))
    return found


def _of_kind(name: str, num_requests: int | None, usual: int) -> Source:
    try:
        kind: Kind = get_kind(name)
    except ValueError as error:
        raise ConfigurationError(f"--workload: {error}") from None
    return Source(
        kind.name,
        lambda seed: kind.make(num_requests or kind.num_requests or usual, seed),
        kind.context,
        kind.concurrencies,
        kind.burstiness,
    )


def _of_text(name: str, num_requests: int, num_output: int, tokenizer: Tokenizer) -> Source:
    def encode_chat(message: str) -> list[int]:
        if not tokenizer.chat_template_text:
            return tokenizer.encode(message)
        return tokenizer.apply_chat_template([{"role": "user", "content": message}])[1]

    return Source(
        name, lambda seed: text_jobs(name, num_requests, seed, num_output, encode_chat), None
    )


def make_workloads(
    source: Source, options: LoadOptions, *, max_len: int, scale: float | None
) -> list[Workload]:
    """One load for all rounds, or one for each number of requests at once.

    Raises ConfigurationError for prompts that do not fit.
    """
    scaled = _scale(source, max_len, scale)
    burstiness = options.burstiness or source.burstiness
    concurrencies = options.concurrencies
    is_open = options.rate is not None or (source.has_times and not concurrencies)

    def make(seed: int) -> list[Job]:
        jobs = fit(source.make(seed), scaled, max_len)
        return _timed(jobs, source, options.rate, burstiness, seed) if is_open else jobs

    closed = [Load(False, each) for each in concurrencies or source.concurrencies]
    loads = [Load(True)] if is_open else closed
    first = make(0)
    return [
        Workload(
            f"{source.name} at {load.concurrency}" if len(loads) > 1 else source.name,
            make,
            load,
            _described(
                first,
                max_len=max_len,
                scale=scaled,
                load=_told(source, load, options.rate, burstiness),
            ),
        )
        for load in loads
    ]


def make_search(
    source: Source,
    options: LoadOptions,
    *,
    max_len: int,
    scale: float | None,
    goodput: float,
    steps: int,
) -> RateSearch:
    """Raises ConfigurationError for prompts that do not fit."""
    scaled = _scale(source, max_len, scale)
    burstiness = options.burstiness or source.burstiness

    def make(seed: int, rate: float | None) -> list[Job]:
        jobs = fit(source.make(seed), scaled, max_len)
        return jobs if rate is None else _timed(jobs, source, rate, burstiness, seed)

    described = _described(
        make(0, None), max_len=max_len, scale=scaled, load=f"burstiness {burstiness:.3g}"
    )
    return RateSearch(source.name, make, goodput, steps, described)


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


def _scale(source: Source, max_len: int, scale: float | None) -> float:
    if scale is not None:
        return scale
    return 1.0 if source.context is None else min(1.0, max_len / source.context)


def _timed(
    jobs: list[Job], source: Source, rate: float | None, burstiness: float, seed: int
) -> list[Job]:
    if source.has_times:
        return jobs if rate is None else at_rate(jobs, rate)
    return with_arrivals(jobs, rate, burstiness, seed)


def _told(source: Source, load: Load, rate: float | None, burstiness: float) -> str:
    if not load.is_open:
        return "all at once" if load.concurrency is None else f"{load.concurrency} at a time"
    if source.has_times:
        return "at its own times" if rate is None else f"its own arrivals at {rate:g}/s"
    return f"{rate:g}/s with burstiness {burstiness:.3g}"


def _described(jobs: list[Job], **more: Any) -> dict[str, Any]:
    """The first round's requests; ``num_requests`` may differ a little from round to round, where
    conversations run out of context. ``may_end``: answers may end before their last token.
    ``ideal_hit_rate``: of a trace that names its blocks.
    """
    shapes = [job.shape for job in jobs]
    return {
        "num_requests": len(jobs),
        "mean_input_tokens": statistics.fmean(shape.num_input_tokens for shape in shapes),
        "mean_output_tokens": statistics.fmean(shape.num_output_tokens for shape in shapes),
        "may_end": any(job.may_end for job in jobs),
        "decoding": sorted({str(job.decoding) for job in jobs}),
        "ideal_hit_rate": ideal_hit_rate(jobs),
        **more,
    }
