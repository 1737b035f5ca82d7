"""The device that steps run on: its stream, copies to and from it, and graphs of its work.

This is all that the engine knows of CUDA beside its memory. On the CPU a graph is a tape of the
operations, with the tensors that they worked on: as on a GPU, what the host computed while it was
recorded is frozen, and what is in the tensors is not. So the logic of captured steps is the same
on both, and is tested without a GPU.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

from vmserve.attention.transfer import upload
from vmserve.errors import ConfigurationError
from vmserve.memory.device import SPARE_BYTES, CudaMemory, HostMemory, MemoryDevice, cuda_refusal

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["CpuRuntime", "CudaRuntime", "DeviceRuntime", "Fetch", "Graph", "open_runtime"]

logger = logging.getLogger(__name__)
#: torch.cuda has parts without types.
_cuda: Any = torch.cuda


class Graph(Protocol):
    """Work that was recorded; it runs again on the same tensors, whatever they hold by then."""

    def replay(self) -> None: ...


class Fetch(Protocol):
    """Copies on their way to the host."""

    def take(self) -> list[NDArray[Any]]:
        """Wait for them, and for no work that was given to the device after them."""
        ...


class DeviceRuntime(Protocol):
    """One device, and the one stream that the engine's work is ordered by."""

    device: torch.device
    #: Whether launches cost enough that decoding steps are worth capturing.
    wants_graphs: bool

    @property
    def gpu_bytes(self) -> int | None:
        """All memory of the GPU; None on the CPU, which shares its own with the system."""
        ...

    def memory(self, spare_bytes: int | None = None) -> MemoryDevice:
        """Where pages are taken from; ``spare_bytes`` of the device are left to torch."""
        ...

    def active(self) -> AbstractContextManager[Any]:
        """Within, torch's work of this thread goes to the engine's stream."""
        ...

    def check(self) -> None:
        """Raises ``RuntimeError`` outside :meth:`active`: the pool follows another stream."""
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

    def synchronize(self) -> None:
        """Wait for all work."""
        ...

    def allocated_bytes(self) -> int:
        """What torch has taken of the device, in use or not."""
        ...


class _Fetched:
    """There already."""

    def __init__(self, arrays: list[NDArray[Any]]) -> None:
        self._arrays = arrays

    def take(self) -> list[NDArray[Any]]:
        return self._arrays


class CpuRuntime:
    """The processor: work is done when a call returns.

    ``graphs``: record decoding steps as on a GPU. It is slower than running them, and there to be
    tested.
    """

    def __init__(self, *, graphs: bool = False, driver: str = "host") -> None:
        self.device = torch.device("cpu")
        self.wants_graphs = graphs
        self._driver = driver
        self._recorder: _Recorder | None = None

    @property
    def gpu_bytes(self) -> int | None:
        return None

    def memory(self, spare_bytes: int | None = None) -> MemoryDevice:
        return HostMemory(self._driver)

    def active(self) -> AbstractContextManager[Any]:
        return contextlib.nullcontext()

    def check(self) -> None:
        """There is one order of work only."""

    def upload(self, array: NDArray[Any], out: torch.Tensor | None = None) -> torch.Tensor:
        return upload(array, self.device, out)

    def fetch(self, tensors: Sequence[torch.Tensor]) -> Fetch:
        return _Fetched([tensor.numpy() for tensor in tensors])

    def new_graphs(self) -> None:
        """Each has its own tensors."""

    def begin_capture(self) -> None:
        self._recorder = _Recorder()
        self._recorder.__enter__()

    def end_capture(self) -> Graph:
        recorder, self._recorder = self._recorder, None
        assert recorder is not None, "begin_capture() comes first"
        recorder.__exit__(None, None, None)
        return _Tape(recorder.steps)

    def abort_capture(self) -> None:
        recorder, self._recorder = self._recorder, None
        if recorder is not None:
            recorder.__exit__(None, None, None)

    def synchronize(self) -> None:
        """Nothing is under way."""

    def allocated_bytes(self) -> int:
        return 0


class _CudaFetch:
    """``event`` is behind the copies to page-locked memory."""

    def __init__(self, event: Any, copies: list[torch.Tensor]) -> None:
        self._event = event
        self._copies = copies

    def take(self) -> list[NDArray[Any]]:
        self._event.synchronize()
        return [copy.numpy() for copy in self._copies]


