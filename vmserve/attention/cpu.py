"""Our C++ kernels over either view: decode, prefill and the write of K and V, on the CPU.

``csrc/kernels/cpu`` has the kernels, for the instruction sets that the processor may have. The
result has the same bits whatever else is in the batch, in either view, on any number of threads.
"""

from __future__ import annotations

import os

import torch

from vmserve import _core
from vmserve.attention.base import (
    ContiguousView,
    KVView,
    LayerAttention,
    PagedView,
    RaggedBatch,
)
from vmserve.attention.rotary import Rotary
from vmserve.errors import UnsupportedError

__all__ = ["ISA_VARIABLE", "CpuBackend", "CpuCall", "head_refusal", "tensor_tuple"]

MAX_HEAD_DIM = 256
#: Forces an instruction set: generic, avx2 or avx512.
ISA_VARIABLE = "VMSERVE_CPU_ISA"

_DTYPES = {torch.float32: "float32", torch.bfloat16: "bfloat16"}
_TensorTuple = tuple[int, str, tuple[int, ...], tuple[int, ...]]


def head_refusal(head_dim: int, dtype: torch.dtype) -> str | None:
    """Why the kernels cannot serve such heads; None if they can."""
    if dtype not in _DTYPES:
        return f"its kernels have no {str(dtype).removeprefix('torch.')}"
    if head_dim % 8 or head_dim > MAX_HEAD_DIM:
        return f"its kernels want a head_dim that is a multiple of 8 up to {MAX_HEAD_DIM}"
    return None


class CpuBackend:
    """Reads no position that is not written: ``read_slack_tokens`` is 0.

    ``num_threads``: None follows ``torch.get_num_threads()``. ``isa``: None is what
    ``VMSERVE_CPU_ISA`` says, else the best that the processor has. Raises ``ValueError`` for an
    instruction set that it has not.
    """

    name = "cpu"
    read_slack_tokens = 0
    softcap = True
    views: tuple[type[KVView], ...] = (ContiguousView, PagedView)

    def __init__(self, *, num_threads: int | None = None, isa: str | None = None) -> None:
        self._num_threads = num_threads
        chosen = os.environ.get(ISA_VARIABLE, "") if isa is None else isa
        self._kernels = _core.CpuAttention(num_threads or torch.get_num_threads(), chosen)
        self._view: _NativeView | None = None

    def refusal(self, head_dim: int, dtype: torch.dtype) -> str | None:
        return head_refusal(head_dim, dtype)

    @property
    def isa(self) -> str:
        """The instruction set whose kernels run."""
        return self._kernels.isa

    def bind(self, view: KVView, batch: RaggedBatch) -> CpuCall:
        """Lay out one step. The view's tensors must stay as they are while it is in use.

        Raises ``ValueError`` for a sequence that does not fit its place.
        """
        native = self._view
        if native is None or native.view is not view:
            # NOTE: another thread may bind in between: the one kept may be its view.
            native = self._view = _NativeView(view)
        if self._num_threads is None:
            self._kernels.num_threads = torch.get_num_threads()
        return CpuCall(self._kernels, native, batch)


class CpuCall:
    """One step; see :class:`vmserve.attention.base.AttentionCall`."""

    def __init__(self, kernels: _core.CpuAttention, view: _NativeView, batch: RaggedBatch) -> None:
        self._kernels = kernels
        self._view = view  # keeps the tensors alive
        self.batch = _core.CpuBatch(view.core, batch.places, batch.num_past, batch.num_new)

    def __call__(
        self,
        spec: LayerAttention,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        rotary: Rotary | None = None,
        lse: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """As the protocol says. ``lse``: float32 ``[tokens, q_heads]``, contiguous, to be filled
        with the natural logarithm of the sum of the exponentials of each row's scores.

        Raises ``ValueError`` for shapes or strides that do not agree, before anything is written.
        """
        out = torch.empty(q.shape, dtype=q.dtype)
        self._kernels.run(
            self.batch,
            spec.layer,
            tensor_tuple(q),
            tensor_tuple(k),
            tensor_tuple(v),
            None if rotary is None else (tensor_tuple(rotary.cos), tensor_tuple(rotary.signed_sin)),
            tensor_tuple(out),
            spec.scale,
            0 if spec.window is None else spec.window,
            0.0 if spec.softcap is None else spec.softcap,
            0 if lse is None else _lse_address(lse, q),
        )
        return out


class _NativeView:
    """Addresses and strides of a view, for the kernels. Made once."""

    def __init__(self, view: KVView) -> None:
        self.view = view
        keys = [tensor_tuple(tensor) for tensor in view.keys]
        values = [tensor_tuple(tensor) for tensor in view.values]
        if isinstance(view, ContiguousView):
            self.core = _core.CpuKvView(keys, values)
        else:
            self.core = _core.CpuKvView(keys, values, view.block_tables.numpy(), view.block_tokens)


def tensor_tuple(tensor: torch.Tensor) -> _TensorTuple:
    """``(address, dtype, shape, strides)`` of a CPU tensor, as the C++ core takes it."""
    dtype = _DTYPES.get(tensor.dtype)
    if dtype is None or tensor.device.type != "cpu":
        raise UnsupportedError(
            f"a tensor of {tensor.dtype} on {tensor.device}: the cpu backend has kernels for "
            "float32 and bfloat16 on the CPU"
        )
    return tensor.data_ptr(), dtype, tuple(tensor.shape), tensor.stride()


def _lse_address(lse: torch.Tensor, q: torch.Tensor) -> int:
    if lse.dtype != torch.float32 or lse.shape != q.shape[:2] or not lse.is_contiguous():
        raise ValueError(
            f"lse is {lse.dtype} {list(lse.shape)}: it must be contiguous float32 "
            f"{list(q.shape[:2])}"
        )
    return lse.data_ptr()
