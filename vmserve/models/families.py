"""The decoder's families: convert their configurations to its description."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from vmserve.attention.base import LayerAttention
from vmserve.errors import ConfigurationError, UnsupportedError
from vmserve.models.decoder_config import (
    DecoderConfig,
    DeltaConfig,
    ExpertsConfig,
    LearnedPositionsConfig,
    NormConfig,
    TensorNames,
)
from vmserve.models.fields import (
    Fields,
    Schema,
    read_fields,
    read_gemma3_rope,
    read_gpt_oss_rope,
    read_partial_rope,
    read_phi3_rope,
    read_rope,
)
from vmserve.models.rope import RopeConfig

__all__ = ["FAMILIES", "Family"]

_LLAMA_NAMES = TensorNames(
    base="model.",
    embedding="embed_tokens",
    final_norm="norm",
    layer="layers.{}.",
    attention_norm="input_layernorm",
    qkv=("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    output="self_attn.o_proj",
    mlp_norm="post_attention_layernorm",
    mlp=("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"),
    constants=r".*\.rotary_emb\.inv_freq",
)
_QWEN3_NAMES = replace(_LLAMA_NAMES, qk_norms=("self_attn.q_norm", "self_attn.k_norm"))
_PHI3_NAMES = replace(
    _LLAMA_NAMES,
    qkv=("self_attn.qkv_proj",),
    mlp=("mlp.gate_up_proj", "mlp.down_proj"),
    gate_up=True,
)
_MIXTRAL_NAMES = replace(
    _LLAMA_NAMES,
    router="block_sparse_moe.gate",
    experts=tuple(f"block_sparse_moe.experts.{{}}.{name}" for name in ("w1", "w3", "w2")),
)
_QWEN3_5_NAMES = replace(_QWEN3_NAMES, delta="linear_attn.", constants=r"mtp\..*")
_QWEN3_MOE_NAMES = replace(
    _QWEN3_NAMES,
    router="mlp.gate",
    experts=tuple(f"mlp.experts.{{}}.{name}_proj" for name in ("gate", "up", "down")),
)
_QWEN2_MOE_NAMES = replace(
    _QWEN3_MOE_NAMES,
    qk_norms=(),
    shared_expert=tuple(f"mlp.shared_expert.{name}_proj" for name in ("gate", "up", "down")),
    shared_gate="mlp.shared_expert_gate",
)
_QWEN3_NEXT_NAMES = replace(
    _QWEN2_MOE_NAMES,
    qk_norms=_QWEN3_NAMES.qk_norms,
    delta=_QWEN3_5_NAMES.delta,
    delta_fused=True,
    constants=_QWEN3_5_NAMES.constants,
)
_GPT_OSS_NAMES = replace(
    _LLAMA_NAMES,
    sinks="self_attn.sinks",
    router="mlp.router",
    experts=("mlp.experts.gate_up_proj", "mlp.experts.down_proj"),
)
_GEMMA2_NAMES = replace(
    _LLAMA_NAMES,
    attention_out_norm="post_attention_layernorm",
    mlp_norm="pre_feedforward_layernorm",
    mlp_out_norm="post_feedforward_layernorm",
)
_GEMMA3_NAMES = replace(_GEMMA2_NAMES, qk_norms=_QWEN3_NAMES.qk_norms)
_OPT_NAMES = TensorNames(
    base="model.",
    embedding="decoder.embed_tokens",
    positions="decoder.embed_positions",
    project_in="decoder.project_in",
    project_out="decoder.project_out",
    final_norm="decoder.final_layer_norm",
    layer="decoder.layers.{}.",
    attention_norm="self_attn_layer_norm",
    qkv=("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    output="self_attn.out_proj",
    mlp_norm="final_layer_norm",
    mlp=("fc1", "fc2"),
)
_GPT2_NAMES = TensorNames(
    base="transformer.",
    embedding="wte",
    positions="wpe",
    final_norm="ln_f",
    layer="h.{}.",
    attention_norm="ln_1",
    qkv=("attn.c_attn",),
    output="attn.c_proj",
    mlp_norm="ln_2",
    mlp=("mlp.c_fc", "mlp.c_proj"),
    transposed=True,
    constants=r".*\.attn\.(masked_)?bias",  # causal masks
)

_Windows = tuple[int | None, ...]


@dataclass(frozen=True)
class Family:
    model_type: str
    schema: Schema
    #: From the fields of config.json, as :meth:`read` or ``transformers`` has them.
    describe: Callable[[Any], DecoderConfig]

    def read(self, raw: Mapping[str, Any]) -> Fields | None:
        """See :func:`~vmserve.models.fields.read_fields`."""
        return read_fields(self.schema, raw)


def _llama(
    hf: Any,
    biases: tuple[bool, bool, bool],
    windows: _Windows | None = None,
    names: TensorNames = _LLAMA_NAMES,
    activation: str | None = None,
    partial: bool = False,
    rope: Mapping[str, Any] | None = None,
) -> DecoderConfig:
    """``biases``: of the (query/key/value, output, MLP) projections; ``partial``: a part of each
    head may be rotated; ``rope``: parameters, if not ``hf.rope_parameters``."""
    explicit: int | None = getattr(hf, "head_dim", None)
    head_dim = explicit or int(hf.hidden_size // hf.num_attention_heads)
    if windows is None:
        windows = (None,) * hf.num_hidden_layers
    return DecoderConfig(
        names=names,
        vocab_size=hf.vocab_size,
        hidden_size=hf.hidden_size,
        embedding_size=hf.hidden_size,
        mlp_size=hf.intermediate_size,
        q_heads=hf.num_attention_heads,
        kv_heads=hf.num_key_value_heads,
        head_dim=head_dim,
        max_position_embeddings=hf.max_position_embeddings,
        layers=tuple(
            LayerAttention(layer, head_dim**-0.5 if head_dim > 0 else 0.0, window)
            for layer, window in enumerate(windows)
        ),
        positions=_rope(hf, hf.rope_parameters if rope is None else rope, head_dim, partial),
        norm=NormConfig(rms=True, eps=hf.rms_norm_eps),
        activation=activation or hf.hidden_act,
        qkv_bias=biases[0],
        output_bias=biases[1],
        mlp_bias=biases[2],
        tied_embeddings=bool(hf.tie_word_embeddings),
    )


def _rope(
    hf: Any, parameters: Mapping[str, Any], head_dim: int, partial: bool = False
) -> RopeConfig:
    parameters = dict(parameters)
    share = parameters.pop("partial_rotary_factor", None)
    share = 1.0 if share is None else share
    if share != 1.0 and not partial:
        raise UnsupportedError(
            f"partial_rotary_factor={share} is not supported: only models that rotate whole heads "
            "(1.0) are"
        )
    return RopeConfig(
        rope_type=str(parameters.get("rope_type", "default")),
        parameters=parameters,
        rotary_dim=int(head_dim * share),
        max_position_embeddings=hf.max_position_embeddings,
    )


def _window_by_layer_type(hf: Any) -> _Windows:
    windows: dict[str, int | None] = {
        "full_attention": None,
        "sliding_attention": hf.sliding_window,
    }
    unknown = sorted(set(hf.layer_types) - set(windows))
    if unknown:
        raise UnsupportedError(
            f"layer type {', '.join(unknown)} is not supported; supported: {', '.join(windows)}"
        )
    if len(hf.layer_types) != hf.num_hidden_layers:
        raise ConfigurationError(
            f"config.json: layer_types has {len(hf.layer_types)} entries for "
            f"{hf.num_hidden_layers} layers"
        )
    return tuple(windows[layer_type] for layer_type in hf.layer_types)


def _qwen3(hf: Any) -> DecoderConfig:
    biases = (hf.attention_bias, hf.attention_bias, False)
    return _llama(hf, biases, _window_by_layer_type(hf), _QWEN3_NAMES)


def _phi3(hf: Any) -> DecoderConfig:
    """Phi-3 and Phi-4 (Abdin et al. 2024): Llama with fused projections."""
    windows = (hf.sliding_window,) * max(0, hf.num_hidden_layers)
    return _llama(hf, (False, False, False), windows, _PHI3_NAMES, partial=True)


def _mixtral(hf: Any) -> DecoderConfig:
    """Mixtral (Jiang et al. 2024)."""
    layers = max(0, hf.num_hidden_layers)
    dense = _llama(hf, (False, False, False), (hf.sliding_window,) * layers, _MIXTRAL_NAMES)
    experts = ExpertsConfig(
        count=hf.num_local_experts,
        chosen=hf.num_experts_per_tok,
        size=hf.intermediate_size,
        normalised=True,
        layers=frozenset(range(layers)),
    )
    return replace(dense, experts=experts)


def _qwen3_moe(hf: Any) -> DecoderConfig:
    """A window is the same in all layers."""
    count = hf.num_local_experts
    layers = max(0, hf.num_hidden_layers)
    windows = (hf.sliding_window,) * layers
    biases = (hf.attention_bias, hf.attention_bias, False)
    return _with_experts(hf, _llama(hf, biases, windows, _QWEN3_MOE_NAMES), count)


def _with_experts(hf: Any, dense: DecoderConfig, count: int, shared_size: int = 0) -> DecoderConfig:
    step = hf.decoder_sparse_step
    if step < 1:
        raise ConfigurationError(
            f"config.json: decoder_sparse_step is {step}; it must be 1 or more"
        )
    sparse = frozenset(range(step - 1, dense.num_layers, step)) - set(hf.mlp_only_layers)
    if count < 1 or not sparse:
        return dense
    experts = ExpertsConfig(
        count=count,
        chosen=hf.num_experts_per_tok,
        size=hf.moe_intermediate_size,
        normalised=hf.norm_topk_prob,
        layers=sparse,
        shared_size=shared_size,
        shared_gate=shared_size > 0,
    )
    return replace(dense, experts=experts)


def _qwen2_moe(hf: Any) -> DecoderConfig:
    """Qwen2-MoE (Yang et al. 2024): a shared expert, weighed by the sigmoid of a product."""
    windows = _window_by_layer_type(hf)
    dense = _llama(hf, (hf.qkv_bias, False, False), windows, _QWEN2_MOE_NAMES)
    return _with_experts(hf, dense, hf.num_experts, hf.shared_expert_intermediate_size)


def _qwen3_5(hf: Any, names: TensorNames = _QWEN3_5_NAMES) -> DecoderConfig:
    """Qwen3.5, text: gated delta layers (Yang et al. 2024), and attention with gates."""
    if hf.attention_bias:
        raise UnsupportedError("attention_bias is not supported where attention has gates")
    unknown = sorted(set(hf.layer_types) - {"linear_attention", "full_attention"})
    if unknown:
        raise UnsupportedError(
            f"layer type {', '.join(unknown)} is not supported beside linear attention"
        )
    network = _llama(hf, (False, False, False), names=names, partial=True)
    if len(hf.layer_types) != network.num_layers:
        raise ConfigurationError(
            f"config.json: layer_types has {len(hf.layer_types)} entries for "
            f"{network.num_layers} layers"
        )
    linear = frozenset(
        layer for layer, kind in enumerate(hf.layer_types) if kind == "linear_attention"
    )
    if len(linear) == network.num_layers:
        raise UnsupportedError("models of linear attention alone are not supported")
    delta = DeltaConfig(
        layers=linear,
        key_heads=hf.linear_num_key_heads,
        value_heads=hf.linear_num_value_heads,
        key_dim=hf.linear_key_head_dim,
        value_dim=hf.linear_value_head_dim,
        taps=hf.linear_conv_kernel_dim,
    )
    return replace(
        network,
        norm=replace(network.norm, offset=1.0),
        output_gate=True,
        delta=delta if linear else None,
    )


def _qwen3_next(hf: Any) -> DecoderConfig:
    """Qwen3-Next (2025): as Qwen3.5, with experts and fused projections of the delta layers."""
    return _with_experts(
        hf, _qwen3_5(hf, _QWEN3_NEXT_NAMES), hf.num_experts, hf.shared_expert_intermediate_size
    )


def _gpt_oss(hf: Any) -> DecoderConfig:
    """gpt-oss (OpenAI 2025): sinks in attention, a window in every other layer, clamped experts."""
    biases = (hf.attention_bias, hf.attention_bias, False)
    dense = _llama(hf, biases, _window_by_layer_type(hf), _GPT_OSS_NAMES)
    experts = ExpertsConfig(
        count=hf.num_local_experts,
        chosen=hf.num_experts_per_tok,
        size=hf.intermediate_size,
        normalised=True,
        layers=frozenset(range(max(0, hf.num_hidden_layers))),
        bias=True,
        clamp=(float(hf.swiglu_alpha), float(hf.swiglu_limit)),
    )
    layers = tuple(replace(layer, has_sinks=True) for layer in dense.layers)
    return replace(dense, experts=experts, layers=layers)


def _gemma2(
    hf: Any, names: TensorNames = _GEMMA2_NAMES, rope: Mapping[str, Any] | None = None
) -> DecoderConfig:
    """Gemma 2 (Riviere et al. 2024): norms before and after attention and MLP, capped scores and
    logits."""
    if hf.use_bidirectional_attention:
        raise UnsupportedError("use_bidirectional_attention is not supported: causal models only")
    scalar, bias = hf.query_pre_attn_scalar, hf.attention_bias
    windows = _window_by_layer_type(hf)
    network = _llama(hf, (bias, bias, False), windows, names, hf.hidden_activation, rope=rope)
    return replace(
        network,
        layers=tuple(
            replace(
                layer,
                scale=scalar**-0.5 if scalar > 0 else 0.0,
                softcap=hf.attn_logit_softcapping,
            )
            for layer in network.layers
        ),
        norm=replace(network.norm, offset=1.0),
        embedding_scale=network.hidden_size**0.5,
        logits_softcap=hf.final_logit_softcapping,
    )


def _gemma3(hf: Any) -> DecoderConfig:
    """Gemma 3 (Kamath et al. 2025), text: layers with a window rotate by a period of their own."""
    if hf.attn_logit_softcapping is not None:
        raise UnsupportedError("Gemma 3 with attn_logit_softcapping is not supported")
    network = _gemma2(hf, _GEMMA3_NAMES, hf.rope_parameters["full_attention"])
    return replace(
        network,
        local_positions=_rope(hf, hf.rope_parameters["sliding_attention"], network.head_dim),
        local_layers=tuple(
            layer for layer, kind in enumerate(hf.layer_types) if kind == "sliding_attention"
        ),
    )


def _opt(hf: Any) -> DecoderConfig:
    """OPT (Zhang et al. 2022); the 350m model is post-norm, with a narrower embedding."""
    head_dim = _even_share(hf.hidden_size, hf.num_attention_heads)
    return DecoderConfig(
        names=_OPT_NAMES,
        vocab_size=hf.vocab_size,
        hidden_size=hf.hidden_size,
        embedding_size=hf.word_embed_proj_dim,
        mlp_size=hf.ffn_dim,
        q_heads=hf.num_attention_heads,
        kv_heads=hf.num_attention_heads,
        head_dim=head_dim,
        max_position_embeddings=hf.max_position_embeddings,
        layers=tuple(LayerAttention(layer, 1.0) for layer in range(hf.num_hidden_layers)),
        positions=LearnedPositionsConfig(offset=2),
        norm=NormConfig(rms=False, eps=1e-5, affine=hf.layer_norm_elementwise_affine),
        norm_first=hf.do_layer_norm_before,
        final_norm=hf.do_layer_norm_before and not hf._remove_final_layer_norm,
        activation=hf.activation_function,
        qkv_bias=hf.enable_bias,
        output_bias=hf.enable_bias,
        mlp_bias=hf.enable_bias,
        query_scale=head_dim**-0.5,
        tied_embeddings=bool(hf.tie_word_embeddings),
    )


def _gpt2(hf: Any) -> DecoderConfig:
    """GPT-2 (Radford et al. 2019); ``reorder_and_upcast_attn`` is about training only."""
    if hf.add_cross_attention:
        raise UnsupportedError("GPT-2 with cross-attention (add_cross_attention) is not supported")
    head_dim = _even_share(hf.hidden_size, hf.num_attention_heads)
    scale = head_dim**-0.5 if hf.scale_attn_weights else 1.0
    by_layer = hf.scale_attn_by_inverse_layer_idx
    return DecoderConfig(
        names=_GPT2_NAMES,
        vocab_size=hf.vocab_size,
        hidden_size=hf.hidden_size,
        embedding_size=hf.hidden_size,
        mlp_size=4 * hf.hidden_size if hf.n_inner is None else hf.n_inner,
        q_heads=hf.num_attention_heads,
        kv_heads=hf.num_attention_heads,
        head_dim=head_dim,
        max_position_embeddings=hf.max_position_embeddings,
        layers=tuple(
            LayerAttention(layer, scale / (layer + 1) if by_layer else scale)
            for layer in range(hf.num_hidden_layers)
        ),
        positions=LearnedPositionsConfig(),
        norm=NormConfig(rms=False, eps=hf.layer_norm_epsilon),
        activation=hf.activation_function,
        qkv_bias=True,
        output_bias=True,
        mlp_bias=True,
        tied_embeddings=bool(hf.tie_word_embeddings),
    )


def _even_share(hidden_size: int, heads: int) -> int:
    if heads < 1 or hidden_size < 1 or hidden_size % heads:
        raise ConfigurationError(
            f"config.json: a hidden size of {hidden_size} cannot be divided among "
            f"{heads} attention heads"
        )
    return hidden_size // heads


# -- fields of config.json: defaults as in transformers ------------------------------------

_Kinds = Mapping[str, tuple[str, Any]]

_COMMON: _Kinds = {
    "vocab_size": ("int", 32000),
    "hidden_size": ("int", 4096),
    "intermediate_size": ("int", 11008),
    "num_hidden_layers": ("int", 32),
    "num_attention_heads": ("int", 32),
    "num_key_value_heads": ("int?", None),
    "head_dim": ("int?", None),
    "hidden_act": ("str", "silu"),
    "max_position_embeddings": ("int", 2048),
    "rms_norm_eps": ("float", 1e-6),
    "tie_word_embeddings": ("bool", False),
    "bos_token_id": ("int?", 1),
    "eos_token_id": ("ids", 2),
}
_QWEN: _Kinds = {
    **_COMMON,
    "vocab_size": ("int", 151936),
    "intermediate_size": ("int", 22016),
    "num_key_value_heads": ("int?", 32),
    "max_position_embeddings": ("int", 32768),
    "use_sliding_window": ("bool", False),
    "sliding_window": ("int?", 4096),
    "max_window_layers": ("int", 28),
    "layer_types": ("layer_types", None),
    "bos_token_id": ("int?", None),
    "eos_token_id": ("ids", None),
}


def _finish_llama(found: Fields) -> bool:
    heads = found.num_attention_heads
    if heads < 1 or found.hidden_size % heads:
        return False
    return _finish_mistral(found)


def _finish_mistral(found: Fields) -> bool:
    if found.num_attention_heads < 1:
        return False
    if found.num_key_value_heads is None:
        found.num_key_value_heads = found.num_attention_heads
    if found.head_dim is None:
        found.head_dim = found.hidden_size // found.num_attention_heads
    return bool(found.head_dim % 2 == 0)


def _finish_qwen(found: Fields) -> bool:
    if not found.use_sliding_window:
        found.sliding_window = None
    layers = range(found.num_hidden_layers)
    if found.layer_types is None:
        first = len(layers) if found.sliding_window is None else found.max_window_layers
        found.layer_types = [
            "sliding_attention" if layer >= first else "full_attention" for layer in layers
        ]
    return len(found.layer_types) == found.num_hidden_layers and _finish_mistral(found)


def _finish_qwen2_moe(found: Fields) -> bool:
    if found.mlp_only_layers is None:
        found.mlp_only_layers = []
    if not found.use_sliding_window:
        found.sliding_window = 0
    if found.layer_types is None:
        windows = found.max_window_layers if found.use_sliding_window else 0
        found.layer_types = [
            "full_attention" if layer % 2 or layer >= windows else "sliding_attention"
            for layer in range(found.num_hidden_layers)
        ]
    complete = len(found.layer_types) == found.num_hidden_layers
    heads = found.num_attention_heads
    if not complete or heads < 1 or found.hidden_size % (2 * heads):
        return False
    if found.num_key_value_heads is None:
        found.num_key_value_heads = heads
    return True


_QWEN3_MOE_EXPERTS = 128


def _finish_qwen3_moe(found: Fields) -> bool:
    """The number of experts has two names, of which newer writers take ``num_local_experts``."""
    given = {found.num_experts, found.num_local_experts} - {_QWEN3_MOE_EXPERTS}
    if len(given) > 1:
        return False
    found.num_experts = found.num_local_experts = given.pop() if given else _QWEN3_MOE_EXPERTS
    if found.mlp_only_layers is None:
        found.mlp_only_layers = []
    if not found.use_sliding_window:
        found.sliding_window = None
    return _finish_mistral(found)


def _finish_qwen3_5(found: Fields) -> bool:
    interval = found.full_attention_interval
    del found.full_attention_interval, found.partial_rotary_factor
    if found.layer_types is None:
        if interval < 1:
            return False
        found.layer_types = _pattern(found, interval, "linear_attention")
    return len(found.layer_types) == found.num_hidden_layers and _finish_mistral(found)


def _finish_qwen3_next(found: Fields) -> bool:
    if found.mlp_only_layers is None:
        found.mlp_only_layers = []
    return _finish_qwen3_5(found)


def _finish_gpt_oss(found: Fields) -> bool:
    if found.layer_types is None:
        found.layer_types = [
            "full_attention" if layer % 2 else "sliding_attention"
            for layer in range(found.num_hidden_layers)
        ]
    return len(found.layer_types) == found.num_hidden_layers and _finish_mistral(found)


def _finish_gemma2(found: Fields) -> bool:
    if found.layer_types is None:
        found.layer_types = _pattern(found, 2)
    return _finish_layers(found)


def _finish_gemma3(found: Fields) -> bool:
    period = found._sliding_window_pattern = found.sliding_window_pattern
    del found.sliding_window_pattern
    if period < 1:
        return False
    if found.layer_types is None:
        found.layer_types = _pattern(found, period)
    return _finish_layers(found)


def _pattern(found: Fields, period: int, others: str = "sliding_attention") -> list[str]:
    """Every ``period``-th layer sees all positions."""
    return [
        others if (layer + 1) % period else "full_attention"
        for layer in range(found.num_hidden_layers)
    ]


def _finish_layers(found: Fields) -> bool:
    complete = len(found.layer_types) == found.num_hidden_layers
    return complete and not found.use_bidirectional_attention and _finish_llama(found)


def _finish_opt(found: Fields) -> bool:
    if found.word_embed_proj_dim is None:
        found.word_embed_proj_dim = found.hidden_size
    return True


def _finish_gpt2(found: Fields) -> bool:
    found.hidden_size = found.n_embd
    found.num_attention_heads = found.n_head
    found.num_hidden_layers = found.n_layer
    found.max_position_embeddings = found.n_positions
    return True


_LLAMA = Schema(
    {**_COMMON, "attention_bias": ("bool", False), "mlp_bias": ("bool", False)},
    rope=read_rope,
    finish=_finish_llama,
)
_MISTRAL = Schema(
    {
        **_COMMON,
        "intermediate_size": ("int", 14336),
        "num_key_value_heads": ("int", 8),
        "max_position_embeddings": ("int", 4096 * 32),
        "sliding_window": ("int?", 4096),
    },
    rope=read_rope,
    finish=_finish_mistral,
)
_QWEN2 = Schema(_QWEN, rope=read_rope, finish=_finish_qwen)
_QWEN3 = Schema(
    {**_QWEN, "head_dim": ("int", 128), "attention_bias": ("bool", False)},
    rope=read_rope,
    finish=_finish_qwen,
)
_PHI3 = Schema(
    {
        **_COMMON,
        "vocab_size": ("int", 32064),
        "hidden_size": ("int", 3072),
        "intermediate_size": ("int", 8192),
        "max_position_embeddings": ("int", 4096),
        "original_max_position_embeddings": ("int", 4096),
        "rms_norm_eps": ("float", 1e-5),
        "eos_token_id": ("ids", 32000),
        "sliding_window": ("int?", None),
        "partial_rotary_factor": ("number?", None),
    },
    rope=read_phi3_rope,
    finish=_finish_llama,
)
_MIXTRAL = Schema(
    {
        **_COMMON,
        "intermediate_size": ("int", 14336),
        "num_key_value_heads": ("int", 8),
        "max_position_embeddings": ("int", 4096 * 32),
        "rms_norm_eps": ("float", 1e-5),
        "sliding_window": ("int?", None),
        "num_experts_per_tok": ("int", 2),
        "num_local_experts": ("int", 8),
    },
    rope=partial(read_rope, theta=1_000_000.0),
    finish=_finish_mistral,
    aliases=frozenset(("num_experts",)),
)
_QWEN3_MOE = Schema(
    {
        **_COMMON,
        "vocab_size": ("int", 151936),
        "hidden_size": ("int", 2048),
        "intermediate_size": ("int", 6144),
        "num_hidden_layers": ("int", 24),
        "num_key_value_heads": ("int", 4),
        "max_position_embeddings": ("int", 32768),
        "attention_bias": ("bool", False),
        "use_sliding_window": ("bool", False),
        "sliding_window": ("int?", 4096),
        "decoder_sparse_step": ("int", 1),
        "moe_intermediate_size": ("int", 768),
        "num_experts_per_tok": ("int", 8),
        "num_experts": ("int", _QWEN3_MOE_EXPERTS),
        "num_local_experts": ("int", _QWEN3_MOE_EXPERTS),
        "norm_topk_prob": ("bool", False),
        "mlp_only_layers": ("ints?", None),
        "bos_token_id": ("int?", None),
        "eos_token_id": ("ids", None),
    },
    rope=read_rope,
    finish=_finish_qwen3_moe,
)
_QWEN2_MOE = Schema(
    {
        **{name: kind for name, kind in _QWEN.items() if name != "head_dim"},
        "hidden_size": ("int", 2048),
        "intermediate_size": ("int", 5632),
        "num_hidden_layers": ("int", 24),
        "num_attention_heads": ("int", 16),
        "num_key_value_heads": ("int?", 16),
        "decoder_sparse_step": ("int", 1),
        "moe_intermediate_size": ("int", 1408),
        "shared_expert_intermediate_size": ("int", 5632),
        "num_experts_per_tok": ("int", 4),
        "num_experts": ("int", 60),
        "norm_topk_prob": ("bool", False),
        "mlp_only_layers": ("ints?", None),
        "qkv_bias": ("bool", True),
    },
    rope=read_rope,
    finish=_finish_qwen2_moe,
    aliases=frozenset(("head_dim", "num_local_experts")),
)
_LINEAR_ATTENTION: _Kinds = {
    "linear_conv_kernel_dim": ("int", 4),
    "linear_key_head_dim": ("int", 128),
    "linear_value_head_dim": ("int", 128),
    "linear_num_key_heads": ("int", 16),
    "linear_num_value_heads": ("int", 32),
    "layer_types": ("layer_types", None),
    "full_attention_interval": ("int", 4),
    "partial_rotary_factor": ("number?", None),
    "attention_bias": ("bool", False),
    "num_attention_heads": ("int", 16),
    "head_dim": ("int", 256),
    "max_position_embeddings": ("int", 32768),
    "bos_token_id": ("int?", None),
    "eos_token_id": ("ids", None),
}
_QWEN3_5 = Schema(
    {
        **_COMMON,
        **_LINEAR_ATTENTION,
        "vocab_size": ("int", 248320),
        "intermediate_size": ("int", 12288),
        "num_key_value_heads": ("int", 4),
    },
    rope=read_partial_rope,
    finish=_finish_qwen3_5,
)
_QWEN3_NEXT = Schema(
    {
        **_COMMON,
        **_LINEAR_ATTENTION,
        "vocab_size": ("int", 151936),
        "hidden_size": ("int", 2048),
        "intermediate_size": ("int", 5632),
        "num_hidden_layers": ("int", 48),
        "num_key_value_heads": ("int", 2),
        "decoder_sparse_step": ("int", 1),
        "moe_intermediate_size": ("int", 512),
        "shared_expert_intermediate_size": ("int", 512),
        "num_experts_per_tok": ("int", 10),
        "num_experts": ("int", 512),
        "norm_topk_prob": ("bool", True),
        "mlp_only_layers": ("ints?", None),
    },
    rope=read_partial_rope,
    finish=_finish_qwen3_next,
)
_GPT_OSS = Schema(
    {
        **_COMMON,
        "vocab_size": ("int", 201088),
        "hidden_size": ("int", 2880),
        "intermediate_size": ("int", 2880),
        "num_hidden_layers": ("int", 36),
        "num_attention_heads": ("int", 64),
        "num_key_value_heads": ("int", 8),
        "head_dim": ("int", 64),
        "max_position_embeddings": ("int", 131072),
        "rms_norm_eps": ("float", 1e-5),
        "sliding_window": ("int?", 128),
        "layer_types": ("layer_types", None),
        "attention_bias": ("bool", True),
        "num_local_experts": ("int", 128),
        "num_experts_per_tok": ("int", 4),
        "swiglu_alpha": ("float", 1.702),
        "swiglu_limit": ("float", 7.0),
        "bos_token_id": ("int?", None),
        "eos_token_id": ("ids", None),
    },
    rope=read_gpt_oss_rope,
    finish=_finish_gpt_oss,
    aliases=frozenset(("num_experts",)),
)
_GEMMA: _Kinds = {
    **{name: kind for name, kind in _COMMON.items() if name != "hidden_act"},
    "hidden_activation": ("str", "gelu_pytorch_tanh"),
    "hidden_size": ("int", 2304),
    "intermediate_size": ("int", 9216),
    "num_hidden_layers": ("int", 26),
    "num_attention_heads": ("int", 8),
    "num_key_value_heads": ("int", 4),
    "head_dim": ("int", 256),
    "tie_word_embeddings": ("bool", True),
    "bos_token_id": ("int?", 2),
    "eos_token_id": ("ids", 1),
    "attention_bias": ("bool", False),
    "query_pre_attn_scalar": ("int", 256),
    "sliding_window": ("int?", 4096),
    "layer_types": ("layer_types", None),
}
_GEMMA2 = Schema(
    {
        **_GEMMA,
        "vocab_size": ("int", 256000),
        "max_position_embeddings": ("int", 8192),
        "final_logit_softcapping": ("float?", 30.0),
        "attn_logit_softcapping": ("float?", 50.0),
        "use_bidirectional_attention": ("bool?", None),
    },
    rope=read_rope,
    finish=_finish_gemma2,
)
_GEMMA3 = Schema(
    {
        **_GEMMA,
        "vocab_size": ("int", 262208),
        "max_position_embeddings": ("int", 131072),
        "final_logit_softcapping": ("float?", None),
        "attn_logit_softcapping": ("float?", None),
        "use_bidirectional_attention": ("bool?", False),
        "sliding_window_pattern": ("int", 6),
    },
    rope=read_gemma3_rope,
    finish=_finish_gemma3,
)
_OPT = Schema(
    {
        "vocab_size": ("int", 50272),
        "hidden_size": ("int", 768),
        "num_hidden_layers": ("int", 12),
        "ffn_dim": ("int", 3072),
        "max_position_embeddings": ("int", 2048),
        "do_layer_norm_before": ("bool", True),
        "_remove_final_layer_norm": ("bool", False),
        "word_embed_proj_dim": ("int?", None),
        "num_attention_heads": ("int", 12),
        "activation_function": ("str", "relu"),
        "bos_token_id": ("int?", 2),
        "eos_token_id": ("ids", 2),
        "enable_bias": ("bool", True),
        "layer_norm_elementwise_affine": ("bool", True),
        "tie_word_embeddings": ("bool", True),
    },
    rope=None,
    finish=_finish_opt,
)
_GPT2 = Schema(
    {
        "vocab_size": ("int", 50257),
        "n_positions": ("int", 1024),
        "n_embd": ("int", 768),
        "n_layer": ("int", 12),
        "n_head": ("int", 12),
        "n_inner": ("int?", None),
        "activation_function": ("str", "gelu_new"),
        "layer_norm_epsilon": ("float", 1e-5),
        "scale_attn_weights": ("bool", True),
        "scale_attn_by_inverse_layer_idx": ("bool", False),
        "add_cross_attention": ("bool", False),
        "bos_token_id": ("int?", 50256),
        "eos_token_id": ("ids", 50256),
        "tie_word_embeddings": ("bool", True),
    },
    rope=None,
    finish=_finish_gpt2,
    aliases=frozenset(
        ("hidden_size", "max_position_embeddings", "num_attention_heads", "num_hidden_layers")
    ),
)


#: By the name in ``architectures`` of config.json.
FAMILIES: Mapping[str, Family] = {
    "LlamaForCausalLM": Family(
        "llama",
        _LLAMA,
        lambda hf: _llama(hf, (hf.attention_bias, hf.attention_bias, hf.mlp_bias)),
    ),
    "MistralForCausalLM": Family(
        "mistral",
        _MISTRAL,
        lambda hf: _llama(
            hf, (False, False, False), (hf.sliding_window,) * max(0, hf.num_hidden_layers)
        ),
    ),
    "Qwen2ForCausalLM": Family(
        "qwen2",
        _QWEN2,
        lambda hf: _llama(hf, (True, False, False), _window_by_layer_type(hf)),
    ),
    "Qwen3ForCausalLM": Family("qwen3", _QWEN3, _qwen3),
    "Phi3ForCausalLM": Family("phi3", _PHI3, _phi3),
    "MixtralForCausalLM": Family("mixtral", _MIXTRAL, _mixtral),
    "Qwen2MoeForCausalLM": Family("qwen2_moe", _QWEN2_MOE, _qwen2_moe),
    "Qwen3MoeForCausalLM": Family("qwen3_moe", _QWEN3_MOE, _qwen3_moe),
    "Qwen3NextForCausalLM": Family("qwen3_next", _QWEN3_NEXT, _qwen3_next),
    "Qwen3_5ForCausalLM": Family("qwen3_5_text", _QWEN3_5, _qwen3_5),
    "GptOssForCausalLM": Family("gpt_oss", _GPT_OSS, _gpt_oss),
    "Gemma2ForCausalLM": Family("gemma2", _GEMMA2, _gemma2),
    "Gemma3ForCausalLM": Family("gemma3_text", _GEMMA3, _gemma3),
    "OPTForCausalLM": Family("opt", _OPT, _opt),
    "GPT2LMHeadModel": Family("gpt2", _GPT2, _gpt2),
}
