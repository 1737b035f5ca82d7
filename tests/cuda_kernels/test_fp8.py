"""A KV cache of codes in the memory and the engine: what moves bytes moves scales with them."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.cuda_kernels.emulation import EmulatedLauncher, Emulators
from tests.sim.simcuda import NOTHING, SimConfig, SimCuda
from tests.sim.test_engine_on_cuda import SimulatedRuntime
from tests.support.stepping import answers_of
from vmserve.attention import BACKENDS, PREFERRED, create_backend
from vmserve.attention.cuda import CudaPagedBackend
from vmserve.config import EngineConfig
from vmserve.engine.engine import LLMEngine
from vmserve.errors import UnsupportedError
from vmserve.memory.base import Regime
from vmserve.models.config import ModelConfig
from vmserve.numbers.dtypes import DType
from vmserve.runner.torch_runtime import TorchCpuRuntime

#: A compiler is waited for, which takes long where many want the processor.
pytestmark = pytest.mark.timeout(600)


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


class HalfRuntime(Half, TorchCpuRuntime): ...


class HalfOnDevice(Half, SimulatedRuntime): ...


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
        "dtype": "bfloat16", "kv_cache_dtype": "fp8", "kv_cache_memory": "8MiB",
        "attention_backend": "cuda", "linear_backend": "torch", "max_model_len": 64,
        "max_num_seqs": 4,
    }  # fmt: skip
    return EngineConfig(**(defaults | options))


#: One whole block each. In the pages of FULL, each grows into a second page.
PROMPTS = [[2 + (7 * i + 13 * j) % 90 for i in range(26 + 2 * j)] for j in range(3)]
answers = functools.partial(answers_of, max_tokens=10)


def tokens(engine: LLMEngine, prompts: Sequence[list[int]]) -> list[int]:
    """Of all answers, one after the other."""
    return [token for [choice] in answers(engine, prompts) for token in choice]


@pytest.mark.parametrize("regime", ["virtual", "paged"])
def test_the_engine_answers_as_with_the_type_of_the_model(emulated: None, regime: Any) -> None:
    """Nearly. A cache that lost its scales would answer otherwise from the second token on."""
    found = []
    for dtype in ("auto", "fp8"):
        engine = LLMEngine(
            make_config(kv_cache_dtype=dtype, kv_regime=regime), runtime=HalfRuntime()
        )
        texts = ["Once upon a time there was a", "The cat sat on the", "Tom said to his mother"]
        found.append(tokens(engine, [engine.tokenizer.encode(text) for text in texts]))
        layout = engine.memory.layout
        engine.close()
    assert (layout.dtype, layout.shape.token_bytes) == (DType.FP8, 2 * (2 * 64 + 16))
    equal = sum(one == other for one, other in zip(*found, strict=True))
    assert equal >= 0.75 * len(found[0])


@pytest.fixture(scope="module")
def expected(emulators: Emulators) -> list[list[list[int]]]:
    """On the host, one request after the other."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)  # as the tests have it
    with emulated_backend(emulators):
        engine = LLMEngine(make_config(), runtime=HalfRuntime())
        found = [answers(engine, [prompt])[0] for prompt in PROMPTS]
        engine.close()
    torch.set_num_threads(num_threads)
    return found


@contextmanager
def on_device(sim: SimCuda, **options: Any) -> Iterator[LLMEngine]:
    """An engine on the simulated device, which leaves nothing there."""
    sim.configure(SimConfig(seed=1, pump_per_mille=50, total_bytes=1 << 24))
    engine = LLMEngine(make_config(**options), runtime=HalfOnDevice(sim))
    yield engine
    engine.close()
    del engine
    assert sim.violations() == []


def convert(engine: LLMEngine, step: int) -> None:
    """Every other request into a view, each at other steps."""
    for index in range(step % 2, len(PROMPTS), 2):
        engine.convert(str(index), Regime.PAGED if (step + index) % 4 else Regime.VIRTUAL)


def leave(engine: LLMEngine, step: int) -> None: ...


#: Four pages of 32 tokens; the requests end with six.
FULL = {"kv_layers_per_group": 4, "kv_page_size": "36KiB", "kv_cache_memory": "144KiB"}


@pytest.mark.parametrize(
    ("options", "n", "counters"),
    [
        ({"kv_regime": "virtual"}, 1, ("prefix_cache_hits_total",)),
        ({"kv_regime": "paged"}, 1, ("prefix_cache_hits_total",)),
        ({"kv_regime": "virtual"}, 2, ("copied_blocks_total",)),
        ({"kv_regime": "paged"}, 2, ("copied_blocks_total",)),
        ({"kv_regime": "auto"}, 1, ("converted_to_paged_total", "converted_to_virtual_total")),
        (
            {"kv_regime": "virtual", "preemption": "swap", "swap_space": "1MiB", **FULL},
            1,
            ("swapped_out_blocks_total", "swapped_in_blocks_total"),
        ),
        ({"kv_regime": "paged", "preemption": "recompute", **FULL}, 1, ("num_preemptions_total",)),
    ],
    ids=["virtual", "paged", "forked", "forked-paged", "converted", "swapped", "preempted"],
)
def test_the_same_tokens_on_a_device(sim, emulated, expected, options, n, counters):
    """Twice, so that blocks of the first time are found; views of ``auto`` change, each request's
    at other steps. Choices of one request begin in the middle of a block, which is copied."""
    with on_device(sim, **options) as engine:
        change = functools.partial(convert if options["kv_regime"] == "auto" else leave, engine)
        for _ in range(2):
            assert answers(engine, PROMPTS, change, n=n) == [choices * n for choices in expected]
        stats = engine.stats()
        assert all(stats[name] > 0 for name in counters)
    del engine, change
    assert sim.counts() == NOTHING


def test_blocks_come_back_from_files(
    sim: SimCuda, emulated: None, expected: list[list[list[int]]], tmp_path: Path
) -> None:
    """In the other view than that which wrote them."""
    for regime in ("virtual", "paged"):
        with on_device(sim, kv_regime=regime, kv_persist=str(tmp_path)) as engine:
            assert answers(engine, PROMPTS) == expected
            stats = engine.stats()
        del engine
    assert stats["persist_restored_blocks_total"] == len(PROMPTS)
    assert stats["prefix_cache_hits_total"] == 16 * len(PROMPTS)
