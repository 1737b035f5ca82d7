"""A KV cache of codes in the memory and the engine: what moves bytes moves scales with them."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.cuda_kernels.emulation import EmulatedLauncher, Emulators
from tests.sim.simcuda import NOTHING, SimConfig, SimCuda
from tests.sim.test_engine_on_cuda import SimulatedRuntime
from vmserve import SamplingParams
from vmserve.attention import BACKENDS, PREFERRED, create_backend
from vmserve.attention.base import LayerAttention, RaggedBatch
from vmserve.attention.cuda import CudaPagedBackend
from vmserve.config import EngineConfig
from vmserve.engine.engine import LLMEngine
from vmserve.errors import UnsupportedError
from vmserve.memory.base import Fork, Growth, MemoryOp, MemoryPlan, Regime, SwapIn
from vmserve.memory.layout import plan_layout
from vmserve.memory.manager import MemoryManager, MemoryOptions
from vmserve.memory.tensors import contiguous_view, paged_view
from vmserve.models.config import ModelConfig
from vmserve.numbers.dtypes import DType
from vmserve.runner.torch_runtime import TorchCpuRuntime

#: A compiler is waited for, which takes long where many want the processor.
pytestmark = pytest.mark.timeout(600)


class Cache:
    """Three layers of one KV head and two query heads, which the kernels write and read."""

    def __init__(self, emulators: Emulators, regime: Regime) -> None:
        self.memory = MemoryManager(
            plan_layout(3, 1, 64, DType.FP8, 4096, layers_per_group=3),
            num_slots=3,
            max_len=256,
            limit_bytes=1 << 20,
            options=MemoryOptions(swap_bytes=1 << 20, mapper="off"),
        )
        self.regime = regime
        is_paged = regime is Regime.PAGED
        self.view = (paged_view if is_paged else contiguous_view)(self.memory)
        self.backend = CudaPagedBackend(EmulatedLauncher(emulators))
        generator = torch.Generator().manual_seed(0)
        self.rows = torch.randn(256, 4, 64, generator=generator).to(torch.bfloat16)

    def open(self) -> int:
        seq = self.memory.open(regime=self.regime)
        assert seq is not None
        return seq

    def begin(self, growths: Sequence[Growth], *ops: MemoryOp) -> int:
        plan = self.memory.plan(growths, ops)
        assert isinstance(plan, MemoryPlan)
        return self.memory.apply(plan)

    def change(self, op: MemoryOp) -> None:
        self.memory.complete(self.begin([], op))

    def attend(self, seq: int, past: int, new: int) -> torch.Tensor:
        """Write these positions of all layers, and return what the last one's rows have."""
        epoch = self.begin([Growth(seq, past + new)])
        place = seq if self.regime is Regime.PAGED else int(self.memory.slots([seq])[0])
        call = self.backend.bind(self.view, RaggedBatch.build([place], [past], [new]))
        q, k, v = self.rows[past : past + new].split([2, 1, 1], dim=1)
        outs = [call(LayerAttention(layer, 0.125), q, k + layer, v) for layer in range(3)]
        self.memory.complete(epoch)
        return torch.stack(outs)[:, -1].view(torch.int16)


@pytest.mark.parametrize("regime", list(Regime))
def test_forks_and_swaps_keep_codes_and_scales(emulators: Emulators, regime: Regime) -> None:
    cache = Cache(emulators, regime)
    first = cache.open()
    cache.attend(first, 0, 140)
    fork = cache.open()
    cache.change(Fork(fork, first, 135))  # in the middle of a block, which is copied
    found = [cache.attend(first, 140, 1)]
    for length in range(135, 141):  # the same numbers again, at other addresses
        forked = cache.attend(fork, length, 1)
    assert cache.memory.stats().copied_blocks_total > 0
    found.append(forked)
    if regime is Regime.PAGED:
        assert cache.memory.swap_out([fork])
        other = cache.open()
        cache.attend(other, 0, 200)  # where it was
        cache.memory.release(other)
        cache.change(SwapIn(fork))
        found.append(cache.attend(fork, 141, 1))
        found.append(cache.attend(first, 141, 1))
    for one, same in zip(found[::2], found[1::2], strict=True):
        assert torch.equal(one, same)
    cache.memory.check()
    cache.memory.close()


