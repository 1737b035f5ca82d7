"""Greedy tokens on the device against ``transformers`` on the device, by :mod:`.criterion`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.gpu.criterion import MARGINS, Logits, disagreement
from tests.support.stepping import tokens_of
from vmserve.engine.build import IDLE_BYTES
from vmserve.engine.engine import LLMEngine
from vmserve.memory.base import Regime
from vmserve.numbers.torch_dtypes import as_torch
from vmserve.runner.runtime import TorchRuntime

import torch  # isort: skip
from transformers import AutoModelForCausalLM  # isort: skip

pytestmark = pytest.mark.gpu

TEXTS = [
    "Once upon a time there was a little fox named Mia. Mia lived near the river",
    "The cat",
    "A big dog ran to the river and saw",
    "Tom said that the key opened the door of the mill. They ran to the mill and",
    "One day, Mia",
    "In the box there were seven coins and a key.",
] * 2
NUM_TOKENS = 48


@pytest.fixture(scope="module")
def reference(model_dir: Path, runtime: TorchRuntime) -> Callable[[torch.dtype], Logits]:
    models: dict[torch.dtype, Any] = {}

    def of(dtype: torch.dtype) -> Logits:
        if dtype not in models:
            model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=dtype)
            models[dtype] = model.to(runtime.device).eval()

        @torch.inference_mode()
        def logits(tokens: list[int]) -> torch.Tensor:
            ids = torch.tensor([tokens], device=runtime.device)
            found: torch.Tensor = models[dtype](ids, use_cache=False).logits
            return found[0]

        return logits

    return of


def generate(
    engine: LLMEngine, change: Callable[[int], None] = lambda step: None, **params: Any
) -> tuple[list[list[int]], list[list[int]]]:
    """Prompts and what follows each."""
    prompts = [engine.tokenizer.encode(text) for text in TEXTS]
    return prompts, tokens_of(engine, prompts, change, max_tokens=NUM_TOKENS, **params)


def check(prompts: list[list[int]], ours: list[list[int]], logits: Logits, margin: float) -> None:
    """Within the margin, and most tokens equal: a backend that is wrong soon leaves the road."""
    equal = [
        disagreement(prompt, tokens, logits, margin)[0]
        for prompt, tokens in zip(prompts, ours, strict=True)
    ]
    assert sum(equal) >= 0.5 * NUM_TOKENS * len(equal)


@pytest.mark.parametrize("eager", [False, True])
@pytest.mark.parametrize("regime", ["virtual", "paged"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_greedy(
    make_engine: Callable[..., LLMEngine],
    reference: Callable[[torch.dtype], Logits],
    dtype: str,
    regime: str,
    eager: bool,
) -> None:
    engine = make_engine(dtype=dtype, kv_regime=regime, enforce_eager=eager)
    computed = as_torch(engine.runner.model.dtype)
    prompts, tokens = generate(engine)
    assert (engine.runner._graphs is None) == eager
    if engine.runner._graphs is not None:
        assert engine.runner._graphs.num_captured > 0
    check(prompts, tokens, reference(computed), MARGINS[computed])


def test_captured_steps_give_the_tokens_of_eager_ones(
    make_engine: Callable[..., LLMEngine],
) -> None:
    """In float32 rounding leaves greedy tokens alone: the same ones, both regimes in turn."""
    found = []
    for eager in (True, False):
        engine = make_engine(dtype="float32", enforce_eager=eager)

        def change(step: int, engine: LLMEngine = engine) -> None:
            for index in range(len(TEXTS)):
                regime = Regime.PAGED if (index + step // 5) % 2 else Regime.VIRTUAL
                engine.convert(str(index), regime)

        found.append(generate(engine, change)[1])
    assert found[0] == found[1]


@pytest.mark.parametrize("eager", [False, True])
def test_overlapped_steps_give_the_tokens_of_single_ones(
    make_engine: Callable[..., LLMEngine], eager: bool
) -> None:
    found = []
    for overlap in ("off", "on"):
        engine = make_engine(dtype="float32", enforce_eager=eager, async_scheduling=overlap)
        found.append(generate(engine)[1])
        assert (engine.stats()["steps_overlapped_total"] > 0) == (overlap == "on")
    assert found[0] == found[1]


def test_seeds_give_the_same_samples_in_both_regimes(make_engine: Callable[..., LLMEngine]) -> None:
    engines = (make_engine(dtype="float32", kv_regime=regime) for regime in ("virtual", "paged"))
    found = [generate(each, temperature=0.8, top_p=0.95, seed=5)[1] for each in engines]
    agree = sum(a == b for a, b in zip(*found, strict=True))
    assert agree >= len(TEXTS) - 1  # a draw may fall on the edge between two tokens


def test_preempted_and_swapped(
    make_engine: Callable[..., LLMEngine], reference: Callable[[torch.dtype], Logits]
) -> None:
    engine = make_engine(dtype="float32", max_num_seqs=12)
    pages = engine.memory.layout.pages_for(512)
    limit = max(4, pages + 2) * engine.memory.layout.total_page_bytes
    engine.close()
    small = make_engine(
        dtype="float32", max_num_seqs=12, kv_cache_memory=limit, swap_space="1GiB",
        preemption="swap", kv_regime="virtual",
    )  # fmt: skip
    prompts, tokens = generate(small)
    check(prompts, tokens, reference(torch.float32), MARGINS[torch.float32])


def test_an_idle_engine_gives_its_memory_back(
    make_engine: Callable[..., LLMEngine], runtime: TorchRuntime
) -> None:
    """All but what is kept ready: a device's reserve, which is bounded and does not grow, is no
    leak."""
    engine = make_engine(dtype="float32", enable_prefix_caching=False)
    memory = engine.memory
    page_bytes = memory.layout.total_page_bytes
    ready_bytes = memory.ready_pages * page_bytes
    assert ready_bytes <= memory.limit_bytes // 8
    for _ in range(2):
        generate(engine)
        engine.step()
        stats = memory.stats()
        assert stats.used_pages == stats.waiting_pages == stats.quarantined_pages == 0
        assert stats.committed_pages == stats.free_pages + stats.idle_pages
        assert stats.committed_pages * page_bytes <= max(IDLE_BYTES, ready_bytes)
