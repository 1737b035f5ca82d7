"""What is read from config.json and generation_config.json, and what is refused."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from tests.models.checkpoints import CONTEXT, FOREIGN, MODELS, Saved
from vmserve.attention.base import LayerAttention
from vmserve.cli.main import app
from vmserve.config import EngineConfig, resolve
from vmserve.errors import ConfigurationError, UnsupportedError
from vmserve.models import SUPPORTED_ARCHITECTURES, ModelConfig
from vmserve.models.decoder_config import DecoderConfig, LearnedPositionsConfig, NormConfig
from vmserve.models.families import FAMILIES
from vmserve.models.rope import RopeConfig
from vmserve.numbers.dtypes import DType
from vmserve.system.files import read_json

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 32,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "torch_dtype": "bfloat16",
}


def described(config: ModelConfig) -> DecoderConfig:
    assert isinstance(config.network, DecoderConfig)
    return config.network


def read(
    directory: Path, config: dict[str, Any] | str, generation: dict[str, Any] | None = None
) -> ModelConfig:
    text = config if isinstance(config, str) else json.dumps(config)
    (directory / "config.json").write_text(text)
    if generation is not None:
        (directory / "generation_config.json").write_text(json.dumps(generation))
    return ModelConfig.from_directory(directory)


# -- what is read -------------------------------------------------------------------------


def words_of(network: DecoderConfig) -> set[str]:
    """What a network has, in the words of the rows of ``MODELS``."""
    names, experts, layers = network.names, network.experts, network.layers
    said = {
        "tied": network.tied_embeddings,
        "learned": isinstance(network.positions, LearnedPositionsConfig),
        "post-norm": not network.norm_first,
        "fused": len(names.qkv) == 1,
        "qkv-bias": network.qkv_bias,
        "output-bias": network.output_bias,
        "mlp-bias": network.mlp_bias,
        "qk-norms": bool(names.qk_norms),
        "out-norms": bool(names.attention_out_norm and names.mlp_out_norm),
        "windows": any(layer.window is not None for layer in layers),
        "softcap": any(layer.softcap is not None for layer in layers),
        "sinks": any(layer.has_sinks for layer in layers),
        "gate": network.output_gate,
        "latents": network.latent is not None,
        "states": network.delta is not None,
        "experts": experts is not None,
        "shared": experts is not None and experts.shared_size > 0,
    }
    return {word for word, has in said.items() if has}


#: Of layers, where some have windows and others none.
WINDOWS = {
    "qwen2-windows": (None, 9, 9), "qwen3-windows": (5, None, 5), "gemma3": (7, None, 7),
    "gpt-oss": (5, None, 5), "mistral-window": (7, 7, 7), "mistral-no-window": (None, None, None),
}  # fmt: skip


@pytest.mark.parametrize("name", [name for name in MODELS if name not in FOREIGN])
def test_a_model_has_what_its_row_says(name: str, checkpoint: Saved) -> None:
    config, hf = ModelConfig.from_directory(checkpoint(name)), MODELS[name].config
    network = described(config)
    assert words_of(network) == MODELS[name].has
    assert config.windows == WINDOWS.get(name, config.windows)
    assert (network.hidden_size, network.q_heads) == (hf.hidden_size, hf.num_attention_heads)
    assert (network.num_layers, config.vocab_size) == (hf.num_hidden_layers, hf.vocab_size)
    if network.latent is None:
        heads = getattr(hf, "head_dim", None) or hf.hidden_size // hf.num_attention_heads
        assert config.head_dim == heads
    assert (
        config.architecture
        == hf.architectures[0]
        == {family.model_type: name for name, family in FAMILIES.items()}[hf.model_type]
    )


def test_every_field_of_an_older_llama(tmp_path: Path) -> None:
    scaling = {"type": "linear", "factor": 2.0}
    raw = {**LLAMA, "rope_theta": 1234.0, "rope_scaling": scaling, "rms_norm_eps": 1e-5}
    config = read(tmp_path, raw)
    assert (config.num_layers, config.kv_heads, config.head_dim) == (2, 4, 4)
    assert (config.vocab_size, config.max_position_embeddings) == (32, 64)
    network = described(config)
    assert words_of(network) == set()
    assert (network.hidden_size, network.embedding_size, network.mlp_size) == (16, 16, 24)
    assert (network.q_heads, network.norm) == (4, NormConfig(rms=True, eps=1e-5))
    assert isinstance(network.positions, RopeConfig)
    assert network.positions.rope_type == "linear"
    assert network.positions.parameters["rope_theta"] == 1234.0
    assert network.positions.parameters["factor"] == 2.0
    assert config.attention == tuple(LayerAttention(layer, 0.5) for layer in range(2))
    assert config.windows == (None, None)
    assert (config.eos_token_ids, config.bos_token_id) == ((2,), 1)
    assert config.dtype is DType.BFLOAT16
    assert config.default_sampling == {}


def test_generation_config_wins(tmp_path: Path) -> None:
    generation = {
        "eos_token_id": [7, 9], "bos_token_id": 5, "do_sample": True, "temperature": 0.6,
        "top_k": 20, "top_p": None, "max_new_tokens": 99,
    }  # fmt: skip
    config = read(tmp_path, {**LLAMA, "eos_token_id": 3}, generation)
    assert (config.eos_token_ids, config.bos_token_id) == ((7, 9), 5)
    assert config.default_sampling == {"temperature": 0.6, "top_k": 20}


def test_opt(checkpoint: Saved) -> None:
    config = ModelConfig.from_directory(checkpoint("opt"))
    network = described(config)
    assert (network.embedding_size, network.mlp_size, config.kv_heads) == (48, 80, 4)
    # Queries are scaled in the projection, where they are rounded, and not again in attention.
    assert config.attention == tuple(LayerAttention(layer, 1.0) for layer in range(3))
    assert network.query_scale == 12**-0.5
    assert network.positions == LearnedPositionsConfig(offset=2)
    assert (network.norm, network.activation) == (NormConfig(rms=False, eps=1e-5), "relu")
    old, small, plain = (
        described(ModelConfig.from_directory(checkpoint(f"opt-{name}")))
        for name in ("old", "350m", "galactica")
    )
    assert [each.final_norm for each in (network, old, small)] == [True, False, False]
    assert small.embedding_size == 32
    assert (plain.norm.affine, plain.activation) == (False, "gelu")


def test_gpt2(checkpoint: Saved) -> None:
    config, scales, no_scale = (
        ModelConfig.from_directory(checkpoint(name))
        for name in ("gpt2", "gpt2-scales", "gpt2-no-scale")
    )
    network = described(config)
    assert (network.mlp_size, described(scales).mlp_size) == (4 * 48, 72)
    assert config.attention == tuple(LayerAttention(layer, 12**-0.5) for layer in range(3))
    assert network.positions == LearnedPositionsConfig(offset=0)
    assert (network.norm, network.activation) == (NormConfig(rms=False, eps=1e-5), "gelu_new")
    assert (network.names.transposed, network.query_scale) == (True, None)
    assert [layer.scale for layer in scales.attention] == [12**-0.5 / n for n in (1, 2, 3)]
    assert [layer.scale for layer in no_scale.attention] == [1.0] * 3


@pytest.mark.parametrize("name", ["opt", "gpt2"])
def test_learned_positions_end_the_context(name: str, checkpoint: Saved) -> None:
    config = ModelConfig.from_directory(checkpoint(name))
    assert resolve(EngineConfig(), config).max_model_len == CONTEXT
    with pytest.raises(ConfigurationError, match=r"257 is above the model's own context of 256"):
        resolve(EngineConfig(max_model_len=CONTEXT + 1), config)


@pytest.mark.parametrize("name", ["opt", "gpt2", "llama-mqa-biases", "phi3-partial"])
def test_plan_reads_it(name: str, checkpoint: Saved) -> None:
    path = checkpoint(name)
    result = CliRunner().invoke(app, ["plan", "--model", str(path), "--format", "json"])
    assert result.exit_code == 0, result.output
    [report] = json.loads(result.stdout)
    config, layout = ModelConfig.from_directory(path), report["candidates"][0]
    assert report["max_len"] == CONTEXT
    shape = (layout["num_layers"], layout["kv_heads"], layout["head_dim"])
    assert shape == (3, config.kv_heads, config.head_dim)


def test_model_type_stands_in_for_architectures(tmp_path: Path) -> None:
    assert read(tmp_path, {**LLAMA, "architectures": None}).architecture == "LlamaForCausalLM"


def test_own_code_of_a_known_architecture_is_ignored(tmp_path: Path) -> None:
    raw = {**LLAMA, "auto_map": {"AutoConfig": "configuration_evil.EvilConfig"}}
    (tmp_path / "configuration_evil.py").write_text("raise SystemExit('code of a model ran')")
    assert read(tmp_path, raw).kv_heads == 4


def test_floats_that_json_has_no_number_for(tmp_path: Path) -> None:
    """As ``transformers`` writes them, for example in ``time_step_limit`` of Mamba."""
    file = tmp_path / "config.json"
    file.write_text('{"a": [0.0, {"__float__": "Infinity"}], "b": {"__float__": "-Infinity"}}')
    assert read_json(file) == {"a": [0.0, math.inf], "b": -math.inf}


# -- what is refused ----------------------------------------------------------------------


def test_more_layers_than_tensors_are_refused_before_they_are_described(
    checkpoint: Saved, tmp_path: Path
) -> None:
    source = checkpoint("llama-gqa-llama3") / "model.safetensors"
    (tmp_path / "model.safetensors").symlink_to(source)
    for name, raw in (("num_hidden_layers", LLAMA), ("n_layer", {"model_type": "gpt2"})):
        with pytest.raises(ConfigurationError, match=rf"{name} is 1,000,000,000, but the files ha"):
            read(tmp_path, {**raw, name: 10**9})


def rope(rope_type: str, **parameters: Any) -> dict[str, Any]:
    return {"rope_scaling": {"rope_type": rope_type, **parameters}}


@pytest.mark.parametrize(
    ("model_type", "changes", "told"),
    [
        ("llama", {"architectures": ["LlamaForSequenceClassification"]},
         r"'LlamaForSequenceClassification' is not supported; .*, and causal language models of"),
        ("llama", {"architectures": ["EvilForCausalLM"], "auto_map": {"AutoConfig": "evil.Evil"}},
         r"'EvilForCausalLM' is not supported \(it brings its own code, which is never run\)"),
        ("vit", {}, r"architecture 'vit' is not supported"),
        ("llama", {"hidden_act": "xielu"},
         r"activation 'xielu' is not supported; supported: gelu, gelu_new, "),
        ("llama", rope("mrope", factor=2.0),
         r"type 'mrope' is not supported; supported: default, dynamic, linear, llama3"),
        ("llama", {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}},
         r"partial_rotary_factor=0\.5 is not supported"),
        ("qwen3", {"num_hidden_layers": 2, "layer_types": ["full_attention", "chunked_attention"]},
         r"layer type chunked_attention is not supported; supported: full_attention, sliding"),
        ("gemma3_text", {"attn_logit_softcapping": 50.0},
         r"Gemma 3 with attn_logit_softcapping is not supported"),
        ("gemma2", {"use_bidirectional_attention": True},
         r"use_bidirectional_attention is not supported: causal models only"),
        ("opt", {"num_attention_heads": 7},
         r"a hidden size of 768 cannot be divided among 7 attention heads"),
        ("opt", {"ffn_dim": 0}, r"mlp_size is 0; it must be 1 or more"),
        ("opt", {"num_hidden_layers": 0}, r"num_layers is 0; it must be 1"),
        ("opt", {"word_embed_proj_dim": -1}, r"embedding_size is -1; it must"),
        ("opt", {"max_position_embeddings": 0}, r"max_position_embeddings is 0; it must be 1 or"),
        ("opt", {"activation_function": "gelu_fast"},
         r"activation 'gelu_fast' is not supported; supported: gelu, gelu_new, .*relu, silu"),
        ("deepseek_v2", {"topk_method": "noaux_tc"},
         r"topk_method=noaux_tc is not supported; supported: greedy, group_limited_greedy"),
        ("deepseek_v2", {"norm_topk_prob": True}, r"norm_topk_prob is not supported"),
        ("deepseek_v2", {"mlp_bias": True}, r"mlp_bias=True is not supported"),
        ("deepseek_v3", {"scoring_func": "softmax"},
         r"scoring_func=softmax is not supported with these experts; supported: sigmoid"),
        ("deepseek_v3", {"moe_layer_freq": 2}, r"moe_layer_freq=2 is not supported"),
        ("deepseek_v3", {"num_key_value_heads": 8},
         r"num_key_value_heads is 8; with latent attention it must be that of queries, 128"),
        ("deepseek_v3", {"kv_lora_rank": 0}, r"latent attention: rank is 0"),
        ("deepseek_v3", {"topk_group": 9}, r"topk_group is 9, but 8 experts"),
        ("deepseek_v3", {"n_group": 7}, r"256 experts are no 7 equal groups"),
        ("gpt2", {"n_head": 0}, r"cannot be divided among 0 attention heads"),
        ("gpt2", {"n_inner": 0}, r"mlp_size is 0; it must be 1 or more"),
        ("gpt2", {"n_embd": "wide"}, r"config\.json: .*n_embd.* expected int"),
        ("gpt2", {"add_cross_attention": True}, r"GPT-2 with cross-attention .* is not supported"),
        ("gpt2", {"activation_function": "laplace"}, r"'laplace' is not supported"),
        ("llama", {"num_key_value_heads": 3},
         r"config\.json: 4 query heads cannot share 3 key-value heads"),
        ("llama", {"num_hidden_layers": 0}, r"config\.json: num_layers is 0; it must be 1 or more"),
        ("llama", {"max_position_embeddings": -1}, r"max_position_embeddings is -1; it must be 1"),
        ("llama", {"head_dim": 3}, r"config\.json: 3 components of a head_dim of 3 are rotated"),
        ("llama", {"hidden_size": "many"}, r"config\.json: Field 'hidden_size' expected int, got"),
        ("llama", {"hidden_size": 18}, r"config\.json: The hidden size \(18\) is not a multiple"),
        ("llama", {"num_attention_heads": 0}, r"config\.json: integer division or modulo by zero"),
        ("llama", {"torch_dtype": "float99"}, r"config\.json: .*float99"),
        ("llama", rope("yarn"), r"config\.json: Missing .*'factor'"),
        ("llama", {"rope_theta": "high"}, r"json: rope parameter rope_theta is 'high', no number"),
        ("llama", rope("longrope", long_factor=[1.0], short_factor=[2.0],
                       original_max_position_embeddings=8),
         r"rope parameter (long|short)_factor has 1 factors; 4 rotated components need 2"),
        ("mistral", {"sliding_window": 0}, r"config\.json: sliding_window is 0; it must be 1 or m"),
        ("qwen2", {"num_hidden_layers": 2, "layer_types": ["full_attention"]},
         r"config\.json: `num_hidden_layers` \(2\) must be equal .* \(1\)"),
    ],
)  # fmt: skip
def test_what_a_model_cannot_be(
    tmp_path: Path, model_type: str, changes: dict[str, Any], told: str
) -> None:
    base = LLAMA if model_type == "llama" else {"model_type": model_type}
    with pytest.raises(ConfigurationError, match=told) as caught:
        read(tmp_path, {**base, **changes})
    unsupported = "not supported" in str(caught.value)
    assert type(caught.value) is (UnsupportedError if unsupported else ConfigurationError)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("config", "generation", "told"),
    [
        (LLAMA, {"top_k": "all"}, r"generation_config\.json: top_k is 'all', not"),
        ("{", None, r"config\.json is not valid JSON \(.*\): fetch"),
        ("[]", None, r"is not a JSON object: fetch"),
    ],
)
def test_damaged_files(tmp_path: Path, config: Any, generation: Any, told: str) -> None:
    with pytest.raises(ConfigurationError, match=told):
        read(tmp_path, config, generation)


def test_missing_directory_and_files(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"directory .*/nothing does not exist: check"):
        ModelConfig.from_directory(tmp_path / "nothing")
    with pytest.raises(ConfigurationError, match=r"has no config\.json: --model needs"):
        ModelConfig.from_directory(tmp_path)


def test_every_family_has_a_row() -> None:
    served = {model.family.model_type for name, model in MODELS.items() if name not in FOREIGN}
    assert served == {family.model_type for family in FAMILIES.values()}
    assert tuple(FAMILIES) == SUPPORTED_ARCHITECTURES