@pytest.mark.parametrize("regime", list(Regime))
def test_auto_takes_the_kernels_that_read_it(
    emulators: Emulators, regime: Regime, monkeypatch: pytest.MonkeyPatch
) -> None:
    def create(name: str, head_dim: int = 128) -> str:
        shape = (head_dim, DType.BFLOAT16)
        return create_backend(name, regime, *shape, device="cuda", kv_dtype=DType.FP8).name

    monkeypatch.setitem(BACKENDS, "cuda", lambda: CudaPagedBackend(EmulatedLauncher(emulators)))
    assert create("auto") == create("cuda") == "cuda"
    with pytest.raises(
        UnsupportedError, match=r"device cuda .*\(cuda: its kernels want a head_dim"
    ):
        create("auto", 80)
    others = ("flash-attn", "torch-flash", "sdpa") if regime is Regime.VIRTUAL else ("flashinfer",)
    for name in (*others, "reference"):
        with pytest.raises(UnsupportedError, match=f"the {name} backend reads no KV cache of fp8"):
            create(name)


class Half:
    """Computes in the type that was asked for, also where that is slow."""

    def dtype(self, requested: str, model: ModelConfig) -> DType:
        return DType(requested)


class HalfRuntime(Half, TorchCpuRuntime):
    pass


class HalfOnDevice(Half, SimulatedRuntime):
    pass


@contextmanager
def emulated_backend(emulators: Emulators) -> Iterator[None]:
    """Engines attend with the emulator, and a row has the same bits whatever it is beside."""
    linear = torch.nn.functional.linear

    def of_rows(x: torch.Tensor, *weights: Any) -> torch.Tensor:
        rows = [linear(row, *weights) for row in x.flatten(0, -2)]
        return torch.stack(rows).unflatten(0, x.shape[:-1])

    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(BACKENDS, "cuda", lambda: CudaPagedBackend(EmulatedLauncher(emulators)))
        patch.setitem(PREFERRED, "cpu", ("cuda", *PREFERRED["cpu"]))
        patch.setattr(torch.nn.functional, "linear", of_rows)
        yield


@pytest.fixture
def emulated(emulators: Emulators) -> Iterator[None]:
    with emulated_backend(emulators):
        yield


def make_config(**options: Any) -> EngineConfig:
    defaults: dict[str, Any] = {
        "dtype": "bfloat16",
        "kv_cache_dtype": "fp8",
        "kv_cache_memory": "8MiB",
        "attention_backend": "cuda",
        "linear_backend": "torch",
        "max_model_len": 64,
        "max_num_seqs": 4,
    }
    return EngineConfig(**(defaults | options))


#: One whole block each. In the pages of FULL, each grows into a second page.
PROMPTS = [[2 + (7 * i + 13 * j) % 90 for i in range(26 + 2 * j)] for j in range(3)]
NUM_TOKENS = 10


def tokens_of(
    engine: LLMEngine, prompts: Sequence[list[int]], *, converts: bool = False
) -> list[list[int]]:
    """``converts``: requests change their view, each at other steps."""
    asked = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
    for index, prompt in enumerate(prompts):
        engine.add_request(str(index), prompt, asked)
    found: dict[str, list[int]] = {}
    for step in itertools.count():
        if not engine.has_unfinished:
            break
        result = engine.step()
        assert not result.failures
        for output in result.outputs:
            if output.finished:
                found[output.request_id] = output.outputs[0].token_ids
        for index in range(step % 2, len(prompts) if converts else 0, 2):
            engine.convert(str(index), Regime.PAGED if (step + index) % 4 else Regime.VIRTUAL)
    engine.memory.check()
    return [found[str(index)] for index in range(len(prompts))]


