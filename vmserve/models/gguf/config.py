"""What a GGUF file says about a model, as the description of our decoder."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from vmserve.errors import ConfigurationError, UnsupportedError
from vmserve.models.decoder_config import DecoderConfig
from vmserve.models.families import FAMILIES
from vmserve.models.gguf.architectures import ARCHITECTURES, ROUTER, SHARED_GATE, Architecture
from vmserve.models.gguf.metadata import (
    LONG_FACTORS,
    PLAIN,
    ROPE_FACTORS,
    Metadata,
    read_factors,
)
from vmserve.models.gguf.reader import GgufFile, GgufModel, shown
from vmserve.models.rope import RopeConfig
from vmserve.numbers.dtypes import DType

__all__ = ["GgufDescription", "describe"]

#: Layers of the largest Gemma 2 and 3, whose queries are scaled by another size. No file says it.
_LARGEST_GEMMA = {"gemma2": 46, "gemma3": 62}
#: Most experts, far above what models have: each has names of its own.
_MOST_EXPERTS = 1 << 14
#: Values of ``expert_gating_func``.
_SOFTMAX, _SIGMOID = 1, 2
#: Matrices that files of any type have in float32.
_ALWAYS_PLAIN = (ROUTER, SHARED_GATE, "ssm_conv1d")


@dataclass(frozen=True)
class GgufDescription:
    #: The architecture as config.json calls it.
    architecture: str
    network: DecoderConfig
    eos_token_ids: tuple[int, ...]
    bos_token_id: int | None
    #: Type of the matrices; bfloat16 where they are quantized.
    dtype: DType


def describe(model: GgufModel) -> GgufDescription:
    """Translate a file's metadata.

    Raises :class:`~vmserve.errors.UnsupportedError` for an architecture or a feature that is not
    offered, :class:`~vmserve.errors.ConfigurationError` for metadata that are missing or wrong.
    """
    file = model.metadata
    name = file.string("general.architecture")
    architecture = ARCHITECTURES.get(name)
    if architecture is None:
        raise UnsupportedError(
            f"{file.path.name}: GGUF architecture {shown(name)} is not supported; supported: "
            f"{', '.join(ARCHITECTURES)}"
        )
    fields = _Fields(model, name, architecture)
    raw = fields.config()
    family = FAMILIES[fields.family]
    read = family.read(raw)
    if read is None:
        raise UnsupportedError(
            f"{file.path.name}: the sizes or rotary parameters in its {name}.* metadata contradict "
            "each other or are not supported"
        )
    network = fields.as_stored(family.describe(read))
    factors = _rope_factors(model, network)
    if factors is not None:
        network = replace(network, positions=factors)
    eos = [
        file.integer(key)
        for key in ("tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id")
        if key in file
    ]
    _refuse_outside(file, network.vocab_size, eos)
    num_tokens = file.count("tokenizer.ggml.tokens")
    if num_tokens > network.vocab_size:
        raise ConfigurationError(
            f"{file.path.name}: tokenizer.ggml.tokens has {num_tokens:,} tokens, but tensor "
            f"token_embd.weight has {network.vocab_size:,} rows: fetch the model again"
        )
    return GgufDescription(
        fields.family, network, tuple(dict.fromkeys(eos)), raw["bos_token_id"], _dtype(model)
    )


class _Fields:
    """The metadata of one architecture as fields of config.json."""

    def __init__(self, model: GgufModel, name: str, architecture: Architecture) -> None:
        self._model = model
        self._file = model.metadata
        self._name = name
        self._architecture = architecture
        self._read = Metadata(model, name, architecture)
        self._window = self._read.size("attention.sliding_window", 0, least=0) or None
        self.family = architecture.family
        if self._window is not None and not architecture.windowed:
            if name != "llama":
                raise self._read.unsupported("attention.sliding_window")
            self.family = "MistralForCausalLM"
        self._num_experts = self._read.size("expert_count", 0, least=0, limit=_MOST_EXPERTS)
        if self._num_experts:
            if architecture.expert_family is None:
                raise self._read.unsupported("expert_count")
            self.family = architecture.expert_family
        if name == "deepseek2" and self._gating() == _SIGMOID:
            self.family = "DeepseekV3ForCausalLM"

    def as_stored(self, network: DecoderConfig) -> DecoderConfig:
        """The same with what the file has in another form than checkpoints of the family."""
        names = dict(self._architecture.names)
        if network.latent is not None:
            names["latent_split"] = "blk.0.attn_k_b.weight" in self._model.tensors
        network = replace(network, names=replace(network.names, **names))
        if self._architecture.tiled and network.delta is not None:
            network = replace(network, delta=replace(network.delta, tiled=True))
        if self._architecture.adds_offset:
            network = replace(network, norm=replace(network.norm, offset=0.0))
        return network

    def config(self) -> dict[str, Any]:
        read = self._read
        hidden, heads = read.size("embedding_length"), read.size("attention.head_count")
        layers = read.size("block_count")
        if layers > len(self._model.tensors):
            raise ConfigurationError(
                f"{self._file.path.name}: {self._name}.block_count is {layers:,}, but there are "
                f"{len(self._model.tensors):,} tensors: fetch the model again"
            )
        layers -= read.size("nextn_predict_layers", 0, least=0)
        head_dim = self._head_dim(hidden, heads)
        bos = "tokenizer.ggml.bos_token_id"
        config: dict[str, Any] = {
            "vocab_size": self._vocab_size(hidden),
            "hidden_size": hidden,
            "intermediate_size": read.size("feed_forward_length"),
            "num_hidden_layers": layers,
            "num_attention_heads": heads,
            "num_key_value_heads": read.size("attention.head_count_kv", heads),
            "head_dim": head_dim,
            "max_position_embeddings": read.size("context_length"),
            "rms_norm_eps": read.number("attention.layer_norm_rms_epsilon"),
            "tie_word_embeddings": "output.weight" not in self._model.tensors,
            "rope_parameters": {} if self._architecture.long else read.rope(),
            "bos_token_id": self._file.integer(bos) if bos in self._file else None,
            "eos_token_id": None,
        }
        if self.family == "LlamaForCausalLM":
            config["attention_bias"] = "blk.0.attn_q.bias" in self._model.tensors
            config["mlp_bias"] = "blk.0.ffn_up.bias" in self._model.tensors
        if self._window is not None:
            config["sliding_window"] = self._window
        if self._num_experts:
            config["num_local_experts"] = self._num_experts
            config["num_experts_per_tok"] = read.size("expert_used_count")
        match self._name:
            case "qwen2moe":
                config |= self._shared_experts()
                config["qkv_bias"] = "blk.0.attn_q.bias" in self._model.tensors
                for name in ("head_dim", "num_local_experts"):
                    config.pop(name, None)
            case "qwen3moe":
                config["moe_intermediate_size"] = read.size("expert_feed_forward_length")
                config["norm_topk_prob"] = True
            case "qwen3next" | "qwen35" | "qwen35moe":
                config |= self._delta(head_dim, layers, config["rope_parameters"])
            case "phi3":
                config |= self._phi3(head_dim)
            case "gemma2" | "gemma3":
                config |= self._gemma(hidden, heads, layers, head_dim)
            case "gpt-oss":
                if "rope_type" in config["rope_parameters"]:
                    config["rope_parameters"]["truncate"] = False  # no file says it
                config["intermediate_size"] = read.size("expert_feed_forward_length")
            case "deepseek2":
                config |= self._latent(heads, layers)
                config.pop("num_local_experts", None)
        _refuse_outside(self._file, config["vocab_size"], [config["bos_token_id"]])
        return config

    def _shared_experts(self) -> dict[str, Any]:
        return {
            "num_experts": self._num_experts,
            "moe_intermediate_size": self._read.size("expert_feed_forward_length"),
            "shared_expert_intermediate_size": self._read.size("expert_shared_feed_forward_length"),
        }

    def _delta(self, head_dim: int, layers: int, rope: dict[str, Any]) -> dict[str, Any]:
        read = self._read
        value_heads = read.size("ssm.time_step_rank")
        value_size = read.size("ssm.inner_size")
        if value_size % value_heads:
            raise ConfigurationError(
                f"{self._file.path.name}: {self._name}.ssm.inner_size is {value_size:,}, no "
                f"multiple of ssm.time_step_rank, {value_heads:,}"
            )
        share = read.size("rope.dimension_count", head_dim) / head_dim
        config: dict[str, Any] = {
            "rope_parameters": {**rope, "partial_rotary_factor": share},
            "linear_conv_kernel_dim": read.size("ssm.conv_kernel"),
            "linear_key_head_dim": read.size("ssm.state_size"),
            "linear_num_key_heads": read.size("ssm.group_count"),
            "linear_num_value_heads": value_heads,
            "linear_value_head_dim": value_size // value_heads,
        }
        linear = "attention.recurrent_layers"
        if linear in read:
            flags = self._file.numbers(f"{self._name}.{linear}").tolist()[:layers]
            kinds = "full_attention", "linear_attention"
            config["layer_types"] = [kinds[bool(flag)] for flag in flags]
        else:
            config["full_attention_interval"] = read.size("full_attention_interval", 4)
        if self._name in ("qwen3next", "qwen35moe"):
            config |= {**self._shared_experts(), "norm_topk_prob": True}
        return config

    def _latent(self, heads: int, layers: int) -> dict[str, Any]:
        """Latents of DeepSeek-V2 or V3; older files have the sizes of heads under other keys."""
        read = self._read
        sizes = {
            kind: read.size(f"attention.{kind}_length_mla", read.size(f"attention.{kind}_length"))
            for kind in ("key", "value")
        }
        rotated = read.size("rope.dimension_count")
        config: dict[str, Any] = {
            "num_key_value_heads": heads,
            "kv_lora_rank": read.size("attention.kv_lora_rank"),
            "q_lora_rank": read.size("attention.q_lora_rank", 0, least=0) or None,
            "qk_nope_head_dim": sizes["key"] - rotated,
            "qk_rope_head_dim": rotated,
            "v_head_dim": sizes["value"],
            "first_k_dense_replace": read.size("leading_dense_block_count", 0, least=0),
        }
        if not self._num_experts:
            return {**config, "first_k_dense_replace": layers}
        groups = read.size("expert_group_count", 1, least=0)
        if groups > 1:
            config["topk_group"] = read.size("expert_group_used_count")
        if self.family == "DeepseekV2ForCausalLM":
            config["topk_method"] = "group_limited_greedy" if groups > 1 else "greedy"
        return {
            **config,
            "n_group": groups,
            "n_routed_experts": self._num_experts,
            "n_shared_experts": read.size("expert_shared_count", least=0),
            "moe_intermediate_size": read.size("expert_feed_forward_length"),
            "routed_scaling_factor": read.number("expert_weights_scale", 1.0),
            "norm_topk_prob": read.flag("expert_weights_norm", default=False),
        }

    def _gating(self) -> int:
        gating = self._read.size("expert_gating_func", _SOFTMAX, least=0) or _SOFTMAX
        if gating not in (_SOFTMAX, _SIGMOID):
            raise self._read.unsupported("expert_gating_func")
        return gating

    def _phi3(self, head_dim: int) -> dict[str, Any]:
        read = self._read
        parameters: dict[str, Any] = {
            "rope_type": "default",
            "rope_theta": read.number("rope.freq_base", 10_000.0, 2),
            "partial_rotary_factor": read.size("rope.dimension_count", head_dim) / head_dim,
        }
        if read.string("rope.scaling.type", "none") not in ("none", "longrope"):
            raise read.unsupported("rope.scaling.type")
        if LONG_FACTORS[0] not in self._model.tensors:
            return {"rope_parameters": parameters}
        parameters |= {
            "rope_type": "longrope",
            "long_factor": read.factors(LONG_FACTORS[0]),
            "short_factor": read.factors(LONG_FACTORS[1]),
            "attention_factor": read.number("rope.scaling.attn_factor", 1.0),
        }
        original = read.size("rope.scaling.original_context_length")
        return {"rope_parameters": parameters, "original_max_position_embeddings": original}

    def _gemma(self, hidden: int, heads: int, layers: int, head_dim: int) -> dict[str, Any]:
        read = self._read
        largest = layers == _LARGEST_GEMMA[self._name]
        config: dict[str, Any] = {"query_pre_attn_scalar": hidden // heads if largest else head_dim}
        for key, default in (("attn_logit_softcapping", 50.0), ("final_logit_softcapping", 30.0)):
            if self._name == "gemma2" or key in read:
                config[key] = read.number(key, default)
        if self._name == "gemma3" and self._window is None:
            config["layer_types"] = ["full_attention"] * layers
        if self._name == "gemma3":
            config["sliding_window_pattern"] = read.size("attention.sliding_window_pattern", 6)
            local = read.number("rope.freq_base_swa", 10_000.0, 2)
            config["rope_parameters"] = {
                "full_attention": read.rope(),
                "sliding_attention": {"rope_type": "default", "rope_theta": local},
            }
        return config

    def _vocab_size(self, hidden: int) -> int:
        if "token_embd.weight" not in self._model.tensors:
            raise ConfigurationError(
                f"{self._file.path.name} lacks tensor token_embd.weight: fetch the model again"
            )
        shape = self._model.tensors["token_embd.weight"][1].shape
        if len(shape) != 2 or shape[1] != hidden:
            raise ConfigurationError(
                f"{self._file.path.name}: tensor token_embd.weight has shape {list(shape)}, but "
                f"{self._name}.embedding_length is {hidden:,}: fetch the model again"
            )
        return shape[0]

    def _head_dim(self, hidden: int, heads: int) -> int:
        read = self._read
        if self._name == "deepseek2":
            return read.size("rope.dimension_count")
        if self._name == "llama" and hidden % heads:
            raise UnsupportedError(
                f"{self._file.path.name}: an embedding_length of {hidden:,} that {heads:,} heads "
                "do not share evenly is not supported"
            )
        head_dim = read.size("attention.key_length", hidden // heads)
        whole = ["attention.value_length"]
        if not self._architecture.partial:
            whole.append("rope.dimension_count")
        for key in whole:
            if read.size(key, head_dim) != head_dim:
                raise UnsupportedError(
                    f"{self._file.path.name}: {self._name}.{key} is {read.size(key):,} for heads "
                    f"of {head_dim:,}: not supported"
                )
        return head_dim


def _rope_factors(model: GgufModel, network: DecoderConfig) -> RopeConfig | None:
    """Rotary positions whose periods are multiplied by a tensor's factors (Llama 3.1).

    That is longrope with one set of factors, and without its change of attention's scale.
    """
    rope = network.positions
    assert isinstance(rope, RopeConfig), "all families here rotate"
    for name in LONG_FACTORS:
        if name in model.tensors and rope.rope_type != "longrope":
            raise UnsupportedError(f"{model.path.name}: tensor {name} is not supported")
    if ROPE_FACTORS not in model.tensors:
        return None
    file, tensor = model.tensors[ROPE_FACTORS]
    if tensor.shape != (network.head_dim // 2,):
        raise ConfigurationError(
            f"{file.path.name}: tensor {ROPE_FACTORS} has shape {list(tensor.shape)}; heads of "
            f"{network.head_dim} need [{network.head_dim // 2}]: fetch the model again"
        )
    if rope.rope_type != "default":
        raise UnsupportedError(
            f"{file.path.name}: tensor {ROPE_FACTORS} with rotary scaling {rope.rope_type} is not "
            "supported"
        )
    factors = read_factors(model, ROPE_FACTORS).tolist()
    parameters = {
        **rope.parameters,
        "rope_type": "longrope",
        "short_factor": factors,
        "long_factor": factors,
        "original_max_position_embeddings": rope.max_position_embeddings,
        "attention_factor": 1.0,
    }
    return replace(rope, rope_type="longrope", parameters=parameters)


def _refuse_outside(file: GgufFile, vocab_size: int, ids: list[Any]) -> None:
    for token_id in ids:
        if token_id is not None and not 0 <= token_id < vocab_size:
            raise ConfigurationError(
                f"{file.path.name}: tokenizer.ggml names token {token_id:,}, but the vocabulary "
                f"has {vocab_size:,} rows: fetch the model again"
            )


def _dtype(model: GgufModel) -> DType:
    """Vectors, routers and convolutions are always float32, and say nothing."""
    types = {
        tensor.type.name
        for name, (_, tensor) in model.tensors.items()
        if len(tensor.shape) > 1
        and name.endswith(".weight")
        and name.split(".")[-2] not in _ALWAYS_PLAIN
    }
    [only] = types if len(types) == 1 else ("mixed",)
    dtype, _ = PLAIN.get(only, (DType.BFLOAT16, None))
    return dtype
