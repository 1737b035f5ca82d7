"""Seeded request shapes with the lengths and arrivals of published traces.

A workload is a list of :class:`RequestShape`: how many tokens go in, how many come out and
when the request arrives. Nothing here is text: prompts are random token ids of the wanted
length (:func:`prompt_token_ids`), since an engine's cost depends on lengths alone.

Lengths, arrivals, group order and prompt ids draw from separate streams of one seed, so
changing the request rate leaves the lengths as they were. Sources:

- ShareGPT and Alpaca: the two datasets of the PagedAttention paper (Kwon et al., SOSP
  2023, section 6.1), with its means and its context of 2,048 tokens.
- Azure conversation and code: the LLM inference traces of 2023 published with Splitwise
  (Patel et al., ISCA 2024).
- Hot and cold prompts: kvcached's benchmark of what an idle instance holds (2026).
- Arrivals: gamma gaps with a burstiness, rescaled to a fixed span, as in the serving
  benchmark of vLLM; burstiness 1 is the Poisson process of the PagedAttention paper.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from types import MappingProxyType
from typing import TYPE_CHECKING, Literal, TypeAlias

import numpy as np

from vmserve_bench.workloads.distributions import (
    FloatArray,
    IntArray,
    LengthModel,
    log_normal,
    log_normal_of_mean,
    percentile_table,
    piecewise_log_normal,
)

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping

__all__ = [
    "ALPACA",
    "AZURE_CODE",
    "AZURE_CONVERSATION",
    "SHAREGPT",
    "WORKLOADS",
    "Published",
    "RequestShape",
    "Workload",
    "allowed_ids",
    "alpaca",
    "arrival_times",
    "azure_code",
    "azure_conversation",
    "get_workload",
    "hot_cold",
    "lognormal",
    "prompt_token_ids",
    "prompts",
    "shared_prefix",
    "sharegpt",
]

#: Context of the PagedAttention paper's experiments, in tokens.
PAPER_CONTEXT_TOKENS = 2048

_LENGTHS, _ARRIVALS, _ORDER, _PROMPT, _PREFIX = range(5)

_SHAREGPT_PERCENTS = (
    0, 1, 2, 5, 10, 15, 20, 25, 30, 35, 40, 45, 50, 55, 60, 65, 70, 75, 80, 85, 90,
    92, 94, 95, 96, 97, 98, 99, 99.5, 99.9, 100,
)  # fmt: skip
_SHAREGPT_INPUTS = (
    1, 2, 3, 7, 9, 11, 13, 15, 18, 21, 24, 29, 35, 44, 55, 71, 94, 133, 203, 324, 507,
    620, 775, 864, 986, 1088, 1230, 1464, 1639, 1873, 2028,
)  # fmt: skip
_SHAREGPT_OUTPUTS = (
    1, 4, 10, 22, 45, 75, 101, 128, 157, 188, 216, 244, 271, 300, 330, 364, 405, 458, 525,
    619, 754, 786, 846, 899, 961, 1040, 1139, 1280, 1443, 1706, 2009,
)  # fmt: skip

#: Percentiles of the 79,731 ShareGPT requests whose input and output fit in 2,048 tokens.
#: Their means, 161.31 in and 337.99 out, are the PagedAttention paper's (figure 11); the
#: model's own are within 1 % of both. Inputs round down: their quantiles curve upwards,
#: and the straight lines between listed percentiles run above such a curve.
SHAREGPT = LengthModel(
    inputs=percentile_table(_SHAREGPT_PERCENTS, _SHAREGPT_INPUTS),
    outputs=percentile_table(_SHAREGPT_PERCENTS, _SHAREGPT_OUTPUTS),
    rho=0.22,
    max_total_tokens=PAPER_CONTEXT_TOKENS,
    floor_inputs=True,
)

#: Log-normal fits to the Alpaca dataset, whose means in the PagedAttention paper
#: (figure 11) are 19.31 in and 58.45 out. Inputs and outputs are taken as independent.
ALPACA = LengthModel(
    log_normal(2.80, 0.56), log_normal(3.776, 0.764), max_total_tokens=PAPER_CONTEXT_TOKENS
)

#: The Azure 2023 conversation trace by its p50, p90 and p99, interpolated (one log-normal per
#: length does not meet all three). Lengths below the median and the independence of inputs and
#: outputs are assumptions.
AZURE_CONVERSATION = LengthModel(
    piecewise_log_normal(1020, 2734, 4142), piecewise_log_normal(129, 424, 601)
)

#: The Azure 2023 code trace, interpolated like the conversation trace.
AZURE_CODE = LengthModel(piecewise_log_normal(1469, 5188, 7436), piecewise_log_normal(13, 55, 251))


@dataclass(frozen=True, slots=True)
class RequestShape:
    """One request of a workload: lengths in tokens, arrival in seconds from the start.

    ``index`` is the request's place in its workload and, with a seed, decides its prompt.
    Requests of one ``prefix_group`` share their first ``num_prefix_tokens`` prompt ids.
    """

    num_input_tokens: int
    num_output_tokens: int
    arrival_s: float = 0.0
    index: int = 0
    prefix_group: int | None = None
    num_prefix_tokens: int = 0

    def __post_init__(self) -> None:
        if (
            min(self.num_input_tokens, self.num_output_tokens) < 1
            or not 0 <= self.num_prefix_tokens <= self.num_input_tokens
            or (self.num_prefix_tokens and self.prefix_group is None)
        ):
            raise ValueError(f"a request has at least 1 token in and 1 out, got {self}")


#: ``workload(num_requests, seed, request_rate=..., burstiness=...)``; what is left out is the
#: workload's own.
Workload: TypeAlias = Callable[..., list[RequestShape]]


def arrival_times(
    num_requests: int, request_rate: float | None, burstiness: float = 1.0, *, seed: int = 0
) -> FloatArray:
    """Arrival times in seconds ``[num_requests]``, rising, the last at num_requests / rate.

    The gaps are Gamma(shape = burstiness, scale = 1 / (rate x burstiness)), so their
    coefficient of variation is 1 / sqrt(burstiness); they are then scaled together so that
    every seed offers exactly ``request_rate`` requests per second. A rate of None or
    infinity is the closed loop: all arrive at 0. Times are rounded to the nanosecond. Raises
    ValueError for a number that is not above 0.
    """
    if num_requests < 1:
        raise ValueError(f"num_requests must be at least 1, got {num_requests}")
    if request_rate is not None and not request_rate > 0:
        raise ValueError(f"request_rate must be above 0 or None, got {request_rate}")
    if not (math.isfinite(burstiness) and burstiness > 0):
        raise ValueError(f"burstiness must be finite and above 0, got {burstiness}")
    if request_rate is None or math.isinf(request_rate):
        return np.zeros(num_requests)
    gaps = np.random.default_rng([seed, _ARRIVALS]).gamma(
        shape=burstiness, scale=1.0 / (request_rate * burstiness), size=num_requests
    )
    span = num_requests / request_rate
    times: FloatArray = np.cumsum(gaps)
    # A tiny shape can underflow every gap to 0: then all arrive together, at the end.
    times = times * (span / times[-1]) if times[-1] > 0 else np.full(num_requests, span)
    times = np.minimum(np.round(times, 9), span).astype(np.float64)
    times[-1] = span
    return times


@dataclass(frozen=True, slots=True)
class Published:
    """Requests with a published distribution of lengths, by default at its trace's own rate."""

    lengths: LengthModel
    rate: float | None = None
    burstiness: float = 1.0

    def __call__(
        self,
        num_requests: int,
        seed: int = 0,
        *,
        request_rate: float | Literal["own"] | None = "own",
        burstiness: float | None = None,
    ) -> list[RequestShape]:
        rate = self.rate if request_rate == "own" else request_rate
        arrivals = arrival_times(num_requests, rate, burstiness or self.burstiness, seed=seed)
        lengths = self.lengths.sample(num_requests, np.random.default_rng([seed, _LENGTHS]))
        columns = zip(*(column.tolist() for column in (*lengths, arrivals)), strict=True)
        return [RequestShape(i, o, t, index) for index, (i, o, t) in enumerate(columns)]


