"""The device that steps run on, and what computes there.

Everything that depends on whether torch does is behind :class:`DeviceRuntime`: on a CPU our own
decoder, kernels and sampler need numpy only, and the engine starts without torch, whose import
would take longer than all else. What torch computes, on either device, is in
:mod:`vmserve.runner.torch_runtime`.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, cast

import numpy as np

from vmserve.attention.base import LayerAttention
from vmserve.attention.cpu import CpuCall
from vmserve.dtypes import DType
from vmserve.errors import ConfigurationError
from vmserve.host_arrays import array_tuple, rounded
from vmserve.memory.base import Regime
from vmserve.memory.device import HostMemory, MemoryDevice, driver_refusal
from vmserve.memory.host_views import host_view
from vmserve.sampling.sampler import Sampler

if TYPE_CHECKING:
    import torch
    from numpy.typing import NDArray

    from vmserve.attention.base import AttentionCall
    from vmserve.memory.manager import MemoryManager
    from vmserve.memory.views import KVView
    from vmserve.models import LoadedModel, ModelConfig
    from vmserve.models.hidden import HiddenRows
    from vmserve.models.native import NativeDecoder
    from vmserve.runner.graphs import DecodeGraphs
    from vmserve.runner.model_runner import RegimeKernels
    from vmserve.sampling.tokens import Logits, TokenSampler

__all__ = [
    "CaptureError",
    "CpuRuntime",
    "DeviceRuntime",
    "HeadShape",
    "TorchRuntime",
    "open_runtime",
]

logger = logging.getLogger(__name__)
_NO_CONTEXT: AbstractContextManager[Any] = contextlib.nullcontext()


class CaptureError(RuntimeError):
    """A step was not captured: it is to be computed as it is."""


@dataclass(frozen=True, slots=True)
class HeadShape:
    """What a layer's queries look like."""

    q_heads: int
    kv_heads: int
    head_dim: int
    dtype: DType


class DeviceRuntime(Protocol):
    """One device, and the one stream that the engine's work is ordered by."""

    #: "cpu" or "cuda".
    device_type: str
    #: As torch names it, say "cuda:0".
    device_name: str
    #: What a step raises that finds no memory for its activations.
    memory_errors: tuple[type[Exception], ...]

    @property
    def wants_graphs(self) -> bool:
        """Whether launches cost enough that decoding steps are worth capturing."""
        ...

    @property
    def captures_ahead(self) -> bool:
        """Whether steps are captured as the engine starts; else when they are first needed."""
        ...

    @property
    def gpu_bytes(self) -> int | None:
        """All memory of the GPU; None on the CPU, which shares its own with the system."""
        ...

    def with_torch(self) -> TorchRuntime:
        """The same device where torch computes, which is imported for it."""
        ...

    def memory(self, spare_bytes: int | None = None) -> MemoryDevice:
        """Where pages are taken from; ``spare_bytes`` of the device are left to torch."""
        ...

    def active(self) -> AbstractContextManager[Any]:
        """Within, this thread's work goes to the engine's stream."""
        ...

    def inference(self) -> AbstractContextManager[Any]:
        """Within, nothing is kept for gradients."""
        ...

    def check(self) -> None:
        """Raises ``RuntimeError`` outside :meth:`active`: the pool follows another stream."""
        ...

    def synchronize(self) -> None:
        """Wait for all work."""
        ...

    # -- what computes ------------------------------------------------------------------

    def views(self, memory: MemoryManager) -> dict[Regime, KVView]:
        """Both views of the KV memory, as the kernels here take them."""
        ...

    def forward(
        self,
        model: LoadedModel,
        token_ids: NDArray[np.int64],
        positions: NDArray[np.int64],
        attention: AttentionCall,
        logits_rows: NDArray[np.int64] | None = None,
        drawn: torch.Tensor | None = None,
        hidden: HiddenRows | None = None,
    ) -> Logits:
        """Logits ``[rows, vocab]`` in float32 of one ragged batch; nobody waits for them.

        token_ids, positions: ``[tokens]``; logits_rows: the rows of the batch that go through the
        LM head (None: all of them, in order); drawn: the tokens that only the device knows
        (:func:`vmserve.runner.ids.known`); hidden: takes the final hidden states of the last of
        these rows, which then have no logits.
        """
        ...

    def rows(self, logits: Logits, rows: Sequence[int]) -> Logits:
        """Some rows of logits, without waiting."""
        ...

    def graphs(
        self,
        model: LoadedModel,
        kernels: Mapping[Regime, RegimeKernels],
        max_rows: int,
        max_len: int,
    ) -> DecodeGraphs | None:
        """Captured decoding steps, where :attr:`wants_graphs` and the model can be captured."""
        ...

    def sampler(self, vocab_size: int, *, is_async: bool) -> TokenSampler:
        """``is_async``: drawn tokens are to be read on the device before the host knows them."""
        ...

    # -- what calibration measures ------------------------------------------------------

    def layer_probe(
        self, call: AttentionCall, num_tokens: int, heads: HeadShape
    ) -> Callable[[], object]:
        """One layer's attention over some queries, keys and values, to be called and timed."""
        ...

    def copy_probe(self, num_bytes: int) -> Callable[[], object]:
        """A copy from host memory to the device."""
        ...

    def timer(self, work: Callable[[], object]) -> Callable[[], float]:
        """Seconds that the device takes for ``work`` once it has run before, of a new run at each
        call; without the time of launching it, where a captured step has none."""
        ...


