"""What a GGUF file says about a model, as the description of our decoder."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vmserve.attention.cpu import CPU_DTYPES
from vmserve.dtypes import DType
from vmserve.errors import ConfigurationError, UnsupportedError
from vmserve.models.decoder_config import DecoderConfig
from vmserve.models.families import FAMILIES
from vmserve.models.gguf.dequantize import dequantize
from vmserve.models.gguf.reader import GgufFile, GgufModel, GgufTensor, shown
from vmserve.models.gguf.repack import is_quantized, repack
from vmserve.models.grouped import Grouped
from vmserve.models.rope import RopeConfig
from vmserve.models.stored_weight import Plain, Table
from vmserve.models.tensor_names import mlp_names, tensor_shapes

__all__ = ["GgufDescription", "GgufWeight", "describe", "find_weights", "unpermuted"]


@dataclass(frozen=True)
class _Architecture:
    """``layer``: modules of a layer by the names of tensors.

    ``permuted``: rows of q and k alternate between the halves of a head, as rotations of
    neighbouring pairs need; ours rotate the halves. ``windowed``: layers may have windows;
    ``partial``: a part of each head may be rotated; ``long``: there may be factors of longrope;
    ``adds_offset``: what the model adds to weights of norms is in the file.
    """

    family: str
    layer: Mapping[str, str] = field(default_factory=lambda: _LAYER)
    permuted: bool = False
    windowed: bool = False
    partial: bool = False
    long: bool = False
    adds_offset: bool = False


#: Of a tensor outside the layers: its module, below ``base`` but for the head.
_ENDS = {"token_embd": "embed_tokens", "output_norm": "norm"}
_LAYER: Mapping[str, str] = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
#: Of layers with experts: the router, and the experts' matrices one after the other.
_ROUTER = "ffn_gate_inp"
_EXPERTS = ("ffn_gate_exps", "ffn_up_exps", "ffn_down_exps")
_PHI3_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_qkv": "self_attn.qkv_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_up": "mlp.gate_up_proj",
    "ffn_down": "mlp.down_proj",
}
_GEMMA_LAYER = {
    **_LAYER,
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_ARCHITECTURES: Mapping[str, _Architecture] = {
    "llama": _Architecture("LlamaForCausalLM", permuted=True),
    "qwen2": _Architecture("Qwen2ForCausalLM"),
    "qwen3": _Architecture("Qwen3ForCausalLM"),
    "qwen3moe": _Architecture("Qwen3MoeForCausalLM"),
    "phi3": _Architecture("Phi3ForCausalLM", _PHI3_LAYER, windowed=True, partial=True, long=True),
    "gemma2": _Architecture("Gemma2ForCausalLM", _GEMMA_LAYER, windowed=True, adds_offset=True),
    "gemma3": _Architecture("Gemma3ForCausalLM", _GEMMA_LAYER, windowed=True, adds_offset=True),
}
#: Those whose files may have experts: the family that has them.
_WITH_EXPERTS = {"llama": "MixtralForCausalLM", "qwen3moe": "Qwen3MoeForCausalLM"}
#: Layers of the largest Gemma 2 and 3, whose queries are scaled by another size: no file says it.
_LARGEST_GEMMA = {"gemma2": 46, "gemma3": 62}
_ROPE_FACTORS = "rope_freqs.weight"
_LONG_FACTORS = ("rope_factors_long.weight", "rope_factors_short.weight")
#: Tensors that are no weights: the first is part of the configuration.
_NO_WEIGHTS = frozenset((_ROPE_FACTORS, *_LONG_FACTORS))
#: Numpy has no bfloat16: its bits.
_PLAIN = {
    "F32": (DType.FLOAT32, np.float32),
    "F16": (DType.FLOAT16, np.float16),
    "BF16": (DType.BFLOAT16, np.uint16),
}
_MOST_POSITIONS = 1 << 31
_NAMED_IN_ERRORS = 4


@dataclass(frozen=True)
class GgufDescription:
    #: As config.json calls it.
    architecture: str
    network: DecoderConfig
    eos_token_ids: tuple[int, ...]
    bos_token_id: int | None
    #: Of the matrices; bfloat16 where they are quantized.
    dtype: DType


@dataclass(frozen=True)
class GgufWeight:
    """Where a weight of the decoder is.

    ``heads``: its rows are permuted within so many heads (see :func:`unpermuted`); 0: they are not.
    """

    file: GgufFile
    tensor: GgufTensor
    heads: int = 0
    #: Which of the matrices that the tensor has one after the other; None: it is one.
    part: int | None = None

    @property
    def num_bytes(self) -> int:
        return self.tensor.num_bytes // (1 if self.part is None else self.tensor.shape[0])

    def read(self) -> Plain | Grouped:
        raw, block_type = self._raw(), self.tensor.type
        if is_quantized(block_type):
            grouped = repack(block_type, raw)
            for factors in (grouped.scale, grouped.minimum):
                if factors is not None:
                    self._refuse_infinite(factors.coarse)
            return grouped
        dtype, element = _PLAIN[block_type.name]
        found = raw.view(element).reshape(self.tensor.shape[0 if self.part is None else 1 :])
        if found.ndim == 1 and dtype is not DType.BFLOAT16:
            self._refuse_infinite(found)
        return found, dtype

    def _refuse_infinite(self, numbers: NDArray[Any]) -> None:
        """Numbers of which one spoils a row or more; those of plain matrices are not looked at."""
        num_wrong = numbers.size - np.count_nonzero(np.isfinite(numbers))
        if num_wrong:
            raise ConfigurationError(
                f"{self.file.path.name}: tensor {shown(self.tensor.name)} has {num_wrong:,} scales "
                "or numbers that are infinite or not a number: fetch the model again"
            )

    def matrix(self, index: int) -> Plain | Grouped:
        raise AssertionError("its matrices are found one by one")

    def table(self) -> Table | None:
        assert not self.heads, "an embedding has none"
        dtype, _ = _PLAIN.get(self.tensor.type.name, (None, None))
        return (self.file.rows(self.tensor), dtype) if dtype in CPU_DTYPES else None

    def rows(self, ids: NDArray[np.int64]) -> NDArray[np.float32]:
        assert not self.heads, "an embedding has none"
        return dequantize(self.tensor.type, self.file.rows(self.tensor).read(ids))

    def drop_pages(self) -> None:
        self.file.drop_pages(self.tensor)

    def _raw(self) -> NDArray[np.uint8]:
        """Its rows in the decoder's order, ``[rows, bytes of a row]``; a vector is one row."""
        raw = self.file.raw(self.tensor)
        if self.part is not None:
            rows = self.tensor.shape[1]
            return raw[self.part * rows : (self.part + 1) * rows]
        if len(self.tensor.shape) > 1:
            return unpermuted(raw, self.heads)
        elements = raw.reshape(-1, self.tensor.type.num_bytes)
        return unpermuted(elements, self.heads).reshape(raw.shape)


