"""What of a model's matrices one rank of several has: outputs of each, and heads of attention."""

from __future__ import annotations

from typing import Protocol

from vmserve.errors import UnsupportedError
from vmserve.models.decoder_config import DecoderConfig

__all__ = ["Division", "Slices", "refusal_of_ranks"]


def refusal_of_ranks(config: DecoderConfig, size: int) -> str | None:
    """Return why so many ranks cannot divide a model; None if they can."""
    if config.latent is not None or config.delta is not None or config.output_gate:
        return "layers of latents, delta layers and gated attention are not divided among ranks"
    if config.q_heads % size or (config.kv_heads % size and size % config.kv_heads):
        fitting = [
            each
            for each in range(1, config.q_heads + 1)
            if config.q_heads % each == 0
            and (config.kv_heads % each == 0 or each % config.kv_heads == 0)
        ]
        return (
            f"{config.q_heads} query heads and {config.kv_heads} key-value heads are divided among "
            f"{', '.join(map(str, fitting))} ranks, not {size}"
        )
    sizes = [config.mlp_size_of(spec.layer) for spec in config.layers]
    if config.experts is not None and config.experts.shared_size:
        sizes.append(config.experts.shared_size)
    if min(*sizes, config.hidden_size, config.vocab_size) < size:
        return f"it has matrices of fewer outputs than {size} ranks"
    return None


class Division(Protocol):
    """How outputs are divided among ranks: ``_core.RankGroup``, or a rule."""

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    def slice(self, count: int) -> tuple[int, int]:
        """The first of the rank's outputs, of ``count``, and their number."""


class Slices:
    """Slices of one rank; without a group everything.

    Key-value heads that are fewer than the ranks are those of several ranks.
    """

    def __init__(self, config: DecoderConfig, group: Division | None) -> None:
        """Raises :class:`~vmserve.errors.UnsupportedError` where the model cannot be divided."""
        self._group = group
        size = 1 if group is None else group.size
        if group is not None and (reason := refusal_of_ranks(config, size)) is not None:
            raise UnsupportedError(reason)
        self.q_heads = config.q_heads // size
        self.kv_heads = max(1, config.kv_heads // size)
        rank = 0 if group is None else group.rank
        self._first_q = rank * self.q_heads
        self._first_kv = rank * config.kv_heads // size
        self._head_dim = config.head_dim

    def outputs(self, count: int) -> slice | None:
        """The outputs of a matrix with ``count`` of them; None: all."""
        if self._group is None:
            return None
        first, own = self._group.slice(count)
        return slice(first, first + own)

    @property
    def query_heads(self) -> slice | None:
        """The slice of what there is for each query head."""
        return None if self._group is None else slice(self._first_q, self._first_q + self.q_heads)

    @property
    def qkv(self) -> tuple[slice | None, slice | None, slice | None]:
        """Outputs of q, k and v."""
        if self._group is None:
            return None, None, None
        q, kv = (
            slice(first * self._head_dim, (first + heads) * self._head_dim)
            for first, heads in ((self._first_q, self.q_heads), (self._first_kv, self.kv_heads))
        )
        return q, kv, kv
