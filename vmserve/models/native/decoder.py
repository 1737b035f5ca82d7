"""The forward pass, behind one call."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, cast

import numpy as np
from numpy.typing import NDArray

from vmserve import _core
from vmserve.attention.base import AttentionCall
from vmserve.attention.cpu import CpuCall
from vmserve.errors import UnsupportedError
from vmserve.models.hidden import HiddenRows
from vmserve.models.rope import HostRotations
from vmserve.models.stored_weight import StoredWeight, Table
from vmserve.numbers.dtypes import DType
from vmserve.numbers.host_arrays import array_tuple
from vmserve.system.threads import num_threads

__all__ = ["MIN_POSITIONS", "NativeDecoder", "RankGroup", "TimedPart"]

RankGroup = _core.RankGroup
#: Positions whose cosines and sines are made at once.
MIN_POSITIONS = 1024


class TimedPart(Protocol):
    """The attention of one regime's sequences in a step; ``seconds`` are added to."""

    call: AttentionCall
    seconds: float


class _Parts(Protocol):
    @property
    def parts(self) -> Sequence[TimedPart]: ...


class NativeDecoder:
    """The forward pass of :class:`vmserve.models.decoder.Decoder`, behind one call.

    Activations are float32 whatever the weights are: a half-precision checkpoint loses nothing but
    the rounding of its keys, values and attention outputs to the KV cache's type.
    """

    def __init__(
        self,
        core: _core.CpuDecoder,
        rotary: Sequence[HostRotations],
        dtype: DType,
        embedding: StoredWeight,
        table: Table | None,
    ) -> None:
        self._core = core
        self._rotary = rotary
        self._rotations: list[tuple[NDArray[Any], NDArray[Any]]] = []  # read in place
        self._dtype = dtype
        self._embedding = embedding
        self._table = table  # its file stays open through the embedding

    @property
    def weight_bytes(self) -> int:
        """Bytes of the packed weights and the embedding."""
        return self.packed_bytes + self._embedding.num_bytes

    @property
    def packed_bytes(self) -> int:
        """Bytes of the weights of all products."""
        return self._core.weight_bytes

    @property
    def row_bytes(self) -> int:
        """What a decoded token alone reads of them: all but the experts that are not chosen."""
        return self._core.row_weight_bytes

    @property
    def expert_reads(self) -> int:
        """Experts whose weights were read, added up over layers and steps."""
        return self._core.expert_reads

    @property
    def expert_rows(self) -> int:
        """Rows that experts computed, added up likewise."""
        return self._core.expert_rows

    @property
    def delta_seconds(self) -> float:
        """Time in delta layers between their projections, added up likewise."""
        return self._core.delta_seconds

    @property
    def row_type(self) -> str:
        """What activations are rounded to where they enter a linear layer: "float32" (not at
        all), "int16" or "int8" before quantized weights, or "bfloat16" where the model computes in
        that and the processor multiplies pairs of them."""
        return self._core.row_type

    def forward(
        self,
        token_ids: NDArray[np.int64],
        positions: NDArray[np.int64],
        attention: AttentionCall,
        logits_rows: NDArray[np.int64] | None = None,
        hidden: HiddenRows | None = None,
    ) -> NDArray[np.float32]:
        """Logits ``[rows, vocab]``; ``attention`` must be the cpu backend's.

        token_ids, positions: ``[tokens]``; logits_rows: the rows of the batch that go through the
        LM head (None: all of them, in order); hidden: takes the final hidden states of the last of
        these rows, which then have no logits.

        Raises :class:`~vmserve.errors.UnsupportedError` for another backend's, and ``ValueError``
        for token ids or rows that are out of range.
        """
        parts = cast("_Parts", attention).parts
        batches = [_native_batch(part.call) for part in parts]
        self._rotate_up_to(max((batch.last_position for batch in batches), default=0))
        threads = num_threads()
        if self._core.num_threads != threads:
            self._core.num_threads = threads
        logits, seconds, states = self._core.forward(
            token_ids,
            batches,
            logits_rows,
            0 if hidden is None else hidden.num_rows,
            None if self._table is not None else self._rows(token_ids),
        )
        if hidden is not None:
            hidden.put(states)
        for part, taken in zip(parts, seconds, strict=True):
            part.seconds += taken
        return logits

    def _rows(self, token_ids: NDArray[np.int64]) -> NDArray[np.float32]:
        """Rows of an embedding that the core cannot read. It refuses ids that are out of range."""
        last = self._core.vocab_size - 1
        return self._embedding.rows(np.clip(token_ids, 0, last))

    def _rotate_up_to(self, position: int) -> None:
        """Cosines and sines are kept for as many positions as any sequence has had, and no more:
        for a context of 128k tokens they would be 64 MiB."""
        known = self._core.num_positions
        if position < known:
            return
        wanted = max(position + 1, 2 * known, MIN_POSITIONS)
        tables = [rotary.upto(wanted, self._dtype) for rotary in self._rotary]
        self._core.set_rotations(
            [(array_tuple(cos, self._dtype), array_tuple(sin, self._dtype)) for cos, sin in tables]
        )
        self._rotations = tables


def _native_batch(call: AttentionCall) -> _core.CpuBatch:
    if not isinstance(call, CpuCall):
        raise UnsupportedError(
            "the native decoder attends with the cpu backend alone: use --linear-backend torch"
        )
    return call.batch
