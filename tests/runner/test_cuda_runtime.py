"""``CudaRuntime`` and ``CudaMemory`` over a pretended ``torch.cuda``: who is told what, when."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import vmserve  # noqa: F401  first: it sets how torch's threads wait

import torch  # isort: skip

from tests.sim.simcuda import GRANULE, SimConfig, SimCuda
from vmserve.errors import UnsupportedError
from vmserve.memory import cuda as cuda_memory
from vmserve.memory import cuda_driver
from vmserve.memory.cuda import CudaMemory
from vmserve.runner import torch_runtime
from vmserve.runner.torch_runtime import CudaRuntime


class FakeStream:
    def __init__(self, handle: int) -> None:
        self.cuda_stream = handle
        self.num_waits = 0

    def synchronize(self) -> None:
        self.num_waits += 1


class FakeEvent:
    def __init__(self, enable_timing: bool = False) -> None:
        self.stream: FakeStream | None = None
        self.num_waits = 0
        self.is_timing = enable_timing

    def elapsed_time(self, other: FakeEvent) -> float:
        assert self.is_timing
        assert other.num_waits == 1
        return 30.0

    def record(self, stream: FakeStream) -> None:
        self.stream = stream

    def synchronize(self) -> None:
        self.num_waits += 1


class FakeGraph:
    """Each call with the stream that is current then."""

    def __init__(self, cuda: FakeCuda) -> None:
        self.cuda = cuda

    def note(self, *call: str) -> None:
        self.cuda.calls.append((self.cuda.current, *call))

    def capture_begin(self, *, pool: Any, capture_error_mode: str) -> None:
        self.note("begin", pool, capture_error_mode)
        if pool == self.cuda.refused_pool:
            raise RuntimeError("no capture on this pool")

    def capture_end(self) -> None:
        self.note("end")

    def replay(self) -> None:
        self.note("replay")


class FakeCuda:
    """The parts of ``torch.cuda`` that are used, with nothing behind them."""

    def __init__(self) -> None:
        self.calls: list[Any] = []
        self.default = FakeStream(0)
        self.current = self.default
        self.made = FakeStream(0x77)
        self.recording = FakeStream(0x88)
        self.given = iter((self.made, self.recording))
        self.reserved, self.allocated = 100, 100
        self.num_pools = 0
        self.refused_pool = ""
        self.events: list[FakeEvent] = []

    def Event(self, enable_timing: bool = False) -> FakeEvent:
        self.events.append(FakeEvent(enable_timing))
        return self.events[-1]

    def current_device(self) -> int:
        return 0

    def Stream(self, device: Any) -> FakeStream:
        return next(self.given)

    def ExternalStream(self, handle: int, device: int) -> FakeStream:
        assert handle == self.made.cuda_stream
        return self.made

    def CUDAGraph(self) -> FakeGraph:
        return FakeGraph(self)

    def default_stream(self, device: Any) -> FakeStream:
        return self.default

    def current_stream(self, device: Any) -> FakeStream:
        return self.current

    @contextlib.contextmanager
    def stream(self, stream: FakeStream) -> Iterator[None]:
        before, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = before

    def mem_get_info(self, device: Any) -> tuple[int, int]:
        return 3 << 30, 4 << 30

    def memory_reserved(self, device: Any) -> int:
        return self.reserved

    def memory_allocated(self, device: Any) -> int:
        return self.allocated

    def empty_cache(self) -> None:
        self.reserved = self.allocated

    def graph_pool_handle(self) -> str:
        self.num_pools += 1
        return f"pool {self.num_pools}"


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    fake = FakeCuda()
    monkeypatch.setattr(torch_runtime, "_cuda", fake)
    monkeypatch.setattr(cuda_memory, "_cuda", fake)
    return fake


def test_the_pool_follows_the_stream_that_torch_uses(
    cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch, sim: SimCuda
) -> None:
    made = CudaRuntime()
    assert made.gpu_bytes == 4 << 30
    sim.make_current()
    cuda.made.cuda_stream = sim.new_stream()
    monkeypatch.setattr(CudaMemory.__init__, "__kwdefaults__", {
        "device": 0, "spare_bytes": cuda_driver.SPARE_BYTES, "library": str(sim.path)
    })  # fmt: skip
    pages = made.memory(1 << 30)
    assert isinstance(pages, CudaMemory)
    assert (pages.stream, pages.spare_bytes) == (cuda.made.cuda_stream, 1 << 30)
    assert made.memory(5).spare_bytes == cuda_driver.SPARE_BYTES  # type: ignore[attr-defined]
    with pytest.raises(RuntimeError, match=r"stream 0x0, but the KV memory follows 0x"):
        made.check()
    with made.active():
        made.check()
    assert pages.total_bytes == 4 << 30
    assert (pages.ready_bytes, pages.grow_bytes) == (64 << 20, 64 << 20)
    assert pages.missing_bytes() == 0  # 3 GiB are free
    pages.spare_bytes = 4 << 30
    cuda.reserved = 500  # of which torch uses 100
    assert pages.missing_bytes() == (1 << 30) - 400
    cuda.reserved = 100
    assert pages.granularity == GRANULE
    pages.wait()
    assert cuda.made.num_waits == 1
    CudaMemory(0, library=str(sim.path)).wait()
    assert cuda.default.num_waits == 1


def test_torch_gives_back_what_it_only_caches(cuda: FakeCuda, sim: SimCuda) -> None:
    pages = CudaMemory(0, library=str(sim.path))
    assert not pages.release_unused()
    cuda.reserved = 500
    assert pages.release_unused()
    assert cuda.reserved == 100


def test_what_is_fetched_is_waited_for_alone(
    cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By an event behind the copies: work that was given to the stream after it goes on."""
    made = CudaRuntime()
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *a, pin_memory, **k: empty(*a, **k))
    source = torch.tensor([3, 4])
    with made.active():
        fetched = made.fetch([source, torch.tensor([0.5])])
    source.fill_(9)
    [event] = cuda.events
    assert (event.stream, event.num_waits) == (cuda.made, 0)
    first, second = fetched.take()
    assert (first.tolist(), second.tolist()) == ([3, 4], [0.5])
    assert (event.num_waits, cuda.made.num_waits) == (1, 0)


