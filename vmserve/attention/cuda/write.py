"""Rotate q and k and write K and V of new tokens into the cache, in one launch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch

from vmserve.attention.cuda.launcher import Launcher
from vmserve.attention.cuda.params import WriteArgs
from vmserve.attention.cuda.variant import Variant
from vmserve.attention.cuda.view import DeviceView
from vmserve.attention.rotary import Rotary

__all__ = ["KeyValueWriter", "Places", "check_inputs", "check_queries"]

_UNIT_BYTES = 16
#: Bytes of a row of heads per block of the kernel: one unit for each thread.
_BLOCK_BYTES = 128 * _UNIT_BYTES
#: Blocks that are enough: about as many as a device runs at once. Above, threads have more units.
_ENOUGH_BLOCKS = 1024


class Places(NamedTuple):
    """Addresses on the device of where tokens go.

    ``rows``, ``positions``: int32 ``[tokens]``; a row of the block tables, or a slot; rows of -1
    are no tokens. ``table``: int32, ``table_width`` wide; of the paged view only.
    """

    rows: int
    positions: int
    table: int = 0
    table_width: int = 0


class KeyValueWriter:
    """The kernel ``vms_write``, on the current stream, for either view."""

    def __init__(self, launcher: Launcher, view: DeviceView) -> None:
        self._launcher = launcher
        self._view = view

    def __call__(
        self,
        variant: Variant,
        layer: int,
        places: Places,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        rotary: Rotary | None,
        rotated: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return the queries that attention reads: ``q`` itself if there is no rotation.

        The tensors: as :func:`check_inputs` wants them. ``rotated``: contiguous, of q's shape
        (default: a new tensor); of rows that are no tokens it is left as it is.
        """
        args, size = WriteArgs(), q.element_size()
        self._view.fill(args.kv, layer, places.table, places.table_width)
        args.rows, args.positions = places.rows, places.positions
        args.k, args.v = k.data_ptr(), v.data_ptr()
        args.k_token_stride, args.k_head_stride = k.stride(0) * size, k.stride(1) * size
        args.v_token_stride, args.v_head_stride = v.stride(0) * size, v.stride(1) * size
        args.q_heads, args.kv_heads, args.rotary_dim = q.shape[1], k.shape[1], 0
        if rotary is not None:
            if rotated is None:
                rotated = torch.empty(q.shape, dtype=q.dtype, device=q.device)
            args.q, args.q_out = q.data_ptr(), rotated.data_ptr()
            args.q_token_stride, args.q_head_stride = q.stride(0) * size, q.stride(1) * size
            args.cos, args.sin = rotary.cos.data_ptr(), rotary.signed_sin.data_ptr()
            args.cos_stride = rotary.cos.stride(0) * size
            args.sin_stride = rotary.signed_sin.stride(0) * size
            args.rotary_dim = rotary.cos.shape[-1]
            q = rotated
        if q.shape[0]:
            heads = 2 * k.shape[1] + (0 if rotary is None else q.shape[1])
            args.pieces = _pieces(q.shape[0], heads * q.shape[2] * size)
            self._launcher.launch(variant, "vms_write", q.shape[0] * args.pieces, args)
        return q


def _pieces(tokens: int, token_bytes: int) -> int:
    """How many blocks share a token."""
    return max(1, min(math.ceil(token_bytes / _BLOCK_BYTES), _ENOUGH_BLOCKS // tokens))


def check_inputs(
    view: DeviceView,
    dtype: torch.dtype,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    rotary: Rotary | None,
) -> None:
    """Raises ``ValueError`` for what the kernels for ``dtype`` would misread."""
    check_queries(view, dtype, q)
    tokens = q.shape[0]
    shape = (tokens, view.kv_heads, view.head_dim)
    for name, tensor in (("k", k), ("v", v)):
        _check_rows(tensor, name, dtype, shape, view.device)
    if rotary is None:
        return
    dim = rotary.cos.shape[-1]
    if dim % 2 or not 0 < dim <= view.head_dim:
        raise ValueError(f"a rotation of {dim} of {view.head_dim} components: it must be even")
    for name, tensor in (("cos", rotary.cos), ("sin", rotary.signed_sin)):
        if tensor.shape != (tokens, 1, dim) or tensor.stride(2) != 1:
            raise ValueError(f"{name} is {list(tensor.shape)}, not {[tokens, 1, dim]}, contiguous")
        if tensor.dtype != dtype:
            raise _other_dtype(name, tensor, dtype)


def check_queries(view: DeviceView, dtype: torch.dtype, q: torch.Tensor) -> None:
    """:func:`check_inputs` of q alone."""
    if q.ndim != 3 or q.shape[2] != view.head_dim or q.shape[1] % view.kv_heads or not q.shape[1]:
        raise ValueError(
            f"q is {list(q.shape)}: it must be [tokens, a multiple of {view.kv_heads}, "
            f"{view.head_dim}]"
        )
    _check_rows(q, "q", dtype, q.shape, view.device)


def _check_rows(
    tensor: torch.Tensor,
    name: str,
    dtype: torch.dtype,
    shape: Sequence[int],
    device: torch.device,
) -> None:
    if tuple(tensor.shape) != tuple(shape):
        raise ValueError(f"{name} is {list(tensor.shape)}, not {list(shape)}")
    if tensor.dtype != dtype:
        raise _other_dtype(name, tensor, dtype)
    if tensor.device != device:
        raise ValueError(f"{name} is on {tensor.device}, the KV cache on {device}")
    size = tensor.element_size()
    strides = (tensor.stride(0) * size, tensor.stride(1) * size)
    if tensor.stride(2) != 1 or any(
        number % _UNIT_BYTES for number in (*strides, tensor.data_ptr())
    ):
        raise ValueError(
            f"{name}: rows of heads must be contiguous and lie at multiples of 16 bytes; its "
            f"strides are {tensor.stride()}"
        )


def _other_dtype(name: str, tensor: torch.Tensor, dtype: torch.dtype) -> ValueError:
    return ValueError(
        f"{name} is {tensor.dtype}, the kernels are for {dtype}: they differ in dtype"
    )
