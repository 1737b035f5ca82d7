"""Jobs: requests with a decoding method, scaled to a model's context, and their prompts."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from vmserve.errors import ConfigurationError
from vmserve.sampling import BeamSearchParams, GenerationParams, SamplingParams
from vmserve_bench.workloads.shapes import (
    RequestShape,
    allowed_ids,
    arrival_times,
    prompt_token_ids,
)

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

__all__ = [
    "GREEDY",
    "Decoding",
    "Job",
    "Prompts",
    "fit",
    "generation_params",
    "ideal_hit_rate",
    "sampling_seed",
    "with_arrivals",
]

#: Keys of random streams besides those of :mod:`vmserve_bench.workloads.shapes`.
_HASHED = 6


@dataclass(frozen=True, slots=True)
class Decoding:
    """``width``: sequences of a request, for parallel samples and beams."""

    kind: Literal["greedy", "parallel", "beam"] = "greedy"
    width: int = 1

    def __str__(self) -> str:
        told = {"greedy": "greedy", "parallel": f"n = {self.width}", "beam": f"beam {self.width}"}
        return told[self.kind]


GREEDY = Decoding()


@dataclass(frozen=True, slots=True)
class Job:
    """One request. ``shape.index`` is its place in the list of jobs.

    ``previous``: an earlier job's index; this is the next turn of its conversation, comes
    ``think_s`` after its end, and its prompt begins with that one's prompt and answer
    (``shape.num_input_tokens`` counts all of it). ``token_ids``: the prompt itself.
    ``hash_ids``: names of the prompt's blocks of ``block_tokens``; equal names, equal tokens.
    ``source``: where it comes from, for errors. ``may_end``: the answer ends where the model ends
    it, at ``shape.num_output_tokens`` at the latest. ``part``: of a mix.
    """

    shape: RequestShape
    decoding: Decoding = GREEDY
    previous: int | None = None
    think_s: float = 0.0
    token_ids: tuple[int, ...] | None = None
    hash_ids: tuple[int, ...] = ()
    block_tokens: int = 0
    source: str = ""
    may_end: bool = False
    part: str = ""

    def reshaped(self, **changes: Any) -> Job:
        """The job with these fields of its shape changed."""
        return dataclasses.replace(self, shape=dataclasses.replace(self.shape, **changes))


def sampling_seed(job: Job, seed: int) -> int:
    return seed * 1_000_003 + job.shape.index


def generation_params(job: Job, seed: int) -> GenerationParams:
    """Sampling parameters for the job's number of tokens, equal in every run.

    Tokens are not turned into text: that costs the same whatever the memory looks like.
    """
    num_tokens = job.shape.num_output_tokens
    if job.decoding.kind == "beam":
        return BeamSearchParams(
            beam_width=job.decoding.width, max_tokens=num_tokens, ignore_eos=True, detokenize=False
        )
    return SamplingParams(
        n=job.decoding.width,
        temperature=0.0 if job.decoding.kind == "greedy" else 1.0,
        seed=sampling_seed(job, seed),
        max_tokens=num_tokens,
        ignore_eos=not job.may_end,
        detokenize=False,
    )


def fit(jobs: Sequence[Job], scale: float, max_len: int) -> list[Job]:
    """Multiply every length by ``scale``, then cut to the context.

    As in a chat: the input is cut to leave room for one token of output, the output to what is
    then left; a turn for which the context has no room ends its conversation. Given prompts keep
    their tokens. Raises ConfigurationError for one that is longer than the context.
    """

    def scaled(count: int) -> int:
        return max(1, round(count * scale)) if count else 0

    fitted: list[Job] = []
    #: By a job's index, that of the fitted one.
    places: dict[int | None, int] = {None: -1}
    for job in jobs:
        shape, num_prefix = job.shape, 0
        if job.previous not in places:
            continue
        if job.token_ids is not None:
            num_input = shape.num_input_tokens
            if num_input >= max_len:
                raise ConfigurationError(
                    f"{job.source}: the prompt has {num_input} tokens, and {max_len} fit with at "
                    "least one token of answer: shorten it, or raise --max-len"
                )
        elif job.previous is None:
            # A prefix gives way before what is each request's own: that is what is asked.
            num_own = min(scaled(shape.num_input_tokens - shape.num_prefix_tokens), max_len - 1)
            num_prefix = min(scaled(shape.num_prefix_tokens), max_len - 1 - num_own)
            num_input = num_prefix + num_own
        else:
            before, history = jobs[job.previous].shape, fitted[places[job.previous]].shape
            num_own = shape.num_input_tokens - before.num_input_tokens - before.num_output_tokens
            num_input = history.num_input_tokens + history.num_output_tokens + scaled(num_own)
            if num_input >= max_len:
                continue
        places[shape.index] = len(fitted)
        moved = dataclasses.replace(
            job,
            previous=None if job.previous is None else places[job.previous],
            block_tokens=scaled(job.block_tokens),
        )
        fitted.append(
            moved.reshaped(
                index=len(fitted),
                num_input_tokens=num_input,
                num_output_tokens=min(scaled(shape.num_output_tokens), max_len - num_input),
                num_prefix_tokens=num_prefix,
            )
        )
    return fitted


def with_arrivals(
    jobs: Sequence[Job], rate: float | None, burstiness: float, seed: int
) -> list[Job]:
    """Jobs arriving at ``rate`` per second on average; None: all at 0.

    Later turns follow their conversation, so conversations begin at a rate that makes ``rate``
    requests per second of all their turns.
    """
    num_roots = sum(job.previous is None for job in jobs)
    start_rate = None if rate is None else rate * num_roots / len(jobs)
    times = iter(arrival_times(num_roots, start_rate, burstiness, seed=seed).tolist())
    return [job.reshaped(arrival_s=next(times) if job.previous is None else 0.0) for job in jobs]


def ideal_hit_rate(jobs: Sequence[Job]) -> float | None:
    """Share of prompt tokens, 0 to 1, that a prefix cache without a limit finds.

    Each prompt is taken to be in the cache before the next one comes. Blocks are those of
    ``hash_ids``; None without any.
    """
    #: Numbers of chains of blocks, by the number of the chain before and the last block.
    chains: dict[tuple[int, int], int] = {}
    found = 0
    for job in jobs:
        chain = num_found = 0
        num_input = job.shape.num_input_tokens
        for name in job.hash_ids[: -(-num_input // (job.block_tokens or 1))]:
            key, before = (chain, name), len(chains)
            chain = chains.setdefault(key, before + 1)
            num_found += len(chains) == before
        found += min(num_found * job.block_tokens, num_input)
    return found / sum(job.shape.num_input_tokens for job in jobs) if chains else None


class Prompts:
    """Token ids of each job's prompt; the same for every variant.

    ``reserved``: special ids, which never occur in drawn tokens.
    """

    def __init__(self, vocab_size: int, seed: int, reserved: Collection[int] = ()) -> None:
        self._vocab_size = vocab_size
        self._seed = seed
        self._reserved = frozenset(reserved)

    def of(self, job: Job, history: Sequence[int] = ()) -> list[int]:
        """``history``: prompt and answer of the turn before."""
        if job.token_ids is not None:
            return list(job.token_ids)
        if job.hash_ids:
            return self._of_blocks(job)
        if job.previous is None:
            return self._drawn(job.shape)
        return [*history, *self.fresh(job.shape.num_input_tokens - len(history), job.shape.index)]

    def fresh(self, count: int, index: int) -> list[int]:
        """As many ids, which belong to no prefix, drawn for the request ``index``."""
        return self._drawn(RequestShape(count, 1, index=index))

    def _drawn(self, shape: RequestShape) -> list[int]:
        return prompt_token_ids(shape, self._vocab_size, self._seed, reserved=self._reserved)

    def _of_blocks(self, job: Job) -> list[int]:
        wanted = job.shape.num_input_tokens
        allowed = allowed_ids(self._vocab_size, self._reserved)
        ids: list[int] = []
        for name in job.hash_ids[: -(-wanted // job.block_tokens)]:
            # The trace's names, not the seed's place in it: equal in every round.
            stream = np.random.default_rng([self._seed, _HASHED, name])
            ids += allowed[stream.integers(0, len(allowed), size=job.block_tokens)].tolist()
        if len(ids) < wanted:  # what no name covers is the request's own
            ids += self.fresh(wanted - len(ids), job.shape.index)
        return ids[:wanted]
