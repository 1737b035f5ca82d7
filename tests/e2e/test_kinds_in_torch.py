"""Layers with windows have pages of their own where torch computes, and answers stay the same.

That windows gave memory up, and that pages went from one kind to another, is what the counters say.
Steps in flight: ``tests/runner/test_async_kinds.py``.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from vmserve import LLM, BeamSearchParams, SamplingParams  # before torch: how its threads wait

import torch  # isort: skip
from transformers import AutoModelForCausalLM, PreTrainedConfig, Qwen2Config  # isort: skip

from tests.models.checkpoints import _SMALL, gemma3, gpt_oss, save

_LAYERS = {"num_hidden_layers": 4}
FAMILIES: dict[str, PreTrainedConfig] = {
    "gemma3": gemma3(**_LAYERS, sliding_window=24),
    "gpt-oss": gpt_oss(**_LAYERS, sliding_window=20),
    "qwen2": Qwen2Config(
        **{**_SMALL, **_LAYERS, "hidden_size": 64},
        use_sliding_window=True,
        sliding_window=24,
        max_window_layers=2,
    ),
}
OPTIONS: dict[str, Any] = {
    "dtype": "float32",
    "linear_backend": "torch",
    "max_model_len": 192,
    "max_num_batched_tokens": 64,
    "swap_space": "1MiB",
}
RANKS = (
    pytest.mark.slow,
    pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="two ranks need two cores"),
)
PROMPTS = [[2 + (k * i) % 90 for i in range(20 + 30 * k)] for k in range(1, 5)]
NUM_TOKENS = 24


@pytest.fixture(scope="module")
def checkpoints(
    tmp_path_factory: pytest.TempPathFactory,
) -> dict[str, tuple[Path, list[list[int]]]]:
    """Where each family is, and what ``transformers`` answers."""
    found = {}
    for name, config in FAMILIES.items():
        directory = save(config, tmp_path_factory.mktemp(name) / "model")
        model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
        answers = []
        for prompt in PROMPTS:
            tokens = list(prompt)
            with torch.inference_mode():
                for _ in range(NUM_TOKENS):
                    tokens.append(int(model(torch.tensor([tokens])).logits[0, -1].argmax()))
            answers.append(tokens[len(prompt) :])
        found[name] = directory, answers
    return found


def used_by_kind(llm: LLM) -> list[list[int]]:
    """The list gets the pages that each kind uses, after each step."""
    used: list[list[int]] = []
    step = llm.engine.step

    def watched_step() -> object:
        result = step()
        used.append([stats.used_pages for stats in llm.engine.memory.kind_stats()])
        llm.engine.memory.check()
        return result

    llm.engine.step = watched_step  # type: ignore[method-assign, assignment]
    return used


@pytest.mark.parametrize(
    ("family", "backend", "regime", "preemption", "tight_memory", "num_ranks"),
    [
        ("gemma3", "reference", "paged", "swap", "288KiB", 1),
        ("gemma3", "cpu", "auto", "recompute", "288KiB", 1),
        ("gpt-oss", "sdpa", "virtual", "recompute", "240KiB", 1),
        ("gpt-oss", "cpu", "paged", "swap", "176KiB", 1),
        ("qwen2", "sdpa", "virtual", "swap", "288KiB", 1),
        pytest.param("gemma3", "sdpa", "virtual", "swap", "288KiB", 2, marks=RANKS),
        pytest.param("gpt-oss", "cpu", "paged", "recompute", "208KiB", 2, marks=RANKS),
    ],
)
def test_as_transformers_through_a_pool_that_is_short(
    checkpoints: Any,
    model_dir: Path,
    family: str,
    backend: str,
    regime: str,
    preemption: str,
    tight_memory: str,
    num_ranks: int,
) -> None:
    """Greedy ones after hits; then choices and beams as in a pool that holds all."""
    directory, expected = checkpoints[family]
    common = {"ignore_eos": True, "detokenize": False}
    greedy = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, **common)
    drawn = SamplingParams(n=3, temperature=1.0, seed=1, max_tokens=20, **common)
    beams = BeamSearchParams(beam_width=3, max_tokens=12, **common)

    def answers(kv_cache_memory: str) -> tuple[Any, dict[str, Any], Any, int]:
        with LLM(
            model=str(directory),
            tokenizer=str(model_dir),
            attention_backend=backend,
            kv_regime=regime,
            kv_page_size="4KiB",
            block_size=8 if regime == "paged" else 16,
            kv_cache_memory=kv_cache_memory,
            preemption=preemption,
            tensor_parallel_size=num_ranks,
            **OPTIONS,
        ) as llm:
            assert [kind.window is None for kind in llm.engine.memory.kinds] == [True, False]
            used = used_by_kind(llm)
            found: list[Any] = [llm.generate(PROMPTS, greedy) for _ in range(2)]
            assert [[o.outputs[0].token_ids for o in each] for each in found] == [expected] * 2
            found = [*llm.generate(PROMPTS, drawn), *llm.beam_search(PROMPTS[:2], beams)]
            given = sum(kind.pages_given_back_total for kind in llm.engine.memory.kind_stats())
            return [[o.token_ids for o in one.outputs] for one in found], llm.stats(), used, given

    roomy, stats, used, _ = answers("8MiB")
    assert stats["prefix_cache_hits_total"] > 0
    assert stats["forks_total"] > 0
    # Up to 172 tokens of four requests, of which the windows keep 24 and a chunk.
    assert max(windows for _, windows in used) < 0.75 * max(everything for everything, _ in used)
    tight, stats, _, given = answers(tight_memory)
    assert tight == roomy
    assert stats["num_preemptions_total"] > 0
    assert preemption == "recompute" or stats["num_swapped_out_total"] > 0
    assert given > 0  # pages of one kind became another's