@pytest.mark.parametrize("regime", ["virtual", "paged"])
def test_the_engine_answers_as_with_the_type_of_the_model(emulated: None, regime: Any) -> None:
    """Nearly. A cache that lost its scales would answer otherwise from the second token on."""
    found = []
    for dtype in ("auto", "fp8"):
        engine = LLMEngine(
            make_config(kv_cache_dtype=dtype, kv_regime=regime), runtime=HalfRuntime()
        )
        texts = ["Once upon a time there was a", "The cat sat on the", "Tom said to his mother"]
        answers = tokens_of(engine, [engine.tokenizer.encode(text) for text in texts])
        found.append([token for answer in answers for token in answer])
        layout = engine.memory.layout
        engine.close()
    assert (layout.dtype, layout.shape.token_bytes) == (DType.FP8, 2 * (2 * 64 + 16))
    equal = sum(one == other for one, other in zip(*found, strict=True))
    assert equal >= 0.75 * len(found[0])


@pytest.fixture(scope="module")
def expected(emulators: Emulators) -> list[list[int]]:
    """On the host, one request after the other."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)  # as the tests have it
    with emulated_backend(emulators):
        engine = LLMEngine(make_config(), runtime=HalfRuntime())
        found = [tokens_of(engine, [prompt])[0] for prompt in PROMPTS]
        engine.close()
    torch.set_num_threads(num_threads)
    return found


#: Four pages of 32 tokens; the requests end with six.
FULL = {"kv_layers_per_group": 4, "kv_page_size": "36KiB", "kv_cache_memory": "144KiB"}


@pytest.mark.parametrize(
    ("options", "counters"),
    [
        ({"kv_regime": "virtual"}, ("prefix_cache_hits_total",)),
        ({"kv_regime": "paged"}, ("prefix_cache_hits_total",)),
        ({"kv_regime": "auto"}, ("converted_to_paged_total", "converted_to_virtual_total")),
        (
            {"kv_regime": "virtual", "preemption": "swap", "swap_space": "1MiB", **FULL},
            ("swapped_out_blocks_total", "swapped_in_blocks_total"),
        ),
        ({"kv_regime": "paged", "preemption": "recompute", **FULL}, ("num_preemptions_total",)),
    ],
    ids=["virtual", "paged", "converted", "swapped", "preempted"],
)
def test_the_same_tokens_on_a_device(
    sim: SimCuda,
    emulated: None,
    expected: list[list[int]],
    options: dict[str, Any],
    counters: Sequence[str],
) -> None:
    """Twice, so that blocks of the first time are found."""
    sim.configure(SimConfig(seed=1, pump_per_mille=50, total_bytes=1 << 24))
    engine = LLMEngine(make_config(**options), runtime=HalfOnDevice(sim))
    for _ in range(2):
        assert tokens_of(engine, PROMPTS, converts=options["kv_regime"] == "auto") == expected
    stats = engine.stats()
    assert all(stats[name] > 0 for name in counters)
    engine.close()
    del engine
    assert sim.violations() == []
    assert sim.counts() == NOTHING


def test_blocks_come_back_from_files(
    sim: SimCuda, emulated: None, expected: list[list[int]], tmp_path: Path
) -> None:
    """In the other view than that which wrote them."""
    for regime in ("virtual", "paged"):
        sim.configure(SimConfig(seed=1, pump_per_mille=50, total_bytes=1 << 24))
        config = make_config(kv_regime=regime, kv_persist=str(tmp_path))
        engine = LLMEngine(config, runtime=HalfOnDevice(sim))
        assert tokens_of(engine, PROMPTS) == expected
        stats = engine.stats()
        engine.close()
        del engine
        assert sim.violations() == []
    assert stats["persist_restored_blocks_total"] == len(PROMPTS)
    assert stats["prefix_cache_hits_total"] == 16 * len(PROMPTS)
