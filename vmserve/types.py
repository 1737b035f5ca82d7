"""Values that cross the boundary between the engine and its users.

All are plain data: nothing here knows about tensors, queues or HTTP.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import msgspec
import numpy as np
from numpy.typing import NDArray

from vmserve.errors import InvalidRequestError

__all__ = [
    "CompletionOutput",
    "FinishReason",
    "Logprob",
    "LogprobsList",
    "PinnedPrefix",
    "RequestMetrics",
    "RequestOutput",
    "RequestTerms",
]

FinishReason = Literal["stop", "length", "abort"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestTerms:
    """How a request is served, apart from what it asks for.

    Cached prefixes are shared between requests of equal ``cache_salt`` only. ``tenant``: whose
    share it counts against, under ``fair_sharing``. ``isolation``: whose memory it uses, which is
    scrubbed before another's request gets it. ``timeout``: seconds from its arrival after which
    it fails with :class:`~vmserve.errors.DeadlineError`, if ``request_timeout`` is not less.
    ``stream``: outputs have what is new; otherwise there is one, at the end.
    """

    priority: int = 0
    cache_salt: str = ""
    tenant: str = ""
    isolation: str = ""
    timeout: float | None = None
    stream: bool = False


# There may be hundreds of thousands: the garbage collector does not visit them, nor mappings of
# them, while everything else waits.
class Logprob(msgspec.Struct, frozen=True, gc=False):
    """Natural log-probability of one token under the model's own distribution.

    ``rank`` is 1 for the likeliest token. ``decoded_token`` is None when the
    request asked for no detokenization.
    """

    logprob: float
    rank: int
    decoded_token: str | None = None


#: One mapping per position; the sampled (or prompt) token is always its first key.
LogprobsList = list[dict[int, Logprob]]


@dataclass(slots=True)
class CompletionOutput:
    """One choice of a request. ``token_ids`` includes a final stop token, ``text`` does not."""

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float
    logprobs: LogprobsList | None = None
    finish_reason: FinishReason | None = None
    #: The stop string or id that ended the text; None for EOS and for length.
    stop_reason: int | str | None = None

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None


@dataclass(slots=True)
class RequestMetrics:
    """Times of one request, in seconds of ``time.monotonic()``; None where not reached."""

    arrival_time: float
    first_scheduled_time: float | None = None
    first_token_time: float | None = None
    last_token_time: float | None = None
    finished_time: float | None = None
    num_preemptions: int = 0
    num_prefill_chunks: int = 0
    #: Prompt tokens found in the prefix cache.
    num_cached_tokens: int = 0
    #: Tokens of drafts that were computed, and those of them that are in the answers.
    num_drafted_tokens: int = 0
    num_accepted_tokens: int = 0
    #: Regime in which the request's KV cache was kept ("virtual" or "paged").
    kv_regime: str = "virtual"
    #: Reason: "forced" (by an option), "converted" (on demand), "default" (no cost speaks for the
    #: other), "slots" (none was free), or the deciding cost: "maps", "forks", "prefix", "kernels",
    #: "memory", "batch".
    kv_regime_reason: str = ""
    #: Predicted seconds that differ between the regimes, by regime, when it was chosen.
    kv_regime_costs: dict[str, float] = field(default_factory=dict)

    def token_at(self, now: float) -> None:
        """A token became known at ``now``."""
        if self.first_token_time is None:
            self.first_token_time = now
        self.last_token_time = now


@dataclass(slots=True)
class RequestOutput:
    """The state of one request: all of it, or (``delta``) what is new since the last one."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    metrics: RequestMetrics
    #: One entry per prompt position; the first is None.
    prompt_logprobs: Sequence[dict[int, Logprob] | None] | None = None
    #: ``[hidden_size]``, for a request with ``pooling``: as the model gives it, not normalised.
    embedding: NDArray[np.float32] | None = None
    delta: bool = field(default=False)


@dataclass(frozen=True, slots=True)
class EmbeddingOutput:
    """``embedding``: ``[dimensions]`` float32."""

    prompt: str | None
    prompt_token_ids: list[int]
    embedding: NDArray[np.float32]
    metrics: RequestMetrics


def shaped_embedding(
    state: NDArray[np.float32], dimensions: int | None, normalize: bool
) -> NDArray[np.float32]:
    """The first ``dimensions`` of a pooled state, of length 1 if ``normalize``.

    Raises :class:`~vmserve.errors.InvalidRequestError` for more than there are.
    """
    if dimensions is not None and not 1 <= dimensions <= state.size:
        raise InvalidRequestError(
            f"dimensions must be from 1 to {state.size}, which this model has; got {dimensions}",
            "dimensions",
        )
    kept = state if dimensions is None else state[:dimensions]
    length = float(np.linalg.norm(kept))
    return kept / np.float32(length) if normalize and length > 0 else kept


@dataclass(frozen=True, slots=True)
class PinnedPrefix:
    """``num_tokens``: how many of its tokens are kept (whole blocks)."""

    handle: int
    num_tokens: int
