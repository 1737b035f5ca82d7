"""Messages between a client and its engine, the same for every transport.

In one process they are passed as objects. :mod:`vmserve.client.codec` encodes them for another
process. A client identifies its requests, questions and pinned prefixes by numbers (*handles*) that
it never uses twice. Client and engine are of one installation, so there are no versions.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import msgspec

from vmserve.engine.limits import RequestLimits
from vmserve.pool.shares import Holding
from vmserve.text.update import RequestUpdate
from vmserve.types import RequestTerms

__all__ = [
    "LINK_SERIAL",
    "Abort",
    "Add",
    "Ask",
    "Ended",
    "FromEngine",
    "Happened",
    "Launch",
    "Lend",
    "Lost",
    "MemoryReport",
    "ModelFacts",
    "Noted",
    "Ping",
    "Pong",
    "Progress",
    "Ready",
    "Refused",
    "Reply",
    "Revived",
    "Shutdown",
    "StartOver",
    "StepUpdate",
    "ToEngine",
    "Unpin",
]


#: Serial of a :class:`Pong` that shows that the network works.
LINK_SERIAL = -1


class _Message(msgspec.Struct, frozen=True, array_like=True, tag=True):
    pass


# -- to the engine ----------------------------------------------------------------------------


class Launch(_Message, frozen=True):
    """Start an engine process: ``options`` of :class:`vmserve.EngineConfig`, and how to log.

    ``cpus``: those that it may use; empty: all.
    """

    options: dict[str, Any]
    parent_pid: int
    log_level: int
    log_format: str
    cpus: list[int]


class Add(_Message, frozen=True):
    """Queue a request that the client has checked.

    ``params``: :class:`SamplingParams` or :class:`BeamSearchParams`. ``terms.stream``: send each
    step's tokens, instead of all at the end. ``is_stream``: the client's caller asked for a stream,
    so that :attr:`StepUpdate.accepted` has to name the request when nothing can refuse it any more.
    """

    handle: int
    request_id: str
    prompt_token_ids: list[int]
    params: Any
    terms: RequestTerms
    is_stream: bool


class Abort(_Message, frozen=True):
    """End a request. ``tell``: send a last update; False: the client has forgotten it."""

    handle: int
    tell: bool


class Ask(_Message, frozen=True):
    """Ask one of :data:`vmserve.client.questions.QUESTIONS`, to be answered between two steps."""

    serial: int
    question: str
    arguments: dict[str, Any]


class Lend(_Message, frozen=True):
    """Let the KV cache have ``limit_bytes`` of a shared pool; :class:`MemoryReport` answers.

    If it uses more, it keeps what it uses; with ``reclaim`` it preempts requests down to the limit.
    """

    limit_bytes: int
    reclaim: bool


class Unpin(_Message, frozen=True):
    """Let a pinned prefix be evicted again. Ignored if the engine does not hold it."""

    pin: int


class Ping(_Message, frozen=True):
    """Ask for a :class:`Pong` between two steps: proof that steps end."""

    serial: int


class Shutdown(_Message, frozen=True):
    """Abort what runs, send the last updates, and end."""


# -- from the engine --------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """What a server shows of the model."""

    architecture: str
    vocab_size: int
    num_layers: int
    kv_heads: int
    head_dim: int
    max_position_embeddings: int
    eos_token_ids: tuple[int, ...]
    bos_token_id: int | None


class Progress(_Message, frozen=True):
    """Report how far a phase of loading is."""

    phase: str
    done: int
    total: int


class Ready(_Message, frozen=True):
    """The engine takes requests. ``resolved``: fields of :class:`vmserve.config.ResolvedConfig`.

    ``tokenizer``: where its files are. An engine on another machine has their digest there, and the
    model's name. ``weights``: a digest of their files. ``identity``: of that, and of the settings
    that can change an answer's bits.
    """

    resolved: dict[str, Any]
    limits: RequestLimits
    model: ModelFacts
    default_sampling: dict[str, Any]
    tokenizer: str
    stats: dict[str, float | int]
    name: str = ""
    weights: str = ""
    identity: str = ""


class Refused(_Message, frozen=True):
    """The engine cannot start."""

    error: Exception


class StepUpdate(_Message, frozen=True):
    """What is new of all requests after a step, by handle: one message for any number of them."""

    num_running: int
    num_waiting: int
    accepted: list[int]
    updates: list[tuple[int, RequestUpdate]]
    failures: list[tuple[int, Exception]]


class Reply(_Message, frozen=True):
    """Answer an :class:`Ask` with a value or an error."""

    serial: int
    value: Any
    error: Exception | None = None


class MemoryReport(_Message, frozen=True):
    """What the engine has of a shared pool and would like, in answer to :class:`Lend` or by itself.

    Only engines that were lent something send it.
    """

    holding: Holding
    is_answer: bool


class Pong(_Message, frozen=True):
    """Reply a :class:`Ping`. :data:`LINK_SERIAL`: the engine's machine does, also during a step."""

    serial: int


# -- what happens on the way ---------------------------------------------------------------------


class Lost(_Message, frozen=True):
    """The engine has ended. What was sent before has no more answers."""


class Ended(_Message, frozen=True):
    """The engine that was lost is not started again."""


class Revived(_Message, frozen=True):
    """An engine was started in place of the last one. It has none of the last one's memory."""


class Noted(_Message, frozen=True):
    """The engine's facts have changed: it is suspected, or no longer."""


class StartOver(_Message, frozen=True):
    """Forget what came of a request of which nothing was given out: it begins again elsewhere."""

    handle: int


ToEngine = Launch | Add | Abort | Ask | Lend | Unpin | Ping | Shutdown
FromEngine = Progress | Ready | Refused | StepUpdate | Reply | MemoryReport | Pong
#: What transports say by themselves. It is never encoded.
Happened = Lost | Ended | Revived | Noted | StartOver
