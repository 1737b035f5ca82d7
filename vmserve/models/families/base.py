"""What the families share: names, fields and rules of Llama, to which each adds its own."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from vmserve.attention.base import LayerAttention
from vmserve.errors import ConfigurationError, UnsupportedError
from vmserve.models.decoder_config import DecoderConfig, NormConfig, TensorNames
from vmserve.models.fields import Fields, Schema, read_fields
from vmserve.models.rope import RopeConfig

#: Windows of the layers.
Windows = tuple[int | None, ...]
#: Fields of config.json: their type and default.
FieldTypes = Mapping[str, tuple[str, Any]]


@dataclass(frozen=True)
class Family:
    model_type: str
    schema: Schema
    #: Describes the model from the fields of config.json, as :meth:`read` or ``transformers`` has
    #: them.
    describe: Callable[[Any], DecoderConfig]

    def read(self, raw: Mapping[str, Any]) -> Fields | None:
        """See :func:`~vmserve.models.fields.read_fields`."""
        return read_fields(self.schema, raw)


LLAMA_NAMES = TensorNames(
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


def describe_llama(
    hf: Any,
    biases: tuple[bool, bool, bool],
    windows: Windows | None = None,
    names: TensorNames = LLAMA_NAMES,
    activation: str | None = None,
    partial: bool = False,
    rope: Mapping[str, Any] | None = None,
    mlp_size: int | None = None,
) -> DecoderConfig:
    """``biases``: of the (query/key/value, output, MLP) projections; ``partial``: a part of each
    head may be rotated; ``rope``, ``mlp_size``: if not ``hf.rope_parameters``,
    ``hf.intermediate_size``."""
    explicit: int | None = getattr(hf, "head_dim", None)
    head_dim = explicit or int(hf.hidden_size // hf.num_attention_heads)
    if windows is None:
        windows = (None,) * hf.num_hidden_layers
    return DecoderConfig(
        names=names,
        vocab_size=hf.vocab_size,
        hidden_size=hf.hidden_size,
        embedding_size=hf.hidden_size,
        mlp_size=hf.intermediate_size if mlp_size is None else mlp_size,
        q_heads=hf.num_attention_heads,
        kv_heads=hf.num_key_value_heads,
        head_dim=head_dim,
        max_position_embeddings=hf.max_position_embeddings,
        layers=tuple(
            LayerAttention(layer, head_dim**-0.5 if head_dim > 0 else 0.0, window)
            for layer, window in enumerate(windows)
        ),
        positions=read_rotation(
            hf, hf.rope_parameters if rope is None else rope, head_dim, partial
        ),
        norm=NormConfig(rms=True, eps=hf.rms_norm_eps),
        activation=activation or hf.hidden_act,
        qkv_bias=biases[0],
        output_bias=biases[1],
        mlp_bias=biases[2],
        tied_embeddings=bool(hf.tie_word_embeddings),
    )


def read_rotation(
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


def windows_by_layer_type(hf: Any) -> Windows:
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


COMMON_FIELDS: FieldTypes = {
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


def finish_llama(found: Fields) -> bool:
    heads = found.num_attention_heads
    if heads < 1 or found.hidden_size % heads:
        return False
    return finish_mistral(found)


def finish_mistral(found: Fields) -> bool:
    if found.num_attention_heads < 1:
        return False
    if found.num_key_value_heads is None:
        found.num_key_value_heads = found.num_attention_heads
    if found.head_dim is None:
        found.head_dim = found.hidden_size // found.num_attention_heads
    return bool(found.head_dim % 2 == 0)


def layer_pattern(found: Fields, period: int, others: str = "sliding_attention") -> list[str]:
    """Every ``period``-th layer sees all positions."""
    return [
        others if (layer + 1) % period else "full_attention"
        for layer in range(found.num_hidden_layers)
    ]
