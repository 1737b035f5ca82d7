"""Sampling by torch's operations, on any device.

Used on a GPU for batches that :mod:`.device` cannot take. On the host the C++ core does the same
(:mod:`.sampler`), and tests compare the two.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vmserve.sampling.adjust import adjust, is_adjusted
from vmserve.sampling.draw import draw
from vmserve.sampling.rng import uniforms
from vmserve.sampling.rows import (
    Ids,
    Peaks,
    Values,
    argmax,
    at_least,
    kth_largest,
    num_before,
    peaks,
)
from vmserve.sampling.sampler import check_logits
from vmserve.sampling.tokens import PART_ELEMENTS, SampledToken, TopTokens

if TYPE_CHECKING:
    from vmserve.sampling.tokens import SamplingRow

__all__ = ["TorchSampler"]

#: Likeliest tokens of a row, best first: (id, log-probability).
Likeliest = list[tuple[int, float]]


class TorchSampler:
    """See :class:`~vmserve.sampling.tokens.TokenSampler`."""

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size = vocab_size
        #: Rows that had NaN or infinite logits and were repaired.
        self.num_repaired_rows = 0
        # Kept between calls: a new array of this size would mean page faults.
        self._scratch = torch.empty(0)

    @torch.inference_mode()
    def sample(self, logits: Tensor, rows: Sequence[SamplingRow]) -> list[SampledToken]:
        check_logits(logits, len(rows), self.vocab_size)
        if not rows:
            return []
        logits, found = self._peaks(logits)
        chosen = self._choose(logits, rows, found.ids)
        own = found.logprobs(logits, chosen)
        tokens = chosen.tolist()
        asked = [i for i, row in enumerate(rows) if row.params.logprobs is not None]
        if not asked:
            return [SampledToken(*token) for token in zip(tokens, own, strict=True)]
        tops: list[TopTokens | None] = [None] * len(rows)
        for i, top in zip(asked, self._tops(logits, chosen, rows, asked), strict=True):
            tops[i] = top
            own[i] = top[tokens[i]][0]
        return [SampledToken(*token) for token in zip(tokens, own, tops, strict=True)]

    @torch.inference_mode()
    def prompt_logprobs(self, logits: Tensor, targets: Sequence[int], k: int) -> list[TopTokens]:
        check_logits(logits, len(targets), self.vocab_size)
        tops = []
        # In parts, so that a long prompt needs little memory besides its logits.
        num_rows = max(1, PART_ELEMENTS // self.vocab_size)
        for start in range(0, len(targets), num_rows):
            part, logprobs = self._log_softmax(logits[start : start + num_rows])
            chosen = torch.tensor(targets[start : start + num_rows], device=logits.device)
            tops += self._with_ranks(part, logprobs, chosen, [k] * len(part))
        return tops

    @torch.inference_mode()
    def beam_candidates(
        self, logits: Tensor, num: int, masks: Sequence[NDArray[np.bool_] | None] = ()
    ) -> tuple[Ids, Values]:
        check_logits(logits, len(logits), self.vocab_size)
        num_rows, num = len(logits), min(num, self.vocab_size)
        if num_rows == 0 or num < 1:
            shape = (num_rows, max(num, 0))
            return np.empty(shape, dtype=np.int64), np.empty(shape, dtype=np.float32)
        logits, logprobs = self._log_softmax(logits)
        masked = [row for row, mask in enumerate(masks) if mask is not None]
        if masked:
            banned = ~np.stack([mask for mask in masks if mask is not None])
            at = torch.from_numpy(banned).to(logits.device)
            logits = logits.clone()
            logits[masked] = logits[masked].masked_fill_(at, -torch.inf)
            logprobs[masked] = logprobs[masked].masked_fill_(at, -torch.inf)
        entries = at_least(logits, kth_largest(logits, [num] * num_rows))
        starts = np.array(entries.starts)
        owner = np.repeat(np.arange(num_rows), np.diff(starts))
        # Stable, so that equals stay in the order of their ids; at least ``num`` for each row.
        order = np.lexsort((-entries.values, owner))
        ids = entries.ids[order[starts[:-1, None] + np.arange(num)]]
        index = torch.from_numpy(ids).to(logits.device)
        return ids, logprobs.gather(1, index).cpu().numpy()

    def _peaks(self, logits: Tensor) -> tuple[Tensor, Peaks]:
        """Logits without NaN as contiguous float32, and their peaks."""
        logits = logits.float().contiguous()
        found = peaks(logits)
        broken = np.isnan(found.totals)
        if not broken.any():
            return logits, found
        logits = self._repaired(logits, torch.from_numpy(broken).to(logits.device))
        return logits, peaks(logits)

    def _log_softmax(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """Logits without NaN as contiguous float32, and their log-probabilities.

        These are valid until the next call.
        """
        logits = logits.float().contiguous()
        logprobs = self._room_like(logits)
        torch.log_softmax(logits, -1, out=logprobs)
        broken = logprobs[:, 0].isnan()  # one NaN or +inf makes the whole row NaN
        if not bool(broken.any()):
            return logits, logprobs
        logits = self._repaired(logits, broken)
        return logits, torch.log_softmax(logits, -1, out=logprobs)

    def _repaired(self, logits: Tensor, broken: Tensor) -> Tensor:
        self.num_repaired_rows += int(broken.sum())
        largest = torch.finfo(torch.float32).max
        repaired = logits[broken].nan_to_num(nan=-torch.inf, posinf=largest, neginf=-torch.inf)
        repaired[repaired.amax(dim=-1) == -torch.inf] = 0.0
        logits = logits.clone()
        logits[broken] = repaired
        return logits

    def _room_like(self, x: Tensor) -> Tensor:
        if self._scratch.numel() < x.numel() or self._scratch.device != x.device:
            self._scratch = torch.empty_like(x).view(-1)
        return self._scratch[: x.numel()].view(x.shape)

    # -- choosing -----------------------------------------------------------------------

    def _choose(self, logits: Tensor, rows: Sequence[SamplingRow], likeliest: Tensor) -> Tensor:
        """Choose the token of each row: [rows] int64. Does not change ``logits``."""
        adjusted = [i for i, row in enumerate(rows) if is_adjusted(row)]
        drawn = [i for i, row in enumerate(rows) if not row.params.is_greedy]
        if not adjusted and not drawn:
            return likeliest
        x = logits
        if len(adjusted) == len(rows):
            x = adjust(logits.clone(), rows)
        elif adjusted:
            x = logits.clone()
            x[adjusted] = adjust(logits[adjusted], [rows[i] for i in adjusted])
        if not drawn:
            return argmax(x)
        if len(drawn) == len(rows):
            return self._draw(x, rows)
        chosen = torch.empty(len(rows), dtype=torch.int64, device=x.device)
        chosen[drawn] = self._draw(x[drawn], [rows[i] for i in drawn])
        greedy = sorted(set(range(len(rows))).difference(drawn))
        chosen[greedy] = argmax(x[greedy])
        return chosen

    @staticmethod
    def _draw(x: Tensor, rows: Sequence[SamplingRow]) -> Tensor:
        numbers = uniforms(
            [row.seed for row in rows],
            [row.index for row in rows],
            [row.num_output for row in rows],
        )
        return draw(x, [row.params for row in rows], numbers)

    # -- log-probabilities --------------------------------------------------------------

    def _tops(
        self, logits: Tensor, chosen: Tensor, rows: Sequence[SamplingRow], asked: Sequence[int]
    ) -> list[TopTokens]:
        """Log-probabilities for the rows ``asked`` that want some."""
        logits, chosen = _pick(logits, asked), chosen[asked]
        logprobs = torch.log_softmax(logits, -1, out=self._room_like(logits))
        wanted = [rows[i].params for i in asked]
        listed = [i for i, params in enumerate(wanted) if params.logprob_token_ids is None]
        tops: dict[int, TopTokens] = {}
        if listed:
            counts = [wanted[i].logprobs or 0 for i in listed]
            found = self._with_ranks(
                _pick(logits, listed), _pick(logprobs, listed), chosen[listed], counts
            )
            tops.update(zip(listed, found, strict=True))
        for i in set(range(len(asked))).difference(listed):
            ids = wanted[i].logprob_token_ids or ()
            tops[i] = self._of_ids(logits[i], logprobs[i], int(chosen[i]), ids)
        return [tops[i] for i in range(len(asked))]

    def _with_ranks(
        self, logits: Tensor, logprobs: Tensor, chosen: Tensor, counts: Sequence[int]
    ) -> list[TopTokens]:
        """The chosen token of each row, then the ``counts[i]`` likeliest; equals by id."""
        limits = [self.vocab_size if k < 0 else min(k, self.vocab_size) for k in counts]
        likeliest = self._likeliest(logits, logprobs, limits)
        own = logprobs.gather(1, chosen[:, None])[:, 0].tolist()
        tops = []
        unranked = []
        for row, token_id in enumerate(chosen.tolist()):
            top: TopTokens = {token_id: (own[row], 0)}
            for rank, (other, logprob) in enumerate(likeliest[row], start=1):
                top[other] = (logprob, rank)
            if top[token_id][1] == 0:
                unranked.append(row)
            tops.append(top)
        if unranked:
            ids = chosen[unranked]
            before = num_before(_pick(logits, unranked), ids).tolist()
            for row, token_id, num in zip(unranked, ids.tolist(), before, strict=True):
                tops[row][token_id] = (own[row], num + 1)
        return tops

    @staticmethod
    def _likeliest(logits: Tensor, logprobs: Tensor, limits: Sequence[int]) -> list[Likeliest]:
        """The ``limits[i]`` likeliest tokens of row i, by logit descending, then by id."""
        found: list[Likeliest] = [[] for _ in limits]
        some = [row for row, k in enumerate(limits) if k > 0]
        if not some:
            return found
        logits, logprobs = _pick(logits, some), _pick(logprobs, some)
        entries = at_least(logits, kth_largest(logits, [limits[row] for row in some]))
        ordered = [
            ids[np.argsort(-values, kind="stable")[: limits[row]]]
            for row, (ids, values) in zip(some, entries, strict=True)
        ]
        owner = np.repeat(np.arange(len(some)), [len(ids) for ids in ordered])
        index = torch.from_numpy(np.concatenate(ordered)).to(logits.device)
        values = iter(logprobs[torch.from_numpy(owner).to(logits.device), index].tolist())
        for row, ids in zip(some, ordered, strict=True):
            found[row] = list(zip(ids.tolist(), values, strict=False))
        return found

    @staticmethod
    def _of_ids(logits: Tensor, logprobs: Tensor, chosen: int, ids: Sequence[int]) -> TopTokens:
        """The chosen token, then exactly ``ids``."""
        order = torch.sort(logits, descending=True, stable=True).indices
        ranks = torch.empty_like(order)
        ranks[order] = torch.arange(1, len(order) + 1, device=order.device)
        wanted = list(dict.fromkeys([chosen, *ids]))
        index = torch.tensor(wanted, device=logits.device)
        entries = zip(logprobs[index].tolist(), ranks[index].tolist(), strict=True)
        return dict(zip(wanted, entries, strict=True))


def _pick(x: Tensor, rows: Sequence[int]) -> Tensor:
    """The rows named, in order and distinct; no copy if these are all rows."""
    return x if len(rows) == x.shape[0] else x[rows]
