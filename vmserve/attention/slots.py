"""Slots for stock kernels, and what comes before attention: the rotation of q and k, and the write
of K and V. That is one launch of our own kernel where it runs, else torch's operations."""

from __future__ import annotations

import logging
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from vmserve.attention.base import RaggedBatch
from vmserve.attention.cuda.launcher import CudaLauncher, Launcher
from vmserve.attention.cuda.view import DeviceView
from vmserve.attention.cuda.write import KeyValueWriter, Places, check_inputs
from vmserve.attention.rotary import Rotary, rotate
from vmserve.errors import ConfigurationError, UnsupportedError
from vmserve.memory.views import ContiguousView

__all__ = ["SlotTensors", "SlotWriter", "slot_writer"]

logger = logging.getLogger(__name__)
#: Most tokens of all slots: kernels count them in 32 bits.
MAX_FLAT_TOKENS = 2**31


class SlotTensors:
    """The virtual view for kernels; made once.

    ``view.keys[layer]`` and ``view.values[layer]``: ``[slots, max_len, kv_heads, head_dim]``.
    ``flat_keys``, ``flat_values``: the same as one row of tokens, ``[tokens, kv_heads, head_dim]``;
    slot s starts at token ``s * slot_tokens``.

    Raises :class:`~vmserve.errors.ConfigurationError` for a view that is too large.
    """

    def __init__(self, view: ContiguousView) -> None:
        self.view = view
        like = view.keys[0]
        slots = like.shape[0]
        self.slot_tokens, rest = divmod(like.stride(0), like.stride(1))
        if rest:
            raise ConfigurationError("slots do not lie whole tokens apart: use another backend")
        if slots * self.slot_tokens >= MAX_FLAT_TOKENS:
            raise ConfigurationError(
                f"{slots} slots of {self.slot_tokens} tokens are {slots * self.slot_tokens:,}, and "
                f"kernels address less than {MAX_FLAT_TOKENS:,}: lower --max-num-seqs or "
                "--max-model-len"
            )
        self.flat_keys = tuple(self._flat(tensor) for tensor in view.keys)
        self.flat_values = tuple(self._flat(tensor) for tensor in view.values)

    def _flat(self, tensor: torch.Tensor) -> torch.Tensor:
        slots, num_tokens, heads, dim = tensor.shape
        _, *strides = tensor.stride()
        shape = ((slots - 1) * self.slot_tokens + num_tokens, heads, dim)
        return tensor.as_strided(shape, strides, tensor.storage_offset())


class SlotWriter(Protocol):
    """Writes a step's keys and values, layer by layer."""

    #: Type of the places on the device.
    dtype: torch.dtype

    def places(
        self, batch: RaggedBatch, num_rows: int | None = None
    ) -> NDArray[np.int32] | NDArray[np.int64]:
        """Where the batch's rows go, to be copied to the device.

        ``num_rows``: ``[2, num_rows]``; rows past the batch's change nothing in the slots.
        """
        ...

    def __call__(
        self,
        layer: int,
        places: torch.Tensor,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        rotary: Rotary | None,
    ) -> torch.Tensor:
        """Return the queries to attend with, contiguous. Of rows past the batch's they are junk."""
        ...


class KernelSlotWriter:
    """Writes with the kernel of the backend "cuda": bit for bit what torch's operations do.

    Its memory is torch's of the current stream: in a capture that of the graph.
    """

    dtype = torch.int32

    def __init__(self, launcher: Launcher, view: DeviceView) -> None:
        assert view.dtype is not None, "slots of codes are read by our own kernels alone"
        self._view = view
        self._variant = view.variant(view.dtype)
        self._write = KeyValueWriter(launcher, view)
        launcher.resident(self._variant)  # loaded now: not in a capture

    def places(self, batch: RaggedBatch, num_rows: int | None = None) -> NDArray[np.int32]:
        n = batch.num_tokens
        found = np.zeros((2, num_rows or n), dtype=np.int32)
        found[0, :n], found[1, :n] = batch.token_places, batch.positions
        found[0, n:] = -1  # no tokens
        return found

    def __call__(
        self,
        layer: int,
        places: torch.Tensor,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        rotary: Rotary | None,
    ) -> torch.Tensor:
        check_inputs(self._view, self._variant.dtype, q, k, v, rotary)
        rows, positions = places
        if len(rows) != len(q):
            raise ValueError(f"q has {len(q)} rows, the step {len(rows)}")
        to = Places(rows.data_ptr(), positions.data_ptr())
        return self._write(self._variant, layer, to, q, k, v, rotary).contiguous()


class TorchSlotWriter:
    """Writes with torch's operations, on any device.

    Rows past the batch's write what the first row writes, to the same place.
    """

    dtype = torch.int64

    def __init__(self, slots: SlotTensors) -> None:
        self._slots = slots

    def places(self, batch: RaggedBatch, num_rows: int | None = None) -> NDArray[np.int64]:
        """Tokens of the flat slots, and for ``num_rows`` the row that each one's come from."""
        written = batch.token_places * self._slots.slot_tokens + batch.positions
        if num_rows is None:
            return written[None]
        n = batch.num_tokens
        found = np.zeros((2, num_rows), dtype=np.int64)
        found[0], found[0, :n], found[1, :n] = written[0], written, np.arange(n)
        return found

    def __call__(
        self,
        layer: int,
        places: torch.Tensor,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        rotary: Rotary | None,
    ) -> torch.Tensor:
        if rotary is not None:
            q, k = rotate(q, rotary), rotate(k, rotary)
        written, *source = places
        for slots, rows in ((self._slots.flat_keys, k), (self._slots.flat_values, v)):
            chosen = rows.index_select(0, source[0]) if source else rows
            slots[layer].index_copy_(0, written, chosen)
        return q.contiguous()


def slot_writer(slots: SlotTensors, launcher: Launcher | None = None) -> SlotWriter:
    """The kernel if it can run on the slots' device, else torch's operations.

    ``launcher``: default: of the device, if it is a GPU.
    """
    device = slots.view.keys[0].device
    if launcher is None and device.type != "cuda":
        return TorchSlotWriter(slots)
    try:
        view = DeviceView(slots.view)
        if launcher is None:
            launcher = CudaLauncher(device)
            refusal = launcher.refusal(view.head_dim)
            if refusal is not None:
                raise UnsupportedError(refusal)
        return KernelSlotWriter(launcher, view)
    except UnsupportedError as error:
        logger.info("keys and values are written by torch's operations: %s", error)
        return TorchSlotWriter(slots)
