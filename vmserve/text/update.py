"""What the engine tells of a request: token ids, which become text in vmserve.text.assembly."""

from __future__ import annotations

import msgspec

from vmserve.sampling.tokens import TopTokens
from vmserve.text.scores import Columns
from vmserve.types import FinishReason, RequestMetrics

__all__ = ["ChoiceUpdate", "RequestUpdate"]


# Thousands a second of these, without cycles: the collector need not know of them.
class ChoiceUpdate(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """What is new of one choice.

    ``hides_last``: the last token ended the choice and is no part of its text.
    """

    index: int
    token_ids: list[int]
    cumulative_logprob: float
    logprobs: list[TopTokens] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    hides_last: bool = False


class RequestUpdate(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """What is new of one request, or all of it at its end where it is no stream.

    The prompt's log-probabilities come with the first tokens, the embedding (float32) at the end.
    Between processes ``request_id`` is empty, a handle standing beside the update, and ``metrics``
    come with the first tokens and at the end alone.
    """

    request_id: str
    outputs: list[ChoiceUpdate]
    finished: bool
    metrics: RequestMetrics | None
    prompt_logprobs: Columns | None = None
    embedding: bytes | None = None
