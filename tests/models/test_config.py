"""What is read from config.json and generation_config.json, and what is refused."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from tests.models.checkpoints import CONTEXT, VARIANTS
from vmserve.attention.base import LayerAttention
from vmserve.cli.main import app
from vmserve.config import EngineConfig, resolve
from vmserve.errors import ConfigurationError, UnsupportedError
from vmserve.models import SUPPORTED_ARCHITECTURES, ModelConfig
from vmserve.models.decoder_config import DecoderConfig, LearnedPositionsConfig, NormConfig
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


def test_more_layers_than_tensors_are_refused_before_they_are_described(
    checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    source = checkpoint("llama-gqa-llama3")
    for name, families in (("num_hidden_layers", LLAMA), ("n_layer", {"model_type": "gpt2"})):
        (tmp_path / "config.json").write_text(json.dumps({**families, name: 10**9}))
        file = tmp_path / "model.safetensors"
        file.unlink(missing_ok=True)
        file.symlink_to(source / "model.safetensors")
        with pytest.raises(ConfigurationError, match=rf"{name} is 1,000,000,000, but the files ha"):
            ModelConfig.from_directory(tmp_path)


def test_floats_that_json_has_no_number_for(tmp_path: Path) -> None:
    """As ``transformers`` writes them, for example in ``time_step_limit`` of Mamba."""
    file = tmp_path / "config.json"
    file.write_text('{"a": [0.0, {"__float__": "Infinity"}], "b": {"__float__": "-Infinity"}}')
    assert read_json(file) == {"a": [0.0, math.inf], "b": -math.inf}


def write(
    directory: Path, config: dict[str, Any], generation: dict[str, Any] | None = None
) -> Path:
    (directory / "config.json").write_text(json.dumps(config))
    if generation is not None:
        (directory / "generation_config.json").write_text(json.dumps(generation))
    return directory


def test_every_field_of_an_older_llama(tmp_path: Path) -> None:
    scaling = {"type": "linear", "factor": 2.0}
    raw = {**LLAMA, "rope_theta": 1234.0, "rope_scaling": scaling, "rms_norm_eps": 1e-5}
    config = ModelConfig.from_directory(write(tmp_path, raw))
    assert config.architecture == "LlamaForCausalLM"
    assert (config.num_layers, config.kv_heads, config.head_dim) == (2, 4, 4)
    assert (config.vocab_size, config.max_position_embeddings) == (32, 64)
    network = described(config)
    assert (network.hidden_size, network.embedding_size, network.mlp_size) == (16, 16, 24)
    assert (network.q_heads, network.norm) == (4, NormConfig(rms=True, eps=1e-5))
    assert isinstance(network.positions, RopeConfig)
    assert network.positions.rope_type == "linear"
    assert network.positions.parameters["rope_theta"] == 1234.0
    assert network.positions.parameters["factor"] == 2.0
    assert (network.qkv_bias, network.output_bias, network.mlp_bias) == (False, False, False)
    assert (network.names.qk_norms, network.tied_embeddings) == ((), False)
    assert config.attention == tuple(LayerAttention(layer, 0.5) for layer in range(2))
    assert config.windows == (None, None)
    assert (config.eos_token_ids, config.bos_token_id) == ((2,), 1)
    assert config.dtype is DType.BFLOAT16
    assert config.default_sampling == {}


def test_generation_config_wins(tmp_path: Path) -> None:
    generation = {
        "eos_token_id": [7, 9],
        "bos_token_id": 5,
        "do_sample": True,
        "temperature": 0.6,
        "top_k": 20,
        "top_p": None,
        "max_new_tokens": 99,
    }
    config = ModelConfig.from_directory(write(tmp_path, {**LLAMA, "eos_token_id": 3}, generation))
    assert (config.eos_token_ids, config.bos_token_id) == ((7, 9), 5)
    assert config.default_sampling == {"temperature": 0.6, "top_k": 20}


@pytest.mark.parametrize(
    ("variant", "windows", "biases", "qk_norm", "head_dim"),
    [
        ("llama-mqa-biases", (None, None, None), (True, True, True), False, 12),
        ("mistral-window", (7, 7, 7), (False, False, False), False, 12),
        ("mistral-no-window", (None, None, None), (False, False, False), False, 20),
        ("qwen2-full", (None, None, None), (True, False, False), False, 12),
        ("qwen2-windows", (None, 9, 9), (True, False, False), False, 12),
        ("qwen3-full", (None, None, None), (False, False, False), True, 20),
        ("qwen3-windows", (5, None, 5), (True, True, False), True, 32),
    ],
)
def test_what_distinguishes_the_families(
    variant: str,
    windows: tuple[int | None, ...],
    biases: tuple[bool, bool, bool],
    qk_norm: bool,
    head_dim: int,
    checkpoint: Callable[[str], Path],
) -> None:
    config = ModelConfig.from_directory(checkpoint(variant))
    assert config.windows == windows
    network = described(config)
    assert (network.qkv_bias, network.output_bias, network.mlp_bias) == biases
    assert bool(network.names.qk_norms) == qk_norm
    assert config.head_dim == head_dim
    assert network.tied_embeddings == VARIANTS[variant].tie_word_embeddings


def test_opt(checkpoint: Callable[[str], Path]) -> None:
    config = ModelConfig.from_directory(checkpoint("opt"))
    network = described(config)
    assert (network.hidden_size, network.embedding_size, network.mlp_size) == (48, 48, 80)
    assert (config.kv_heads, config.head_dim, config.max_position_embeddings) == (4, 12, CONTEXT)
    # Queries are scaled in the projection, where they are rounded, and not again in attention.
    assert config.attention == tuple(LayerAttention(layer, 1.0) for layer in range(3))
    assert network.query_scale == 12**-0.5
    assert network.positions == LearnedPositionsConfig(offset=2)
    assert (network.norm, network.activation) == (NormConfig(rms=False, eps=1e-5), "relu")
    assert (network.norm_first, network.final_norm, network.tied_embeddings) == (True, True, True)
    assert (network.qkv_bias, network.output_bias, network.mlp_bias) == (True, True, True)

    post_norm = described(ModelConfig.from_directory(checkpoint("opt-350m")))
    assert (post_norm.norm_first, post_norm.final_norm) == (False, False)
    assert (post_norm.hidden_size, post_norm.embedding_size) == (48, 32)
    assert not described(ModelConfig.from_directory(checkpoint("opt-old"))).final_norm
    plain = described(ModelConfig.from_directory(checkpoint("opt-galactica")))
    assert (plain.norm.affine, plain.activation, plain.mlp_bias) == (False, "gelu", False)


def test_gpt2(checkpoint: Callable[[str], Path]) -> None:
    config = ModelConfig.from_directory(checkpoint("gpt2"))
    network = described(config)
    assert (network.hidden_size, network.mlp_size, network.q_heads) == (48, 4 * 48, 4)
    assert config.attention == tuple(LayerAttention(layer, 12**-0.5) for layer in range(3))
    assert network.positions == LearnedPositionsConfig(offset=0)
    assert (network.norm, network.activation) == (NormConfig(rms=False, eps=1e-5), "gelu_new")
    assert (network.names.transposed, network.query_scale) == (True, None)
    scales = ModelConfig.from_directory(checkpoint("gpt2-scales"))
    assert [layer.scale for layer in scales.attention] == [12**-0.5 / n for n in (1, 2, 3)]
    assert described(scales).mlp_size == 72
    no_scale = ModelConfig.from_directory(checkpoint("gpt2-no-scale"))
    assert [layer.scale for layer in no_scale.attention] == [1.0] * 3


@pytest.mark.parametrize("variant", ["opt", "gpt2"])
def test_learned_positions_end_the_context(variant: str, checkpoint: Callable[[str], Path]) -> None:
    config = ModelConfig.from_directory(checkpoint(variant))
    assert resolve(EngineConfig(), config).max_model_len == CONTEXT
    with pytest.raises(ConfigurationError, match=r"257 is above the model's own context of 256"):
        resolve(EngineConfig(max_model_len=CONTEXT + 1), config)


@pytest.mark.parametrize(
    "variant", ["opt", "gpt2", "llama-mqa-biases", "phi3-partial", "gemma3-small"]
)
def test_plan_reads_it(variant: str, checkpoint: Callable[[str], Path]) -> None:
    result = CliRunner().invoke(
        app, ["plan", "--model", str(checkpoint(variant)), "--format", "json"]
    )
    assert result.exit_code == 0, result.output
    [report] = json.loads(result.stdout)
    config = ModelConfig.from_directory(checkpoint(variant))
    assert report["max_len"] == CONTEXT
    layout = report["candidates"][0]
    shape = (layout["num_layers"], layout["kv_heads"], layout["head_dim"])
    assert shape == (3, config.kv_heads, config.head_dim)


def test_model_type_stands_in_for_architectures(tmp_path: Path) -> None:
    raw = {name: value for name, value in LLAMA.items() if name != "architectures"}
    assert ModelConfig.from_directory(write(tmp_path, raw)).architecture == "LlamaForCausalLM"


def test_own_code_of_a_known_architecture_is_ignored(tmp_path: Path) -> None:
    raw = {**LLAMA, "auto_map": {"AutoConfig": "configuration_evil.EvilConfig"}}
    (tmp_path / "configuration_evil.py").write_text("raise SystemExit('code of a model ran')")
    assert ModelConfig.from_directory(write(tmp_path, raw)).kv_heads == 4


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"architectures": ["LlamaForSequenceClassification"]},
            r"'LlamaForSequenceClassification' is not supported; .*, and causal language models of",
        ),
        (
            {"architectures": ["EvilForCausalLM"], "auto_map": {"AutoConfig": "evil.Evil"}},
            r"'EvilForCausalLM' is not supported \(it brings its own code, which is never run\)",
        ),
        ({"architectures": None, "model_type": "vit"}, r"architecture 'vit' is not supported"),
        (
            {"hidden_act": "xielu"},
            r"activation 'xielu' is not supported; supported: gelu, gelu_new, ",
        ),
        (
            {"rope_scaling": {"rope_type": "mrope", "factor": 2.0}},
            r"type 'mrope' is not supported; supported: default, dynamic, linear, llama3",
        ),
        (
            {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}},
            r"partial_rotary_factor=0\.5 is not supported",
        ),
        (
            {
                "architectures": ["Qwen3ForCausalLM"],
                "model_type": "qwen3",
                "num_key_value_heads": 2,
                "layer_types": ["full_attention", "chunked_attention"],
            },
            r"layer type chunked_attention is not supported; supported: full_attention, sliding",
        ),
        (
            {
                "architectures": ["Gemma3ForCausalLM"],
                "model_type": "gemma3_text",
                "num_key_value_heads": 2,
                "attn_logit_softcapping": 50.0,
            },
            r"Gemma 3 with attn_logit_softcapping is not supported",
        ),
        (
            {
                "architectures": ["Gemma2ForCausalLM"],
                "model_type": "gemma2",
                "num_key_value_heads": 2,
                "use_bidirectional_attention": True,
            },
            r"use_bidirectional_attention is not supported: causal models only",
        ),
    ],
)
def test_unsupported(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedError, match=message) as caught:
        ModelConfig.from_directory(write(tmp_path, {**LLAMA, **changes}))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("model_type", "changes", "error", "message"),
    [
        ("opt", {"num_attention_heads": 7}, ConfigurationError,
         r"a hidden size of 768 cannot be divided among 7 attention heads"),
        ("opt", {"ffn_dim": 0}, ConfigurationError, r"mlp_size is 0; it must be 1 or more"),
        ("opt", {"num_hidden_layers": 0}, ConfigurationError, r"num_layers is 0; it must be 1"),
        ("opt", {"word_embed_proj_dim": -1}, ConfigurationError, r"embedding_size is -1; it must"),
        ("opt", {"max_position_embeddings": 0}, ConfigurationError,
         r"max_position_embeddings is 0; it must be 1 or more"),
        ("opt", {"activation_function": "gelu_fast"}, UnsupportedError,
         r"activation 'gelu_fast' is not supported; supported: gelu, gelu_new, .*relu, silu"),
        ("deepseek_v2", {"topk_method": "noaux_tc"}, UnsupportedError,
         r"topk_method=noaux_tc is not supported; supported: greedy, group_limited_greedy"),
        ("deepseek_v2", {"norm_topk_prob": True}, UnsupportedError, r"norm_topk_prob is not supp"),
        ("deepseek_v2", {"mlp_bias": True}, UnsupportedError, r"mlp_bias=True is not supported"),
        ("deepseek_v3", {"scoring_func": "softmax"}, UnsupportedError,
         r"scoring_func=softmax is not supported with these experts; supported: sigmoid"),
        ("deepseek_v3", {"moe_layer_freq": 2}, UnsupportedError, r"moe_layer_freq=2 is not supp"),
        ("deepseek_v3", {"num_key_value_heads": 8}, ConfigurationError,
         r"num_key_value_heads is 8; with latent attention it must be that of queries, 128"),
        ("deepseek_v3", {"kv_lora_rank": 0}, ConfigurationError, r"latent attention: rank is 0"),
        ("deepseek_v3", {"topk_group": 9}, ConfigurationError, r"topk_group is 9, but 8 experts"),
        ("deepseek_v3", {"n_group": 7}, ConfigurationError, r"256 experts are no 7 equal groups"),
        ("gpt2", {"n_head": 0}, ConfigurationError, r"cannot be divided among 0 attention heads"),
        ("gpt2", {"n_inner": 0}, ConfigurationError, r"mlp_size is 0; it must be 1 or more"),
        ("gpt2", {"n_embd": "wide"}, ConfigurationError, r"config\.json: .*n_embd.* expected int"),
        ("gpt2", {"add_cross_attention": True}, UnsupportedError, r"GPT-2 with cross-attention"),
        ("gpt2", {"activation_function": "laplace"}, UnsupportedError, r"'laplace' is not supp"),
    ],
)  # fmt: skip
def test_what_models_cannot_be(
    tmp_path: Path,
    model_type: str,
    changes: dict[str, Any],
    error: type[Exception],
    message: str,
) -> None:
    with pytest.raises(error, match=message) as caught:
        ModelConfig.from_directory(write(tmp_path, {"model_type": model_type, **changes}))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_key_value_heads": 3}, r"config\.json: 4 query heads cannot share 3 key-value heads"),
        ({"num_hidden_layers": 0}, r"config\.json: num_layers is 0; it must be 1 or more"),
        ({"max_position_embeddings": -1}, r"max_position_embeddings is -1; it must be 1 or more"),
        ({"head_dim": 3}, r"config\.json: 3 components of a head_dim of 3 are rotated; rot"),
        ({"hidden_size": "many"}, r"config\.json: Field 'hidden_size' expected int, got str"),
        ({"hidden_size": 18}, r"config\.json: The hidden size \(18\) is not a multiple"),
        ({"num_attention_heads": 0}, r"config\.json: integer division or modulo by zero"),
        ({"torch_dtype": "float99"}, r"config\.json: .*float99"),
        ({"rope_scaling": {"rope_type": "yarn"}}, r"config\.json: Missing .*'factor'"),
        ({"rope_theta": "high"}, r"config\.json: rope parameter rope_theta is 'high', no number"),
        (
            {"rope_scaling": {"rope_type": "longrope", "long_factor": [1.0], "short_factor": [2.0],
                              "original_max_position_embeddings": 8}},
            r"rope parameter (long|short)_factor has 1 factors; 4 rotated components need 2",
        ),
        (
            {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": 0,
             "num_key_value_heads": 2},
            r"config\.json: sliding_window is 0; it must be 1 or more",
        ),
        (
            {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2",
             "num_key_value_heads": 2, "layer_types": ["full_attention"]},
            r"config\.json: `num_hidden_layers` \(2\) must be equal .* \(1\)",
        ),
    ],
)  # fmt: skip
def test_inconsistent_values(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message) as caught:
        ModelConfig.from_directory(write(tmp_path, {**LLAMA, **changes}))
    assert "\n" not in str(caught.value)


def test_bad_generation_config(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"generation_config\.json: top_k is 'all', not"):
        ModelConfig.from_directory(write(tmp_path, LLAMA, {"top_k": "all"}))


def test_missing_directory_and_files(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"directory .*/nothing does not exist: check"):
        ModelConfig.from_directory(tmp_path / "nothing")
    with pytest.raises(ConfigurationError, match=r"has no config\.json: --model needs"):
        ModelConfig.from_directory(tmp_path)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", r"config\.json is not valid JSON \(.*\): fetch"),
        ("[]", r"is not a JSON object: fetch"),
    ],
)
def test_damaged_config(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ConfigurationError, match=message):
        ModelConfig.from_directory(tmp_path)


def test_architectures_of_the_decoder() -> None:
    assert SUPPORTED_ARCHITECTURES == (
        "LlamaForCausalLM",
        "MistralForCausalLM",
        "Qwen2ForCausalLM",
        "Qwen3ForCausalLM",
        "Phi3ForCausalLM",
        "MixtralForCausalLM",
        "Qwen2MoeForCausalLM",
        "Qwen3MoeForCausalLM",
        "GptOssForCausalLM",
        "Qwen3NextForCausalLM",
        "Qwen3_5ForCausalLM",
        "Qwen3_5MoeForCausalLM",
        "DeepseekV2ForCausalLM",
        "DeepseekV3ForCausalLM",
        "Gemma2ForCausalLM",
        "Gemma3ForCausalLM",
        "OPTForCausalLM",
        "GPT2LMHeadModel",
    )
