"""Apply a request's changes to the model's logits before a token is chosen.

In this order: logit_bias, the grammar, allowed ids, bad words, the end-of-text ids that min_tokens
suppresses, then penalties. Entries of all rows are gathered and written together. What a request
says in lists of any length is made into arrays once (:class:`_Terms`).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

if TYPE_CHECKING:
    from vmserve.sampling.params import SamplingParams
    from vmserve.sampling.tokens import SamplingRow

__all__ = ["adjust", "is_adjusted"]

Ids = NDArray[np.int64]
_NO_IDS: Ids = np.empty(0, dtype=np.int64)


class _Terms:
    """The lists of a request's parameters as arrays, and the tokens of its prompt, for all its
    rows.

    Ids of the tokenizer may be beyond the vocabulary of the model: they are left out.
    """

    def __init__(self, row: SamplingRow, vocab: int) -> None:
        params = row.params
        bias = params.logit_bias or {}
        self.bias = _array(bias), np.array(list(bias.values()), dtype=np.float32)
        self.allowed = _array(params.allowed_token_ids or ())
        self.stop_ids = _array(each for each in row.stop_ids if each < vocab)
        self._bans, self._alone = _bans(params, vocab)
        self._seen: NDArray[np.bool_] | None = None

    @classmethod
    def of(cls, row: SamplingRow, vocab: int) -> _Terms:
        if row.shared.torch is None:
            row.shared.torch = cls(row, vocab)
        return cast(_Terms, row.shared.torch)

    def banned(self, output: Sequence[int]) -> Ids:
        """The last tokens of bad words that ``output`` is about to complete."""
        if not self._bans or not output:
            return self._alone
        found = [
            last
            for start, last in self._bans.get(output[-1], ())
            if list(output[-len(start) :]) == start
        ]
        return np.concatenate([self._alone, _array(found)]) if found else self._alone

    def seen(self, row: SamplingRow, vocab: int) -> Ids:
        """The distinct tokens of prompt and answer."""
        if self._seen is None:
            self._seen = np.zeros(vocab, dtype=bool)
            self._seen[_array(row.tokens[: row.num_prompt])] = True
        mask = self._seen.copy()
        mask[_array(row.output_token_ids)] = True
        return np.flatnonzero(mask)


def _bans(params: SamplingParams, vocab: int) -> tuple[dict[int, list[tuple[list[int], int]]], Ids]:
    """Bad words by their last token but one, each as what comes before its last token and that;
    and the words of one token."""
    bans: dict[int, list[tuple[list[int], int]]] = defaultdict(list)
    alone = []
    for word in params.bad_words:
        *start, last = cast("Sequence[int]", word)
        if last < vocab:
            if start:
                bans[start[-1]].append((start, last))
            else:
                alone.append(last)
    return dict(bans), _array(alone)


def is_adjusted(row: SamplingRow) -> bool:
    """Whether a row changes its logits by more than temperature and truncation."""
    params = row.params
    return bool(
        params.logit_bias
        or params.allowed_token_ids
        or params.bad_words
        or row.mask is not None
        or row.num_output < params.min_tokens
        or _is_penalised(row)
    )


def _is_penalised(row: SamplingRow) -> bool:
    params = row.params
    return (
        params.repetition_penalty != 1.0
        or params.presence_penalty != 0.0
        or params.frequency_penalty != 0.0
    )


def adjust(x: Tensor, rows: Sequence[SamplingRow]) -> Tensor:
    """Apply every row's changes to ``x`` [len(rows), vocab] float32, in place."""
    terms = [_Terms.of(row, x.shape[1]) for row in rows]
    _add(x, [each.bias for each in terms])
    banned = [_banned(each, row) for each, row in zip(terms, rows, strict=True)]
    _mask(x, [each.allowed for each in terms], banned, [row.mask for row in rows])
    penalised = [i for i, row in enumerate(rows) if _is_penalised(row)]
    if penalised:
        _repetition(x, rows, penalised)
        _presence_and_frequency(x, rows, penalised)
    return x


def _array(ids: Iterable[int]) -> Ids:
    return np.array(list(ids), dtype=np.int64)


def _flat(ids: Sequence[Ids], x: Tensor) -> Tensor:
    """Positions in ``x.view(-1)`` of the ids of each row."""
    vocab = x.shape[1]
    parts = [row_ids + row * vocab for row, row_ids in enumerate(ids)]
    return torch.from_numpy(np.concatenate(parts)).to(x.device)


