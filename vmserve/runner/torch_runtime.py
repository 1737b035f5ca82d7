"""Devices where torch computes: a stream, copies to and from it, and graphs of its work.

This is all that the engine knows of CUDA outside its memory. On the CPU, a graph is a tape of
operations with the tensors that they worked on. As on a GPU, what the host computed during
recording is frozen, and the contents of tensors are not. So the logic of captured steps is the same
on both, and is tested without a GPU.
"""

from __future__ import annotations

import contextlib
import gc
import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

from vmserve.attention.base import LayerAttention
from vmserve.attention.transfer import upload
from vmserve.memory.base import Regime
from vmserve.memory.cuda import CudaMemory
from vmserve.memory.cuda_driver import SPARE_BYTES
from vmserve.memory.device import MemoryDevice
from vmserve.memory.tensors import contiguous_view, paged_view
from vmserve.models.hidden import HiddenRows
from vmserve.models.native import NativeDecoder
from vmserve.models.torch_dtype import resolve_dtype
from vmserve.numbers.torch_dtypes import as_torch
from vmserve.runner.graphs import DecodeGraphs
from vmserve.runner.host import HostDevice
from vmserve.runner.ids import known
from vmserve.sampling.device import DeviceSampler
from vmserve.sampling.sampler import Sampler

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from vmserve.attention.base import AttentionCall
    from vmserve.attention.states import StepStates
    from vmserve.memory.views import KVView, ViewedMemory
    from vmserve.models import LoadedModel, ModelConfig
    from vmserve.models.decoder import Decoder
    from vmserve.numbers.dtypes import DType
    from vmserve.runner.kernels import RegimeKernels
    from vmserve.runner.runtime import Fetch, Graph, HeadShape, TorchRuntime
    from vmserve.sampling.tokens import Logits, TokenSampler

__all__ = ["CudaRuntime", "TorchCpuRuntime"]

logger = logging.getLogger(__name__)
#: torch.cuda has parts without types.
_cuda: Any = torch.cuda
#: Runs between two events: one run takes little longer than the resolution of events.
_TIMED_RUNS = 10


class _TorchWork(ABC):
    """The common part of all devices."""

    device: torch.device
    device_type: str
    memory_errors: tuple[type[Exception], ...] = (torch.OutOfMemoryError,)

    @property
    @abstractmethod
    def wants_graphs(self) -> bool:
        """See :class:`~vmserve.runner.runtime.DeviceRuntime`."""

    def inference(self) -> AbstractContextManager[Any]:
        return torch.inference_mode()

    def dtype(self, requested: str, model: ModelConfig) -> DType:
        return resolve_dtype(requested, model, self.device_type)

    def upload(self, array: NDArray[Any], out: torch.Tensor | None = None) -> torch.Tensor:
        return upload(array, self.device, out)

    def views(self, memory: ViewedMemory) -> dict[Regime, KVView]:
        return {Regime.VIRTUAL: contiguous_view(memory), Regime.PAGED: paged_view(memory)}

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
        ids = known(self.upload(token_ids), drawn)
        if isinstance(model.network, NativeDecoder):
            return model.network.forward(ids.numpy(), positions, attention, logits_rows, hidden)
        rows = None if logits_rows is None else self.upload(logits_rows)
        given = (ids, self.upload(positions), attention, rows, hidden)
        if states is not None:
            return cast("Decoder", model.network).forward(*given, states)
        return model.network.forward(*given)

    def rows(self, logits: Logits, rows: Sequence[int]) -> Logits:
        chosen = np.array(rows, dtype=np.int64)
        return logits[self.upload(chosen) if isinstance(logits, torch.Tensor) else chosen]

    def graphs(
        self,
        model: LoadedModel,
        kernels: Mapping[Regime, RegimeKernels],
        max_rows: int,
        max_len: int,
    ) -> DecodeGraphs | None:
        if not self.wants_graphs:
            return None
        return DecodeGraphs.of(model, kernels, cast("TorchRuntime", self), max_rows, max_len)

    def sampler(self, vocab_size: int, *, is_async: bool) -> TokenSampler:
        if self.device_type == "cpu" and not is_async:
            return Sampler(vocab_size)
        return DeviceSampler(vocab_size, cast("TorchRuntime", self))

    def layer_probe(
        self, call: AttentionCall, num_tokens: int, heads: HeadShape
    ) -> Callable[[], object]:
        generator = torch.Generator().manual_seed(0)

        def random(num_heads: int) -> torch.Tensor:
            numbers = torch.randn(num_tokens, num_heads, heads.head_dim, generator=generator)
            return numbers.to(as_torch(heads.dtype)).to(self.device)

        q, k, v = random(heads.q_heads), random(heads.kv_heads), random(heads.kv_heads)
        spec = LayerAttention(0, heads.head_dim**-0.5)
        return lambda: call(spec, q, k, v)

    def copy_probe(self, num_bytes: int) -> Callable[[], object]:
        source = torch.ones(num_bytes, dtype=torch.uint8)
        target = torch.empty(num_bytes, dtype=torch.uint8, device=self.device)
        if self.device_type != "cpu":
            source = source.pin_memory()
        return lambda: target.copy_(source, non_blocking=True)


