"""A request and its sequences, as scheduler, runner and engine see them."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple, Protocol

from vmserve.memory.base import Attach, Fork, Regime, SwapIn
from vmserve.sampling.tokens import Kept

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable

    from vmserve.sampling.params import SamplingParams
    from vmserve.sampling.tokens import BeamCandidates, BeamOutput, SamplingRow
    from vmserve.structured.guide import Guide
    from vmserve.types import RequestMetrics

__all__ = [
    "Changes",
    "Gang",
    "Request",
    "Sequence",
    "SequenceStatus",
    "num_places",
    "with_its_gang",
]


#: Rank before every priority.
_FIRST_RANK = -(1 << 63)


class SequenceStatus(enum.Enum):
    #: In no queue: the sequence starts as a fork of the sibling that computes the prompt.
    FOLLOWING = "following"
    WAITING = "waiting"
    RUNNING = "running"
    #: Preempted; keys and values are in host memory.
    SWAPPED = "swapped"
    FINISHED = "finished"


class Changes(NamedTuple):
    """What a step of a search changed: beams that ended, and parent and child of each new one."""

    finished: list[Sequence]
    forks: list[tuple[Sequence, Sequence]]


class Gang(Protocol):
    """The beam search of a request (:class:`vmserve.decoding.group.BeamGroup`)."""

    @property
    def done(self) -> bool: ...

    @property
    def num_candidates(self) -> int: ...

    def take(self, sequence: Sequence, candidates: BeamCandidates) -> None: ...

    def advance(self) -> Changes | None: ...

    def best(self) -> list[BeamOutput]: ...

    def running(self) -> list[list[int]]: ...


@dataclass(eq=False, slots=True)
class Request:
    """A request of a user. Its ``params.n`` (or ``best_of``) sequences share the prompt.

    The first sequence computes the prompt, and all draw their first token from its logits. Then the
    others continue as forks of it.
    """

    request_id: str
    prompt_token_ids: list[int]
    params: SamplingParams
    #: Most tokens for each sequence: the user's limit, capped by the context.
    max_tokens: int
    #: Resolved seed: choice ``j`` draws from the stream (seed, j).
    seed: int
    arrival: int
    metrics: RequestMetrics
    priority: int = 0
    #: Rank: lower ones are served first. It is the priority if the policy uses it, else 0.
    rank: int = 0
    #: ``time.monotonic()`` at which the request fails unless it has ended; None: never.
    deadline: float | None = None
    #: Account that the request is charged to, with fair sharing.
    tenant: str = ""
    #: Tenant of the memory core: pages are scrubbed when they pass to another one.
    memory_tenant: int = 0
    #: Salt of cached prefixes: only requests with the same one share them.
    cache_salt: bytes = b""
    stream: bool = False
    #: EOS and stop ids, which ``min_tokens`` suppresses.
    stop_ids: frozenset[int] = frozenset()
    #: Results of samplers that have read its lists.
    kept: Kept = field(default_factory=Kept)
    sequences: list[Sequence] = field(default_factory=list)
    #: Regime that its sequences are kept in, or will be; None: not decided yet.
    regime: Regime | None = None

    #: Most sequences that run at once: choices, or beams.
    num_branches: int = 1
    #: Beam search, if it is one; its sequences are the running beams.
    beams: Gang | None = None
    #: Whether its grammar is being compiled, and the scheduler does not know it yet.
    is_compiling: bool = False

    @property
    def is_gang(self) -> bool:
        """Whether its sequences wait for each other, and so are preempted together."""
        return self.beams is not None

    @property
    def first_tokens_due(self) -> list[Sequence]:
        """Followers that draw their first token as soon as the prompt is computed."""
        return [
            seq
            for seq in self.sequences
            if seq.status is SequenceStatus.FOLLOWING and len(seq.tokens) == seq.num_prompt
        ]

    @property
    def has_followers(self) -> bool:
        """Whether a sequence has yet to start, perhaps as a fork of another."""
        return any(seq.has_yet_to_start for seq in self.sequences)

    @property
    def finished(self) -> bool:
        return all(seq.status is SequenceStatus.FINISHED for seq in self.sequences)


@dataclass(eq=False, slots=True)
class Sequence:
    """One token list with its KV cache.

    There is no prefill phase and no decode phase. A sequence has ``len(tokens)`` known tokens and
    ``num_computed`` of them in the KV cache, and each step lets it catch up. When it has caught up,
    a token is sampled and appended.
    """

    request: Request
    index: int
    tokens: list[int]
    num_prompt: int
    num_computed: int = 0
    #: Id in the KV memory, None without memory; and the view that it is kept in.
    memory_id: int | None = None
    regime: Regime = Regime.VIRTUAL
    #: How the sequence starts or comes back in memory; part of each plan until one is applied.
    start: Attach | Fork | SwapIn | None = None
    #: Whether it was preempted: it comes back only if there is room for more than its next token.
    was_preempted: bool = False
    #: Whether it has waited so long that it goes before all ranks.
    is_raised: bool = False
    #: Whether it began with blocks written by others: cached ones or a sibling's.
    borrowed: bool = False
    #: Whether it did not fit even alone with borrowed blocks: it does without them.
    starts_over: bool = False
    #: Steps in which it waited for blocks of its prefix that were being read from a store.
    num_restoring_steps: int = 0
    #: Tokens published to the prefix cache of the KV memory so far.
    num_published: int = 0
    status: SequenceStatus = SequenceStatus.WAITING
    #: Prompt positions whose log-probabilities or hidden states are taken. A preempted sequence
    #: computes its prompt again, but must not report it twice.
    num_prompt_scored: int = 0
    #: State of the grammar that the answer must match, if there is one.
    guide: Guide | None = None
    #: The sampler's view of it, made for its first token.
    sampling: SamplingRow | None = None

    @property
    def rank(self) -> int:
        """Lower ranks are served first."""
        return _FIRST_RANK if self.is_raised else self.request.rank

    @property
    def order(self) -> tuple[int, int, int]:
        """The key by which sequences are served."""
        return (self.rank, self.request.arrival, self.index)

    @property
    def has_prompt(self) -> bool:
        """Whether the prompt's keys and values are in memory, so that siblings can fork."""
        return (
            self.memory_id is not None
            and self.start is None
            and self.status is not SequenceStatus.SWAPPED
            and self.num_computed >= self.num_prompt
        )

    @property
    def computes_prompt(self) -> bool:
        """Whether it computes its request's prompt, will, or has."""
        return self.status in (
            SequenceStatus.RUNNING,
            SequenceStatus.WAITING,
            SequenceStatus.SWAPPED,
        )

    @property
    def has_yet_to_start(self) -> bool:
        if self.status in (SequenceStatus.FOLLOWING, SequenceStatus.WAITING):
            return True
        return self.status is SequenceStatus.RUNNING and isinstance(self.start, Fork)

    def is_fork_of(self, sources: Collection[int | None]) -> bool:
        """Whether the next plan starts it as a fork of one of ``sources``, ids in memory."""
        return isinstance(self.start, Fork) and self.start.parent in sources

    @property
    def num_unscored(self) -> int:
        """Prompt tokens whose log-probabilities are wanted and not known yet."""
        if self.index != 0 or self.request.params.prompt_logprobs is None:
            return 0
        return max(0, self.num_prompt - 1 - self.num_prompt_scored)

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


def with_its_gang(sequence: Sequence, among: Iterable[Sequence]) -> list[Sequence]:
    """The sequence; of a beam search, all its beams that are in ``among``."""
    request = sequence.request
    if not request.is_gang:
        return [sequence]
    return [other for other in among if other.request is request]


def num_places(sequences: Iterable[Sequence]) -> int:
    """How many sequences these are or may become: beams fork at any step."""
    gangs: set[Request] = set()
    others = 0
    for sequence in sequences:
        if sequence.request.is_gang:
            gangs.add(sequence.request)
        else:
            others += 1
    return others + sum(gang.num_branches for gang in gangs)