class CpuRuntime:
    """The processor, with our own decoder and kernels: work is done when a call returns.

    ``driver``: whose memory is the KV cache's, as for :class:`vmserve.memory.device.HostMemory`.
    """

    device_type = "cpu"
    device_name = "cpu"
    memory_errors: tuple[type[Exception], ...] = ()

    def __init__(self, *, driver: str = "host") -> None:
        self._driver = driver

    @property
    def wants_graphs(self) -> bool:
        return False

    @property
    def captures_ahead(self) -> bool:
        return False

    @property
    def gpu_bytes(self) -> int | None:
        return None

    def with_torch(self) -> TorchRuntime:
        # Only now: it takes a second, and our own decoder does without.
        from vmserve.runner.torch_runtime import TorchCpuRuntime  # noqa: PLC0415

        return TorchCpuRuntime(driver=self._driver)

    def memory(self, spare_bytes: int | None = None) -> MemoryDevice:
        return HostMemory(self._driver)

    def active(self) -> AbstractContextManager[Any]:
        return _NO_CONTEXT

    def inference(self) -> AbstractContextManager[Any]:
        return _NO_CONTEXT

    def check(self) -> None:
        """There is one order of work only."""

    def synchronize(self) -> None:
        """Nothing is under way."""

    def views(self, memory: MemoryManager) -> dict[Regime, KVView]:
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
    ) -> DecodeGraphs | None:
        return None

    def sampler(self, vocab_size: int, *, is_async: bool) -> TokenSampler:
        assert not is_async, "only torch has tokens that the host does not know"
        return Sampler(vocab_size)

    def layer_probe(
        self, call: AttentionCall, num_tokens: int, heads: HeadShape
    ) -> Callable[[], object]:
        def numbers(num_heads: int) -> NDArray[Any]:
            shape = (num_tokens, num_heads, heads.head_dim)
            # Not random, as importing numpy's generators takes longer than calibration.
            values = np.arange(num_tokens * num_heads * heads.head_dim) % 251 / 125 - 1
            return rounded(values.astype(np.float32).reshape(shape), heads.dtype)

        arrays = [numbers(n) for n in (heads.q_heads, heads.kv_heads, heads.kv_heads)]
        arrays.append(np.empty_like(arrays[0]))
        q, k, v, out = (array_tuple(array, heads.dtype) for array in arrays)
        spec = LayerAttention(0, heads.head_dim**-0.5)
        kernels = cast("CpuCall", call)

        def attend(_: object = arrays) -> None:  # which it keeps alive
            kernels.attend(spec, q, k, v, out)

        return attend

    def copy_probe(self, num_bytes: int) -> Callable[[], object]:
        source, target = np.ones(num_bytes, dtype=np.uint8), np.empty(num_bytes, dtype=np.uint8)
        return lambda: np.copyto(target, source)

    def timer(self, work: Callable[[], object]) -> Callable[[], float]:
        def seconds() -> float:
            work()  # what ran before must not tell in its time
            began = time.perf_counter()
            work()
            return time.perf_counter() - began

        return seconds