#: Chat requests with ShareGPT's lengths: short in, long out.
sharegpt = Published(SHAREGPT)
#: Instructions with Alpaca's lengths: short in, short out.
alpaca = Published(ALPACA)
#: The Azure 2023 conversation trace, with its coefficient of variation of 1.09.
azure_conversation = Published(AZURE_CONVERSATION, 5.53, 1.09**-2)
#: The Azure 2023 code trace: long in, very short out, in bursts with long silences between them.
azure_code = Published(AZURE_CODE, 2.57, 13.2**-2)


def lognormal(
    num_requests: int,
    seed: int = 0,
    *,
    mean_in: float = 160.0,
    mean_out: float = 120.0,
    sigma_in: float = 0.8,
    sigma_out: float = 0.8,
    max_total_tokens: int | None = PAPER_CONTEXT_TOKENS,
    request_rate: float | None = None,
    burstiness: float = 1.0,
) -> list[RequestShape]:
    """Log-normal lengths with the given means in tokens; inputs and outputs independent.

    The default spread of 0.8 is close to that of both published output lengths: Alpaca's
    fit has 0.764, and ShareGPT's coefficient of variation of 0.95 corresponds to 0.80.
    """
    model = LengthModel(
        inputs=log_normal_of_mean(mean_in, sigma_in),
        outputs=log_normal_of_mean(mean_out, sigma_out),
        max_total_tokens=max_total_tokens,
    )
    return Published(model)(num_requests, seed, request_rate=request_rate, burstiness=burstiness)


