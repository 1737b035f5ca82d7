"""The interface between models and attention: one call per layer.

The KV cache is written and read behind :class:`AttentionCall`. A model passes the queries, keys and
values of a *ragged* batch (all sequences' new tokens, one after the other) and gets the attention
output back. Which view of the memory is used (the virtual slots or the block-table arena) is
decided before the model runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Protocol, runtime_checkable

import numpy as np
from numpy.typing import ArrayLike, NDArray

from vmserve.memory.views import KVView
from vmserve.numbers.values import step_value

if TYPE_CHECKING:
    import torch

    from vmserve.attention.rotary import Rotary
    from vmserve.numbers.dtypes import DType

__all__ = [
    "AttentionBackend",
    "AttentionCall",
    "AttentionPlan",
    "LayerAttention",
    "PlansAhead",
    "RaggedBatch",
    "lacking",
]


@step_value
class RaggedBatch:
    """The sequences of one step, in the order of their tokens in the ragged batch.

    Sequence ``i`` has ``num_new[i]`` tokens at positions ``num_past[i] ...`` and owns rows
    ``starts[i] : starts[i] + num_new[i]`` of q, k and v. It is in slot, or in row of the block
    tables, ``places[i]``.
    """

    #: Slots, or rows of the block tables: int64 ``[num_sequences]``.
    places: NDArray[np.int64]
    num_past: NDArray[np.int64]
    num_new: NDArray[np.int64]
    num_tokens: int
    #: Rows of the states' table in either view; None: ``places``.
    state_places: NDArray[np.int64] | None = None

    @property
    def num_sequences(self) -> int:
        return len(self.places)

    @property
    def is_single(self) -> bool:
        """Whether each sequence has one new token."""
        return self.num_tokens == len(self.places)

    # Computed when first needed: only some kernels use these.

    @cached_property
    def starts(self) -> NDArray[np.int64]:
        """int64 ``[num_sequences]``"""
        starts: NDArray[np.int64] = np.cumsum(self.num_new) - self.num_new
        return starts

    # These are read once or twice a step: to keep them costs a lock, which is more than a copy.

    @property
    def token_places(self) -> NDArray[np.int64]:
        """``[num_tokens]``: the place of each row of the ragged batch."""
        return self.places.copy() if self.is_single else np.repeat(self.places, self.num_new)

    @property
    def positions(self) -> NDArray[np.int64]:
        """``[num_tokens]``: the position of each row."""
        if self.is_single:
            return self.num_past.copy()
        shift = np.repeat(self.num_past - self.starts, self.num_new)
        positions: NDArray[np.int64] = np.arange(self.num_tokens) + shift
        return positions

    @staticmethod
    def build(
        places: ArrayLike,
        num_past: ArrayLike,
        num_new: ArrayLike,
        state_places: ArrayLike | None = None,
    ) -> RaggedBatch:
        """Lay the sequences out one after the other. Every ``num_new`` must be positive."""
        new = np.asarray(num_new, dtype=np.int64)
        return RaggedBatch(
            places=np.asarray(places, dtype=np.int64),
            num_past=np.asarray(num_past, dtype=np.int64),
            num_new=new,
            num_tokens=int(new.sum()),
            state_places=None if state_places is None else np.asarray(state_places, np.int64),
        )


@dataclass(frozen=True)
class LayerAttention:
    """One layer's parameters of attention.

    ``window``: how many positions a query sees, itself included (None: all). ``softcap``: scores
    become ``softcap * tanh(score / softcap)`` (None: unchanged). ``has_sinks``: each query head has
    the score of one more token, whose value is 0, in ``sinks`` (float32 ``[q_heads]``) where torch
    computes.
    """

    layer: int
    scale: float
    window: int | None = None
    softcap: float | None = None
    has_sinks: bool = False
    #: Values are the last ``value_dim`` components of the keys' rows and are stored there only.
    #: None: values have rows of their own.
    value_dim: int | None = None
    sinks: torch.Tensor | None = field(default=None, compare=False, repr=False)


class _Able(Protocol):
    """A backend or a kernel, which says what it can do."""

    windows: bool
    softcap: bool
    sinks: bool


def lacking(able: _Able, layers: Sequence[LayerAttention]) -> str | None:
    """What layers of a model need and ``able`` has not; None if it has all."""
    for has, needs, what in (
        (able.windows, any(layer.window is not None for layer in layers), "windows"),
        (able.softcap, any(layer.softcap is not None for layer in layers), "softcaps"),
        (able.sinks, any(layer.has_sinks for layer in layers), "sinks"),
    ):
        if needs and not has:
            return f"it has no {what}"
    return None


class AttentionCall(Protocol):
    """Attention for one step's batch and view; the model calls it once per layer."""

    def __call__(
        self,
        spec: LayerAttention,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        rotary: Rotary | None = None,
    ) -> torch.Tensor:
        """Rotate q and k by ``rotary`` (if any), write k and v into the cache, attend causally.

        q: ``[tokens, q_heads, head_dim]``; k, v: ``[tokens, kv_heads, head_dim]``; the last
        dimension is contiguous. Returns ``[tokens, q_heads, head_dim]``, or of ``value_dim``.
        """
        ...


