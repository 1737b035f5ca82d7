"""A device whose work runs as late as it may: when the host waits for it, and not before.

Torch's operations, the kernels of attention, and what the memory asks of the (simulated) CUDA
driver all wait in one stream, in their order. The host goes on with tensors that hold NaN or
nonsense until then. So a step that is launched beside another one is planned, and its memory
mapped, before anything of that other one has run: whatever of the first one's pages, inputs or
results the second one spoils shows in the tokens. What the host reads without waiting is wrong,
and an operation that makes it wait (``item()``, ``nonzero()``) is counted.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from tests.sim.simcuda import SimCuda
from vmserve.attention.base import LayerAttention, RaggedBatch
from vmserve.attention.cpu import CpuBackend
from vmserve.attention.rotary import Rotary
from vmserve.engine.engine import LLMEngine
from vmserve.memory.cuda import CudaMemory
from vmserve.memory.device import MemoryDevice
from vmserve.memory.views import KVView, PagedView
from vmserve.models import LoadedModel
from vmserve.models.native import NativeDecoder
from vmserve.runner.torch_runtime import TorchCpuRuntime

import torch  # isort: skip
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = ["DeferredCpu", "DeferredMemory", "DeferredRuntime", "SnapshotCpu", "make_late"]

_HOST_FUNCTION = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


class Stream:
    """Work in its order; it runs when :meth:`wait` is called."""

    def __init__(self, sim: SimCuda) -> None:
        self._sim = sim
        self._context = ctypes.c_void_p()
        retain = sim.library.cuDevicePrimaryCtxRetain
        assert retain(ctypes.byref(self._context), 0) == 0
        self._functions: dict[int, Any] = {}
        self._num = 0
        self._error: BaseException | None = None
        self.is_running = False

    def put(self, work: Callable[[], object]) -> None:
        key = self._num
        self._num += 1

        def run(_: object) -> None:
            del self._functions[key]
            if self._error is not None:
                return  # a lost device does nothing more
            self.is_running = True
            try:
                with torch.inference_mode():
                    work()
            except BaseException as error:  # noqa: BLE001  told where the host waits
                self._error = error
            finally:
                self.is_running = False

        function = _HOST_FUNCTION(run)
        self._functions[key] = function
        # The driver of an engine that is gone may have left its own behind as the current one.
        assert self._sim.library.cuCtxSetCurrent(self._context) == 0
        result = self._sim.library.cuLaunchHostFunc(None, function, None)
        assert result == 0, (result, self._sim.violations())

    @property
    def num_pending(self) -> int:
        return len(self._functions)

    def wait(self, until: int | None = None) -> None:
        """For all work, or for what was put before there were ``until`` pieces in all."""
        while self._functions and (until is None or min(self._functions) < until):
            assert self._sim.pump(1) == 1, self._sim.violations()
        if until is None:
            self._sim.pump()
        if self._error is not None:
            error, self._error = self._error, None
            raise RuntimeError("the device failed") from error

    @property
    def num_put(self) -> int:
        return self._num


class _Later(TorchDispatchMode):
    """Puts each operation into the stream, and gives tensors of the shapes that it will have."""

    def __init__(self, runtime: DeferredRuntime) -> None:
        super().__init__()
        self._runtime = runtime

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        stream = self._runtime.stream
        if stream.is_running or not _tensors((args, kwargs)):
            return func(*args, **kwargs)
        aliases = [each.alias_info for each in func._schema.returns]
        if any(alias is not None and not alias.is_write for alias in aliases):
            given = func(*args, **kwargs)
            places = {tensor.untyped_storage().data_ptr() for tensor in _tensors((args, kwargs))}
            if all(out.untyped_storage().data_ptr() in places for out in _tensors(given)):
                return given  # views, by which nothing is read; else copies, as of to() at times
        written = [a.name for a in func._schema.arguments if a.alias_info and a.alias_info.is_write]
        if written:
            given = _arguments(func, args, kwargs)
            stream.put(lambda: func(*args, **kwargs))
            found = [given[name] for name in written]
            return found[0] if len(found) == 1 else tuple(found)
        if func in _WAITS:
            self._runtime.num_forced_waits += 1
            stream.wait()
            return func(*args, **kwargs)
        outputs = func(*args, **kwargs)  # for their shapes: its inputs mean nothing yet
        for out in _tensors(outputs):
            out.fill_(float("nan") if out.is_floating_point() else 0)

        def run() -> None:
            computed = func(*args, **kwargs)
            for out, value in zip(_tensors(outputs), _tensors(computed), strict=True):
                out.copy_(value)

        stream.put(run)
        return outputs


_aten: Any = torch.ops.aten
_WAITS = (_aten._local_scalar_dense.default, _aten.nonzero.default, _aten.equal.default)


def _tensors(values: Any) -> list[Tensor]:
    if isinstance(values, Tensor):
        return [values]
    if isinstance(values, dict):
        values = values.values()
    elif not isinstance(values, (tuple, list)):
        return []
    return [tensor for value in values for tensor in _tensors(value)]


def _arguments(func: Any, args: Any, kwargs: dict[str, Any]) -> dict[str, Any]:
    names = [argument.name for argument in func._schema.arguments]
    return dict(zip(names, args, strict=False)) | kwargs


class _Fetched:
    def __init__(self, runtime: DeferredRuntime, copies: list[Tensor]) -> None:
        self._runtime = runtime
        self._copies = copies
        self._until = runtime.stream.num_put

    def take(self) -> list[NDArray[Any]]:
        self._runtime.num_takes += 1
        self._runtime.most_pending = max(
            self._runtime.most_pending, self._runtime.stream.num_put - self._until
        )
        self._runtime.stream.wait(self._until)
        return [copy.numpy() for copy in self._copies]


class DeferredMemory(CudaMemory):
    """Pages of the simulated machine, whose addresses are the processor's."""

    def __init__(self, sim: SimCuda, stream: Stream) -> None:
        super().__init__(library=str(sim.path), spare_bytes=0)
        self._stream = stream

    @property
    def total_bytes(self) -> int:
        return 1 << 26

    def tensor(self, buffer: np.ndarray[Any, Any]) -> Tensor:
        return torch.from_numpy(buffer)

    def wait(self) -> None:
        self._stream.wait()

    def release_unused(self) -> bool:
        return False


