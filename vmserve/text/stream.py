"""The output of one sequence: tokens in, text and log-probabilities out.

A token is released together with its whole text. It waits while it ends inside a character, while
its text may be part of a stop string, and, if it has no text, for the next token that has some.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from vmserve.text.detokenizer import DetokenizerStrategy, IncrementalDetokenizer
from vmserve.text.stop import StopChecker, StopStrings
from vmserve.types import Logprob, LogprobsList

if TYPE_CHECKING:
    from vmserve.sampling.params import SamplingParams
    from vmserve.sampling.tokens import SampledToken
    from vmserve.text.tokenizer import Tokenizer

__all__ = ["ChoiceStream", "Delta"]


class Delta(NamedTuple):
    """Text and the tokens that it comes from; ``logprobs`` is None if none were asked for."""

    text: str
    token_ids: list[int]
    logprobs: LogprobsList | None


@dataclass(frozen=True, slots=True)
class _Waiting:
    token: SampledToken
    #: Text that the token added: "" if it ends inside a character, None if it is not in the text.
    piece: str | None
    #: Length of the whole text up to here, or -1 if the token ends inside a character.
    end: int


class ChoiceStream:
    """Text, tokens and log-probabilities of one sequence, as far as they are released.

    The ``decoded_token`` of a sampled token is the text that it added, so that these strings join
    to the text. For tokens that are not in the text (an end token, a skipped special token, the
    other candidates of a position) it is the token's own string.

    ``stops``: those of ``params``, shared by the choices of a request.
    """

    def __init__(
        self, tokenizer: Tokenizer, params: SamplingParams, stops: StopStrings | None = None
    ) -> None:
        self._tokenizer = tokenizer
        self._include_stop = params.include_stop_str_in_output
        self._detokenizer: DetokenizerStrategy | None = None
        if params.detokenize:
            detokenizer = IncrementalDetokenizer(tokenizer.table, params.skip_special_tokens)
            self._detokenizer = detokenizer.strategy
        self._checker: StopChecker | None = None
        if params.stop:
            self._checker = StopChecker(stops or StopStrings(params.stop), self._include_stop)
        self._waiting: list[_Waiting] = []
        self._pieces: list[str] = []
        self._num_released = 0  # characters that went out with their tokens
        self._num_free = 0  # characters that no stop string can claim
        self._num_chars = 0
        self._ended = False
        self._taken_pieces = 0
        self._taken_tokens = 0
        self.token_ids: list[int] = []
        self.logprobs: LogprobsList | None = None if params.logprobs is None else []

    @property
    def text(self) -> str:
        if len(self._pieces) > 1 and self._taken_pieces == 0:
            self._pieces = ["".join(self._pieces)]
        return "".join(self._pieces)

    def push(
        self, token: SampledToken, *, may_stop: bool = True, hidden: bool = False
    ) -> str | None:
        """Add a token; returns the stop string that it completes, or None.

        ``may_stop`` False: the token's text is not part of any stop string. ``hidden``: the token
        ended the sequence. Its id is released and its text is not, unless the request includes
        stop strings in its output.
        """
        if self._ended:
            raise ValueError("the text has ended: nothing can be added")
        detokenizer = self._detokenizer
        if detokenizer is None:
            self._release_token(token, None)
            return None
        if hidden and not self._include_stop:
            self._waiting.append(_Waiting(token, None, self._num_chars))
            return None
        piece = detokenizer.push(token.token_id)
        if self._checker is None and piece and not self._waiting and not detokenizer.pending:
            # The usual case, on the shortest path.
            self._num_chars += len(piece)
            self._num_free = self._num_released = self._num_chars
            self._pieces.append(piece)
            self._release_token(token, piece)
            return None
        stop = self._check(piece, may_stop and not hidden)
        all_free = stop is None and self._num_free == self._num_chars
        if piece and all_free and not self._waiting and not detokenizer.pending:
            self._num_released = self._num_chars
            self._pieces.append(piece)
            self._release_token(token, piece)
            return None
        if detokenizer.pending:
            self._waiting.append(_Waiting(token, piece, -1))
        else:
            self._waiting.append(_Waiting(token, piece or None, self._num_chars))
        if stop is not None:
            self._ended = True
            self._release(len(self._waiting))
        else:
            self._release(self._num_ready())
        return stop

    def finish(self) -> None:
        """End the sequence: release what waits. Incomplete bytes become U+FFFD."""
        if self._ended:
            return
        self._ended = True
        rest = self._detokenizer.flush() if self._detokenizer is not None else ""
        if rest:  # of a token that ended inside a character
            place = max(i for i, waiting in enumerate(self._waiting) if waiting.end < 0)
            last = self._waiting[place]
            self._waiting[place] = _Waiting(last.token, (last.piece or "") + rest, -1)
        self._num_chars += len(rest)
        self._num_free = self._num_chars
        self._release(len(self._waiting))

    def take_delta(self) -> Delta:
        """Return what was released since the last call."""
        text = "".join(self._pieces[self._taken_pieces :])
        logprobs = None if self.logprobs is None else self.logprobs[self._taken_tokens :]
        delta = Delta(text, self.token_ids[self._taken_tokens :], logprobs)
        self._taken_pieces = len(self._pieces)
        self._taken_tokens = len(self.token_ids)
        return delta

    def whole(self) -> Delta:
        """Return all that was released."""
        return Delta(self.text, self.token_ids, self.logprobs)

    # -- release ------------------------------------------------------------------------

    def _check(self, piece: str, may_stop: bool) -> str | None:
        """Count the piece's characters and those that no stop string can claim any more."""
        self._num_chars += len(piece)
        if self._checker is None:
            self._num_free = self._num_chars
            return None
        if not may_stop:
            self._checker.flush()
            self._num_free = self._num_chars
            return None
        freed, stop = self._checker.push(piece)
        self._num_free += len(freed)
        return stop

    def _num_ready(self) -> int:
        """Number of waiting tokens up to the last one whose text is complete and free."""
        ready = 0
        for num, waiting in enumerate(self._waiting, start=1):
            if waiting.end > self._num_free:
                break
            if waiting.end > self._num_released:
                ready = num
        return ready

    def _release(self, num: int) -> None:
        if not num:
            return
        going, self._waiting = self._waiting[:num], self._waiting[num:]
        text = "".join(waiting.piece or "" for waiting in going)
        # With a stop string, the free text ends before the tokens' text.
        text = text[: self._num_free - self._num_released]
        self._num_released += len(text)
        if text:
            self._pieces.append(text)
        for waiting in going:
            self._release_token(waiting.token, waiting.piece)

    def _release_token(self, token: SampledToken, piece: str | None) -> None:
        """Add a token to the released ones. ``piece`` None: it is not in the text."""
        self.token_ids.append(token.token_id)
        if self.logprobs is None or token.top is None:
            return
        if self._detokenizer is None:
            entries = {i: Logprob(logprob, rank) for i, (logprob, rank) in token.top.items()}
        else:
            text = self._tokenizer.token_text
            entries = {
                i: Logprob(logprob, rank, text(i)) for i, (logprob, rank) in token.top.items()
            }
            if piece is not None:
                logprob, rank = token.top[token.token_id]
                entries[token.token_id] = Logprob(logprob, rank, piece)
        self.logprobs.append(entries)
