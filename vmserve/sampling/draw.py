"""Draw a token for each row: temperature, top-k, top-p, min-p, inverse CDF.

Rows that keep the whole vocabulary are drawn together where the logits are. Of other rows only the
tokens that may be kept come to the host, which finishes each row by itself.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vmserve.sampling.rows import Ids, Values, at_least, kth_largest

if TYPE_CHECKING:
    from vmserve.sampling.params import SamplingParams

__all__ = ["draw", "inverse_cdf", "inverse_cdf_at", "is_cut", "kept"]

#: Weights of a block, which are summed before the cumulative sum.
BLOCK = 128


def draw(x: Tensor, params: Sequence[SamplingParams], uniforms: NDArray[np.float64]) -> Tensor:
    """One token id per row: [rows] int64.

    ``x`` [rows, vocab] float32: adjusted logits before temperature, each row with a finite maximum;
    ``uniforms`` [rows]: numbers in [0, 1).
    """
    if any(p.temperature != 1.0 for p in params):
        x = x / torch.tensor([[p.temperature] for p in params], device=x.device)
    cut = [i for i, p in enumerate(params) if is_cut(p, x.shape[1])]
    if not cut:
        return inverse_cdf(x.softmax(dim=-1), uniforms)
    if len(cut) == len(params):
        return _draw_cut(x, params, uniforms)
    whole = sorted(set(range(len(params))).difference(cut))
    tokens = torch.empty(len(params), dtype=torch.int64, device=x.device)
    tokens[whole] = inverse_cdf(x[whole].softmax(dim=-1), uniforms[whole])
    tokens[cut] = _draw_cut(x[cut], [params[i] for i in cut], uniforms[cut])
    return tokens


def inverse_cdf(weights: Tensor, uniforms: NDArray[np.float64]) -> Tensor:
    """The column whose share of the row's cumulative weight holds ``uniforms``: [rows] int64.

    ``weights`` [rows, columns] float32 >= 0, each row with a positive sum. Cumulative sums
    are float64. Two levels (blocks, then within one) read the weights once: a float64
    cumulative sum over a large vocabulary costs ten times as much.
    """
    return inverse_cdf_at(weights, torch.from_numpy(uniforms).to(weights.device))


def inverse_cdf_at(weights: Tensor, uniforms: Tensor) -> Tensor:
    """:func:`inverse_cdf` for float64 numbers on the device of the weights."""
    columns = weights.shape[1]
    full = columns // BLOCK * BLOCK
    # unfold, unlike view, also takes the rows of a wider matrix.
    sums = weights.unfold(1, BLOCK, BLOCK).sum(dim=-1) if full else weights[:, :0]
    if full < columns:
        sums = torch.cat([sums, weights[:, full:].sum(dim=-1, keepdim=True)], dim=-1)
    upto = sums.double().cumsum(dim=-1)
    targets = uniforms * upto[:, -1]
    block = _locate(upto, sums, targets)
    before = torch.where(block > 0, upto.gather(1, (block - 1).clamp(min=0)[:, None])[:, 0], 0.0)
    place = block[:, None] * BLOCK + torch.arange(BLOCK, device=weights.device)
    inside = weights.gather(1, place.clamp(max=columns - 1)).masked_fill(place >= columns, 0.0)
    rest = (targets - before).clamp(min=0.0)
    return block * BLOCK + _locate(inside.double().cumsum(dim=-1), inside, rest)


def _locate(upto: Tensor, weights: Tensor, targets: Tensor) -> Tensor:
    """First column whose cumulative sum exceeds the target, else the last one with weight."""
    found = torch.searchsorted(upto, targets[:, None], right=True)[:, 0]
    columns = torch.arange(weights.shape[1], device=weights.device)
    last = torch.where(weights > 0.0, columns, 0).amax(dim=-1)
    return found.minimum(last)


# -- rows that keep only some tokens ----------------------------------------------------


def is_cut(params: SamplingParams, vocab: int) -> bool:
    """Whether only some tokens of the vocabulary can be drawn."""
    return params.min_p > 0.0 or params.top_p < 1.0 or 0 < params.top_k < vocab


def _draw_cut(x: Tensor, params: Sequence[SamplingParams], uniforms: NDArray[np.float64]) -> Tensor:
    tokens = []
    for (ids, values), uniform in zip(kept(x, params), uniforms, strict=True):
        upto = np.cumsum(np.exp(values - values.max()), dtype=np.float64)
        place = int(np.searchsorted(upto, uniform * upto[-1], side="right"))
        tokens.append(ids[min(place, len(ids) - 1)])
    return torch.tensor(np.array(tokens), device=x.device)


def kept(x: Tensor, params: Sequence[SamplingParams]) -> list[tuple[Ids, Values]]:
    """Ids and logits that top-k, then top-p (of what top-k leaves), then min-p keep.

    Of equal logits at a limit the lowest ids are kept, so that exactly k tokens remain and
    ``top_k=1`` is greedy. Ids ascend.
    """
    vocab = x.shape[1]
    highest = x.amax(dim=-1)
    log_sum = _log_sum(x, highest, [_needs_sum(p, vocab) for p in params])
    floors = _floors(x, params, highest, log_sum)
    totals = (log_sum - highest.double()).exp().tolist()
    return [
        _keep(ids, values, p, total)
        for (ids, values), p, total in zip(at_least(x, floors), params, totals, strict=True)
    ]


def _needs_sum(params: SamplingParams, vocab: int) -> bool:
    return params.top_p < 1.0 and not 0 < params.top_k < vocab


def _log_sum(x: Tensor, highest: Tensor, needed: Sequence[bool]) -> Tensor:
    """log sum exp of the rows that need it, +inf for others: [rows] float64."""
    log_sum = torch.full((x.shape[0],), torch.inf, dtype=torch.float64, device=x.device)
    some = [row for row, need in enumerate(needed) if need]
    if some:
        part = x if len(some) == x.shape[0] else x[some]
        # softmax, not logsumexp: it is faster, and gives a row the same value in any batch.
        peak = part.softmax(dim=-1).amax(dim=-1)
        log_sum[some] = highest[some].double() - peak.double().log()
    return log_sum


def _floors(
    x: Tensor, params: Sequence[SamplingParams], highest: Tensor, log_sum: Tensor
) -> Tensor:
    """Logits below which no token of a row can be kept: [rows] float32."""
    vocab = x.shape[1]
    floors = torch.full_like(highest, -torch.inf)
    limited = [i for i, p in enumerate(params) if 0 < p.top_k < vocab]
    if limited:
        part = x if len(limited) == len(params) else x[limited]
        floors[limited] = kth_largest(part, [params[i].top_k for i in limited])
    summed = [i for i, p in enumerate(params) if _needs_sum(p, vocab)]
    if summed:
        # Tokens with less than (1 - top_p) / vocab each have less than 1 - top_p together, so all
        # that top-p keeps lies above. The factor covers rounding.
        shares = [math.log((1.0 - params[i].top_p) / vocab * 0.999) for i in summed]
        floors[summed] = (log_sum[summed] + log_sum.new_tensor(shares)).float()
    # With top-p, tokens that min-p will drop still count in top-p's sum.
    shares = [_log(p.min_p) if p.top_p >= 1.0 else -math.inf for p in params]
    return floors.maximum(highest + highest.new_tensor(shares)).minimum(highest)


def _keep(ids: Ids, values: Values, params: SamplingParams, total: float) -> tuple[Ids, Values]:
    """Cut one row. ``total``: its whole weight (without top-k), the largest token's being 1."""
    ordered = np.sort(values)[::-1]
    highest = ordered[0]
    if params.top_k > 0:
        ordered = ordered[: params.top_k]
    if params.top_p < 1.0:
        upto = np.cumsum(np.exp(ordered - highest), dtype=np.float64)
        total = total if math.isfinite(total) else upto[-1]
        ordered = ordered[: np.searchsorted(upto, params.top_p * total) + 1]
    keep = values >= ordered[-1]
    surplus = int(np.count_nonzero(keep)) - len(ordered)
    if surplus:
        keep[np.flatnonzero(values == ordered[-1])[-surplus:]] = False
    if params.min_p > 0.0:
        keep &= values >= highest + np.float32(math.log(params.min_p))
    return ids[keep], values[keep]


def _log(value: float) -> float:
    return math.log(value) if value > 0.0 else -math.inf
