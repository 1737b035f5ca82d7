"""Every family in the engine: the same greedy tokens as ``transformers.generate``."""

from __future__ import annotations

from pathlib import Path

import pytest

from vmserve import LLM  # first: it sets how torch's threads wait

import torch  # isort: skip
from transformers import PreTrainedConfig  # isort: skip

from tests.models.checkpoints import CONTEXT, FOREIGN, NATIVE, VARIANTS, save
from tests.support.engines import greedy, tokens_of
from tests.support.reference import generated
from vmserve.config import EngineConfig, resolve
from vmserve.errors import ConfigurationError, UnsupportedError
from vmserve.models import ModelConfig
from vmserve.models.blocks import SharedExpert
from vmserve.models.native import NativeDecoder

MODELS = {**VARIANTS, **NATIVE, **FOREIGN}
#: Served by the decoder, and (the last three) by transformers over our memory.
NAMES = ["llama-gqa-llama3", "opt", "opt-350m", "gpt2", "gpt2-scales"]
NAMES += ["phi3", "mixtral", "qwen2-moe", "qwen3-moe", "deepseek-v2", "gpt-oss", "gemma2", "gemma3"]
NAMES += ["qwen3-next", "qwen3.5"]
NAMES += ["gpt-neox", "olmo2", "olmoe"]
NUM_TOKENS = 24
GREEDY = greedy(NUM_TOKENS, detokenize=False)


def engine(directory: Path, tokenizer: Path, **options: object) -> LLM:
    return LLM(
        model=str(directory),
        tokenizer=str(tokenizer),
        **{  # type: ignore[arg-type]
            "dtype": "float32",
            "kv_cache_memory": "8MiB",
            "max_num_seqs": 8,
            "max_num_batched_tokens": 32,
            **options,
        },
    )


def assert_same_tokens(config: PreTrainedConfig, directory: Path, tokenizer: Path) -> None:
    save(config, directory)
    lengths = (70, 1, 33, 12)
    prompts = [[2 + (7 * i + 13 * j) % 90 for i in range(n)] for j, n in enumerate(lengths)]
    expected = [[generated(directory, prompt, NUM_TOKENS)] for prompt in prompts]
    capped = getattr(config, "attn_logit_softcapping", None) is not None
    backend = "reference" if capped else "sdpa"
    is_native = any(config is each for each in NATIVE.values())
    through_torch = {"kv_regime": "virtual", "attention_backend": backend}
    for options in (through_torch, {"kv_regime": "virtual"}, {"kv_regime": "paged"}):
        with engine(directory, tokenizer, **options) as llm:
            results = llm.generate(prompts, GREEDY)
            llm.engine.memory.check()
            native = isinstance(llm.engine.runner.model.network, NativeDecoder)
        assert native == (is_native and "attention_backend" not in options)
        assert results[0].metrics.num_prefill_chunks > 2
        assert results[0].metrics.kv_regime == options["kv_regime"]
        assert tokens_of(results) == expected


@pytest.mark.parametrize("name", NAMES)
def test_the_same_tokens(name: str, tmp_path: Path, model_dir: Path) -> None:
    assert_same_tokens(MODELS[name], tmp_path / "model", model_dir)


def test_a_softcap_is_served_or_refused_at_start(tmp_path: Path, model_dir: Path) -> None:
    assert_same_tokens(FOREIGN["vaultgemma"], tmp_path / "model", model_dir)
    save(FOREIGN["vaultgemma"], tmp_path / "capped")
    with pytest.raises(UnsupportedError, match=r"scores at 50, which the sdpa backend cannot do"):
        engine(tmp_path / "capped", model_dir, attention_backend="sdpa")


@pytest.mark.parametrize("regime", ["virtual", "paged"])
def test_a_step_that_is_tried_again_applies_a_state_once(
    regime: str, tmp_path: Path, model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Memory ends in every layer of every kind of step, and once the pool has given some back it
    does not."""
    save(MODELS["qwen3-next"], tmp_path)
    prompts = [[2 + 7 * i % 90 for i in range(n)] for n in (40, 9)]
    expected = [[generated(tmp_path, prompt, NUM_TOKENS)] for prompt in prompts]
    options = {"linear_backend": "torch", "kv_regime": regime}
    calls = failures = 0
    computed = SharedExpert.__call__

    def scarce(self: SharedExpert, x: torch.Tensor) -> torch.Tensor:
        nonlocal calls, failures
        calls += 1
        if calls % 5 == 0:
            failures += 1
            raise torch.OutOfMemoryError("no memory")
        return computed(self, x)

    with engine(tmp_path, model_dir, **options) as llm:
        monkeypatch.setattr(SharedExpert, "__call__", scarce)
        results = llm.generate(prompts, GREEDY)
        llm.engine.memory.check()
    assert failures > NUM_TOKENS / 5
    assert tokens_of(results) == expected


def test_states_leave_steps_that_overlap_out(tmp_path: Path) -> None:
    """Where it is chosen, on a GPU; who asks for it is refused (test_rows.py)."""
    save(NATIVE["qwen3.5"], tmp_path)
    config = ModelConfig.from_directory(tmp_path)
    assert not resolve(EngineConfig(), config, gpu_bytes=64 << 30).async_scheduling


def test_learned_positions_bound_the_context(tmp_path: Path, model_dir: Path) -> None:
    save(VARIANTS["opt"], tmp_path)
    with pytest.raises(ConfigurationError, match=r"300 is above the model's own context of 256"):
        engine(tmp_path, model_dir, max_model_len=300)
    prompt = [2 + i % 90 for i in range(CONTEXT - 2)]
    with engine(tmp_path, model_dir) as llm:
        [result] = llm.generate([prompt], greedy(100, detokenize=False))
    # The last token is sampled, never computed: it needs no position.
    assert len(result.outputs[0].token_ids) == 2
    assert result.outputs[0].finish_reason == "length"
