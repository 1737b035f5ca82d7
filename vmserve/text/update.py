"""What the engine returns of a request: token ids. vmserve.text.assembly makes text of them."""

from __future__ import annotations

import msgspec

from vmserve.sampling.tokens import TopTokens
from vmserve.text.scores import Columns
from vmserve.types import FinishReason, RequestMetrics

__all__ = ["ChoiceUpdate", "RequestUpdate"]


# There are thousands a second, without cycles: the garbage collector does not track them.
class ChoiceUpdate(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """What is new of one choice.

    ``hides_last``: the last token ended the choice and is not part of its text.
    """

    index: int
    token_ids: list[int]
    cumulative_logprob: float
    logprobs: list[TopTokens] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    hides_last: bool = False


class RequestUpdate(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """What is new of one request; all of it at the end if the request is not a stream.

    The prompt's log-probabilities come with the first tokens, the embedding (float32) at the end.
    In messages ``request_id`` is empty, because a handle is sent with the update, and ``metrics``
    are sent with the first tokens and at the end only.
    """

    request_id: str
    outputs: list[ChoiceUpdate]
    finished: bool
    metrics: RequestMetrics | None
    prompt_logprobs: Columns | None = None
    embedding: bytes | None = None