class AttentionBackend(Protocol):
    """A kernel family over one or both views of the KV memory."""

    name: str
    #: Tokens after a sequence's end that the kernels may read. Pages up to there must stay mapped
    #: and hold finite numbers.
    read_slack_tokens: int
    #: Tokens before a window's first one that the kernels may read: whole tiles.
    head_slack_tokens: int
    #: Whether the backend supports ``LayerAttention.window``. Every backend supports scales.
    windows: bool
    #: Whether the backend supports ``LayerAttention.softcap``.
    softcap: bool
    #: Whether the backend supports ``LayerAttention.sinks``.
    sinks: bool
    #: Whether the backend supports ``LayerAttention.value_dim``.
    latents: bool
    #: KV cache types besides that of q, k and v.
    kv_dtypes: frozenset[DType]

    @property
    def views(self) -> tuple[type[KVView], ...]:
        """The views that :meth:`bind` takes."""
        ...

    def refusal(self, head_dim: int, dtype: DType, kv_dtype: DType | None = None) -> str | None:
        """Return why the kernels cannot serve such heads; None if they can.

        ``kv_dtype``: one of :attr:`kv_dtypes`, where it is not ``dtype``.
        """
        ...

    def bind(self, view: KVView, batch: RaggedBatch) -> AttentionCall:
        """Prepare one step (masks, index tensors) and return the per-layer call."""
        ...


class AttentionPlan(Protocol):
    """A step over buffers of fixed size and address, for CUDA graphs."""

    def update(self, batch: RaggedBatch) -> None:
        """Put ``batch`` into the buffers; asynchronous, on the current stream.

        Raises ``ValueError`` for a batch that does not fit.
        """
        ...

    def call(
        self,
        spec: LayerAttention,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        rotary: Rotary | None = None,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """:class:`AttentionCall` that can be captured.

        Rows of q, k and v past the batch's change no page, and their results mean nothing.
        """
        ...


@runtime_checkable
class PlansAhead(Protocol):
    """A backend whose steps CUDA graphs can capture."""

    #: Whether a captured step is frozen to ``max_len``, by which its kernels split the keys. False:
    #: one plan serves every length equally well.
    plans_by_length: bool

    def plan_capacity(
        self,
        view: KVView,
        *,
        max_seqs: int,
        max_tokens: int,
        max_new: int,
        max_len: int,
        q_heads: int,
        windows: Sequence[int | None],
        dtype: DType | None = None,
    ) -> AttentionPlan:
        """Make a plan for batches up to these sizes; ``max_new``, ``max_len``: of one sequence.

        ``dtype``: of q, k and v (default: that of the KV cache).
        ``windows``: those of the layers. Plans of one backend share working memory: only one may be
        in use at a time, in the order of a stream.
        """
        ...
