"""Kinds of layers with steps in flight: the same tokens, and nothing given up that a step reads.

The device is :mod:`tests.runner.deferred`: a step's kernels run when the host waits for its tokens,
long after the next one is planned and its memory is mapped.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.runner.test_async_scheduling import both, deferred
from vmserve import SamplingParams
from vmserve.engine.engine import LLMEngine
from vmserve.models import resolve_model
from vmserve.models.config import ModelConfig

from transformers import Qwen3Config  # isort: skip  # torch is imported above

from tests.models.checkpoints import save

__all__ = ["deferred"]

TEXT = "Once upon a time there was a little fox who ran to the river and saw a big dog"
WORDS = TEXT.split()
PROMPTS = [" ".join(WORDS[i:] + WORDS * (1 + i % 3)) for i in range(6)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """A random Qwen3, two layers of three with a window, with the embedded model's tokenizer."""
    model_dir = resolve_model(None)
    vocab = ModelConfig.from_directory(model_dir).vocab_size
    config = Qwen3Config(
        vocab_size=vocab,
        hidden_size=48,
        intermediate_size=80,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=256,
        use_sliding_window=True,
        sliding_window=24,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
    )
    directory = save(config, tmp_path_factory.mktemp("windows") / "model")
    return {"model": str(directory), "tokenizer": str(model_dir), "kv_page_size": 16 << 10}


def long(index: int) -> SamplingParams:
    return SamplingParams(
        temperature=0.0 if index % 2 else 0.9,
        seed=index,
        n=1 + index % 2,
        max_tokens=20 + 8 * index,
        ignore_eos=True,
    )


@pytest.mark.parametrize(
    ("regime", "graphs"), [("virtual", False), ("paged", False), ("auto", True), ("paged", True)]
)
def test_steps_in_flight(
    deferred: Callable[..., LLMEngine], model: dict[str, Any], regime: str, graphs: bool
) -> None:
    """Chunks, forks, hits and long answers."""
    prompts = [*PROMPTS, *PROMPTS[:2]]
    stats = both(
        deferred,
        long,
        graphs=graphs,
        prompts=prompts,
        kv_regime=regime,
        max_num_batched_tokens=32,
        **model,
    )
    assert stats["steps_overlapped_total"] > 20
    assert stats["prefix_cache_hits_total"] > 0
    assert stats["forks_total"] > 0


@pytest.mark.parametrize("preemption", ["recompute", "swap"])
@pytest.mark.parametrize("regime", ["virtual", "paged"])
def test_too_little_memory(
    deferred: Callable[..., LLMEngine], model: dict[str, Any], regime: str, preemption: str
) -> None:
    """Windows give their past up while steps run, and pages go from one kind to the other."""
    options = {**model, "kv_cache_memory": "320KiB", "kv_regime": regime, "max_model_len": 192}
    options |= {"preemption": preemption, "swap_space": "8MiB" if preemption == "swap" else 0}
    options |= {"max_num_batched_tokens": 32}
    used: list[tuple[int, int]] = []
    given: list[int] = []

    def watch(engine: LLMEngine, step: int) -> None:
        kinds = engine.memory.kind_stats()
        everything, windows = (kind.used_pages for kind in kinds)
        used.append((everything, windows))
        given.append(sum(kind.pages_given_back_total for kind in kinds))

    stats = both(deferred, long, watch=watch, prompts=PROMPTS, **options)
    assert given[-1] > 0
    assert max(windows for _, windows in used) < max(everything for everything, _ in used)
    assert stats["num_preemptions_total"] > 0
    assert preemption == "recompute" or stats["swapped_in_blocks_total"] > 0
    assert stats["steps_overlapped_total"] > 30
