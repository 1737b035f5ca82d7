"""The processor with our own decoder, kernels and sampler; choosing the device by name."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from vmserve.attention.base import LayerAttention
from vmserve.attention.cpu import CpuCall
from vmserve.errors import ConfigurationError
from vmserve.memory.base import Regime
from vmserve.memory.cuda_driver import driver_refusal
from vmserve.memory.host_views import host_view
from vmserve.numbers.host_arrays import array_tuple, rounded
from vmserve.options import rules
from vmserve.runner.host import NO_CONTEXT, HostDevice
from vmserve.sampling.sampler import Sampler

if TYPE_CHECKING:
    import torch
    from numpy.typing import NDArray

    from vmserve.attention.base import AttentionCall
    from vmserve.attention.states import StepStates
    from vmserve.memory.views import KVView, ViewedMemory
    from vmserve.models import LoadedModel
    from vmserve.models.hidden import HiddenRows
    from vmserve.models.native import NativeDecoder
    from vmserve.runner.kernels import RegimeKernels
    from vmserve.runner.runtime import DeviceRuntime, HeadShape, StepGraphs, TorchRuntime
    from vmserve.sampling.tokens import Logits, TokenSampler

__all__ = ["CpuRuntime", "open_runtime"]

logger = logging.getLogger(__name__)


class CpuRuntime(HostDevice):
    """The processor without torch."""

    memory_errors: tuple[type[Exception], ...] = ()

    @property
    def wants_graphs(self) -> bool:
        return False

    @property
    def captures_ahead(self) -> bool:
        return False

    def with_torch(self) -> TorchRuntime:
        # Imported late: it takes a second, and our own decoder does without.
        from vmserve.runner.torch_runtime import TorchCpuRuntime  # noqa: PLC0415

        return TorchCpuRuntime(driver=self._driver)

    def inference(self) -> AbstractContextManager[Any]:
        return NO_CONTEXT

    def views(self, memory: ViewedMemory) -> dict[Regime, KVView]:
        return {regime: host_view(memory, regime) for regime in Regime}

    def forward(
        self,
        model: LoadedModel,
        token_ids: NDArray[np.int64],
        positions: NDArray[np.int64],
        attention: AttentionCall,
        logits_rows: NDArray[np.int64] | None = None,
        drawn: torch.Tensor | None = None,
        hidden: HiddenRows | None = None,
        states: StepStates | None = None,
    ) -> Logits:
        assert drawn is None, "the host draws the tokens itself"
        network = cast("NativeDecoder", model.network)
        return network.forward(token_ids, positions, attention, logits_rows, hidden)

    def rows(self, logits: Logits, rows: Sequence[int]) -> Logits:
        return logits[np.array(rows, dtype=np.int64)]

    def graphs(
        self,
        model: LoadedModel,
        kernels: Mapping[Regime, RegimeKernels],
        max_rows: int,
        max_len: int,
    ) -> StepGraphs | None:
        return None

    def sampler(self, vocab_size: int, *, is_async: bool) -> TokenSampler:
        assert not is_async, "only torch has tokens that the host does not know"
        return Sampler(vocab_size)

    def layer_probe(
        self, call: AttentionCall, num_tokens: int, heads: HeadShape
    ) -> Callable[[], object]:
        def numbers(num_heads: int) -> NDArray[Any]:
            shape = (num_tokens, num_heads, heads.head_dim)
            # Not random: importing numpy's generators takes longer than calibration.
            values = np.arange(num_tokens * num_heads * heads.head_dim) % 251 / 125 - 1
            return rounded(values.astype(np.float32).reshape(shape), heads.dtype)

        arrays = [numbers(n) for n in (heads.q_heads, heads.kv_heads, heads.kv_heads)]
        arrays.append(np.empty_like(arrays[0]))
        q, k, v, out = (array_tuple(array, heads.dtype) for array in arrays)
        spec = LayerAttention(0, heads.head_dim**-0.5)
        kernels = cast("CpuCall", call)

        def attend(_: object = arrays) -> None:  # which keeps them alive
            kernels.attend(spec, q, k, v, out)

        return attend

    def copy_probe(self, num_bytes: int) -> Callable[[], object]:
        source, target = np.ones(num_bytes, dtype=np.uint8), np.empty(num_bytes, dtype=np.uint8)
        return lambda: np.copyto(target, source)


def open_runtime(name: str, kv_driver: str = "auto") -> DeviceRuntime:
    """The device named "cpu", "cuda", or "auto" (a usable GPU if there is one).

    ``kv_driver``: "auto" (the device's own), or a driver's name or path.

    Raises :class:`~vmserve.errors.ConfigurationError` for cuda without a usable GPU, and for a
    driver whose memory is not the device's.
    """
    refusal = driver_refusal() if name == "auto" else None
    if name != "cpu" and refusal is None:
        # Imported late: without a driver there is no need to ask torch about the GPU.
        from vmserve.memory.cuda import cuda_refusal  # noqa: PLC0415

        refusal = cuda_refusal()
    if name == "cuda" and refusal is not None:
        raise ConfigurationError(f"device: cuda cannot be used: {refusal}; or use --device cpu")
    # A driver of host memory was chosen, and so the CPU.
    on_host = name == "auto" and kv_driver not in ("auto", "cuda")
    if name != "cpu" and refusal is None and not on_host:
        rules.check({"device_type": "cuda", "kv_driver": kv_driver})
        from vmserve.runner.torch_runtime import CudaRuntime  # noqa: PLC0415 - as above

        return CudaRuntime()
    why = "" if refusal is None else f" ({refusal})"
    rules.check({"device_type": "cpu", "kv_driver": kv_driver, "no_gpu": why})
    if name == "auto" and refusal is not None and not on_host:
        # Tell people who have a GPU why it is not used.
        has_gpu = driver_refusal() is None
        logger.log(logging.WARNING if has_gpu else logging.DEBUG, "running on the CPU: %s", refusal)
    return CpuRuntime(driver="host" if kv_driver == "auto" else kv_driver)
