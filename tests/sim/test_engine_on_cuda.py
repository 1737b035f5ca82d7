"""The whole engine over ``CudaDriver`` on the simulated library: the same tokens as on the host.

The processor's kernels read and write simulated device memory at its addresses. What the driver
queues (clearing, copies, marks) runs late: before a step's kernels, as their stream would have it,
and otherwise when chance says.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from tests.drafting import drafting_engines
from tests.memory.support import opened
from tests.sim.simcuda import NOTHING, SimConfig, SimCuda
from vmserve import KVCache, SamplingParams, plan_layout
from vmserve.config import EngineConfig
from vmserve.engine.engine import LLMEngine
from vmserve.errors import OutOfMemoryError
from vmserve.memory.base import Growth, MemoryPlan, Regime, Shortfall, SwapIn
from vmserve.memory.cuda import CudaMemory
from vmserve.memory.device import MemoryDevice
from vmserve.memory.manager import MemoryManager, MemoryOptions
from vmserve.memory.tensors import contiguous_view, paged_view
from vmserve.runner.torch_runtime import TorchCpuRuntime

import torch  # isort: skip


class SimulatedMemory(CudaMemory):
    """``CudaMemory`` of the simulated machine, whose addresses are the processor's."""

    def __init__(self, sim: SimCuda, total_bytes: int = 1 << 24) -> None:
        super().__init__(library=str(sim.path), spare_bytes=0)
        self._sim = sim
        self._total_bytes = total_bytes
        self.num_waits = 0
        #: Bytes that torch holds without need, and that it lacks.
        self.unused = self.missing = 0

    @property
    def total_bytes(self) -> int:
        return self._total_bytes

    def tensor(self, buffer: np.ndarray[Any, Any]) -> torch.Tensor:
        return torch.from_numpy(buffer)

    def wait(self) -> None:
        self.num_waits += 1
        self._sim.pump()

    def release_unused(self) -> bool:
        held, self.unused = self.unused, 0
        return held > 0

    def missing_bytes(self) -> int:
        return self.missing


class SimulatedRuntime(TorchCpuRuntime):
    def __init__(self, sim: SimCuda, **options: Any) -> None:
        super().__init__(**options)
        self._sim = sim
        self.pages = SimulatedMemory(sim)

    def memory(self, spare_bytes: int | None = None) -> MemoryDevice:
        return self.pages

    def check(self) -> None:
        self._sim.pump()  # kernels run behind what was queued before them


PROMPTS = ["Once upon a time", "The cat sat", "A big dog ran to the river and", "Tom said"]


def tokens_of(engine: LLMEngine, num_tokens: int, **params: Any) -> dict[str, list[list[int]]]:
    for index, prompt in enumerate(PROMPTS):
        asked = SamplingParams(max_tokens=num_tokens, ignore_eos=True, seed=index, **params)
        engine.add_request(str(index), engine.tokenizer.encode(prompt), asked)
    done: dict[str, list[list[int]]] = {}
    while engine.has_unfinished:
        result = engine.step()
        assert not result.failures
        for output in result.outputs:
            if output.finished:
                done[output.request_id] = [choice.token_ids for choice in output.outputs]
    engine.memory.check()
    return done


def on_the_host(config: EngineConfig, num_tokens: int, **params: Any) -> dict[str, list[list[int]]]:
    host = LLMEngine(config, runtime=TorchCpuRuntime())
    expected = tokens_of(host, num_tokens, **params)
    host.close()
    return expected


@pytest.fixture
def clean(sim: SimCuda) -> Iterator[SimCuda]:
    """A machine on which, at the end, nothing was done that may not."""
    yield sim
    assert sim.violations() == []


OPTIONS: dict[str, Any] = {
    "dtype": "float32",
    "max_model_len": 256,
    "max_num_seqs": 8,
    "kv_cache_memory": "8MiB",
    "linear_backend": "torch",  # which captured steps have in any case
}


SMALL = {"kv_cache_memory": "1MiB"}


@pytest.mark.parametrize(
    ("options", "counter"),
    [
        ({"kv_regime": "virtual"}, "adopted_pages_total"),
        ({"kv_regime": "paged"}, "published_blocks_total"),
        (
            {"kv_regime": "virtual", **SMALL, "swap_space": "8MiB", "preemption": "swap"},
            "swapped_in_blocks_total",
        ),
        ({"kv_regime": "paged", **SMALL}, "num_preemptions_total"),
    ],
)
def test_the_same_tokens_as_on_the_host(
    clean: SimCuda, options: dict[str, Any], counter: str
) -> None:
    clean.configure(SimConfig(seed=1, pump_per_mille=50, total_bytes=1 << 24))
    config = EngineConfig(**OPTIONS | options)
    expected = on_the_host(config, 70, temperature=0.7, n=2)
    engine = LLMEngine(config, runtime=SimulatedRuntime(clean))
    assert tokens_of(engine, 70, temperature=0.7, n=2) == expected
    assert engine.stats()[counter] > 0
    assert engine.stats()["used_pages"] == 0
    engine.close()
    del engine
    assert clean.counts() == NOTHING


