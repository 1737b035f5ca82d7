"""What ``--attention-backend auto`` makes of stock FlashAttention over slots on a GPU.

Each part of a step goes to the kernel that is best for it, of those that can serve the model. On an
H100, with the heads of Llama 3 8B (32 and 8, of 128, bfloat16):

* **Decodes** are our own kernels' (``csrc/cuda``): a layer takes 21, 54 and 189 microseconds with
  8, 32 and 128 sequences of 1024 tokens, where FlashAttention 2 in torch takes 31, 67 and 227.
* **Prompts** are FlashAttention 3's where it is installed: 626 to 647 TFLOP/s.
* Else **the beginning of a prompt** is cuDNN's, through torch: 474 to 577 TFLOP/s, where
  FlashAttention 2 in torch has 274 to 333, and our own kernels 208 to 256.
* What is left, such as the end of a prompt, and tokens after cached ones, is the chosen stock
  kernel's.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from vmserve.attention.base import (
    AttentionBackend,
    AttentionPlan,
    LayerAttention,
    RaggedBatch,
    lacking,
)
from vmserve.attention.cuda.backend import CudaPagedBackend
from vmserve.attention.cuda.launcher import Launcher
from vmserve.attention.flash import (
    HALF,
    Capacity,
    FlashAttn3,
    FlashBackend,
    PartCall,
    SlotKernel,
    Slots,
    TorchFlash,
    activated,
)
from vmserve.attention.slots import SlotTensors
from vmserve.errors import UnsupportedError
from vmserve.numbers.dtypes import DType

__all__ = ["CudaDecodes", "CudnnPrompts", "by_phases"]

logger = logging.getLogger(__name__)
#: Lengths that cuDNN gets are multiples of this: 13 of them in a step's budget of 8192 tokens. A
#: plan of cuDNN is for one length. torch makes it when a thread first has a length, which the step
#: waits for, and keeps it for good. That was not measured here. Others had 42 ms on a GB200
#: (pytorch/pytorch#191576) and 400 on an H20 (sgl-project/sglang#4650), as long as a prompt of some
#: thousand tokens takes. torch's own remedy (TORCH_CUDNN_SDPA_AVOID_RECOMPILE) wants keys of one
#: layer side by side, which those of slots are not.
WHOLE_TOKENS = 512
#: Least tokens for cuDNN. Below, the numbers above say that an 8B model's prompt is 3 % shorter at
#: most.
LEAST_TOKENS = 2048
_CUDNN_HEAD_DIM = 128
#: Most numbers between two keys. Keys further apart were not tried with cuDNN: 32 bits cannot count
#: to them.
_NEAR_NUMBERS = 2**31


class CudaDecodes:
    """Sequences with one new token, by our own kernels: a :class:`SlotKernel`.

    Captured steps are wholly theirs, as with the backend "cuda".
    """

    plans_by_length = CudaPagedBackend.plans_by_length
    one_by_one = False

    def __init__(self, backend: CudaPagedBackend | None = None) -> None:
        own = self._backend = backend or CudaPagedBackend()
        self.name = own.name
        self.read_slack_tokens = own.read_slack_tokens
        self.head_slack_tokens = own.head_slack_tokens
        self.windows, self.softcap, self.sinks = own.windows, own.softcap, own.sinks

    @property
    def launcher(self) -> Launcher:
        return self._backend.launcher

    def refusal(self, head_dim: int, dtype: DType) -> str | None:
        return self._backend.refusal(head_dim, dtype)

    def unreadable(self, slots: SlotTensors) -> str | None:
        try:
            self._backend.check_view(slots.view)
        except UnsupportedError as error:
            return str(error)
        return None

    def takes(self, batch: RaggedBatch) -> NDArray[np.int64]:
        return np.where(batch.num_new == 1, 1, 0)

    def bind(self, slots: SlotTensors, batch: RaggedBatch) -> PartCall:
        call = self._backend.bind(slots.view, batch)
        return lambda q, spec: call.attend(spec, q)

    def plan(self, slots: Slots, capacity: Capacity) -> AttentionPlan:
        return self._backend.plan_capacity(
            slots.tensors.view,
            max_seqs=capacity.max_tokens,
            max_new=1,
            **capacity._asdict(),
        )


class CudnnPrompts:
    """The beginnings of prompts, by cuDNN's attention through torch: a :class:`SlotKernel`.

    A prompt without a past, cut to a multiple of :data:`WHOLE_TOKENS`, is as many queries as keys:
    the plain causal case, which cuDNN reads in its slot, also with fewer heads of K than of Q. Once
    it fails, ``other`` does what it should have done, and it takes nothing any more.

    ``op``: replaces ``aten::_scaled_dot_product_cudnn_attention``, for tests.
    """

    name = "cudnn"
    read_slack_tokens = 0
    head_slack_tokens = 0
    windows = False
    softcap = False
    sinks = False
    plans_by_length = True
    one_by_one = True
    launcher: Launcher | None = None

    def __init__(self, other: SlotKernel, op: Callable[..., Any] | None = None) -> None:
        self._other = other
        self._op: Callable[..., Any] = (
            op or torch.ops.aten._scaled_dot_product_cudnn_attention.default
        )
        self._is_tried = self._has_failed = False

    def refusal(self, head_dim: int, dtype: DType) -> str | None:
        if dtype not in HALF:
            return f"cuDNN's attention has no {dtype}"
        if head_dim % 8 or head_dim > _CUDNN_HEAD_DIM:
            return f"it wants a head_dim that is a multiple of 8 up to {_CUDNN_HEAD_DIM}"
        if not torch.cuda.is_available():
            return "torch sees no GPU here"
        major, _ = torch.cuda.get_device_capability()
        if major != 9:
            return f"it was measured on compute capability 9 alone, this GPU has {major}"
        if not torch.backends.cudnn.is_available():  # type: ignore[no-untyped-call]
            return "this torch has no cuDNN"
        return None

    def unreadable(self, slots: SlotTensors) -> str | None:
        return None

    def takes(self, batch: RaggedBatch) -> NDArray[np.int64]:
        if self._has_failed:
            return np.zeros_like(batch.num_new)
        whole = batch.num_new // WHOLE_TOKENS * WHOLE_TOKENS
        return np.where((batch.num_past == 0) & (whole >= LEAST_TOKENS), whole, 0)

    def bind(self, slots: SlotTensors, batch: RaggedBatch) -> PartCall:
        place, length = int(batch.places[0]), int(batch.num_new[0])
        is_near = length * slots.view.keys[0].stride(1) < _NEAR_NUMBERS
        instead: list[PartCall] = []

        def attend(q: torch.Tensor, spec: LayerAttention) -> torch.Tensor:
            if is_near and not self._has_failed:
                keys, values = (
                    tensors[spec.layer][place, :length].transpose(0, 1).unsqueeze(0)
                    for tensors in (slots.view.keys, slots.view.values)
                )
                try:
                    return self._attend(q, keys, values, spec.scale)
                except RuntimeError as error:  # cuDNN's own words, or torch's
                    self._has_failed = True
                    logger.warning(
                        "cuDNN's attention fails for a prompt of %d tokens, and %s goes on "
                        "without it: %s", length, self._other.name, error,
                    )  # fmt: skip
            if not instead:
                instead.append(self._other.bind(slots, batch))
            return instead[0](q, spec)

        return attend

    def _attend(
        self, q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float
    ) -> torch.Tensor:
        """q: ``[rows, q_heads, head_dim]``; keys, values: ``[1, kv_heads, rows, head_dim]``."""
        queries = q.unsqueeze(0).transpose(1, 2)
        if not self._is_tried:
            _check(queries, keys, values)
            self._is_tried = True
        # What scaled_dot_product_attention calls when it has chosen cuDNN. To make it choose that,
        # a flag of the whole process would have to be set.
        output: torch.Tensor = self._op(
            queries, keys, values,
            None,  # attn_bias
            False,  # compute_log_sumexp
            0.0,  # dropout_p
            True,  # is_causal
            False,  # return_debug_mask
            scale=scale,
        )[0]  # fmt: skip
        return output.transpose(1, 2).squeeze(0)

    def plan(self, slots: Slots, capacity: Capacity) -> AttentionPlan:
        raise UnsupportedError("cuDNN's attention takes no decodes")


def _check(queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> None:
    """Raises ``RuntimeError`` where torch would not choose cuDNN: the operator does not ask."""
    if not queries.is_cuda:
        return
    grouped = queries.shape[1] != keys.shape[1]
    params = torch.backends.cuda.SDPAParams(queries, keys, values, None, 0.0, True, grouped)
    if not torch.backends.cuda.can_use_cudnn_attention(params, debug=True):
        raise RuntimeError("torch refuses it, with the warning before this")


def by_phases(
    backend: AttentionBackend, head_dim: int, dtype: DType, layers: Iterable[LayerAttention]
) -> AttentionBackend:
    """``backend``, or if it is one over slots the same with other kernels before its own."""
    if not isinstance(backend, FlashBackend):
        return backend
    stock = backend.kernels[-1]
    before: list[SlotKernel] = [CudaDecodes()]
    if not (isinstance(stock, FlashAttn3) or (isinstance(stock, TorchFlash) and activated())):
        before.append(CudnnPrompts(stock))
    layers = tuple(layers)
    serve = []
    for kernel in before:
        refusal = kernel.refusal(head_dim, dtype) or lacking(kernel, layers)
        if refusal is None:
            serve.append(kernel)
        else:
            logger.info("attention goes on without %s: %s", kernel.name, refusal)
    return FlashBackend(*serve, *backend.kernels) if serve else backend
