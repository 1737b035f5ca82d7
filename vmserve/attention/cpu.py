"""Our C++ kernels over either view: decode, prefill and the write of K and V, on the CPU.

The kernels are in ``csrc/cpu``, for several instruction sets. Results have the same bits whatever
else is in the batch, however a prompt is cut, in either view, on any number of threads.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from vmserve import _core
from vmserve.attention.base import LayerAttention, RaggedBatch
from vmserve.errors import ConfigurationError, UnsupportedError
from vmserve.memory.layout import kind_of_layers
from vmserve.memory.views import ContiguousView, HostView, KVView, PagedView, TensorView
from vmserve.numbers.dtypes import DType
from vmserve.numbers.host_arrays import TensorTuple
from vmserve.system.threads import num_threads as threads

if TYPE_CHECKING:
    import torch

    from vmserve.attention.rotary import Rotary

__all__ = ["CPU_DTYPES", "ISA_VARIABLE", "CpuBackend", "CpuCall", "head_refusal", "tensor_tuple"]

MAX_HEAD_DIM = 576
#: Environment variable that forces an instruction set: generic, avx2 or avx512.
ISA_VARIABLE = "VMSERVE_CPU_ISA"

CPU_DTYPES = frozenset((DType.FLOAT32, DType.BFLOAT16))
_CACHE_DTYPES = CPU_DTYPES | {DType.INT8}


def head_refusal(head_dim: int, dtype: DType) -> str | None:
    """Return why the kernels cannot serve such heads; None if they can."""
    if dtype not in CPU_DTYPES:
        return f"its kernels have no {dtype}"
    if head_dim % 8 or head_dim > MAX_HEAD_DIM:
        return f"its kernels want a head_dim that is a multiple of 8 up to {MAX_HEAD_DIM}"
    return None


class CpuBackend:
    """Reads no position that is not written: ``read_slack_tokens`` is 0.

    ``num_threads``: None follows :func:`vmserve.system.threads.num_threads`. ``isa``: None is
    ``VMSERVE_CPU_ISA``, else the best that the processor has. Raises
    :class:`~vmserve.errors.ConfigurationError` for an instruction set that the processor lacks.
    """

    name = "cpu"
    read_slack_tokens = 0
    head_slack_tokens = 0
    windows = True
    softcap = True
    sinks = True
    latents = True
    kv_dtypes: frozenset[DType] = frozenset((DType.INT8,))
    views: tuple[type[KVView], ...] = (ContiguousView, PagedView, HostView)

    def __init__(self, *, num_threads: int | None = None, isa: str | None = None) -> None:
        self._num_threads = num_threads
        chosen = os.environ.get(ISA_VARIABLE, "") if isa is None else isa
        try:
            self._kernels = _core.CpuAttention(num_threads or threads(), chosen)
        except ValueError as error:
            reason = f"{ISA_VARIABLE}: {error}" if isa is None else str(error)
            raise ConfigurationError(reason) from None
        #: The last view of tensors, and its form for the kernels.
        self._view: tuple[TensorView, HostView] | None = None

    def refusal(self, head_dim: int, dtype: DType, kv_dtype: DType | None = None) -> str | None:
        return head_refusal(head_dim, dtype)

    @property
    def isa(self) -> str:
        """The instruction set of the kernels."""
        return self._kernels.isa

    def fold(self, tensor: torch.Tensor) -> int:
        """The exclusive or of the words of 8 bytes of a contiguous tensor.

        Reads its memory once, as fast as the threads of the kernels can: for benchmarks.
        """
        if self._num_threads is None:
            self._kernels.num_threads = threads()
        return self._kernels.fold(tensor.data_ptr(), tensor.nbytes)

    def bind(self, view: KVView, batch: RaggedBatch) -> CpuCall:
        """Lay out one step. The view's tensors must stay as they are while it is in use.

        Raises ``ValueError`` for a sequence that does not fit its place.
        """
        if self._num_threads is None:
            self._kernels.num_threads = threads()
        if isinstance(view, HostView):
            return CpuCall(self._kernels, view, batch)
        known = self._view
        if known is None or known[0] is not view:
            # NOTE: another thread may bind in between, so the kept view may be its view.
            known = self._view = view, _host_view(view)
        return CpuCall(self._kernels, known[1], batch)


class CpuCall:
    """One step; see :class:`vmserve.attention.base.AttentionCall`."""

    def __init__(self, kernels: _core.CpuAttention, view: HostView, batch: RaggedBatch) -> None:
        self._kernels = kernels
        self._view = view  # keeps the memory alive
        self.batch = _core.CpuBatch(
            view.core, batch.places, batch.num_past, batch.num_new, batch.state_places
        )

    def attend(
        self, spec: LayerAttention, q: TensorTuple, k: TensorTuple, v: TensorTuple, out: TensorTuple
    ) -> None:
        """:meth:`__call__` for heads that are rotated already, into ``out``."""
        window, softcap = spec.window or 0, spec.softcap or 0.0
        self._kernels.run(
            self.batch, spec.layer, q, k, v, None, out, spec.scale, window, softcap, 0
        )

    def __call__(
        self,
        spec: LayerAttention,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        rotary: Rotary | None = None,
        lse: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """See the protocol. ``lse``: float32 ``[tokens, q_heads]``, contiguous, receives the
        natural logarithm of the sum of the exponentials of each row's scores.

        Raises ``ValueError`` for shapes or strides that do not agree, before anything is written.
        """
        out = q.new_empty(*q.shape[:-1], spec.value_dim or q.shape[-1])
        self._kernels.run(
            self.batch,
            spec.layer,
            tensor_tuple(q),
            tensor_tuple(k),
            tensor_tuple(v if spec.value_dim is None else k),
            None if rotary is None else (tensor_tuple(rotary.cos), tensor_tuple(rotary.signed_sin)),
            tensor_tuple(out),
            spec.scale,
            0 if spec.window is None else spec.window,
            0.0 if spec.softcap is None else spec.softcap,
            0 if lse is None else _lse_address(lse, q),
            None if spec.sinks is None else tensor_tuple(spec.sinks),
        )
        return out


def _host_view(view: TensorView) -> HostView:
    """Addresses and strides of a view of tensors, for the kernels."""
    keys = [tensor_tuple(tensor, _CACHE_DTYPES) for tensor in view.keys]
    values = [tensor_tuple(tensor, _CACHE_DTYPES) for tensor in view.values]
    if isinstance(view, ContiguousView):
        return HostView(_core.CpuKvView(keys, values), view)
    tables = [kind.block_tables.numpy() for kind in view.tables]
    of_layers = kind_of_layers([kind.layers for kind in view.tables])
    return HostView(_core.CpuKvView(keys, values, tables, view.block_tokens, of_layers), view)


def tensor_tuple(tensor: torch.Tensor, dtypes: frozenset[DType] = CPU_DTYPES) -> TensorTuple:
    """``(address, dtype, shape, strides)`` of a CPU tensor, as the C++ core takes it."""
    dtype = str(tensor.dtype).removeprefix("torch.")
    if dtype not in dtypes or not tensor.is_cpu:
        raise UnsupportedError(
            f"a tensor of {tensor.dtype} on {tensor.device}: the cpu backend has kernels for "
            "float32 and bfloat16 on the CPU"
        )
    return tensor.data_ptr(), dtype, tuple(tensor.shape), tensor.stride()


def _lse_address(lse: torch.Tensor, q: torch.Tensor) -> int:
    if str(lse.dtype) != "torch.float32" or lse.shape != q.shape[:2] or not lse.is_contiguous():
        raise ValueError(
            f"lse is {lse.dtype} {list(lse.shape)}: it must be contiguous float32 "
            f"{list(q.shape[:2])}"
        )
    return lse.data_ptr()