class DeferredRuntime(TorchCpuRuntime):
    """See the module's text. ``graphs``: tapes, whose operations are put one by one."""

    def __init__(self, sim: SimCuda, *, graphs: bool = False) -> None:
        super().__init__(graphs=graphs)
        self.stream = Stream(sim)
        self._memory = DeferredMemory(sim, self.stream)
        self.is_late = False
        self.num_takes = 0
        self.num_forced_waits = 0
        #: The most work that lay behind what the host waited for: that of the step ahead.
        self.most_pending = 0

    def memory(self, spare_bytes: int | None = None) -> MemoryDevice:
        return self._memory

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        """While an engine is built (``is_late`` is not set yet), work is done at once."""
        with _Later(self) if self.is_late else contextlib.nullcontext():
            yield

    def upload(self, array: NDArray[Any], out: Tensor | None = None) -> Tensor:
        source = torch.from_numpy(array.copy())
        return source if out is None else out[: len(source)].copy_(source)

    def fetch(self, tensors: Sequence[Tensor]) -> _Fetched:
        copies = [torch.zeros(tensor.shape, dtype=tensor.dtype) for tensor in tensors]
        for copy, tensor in zip(copies, tensors, strict=True):
            copy.copy_(tensor)
        return _Fetched(self, copies)

    def begin_capture(self) -> None:
        self.synchronize()
        super().begin_capture()

    def synchronize(self) -> None:
        self.stream.wait()


_CALLS: dict[int, Any] = {}


@torch.library.custom_op("vmserve_tests::deferred_attention", mutates_args=())
def _attend(
    step: int,
    layer: int,
    scale: float,
    window: int,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cos: Tensor,
    sin: Tensor,
) -> Tensor:
    spec = LayerAttention(layer, scale, window or None)
    attended: Tensor = _CALLS[step](spec, q, k, v, Rotary(cos, sin))
    return attended.clone()


class SnapshotCpu(CpuBackend):
    """The processor's kernels, over block tables as they were when the step was launched: a
    device has a copy of them."""

    def bind(self, view: KVView, batch: RaggedBatch) -> Any:
        if isinstance(view, PagedView):
            tables = [
                replace(kind, block_tables=torch.from_numpy(kind.block_tables.numpy().copy()))
                for kind in view.tables
            ]
            view = replace(view, tables=tuple(tables))
        return CpuBackend().bind(view, batch)


class DeferredCpu(SnapshotCpu):
    """One operation of torch's a layer: for a model that is not deferred as a whole."""

    def bind(self, view: KVView, batch: RaggedBatch) -> Any:
        bound = super().bind(view, batch)
        step = len(_CALLS)
        _CALLS[step] = bound

        def call(
            spec: LayerAttention, q: Tensor, k: Tensor, v: Tensor, rotary: Rotary | None = None
        ) -> Tensor:
            if rotary is None:  # the kernels are measured, before any step
                attended: Tensor = bound(spec, q, k, v)
                return attended
            found: Tensor = _attend(
                step,
                spec.layer,
                spec.scale,
                spec.window or 0,
                q,
                k,
                v,
                rotary.cos,
                rotary.signed_sin,
            )
            return found

        return call


def _as_a_whole(model: LoadedModel, stream: Stream) -> Callable[..., Tensor]:
    """The model's ``forward`` as one piece of work."""
    network = model.network
    assert isinstance(network, NativeDecoder)

    def put(
        ids: Tensor,
        positions: Tensor,
        attention: Any,
        rows: Tensor | None = None,
        hidden: None = None,
    ) -> Tensor:
        num_rows = len(ids if rows is None else rows)
        out = torch.from_numpy(np.full((num_rows, model.config.vocab_size), np.nan, np.float32))

        def run() -> None:
            wanted = None if rows is None else rows.numpy()
            logits = network.forward(ids.numpy(), positions.numpy(), attention, wanted)
            out.copy_(torch.from_numpy(logits))

        stream.put(run)
        return out

    return put


def make_late(engine: LLMEngine, monkeypatch: pytest.MonkeyPatch) -> DeferredRuntime:
    """From here on the engine's steps run late; what the host samples waits for the device."""
    runtime = engine._runtime
    assert isinstance(runtime, DeferredRuntime)
    stream = runtime.stream

    def waiting(method: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            stream.wait()
            stream.is_running = True  # what it computes is there at once
            try:
                return method(*args)
            finally:
                stream.is_running = False

        return call

    for name in ("sample", "prompt_logprobs", "beam_candidates"):
        monkeypatch.setattr(engine.sampler, name, waiting(getattr(engine.sampler, name)))
    if not runtime.wants_graphs:
        forward = _as_a_whole(engine.runner.model, stream)
        late = SimpleNamespace(network=SimpleNamespace(forward=forward))
        monkeypatch.setattr(engine.runner, "model", late)
    runtime.is_late = True
    return runtime
