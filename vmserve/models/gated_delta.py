"""Layers with a gated delta rule in place of attention (Yang et al. 2024), in torch.

A state is a matrix ``S`` for each head, to which a token with key k, value v, decay a and rate b
adds ``k u^T`` after ``S <- a S``, with ``u = b (v - S^T k)``. Sequences with one token do that.
Prompts are computed in chunks: all u of a chunk solve one triangular system (section 3.3 there).
States and all that goes into them are float32.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch.nn import functional as F

from vmserve.attention.states import StepStates
from vmserve.attention.transfer import upload
from vmserve.models.blocks import Products
from vmserve.models.decoder_config import DeltaConfig

__all__ = ["DeltaBatch", "GatedDelta"]

#: Tokens whose u are computed at once.
CHUNK_TOKENS = 64
_NORM_EPS = 1e-6


@dataclass(frozen=True, slots=True)
class DeltaBatch:
    """What all delta layers of a step read: where the rows of each sequence lie.

    Rows of a convolution are counted through the windows of all sequences, then the step's tokens.
    """

    states: StepStates
    #: Rows of the states' pages, int64 ``[num_sequences]``.
    pages: torch.Tensor
    #: Sequences without a past, whose page has other numbers: bool ``[num_sequences, 1]``. None:
    #: there are none.
    fresh: torch.Tensor | None
    #: What the convolution of each token reads, and the next windows: int64 ``[taps, tokens]`` and
    #: ``[num_sequences, taps - 1]``.
    read: torch.Tensor
    kept: torch.Tensor
    #: Sequences with one token and those with several, and their tokens: ``[singles]`` and
    #: ``[others, longest]``, with the number of tokens for none.
    singles: tuple[torch.Tensor, torch.Tensor] | None
    others: tuple[torch.Tensor, torch.Tensor] | None

    @staticmethod
    def of(states: StepStates, taps: int) -> DeltaBatch:
        device = states.pages.device
        new, before = states.num_new, taps - 1
        tokens, starts = int(new.sum()), np.cumsum(new) - new
        numbers = np.arange(len(new))

        def rows(sequence: np.ndarray, position: np.ndarray) -> torch.Tensor:
            """``position``: from the step's first token of the sequence; before that < 0."""
            known = sequence * before + position + before
            computed = len(new) * before + starts[sequence] + position
            return upload(np.where(position < 0, known, computed), device)

        sequence_of = np.repeat(numbers, new)
        position_of = np.arange(tokens) - starts[sequence_of]
        some = numbers[new == 1]
        singles = (upload(some, device), upload(starts[some], device)) if len(some) else None
        some = numbers[new > 1]
        others = None
        if len(some):
            chunk = min(CHUNK_TOKENS, int(new.max()))
            steps = np.arange(-(-int(new.max()) // chunk) * chunk)
            padded = np.where(steps < new[some, None], starts[some, None] + steps, tokens)
            others = upload(some, device), upload(padded, device)
        fresh = states.num_past == 0
        return DeltaBatch(
            states,
            upload(states.rows, device),
            upload(fresh[:, None], device) if fresh.any() else None,
            rows(sequence_of[None], position_of + np.arange(-before, 1)[:, None]),
            rows(numbers[:, None], new[:, None] + np.arange(-before, 0)),
            singles,
            others,
        )

    def load(self, first: int, size: int) -> torch.Tensor:
        """``[num_sequences, size]``, a copy of some numbers of the states."""
        found = self.states.pages.narrow(1, first, size).index_select(0, self.pages)
        return found if self.fresh is None else found.masked_fill_(self.fresh, 0.0)

    def store(self, first: int, numbers: torch.Tensor) -> None:
        """``numbers``: contiguous; takes no memory, so it does not fail."""
        flat = numbers.view(len(numbers), -1)
        self.states.pages.narrow(1, first, flat.shape[1]).index_copy_(0, self.pages, flat)


@dataclass(frozen=True, slots=True)
class GatedDelta:
    """``x`` to what the output's product takes, ``[tokens, value_size]``.

    ``mixed``: q, k and v of all heads, and z. ``gates``: float32 ``[2 * value_heads, hidden]``, of
    the rates, then of the decays. ``taps``: float32 ``[taps, channels]``. ``decay_rate``, ``bias``:
    float32 ``[value_heads]``; ``norm``: float32 ``[value_dim]``. ``first``: of the layer's numbers
    in a page: the window ``[taps - 1, channels]``, then the state ``[value_heads, key, value]``.
    """

    config: DeltaConfig
    first: int
    mixed: Products
    gates: torch.Tensor
    taps: torch.Tensor
    decay_rate: torch.Tensor
    bias: torch.Tensor
    norm: torch.Tensor
    norm_eps: float

    def __call__(self, x: torch.Tensor, batch: DeltaBatch) -> torch.Tensor:
        sizes, tokens = self.config, len(x)
        mixed, z = self.mixed(x)
        rate, decay = F.linear(x.float(), self.gates).chunk(2, dim=-1)
        decay = self.decay_rate * F.softplus(decay + self.bias)
        before = sizes.taps - 1
        windows = batch.load(self.first, before * sizes.channels)
        rows = torch.cat((windows.view(-1, sizes.channels), mixed))
        window = rows[batch.kept]
        q, k, v = self._heads(F.silu(self._convolve(rows, batch)))
        first = self.first + before * sizes.channels
        shape = (-1, sizes.value_heads, sizes.key_dim, sizes.value_dim)
        states = batch.load(first, sizes.value_size * sizes.key_dim).view(shape)
        out = v.new_empty(tokens, sizes.value_heads, sizes.value_dim)
        given = (q, k, v, decay, rate.sigmoid())
        for chosen, rule in ((batch.singles, _token), (batch.others, _chunks)):
            if chosen is None:
                continue
            some, place = chosen
            # Behind the tokens a row of zeros, which leaves a state as it is.
            parts = [F.pad(part.flatten(1), (0, 0, 0, 1)) for part in given]
            parts = [
                part[place].view(*place.shape, *own.shape[1:])
                for part, own in zip(parts, given, strict=True)
            ]
            attended, state = rule(states[some], *parts)
            states[some] = state
            real = place < tokens
            out[place[real]] = attended[real]
        out = F.rms_norm(out, (sizes.value_dim,), self.norm, self.norm_eps)
        out = out.view(tokens, -1).mul_(F.silu(z.float())).to(x.dtype)
        batch.store(self.first, window)
        batch.store(first, states)
        return out

    def _convolve(self, rows: torch.Tensor, batch: DeltaBatch) -> torch.Tensor:
        out = rows[batch.read[0]].mul_(self.taps[0])
        for read, tap in zip(batch.read[1:], self.taps[1:], strict=True):
            out.addcmul_(rows[read], tap)
        return out

    def _heads(self, mixed: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """q, k and v ``[tokens, value_heads, …]``, with q and k as long as 1."""
        sizes = self.config
        parts = (sizes.key_size, sizes.key_size, sizes.value_size)
        q, k, v = torch.split_with_sizes(mixed, parts, dim=-1)
        shared = sizes.value_heads // sizes.key_heads
        q, k = (
            _normalised(part.view(-1, sizes.key_heads, sizes.key_dim)).repeat_interleave(shared, 1)
            for part in (q, k)
        )
        return q.mul_(sizes.key_dim**-0.5), k, v.view(-1, sizes.value_heads, sizes.value_dim)


def _normalised(x: torch.Tensor) -> torch.Tensor:
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + _NORM_EPS)


def _token(
    state: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    decay: torch.Tensor,
    rate: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """One token of each sequence: what is read, and the state, in the memory of ``state``.

    state: ``[sequences, heads, key, value]``; q, k: ``[sequences, heads, key]``; v likewise; decay
    (its logarithm) and rate: ``[sequences, heads]``.
    """
    state.mul_(decay.exp()[..., None, None])
    added = (v - (k.unsqueeze(-2) @ state).squeeze(-2)).mul_(rate.unsqueeze(-1))
    state.addcmul_(k.unsqueeze(-1), added.unsqueeze(-2))
    return (q.unsqueeze(-2) @ state).squeeze(-2), state


def _chunks(
    state: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    decay: torch.Tensor,
    rate: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The same for ``[sequences, tokens, heads, …]``, a multiple of a chunk if more than one."""
    tokens = q.shape[1]
    size = min(tokens, CHUNK_TOKENS)

    def cut(part: torch.Tensor) -> torch.Tensor:
        """``[chunks, sequences, heads, size, …]``"""
        chunks = part.view(len(part), -1, size, *part.shape[2:])
        return chunks.transpose(2, 3).transpose(0, 1)

    q, k, v = cut(q), cut(k), cut(v)
    rate = cut(rate).unsqueeze(-1)
    total = cut(decay).cumsum(-1)
    since = total.exp().unsqueeze(-1)
    hidden = torch.ones(size, size, dtype=torch.bool, device=q.device).triu_(1)
    # What a token of one row takes of what that of a column added; above the diagonal nothing.
    between = total.unsqueeze(-1) - total.unsqueeze(-2)
    between = between.masked_fill_(hidden, float("-inf")).exp_()
    system = (k @ k.mT).mul_(between).mul_(rate)
    # Without a state, u solve (1 + system) u = rate v; what a state adds to them is linear in it.
    wanted = torch.cat((v * rate, k * since * rate), dim=-1)
    solved = torch.linalg.solve_triangular(system, wanted, upper=False, unitriangular=True)
    values, keys = torch.split_with_sizes(solved, (v.shape[-1], k.shape[-1]), dim=-1)
    scores = (q @ k.mT).mul_(between)
    left = (total[..., -1:] - total).exp_().unsqueeze(-1)
    out = torch.empty_like(v)
    for at in range(len(q)):
        added = values[at] - keys[at] @ state
        out[at] = (q[at] * since[at]) @ state + scores[at] @ added
        state = state * since[at][..., -1:, :] + (k[at] * left[at]).mT @ added
    return out.transpose(0, 1).transpose(2, 3).flatten(1, 2), state
