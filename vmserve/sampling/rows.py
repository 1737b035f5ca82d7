"""Operations on each row of a matrix, with results that do not depend on other rows.

On a CPU they use numpy, whose comparisons, sorts and partitions of float32 are vectorised (torch's
argmax and ``>`` are 5 to 10 times slower there); elsewhere torch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

__all__ = [
    "Entries",
    "Ids",
    "Peaks",
    "Values",
    "argmax",
    "at_least",
    "kth_largest",
    "num_before",
    "peaks",
]

Ids = NDArray[np.int64]
Values = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Entries:
    """Some entries of each row, on the host, in ascending order of column."""

    ids: Ids
    values: Values
    #: First entry of each row: row i has entries ``starts[i]`` to ``starts[i + 1]``.
    starts: list[int]

    def __iter__(self) -> Iterator[tuple[Ids, Values]]:
        for start, end in zip(self.starts, self.starts[1:], strict=False):
            yield self.ids[start:end], self.values[start:end]


@dataclass(frozen=True, slots=True)
class Peaks:
    """The likeliest token of each row of logits, and figures for the likelihood of any token."""

    #: Column of the largest value, the lowest one among equals: [rows].
    ids: Tensor
    #: Largest value, and sum over the row of ``exp(value - maximum)``, on the host: [rows]. The sum
    #: is NaN if a value is NaN or +inf, or all are -inf.
    maxima: Values
    totals: NDArray[np.float64]

    def logprobs(self, x: Tensor, chosen: Tensor) -> list[float]:
        """Log-probabilities of column ``chosen[i]`` of row i of the same logits."""
        if chosen is self.ids:
            own = -np.log(self.totals)
        else:
            values = x.gather(1, chosen[:, None])[:, 0].cpu().numpy()
            own = (values - self.maxima).astype(np.float64) - np.log(self.totals)
        return cast("list[float]", own.tolist())


def peaks(x: Tensor) -> Peaks:
    """The peaks of ``x`` [rows, columns] float32."""
    highest = x.amax(dim=-1)
    weights = (x - highest[:, None]).exp()
    if x.device.type == "cpu":  # torch's sum of a row depends on its threads
        totals = weights.numpy().sum(axis=-1, dtype=np.float64)
    else:
        totals = weights.sum(dim=-1, dtype=torch.float64).cpu().numpy()
    return Peaks(argmax(x), highest.cpu().numpy(), totals)


def argmax(x: Tensor) -> Tensor:
    """Index of the largest value of each row, the lowest one among equals: [rows] int64."""
    if x.device.type == "cpu":
        return torch.from_numpy(x.numpy().argmax(axis=-1))
    return x.argmax(dim=-1)


def kth_largest(x: Tensor, ks: Sequence[int]) -> Tensor:
    """The ``ks[i]``-th largest value of row i (1 is the maximum): [rows]."""
    if x.device.type == "cpu":
        return torch.from_numpy(_kth_largest_on_host(x.numpy(), ks))
    return kth_largest_on_device(x, ks)


def at_least(x: Tensor, floors: Tensor) -> Entries:
    """The entries of row i of ``x`` [rows, columns] that are at least ``floors[i]``."""
    if x.device.type == "cpu":
        flat = np.flatnonzero(x.numpy() >= floors.numpy()[:, None])
        values = x.reshape(-1).numpy()[flat]
    else:
        flat, values = at_least_on_device(x, floors)
    rows, width = x.shape
    starts = np.searchsorted(flat, np.arange(rows + 1) * width).tolist()
    return Entries(flat % width, values, starts)


def num_before(x: Tensor, ids: Tensor) -> Tensor:
    """How many entries of row i come before ``ids[i]``, by value descending, then by id: [rows]."""
    if x.device.type == "cpu":
        return torch.from_numpy(_num_before_on_host(x.numpy(), ids.numpy()))
    return num_before_on_device(x, ids)


def _kth_largest_on_host(values: Values, ks: Sequence[int]) -> Values:
    width = values.shape[1]
    out = np.empty(len(ks), dtype=values.dtype)
    for k in set(ks):
        chosen = [row for row, row_k in enumerate(ks) if row_k == k]
        part = values if len(chosen) == len(ks) else values[chosen]
        out[chosen] = np.partition(part, width - k, axis=-1)[:, width - k]
    return out


def _num_before_on_host(values: Values, index: Ids) -> Ids:
    mine = np.take_along_axis(values, index[:, None], axis=-1)
    before: Ids = np.count_nonzero(values > mine, axis=-1)
    equal = values == mine
    for row in np.flatnonzero(np.count_nonzero(equal, axis=-1) > 1):
        before[row] += np.count_nonzero(equal[row, : index[row]])
    return before


def kth_largest_on_device(x: Tensor, ks: Sequence[int]) -> Tensor:
    top = torch.topk(x, max(ks), dim=-1).values
    return top.gather(1, torch.tensor(ks, device=x.device)[:, None] - 1)[:, 0]


def at_least_on_device(x: Tensor, floors: Tensor) -> tuple[Ids, Values]:
    found = (x >= floors[:, None]).reshape(-1).nonzero()[:, 0]
    return found.cpu().numpy(), x.reshape(-1)[found].cpu().numpy()


def num_before_on_device(x: Tensor, ids: Tensor) -> Tensor:
    own = x.gather(1, ids[:, None])
    lower = torch.arange(x.shape[1], device=x.device) < ids[:, None]
    return ((x > own) | ((x == own) & lower)).sum(dim=-1)