def shared_prefix(
    num_requests: int = 1024,
    seed: int = 0,
    *,
    num_groups: int = 64,
    num_prefix_tokens: int = 2048,
    num_question_tokens: int = 128,
    num_output_tokens: int = 256,
    request_rate: float | None = None,
    burstiness: float = 1.0,
) -> list[RequestShape]:
    """Groups of requests with a common system prompt and their own questions.

    The defaults are 64 groups of 16 requests: 2,048 tokens shared, 128 of one's own, 256
    out. Groups are equal in size (give or take one) and arrive in a shuffled order.
    """
    arrivals = arrival_times(num_requests, request_rate, burstiness, seed=seed).tolist()
    if not 1 <= num_groups <= num_requests:
        raise ValueError(
            f"num_groups must be from 1 to the {num_requests} requests, got {num_groups}"
        )
    order = np.random.default_rng([seed, _ORDER]).permutation(num_requests)
    num_input_tokens = num_prefix_tokens + num_question_tokens
    return [
        RequestShape(num_input_tokens, num_output_tokens, at, index, group, num_prefix_tokens)
        for index, (at, group) in enumerate(
            zip(arrivals, (order % num_groups).tolist(), strict=True)
        )
    ]


def hot_cold(num_requests: int = 2500, seed: int = 0) -> list[RequestShape]:
    """Short prefixes that come again among prompts that come once.

    30 % of the requests have one of 16 prefixes of 128 tokens, which come into use one after the
    other, and 64 tokens of their own; the others have 192 to 1,024. Answers of 16 to 256 tokens, so
    that sequences end at different times (kvcached, ``benchmarks/bench_idle_footprint``).
    """
    rng = np.random.default_rng([seed, _LENGTHS])
    is_hot = (rng.random(num_requests) < 0.3).tolist()
    group_draws = rng.random(num_requests).tolist()
    cold = rng.integers(192, 1025, num_requests).tolist()
    outputs = rng.integers(16, 257, num_requests).tolist()
    shapes = []
    for index in range(num_requests):
        if is_hot[index]:
            num_known = min(16, 1 + 16 * index // max(1, num_requests - 1))
            group = int(group_draws[index] * num_known)
            shapes.append(RequestShape(192, outputs[index], 0.0, index, group, 128))
        else:
            shapes.append(RequestShape(cold[index], outputs[index], 0.0, index))
    return shapes


@lru_cache(maxsize=8)
def allowed_ids(vocab_size: int, reserved: frozenset[int]) -> IntArray:
    """Ids of a vocabulary without the reserved ones, rising. Raises ValueError for none."""
    ids = np.setdiff1d(np.arange(vocab_size), sorted(reserved))
    if not 0 < len(ids) == vocab_size - len(reserved):
        raise ValueError(f"{len(ids)} ids are left of {vocab_size} without {sorted(reserved)}")
    return ids


def prompt_token_ids(
    shape: RequestShape, vocab_size: int, seed: int = 0, *, reserved: Collection[int] = ()
) -> list[int]:
    """Random prompt ids for one request, uniform over the vocabulary less ``reserved``.

    The same seed and request give the same ids; requests of one prefix group agree in their
    first ``num_prefix_tokens``. Pass the special ids (BOS, EOS, padding) as ``reserved``.
    """
    allowed = allowed_ids(vocab_size, frozenset(reserved))

    def drawn(count: int, *keys: int) -> list[int]:
        stream = np.random.default_rng([seed, *keys])
        ids: list[int] = allowed[stream.integers(0, len(allowed), size=count)].tolist()
        return ids

    own = drawn(shape.num_input_tokens - shape.num_prefix_tokens, _PROMPT, shape.index)
    if shape.prefix_group is None:
        return own
    return drawn(shape.num_prefix_tokens, _PREFIX, shape.prefix_group) + own


def prompts(
    shapes: Iterable[RequestShape],
    vocab_size: int,
    seed: int = 0,
    *,
    reserved: Collection[int] = (),
) -> list[list[int]]:
    """:func:`prompt_token_ids` of each request, in order."""
    return [prompt_token_ids(shape, vocab_size, seed, reserved=reserved) for shape in shapes]


#: Workloads by the name that commands use.
WORKLOADS: Mapping[str, Workload] = MappingProxyType(
    {
        "alpaca": alpaca,
        "azure-code": azure_code,
        "azure-conversation": azure_conversation,
        "lognormal": lognormal,
        "shared-prefix": shared_prefix,
        "sharegpt": sharegpt,
    }
)


def get_workload(name: str) -> Workload:
    """The workload of that name; a ValueError lists the names there are."""
    if name not in WORKLOADS:
        raise ValueError(f"no workload is named {name!r}: choose from {', '.join(WORKLOADS)}")
    return WORKLOADS[name]
