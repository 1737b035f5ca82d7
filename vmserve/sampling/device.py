"""Sample where the logits are: for common requests only tokens come back from a GPU.

The same random numbers decide as in :mod:`.draw`, so that a seed gives the same tokens (but for the
last bit of an exponential, which a GPU may round differently).
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from enum import Enum
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vmserve.sampling.adjust import is_adjusted
from vmserve.sampling.draw import inverse_cdf_at, is_cut
from vmserve.sampling.rng import uniforms
from vmserve.sampling.sampler import Sampler, check_logits
from vmserve.sampling.tokens import PART_ELEMENTS, SampledToken, SamplingRow, TopTokens
from vmserve.sampling.torch_sampler import TorchSampler

if TYPE_CHECKING:
    from vmserve.sampling.params import SamplingParams
    from vmserve.sampling.tokens import Drawing, Logits

__all__ = ["DeviceSampler"]

logger = logging.getLogger(__name__)
_Result = TypeVar("_Result")


class Transfers(Protocol):
    """What the sampler needs of the device."""

    memory_errors: tuple[type[Exception], ...]

    def upload(self, array: NDArray[Any], out: Tensor | None = None) -> Tensor: ...

    def fetch(self, tensors: Sequence[Tensor]) -> Fetched: ...


class Fetched(Protocol):
    def take(self) -> list[NDArray[Any]]: ...


class _Drawing:
    def __init__(self, sampler: DeviceSampler, token_ids: Tensor, fetched: Fetched) -> None:
        self._sampler = sampler
        #: int64 ``[rows]``, on the device.
        self.token_ids = token_ids
        self._fetched = fetched

    def take(self) -> list[SampledToken]:
        """Wait for them."""
        tokens, logprobs, finite = self._fetched.take()
        self._sampler.num_repaired_rows += int((~finite).sum())
        rows = zip(tokens.tolist(), logprobs.tolist(), strict=True)
        return [SampledToken(*token) for token in rows]


class _Way(Enum):
    """How a row's token is chosen. Rows of one way are processed together."""

    GREEDY = 0
    WHOLE = 1
    CUT = 2


