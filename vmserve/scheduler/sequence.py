"""A request and its sequences, as the scheduler, runner and output processor see them."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vmserve.sampling.params import SamplingParams
    from vmserve.types import RequestMetrics

__all__ = ["Request", "Sequence", "SequenceStatus"]


class SequenceStatus(enum.Enum):
    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(eq=False, slots=True)
class Request:
    """What a user asked for. Its ``params.n`` (or ``best_of``) sequences share the prompt."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    params: SamplingParams
    #: Most tokens each sequence may generate: the user's limit, capped by the context.
    max_tokens: int
    #: Resolved seed: choice ``j`` draws from the stream (seed, j).
    seed: int
    arrival: int
    metrics: RequestMetrics
    priority: int = 0
    #: Requests share cached prefixes only with those of the same salt.
    cache_salt: bytes = b""
    stream: bool = False
    #: EOS and stop ids, which ``min_tokens`` suppresses.
    stop_ids: frozenset[int] = frozenset()
    bad_words: tuple[tuple[int, ...], ...] = ()
    sequences: list[Sequence] = field(default_factory=list)

    @property
    def finished(self) -> bool:
        return all(seq.status is SequenceStatus.FINISHED for seq in self.sequences)


@dataclass(eq=False, slots=True)
class Sequence:
    """One token list with its KV cache.

    There is no prefill phase and no decode phase: a sequence has ``len(tokens)`` tokens
    known and ``num_computed`` of them in the KV cache, and each step lets it catch up.
    When it has caught up, a token is sampled and appended.
    """

    request: Request
    index: int
    tokens: list[int]
    num_prompt: int
    num_computed: int = 0
    #: The sequence in the KV memory, while it has any.
    memory_id: int | None = None
    status: SequenceStatus = SequenceStatus.WAITING
    #: Prompt positions whose log-probabilities are already taken; a preempted
    #: sequence computes its prompt again, but must not report it twice.
    num_prompt_scored: int = 0

    @property
    def num_tokens(self) -> int:
        return len(self.tokens)

    @property
    def num_uncomputed(self) -> int:
        return len(self.tokens) - self.num_computed

    @property
    def output_token_ids(self) -> list[int]:
        return self.tokens[self.num_prompt :]

    @property
    def num_output(self) -> int:
        return len(self.tokens) - self.num_prompt
