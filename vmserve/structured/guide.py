"""Track an answer's place in its grammar and the tokens that may follow."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from llguidance import LLExecutor, LLMatcher

__all__ = ["Guide", "fill_masks"]

Mask = NDArray[np.bool_]


class Guide:
    """The parser's state of one sequence: it has taken the sequence's tokens, and no others.

    ``end_ids`` end an answer (EOS and stop ids); they may follow only where the grammar is
    complete. What it took cannot be taken back, but a fork goes on by itself.
    """

    __slots__ = ("_matcher", "end_ids")

    def __init__(self, matcher: LLMatcher, end_ids: frozenset[int]) -> None:
        self._matcher = matcher
        self.end_ids = end_ids

    @property
    def matcher(self) -> LLMatcher:
        return self._matcher

    @property
    def is_complete(self) -> bool:
        """Whether the answer matches and no token may follow."""
        return bool(self._matcher.is_stopped()) and not self._matcher.is_error()

    @property
    def is_accepting(self) -> bool:
        """Whether the answer matches as it is."""
        return not self._matcher.is_error() and bool(self._matcher.is_accepting())

    @property
    def error(self) -> str | None:
        """The reason why no mask can be computed any more, or None."""
        return self._matcher.get_error()[:200] if self._matcher.is_error() else None

    def accept(self, token_id: int) -> None:
        """Take a token that the mask allowed. A token that ends the answer is not part of it."""
        if token_id not in self.end_ids:
            self._matcher.consume_token(token_id)

    def num_allowed(self, token_ids: Sequence[int]) -> int:
        """How many of these tokens may follow, one after the other, without ending the answer."""
        ends = (place for place, token_id in enumerate(token_ids) if token_id in self.end_ids)
        inner = list(token_ids[: next(ends, None)])
        return int(self._matcher.validate_tokens(inner)) if inner else 0

    def fork(self) -> Guide:
        return Guide(self._matcher.deep_copy(), self.end_ids)


def fill_masks(guides: Sequence[Guide], vocab_size: int, eos_id: int, executor: LLExecutor) -> Mask:
    """Compute the tokens that may follow, in parallel: ``[guides, vocab_size]``.

    ``eos_id``: the id that llguidance allows where an answer may end. A guide that fails has
    no token left; its ``error`` says why.
    """
    words = np.zeros((len(guides), (vocab_size + 31) // 32), dtype=np.int32)
    executor.unsafe_compute_mask_ptr(
        [(guide.matcher, row) for row, guide in enumerate(guides)],
        words.ctypes.data,
        words.shape[1] * 4,
        len(guides),
    )
    bits = np.unpackbits(words.view(np.uint8), axis=1, bitorder="little")[:, :vocab_size]
    allowed: Mask = bits.view(np.bool_)
    for row, guide in enumerate(guides):
        if guide.error is not None:  # llguidance would let it end, though it does not match
            allowed[row] = False
            continue
        ends = [token_id for token_id in guide.end_ids if token_id < vocab_size]
        allowed[row, ends] = allowed[row, eos_id]
    return allowed