def _values(values: Sequence[NDArray[np.float32]], x: Tensor) -> Tensor:
    return torch.from_numpy(np.concatenate(values)).to(x.device)


# -- bias and masks ---------------------------------------------------------------------


def _add(x: Tensor, entries: Sequence[tuple[Ids, NDArray[np.float32]]]) -> None:
    """Add to entries that are distinct within a row."""
    flat = _flat([ids for ids, _ in entries], x)
    if flat.numel():
        x.view(-1)[flat] += _values([values for _, values in entries], x)


def _banned(terms: _Terms, row: SamplingRow) -> Ids:
    output = row.output_token_ids
    banned = terms.banned(output)
    if len(output) < row.params.min_tokens:
        return np.concatenate([banned, terms.stop_ids])
    return banned


def _mask(
    x: Tensor,
    allowed: Sequence[Ids],
    banned: Sequence[Ids],
    grammar: Sequence[NDArray[np.bool_] | None],
) -> None:
    """Ban what is not allowed and what is banned, as long as a token remains.

    If none remains, first the allowed ids are ignored, then the bans: a request may contradict
    itself, and any answer is better than none. What a grammar forbids stays forbidden.
    """
    masked = [
        i
        for i in range(len(allowed))
        if allowed[i].size or banned[i].size or grammar[i] is not None
    ]
    if not masked:
        return
    ruled_out = _ruled_out([grammar[i] for i in masked], x)
    bans = ruled_out.clone()
    bans.view(-1)[_flat([banned[i] for i in masked], bans)] = True
    limits = torch.zeros_like(bans)
    for place, i in enumerate(masked):
        if allowed[i].size:
            limits[place] = True
            limits[place, torch.from_numpy(allowed[i]).to(x.device)] = False
    part = x[masked]
    result = part.masked_fill(bans | limits, -torch.inf)
    for fallback in (bans, ruled_out):
        lost = result.amax(dim=-1) == -torch.inf
        if not bool(lost.any()):
            break
        result[lost] = part[lost].masked_fill(fallback[lost], -torch.inf)
    x[masked] = result


def _ruled_out(grammar: Sequence[NDArray[np.bool_] | None], x: Tensor) -> Tensor:
    """[len(grammar), vocab]: tokens that a row's grammar forbids."""
    result = torch.zeros(len(grammar), x.shape[1], dtype=torch.bool, device=x.device)
    rows = [row for row, mask in enumerate(grammar) if mask is not None]
    if rows:
        masks = np.stack([mask for mask in grammar if mask is not None])
        result[rows] = torch.from_numpy(~masks).to(x.device)
    return result


# -- penalties --------------------------------------------------------------------------


def _repetition(x: Tensor, rows: Sequence[SamplingRow], penalised: Sequence[int]) -> None:
    """Divide positive logits of tokens in prompt or output, and multiply negative ones.

    Keskar et al., "CTRL" (2019), section 4.1, with the sign handled as in ``transformers``.
    """
    seen = [_NO_IDS] * len(rows)
    factors = []
    for i in penalised:
        factor = rows[i].params.repetition_penalty
        if factor != 1.0:
            seen[i] = _Terms.of(rows[i], x.shape[1]).seen(rows[i], x.shape[1])
            factors.append(np.full(seen[i].size, factor, dtype=np.float32))
    if not factors:
        return
    flat, factor_of = _flat(seen, x), _values(factors, x)
    before = x.view(-1)[flat]
    x.view(-1)[flat] = torch.where(before > 0, before / factor_of, before * factor_of)


def _presence_and_frequency(
    x: Tensor, rows: Sequence[SamplingRow], penalised: Sequence[int]
) -> None:
    """Subtract presence + frequency * count for each token of the output."""
    entries = [(_NO_IDS, np.empty(0, dtype=np.float32))] * len(rows)
    for i in penalised:
        params = rows[i].params
        if rows[i].output_token_ids and (params.presence_penalty or params.frequency_penalty):
            ids, counts = np.unique(_array(rows[i].output_token_ids), return_counts=True)
            amount = -params.presence_penalty - params.frequency_penalty * counts
            entries[i] = (ids, amount.astype(np.float32))
    _add(x, entries)