@pytest.mark.parametrize("kv_regime", ["virtual", "paged"])
def test_drafts_are_computed_beside_captured_steps(clean: SimCuda, kv_regime: Any) -> None:
    """A step with drafts is not captured, and waits for the tokens before it."""
    clean.configure(SimConfig(seed=1, pump_per_mille=50, total_bytes=1 << 24))
    config = EngineConfig(**OPTIONS, kv_regime=kv_regime)
    with drafting_engines(1) as made:
        engine = LLMEngine(config, runtime=SimulatedRuntime(clean, graphs=True))
    [drafting] = made
    expected = on_the_host(config, 70, temperature=0.7, n=2)
    assert tokens_of(engine, 70, temperature=0.7, n=2) == expected
    for index, prompt in enumerate(PROMPTS):
        for choice, answer in enumerate(expected[str(index)]):
            drafting.tell(engine.tokenizer.encode(prompt), index, choice, answer)
    drafting.is_on = True
    assert tokens_of(engine, 70, temperature=0.7, n=2) == expected
    assert engine.counters.accepted_tokens > 0
    assert sum(drafting.rejected) > 0
    engine.close()
    del engine
    assert clean.counts() == NOTHING


def test_pages_are_made_at_start_ahead_of_need_and_kept_while_nothing_runs(sim: SimCuda) -> None:
    """Making one takes a device call for each group and view: nobody's first token waits for it."""
    sim.configure(SimConfig(total_bytes=1 << 26))
    runtime = SimulatedRuntime(sim)
    runtime.pages = SimulatedMemory(sim, total_bytes=1 << 26)
    sizes = {"kv_page_size": "16KiB", "kv_cache_memory": "32MiB"}
    config = EngineConfig(**OPTIONS | sizes, kv_mapper="off", kv_regime="virtual")
    engine = LLMEngine(config, runtime=runtime)
    ready = (1 << 20) // engine.memory.layout.total_page_bytes
    assert engine.memory.stats().free_pages == engine.memory.ready_pages == ready > 4
    calls = sim.num_calls("cuMemCreate")
    tokens_of(engine, 4, temperature=0)
    engine.memory.trim(ready, drop_idle=True)
    engine.pool.idle()
    tokens_of(engine, 4, temperature=0)
    assert sim.num_calls("cuMemCreate") == calls
    assert engine.memory.stats().committed_pages == ready
    engine.close()


class ShortRuntime(SimulatedRuntime):
    """Has no memory for the next ``failures`` pieces of work of each kind."""

    memory_errors = (MemoryError,)

    def __init__(self, sim: SimCuda, missing: int, **failures: int) -> None:
        super().__init__(sim)
        self.pages.missing = missing
        self.failures = failures

    def _fail(self, kind: str) -> None:
        if self.failures.get(kind):
            self.failures[kind] -= 1
            raise MemoryError(f"no room to {kind}")

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        self._fail("compute")
        return super().forward(*args, **kwargs)

    def sampler(self, vocab_size: int, *, is_async: bool) -> Any:
        chosen = super().sampler(vocab_size, is_async=is_async)
        sample = chosen.sample

        def failing(*args: Any) -> Any:
            self._fail("sample")
            return sample(*args)

        chosen.sample = failing  # type: ignore[method-assign]
        return chosen


@pytest.mark.parametrize(
    ("failures", "given"), [({"compute": 1}, 2), ({"compute": 3}, 2 + 4 + 8), ({"sample": 1}, 2)]
)
def test_activations_take_what_they_lack_and_not_the_whole_prefix_cache(
    clean: SimCuda, failures: dict[str, int], given: int
) -> None:
    options: dict[str, Any] = {"kv_page_size": "16KiB", "kv_mapper": "off", "kv_regime": "paged"}
    config = EngineConfig(**OPTIONS, **options)
    runtime = ShortRuntime(clean, missing=0)
    engine = LLMEngine(config, runtime=runtime)
    expected = tokens_of(engine, 160, temperature=0)
    before = engine.memory.stats()
    assert before.idle_pages > 2 * given
    runtime.pages.missing = 2 * before.page_bytes
    runtime.failures = dict(failures)
    assert tokens_of(engine, 1, temperature=0) == {k: [v[0][:1]] for k, v in expected.items()}
    after = engine.memory.stats()
    assert after.pages_given_back_total - before.pages_given_back_total == given
    assert after.cached_blocks > 0
    assert runtime.failures == dict.fromkeys(failures, 0)
    engine.close()


