"""The workloads: token ids, lengths and arrivals, the same for every engine."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from model_shape import SPECIAL_IDS

from vmserve.bench.workloads import RequestShape, lognormal, prompt_token_ids

Json = dict[str, Any]

WORKLOADS = ("offline", "decode", "prefill", "served")
#: Requests per second on average, by model: about half of what two cores without bfloat16
#: arithmetic sustain, so that queues form and empty again.
RATES = {"8m": 4.0, "125m": 0.4, "1b": 0.05}


@dataclass(frozen=True, slots=True)
class Sizes:
    """How much of each workload. Lengths in tokens."""

    num_requests: int = 64
    mean_in: float = 160.0
    mean_out: float = 120.0
    num_decodes: int = 2
    decode_context: int = 512
    decode_tokens: int = 128
    num_prefills: int = 2
    prefill_tokens: int = 2048
    num_served: int = 32


FULL = Sizes()
SMOKE = Sizes(
    num_requests=6,
    mean_in=12.0,
    mean_out=8.0,
    num_decodes=1,
    decode_context=32,
    decode_tokens=8,
    num_prefills=1,
    prefill_tokens=64,
    num_served=4,
)


def make_workloads(
    names: list[str], sizes: Sizes, vocab_size: int, seed: int, rate: float
) -> dict[str, list[Json]]:
    """Requests by workload.

    ``arrival_s`` 0 is "at once". Requests of ``decode`` and ``prefill`` run one at a time
    (``is_sequential``); no two requests share a prompt, so that no prefix cache helps anyone.
    """
    offline = lognormal(sizes.num_requests, seed, mean_in=sizes.mean_in, mean_out=sizes.mean_out)
    served = lognormal(
        sizes.num_served,
        seed + 1,
        mean_in=sizes.mean_in,
        mean_out=sizes.mean_out,
        request_rate=rate,
    )
    decode = [RequestShape(sizes.decode_context, sizes.decode_tokens + 1)] * sizes.num_decodes
    prefill = [RequestShape(sizes.prefill_tokens, 1)] * sizes.num_prefills
    shapes = {"offline": offline, "decode": decode, "prefill": prefill, "served": served}
    found = {
        name: requests_of(shapes[name], vocab_size, 1000 * seed + place)
        for place, name in enumerate(WORKLOADS)
        if name in names
    }
    for name in {"decode", "prefill"} & set(found):
        for request in found[name]:
            request["is_sequential"] = True
    return found


def warmup_requests(vocab_size: int, seed: int) -> list[Json]:
    """The first request's first token ends the start; the other two warm up a batch."""
    shapes = [RequestShape(16, 4), RequestShape(24, 4), RequestShape(40, 4)]
    return requests_of(shapes, vocab_size, 1000 * seed + 999)


def requests_of(shapes: list[RequestShape], vocab_size: int, seed: int) -> list[Json]:
    found = []
    for index, shape in enumerate(shapes):
        drawn = RequestShape(shape.num_input_tokens, shape.num_output_tokens, index=index)
        found.append(
            {
                "prompt_token_ids": prompt_token_ids(drawn, vocab_size, seed, reserved=SPECIAL_IDS),
                "num_output_tokens": shape.num_output_tokens,
                "arrival_s": shape.arrival_s,
            }
        )
    return found


def longest(requests: list[Json]) -> int:
    """Tokens of the longest request, prompt and answer."""
    return max(len(each["prompt_token_ids"]) + each["num_output_tokens"] for each in requests)


def describe(workloads: dict[str, list[Json]]) -> Json:
    return {
        name: {
            "num_requests": len(requests),
            "num_input_tokens": sum(len(each["prompt_token_ids"]) for each in requests),
            "num_output_tokens": sum(each["num_output_tokens"] for each in requests),
            "longest_tokens": longest(requests),
            "last_arrival_s": max(each["arrival_s"] for each in requests),
        }
        for name, requests in workloads.items()
    }
