"""Kinds of traffic: how long requests are, how they are decoded and what they share.

Lengths come from published traces (:mod:`vmserve_bench.workloads.shapes`); what is our own
assumption says so. Kinds of :mod:`vmserve_bench.workloads.texts` have real prompts instead of
lengths. Every kind is seeded: the same seed, the same requests.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

from vmserve.errors import ConfigurationError
from vmserve_bench.ab.jobs import GREEDY, Decoding, Job
from vmserve_bench.workloads import shapes as workloads
from vmserve_bench.workloads.distributions import LengthModel, percentile_table
from vmserve_bench.workloads.shapes import RequestShape
from vmserve_bench.workloads.texts import TEXTS, conversations

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

__all__ = ["ARXIV", "KINDS", "MIX", "Kind", "get_kind", "sessions", "text_jobs"]

#: Streams of a seed besides those of :mod:`vmserve_bench.workloads.shapes`.
_LONG, _WMT, _SESSIONS, _MIX, _TEXTS = range(10, 15)

#: arXiv summarization: inputs of mean 2,588, p50 2,730, p90 3,702 tokens, outputs of mean 291,
#: p50 167, p90 372. What these leave open is drawn straight so that both means are met.
ARXIV = LengthModel(
    inputs=percentile_table((0, 50, 90, 100), (917, 2730, 3702, 4096)),
    outputs=percentile_table((0, 50, 90, 100), (20, 167, 372, 2357)),
)
#: Prompt lengths and prompt : decode ratios of vAttention's experiments with long contexts.
_LONG_PROMPTS = (32 * 1024, 64 * 1024, 128 * 1024)
_PROMPT_TO_DECODE = (500, 100, 50)
#: Tokens of one example, and of five, before each sentence (PagedAttention, section 6.4).
_EXAMPLES = (80, 341)
_REQUESTS_PER_PREFIX = 16
_MAX_TURNS = 6
_MEAN_THINK_S = 2.0
_WIDTH = 4

#: ``make(num_requests, seed)``.
Make: TypeAlias = "Callable[[int, int], list[Job]]"


@dataclass(frozen=True, slots=True)
class Kind:
    """``context``: what its longest requests take, in tokens; a shorter one is scaled to. None:
    lengths stay as they are, unless ``--scale`` is given.

    ``concurrencies``: requests at once in a closed loop, a run each; None for all. ``burstiness``:
    of arrivals in an open loop. ``num_requests``: of a run, None where nothing was published.
    ``has_times``: requests bring arrivals of their own.
    """

    name: str
    summary: str
    context: int | None
    make: Make
    concurrencies: tuple[int | None, ...] = (None,)
    burstiness: float = 1.0
    num_requests: int | None = None
    has_times: bool = False


def _of(draw: Callable[[int, int], list[RequestShape]], decoding: Decoding = GREEDY) -> Make:
    """Jobs of shapes, which come all at once until a load says when."""

    def make(num_requests: int, seed: int) -> list[Job]:
        return [Job(one, decoding).reshaped(arrival_s=0.0) for one in draw(num_requests, seed)]

    return make


def _long(num_requests: int, seed: int) -> list[RequestShape]:
    lengths = ARXIV.sample(num_requests, np.random.default_rng([seed, _LONG]))
    columns = zip(*(column.tolist() for column in lengths), strict=True)
    return [RequestShape(i, o, index=index) for index, (i, o) in enumerate(columns)]


def _long_context(num_requests: int, seed: int) -> list[RequestShape]:
    """Combine every length with every ratio, in a random order."""
    cases = [(length, length // ratio) for length in _LONG_PROMPTS for ratio in _PROMPT_TO_DECODE]
    order = np.random.default_rng([seed, _LONG, 1]).permutation(len(cases)).tolist()
    drawn = [cases[order[index % len(cases)]] for index in range(num_requests)]
    return [RequestShape(i, o, index=index) for index, (i, o) in enumerate(drawn)]


def _shared_prefix(num_requests: int, seed: int) -> list[RequestShape]:
    num_groups = max(1, round(num_requests / _REQUESTS_PER_PREFIX))
    return workloads.shared_prefix(num_requests, seed, num_groups=num_groups)


def _translation(num_prefix: int, num_requests: int, seed: int) -> list[RequestShape]:
    """One prefix for all; own input and output of 40 to 60 tokens, uniform (our assumption)."""
    rng = np.random.default_rng([seed, _WMT, num_prefix])
    lengths = rng.integers(40, 61, size=(num_requests, 2)).tolist()
    return [
        RequestShape(num_prefix + own, out, 0.0, index, 0, num_prefix)
        for index, (own, out) in enumerate(lengths)
    ]


def sessions(num_requests: int, seed: int) -> list[Job]:
    """Conversations of 1 to 6 turns (our assumption), each turn with ShareGPT's lengths.

    A turn's prompt is all that was said before plus the new message. In an open loop the user
    thinks for an exponential time of mean 2 s (ours as well). Turns of a conversation follow
    each other in the list; the last conversation is cut where the requests are used up.
    """
    rng = np.random.default_rng([seed, _SESSIONS])
    own, outputs = workloads.SHAREGPT.sample(num_requests, rng)
    jobs: list[Job] = []
    left = history = 0
    for index in range(num_requests):
        begins = left == 0
        if begins:
            left, history = int(rng.integers(1, _MAX_TURNS + 1)), 0
        left -= 1
        shape = RequestShape(history + int(own[index]), int(outputs[index]), index=index)
        think_s = float(rng.exponential(_MEAN_THINK_S))
        jobs.append(Job(shape) if begins else Job(shape, previous=index - 1, think_s=think_s))
        history = shape.num_input_tokens + shape.num_output_tokens
    return jobs


#: Shares of requests in a mix (ours: every kind matters, chat the most).
MIX: Mapping[str, float] = MappingProxyType(
    {
        "chat": 0.30,
        "alpaca": 0.20,
        "sessions": 0.15,
        "shared-prefix": 0.10,
        "beam": 0.10,
        "parallel": 0.10,
        "long": 0.05,
    }
)


def _mix(num_requests: int, seed: int) -> list[Job]:
    """Mix parts by largest remainder, conversations whole, in a random order."""
    exact = {name: share * num_requests for name, share in MIX.items()}
    counts = {name: int(value) for name, value in exact.items()}
    by_rest = sorted(exact, key=lambda name: counts[name] - exact[name])
    for name in by_rest[: num_requests - sum(counts.values())]:
        counts[name] += 1
    groups: list[list[Job]] = []
    for offset, (name, count) in enumerate(counts.items()):
        for job in KINDS[name].make(count, seed + offset) if count else ():
            if job.previous is None:
                groups.append([])
            groups[-1].append(dataclasses.replace(job, part=name))
    mixed: list[Job] = []
    for place in np.random.default_rng([seed, _MIX]).permutation(len(groups)).tolist():
        for turn, job in enumerate(groups[place]):
            index = len(mixed)
            previous = index - 1 if turn else None
            mixed.append(dataclasses.replace(job, previous=previous).reshaped(index=index))
    return mixed


def _vllm_cpu(num_input: int, num_output: int) -> Kind:
    """A test of vLLM's suite for CPUs, whose ShareGPT is ``chat`` here.

    ``.buildkite/performance-benchmarks/tests/serving-tests-cpu-text.json`` of vllm-project/vllm
    (2026): random prompts of one length, an infinite rate, greedy, end tokens ignored.
    """

    def draw(num_requests: int, seed: int) -> list[RequestShape]:
        return [RequestShape(num_input, num_output, index=i) for i in range(num_requests)]

    lengths = "" if num_input == num_output == 128 else f"-{num_input}-{num_output}"
    return Kind(
        f"vllm-cpu{lengths}",
        f"vLLM's suite for CPUs: random, {num_input:,} in, {num_output:,} out, 12 to 200 at once",
        num_input + num_output,
        _of(draw),
        (12, 16, 24, 32, 64, 128, 200),
        num_requests=200,
    )


_CHAT, _ALPACA = _of(workloads.sharegpt), _of(workloads.alpaca)
_CONVERSATION, _CODE = workloads.azure_conversation, workloads.azure_code
_BEAM, _PARALLEL = (_of(workloads.alpaca, Decoding(k, _WIDTH)) for k in ("beam", "parallel"))
_ONE_SHOT, _FIVE_SHOT = (_of(partial(_translation, num_prefix)) for num_prefix in _EXAMPLES)
_ALL = (
    Kind("chat", "ShareGPT's lengths: short in, long out", 2048, _CHAT),
    Kind("alpaca", "Alpaca's lengths: short in, short out", 512, _ALPACA),
    Kind("azure-conversation", "Azure's conversation trace of 2023", 8192,
         _of(_CONVERSATION), burstiness=_CONVERSATION.burstiness),
    Kind("azure-code", "Azure's code trace of 2023: long in, very short out, in bursts", 8192,
         _of(_CODE), burstiness=_CODE.burstiness),
    Kind("long", "single streams with arXiv summarization's lengths", 8192, _of(_long), (1,)),
    Kind("long-context", "single streams of 32k to 128k tokens, prompt : answer 500, 100 and 50",
         131_072 + 2_622, _of(_long_context), (1,)),
    Kind("shared-prefix", "groups of 16 with a common prefix of 2,048 tokens, 128 of their own",
         2432, _of(_shared_prefix)),
    Kind("wmt-one-shot", "translations after one example, common to all", 256, _ONE_SHOT),
    Kind("wmt-five-shot", "translations after five examples, common to all", 512, _FIVE_SHOT),
    Kind("beam", f"Alpaca's lengths, beam search of width {_WIDTH}", 512, _BEAM),
    Kind("parallel", f"Alpaca's lengths, {_WIDTH} samples of each prompt", 512, _PARALLEL),
    Kind("sessions", "conversations with growing history, ShareGPT's turns", 8192, sessions),
    *(_vllm_cpu(*lengths) for lengths in ((128, 128), (128, 2048), (2048, 128), (2048, 2048))),
    Kind("hot-cold", "16 short prefixes that come again, and prompts that come once", 1024 + 256,
         _of(workloads.hot_cold), (96,), num_requests=2500),
    Kind("mix", "some of the others together: " + ", ".join(MIX), 8192, _mix),
)  # fmt: skip

#: Kinds by the name that commands use.
KINDS: Mapping[str, Kind] = MappingProxyType({kind.name: kind for kind in _ALL})


def get_kind(name: str) -> Kind:
    """The kind of that name; a ConfigurationError lists the names there are."""
    if name not in KINDS:
        known = ", ".join([*KINDS, *TEXTS])
        raise ConfigurationError(f"--workload: no workload is named {name!r}: choose from {known}")
    return KINDS[name]


def text_jobs(
    name: str,
    num_requests: int,
    seed: int,
    num_output_tokens: int,
    encode_chat: Callable[[str], list[int]],
) -> list[Job]:
    """Conversations of a kind of text, drawn; again from the first when all were there.

    An answer ends where the model ends it: after that end a model repeats itself.
    """
    messages = conversations(name)
    order = np.random.default_rng([seed, _TEXTS]).permutation(len(messages)).tolist()
    jobs = []
    for index in range(num_requests):
        place = order[index % len(order)]
        token_ids = tuple(encode_chat(messages[place]))
        shape = RequestShape(len(token_ids), num_output_tokens, index=index)
        source = f"{name}, conversation {place}"
        jobs.append(Job(shape, token_ids=token_ids, source=source, may_end=True))
    return jobs