LAYOUT = plan_layout(2, 2, 16, "float32", 4096, page_tokens=16)
PAGE = LAYOUT.total_page_bytes


def manager(
    pages: SimulatedMemory, limit_pages: int, *, num_slots: int = 2, **options: Any
) -> MemoryManager:
    return MemoryManager(
        LAYOUT,
        num_slots=num_slots,
        max_len=64,
        limit_bytes=limit_pages * PAGE,
        options=MemoryOptions(driver=pages, **options),
    )


@pytest.fixture
def pages(sim: SimCuda) -> SimulatedMemory:
    return SimulatedMemory(sim)


def grow(memory: MemoryManager, seq: int, num_tokens: int) -> int:
    plan = memory.plan([Growth(seq, num_tokens)])
    assert isinstance(plan, MemoryPlan)
    return memory.apply(plan)


def test_pages_of_a_running_step_are_waited_for_where_nothing_else_is_left(
    sim: SimCuda, pages: SimulatedMemory
) -> None:
    memory = manager(pages, 2, deferred_reclamation=False)
    first, second = opened(memory), opened(memory)
    epoch = grow(memory, first, 32)
    sim.launch_write(contiguous_view(memory).keys[0].data_ptr(), 8, 1)
    memory.release(first)
    # Not launched: its kernels may still come.
    assert isinstance(memory.plan([Growth(second, 32)]), Shortfall)
    memory.launched(epoch)
    assert pages.num_waits == 0
    assert isinstance(memory.plan([Growth(second, 32)]), MemoryPlan)
    assert pages.num_waits == 1
    memory.launched(grow(memory, second, 32))
    memory.check()
    memory.close()
    del memory
    assert sim.violations() == []


def test_a_memory_that_is_closed_waits_for_what_is_queued(
    sim: SimCuda, pages: SimulatedMemory
) -> None:
    """Kernels and clears of the last step would find nothing mapped, and lose the device."""
    memory = manager(pages, 2, deferred_reclamation=False)
    first, second = opened(memory), opened(memory)
    memory.launched(grow(memory, first, 32))
    memory.release(first)
    assert isinstance(memory.plan([Growth(second, 32)]), MemoryPlan)
    epoch = grow(memory, second, 32)
    sim.launch_write(contiguous_view(memory).keys[0].data_ptr(), 8, 1)
    memory.launched(epoch)
    memory.close()
    del memory
    assert sim.violations() == []
    assert sim.counts().allocations == 0


def test_no_access_changes_of_pages_that_a_running_step_may_read(
    clean: SimCuda, pages: SimulatedMemory
) -> None:
    """CUDA documents no answer to what then happens: a map gives access once, and that is all."""
    memory = manager(pages, 8, zero_pages="never")
    first = opened(memory)
    for length in (16, 32, 48, 64):
        memory.launched(grow(memory, first, length))
        memory.wait()
    memory.release(first)
    calls = clean.num_calls("cuMemSetAccess")
    memory.launched(grow(memory, opened(memory), 64))  # in the slot that is mapped
    memory.wait()
    assert memory.stats().adopted_pages_total == 4
    assert memory.stats().access_calls_total == 0
    assert clean.num_calls("cuMemSetAccess") == calls
    memory.close()


def test_without_a_mark_the_device_is_waited_for(clean: SimCuda, pages: SimulatedMemory) -> None:
    memory = manager(pages, 4, deferred_reclamation=False)
    seq = opened(memory)
    epoch = grow(memory, seq, 16)
    clean.fail(1, 1, name="cuEventCreate")
    memory.launched(epoch)
    assert pages.num_waits == 1
    memory.release(seq)
    assert memory.stats().waiting_pages == 0
    memory.close()


def test_what_torch_holds_without_need_is_asked_for_before_giving_up(
    clean: SimCuda, pages: SimulatedMemory
) -> None:
    memory = manager(pages, 4, deferred_reclamation=False)
    seq = opened(memory)
    memory.launched(grow(memory, seq, 16))
    clean.fail(1, 2, name="cuMemCreate")
    with pytest.raises(OutOfMemoryError):
        grow(memory, seq, 32)
    pages.unused = 1
    clean.fail(1, 2, name="cuMemCreate")
    memory.launched(grow(memory, seq, 32))
    assert memory.length(seq) == 32
    assert pages.unused == 0
    memory.check()
    memory.close()


def test_a_slot_that_is_freed_stays_mapped_for_kernels_launched_since_the_last_step(
    clean: SimCuda, pages: SimulatedMemory
) -> None:
    with KVCache(LAYOUT, pages, num_slots=2, max_len=64, limit_bytes=8 * PAGE) as cache:
        assert (cache.alloc_slot(), cache.alloc_slot()) == (0, 1)
        assert cache.step([64, 64]) == 0
        keys, _ = cache.tensors()[0]
        clean.launch_write(keys[1].data_ptr(), 64 * LAYOUT.shape.token_stride, 5)
        cache.free_slot(0)
        clean.pump()
        assert cache.stats().waiting_pages == 0
        clean.launch_read(keys[1].data_ptr(), 64 * LAYOUT.shape.token_stride, 5)
        cache.free_slot(1)
        assert cache.stats().waiting_pages == 4
        cache.set_limit(1 * PAGE)
        clean.pump()
        del keys