def unpermuted(rows: NDArray[Any], heads: int) -> NDArray[Any]:
    """Undo the order of q's and k's rows in files of llama: (head, pair, half) to (head, half,
    pair). Of whole rows, so that quantized ones are not touched within."""
    if not heads:
        return rows
    parts = rows.reshape(heads, -1, 2, *rows.shape[1:]).swapaxes(1, 2)
    return np.ascontiguousarray(parts).reshape(rows.shape)


def describe(model: GgufModel) -> GgufDescription:
    """Translate a file's metadata.

    Raises :class:`~vmserve.errors.UnsupportedError` for an architecture or a feature that is not
    offered, :class:`~vmserve.errors.ConfigurationError` for metadata that are missing or wrong.
    """
    file = model.metadata
    name = file.string("general.architecture")
    architecture = _ARCHITECTURES.get(name)
    if architecture is None:
        raise UnsupportedError(
            f"{file.path.name}: GGUF architecture {shown(name)} is not supported; supported: "
            f"{', '.join(_ARCHITECTURES)}"
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
    network = family.describe(read)
    if architecture.adds_offset:
        network = replace(network, norm=replace(network.norm, offset=0.0))
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


def find_weights(model: GgufModel, config: DecoderConfig) -> dict[str, GgufWeight]:
    """Where exactly the decoder's tensors lie, by its own names.

    Raises :class:`~vmserve.errors.ConfigurationError` for tensors that are missing, surplus or of
    the wrong shape, and names them as the file does.
    """
    architecture = _ARCHITECTURES[model.metadata.string("general.architecture")]
    shapes = tensor_shapes(config)
    places = {
        name: place for name, place in _places(config, architecture.layer).items() if name in shapes
    }
    wanted = {stored for stored, _ in places.values()}
    ignored = _NO_WEIGHTS | {
        f"blk.{layer}.attn_rot_embd.weight" for layer in range(config.num_layers)
    }
    missing = sorted(stored for stored in wanted if stored not in model.tensors)
    if missing:
        raise ConfigurationError(
            f"{model.path.name} lacks {len(missing):,} tensors that its metadata imply: "
            f"{_listed(missing)}; fetch the model again"
        )
    surplus = sorted(model.tensors.keys() - wanted - ignored)
    if surplus:
        raise UnsupportedError(
            f"{model.path.name} has {len(surplus):,} tensors that its architecture does not have "
            f"here: {_listed(surplus)}"
        )
    found = {}
    for name, (stored, part) in places.items():
        file, tensor = model.tensors[stored]
        shape = shapes[name]
        if part is not None and config.experts is not None:
            shape = (config.experts.count, *shape)
        if tensor.shape != shape:
            raise ConfigurationError(
                f"{file.path.name}: tensor {stored} has shape {list(tensor.shape)}, but the "
                f"metadata imply {list(shape)}: fetch the model again"
            )
        if len(tensor.shape) == 1 and tensor.type.num_elements > 1:
            raise UnsupportedError(
                f"{file.path.name}: tensor {stored} is a vector of type {tensor.type.name}: not "
                "supported, vectors are F32, F16 or BF16"
            )
        heads = {"q": config.q_heads, "k": config.kv_heads}.get(_q_or_k(stored), 0)
        found[name] = GgufWeight(file, tensor, heads if architecture.permuted else 0, part)
    return {name: found[name] for name in shapes}


def _q_or_k(stored: str) -> str:
    return stored.split(".")[-2].removeprefix("attn_")


def _places(config: DecoderConfig, modules: Mapping[str, str]) -> dict[str, tuple[str, int | None]]:
    """Our names; the file's, and which of a tensor's parts."""
    places: dict[str, tuple[str, int | None]] = {
        f"model.{ours}.weight": (f"{theirs}.weight", None) for theirs, ours in _ENDS.items()
    }
    places["lm_head.weight"] = "output.weight", None
    for layer in range(config.num_layers):
        for theirs, ours in modules.items():
            for kind in ("weight", "bias"):
                name = f"model.layers.{layer}.{ours}.{kind}"
                places[name] = f"blk.{layer}.{theirs}.{kind}", None
        if config.has_experts(layer):
            router = f"model.layers.{layer}.{config.names.router}.weight"
            places[router] = f"blk.{layer}.{_ROUTER}.weight", None
            for part, names in enumerate(mlp_names(config, layer)):
                for ours, theirs in zip(names, _EXPERTS, strict=True):
                    places[f"{ours}.weight"] = f"blk.{layer}.{theirs}.weight", part
    return places


def _listed(names: list[str]) -> str:
    more = len(names) - _NAMED_IN_ERRORS
    return ", ".join(map(shown, names[:_NAMED_IN_ERRORS])) + (
        f" and {more} more" if more > 0 else ""
    )


class _Fields:
    """The metadata of one architecture, checked, as fields of config.json."""

    def __init__(self, model: GgufModel, name: str, architecture: _Architecture) -> None:
        self._model = model
        self._file = model.metadata
        self._name = name
        self._architecture = architecture
        self._window = self._size("attention.sliding_window", 0, least=0) or None
        self.family = architecture.family
        if self._window is not None and not architecture.windowed:
            if name != "llama":
                raise self._unsupported("attention.sliding_window")
            self.family = "MistralForCausalLM"
        self._num_experts = self._size("expert_count", 0, least=0)
        if self._num_experts:
            if name not in _WITH_EXPERTS:
                raise self._unsupported("expert_count")
            self.family = _WITH_EXPERTS[name]
        for key in (
            "expert_shared_count",
            "expert_gating_func",
            "expert_weights_scale",
            "rope.dimension_sections",
            "attention.causal",
        ):
            if f"{name}.{key}" in self._file and self._scalar(key) not in (0, True):
                raise self._unsupported(key)

    def _scalar(self, key: str) -> object:
        value = self._file.metadata[f"{self._name}.{key}"]
        return None if isinstance(value, np.ndarray) else value

    def _unsupported(self, key: str) -> UnsupportedError:
        value = self._file.metadata[f"{self._name}.{key}"]
        said = shown(str(value)) if not isinstance(value, int | float) else f"{value}"
        return UnsupportedError(
            f"{self._file.path.name}: {self._name}.{key} = {said} is not supported"
        )

    def _size(self, key: str, default: int | None = None, least: int = 1) -> int:
        name = f"{self._name}.{key}"
        if isinstance(self._file.metadata.get(name), np.ndarray):
            raise UnsupportedError(
                f"{self._file.path.name}: {name} is a list: layers that differ are not supported"
            )
        value = self._file.integer(name, default)
        if not least <= value < _MOST_POSITIONS:
            raise ConfigurationError(
                f"{self._file.path.name}: {name} is {value:,}; it must be {least} or more, and "
                f"below {_MOST_POSITIONS:,}"
            )
        return value

    def _number(self, key: str, default: float | None = None, least: float = 0.0) -> float:
        value = self._file.number(f"{self._name}.{key}", default)
        if value <= 0 or value < least:
            allowed = f"{least:g} or more" if least else "above 0"
            raise ConfigurationError(
                f"{self._file.path.name}: {self._name}.{key} is {value}; it must be {allowed}"
            )
        return value

    def config(self) -> dict[str, Any]:
        hidden, heads = self._size("embedding_length"), self._size("attention.head_count")
        layers = self._size("block_count")
        if layers > len(self._model.tensors):
            raise ConfigurationError(
                f"{self._file.path.name}: {self._name}.block_count is {layers:,}, but there are "
                f"{len(self._model.tensors):,} tensors: fetch the model again"
            )
        head_dim = self._head_dim(hidden, heads)
        bos = "tokenizer.ggml.bos_token_id"
        config: dict[str, Any] = {
            "vocab_size": self._vocab_size(hidden),
            "hidden_size": hidden,
            "intermediate_size": self._size("feed_forward_length"),
            "num_hidden_layers": layers,
            "num_attention_heads": heads,
            "num_key_value_heads": self._size("attention.head_count_kv", heads),
            "head_dim": head_dim,
            "max_position_embeddings": self._size("context_length"),
            "rms_norm_eps": self._number("attention.layer_norm_rms_epsilon"),
            "tie_word_embeddings": "output.weight" not in self._model.tensors,
            "rope_parameters": {} if self._architecture.long else self._rope(),
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
            config["num_experts_per_tok"] = self._size("expert_used_count")
        if self.family == "Qwen3MoeForCausalLM":
            config["moe_intermediate_size"] = self._size("expert_feed_forward_length")
            config["norm_topk_prob"] = True
        if self.family == "Phi3ForCausalLM":
            config |= self._phi3(head_dim)
        if self._name in _LARGEST_GEMMA:
            config |= self._gemma(hidden, heads, layers, head_dim)
        _refuse_outside(self._file, config["vocab_size"], [config["bos_token_id"]])
        return config

    def _phi3(self, head_dim: int) -> dict[str, Any]:
        parameters: dict[str, Any] = {
            "rope_type": "default",
            "rope_theta": self._number("rope.freq_base", 10_000.0, 2),
            "partial_rotary_factor": self._size("rope.dimension_count", head_dim) / head_dim,
        }
        kind = self._file.string(f"{self._name}.rope.scaling.type", "none")
        if kind not in ("none", "longrope"):
            raise self._unsupported("rope.scaling.type")
        if _LONG_FACTORS[0] not in self._model.tensors:
            return {"rope_parameters": parameters}
        parameters |= {
            "rope_type": "longrope",
            "long_factor": self._factors(_LONG_FACTORS[0]),
            "short_factor": self._factors(_LONG_FACTORS[1]),
            "attention_factor": self._number("rope.scaling.attn_factor", 1.0),
        }
        original = self._size("rope.scaling.original_context_length")
        return {"rope_parameters": parameters, "original_max_position_embeddings": original}

    def _factors(self, name: str) -> list[float]:
        if name not in self._model.tensors:
            raise ConfigurationError(
                f"{self._file.path.name} lacks tensor {name}: fetch the model again"
            )
        file, tensor = self._model.tensors[name]
        factors = dequantize(tensor.type, file.raw(tensor)).reshape(-1)
        if not (np.isfinite(factors) & (factors > 0)).all():
            raise ConfigurationError(
                f"{file.path.name}: tensor {name} has factors that are not above 0"
            )
        return [float(factor) for factor in factors]

    def _gemma(self, hidden: int, heads: int, layers: int, head_dim: int) -> dict[str, Any]:
        largest = layers == _LARGEST_GEMMA[self._name]
        config: dict[str, Any] = {"query_pre_attn_scalar": hidden // heads if largest else head_dim}
        for key, default in (("attn_logit_softcapping", 50.0), ("final_logit_softcapping", 30.0)):
            if self._name == "gemma2" or f"{self._name}.{key}" in self._file:
                config[key] = self._number(key, default)
        if self._name == "gemma3" and self._window is None:
            config["layer_types"] = ["full_attention"] * layers
        if self._name == "gemma3":
            config["sliding_window_pattern"] = self._size("attention.sliding_window_pattern", 6)
            local = self._number("rope.freq_base_swa", 10_000.0, 2)
            config["rope_parameters"] = {
                "full_attention": self._rope(),
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
        if self._name == "llama" and hidden % heads:
            raise UnsupportedError(
                f"{self._file.path.name}: an embedding_length of {hidden:,} that {heads:,} heads "
                "do not share evenly is not supported"
            )
        head_dim = self._size("attention.key_length", hidden // heads)
        whole = ["attention.value_length"]
        if not self._architecture.partial:
            whole.append("rope.dimension_count")
        for key in whole:
            if self._size(key, head_dim) != head_dim:
                raise UnsupportedError(
                    f"{self._file.path.name}: {self._name}.{key} is {self._size(key):,} for heads "
                    f"of {head_dim:,}: not supported"
                )
        return head_dim

    def _rope(self) -> dict[str, Any]:
        parameters: dict[str, Any] = {"rope_theta": self._number("rope.freq_base", 10_000.0, 2)}
        kind = self._file.string(f"{self._name}.rope.scaling.type", "none")
        old = f"{self._name}.rope.scale_linear"
        if kind == "none" and old in self._file:
            return {
                **parameters,
                "rope_type": "linear",
                "factor": self._number("rope.scale_linear", least=1),
            }
        if kind == "none":
            return parameters
        if kind not in ("linear", "yarn"):
            raise UnsupportedError(
                f"{self._file.path.name}: {self._name}.rope.scaling.type {shown(kind)} is not "
                "supported; supported: none, linear, yarn"
            )
        parameters |= {"rope_type": kind, "factor": self._number("rope.scaling.factor", least=1)}
        if kind == "yarn":
            parameters["original_max_position_embeddings"] = self._size(
                "rope.scaling.original_context_length"
            )
            for key in ("beta_fast", "beta_slow"):
                if f"{self._name}.rope.scaling.yarn_{key}" in self._file:
                    parameters[key] = self._number(f"rope.scaling.yarn_{key}")
            for key in ("attn_factor", "yarn_log_multiplier", "yarn_attn_factor",
                        "yarn_ext_factor"):  # fmt: skip
                if f"{self._name}.rope.scaling.{key}" in self._file:
                    raise self._unsupported(f"rope.scaling.{key}")
        return parameters


def _rope_factors(model: GgufModel, network: DecoderConfig) -> RopeConfig | None:
    """Rotary positions whose periods are multiplied by a tensor's factors (Llama 3.1).

    That is longrope with one set of factors, and without its change of attention's scale.
    """
    rope = network.positions
    assert isinstance(rope, RopeConfig), "all families here rotate"
    for name in _LONG_FACTORS:
        if name in model.tensors and rope.rope_type != "longrope":
            raise UnsupportedError(f"{model.path.name}: tensor {name} is not supported")
    if _ROPE_FACTORS not in model.tensors:
        return None
    file, tensor = model.tensors[_ROPE_FACTORS]
    if tensor.shape != (network.head_dim // 2,):
        raise ConfigurationError(
            f"{file.path.name}: tensor {_ROPE_FACTORS} has shape {list(tensor.shape)}; heads of "
            f"{network.head_dim} need [{network.head_dim // 2}]: fetch the model again"
        )
    if rope.rope_type != "default":
        raise UnsupportedError(
            f"{file.path.name}: tensor {_ROPE_FACTORS} with rotary scaling {rope.rope_type} is not "
            "supported"
        )
    factors = dequantize(tensor.type, file.raw(tensor))[0]
    if not (np.isfinite(factors) & (factors > 0)).all():
        raise ConfigurationError(
            f"{file.path.name}: tensor {_ROPE_FACTORS} has factors that are not above 0"
        )
    parameters = {
        **rope.parameters,
        "rope_type": "longrope",
        "short_factor": factors.tolist(),
        "long_factor": factors.tolist(),
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
    """Norms and routers are always float32, and say nothing."""
    types = {
        tensor.type.name
        for name, (_, tensor) in model.tensors.items()
        if len(tensor.shape) > 1 and f".{_ROUTER}." not in name
    }
    [only] = types if len(types) == 1 else ("mixed",)
    dtype, _ = _PLAIN.get(only, (DType.BFLOAT16, None))
    return dtype
