"""Every family in the engine: the same greedy tokens as ``transformers.generate``."""

from __future__ import annotations

from pathlib import Path

import pytest

from vmserve import LLM, SamplingParams  # first: it sets how torch's threads wait

import torch  # isort: skip
from transformers import PreTrainedConfig  # isort: skip

from tests.models.checkpoints import CONTEXT, FOREIGN, NATIVE, VARIANTS, reference_model, save
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


def generated(directory: Path, prompt: list[int]) -> list[int]:
    model = reference_model(directory, torch.float32)
    tokens = torch.tensor([prompt])
    output = model.generate(
        tokens,
        attention_mask=torch.ones_like(tokens),
        max_new_tokens=NUM_TOKENS,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
    )
    produced: list[int] = output[0, len(prompt) :].tolist()
    return produced


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
    prompts = [[2 + (7 * i + 13 * j) % 90 for i in range(length)] for j, length in enumerate(
        (70, 1, 33, 12)
    )]  # fmt: skip
    params = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True, detokenize=False)
    expected = [generated(directory, prompt) for prompt in prompts]
    capped = getattr(config, "attn_logit_softcapping", None) is not None
    backend = "reference" if capped else "sdpa"
    is_native = any(config is each for each in NATIVE.values())
    through_torch = {"kv_regime": "virtual", "attention_backend": backend}
    for options in (
        through_torch,
        {"kv_regime": "virtual"},
        {"kv_regime": "paged"},
    ):
        with engine(directory, tokenizer, **options) as llm:
            results = llm.generate(prompts, params)
            llm.engine.memory.check()
            native = isinstance(llm.engine.runner.model.network, NativeDecoder)
        assert native == (is_native and "attention_backend" not in options)
        assert results[0].metrics.num_prefill_chunks > 2
        assert results[0].metrics.kv_regime == options["kv_regime"]
        assert [result.outputs[0].token_ids for result in results] == expected


@pytest.mark.parametrize("name", NAMES)
def test_the_same_tokens(name: str, tmp_path: Path, model_dir: Path) -> None:
    assert_same_tokens(MODELS[name], tmp_path / "model", model_dir)


def test_a_softcap_is_served_or_refused_at_start(tmp_path: Path, model_dir: Path) -> None:
    assert_same_tokens(FOREIGN["vaultgemma"], tmp_path / "model", model_dir)
    save(FOREIGN["vaultgemma"], tmp_path / "capped")
    with pytest.raises(UnsupportedError, match=r"scores at 50, which the sdpa backend cannot do"):
        engine(tmp_path / "capped", model_dir, attention_backend="sdpa")


@pytest.mark.parametrize("regime", ["virtual", "paged"])
@pytest.mark.parametrize(
    ("name", "memory"),
    [
        ("deepseek-v3", "144KiB"),
        ("gpt-oss", "128KiB"),
        ("qwen3-next", "192KiB"),
        ("qwen3.5", "128KiB"),
    ],
)
def test_torch_shares_prefixes_preempts_and_forks(
    name: str, memory: str, regime: str, tmp_path: Path, model_dir: Path
) -> None:
    save(MODELS[name], tmp_path)
    head = [2 + 7 * i % 90 for i in range(40)]
    prompts = [[*head[: 40 - 3 * i], *([5 + i] * 20)] for i in range(6)]
    params = SamplingParams(
        n=2, temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True, detokenize=False
    )
    options = {"linear_backend": "torch", "kv_regime": regime, "max_model_len": 96}
    options["kv_mapper"] = "off"  # then nothing depends on times
    if regime == "virtual":
        options["attention_backend"] = "sdpa"
    with engine(tmp_path, model_dir, **options, kv_cache_memory=memory) as llm:
        assert not isinstance(llm.engine.runner.model.network, NativeDecoder)
        first = llm.generate(prompts, params)
        llm.engine.memory.check()
        preemptions = llm.stats()["num_preemptions_total"]
    with engine(tmp_path, model_dir, **options) as llm:
        again = [*llm.generate(prompts[:1], params), *llm.generate(prompts[:1], params)]
        llm.engine.memory.check()
    assert preemptions > 0
    assert again[1].metrics.num_cached_tokens > 0
    for prompt, result in zip([*prompts, *prompts[:1] * 2], [*first, *again], strict=True):
        answers = [output.token_ids for output in result.outputs]
        assert answers == [generated(tmp_path, prompt)] * 2


@pytest.mark.parametrize("regime", ["virtual", "paged"])
def test_a_step_that_is_tried_again_applies_a_state_once(
    regime: str, tmp_path: Path, model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Memory ends in every layer of every kind of step, and once the pool has given some back it
    does not."""
    save(MODELS["qwen3-next"], tmp_path)
    prompts = [[2 + 7 * i % 90 for i in range(n)] for n in (40, 9)]
    expected = [generated(tmp_path, prompt) for prompt in prompts]
    params = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True, detokenize=False)
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
        results = llm.generate(prompts, params)
        llm.engine.memory.check()
    assert failures > NUM_TOKENS / 5
    assert [result.outputs[0].token_ids for result in results] == expected


def test_what_models_with_states_cannot_do_is_refused_at_start(
    tmp_path: Path, model_dir: Path
) -> None:
    save(NATIVE["qwen3.5"], tmp_path)
    for option in ({"speculative": "auto"}, {"async_scheduling": "on"}):
        with pytest.raises(ConfigurationError, match=r"a model with linear attention .*use off"):
            engine(tmp_path, model_dir, **option)
    config = ModelConfig.from_directory(tmp_path)
    assert not resolve(EngineConfig(), config, gpu_bytes=64 << 30).async_scheduling


def test_learned_positions_bound_the_context(tmp_path: Path, model_dir: Path) -> None:
    save(VARIANTS["opt"], tmp_path)
    with pytest.raises(ConfigurationError, match=r"300 is above the model's own context of 256"):
        engine(tmp_path, model_dir, max_model_len=300)
    prompt = [2 + i % 90 for i in range(CONTEXT - 2)]
    params = SamplingParams(temperature=0, max_tokens=100, ignore_eos=True, detokenize=False)
    with engine(tmp_path, model_dir) as llm:
        [result] = llm.generate([prompt], params)
    # The last token is sampled, never computed: it needs no position.
    assert len(result.outputs[0].token_ids) == 2
    assert result.outputs[0].finish_reason == "length"