def swapped_memory(pages: SimulatedMemory) -> tuple[MemoryManager, int, int]:
    """One sequence has all four pages, and is on its way to the host; another one is empty."""
    memory = manager(pages, 4, swap_bytes=8 * PAGE, mapper="off")
    seq, other = opened(memory, regime=Regime.PAGED), opened(memory)
    memory.launched(grow(memory, seq, 64))
    for group in range(LAYOUT.num_groups):
        first = paged_view(memory).keys[group].data_ptr()
        pages._sim.launch_write(first, 64 * LAYOUT.shape.token_stride, 7 + group)
    assert memory.swap_out([seq])
    return memory, seq, other


def test_pages_that_are_swapped_out_can_be_had_when_their_copies_have_ended(
    clean: SimCuda, pages: SimulatedMemory
) -> None:
    memory, seq, other = swapped_memory(pages)
    assert (pages.num_waits, memory.is_copying) == (0, True)
    stats = memory.stats()
    assert (stats.waiting_pages, stats.copying_blocks, stats.swap_blocks) == (4, 4, 4)
    with memory.without_waiting():
        answer = memory.plan([Growth(other, 64)])
        assert isinstance(answer, Shortfall)
        assert (answer.missing_pages, answer.waiting_pages) == (4, 4)
        assert memory.available_pages() == 0
    memory.launched(grow(memory, other, 64))  # waits for them
    assert not memory.is_copying
    assert memory.stats().copying_blocks == 0
    memory.release(other)
    back = memory.plan([], [SwapIn(seq)])
    assert isinstance(back, MemoryPlan)
    memory.launched(memory.apply(back))
    table = memory.blocks(seq)
    for group in range(LAYOUT.num_groups):
        first = paged_view(memory).keys[group].data_ptr()
        for block in table:
            address = first + int(block) * 16 * LAYOUT.shape.token_stride
            clean.launch_read(address, 16 * LAYOUT.shape.token_stride, 7 + group)
    memory.wait()
    memory.check()
    memory.close()


def test_copies_that_have_ended_are_found_without_waiting(
    clean: SimCuda, pages: SimulatedMemory
) -> None:
    memory, _, other = swapped_memory(pages)
    clean.pump()
    assert not memory.is_copying
    with memory.without_waiting():
        memory.launched(grow(memory, other, 64))
    assert pages.num_waits == 0
    memory.check()
    memory.close()


@pytest.mark.parametrize("name", ["cuEventRecord", "cuStreamWaitEvent", "cuMemcpyAsync"])
def test_a_swap_that_the_device_refuses_leaves_everything_as_it_was(
    clean: SimCuda, pages: SimulatedMemory, name: str
) -> None:
    memory = manager(pages, 4, swap_bytes=8 * PAGE, mapper="off")
    seq = opened(memory, regime=Regime.PAGED)
    memory.launched(grow(memory, seq, 64))
    for call in (1, 2):  # of recording: for the order, then as the mark
        clean.fail(call, 1, name=name, forever=True)
        assert not memory.swap_out([seq])
        clean.no_faults()
        assert (memory.is_copying, memory.stats().swap_blocks) == (False, 0)
        memory.check()
        if name == "cuStreamWaitEvent":
            break
    assert memory.swap_out([seq])
    memory.wait()
    assert memory.stats().waiting_pages == 0
    memory.close()


def test_a_cache_for_other_frameworks(clean: SimCuda, pages: SimulatedMemory) -> None:
    """Kernels launched between two calls are over before what they may read is unmapped."""
    cache = KVCache(LAYOUT, pages, num_slots=2, max_len=64, limit_bytes=4 * PAGE)
    slot = cache.alloc_slot()
    assert slot is not None
    assert cache.step({slot: 64}) == 0
    clean.launch_write(cache.tensors()[0][0][slot, 40].data_ptr(), 64, 5)
    cache.free_slot(slot)
    assert cache.trim() == 4
    assert clean.violations() == []
    assert clean.counts().handles == 0
    with pytest.raises(ValueError, match="addresses that read as zero"):
        cache.tensors(unmapped="zero")
    cache.close()


def test_closing_in_the_middle_of_a_copy(clean: SimCuda, pages: SimulatedMemory) -> None:
    """What it reads and writes is there until it has ended."""
    memory, _, _ = swapped_memory(pages)
    memory.close()
    del memory
    assert clean.counts() == NOTHING
