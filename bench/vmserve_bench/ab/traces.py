"""The user's requests: JSONL traces and files of prompts."""

from __future__ import annotations

import itertools
import json
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vmserve.errors import ConfigurationError
from vmserve.options import read_text
from vmserve_bench.ab.jobs import Job
from vmserve_bench.workloads.shapes import RequestShape

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

__all__ = ["HASH_BLOCK_TOKENS", "at_rate", "read_prompts", "read_trace"]

#: Tokens of a block, which a hash id stands for in traces published as Mooncake's (FAST 2025).
HASH_BLOCK_TOKENS = 512
_FIELDS = ("timestamp", "input_length", "output_length", "hash_ids")


def read_trace(path: Path, block_tokens: int = HASH_BLOCK_TOKENS) -> list[Job]:
    """Read lines such as {"timestamp": 250, "input_length": 900, "output_length": 40}.

    ``timestamp`` in milliseconds, counted from the first; ``hash_ids`` (optional) names the
    prompt's blocks of ``block_tokens`` in order: equal names, equal tokens. Other fields are
    ignored. Raises ConfigurationError with the line's number.
    """
    rows = [_trace_row(value, where, block_tokens) for value, where in _json_lines(path, "--trace")]
    if not rows:
        raise ConfigurationError(f"{path}: no request in it; write one JSON object per line")
    for before, after in itertools.pairwise(rows):
        if after.shape.arrival_s < before.shape.arrival_s:
            raise ConfigurationError(
                f"{after.source}: timestamp {after.shape.arrival_s * 1000:g} is before the one "
                f"of the line above, {before.shape.arrival_s * 1000:g}: sort the trace"
            )
    first = rows[0].shape.arrival_s
    return [
        job.reshaped(arrival_s=round(job.shape.arrival_s - first, 9), index=index)
        for index, job in enumerate(rows)
    ]


def read_prompts(
    path: Path, encode: Callable[[str], list[int]], num_output_tokens: int
) -> list[Job]:
    """Real prompts: one a line, or, in a file named .jsonl, JSON values as of vmserve generate.

    A JSON line is a string, a list of token ids, or an object with ``prompt`` or
    ``prompt_token_ids`` and perhaps ``max_tokens`` (else ``num_output_tokens``). Raises
    ConfigurationError with the line's number.
    """
    jobs: list[Job] = []
    read_lines = _json_lines if path.suffix == ".jsonl" else _text_lines
    for value, where in read_lines(path, "--prompts"):
        prompt, num_output = value, num_output_tokens
        if isinstance(value, dict):
            prompt = value.get("prompt", value.get("prompt_token_ids"))
            if "max_tokens" in value:
                num_output = _count(value, "max_tokens", where)
        if isinstance(prompt, str):
            prompt = encode(prompt)
        if not _are_counts(prompt):
            raise ConfigurationError(
                f"{where}: a string, a list of token ids, or an object with prompt or "
                "prompt_token_ids"
            )
        if not prompt:
            raise ConfigurationError(f"{where}: the prompt is empty")
        shape = RequestShape(len(prompt), num_output, index=len(jobs))
        jobs.append(Job(shape, token_ids=tuple(prompt), source=where))
    if not jobs:
        raise ConfigurationError(f"{path}: no prompt in it; write one per line")
    return jobs


def at_rate(jobs: list[Job], rate: float) -> list[Job]:
    """The trace's own arrivals, stretched to ``rate`` requests per second on average."""
    span = jobs[-1].shape.arrival_s
    if span == 0:
        raise ConfigurationError(
            "--rate: the trace's requests all arrive at once: leave --rate out, or give timestamps"
        )
    factor = (len(jobs) / rate) / span
    return [job.reshaped(arrival_s=round(job.shape.arrival_s * factor, 9)) for job in jobs]


def _text_lines(path: Path, option: str) -> Iterator[tuple[str, str]]:
    """Lines that are not blank, each with its place in the file."""
    lines = read_text(path, option).splitlines()
    for number, line in enumerate(lines, start=1):
        if line.strip():
            yield line, f"{path}:{number}"


def _json_lines(path: Path, option: str) -> Iterator[tuple[Any, str]]:
    for line, where in _text_lines(path, option):
        try:
            value = json.loads(line)
        except json.JSONDecodeError as error:
            raise ConfigurationError(
                f"{where}: not JSON: {error.msg} at column {error.colno}"
            ) from None
        yield value, where


def _trace_row(value: Any, where: str, block_tokens: int) -> Job:
    if not isinstance(value, dict):
        raise ConfigurationError(f"{where}: an object with {', '.join(_FIELDS)}, not {value!r}")
    timestamp = value.get("timestamp", 0)
    if type(timestamp) not in (int, float) or not 0 <= timestamp < math.inf:
        raise ConfigurationError(f"{where}: timestamp: milliseconds from 0, not {timestamp!r}")
    num_input = _count(value, "input_length", where)
    num_output = _count(value, "output_length", where)
    hash_ids = value.get("hash_ids") or []
    if not _are_counts(hash_ids):
        raise ConfigurationError(f"{where}: hash_ids: a list of whole numbers, not {hash_ids!r}")
    needed = -(-num_input // block_tokens)
    if len(hash_ids) > needed:
        raise ConfigurationError(
            f"{where}: {len(hash_ids)} hash_ids for {num_input} tokens, which are {needed} blocks "
            f"of {block_tokens}: give the right --trace-block-size"
        )
    return Job(
        RequestShape(num_input, num_output, timestamp / 1000.0),
        hash_ids=tuple(hash_ids),
        block_tokens=block_tokens if hash_ids else 0,
        source=where,
    )


def _count(value: dict[str, Any], name: str, where: str) -> int:
    if name not in value:
        raise ConfigurationError(f"{where}: {name} is missing")
    number = value[name]
    if not (_are_counts([number]) and number):
        raise ConfigurationError(f"{where}: {name}: a whole number of at least 1, not {number!r}")
    return int(number)


def _are_counts(values: Any) -> bool:
    return isinstance(values, list) and all(type(each) is int and each >= 0 for each in values)