class CudaRuntime:
    """The current GPU of torch, and a stream of its own that does not wait for the default one."""

    wants_graphs = True

    def __init__(self) -> None:
        index = int(_cuda.current_device())
        self.device = torch.device("cuda", index)
        self._stream: Any = _cuda.Stream(self.device)
        self._pool: Any = None
        self._graph: Any = None

    @property
    def gpu_bytes(self) -> int | None:
        return int(_cuda.mem_get_info(self.device)[1])

    def memory(self, spare_bytes: int | None = None) -> MemoryDevice:
        spare = SPARE_BYTES if spare_bytes is None else max(SPARE_BYTES, spare_bytes)
        stream = int(self._stream.cuda_stream)
        return CudaMemory(stream, device=self.device.index or 0, spare_bytes=spare)

    def active(self) -> AbstractContextManager[Any]:
        context: AbstractContextManager[Any] = _cuda.stream(self._stream)
        return context

    def check(self) -> None:
        current = int(_cuda.current_stream(self.device).cuda_stream)
        if current != int(self._stream.cuda_stream):
            raise RuntimeError(
                f"work would go to stream {current:#x}, but the KV memory follows "
                f"{int(self._stream.cuda_stream):#x}: step within DeviceRuntime.active()"
            )

    def upload(self, array: NDArray[Any], out: torch.Tensor | None = None) -> torch.Tensor:
        return upload(array, self.device, out)

    def fetch(self, tensors: Sequence[torch.Tensor]) -> Fetch:
        copies = [
            torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(
                tensor, non_blocking=True
            )
            for tensor in tensors
        ]
        event = _cuda.Event()
        event.record(_cuda.current_stream(self.device))
        return _CudaFetch(event, copies)

    def new_graphs(self) -> None:
        # NOTE: torch refuses a pool again once all of its graphs are gone.
        self._pool = _cuda.graph_pool_handle()

    def begin_capture(self) -> None:
        self.synchronize()
        graph = _cuda.CUDAGraph()
        # Other threads go on mapping pages: what they call must not end the capture.
        graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
        self._graph = graph

    def end_capture(self) -> Graph:
        graph, self._graph = self._graph, None
        graph.capture_end()
        captured: Graph = graph
        return captured

    def abort_capture(self) -> None:
        graph, self._graph = self._graph, None
        if graph is not None:
            with contextlib.suppress(RuntimeError):  # of the error that is known already
                graph.capture_end()

    def synchronize(self) -> None:
        self._stream.synchronize()

    def allocated_bytes(self) -> int:
        return int(_cuda.memory_reserved(self.device))


def open_runtime(name: str, kv_driver: str = "auto") -> DeviceRuntime:
    """``name``: cpu, cuda, or auto: the GPU where there is one that can be used.

    ``kv_driver``: auto (the device's own), or one that is asked for by name or path.

    Raises :class:`~vmserve.errors.ConfigurationError` for cuda without a usable GPU, and for a
    driver whose memory is not the device's.
    """
    refusal = None if name == "cpu" else cuda_refusal()
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
        return CudaRuntime()
    if kv_driver == "cuda":
        why = "" if refusal is None else f" ({refusal})"
        raise ConfigurationError(
            f"kv_driver: cuda gives memory of a GPU, and the model is on the CPU{why}: use "
            "--kv-driver auto, or --device cuda"
        )
    if name == "auto" and refusal is not None:
        logger.debug("running on the CPU: %s", refusal)
    return CpuRuntime(driver="host" if kv_driver == "auto" else kv_driver)


# -- graphs on the CPU ----------------------------------------------------------------------


class _Step:
    """One operation with the tensors that it took and gave; replayed onto the same tensors."""

    __slots__ = ("args", "func", "given", "kwargs")

    def __init__(self, func: Any, args: Any, kwargs: Any, given: Any) -> None:
        self.func = func
        self.args = args
        self.kwargs = kwargs
        taken = {_memory(tensor) for tensor in _tensors((args, kwargs))}
        # A view, or what was written in place, shows the new content by itself.
        self.given = [None if _memory(tensor) in taken else tensor for tensor in _tensors(given)]

    def replay(self) -> None:
        again = _tensors(self.func(*self.args, **self.kwargs))
        for first, output in zip(self.given, again, strict=True):
            if first is not None:
                first.copy_(output)


def _tensors(values: Any) -> list[torch.Tensor]:
    leaves, _ = tree_flatten(values)
    return [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]


def _memory(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


#: Its methods carry no types.
_DispatchMode: Any = TorchDispatchMode


class _Recorder(_DispatchMode):  # type: ignore[misc]
    """Does the work and keeps it; refuses what a GPU cannot capture."""

    def __init__(self) -> None:
        super().__init__()
        self.steps: list[_Step] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in _NOT_CAPTURED:
            raise RuntimeError(f"{func} makes the host wait for the device: it cannot be captured")
        given = func(*args, **(kwargs or {}))
        self.steps.append(_Step(func, args, kwargs or {}, given))
        return given


_aten: Any = torch.ops.aten
_NOT_CAPTURED = frozenset({_aten._local_scalar_dense.default, _aten.nonzero.default})


class _Tape:
    def __init__(self, steps: list[_Step]) -> None:
        self._steps = steps

    @torch.inference_mode()
    def replay(self) -> None:
        for step in self._steps:
            step.replay()