class _Fetched:
    """Copies that are done already."""

    def __init__(self, arrays: list[NDArray[Any]]) -> None:
        self._arrays = arrays

    def take(self) -> list[NDArray[Any]]:
        return self._arrays


class TorchCpuRuntime(_TorchWork, HostDevice):
    """The processor, with torch computing some or all of a step.

    ``graphs``: record decoding steps as on a GPU; ``captures_ahead``: at start. This is slower than
    running them, and exists for tests.
    """

    def __init__(
        self, *, graphs: bool = False, captures_ahead: bool = False, driver: str = "host"
    ) -> None:
        super().__init__(driver=driver)
        self._captures_ahead = captures_ahead
        self.device = torch.device("cpu")
        self._records = graphs
        self._recorder: _Recorder | None = None

    @property
    def wants_graphs(self) -> bool:
        return self._records

    @property
    def captures_ahead(self) -> bool:
        return self._captures_ahead

    def with_torch(self) -> TorchRuntime:
        return self

    def fetch(self, tensors: Sequence[torch.Tensor]) -> Fetch:
        return _Fetched([tensor.numpy() for tensor in tensors])

    def new_graphs(self) -> None:
        """Nothing to do: each graph has its own tensors."""

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

    def allocated_bytes(self) -> int:
        return 0


class _CudaFetch:
    """``event`` follows the copies to page-locked memory."""

    def __init__(self, event: Any, copies: list[torch.Tensor]) -> None:
        self._event = event
        self._copies = copies

    def take(self) -> list[NDArray[Any]]:
        self._event.synchronize()
        return [copy.numpy() for copy in self._copies]


class CudaRuntime(_TorchWork):
    """The current GPU of torch, with a stream of its own that does not wait for the default one."""

    device_type = "cuda"

    def __init__(self) -> None:
        index = int(_cuda.current_device())
        self.device = torch.device("cuda", index)
        self.device_name = str(self.device)
        self._stream: Any = _cuda.Stream(self.device)
        # Capturing records whatever any thread gives to its stream. The mapper clears pages on the
        # engine's stream, which must happen once, and not at each replay: so captures have their
        # own.
        self._recording: Any = _cuda.Stream(self.device)
        self._pool: Any = None
        self._graph: Any = None
        self._capture = contextlib.ExitStack()

    def with_torch(self) -> TorchRuntime:
        return self

    @property
    def wants_graphs(self) -> bool:
        return True

    @property
    def captures_ahead(self) -> bool:
        return True

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
        with contextlib.ExitStack() as entered:
            entered.enter_context(_without_collection())
            entered.enter_context(_cuda.stream(self._recording))
            # Other threads go on mapping pages: their calls must not end the capture.
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            self._capture = entered.pop_all()
        self._graph = graph

    def end_capture(self) -> Graph:
        graph, self._graph = self._graph, None
        with self._capture:
            graph.capture_end()
        captured: Graph = graph
        return captured

    def abort_capture(self) -> None:
        graph, self._graph = self._graph, None
        if graph is not None:
            with contextlib.suppress(RuntimeError), self._capture:  # the known error
                graph.capture_end()

    def timer(self, work: Callable[[], object]) -> Callable[[], float]:
        work()  # libraries set themselves up
        self.new_graphs()
        run = work
        try:
            self.begin_capture()
            work()
            run = self.end_capture().replay
        except RuntimeError as error:
            self.abort_capture()
            logger.debug("timed with its launches: %s", error)

        def seconds() -> float:
            run()
            began, ended = (_cuda.Event(enable_timing=True) for _ in range(2))
            began.record(self._stream)
            for _ in range(_TIMED_RUNS):
                run()
            ended.record(self._stream)
            ended.synchronize()
            return float(began.elapsed_time(ended)) / 1e3 / _TIMED_RUNS

        return seconds

    def synchronize(self) -> None:
        self._stream.synchronize()

    def allocated_bytes(self) -> int:
        return int(_cuda.memory_reserved(self.device))


@contextlib.contextmanager
def _without_collection() -> Iterator[None]:
    """Disable garbage collection: freeing graphs or page-locked memory asks the driver for
    something that ends a capture."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


# -- graphs on the CPU ----------------------------------------------------------------------


class _Step:
    """One operation with its input and output tensors; replayed onto the same tensors."""

    __slots__ = ("args", "func", "given", "kwargs")

    def __init__(self, func: Any, args: Any, kwargs: Any, given: Any) -> None:
        self.func = func
        self.args = args
        self.kwargs = kwargs
        taken = {_memory(tensor) for tensor in _tensors((args, kwargs))}
        # A view, or a tensor written in place, shows the new content by itself.
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


#: TorchDispatchMode, whose methods have no types.
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
