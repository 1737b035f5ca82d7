"""Convert the tokens of a streamed choice to deltas of its message."""

from __future__ import annotations

from typing import Any

from vmserve.server.routes.generation import ChoiceBuffer, Piece
from vmserve.server.wire import TextTemplate
from vmserve.server.words.tools import AnswerReader, call_text
from vmserve.types import CompletionOutput

__all__ = ["Said", "StreamedChoice", "begun_with", "with_echo"]

#: Deltas of a message, and the tokens that they come from.
Said = list[tuple[dict[str, Any], Piece]]


class StreamedChoice:
    """The state of one choice in a stream."""

    __slots__ = ("_buffer", "_held", "_reader", "num_pieces", "num_reported", "template")

    def __init__(self, reader: AnswerReader | None) -> None:
        self._buffer = ChoiceBuffer()
        self._reader = reader
        self._held: list[Piece] = []
        self.num_pieces = 0
        #: Tokens that chunks have reported.
        self.num_reported = 0
        #: Template of chunks in which only the text is new.
        self.template: TextTemplate | None = None

    def reason(self, finish_reason: str | None) -> str | None:
        return self._reader.reason(finish_reason) if self._reader is not None else finish_reason

    def add(self, output: CompletionOutput) -> Said:
        """Add tokens and return the deltas that are complete; none, if nothing can be sent yet."""
        piece = self._buffer.add(output)
        if piece is None:
            return []
        if self._reader is None:
            self.num_pieces += 1
            return [({"content": piece.text}, piece)]
        is_last = piece.finish_reason is not None
        deltas = self._reader.read(piece.text, is_last)
        self._held.append(piece)
        if not deltas and not is_last:
            return []
        if not deltas:
            deltas = [{} if self._reader.num_calls else {"content": ""}]
        self.num_pieces += 1
        whole, self._held = _merged(self._held), []
        deltas = _fitted(deltas, len(whole.token_ids))
        return list(zip(deltas, _split(whole, len(deltas)), strict=True))


def _fitted(deltas: list[dict[str, Any]], num_tokens: int) -> list[dict[str, Any]]:
    """Yield at most one piece per token: a call then begins with a piece of its arguments."""
    fitted: list[dict[str, Any]] = []
    for place, delta in enumerate(deltas):
        too_many = len(fitted) + len(deltas) - place > num_tokens
        parts = delta.get("tool_calls", [{"id": ""}])
        if too_many and fitted and "id" not in parts[0] and "tool_calls" in fitted[-1]:
            said, key = call_text(parts[0])
            call_text(fitted[-1]["tool_calls"][0])[0][key] += said[key]
        else:
            fitted.append(delta)
    return fitted


def _merged(pieces: list[Piece]) -> Piece:
    return Piece(
        "".join(piece.text for piece in pieces),
        [token_id for piece in pieces for token_id in piece.token_ids],
        [position for piece in pieces for position in piece.logprobs],
        pieces[-1].finish_reason,
        pieces[-1].stop_reason,
    )


def _split(piece: Piece, num: int) -> list[Piece]:
    """A token for each delta, so that counts grow with each, and the rest for the last."""
    parts = [
        Piece("", piece.token_ids[i : i + 1], piece.logprobs[i : i + 1], None, None)
        for i in range(num - 1)
    ]
    rest = Piece(
        piece.text,
        piece.token_ids[num - 1 :],
        piece.logprobs[num - 1 :],
        piece.finish_reason,
        piece.stop_reason,
    )
    return [*parts, rest]


def with_echo(echo: str, deltas: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{"content": echo}, *deltas] if echo else deltas


def begun_with(echo: str, said: Said) -> Said:
    """The same with ``echo`` before the first content."""
    if not echo:
        return said
    (delta, piece), *rest = said
    if "content" in delta:
        return [({**delta, "content": echo + delta["content"]}, piece), *rest]
    return [({"content": echo}, Piece("", [], [], None, None)), *said]