class TorchRuntime(DeviceRuntime, Protocol):
    """A device where torch computes."""

    device: torch.device

    def dtype(self, requested: str, model: ModelConfig) -> DType:
        """What a model computes in here (:func:`vmserve.models.torch_dtype.resolve_dtype`)."""
        ...

    def upload(self, array: NDArray[Any], out: torch.Tensor | None = None) -> torch.Tensor:
        """A copy on the device, into the first rows of ``out`` if given; nobody waits for it."""
        ...

    def fetch(self, tensors: Sequence[torch.Tensor]) -> Fetch:
        """Copy to the host what these will hold by the work so far; one wait for all."""
        ...

    def new_graphs(self) -> None:
        """The graphs from here on share memory with each other, and with none before."""
        ...

    def begin_capture(self) -> None:
        """Record the work of this thread from here on. A GPU does not do it meanwhile."""
        ...

    def end_capture(self) -> Graph: ...

    def abort_capture(self) -> None:
        """After an error: nothing is recorded any more."""
        ...

    def allocated_bytes(self) -> int:
        """What torch has taken of the device, in use or not."""
        ...


class Graph(Protocol):
    """Work that was recorded; it runs again on the same tensors, whatever they hold by then."""

    def replay(self) -> None: ...


class Fetch(Protocol):
    """Copies on their way to the host."""

    def take(self) -> list[NDArray[Any]]:
        """Wait for them, and for no work that was given to the device after them."""
        ...


def open_runtime(name: str, kv_driver: str = "auto") -> DeviceRuntime:
    """``name``: cpu, cuda, or auto: the GPU where there is one that can be used.

    ``kv_driver``: auto (the device's own), or one that is asked for by name or path.

    Raises :class:`~vmserve.errors.ConfigurationError` for cuda without a usable GPU, and for a
    driver whose memory is not the device's.
    """
    refusal = driver_refusal() if name == "auto" else None
    if name != "cpu" and refusal is None:
        # Only now: without a driver nobody need ask torch whether it can use the GPU.
        from vmserve.memory.cuda import cuda_refusal  # noqa: PLC0415

        refusal = cuda_refusal()
    if name == "cuda" and refusal is not None:
        raise ConfigurationError(f"device: cuda cannot be used: {refusal}; or use --device cpu")
    # A driver of host memory was asked for: so was the CPU.
    on_host = name == "auto" and kv_driver not in ("auto", "cuda")
    if name != "cpu" and refusal is None and not on_host:
        if kv_driver not in ("auto", "cuda"):
            raise ConfigurationError(
                f"kv_driver: {kv_driver} gives memory of the processor, and the model is on the "
                "GPU: use --kv-driver auto, or --device cpu"
            )
        from vmserve.runner.torch_runtime import CudaRuntime  # noqa: PLC0415 - as above

        return CudaRuntime()
    if kv_driver == "cuda":
        why = "" if refusal is None else f" ({refusal})"
        raise ConfigurationError(
            f"kv_driver: cuda gives memory of a GPU, and the model is on the CPU{why}: use "
            "--kv-driver auto, or --device cuda"
        )
    if name == "auto" and refusal is not None and not on_host:
        # Somebody who has a GPU expects it to be used.
        has_gpu = driver_refusal() is None
        logger.log(logging.WARNING if has_gpu else logging.DEBUG, "running on the CPU: %s", refusal)
    return CpuRuntime(driver="host" if kv_driver == "auto" else kv_driver)
