"""The device that steps run on, and what computes there.

:class:`DeviceRuntime` hides whether torch computes. On a CPU, our own decoder, kernels and sampler
need numpy only (:mod:`vmserve.runner.cpu_runtime`), so that the engine starts without torch, whose
import would take longer than everything else. :mod:`vmserve.runner.torch_runtime` has what torch
computes, on either device.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from vmserve.numbers.dtypes import DType

if TYPE_CHECKING:
    import torch
    from numpy.typing import NDArray

    from vmserve.attention.base import AttentionCall, RaggedBatch
    from vmserve.attention.states import StepStates
    from vmserve.memory.base import Regime
    from vmserve.memory.device import MemoryDevice
    from vmserve.memory.manager import MemoryManager
    from vmserve.memory.views import KVView, ViewedMemory
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
    """A step could not be captured; compute it without a graph."""


@dataclass(frozen=True, slots=True)
class HeadShape:
    """Shapes of a layer's queries, keys and values."""

    q_heads: int
    kv_heads: int
    head_dim: int
    dtype: DType


class DeviceRuntime(Protocol):
    """One device, and the one stream that orders the engine's work."""

    #: "cpu" or "cuda".
    device_type: str
    #: Torch's name of the device, such as "cuda:0".
    device_name: str
    #: Exceptions of a step which finds no memory for its activations.
    memory_errors: tuple[type[Exception], ...]

    @property
    def wants_graphs(self) -> bool:
        """Whether launches cost enough to make capturing decoding steps worthwhile."""
        ...

    @property
    def captures_ahead(self) -> bool:
        """Whether steps are captured as the engine starts, else when first needed."""
        ...

    @property
    def gpu_bytes(self) -> int | None:
        """All memory of the GPU; None on the CPU, which shares its memory with the system."""
        ...

    def with_torch(self) -> TorchRuntime:
        """The same device with torch, which is imported for it."""
        ...

    def memory(self, spare_bytes: int | None = None) -> MemoryDevice:
        """The memory that pages come from; ``spare_bytes`` of the device are left to torch."""
        ...

    def active(self) -> AbstractContextManager[Any]:
        """A context in which this thread's work goes to the engine's stream."""
        ...

    def inference(self) -> AbstractContextManager[Any]:
        """A context in which nothing is kept for gradients."""
        ...

    def check(self) -> None:
        """Raises ``RuntimeError`` outside :meth:`active`: the pool follows another stream."""
        ...

    def synchronize(self) -> None:
        """Wait for all work."""
        ...

    # -- what computes ------------------------------------------------------------------

    def views(self, memory: ViewedMemory) -> dict[Regime, KVView]:
        """Both views of the KV memory, for the kernels here."""
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
        states: StepStates | None = None,
    ) -> Logits:
        """Logits ``[rows, vocab]`` in float32 of one ragged batch. Does not wait for them.

        token_ids, positions: ``[tokens]``; logits_rows: the rows of the batch that go through the
        LM head (None: all, in order); drawn: the tokens that only the device knows
        (:func:`vmserve.runner.ids.known`); hidden: takes the final hidden states of the last of
        these rows, which then have no logits; states: of the sequences, for models that torch
        computes and whose layers keep them.
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
        """Captured decoding steps; None unless :attr:`wants_graphs` and the model can be
        captured."""
        ...

    def sampler(self, vocab_size: int, *, is_async: bool) -> TokenSampler:
        """``is_async``: drawn tokens must be readable on the device before the host knows them."""
        ...

    # -- what calibration measures ------------------------------------------------------

    def layer_probe(
        self, call: AttentionCall, num_tokens: int, heads: HeadShape
    ) -> Callable[[], object]:
        """One layer's attention over some queries, keys and values, as a call to be timed."""
        ...

    def copy_probe(self, num_bytes: int) -> Callable[[], object]:
        """A copy from host memory to the device, as a call to be timed."""
        ...

    def timer(self, work: Callable[[], object]) -> Callable[[], float]:
        """A function that runs ``work`` once more and returns the device's seconds for it.

        ``work`` has run before; its launches are not counted if captured steps have none.
        """
        ...


class StepGraphs(Protocol):
    """Captured decoding steps (:class:`vmserve.runner.graphs.DecodeGraphs`)."""

    def takes(self, num_rows: int) -> bool:
        """Whether a step of ``num_rows`` sequences can be captured."""
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
    """A device with torch."""

    device: torch.device

    def dtype(self, requested: str, model: ModelConfig) -> DType:
        """The dtype of a model here (:func:`vmserve.models.torch_dtype.resolve_dtype`)."""
        ...

    def upload(self, array: NDArray[Any], out: torch.Tensor | None = None) -> torch.Tensor:
        """A copy on the device, into the first rows of ``out`` if given. Does not wait for it."""
        ...

    def fetch(self, tensors: Sequence[torch.Tensor]) -> Fetch:
        """Copy to the host what these tensors hold after the work so far; one wait for all."""
        ...

    def new_graphs(self) -> None:
        """Let later graphs share memory with each other, and with none before."""
        ...

    def begin_capture(self) -> None:
        """Record this thread's work from now on. A GPU does not execute it meanwhile."""
        ...

    def end_capture(self) -> Graph: ...

    def abort_capture(self) -> None:
        """Stop recording after an error."""
        ...

    def allocated_bytes(self) -> int:
        """Device memory taken by torch, in use or not."""
        ...


class Graph(Protocol):
    """Recorded work, which runs again on the current contents of the same tensors."""

    def replay(self) -> None: ...


class Fetch(Protocol):
    """Copies on their way to the host."""

    def take(self) -> list[NDArray[Any]]:
        """Wait for the copies, but for no work given to the device after them."""
        ...
