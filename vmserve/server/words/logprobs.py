"""Log-probabilities in the shapes that the routes reply with.

A position is a mapping of token id to :class:`Logprob` whose first key is the token that
stands there; the first position of a prompt has none. k of None keeps all entries.

What has entries for each position is an iterator, for :func:`vmserve.server.wire.dump_parts`:
there may be hundreds of thousands of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from vmserve.types import Logprob, RequestOutput

__all__ = [
    "LogprobShape",
    "Position",
    "chat_logprobs",
    "completion_logprobs",
    "num_entries",
    "prompt_logprobs",
]

Position = Mapping[int, Logprob]

#: Stand-in for minus infinity, which JSON does not have.
_LEAST: Final = -9999.0


@dataclass(frozen=True, slots=True)
class LogprobShape:
    """``k`` likeliest per position, with tokens written as text or as ``token_id:N``."""

    k: int | None
    as_ids: bool

    def name(self, token_id: int, entry: Logprob) -> str:
        return f"token_id:{token_id}" if self.as_ids else entry.decoded_token or ""

    def likeliest(self, position: Position) -> list[tuple[int, Logprob]]:
        """The first ``k`` entries in order; ties keep the position's order."""
        entries = sorted(position.items(), key=lambda item: item[1].rank)
        return entries if self.k is None else entries[: self.k]


def num_entries(results: Sequence[RequestOutput]) -> int:
    """Approximate number of log-probabilities of all ``results``."""
    lists: list[Sequence[Position | None] | None] = [result.prompt_logprobs for result in results]
    lists += [choice.logprobs for result in results for choice in result.outputs]
    return sum(len(positions) * len(positions[-1] or ()) for positions in lists if positions)


def completion_logprobs(
    positions: Sequence[Position | str], shape: LogprobShape, offset: int = 0
) -> tuple[dict[str, Any], int]:
    """``{tokens, token_logprobs, top_logprobs, text_offset}`` and the offset after them.

    A prompt's first token, which has no probability, is given as its string. ``offset`` is
    the length of the token strings before these.
    """
    tokens: list[str] = []
    values: list[float | None] = []
    offsets: list[int] = []
    for position in positions:
        offsets.append(offset)
        if isinstance(position, str):
            tokens.append(position)
            values.append(None)
        else:
            token_id, entry = next(iter(position.items()))
            tokens.append(shape.name(token_id, entry))
            values.append(_finite(entry.logprob))
        offset += len(tokens[-1])
    shaped = {
        "tokens": tokens,
        "token_logprobs": values,
        "top_logprobs": (_top(position, shape) for position in positions),
        "text_offset": offsets,
    }
    return shaped, offset


def _top(position: Position | str, shape: LogprobShape) -> dict[str, float] | None:
    """The token itself leads, whether or not it is among the likeliest."""
    if isinstance(position, str):
        return None
    token_id, entry = next(iter(position.items()))
    top = {shape.name(token_id, entry): _finite(entry.logprob)}
    for other_id, other in shape.likeliest(position):
        top.setdefault(shape.name(other_id, other), _finite(other.logprob))
    return top


def chat_logprobs(
    positions: Sequence[Position], shape: LogprobShape, *, ends_unseen: bool = False
) -> dict[str, Any]:
    """``{content: [{token, logprob, bytes, top_logprobs}], refusal: null}``.

    ``ends_unseen``: the last token is not in the text, so its own string is empty here and
    the strings join to the content.
    """
    last = len(positions) - 1 if ends_unseen else -1
    content = (
        _chat_position(position, shape, is_unseen=place == last)
        for place, position in enumerate(positions)
    )
    return {"content": content, "refusal": None}


def _chat_position(position: Position, shape: LogprobShape, *, is_unseen: bool) -> dict[str, Any]:
    token_id, entry = next(iter(position.items()))
    item = _chat_entry(shape, token_id, entry)
    if is_unseen:
        item["bytes"] = []
        if not shape.as_ids:
            item["token"] = ""
    return {**item, "top_logprobs": [_chat_entry(shape, *i) for i in shape.likeliest(position)]}


def prompt_logprobs(
    positions: Sequence[Position | None] | None, shape: LogprobShape
) -> Iterator[dict[str, Any] | None] | None:
    """``{id: {logprob, rank, decoded_token}}`` per position: the token, then the likeliest."""
    return None if positions is None else (_scored(position, shape) for position in positions)


def _scored(position: Position | None, shape: LogprobShape) -> dict[str, Any] | None:
    if position is None:
        return None
    kept = dict([next(iter(position.items())), *shape.likeliest(position)])
    return {
        str(token_id): {
            "logprob": _finite(entry.logprob),
            "rank": entry.rank,
            "decoded_token": shape.name(token_id, entry),
        }
        for token_id, entry in kept.items()
    }


def _chat_entry(shape: LogprobShape, token_id: int, entry: Logprob) -> dict[str, Any]:
    return {
        "token": shape.name(token_id, entry),
        "logprob": _finite(entry.logprob),
        "bytes": list((entry.decoded_token or "").encode()),
    }


def _finite(logprob: float) -> float:
    # NaN compares false, and so becomes the least value too.
    return logprob if logprob > _LEAST else _LEAST
