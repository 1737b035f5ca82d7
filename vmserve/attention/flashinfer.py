"""FlashInfer (Ye et al., MLSys 2025) over either view: its kernels for paged caches, unmodified.

They take a table of pages for each sequence. In the paged regime that is the block table. A slot is
its own blocks in order, so its table is computed. One call attends prompts and decodes together:
FlashInfer splits long sequences along the keys by its own plan, made once a step for each kind of
layer.
"""

from __future__ import annotations

import importlib
import importlib.util
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from vmserve.attention.base import LayerAttention, RaggedBatch
from vmserve.attention.rotary import Rotary, rotate
from vmserve.attention.transfer import upload
from vmserve.errors import UnsupportedError
from vmserve.memory.views import ContiguousView, KVView, PagedView, tensor_view
from vmserve.numbers.dtypes import DType

__all__ = ["BlockTensors", "FlashInferBackend"]

#: Memory for results of FlashInfer's splits along the keys, as its documentation advises.
WORKSPACE_BYTES = 128 << 20
#: Block size for slots, which are whole pages of whole blocks.
SLOT_BLOCK_TOKENS = 16
HEAD_DIMS = (64, 128, 256)
_HALF = (DType.FLOAT16, DType.BFLOAT16)
_MODULE = "flashinfer"


