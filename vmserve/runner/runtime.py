"""The device that steps run on, and what computes there.

Everything that depends on whether torch does is behind :class:`DeviceRuntime`: on a CPU our own
decoder, kernels and sampler need numpy only (:mod:`vmserve.runner.cpu_runtime`), and the engine
starts without torch, whose import would take longer than all else. What torch computes, on either
device, is in :mod:`vmserve.runner.torch_runtime`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from vmserve.dtypes import DType

if TYPE_CHECKING:
    import torch
    from numpy.typing import NDArray

    from vmserve.attention.base import AttentionCall, RaggedBatch
    from vmserve.memory.base import Regime
    from vmserve.memory.device import MemoryDevice
    from vmserve.memory.manager import MemoryManager
    from vmserve.memory.views import KVView
    from vmserve.models import LoadedModel, ModelConfig
    from vmserve.models.hidden import HiddenRows
    from vmserve.runner.kernels import RegimeKernels
    from vmserve.sampling.tokens import Logits, TokenSampler

__all__ = [
    "CaptureError",
    "DeviceRuntime",
    "Fetch",
    "Graph",
    "HeadShape",
    "StepGraphs",
    "TorchRuntime",
]


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
    ) -> StepGraphs | None:
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


class StepGraphs(Protocol):
    """Decoding steps that were captured (:class:`vmserve.runner.graphs.DecodeGraphs`)."""

    def takes(self, num_rows: int) -> bool:
        """Whether a step of so many sequences can be captured."""
        ...

    def capture_ahead(self, memory: MemoryManager, regimes: Sequence[Regime]) -> None:
        """Capture steps of every width before there are any requests."""
        ...

    def captures_attention(self, regime: Regime) -> bool: ...

    def whole(
        self,
        token_ids: NDArray[np.int64],
        regime: Regime,
        batch: RaggedBatch,
        drawn: torch.Tensor | None = None,
    ) -> Logits:
        """A step of one regime. Raises :class:`CaptureError`."""
        ...

    def in_pieces(
        self,
        token_ids: NDArray[np.int64],
        positions: NDArray[np.int64],
        attention: AttentionCall,
        drawn: torch.Tensor | None = None,
    ) -> Logits:
        """A step whose attention is not captured. Raises :class:`CaptureError`."""
        ...


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
