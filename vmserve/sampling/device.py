"""Sampling where the logits are: of the common requests, only tokens come back from a GPU.

The same numbers decide as in :mod:`.draw`, from the same stream, so that a seed gives the same
tokens (but for the last bit of an exponential, which a GPU may round the other way).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vmserve.sampling.adjust import is_adjusted
from vmserve.sampling.draw import inverse_cdf_at, is_cut
from vmserve.sampling.rng import uniforms
from vmserve.sampling.rows import argmax
from vmserve.sampling.sampler import Sampler, SamplingRow, check_logits
from vmserve.sampling.tokens import SampledToken, TopTokens
from vmserve.sampling.torch_sampler import TorchSampler

if TYPE_CHECKING:
    from vmserve.sampling.params import SamplingParams
    from vmserve.sampling.tokens import Logits

__all__ = ["DeviceSampler", "Drawing"]


class Transfers(Protocol):
    """What the sampler needs of the device."""

    def upload(self, array: NDArray[Any], out: Tensor | None = None) -> Tensor: ...

    def fetch(self, tensors: Sequence[Tensor]) -> Fetched: ...


class Fetched(Protocol):
    def take(self) -> list[NDArray[Any]]: ...


class Drawing:
    """Tokens that are drawn on the device: kernels may read them before the host does."""

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


class DeviceSampler:
    """A sampler that waits for the device once a step, for two numbers a row; see
    :class:`~vmserve.sampling.tokens.TokenSampler`.

    Rows that ask for log-probabilities, biases, masks or penalties send the batch another way: by
    torch's operations, or on the host by our own.
    """

    def __init__(self, vocab_size: int, device: Transfers) -> None:
        self.vocab_size = vocab_size
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
        return self._host.sample(x, rows) if x.is_cpu else self._there.sample(x, rows)

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
        """:meth:`sample` without the wait; None for rows that are the host's to sample."""
        if not rows or any(row.params.logprobs is not None or is_adjusted(row) for row in rows):
            return None
        check_logits(logits, len(rows), self.vocab_size)
        x = _tensor(logits).float()
        # What is not a number is repaired without asking: nobody waits to know whether there is.
        finite = x.amax(dim=-1).isfinite()
        x = x.nan_to_num(nan=-torch.inf, posinf=torch.finfo(x.dtype).max, neginf=-torch.inf)
        x = x.masked_fill_((x.amax(dim=-1) == -torch.inf)[:, None], 0.0)
        logprobs = x.log_softmax(dim=-1)
        if all(row.params.is_greedy for row in rows):
            chosen = argmax(x)
        else:
            chosen = self._draw_there(x, rows)
        own = logprobs.gather(1, chosen[:, None])[:, 0]
        return Drawing(self, chosen, self._device.fetch((chosen, own, finite)))

    def _draw_there(self, x: Tensor, rows: Sequence[SamplingRow]) -> Tensor:
        vocab = x.shape[1]
        numbers = uniforms(
            [row.seed for row in rows],
            [row.index for row in rows],
            [row.num_output for row in rows],
        )
        columns = np.array([_limits(row.params, vocab) for row in rows], dtype=np.float64)
        table = self._device.upload(np.column_stack([numbers, columns]))
        uniform, temperature, top_k, top_p, floor = table.unbind(1)
        x = x / temperature.float()[:, None]
        cut = [row.params.is_greedy or is_cut(row.params, vocab) for row in rows]
        if not any(cut):
            return inverse_cdf_at(x.softmax(dim=-1), uniform)
        chosen = _draw_cut_there(x, uniform, top_k, top_p, floor)
        if all(cut):
            return chosen
        whole = inverse_cdf_at(x.softmax(dim=-1), uniform)
        return torch.where(self._device.upload(np.array(cut)), chosen, whole)


def _tensor(logits: Logits) -> Tensor:
    """Of an array, over its memory."""
    return logits if isinstance(logits, Tensor) else torch.from_numpy(logits)


def _limits(params: SamplingParams, vocab: int) -> tuple[float, int, float, float]:
    """Temperature, top-k, top-p and the logarithm of min-p; the likeliest token is a top-k of 1."""
    if params.is_greedy:
        return 1.0, 1, 1.0, -math.inf
    top_k = params.top_k if 0 < params.top_k < vocab else vocab
    floor = float(np.float32(math.log(params.min_p))) if params.min_p > 0.0 else -math.inf
    return params.temperature, top_k, params.top_p, floor


def _draw_cut_there(
    x: Tensor, uniform: Tensor, top_k: Tensor, top_p: Tensor, floor: Tensor
) -> Tensor:
    """As ``draw.kept`` and what follows it: of equal logits at a limit the lowest ids are kept."""
    vocab = x.shape[1]
    ordered, ids = x.sort(dim=-1, descending=True, stable=True)
    highest = ordered[:, :1]
    weights = (ordered - highest).exp()
    rank = torch.arange(vocab, device=x.device)
    keep = rank < top_k[:, None]
    upto = weights.double().masked_fill(~keep, 0.0).cumsum(dim=-1)
    # Without top-k the whole weight counts, as softmax has it.
    peak = x.softmax(dim=-1).amax(dim=-1).double()
    total = torch.where(top_k < vocab, upto[:, -1], 1.0 / peak)
    within = (upto < (top_p * total)[:, None]).sum(dim=-1) + 1
    within = torch.where(top_p < 1.0, within, vocab)
    keep &= rank < within[:, None]
    keep &= ordered >= highest + floor.float()[:, None]
    by_id = torch.zeros_like(weights).scatter_(1, ids, weights.masked_fill(~keep, 0.0))
    upto = by_id.double().cumsum(dim=-1)
    targets = uniform * upto[:, -1]
    found = torch.searchsorted(upto, targets[:, None], right=True)[:, 0]
    kept_ids = torch.zeros_like(keep).scatter_(1, ids, keep)
    last = torch.where(kept_ids, rank, 0).amax(dim=-1)
    return found.minimum(last)