def test_capturing(cuda: FakeCuda) -> None:
    """On one memory pool, in a mode in which other threads may map pages, and on a stream that
    nobody else gives work to: what the mapper clears meanwhile must not become a part of it."""
    made = CudaRuntime()
    made.new_graphs()
    with made.active():
        for _ in range(2):
            made.begin_capture()
            assert not gc.isenabled()
            made.end_capture().replay()
            assert gc.isenabled()
        apart, own = cuda.recording, cuda.made
        one = [(apart, "begin", "pool 1", "thread_local"), (apart, "end"), (own, "replay")]
        assert cuda.calls == one * 2
        assert (own.num_waits, apart.num_waits) == (2, 0)
        made.new_graphs()
        made.begin_capture()
        made.abort_capture()
        made.abort_capture()
        assert cuda.calls[6:] == [(apart, "begin", "pool 2", "thread_local"), (apart, "end")]
        assert (cuda.current, gc.isenabled()) == (own, True)


@pytest.mark.parametrize("is_captured", [True, False])
def test_timing_by_events_around_replays(cuda: FakeCuda, is_captured: bool) -> None:
    """Where the work cannot be captured, around the work itself."""
    made = CudaRuntime()
    runs: list[str] = []
    cuda.refused_pool = "" if is_captured else "pool 1"
    with made.active():
        seconds = made.timer(lambda: runs.append("work"))
        cuda.calls.clear()
        before = len(runs)
        assert seconds() == pytest.approx(30e-3 / 10)
    assert before == (2 if is_captured else 1)
    assert len(runs) - before == (0 if is_captured else 11)
    assert [call for _, call in cuda.calls] == (["replay"] * 11 if is_captured else [])
    assert [event.stream for event in cuda.events] == [cuda.made, cuda.made]


def test_a_capture_that_cannot_begin_leaves_the_engine_on_its_stream(cuda: FakeCuda) -> None:
    made = CudaRuntime()
    made.new_graphs()
    cuda.refused_pool = "pool 1"
    with made.active():
        with pytest.raises(RuntimeError, match="no capture on this pool"):
            made.begin_capture()
        made.abort_capture()
        made.check()
    assert gc.isenabled()
    assert [call for _, call, *_ in cuda.calls] == ["begin"]


def test_tensors_are_the_addresses_themselves(
    cuda: FakeCuda, sim: SimCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    pages = CudaMemory(0, library=str(sim.path))
    buffer = np.zeros((2, 8), dtype=np.uint8)
    given: list[Any] = []

    def as_tensor(value: Any, device: str) -> torch.Tensor:
        given.append((value.__cuda_array_interface__, device))
        return torch.from_numpy(value.buffer if len(given) == 1 else value.buffer.copy())

    monkeypatch.setattr(torch, "as_tensor", as_tensor)
    assert pages.tensor(buffer).data_ptr() == buffer.ctypes.data
    interface, where = given[0]
    assert where == "cuda:0"
    assert interface == {
        "shape": (2, 8), "typestr": "|u1", "data": (buffer.ctypes.data, False),
        "strides": None, "version": 3,
    }  # fmt: skip
    with pytest.raises(UnsupportedError, match=r"copies device memory .* needs torch 2\.11"):
        pages.tensor(buffer)


def test_growing_leaves_the_spare_bytes_free(sim: SimCuda) -> None:
    sim.configure(SimConfig(total_bytes=64 * GRANULE))
    pages = CudaMemory(0, library=str(sim.path), spare_bytes=16 * GRANULE)
    driver = pages.create_driver(GRANULE, 64, None)
    driver.create([(0, 40)])
    with pytest.raises(MemoryError, match="would leave less than"):
        driver.create([(40, 10)])
