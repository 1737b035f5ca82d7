"""What one rank of several has where torch computes: every second matrix is divided by its inputs.

Products of a rank's inputs are parts of a sum over the ranks (Megatron-LM, 2019, section 3), whose
order is not that of one rank: other bits than one rank's, unlike :mod:`vmserve.models.slices`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import torch
from torch.nn import functional as F

from vmserve.errors import UnsupportedError
from vmserve.models.collective import Collective
from vmserve.models.decoder_config import DecoderConfig
from vmserve.models.plan import (
    AttentionPlan,
    DecoderPlan,
    ExpertsPlan,
    Matrix,
    MlpPlan,
    StackedPlan,
)
from vmserve.models.slices import Slices, refusal_of_ranks

__all__ = ["Part", "Shard", "Together", "share"]

#: Unit of outputs: rows of halves then begin where kernels of GPUs want them.
_UNIT = 16


@dataclass(frozen=True, slots=True)
class Part:
    """Ranges of a tensor along one axis, one after the other."""

    axis: int
    ranges: tuple[slice, ...]

    def of(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """Views of the ranges."""
        return [tensor.narrow(self.axis, r.start, r.stop - r.start) for r in self.ranges]


def share(count: int, rank: int, size: int) -> slice:
    """The outputs of one rank, of ``count``; none is without."""
    unit = _UNIT if count >= _UNIT * size else 1
    units = count // unit
    first, end = (units * each // size * unit for each in (rank, rank + 1))
    return slice(first, count if rank == size - 1 else end)


@dataclass(frozen=True)
class _Even:
    """Divides as :class:`~vmserve.models.slices.Slices` expects it."""

    rank: int
    size: int

    def slice(self, count: int) -> tuple[int, int]:
        part = share(count, self.rank, self.size)
        return part.start, part.stop - part.start


class Shard:
    """One rank's share of a decoder.

    Norms, routers and learned positions are whole on each rank. Key-value heads that are fewer than
    the ranks are those of several. Biases after sums are rank 0's alone.
    """

    def __init__(self, config: DecoderConfig, rank: int, size: int) -> None:
        """Raises :class:`~vmserve.errors.UnsupportedError` where the model cannot be divided."""
        if (reason := refusal_of_ranks(config, size)) is not None:
            raise UnsupportedError(reason)
        self._whole = config
        self._rank, self._size = rank, size
        self._slices = Slices(config, _Even(rank, size))
        #: Tokens whose rows of the embedding and of the head the rank has.
        self.tokens = self._share(config.vocab_size)
        #: Number of logits of each rank.
        self.widths = [_length(share(config.vocab_size, each, size)) for each in range(size)]
        experts = config.experts
        if experts is not None:
            experts = replace(
                experts,
                size=_length(self._share(experts.size)),
                shared_size=_length(self._share(experts.shared_size)),
            )
        #: Configuration of the rank's own heads and matrices.
        self.config = replace(
            config,
            q_heads=self._slices.q_heads,
            kv_heads=self._slices.kv_heads,
            mlp_size=max(1, _length(self._share(config.mlp_size))),
            experts=experts,
        )
        self._zeroed: set[str] = set()
        #: Parts of the tensors in a checkpoint; tensors without one are whole.
        self.parts: Mapping[str, Part] = dict(self._find())

    def zeroed(self, name: str) -> bool:
        """Whether a bias is another rank's to add."""
        return name in self._zeroed

    def _share(self, count: int) -> slice:
        return share(count, self._rank, self._size)

    def _find(self) -> Iterator[tuple[str, Part]]:
        plan, rows = DecoderPlan.of(self._whole), Part(0, (self.tokens,))
        yield plan.embedding.name, rows
        if plan.head is not None:
            yield plan.head.name, rows
        for layer in plan.layers:
            assert isinstance(layer.mixer, AttentionPlan), "refusal_of_ranks() said so"
            yield from self._attention(layer.mixer)
            if isinstance(layer.mlp, MlpPlan):
                yield from self._mlp(layer.mlp)
            else:
                yield from self._experts(layer.mlp)

    def _attention(self, plan: AttentionPlan) -> Iterator[tuple[str, Part]]:
        q, k, v = self._slices.qkv
        heads = self._slices.query_heads
        assert q is not None
        assert k is not None
        assert v is not None
        assert heads is not None
        if len(plan.qkv) == 1:
            q_size, k_size, _ = plan.sizes
            side_by_side = (q, _moved(k, q_size), _moved(v, q_size + k_size))
            yield from self._outputs(plan.qkv[0], side_by_side)
        else:
            for matrix, own in zip(plan.qkv, (q, k, v), strict=True):
                yield from self._outputs(matrix, (own,))
        yield from self._inputs(plan.output, q)
        if plan.sinks is not None:
            yield plan.sinks.name, Part(0, (heads,))

    def _mlp(self, plan: MlpPlan) -> Iterator[tuple[str, Part]]:
        own = self._share(plan.size)
        for matrix in plan.ups:
            # One matrix may have gate and up, one above the other.
            halves = range(0, matrix.outputs, plan.size)
            yield from self._outputs(matrix, tuple(_moved(own, first) for first in halves))
        yield from self._inputs(plan.down, own)

    def _experts(self, plan: ExpertsPlan) -> Iterator[tuple[str, Part]]:
        for mlp in (*plan.experts, *([] if plan.shared is None else [plan.shared])):
            yield from self._mlp(mlp)
        if plan.stacked is not None:
            yield from self._stacked(plan.stacked)

    def _stacked(self, plan: StackedPlan) -> Iterator[tuple[str, Part]]:
        """Parts of ``[experts, in, out]``; outputs alternate between gate and up."""
        own = self._share(plan.down.shape[1])
        both = (slice(2 * own.start, 2 * own.stop),)
        yield plan.gate_up.name, Part(2, both)
        yield plan.gate_up_bias.name, Part(1, both)
        yield plan.down.name, Part(1, (own,))
        if self._rank:
            self._zeroed.add(plan.down_bias.name)

    def _outputs(self, matrix: Matrix, ranges: tuple[slice, ...]) -> Iterator[tuple[str, Part]]:
        yield matrix.weight, Part(int(matrix.transposed), ranges)
        if matrix.bias is not None:
            yield matrix.bias, Part(0, ranges)

    def _inputs(self, matrix: Matrix, own: slice) -> Iterator[tuple[str, Part]]:
        yield matrix.weight, Part(int(not matrix.transposed), (own,))
        if self._rank and matrix.bias is not None:
            self._zeroed.add(matrix.bias)


@dataclass(frozen=True, slots=True)
class Together:
    """What a rank's decoder does with the others. Sums are of rows in the type of the model."""

    ranks: Collective
    shard: Shard

    def embed(self, token_ids: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """Rows of the embedding, of which ``rows`` are the rank's; one number and zeros are added,
        so that the sum is exact."""
        own = token_ids - self.shard.tokens.start
        elsewhere = (own < 0) | (own >= len(rows))
        found = F.embedding(own.masked_fill(elsewhere, 0), rows)
        return self.ranks.sum(found.masked_fill_(elsewhere[:, None], 0))

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        return self.ranks.sum(x)

    def logits(self, own: torch.Tensor) -> torch.Tensor:
        """Logits of all tokens, on the first rank."""
        return self.ranks.gather(own, self.shard.widths)


def _length(part: slice) -> int:
    return int(part.stop - part.start)


def _moved(part: slice, by: int) -> slice:
    return slice(part.start + by, part.stop + by)
