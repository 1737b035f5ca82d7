"""Embeddings: the final hidden states of ``transformers``, pooled, by every path."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from tests.clients import ProcessClient
from vmserve import LLM, InvalidRequestError, SamplingParams

import torch  # isort: skip
from transformers import AutoModelForCausalLM  # isort: skip


from vmserve.models.config import ModelConfig

Prompts = Callable[[int, int, int], list[list[int]]]
States = Callable[[list[int]], NDArray[np.float32]]
OPTIONS = {"dtype": "float32", "kv_cache_memory": "64MiB", "max_num_seqs": 16}


@pytest.fixture(scope="module")
def states(model_dir: Path) -> States:
    """``states(prompt)``: ``[tokens, hidden]`` behind the last norm."""
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32).eval()

    @torch.inference_mode()
    def compute(prompt: list[int]) -> NDArray[np.float32]:
        out: NDArray[np.float32] = model.model(torch.tensor([prompt])).last_hidden_state[0].numpy()
        return out

    return compute


def pooled(states: NDArray[np.float32], pooling: str) -> NDArray[np.float32]:
    state = states[-1] if pooling == "last" else states.mean(axis=0)
    return state / np.linalg.norm(state)


@pytest.mark.parametrize("layers", ["native", "torch"])
def test_the_states_of_transformers(prompts: Prompts, states: States, layers: str) -> None:
    """In chunks; on other paths they are the same: ``test_rows.py``."""
    given = prompts(6, 200, 3)
    with LLM(**OPTIONS, linear_backend=layers, max_num_batched_tokens=24) as llm:
        for pooling in ("last", "mean"):
            results = llm.embed(given, pooling=pooling)
            assert [result.prompt_token_ids for result in results] == given
            for result, prompt in zip(results, given, strict=True):
                assert result.embedding.dtype == np.float32
                expected = pooled(states(prompt), pooling)
                np.testing.assert_allclose(result.embedding, expected, atol=2e-5)


def test_beside_answers_and_after_a_prefix_hit(prompts: Prompts, states: States) -> None:
    """The mean is of all tokens, also where the cache has some of them."""
    [prompt] = prompts(1, 200, 4)
    with LLM(**OPTIONS) as llm:
        [before] = llm.generate([prompt], SamplingParams(temperature=0, max_tokens=4))
        hits = llm.stats()["prefix_cache_hits_total"]
        [last] = llm.embed([prompt], pooling="last")
        assert last.metrics.num_cached_tokens > 0
        assert llm.stats()["prefix_cache_hits_total"] > hits
        [mean] = llm.embed([prompt], pooling="mean")
        assert mean.metrics.num_cached_tokens == 0
        [after] = llm.generate([prompt], SamplingParams(temperature=0, max_tokens=4))
    np.testing.assert_allclose(last.embedding, pooled(states(prompt), "last"), atol=2e-5)
    np.testing.assert_allclose(mean.embedding, pooled(states(prompt), "mean"), atol=2e-5)
    assert after.outputs[0].token_ids == before.outputs[0].token_ids


def test_through_two_processes(states: States) -> None:
    async def run() -> NDArray[np.float32]:
        engine = ProcessClient(**OPTIONS)
        try:
            params = SamplingParams(max_tokens=0, pooling="auto", detokenize=False)
            [output] = [o async for o in engine.generate([5, 6, 7, 8], params)]
            assert output.embedding is not None
            return output.embedding
        finally:
            await engine.shutdown()

    np.testing.assert_allclose(asyncio.run(run()), states([5, 6, 7, 8])[-1], rtol=1e-3, atol=1e-3)


def test_fewer_dimensions_and_no_length(states: States) -> None:
    with LLM(**OPTIONS) as llm:
        [cut] = llm.embed("Once upon a time", dimensions=8)
        [raw] = llm.embed("Once upon a time", normalize=False)
        assert cut.embedding.shape == (8,)
        assert np.linalg.norm(cut.embedding) == pytest.approx(1, abs=1e-5)
        expected = states(raw.prompt_token_ids)[-1]
        np.testing.assert_allclose(raw.embedding, expected, rtol=1e-3, atol=1e-3)
        with pytest.raises(InvalidRequestError, match="dimensions must be from 1 to"):
            llm.embed("Once upon a time", dimensions=1 << 20)
        with pytest.raises(InvalidRequestError, match="pooling must be one of"):
            llm.embed("Once upon a time", pooling="max")  # type: ignore[arg-type]
    with pytest.raises(InvalidRequestError, match="max_tokens=0"):
        SamplingParams(pooling="last")


@pytest.mark.parametrize(
    ("said", "pooling"),
    [
        ({"pooling_mode_mean_tokens": True}, "mean"),
        ({"pooling_mode_lasttoken": True, "pooling_mode_mean_tokens": False}, "last"),
        (None, "last"),
    ],
)
def test_models_say_how_they_are_pooled(
    model_dir: Path, tmp_path: Path, said: dict[str, bool] | None, pooling: str
) -> None:
    shutil.copy(model_dir / "config.json", tmp_path)
    if said is not None:
        (tmp_path / "1_Pooling").mkdir()
        (tmp_path / "1_Pooling" / "config.json").write_text(json.dumps(said))
    assert ModelConfig.from_directory(tmp_path).pooling == pooling
