"""Addresses and strides of a view's tensors for the kernels."""

from __future__ import annotations

import torch

from vmserve.attention.base import RaggedBatch
from vmserve.attention.cuda.params import KvLayer
from vmserve.attention.cuda.variant import Variant
from vmserve.errors import UnsupportedError
from vmserve.memory.views import KVView, PagedView, tensor_view

__all__ = ["DeviceView"]

_UNIT_BYTES = 16
_LEAST_BLOCK = 16
#: Type of views whose scales follow the codes of a token's heads (numbers.dtypes.vector_bytes).
_CODES = torch.float8_e4m3fn


class DeviceView:
    """Checks a view once. Keeps it, and so its tensors, alive.

    Raises :class:`~vmserve.errors.UnsupportedError` for tensors that the kernels cannot address.
    """

    def __init__(self, given: KVView) -> None:
        view = self.view = tensor_view(given)
        first = view.keys[0]
        for tensor in (*view.keys, *view.values):
            # Kinds of layers have pages of their own, of which there may be more or fewer.
            if tensor.shape[1:] != first.shape[1:] or tensor.stride() != first.stride():
                raise UnsupportedError(
                    "the cuda backend wants K and V of all layers in tensors of one shape and one "
                    f"stride: {list(tensor.shape)} by {tensor.stride()} is not "
                    f"{list(first.shape)} by {first.stride()}"
                )
        self.kv_heads, self.head_dim = int(first.shape[2]), int(first.shape[3])
        self.device = first.device
        self.has_codes = first.dtype == _CODES
        if self.has_codes and first.stride(2) != self.head_dim:
            raise UnsupportedError(
                "the cuda backend wants the codes of a token's heads side by side"
            )
        #: The type of q, k and v. None: the view has codes, which go with either type.
        self.dtype = None if self.has_codes else first.dtype
        self.variant(self.dtype or torch.bfloat16)
        self._strides = self._byte_strides(first)
        self._pointers = [
            (keys.data_ptr(), values.data_ptr())
            for keys, values in zip(view.keys, view.values, strict=True)
        ]
        if any(address % _UNIT_BYTES for pair in self._pointers for address in pair):
            raise UnsupportedError("the cuda backend wants K and V aligned to 16 bytes")
        self.block_tokens = 0
        if isinstance(view, PagedView):
            self.block_tokens = view.block_tokens
            self._check_blocks(int(first.shape[1]))

    def variant(self, dtype: torch.dtype) -> Variant:
        """The kernels for q, k and v of this type.

        Raises :class:`~vmserve.errors.UnsupportedError` if there are none.
        """
        refusal = Variant.refusal(self.head_dim, dtype)
        if refusal is not None:
            raise UnsupportedError(f"the cuda backend: {refusal}")
        return Variant(dtype, self.head_dim, isinstance(self.view, PagedView), self.has_codes)

    def _byte_strides(self, tensor: torch.Tensor) -> tuple[int, int, int]:
        size = tensor.element_size()
        page, token, head, element = (stride * size for stride in tensor.stride())
        if element != size or any(stride % _UNIT_BYTES for stride in (page, token, head)):
            raise UnsupportedError(
                "the cuda backend wants contiguous heads at multiples of 16 bytes, not strides of "
                f"{tensor.stride()}"
            )
        return page, token, head

    def _check_blocks(self, page_tokens: int) -> None:
        tokens = self.block_tokens
        if tokens < _LEAST_BLOCK or tokens & (tokens - 1):
            raise UnsupportedError(
                f"blocks of {tokens} tokens: the cuda backend wants a power of two of "
                f"{_LEAST_BLOCK} or more (--block-size)"
            )
        if page_tokens % tokens:
            raise ValueError(f"pages of {page_tokens} tokens are not whole blocks of {tokens}")

    @property
    def num_layers(self) -> int:
        return len(self._pointers)

    def check(self, batch: RaggedBatch) -> None:
        """Raises ``ValueError`` for a sequence that does not fit its place."""
        if not batch.num_sequences:
            return
        first = self.view.keys[0]
        ends = batch.num_past + batch.num_new
        if isinstance(self.view, PagedView):
            rows, blocks = self.view.block_tables.shape
            room = int(blocks) * self.block_tokens
        else:
            rows, room = first.shape[0], int(first.shape[1])
        if int(ends.max()) > room:
            raise ValueError(
                f"a sequence of {int(ends.max())} tokens: its place has room for {room}"
            )
        if not 0 <= int(batch.places.min()) <= int(batch.places.max()) < rows:
            raise ValueError(f"place {int(batch.places.max())} is outside 0 .. {int(rows) - 1}")
        if int(batch.num_new.min()) < 1 or int(batch.num_past.min()) < 0:
            raise ValueError("every sequence brings one token or more, and has no less than 0 past")

    def fill(self, to: KvLayer, layer: int, table: int, table_width: int) -> None:
        """``table``: its address on the device. Raises ``ValueError`` for a layer there is not."""
        if not 0 <= layer < self.num_layers:
            raise ValueError(f"layer {layer} is outside 0 .. {self.num_layers - 1}")
        to.keys, to.values = self._pointers[layer]
        to.page_stride, to.token_stride, to.head_stride = self._strides
        to.table, to.table_width = table, table_width
        to.block_shift, to.blocks_per_page = 30, 1
        if isinstance(self.view, PagedView):
            page_tokens = int(self.view.keys[0].shape[1])
            to.block_shift = self.block_tokens.bit_length() - 1
            to.blocks_per_page = page_tokens // self.block_tokens
            if to.page_stride == page_tokens * to.token_stride:
                # Blocks lie at one distance all over the arena, so no division is needed.
                to.page_stride, to.blocks_per_page = self.block_tokens * to.token_stride, 1
