"""The workloads: token ids, lengths and arrivals, the same for every engine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from model_shape import SPECIAL_IDS, LlamaShape
from vmserve_bench.workloads.shapes import RequestShape, lognormal, prompt_token_ids

Json = dict[str, Any]

#: Prompts are drawn by place: a new one comes last.
WORKLOADS = ("offline", "decode", "prefill", "served", "streams")
#: Requests per second on average, by model. With the lengths below, two cores without bfloat16
#: arithmetic keep up with every engine: queues form and empty again.
RATES = {"8m": 2.0, "125m": 2.0, "1b": 0.1}


@dataclass(frozen=True, slots=True)
class Sizes:
    """Sizes of the workloads; lengths in tokens."""

    num_requests: int = 64
    mean_in: float = 160.0
    mean_out: float = 120.0
    sigma: float = 0.8
    num_decodes: int = 2
    decode_context: int = 512
    decode_tokens: int = 128
    num_prefills: int = 2
    prefill_tokens: int = 2048
    num_served: int = 48
    served_mean_in: float = 160.0
    served_mean_out: float = 120.0
    num_streams: int = 16
    stream_context: int = 128
    stream_tokens: int = 128


#: By model: a request to the larger ones is short enough that their rate is one they sustain, and
#: the largest one's workloads that a run of an engine takes about a minute.
FULL: Mapping[str, Sizes] = {
    "8m": Sizes(),
    "125m": replace(Sizes(), served_mean_in=64.0, served_mean_out=20.0),
    "1b": Sizes(
        num_requests=6,
        mean_in=48.0,
        mean_out=16.0,
        num_decodes=1,
        decode_context=64,
        decode_tokens=24,
        num_prefills=1,
        prefill_tokens=256,
        num_served=6,
        served_mean_in=32.0,
        served_mean_out=12.0,
        stream_context=32,
        stream_tokens=16,
    ),
}
#: Whose sizes and rate a model of a file has.
DEFAULT_SIZES = "125m"
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
    served_mean_in=12.0,
    served_mean_out=8.0,
    num_streams=4,
    stream_context=16,
    stream_tokens=8,
)


def make_workloads(
    names: list[str], sizes: Sizes, vocab_size: int, seed: int, rate: float, repeat: int = 0
) -> dict[str, list[Json]]:
    """Requests by workload. Only arrivals of ``served`` depend on the repeat.

    ``arrival_s`` 0 is "at once". Requests of ``decode`` and ``prefill`` run one at a time
    (``is_sequential``); no two requests share a prompt, so that no prefix cache helps anyone.
    """
    offline = lognormal(
        sizes.num_requests,
        seed,
        mean_in=sizes.mean_in,
        mean_out=sizes.mean_out,
        sigma_in=sizes.sigma,
        sigma_out=sizes.sigma,
    )
    served = served_shapes(sizes, seed + 1, rate, repeat)
    decode = [RequestShape(sizes.decode_context, sizes.decode_tokens + 1)] * sizes.num_decodes
    prefill = [RequestShape(sizes.prefill_tokens, 1)] * sizes.num_prefills
    streams = [RequestShape(sizes.stream_context, sizes.stream_tokens + 1)] * sizes.num_streams
    shapes = {"offline": offline, "decode": decode, "prefill": prefill, "served": served}
    shapes["streams"] = streams
    found = {
        name: requests_of(shapes[name], vocab_size, 1000 * seed + place)
        for place, name in enumerate(WORKLOADS)
        if name in names
    }
    for name in {"decode", "prefill"} & set(found):
        for request in found[name]:
            request["is_sequential"] = True
    return found


def served_shapes(sizes: Sizes, seed: int, rate: float, repeat: int) -> list[RequestShape]:
    """The same lengths in every repeat, each with arrivals of its own: what one drawn sequence
    of arrivals happens to do would else be taken for a property of the engines.
    """

    def drawn(at: int) -> list[RequestShape]:
        means = {"mean_in": sizes.served_mean_in, "mean_out": sizes.served_mean_out}
        return lognormal(sizes.num_served, at, request_rate=rate, **means)

    arrivals = drawn(seed + 100 * repeat)
    return [
        replace(shape, arrival_s=other.arrival_s)
        for shape, other in zip(drawn(seed), arrivals, strict=True)
    ]


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


def kv_values(shape: LlamaShape) -> int:
    """Numbers that a token has in the KV cache."""
    return 2 * shape.num_layers * shape.num_kv_heads * shape.head_dim


def num_tokens(requests: list[Json]) -> int:
    return sum(len(each["prompt_token_ids"]) + each["num_output_tokens"] for each in requests)


def kv_gib(workloads: dict[str, list[Json]], shape: LlamaShape) -> int:
    """Whole GiB of float32 KV cache that hold all tokens of the largest workload at once."""
    most = max(num_tokens(requests) for requests in workloads.values())
    return -(-most * kv_values(shape) * 4 // 2**30)


def kv_bytes(requests: list[Json], shape: LlamaShape) -> int:
    """A 16 bit KV cache of what is there at once, of requests that all arrive at the start."""
    is_sequential = requests[0].get("is_sequential")
    most = longest(requests) if is_sequential else num_tokens(requests)
    return 2 * most * kv_values(shape)


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
