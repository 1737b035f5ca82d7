"""Random lives of an engine on the device: all features together, in a pool of a few pages.

As ``tests/e2e/test_random_lives.py``: requests of every kind arrive, are aborted and change their
regime while memory is refused and batches fail; each answer is the one that the request gets alone.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.test_random_lives import Asked, RandomLife
from vmserve import LLM, BeamSearchParams, RequestOutput
from vmserve.runner.runtime import TorchRuntime
from vmserve.text.tokenizer import load_tokenizer

pytestmark = pytest.mark.gpu

PAGE_BYTES = 2 << 20
NUM_HEADS, HEAD_TOKENS = 3, 96


@pytest.fixture(scope="module")
def device(runtime: TorchRuntime) -> str:
    return runtime.device_type


@pytest.fixture(scope="module")
def alone(device: str) -> Iterator[Callable[[Asked], RequestOutput]]:
    """The answer to a request that has a roomy engine for itself."""
    with LLM(
        dtype="float32", device=device, kv_cache_memory="64MiB", enable_prefix_caching=False
    ) as llm:

        def answer(asked: Asked) -> RequestOutput:
            if isinstance(asked.params, BeamSearchParams):
                return llm.beam_search([asked.prompt], asked.params)[0]
            return llm.generate([asked.prompt], asked.params)[0]

        yield answer


@pytest.fixture(scope="module")
def heads(model_dir: Path) -> list[list[int]]:
    """Beginnings that prompts share."""
    rng = random.Random(20)
    tokens = load_tokenizer(model_dir).encode("Once upon a time there was a little fox. " * 40)
    return [[*rng.sample(tokens, 3), *tokens[: HEAD_TOKENS - 3]] for _ in range(NUM_HEADS)]


@pytest.mark.parametrize(
    "options", [{}, {"async_scheduling": "on"}, {"speculative": "prompt-lookup"}], ids=str
)
@pytest.mark.parametrize("seed", range(3))
def test_a_random_life(
    seed: int,
    options: dict[str, Any],
    heads: list[list[int]],
    alone: Callable[[Asked], RequestOutput],
    device: str,
) -> None:
    pool = {"kv_page_size": None, "kv_cache_memory": (2 + seed) * PAGE_BYTES}
    life = RandomLife(seed, heads, device=device, **pool, **options)
    try:
        life.live(24, life.ask)
        life.check(alone)
    finally:
        life.llm.close()