class BlockTensors:
    """A view in blocks of equal distance; made once.

    ``keys[layer]`` and ``values[layer]``: ``[blocks, block_tokens, kv_heads, head_dim]``, and
    ``flat_keys``, ``flat_values``: the same as one row of tokens.

    Raises :class:`~vmserve.errors.UnsupportedError` where blocks do not lie that way.
    """

    def __init__(self, given: KVView) -> None:
        view = self.view = tensor_view(given)
        row_tokens = view.keys[0].shape[1]
        row_stride, token_stride = view.keys[0].stride()[:2]
        is_slots = isinstance(view, ContiguousView)
        self.block_tokens = SLOT_BLOCK_TOKENS if is_slots else view.block_tokens  # type: ignore[union-attr]
        self.row_blocks, rest = divmod(row_stride, token_stride * self.block_tokens)
        if rest or (not is_slots and row_stride != row_tokens * token_stride):
            raise UnsupportedError(
                "FlashInfer wants the blocks of slots or pages at equal distances, and "
                f"{row_stride:,} elements are not whole blocks of {self.block_tokens} tokens: "
                "use another attention backend"
            )
        self.keys = tuple(map(self._blocks, view.keys))
        self.values = tuple(map(self._blocks, view.values))
        self.flat_keys = tuple(map(self._flat, view.keys))
        self.flat_values = tuple(map(self._flat, view.values))

    def _num_blocks(self, tensor: torch.Tensor) -> int:
        rows, row_tokens = tensor.shape[:2]
        return (rows - 1) * self.row_blocks + -(-row_tokens // self.block_tokens)

    def _blocks(self, tensor: torch.Tensor) -> torch.Tensor:
        _, _, heads, dim = tensor.shape
        _, *strides = tensor.stride()
        shape = (self._num_blocks(tensor), self.block_tokens, heads, dim)
        return tensor.as_strided(
            shape, (self.block_tokens * strides[0], *strides), tensor.storage_offset()
        )

    def _flat(self, tensor: torch.Tensor) -> torch.Tensor:
        _, _, heads, dim = tensor.shape
        _, *strides = tensor.stride()
        shape = (self._num_blocks(tensor) * self.block_tokens, heads, dim)
        return tensor.as_strided(shape, strides, tensor.storage_offset())

    def blocks(
        self, window: int | None, places: NDArray[np.int64], indices: NDArray[np.int64]
    ) -> NDArray[np.int64]:
        """The blocks at these indices of the sequences in these slots, or rows of the tables, in
        layers with such a window."""
        if isinstance(self.view, ContiguousView):
            return places * self.row_blocks + indices
        tables = self.view.tables_for(window).cpu().numpy()
        return tables[places, indices].astype(np.int64)


@dataclass(frozen=True)
class LayerKind:
    """What a plan depends on besides the batch."""

    scale: float
    window: int | None
    softcap: float | None
    q_heads: int


@dataclass(frozen=True)
class _Tables:
    """A batch for FlashInfer: int32, on the host except ``indices``."""

    q_starts: torch.Tensor
    starts: torch.Tensor
    indices: torch.Tensor
    last_tokens: torch.Tensor

    @staticmethod
    def of(
        tensors: BlockTensors, batch: RaggedBatch, window: int | None, device: torch.device
    ) -> _Tables:
        lengths = batch.num_past + batch.num_new
        first = np.zeros_like(lengths)
        if window is not None:
            # Positions that no query sees may be unmapped. Queries are counted from the end.
            first = np.maximum(batch.num_past - window + 1, 0) // tensors.block_tokens
        counts = -(-lengths // tensors.block_tokens) - first
        starts = np.concatenate([[0], np.cumsum(counts)])
        within = np.arange(starts[-1]) + np.repeat(first - starts[:-1], counts)
        indices = tensors.blocks(window, np.repeat(batch.places, counts), within)
        q_starts = np.concatenate([batch.starts, [batch.num_tokens]])
        last = (lengths - 1) % tensors.block_tokens + 1
        q, kv, last_tokens = (
            torch.from_numpy(a.astype(np.int32)) for a in (q_starts, starts, last)
        )
        return _Tables(q, kv, upload(indices.astype(np.int32), device), last_tokens)


class FlashInferBackend:
    """``module``: replaces the package ``flashinfer``, for tests.

    Kernels of the family ``fa2``, which are used here, load no keys past a sequence's length: each
    load of a row is conditional. Steps are captured in pieces (``runner/graphs.py``), because plans
    are made by the host.
    """

    name = "flashinfer"
    read_slack_tokens = 0
    head_slack_tokens = 0
    windows = True
    softcap = True
    sinks = False
    latents = False
    kv_dtypes: frozenset[DType] = frozenset()
    views: tuple[type[KVView], ...] = (PagedView, ContiguousView)

    def __init__(self, module: Any = None) -> None:
        self._module = module
        self._tensors: BlockTensors | None = None
        self._workspace: torch.Tensor | None = None
        #: Wrappers used in turns: a plan's memory is still read while the next step is planned.
        self._wrappers: tuple[dict[LayerKind, Any], dict[LayerKind, Any]] = ({}, {})
        self._turn = 0

    def refusal(self, head_dim: int, dtype: DType, kv_dtype: DType | None = None) -> str | None:
        if self._module is None:
            if importlib.util.find_spec(_MODULE) is None:
                return "the package flashinfer is not installed: pip install flashinfer-python"
            self._module = importlib.import_module(_MODULE)
        if dtype not in _HALF:
            return f"FlashInfer has no {dtype}"
        if head_dim not in HEAD_DIMS:
            return f"FlashInfer has heads of {', '.join(map(str, HEAD_DIMS))}"
        return None

    def bind(self, view: KVView, batch: RaggedBatch) -> FlashInferCall:
        """Raises :class:`~vmserve.errors.UnsupportedError` for a view that it cannot read."""
        if self._tensors is None or self._tensors.view is not view:
            self._tensors = BlockTensors(view)
        self._turn = 1 - self._turn
        return FlashInferCall(self, self._tensors, batch, self._turn)

    def wrapper(self, kind: LayerKind, turn: int, device: torch.device) -> Any:
        """FlashInfer's plan object for such layers, one for every other step."""
        wrappers = self._wrappers[turn]
        if kind not in wrappers:
            if self._workspace is None:  # zeroed, as FlashInfer needs it at first
                self._workspace = torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=device)
            make = self._module.BatchPrefillWithPagedKVCacheWrapper
            wrappers[kind] = make(self._workspace, "NHD", backend="fa2")
        return wrappers[kind]


class FlashInferCall:
    """One step; see :class:`vmserve.attention.base.AttentionCall`."""

    def __init__(
        self, backend: FlashInferBackend, tensors: BlockTensors, batch: RaggedBatch, turn: int
    ) -> None:
        self._backend = backend
        self._tensors = tensors
        self._turn = turn
        self._device = tensors.keys[0].device
        #: Places of the new tokens, by window of layers that have pages of their own.
        self._written: dict[int | None, torch.Tensor] = {}
        self._batch = batch
        self._planned: dict[LayerKind, Any] = {}

    def _places(self, window: int | None) -> torch.Tensor:
        view, width = self._tensors.view, self._tensors.block_tokens
        own = window if isinstance(view, PagedView) and view.has_own_tables(window) else None
        if own not in self._written:
            positions = self._batch.positions
            blocks = self._tensors.blocks(own, self._batch.token_places, positions // width)
            self._written[own] = upload(blocks * width + positions % width, self._device)
        return self._written[own]

    def _plan(self, spec: LayerAttention, q: torch.Tensor) -> Any:
        kind = LayerKind(spec.scale, spec.window, spec.softcap, q.shape[1])
        if kind not in self._planned:
            wrapper = self._backend.wrapper(kind, self._turn, self._device)
            tables = _Tables.of(self._tensors, self._batch, kind.window, self._device)
            _, width, kv_heads, head_dim = self._tensors.keys[0].shape
            wrapper.plan(
                tables.q_starts,
                tables.starts,
                tables.indices,
                tables.last_tokens,
                kind.q_heads,
                kv_heads,
                head_dim,
                width,
                causal=True,  # aligned at the end: the queries are the last tokens
                sm_scale=kind.scale,
                window_left=-1 if kind.window is None else kind.window - 1,
                logits_soft_cap=kind.softcap,
                q_data_type=q.dtype,
                kv_data_type=self._tensors.keys[0].dtype,
            )
            self._planned[kind] = wrapper
        return self._planned[kind]

    def __call__(
        self,
        spec: LayerAttention,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        rotary: Rotary | None = None,
    ) -> torch.Tensor:
        if rotary is not None:
            q, k = rotate(q, rotary), rotate(k, rotary)
        tensors, layer = self._tensors, spec.layer
        written = self._places(spec.window)
        tensors.flat_keys[layer].index_copy_(0, written, k)
        tensors.flat_values[layer].index_copy_(0, written, v)
        wrapper = self._plan(spec, q)
        output: torch.Tensor = wrapper.run(
            q.contiguous(), (tensors.keys[layer], tensors.values[layer])
        )
        return output
