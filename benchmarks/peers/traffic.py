"""The workloads: token ids, lengths and arrivals, the same for every engine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from models import SPECIAL_IDS

from vmserve_bench.workloads.shapes import RequestShape, lognormal, prompt_token_ids

Json = dict[str, Any]

#: Prompts are drawn by place: a new one comes last.
WORKLOADS = ("offline", "decode", "prefill", "served", "streams")


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


#: Of ``125m`` and of a file's model: two cores without bfloat16 arithmetic sustain the rate.
MIDDLE = Sizes(served_mean_in=64.0, served_mean_out=20.0)
#: By model, where others; a run of an engine with the largest one takes about a minute.
FULL = {
    "8m": Sizes(),
    "1b": Sizes(
        num_requests=6, mean_in=48.0, mean_out=16.0,
        num_decodes=1, decode_context=64, decode_tokens=24,
        num_prefills=1, prefill_tokens=256,
        num_served=6, served_mean_in=32.0, served_mean_out=12.0,
        stream_context=32, stream_tokens=16,
    ),
}  # fmt: skip
SMOKE = Sizes(
    num_requests=6, mean_in=12.0, mean_out=8.0,
    num_decodes=1, decode_context=32, decode_tokens=8,
    num_prefills=1, prefill_tokens=64,
    num_served=4, served_mean_in=12.0, served_mean_out=8.0,
    num_streams=4, stream_context=16, stream_tokens=8,
)  # fmt: skip


def make_workloads(
    names: list[str], sizes: Sizes, vocab_size: int, seed: int, rate: float, repeat: int = 0
) -> dict[str, list[Json]]:
    """Requests by workload. Only arrivals of ``served`` depend on the repeat: what one drawn
    sequence of arrivals happens to do would else be taken for a property of the engines.

    ``arrival_s`` 0 is "at once". Requests of ``decode`` and ``prefill`` run one at a time
    (``is_sequential``); no two requests share a prompt, so that no prefix cache helps anyone.
    """
    s = sizes
    sigmas = {"sigma_in": s.sigma, "sigma_out": s.sigma}
    served = {"mean_in": s.served_mean_in, "mean_out": s.served_mean_out, "request_rate": rate}
    asked = lognormal(s.num_served, seed + 1, **served)
    drawn = lognormal(s.num_served, seed + 1 + 100 * repeat, **served)
    shapes = {
        "offline": lognormal(
            s.num_requests, seed, mean_in=s.mean_in, mean_out=s.mean_out, **sigmas
        ),
        "decode": [RequestShape(s.decode_context, s.decode_tokens + 1)] * s.num_decodes,
        "prefill": [RequestShape(s.prefill_tokens, 1)] * s.num_prefills,
        "served": [
            replace(shape, arrival_s=other.arrival_s)
            for shape, other in zip(asked, drawn, strict=True)
        ],
        "streams": [RequestShape(s.stream_context, s.stream_tokens + 1)] * s.num_streams,
    }
    found = {
        name: requests_of(shapes[name], vocab_size, 1000 * seed + place)
        for place, name in enumerate(WORKLOADS)
        if name in names
    }
    for request in [*found.get("decode", []), *found.get("prefill", [])]:
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
        ids = prompt_token_ids(drawn, vocab_size, seed, reserved=SPECIAL_IDS)
        told = {"num_output_tokens": shape.num_output_tokens, "arrival_s": shape.arrival_s}
        found.append({"prompt_token_ids": ids, **told})
    return found


def lengths(requests: list[Json]) -> list[int]:
    """Tokens of each request, prompt and answer."""
    return [len(each["prompt_token_ids"]) + each["num_output_tokens"] for each in requests]


def longest(requests: list[Json]) -> int:
    return max(lengths(requests))


def kv_values(config: Mapping[str, Any]) -> int:
    """Numbers that a token has in the KV cache of a Llama."""
    kv_size = config["hidden_size"] * config["num_key_value_heads"] // config["num_attention_heads"]
    return 2 * config["num_hidden_layers"] * kv_size


def kv_gib(workloads: dict[str, list[Json]], config: Mapping[str, Any]) -> int:
    """Whole GiB of float32 KV cache that hold all tokens of the largest workload at once."""
    most = max(sum(lengths(requests)) for requests in workloads.values())
    return -(-most * kv_values(config) * 4 // 2**30)


def kv_bytes(requests: list[Json], config: Mapping[str, Any]) -> int:
    """A 16 bit KV cache of what is there at once, of requests that all arrive at the start."""
    at_once = max if requests[0].get("is_sequential") else sum
    return 2 * at_once(lengths(requests)) * kv_values(config)


def describe(requests: list[Json]) -> Json:
    """``static_batch_use``: the share of a static batch's decode rows that yield a requested
    token, by batch size.
    """
    outputs = [each["num_output_tokens"] for each in requests]
    use = {}
    for size in (16, 32):
        batches = [outputs[at : at + size] for at in range(0, len(outputs), size)]
        use[str(size)] = sum(outputs) / sum(len(batch) * max(batch) for batch in batches)
    return {
        "num_requests": len(requests),
        "num_input_tokens": sum(len(each["prompt_token_ids"]) for each in requests),
        "num_output_tokens": sum(outputs),
        "longest_tokens": longest(requests),
        "last_arrival_s": max(each["arrival_s"] for each in requests),
        "static_batch_use": use,
    }