class DeviceSampler:
    """A sampler that waits for the device once a step, for two numbers a row.

    See :class:`~vmserve.sampling.tokens.TokenSampler`. A batch with a row that asks for
    log-probabilities, biases, masks or penalties is sampled by torch's operations or by our host
    sampler. Rows are processed in parts of bounded memory
    (:func:`~vmserve.sampling.tokens.sampling_bytes`). If the device has not even that, parts become
    smaller, and stay so.
    """

    def __init__(self, vocab_size: int, device: Transfers) -> None:
        self.vocab_size = vocab_size
        #: Rows that are processed at once.
        self.part_rows = max(1, PART_ELEMENTS // vocab_size)
        self._device = device
        self._host = Sampler(vocab_size)
        self._there = TorchSampler(vocab_size)
        self._num_repaired = 0

    @property
    def num_repaired_rows(self) -> int:
        parts = (self._host.num_repaired_rows, self._there.num_repaired_rows)
        return self._num_repaired + sum(parts)

    @num_repaired_rows.setter
    def num_repaired_rows(self, number: int) -> None:
        self._num_repaired += number - self.num_repaired_rows

    def sample(self, logits: Logits, rows: Sequence[SamplingRow]) -> list[SampledToken]:
        drawing = self.start(logits, rows)
        if drawing is not None:
            return drawing.take()
        x = _tensor(logits)
        if x.is_cpu:
            return self._host.sample(x, rows)
        parts = self._in_parts(
            [(0, len(rows))],
            lambda first, end: self._there.sample(x[first:end], rows[first:end]),
        )
        return [token for part in parts for token in part]

    def prompt_logprobs(self, logits: Logits, targets: Sequence[int], k: int) -> list[TopTokens]:
        x = _tensor(logits)
        chosen = self._host if x.is_cpu else self._there
        return chosen.prompt_logprobs(x, targets, k)

    def beam_candidates(
        self, logits: Logits, num: int, masks: Sequence[NDArray[np.bool_] | None] = ()
    ) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        x = _tensor(logits)
        chosen = self._host if x.is_cpu else self._there
        return chosen.beam_candidates(x, num, masks)

    @torch.inference_mode()
    def start(self, logits: Logits, rows: Sequence[SamplingRow]) -> Drawing | None:
        """:meth:`sample` without the wait; None for rows that the host must sample."""
        if not rows or any(row.params.logprobs is not None or is_adjusted(row) for row in rows):
            return None
        check_logits(logits, len(rows), self.vocab_size)
        x = _tensor(logits)
        ways = np.array([_way(row.params, self.vocab_size).value for row in rows])
        order = np.argsort(ways, kind="stable")
        is_sorted = bool((ways[:-1] <= ways[1:]).all())
        ends = np.searchsorted(ways[order], [way.value for way in _Way], side="right").tolist()
        spans = list(zip([0, *ends], ends, strict=False))

        def draw(first: int, end: int) -> tuple[Tensor, Tensor, Tensor]:
            which = order[first:end]
            part = x[first:end] if is_sorted else x[self._device.upload(which)]
            return self._draw_part(part, [rows[row] for row in which.tolist()])

        parts = self._in_parts(spans, draw)
        columns = [torch.cat(column) for column in zip(*parts, strict=True)]
        if not is_sorted:
            back = self._device.upload(np.argsort(order, kind="stable"))
            columns = [column[back] for column in columns]
        chosen, own, finite = columns
        return _Drawing(self, chosen, self._device.fetch((chosen, own, finite)))

    def _in_parts(
        self, spans: Sequence[tuple[int, int]], work: Callable[[int, int], _Result]
    ) -> list[_Result]:
        """Call ``work(first, end)`` for each part of the rows.

        Raises the device's out-of-memory error if even one row is too much.
        """
        done = []
        for span_first, span_end in spans:
            first = span_first
            while first < span_end:
                end = min(span_end, first + self.part_rows)
                try:
                    done.append(work(first, end))
                except self._device.memory_errors as error:
                    if end - first == 1:
                        raise
                    self.part_rows = (end - first) // 2
                    logger.warning("sampling %d rows at a time: %s", self.part_rows, error)
                else:
                    first = end
        return done

    def _draw_part(self, x: Tensor, rows: Sequence[SamplingRow]) -> tuple[Tensor, Tensor, Tensor]:
        """Rows of one way: tokens, their log-probabilities, and whether the logits were finite."""
        x = x.float()
        # Repair NaN and infinities without asking whether there are any, which would mean a wait.
        finite = x.amax(dim=-1).isfinite()
        x = x.nan_to_num(nan=-torch.inf, posinf=torch.finfo(x.dtype).max, neginf=-torch.inf)
        way = _way(rows[0].params, self.vocab_size)
        if way is _Way.GREEDY:
            return *_likeliest(x), finite
        x.masked_fill_((x.amax(dim=-1) == -torch.inf)[:, None], 0.0)
        chosen = self._draw_there(x, rows, way)
        own = x.gather(1, chosen[:, None])[:, 0] - x.logsumexp(dim=-1)
        return chosen, own, finite

    def _draw_there(self, x: Tensor, rows: Sequence[SamplingRow], way: _Way) -> Tensor:
        vocab = x.shape[1]
        numbers = uniforms(
            [row.seed for row in rows],
            [row.index for row in rows],
            [row.num_output for row in rows],
        )
        columns = np.array([_limits(row.params, vocab) for row in rows], dtype=np.float64)
        table = self._device.upload(np.column_stack([numbers, columns]))
        uniform, temperature, top_k, top_p, floor = table.unbind(1)
        divisor = temperature.float()[:, None]
        if way is _Way.WHOLE:
            return inverse_cdf_at((x / divisor).softmax(dim=-1), uniform)
        return _draw_cut_there(x / divisor, uniform, top_k, top_p, floor)


def _way(params: SamplingParams, vocab: int) -> _Way:
    if params.is_greedy:
        return _Way.GREEDY
    return _Way.CUT if is_cut(params, vocab) else _Way.WHOLE


def _likeliest(x: Tensor) -> tuple[Tensor, Tensor]:
    """The largest of each row, the first among equals, and its log-probability.

    One search, where argmax and logsumexp take two, and rows of -inf alone a third: they count as
    rows of zeros.
    """
    highest, chosen = x.max(dim=-1)
    own = (x - highest[:, None]).exp_().sum(dim=-1).log_().neg_()
    return chosen, own.masked_fill_(highest == -torch.inf, -math.log(x.shape[1]))


def _tensor(logits: Logits) -> Tensor:
    """A tensor over the memory of an array; tensors as they are."""
    return logits if isinstance(logits, Tensor) else torch.from_numpy(logits)


def _limits(params: SamplingParams, vocab: int) -> tuple[float, int, float, float]:
    """Temperature, top-k, top-p and the logarithm of min-p."""
    top_k = params.top_k if 0 < params.top_k < vocab else vocab
    floor = float(np.float32(math.log(params.min_p))) if params.min_p > 0.0 else -math.inf
    return params.temperature, top_k, params.top_p, floor


def _draw_cut_there(
    x: Tensor, uniform: Tensor, top_k: Tensor, top_p: Tensor, floor: Tensor
) -> Tensor:
    """:func:`.draw.kept` and the draw, on the device; among equals the lowest ids are kept.

    Memory limits how many rows are drawn at once, so tensors are dropped as early as possible.
    """
    vocab = x.shape[1]
    # Without top-k, the weight of the whole row counts, as in softmax.
    whole = 1.0 / x.softmax(dim=-1).amax(dim=-1).double()
    weights, ids = x.sort(dim=-1, descending=True, stable=True)
    del x
    highest = weights[:, :1].clone()
    keep = weights >= highest + floor.float()[:, None]
    weights = weights.sub_(highest).exp_()
    rank = torch.arange(vocab, device=weights.device)
    in_top_k = rank < top_k[:, None]
    upto = weights.masked_fill(~in_top_k, 0.0).double().cumsum_(dim=-1)
    total = torch.where(top_k < vocab, upto[:, -1], whole)
    within = (upto < (top_p * total)[:, None]).sum(dim=-1) + 1
    del upto
    within = torch.where(top_p < 1.0, within, vocab)
    keep &= in_top_k
    keep &= rank < within[:, None]
    last = ids.masked_fill(~keep, 0).amax(dim=-1)
    weights.masked_fill_(~keep, 0.0)
    by_id = torch.empty_like(weights).scatter_(1, ids, weights)
    del weights, ids, keep, in_top_k
    upto = by_id.double().cumsum_(dim=-1)
    found = torch.searchsorted(upto, (uniform * upto[:, -1])[:, None], right=True)[:, 0]
    return found.minimum(last)
