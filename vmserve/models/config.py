"""What a Hugging Face model directory says about a model, as one frozen value."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from transformers import LlamaConfig, MistralConfig, PreTrainedConfig, Qwen2Config, Qwen3Config

from vmserve.errors import ConfigurationError, UnsupportedError
from vmserve.models.rope import RopeConfig

__all__ = ["SUPPORTED_ARCHITECTURES", "ModelConfig", "read_json"]

#: Fields of generation_config.json that are defaults of a request's sampling parameters.
_SAMPLING_FIELDS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")

Windows = tuple[int | None, ...]


@dataclass(frozen=True)
class _Family:
    """How an architecture differs from the plain Llama decoder."""

    model_type: str
    config_class: type[PreTrainedConfig]
    #: (query/key/value, output, MLP) projections have a bias.
    biases: Callable[[PreTrainedConfig], tuple[bool, bool, bool]]
    windows: Callable[[PreTrainedConfig], Windows]
    qk_norm: bool = False


def _no_windows(hf: PreTrainedConfig) -> Windows:
    return tuple(None for _ in range(hf.num_hidden_layers))


def _one_window(hf: PreTrainedConfig) -> Windows:
    window: int | None = hf.sliding_window
    return tuple(window for _ in range(hf.num_hidden_layers))


def _window_by_layer_type(hf: PreTrainedConfig) -> Windows:
    windows: dict[str, int | None] = {
        "full_attention": None,
        "sliding_attention": hf.sliding_window,
    }
    unknown = sorted(set(hf.layer_types) - set(windows))
    if unknown:
        raise UnsupportedError(
            f"layer type {', '.join(unknown)} is not supported; supported: {', '.join(windows)}"
        )
    return tuple(windows[layer_type] for layer_type in hf.layer_types)


_FAMILIES = {
    "LlamaForCausalLM": _Family(
        "llama",
        LlamaConfig,
        lambda hf: (hf.attention_bias, hf.attention_bias, hf.mlp_bias),
        _no_windows,
    ),
    "MistralForCausalLM": _Family(
        "mistral", MistralConfig, lambda hf: (False, False, False), _one_window
    ),
    "Qwen2ForCausalLM": _Family(
        "qwen2", Qwen2Config, lambda hf: (True, False, False), _window_by_layer_type
    ),
    "Qwen3ForCausalLM": _Family(
        "qwen3",
        Qwen3Config,
        lambda hf: (hf.attention_bias, hf.attention_bias, False),
        _window_by_layer_type,
        qk_norm=True,
    ),
}
SUPPORTED_ARCHITECTURES = tuple(_FAMILIES)


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """A decoder of the Llama family. Sizes are in elements, positions in tokens."""

    architecture: str
    vocab_size: int
    hidden_size: int
    mlp_size: int
    num_layers: int
    q_heads: int
    kv_heads: int
    head_dim: int
    max_position_embeddings: int
    rms_norm_eps: float
    rope: RopeConfig
    qkv_bias: bool
    output_bias: bool
    mlp_bias: bool
    qk_norm: bool
    tied_embeddings: bool
    #: Per layer, how many positions a query sees, itself included; None: all of them.
    windows: Windows
    eos_token_ids: tuple[int, ...]
    bos_token_id: int | None
    #: The type that the checkpoint says its weights have.
    dtype: torch.dtype
    #: Keyword arguments of SamplingParams that the model's authors recommend.
    default_sampling: Mapping[str, float | int]

    @classmethod
    def from_directory(cls, path: str | Path) -> ModelConfig:
        """Read config.json and, where there is one, generation_config.json.

        Only the configuration classes of ``transformers`` run, never code of the directory.

        Raises :class:`~vmserve.errors.UnsupportedError` for an architecture or a feature
        that is not offered, :class:`~vmserve.errors.ConfigurationError` for bad files.
        """
        directory = Path(path)
        raw = _read_config(directory)
        architecture = _architecture(raw)
        family = _FAMILIES[architecture]
        hf = _parse(family.config_class, raw)
        generation = _read_optional(directory / "generation_config.json")
        biases = family.biases(hf)
        config = cls(
            architecture=architecture,
            vocab_size=hf.vocab_size,
            hidden_size=hf.hidden_size,
            mlp_size=hf.intermediate_size,
            num_layers=hf.num_hidden_layers,
            q_heads=hf.num_attention_heads,
            kv_heads=hf.num_key_value_heads,
            head_dim=_head_dim(hf),
            max_position_embeddings=hf.max_position_embeddings,
            rms_norm_eps=hf.rms_norm_eps,
            rope=_rope(hf),
            qkv_bias=biases[0],
            output_bias=biases[1],
            mlp_bias=biases[2],
            qk_norm=family.qk_norm,
            tied_embeddings=bool(hf.tie_word_embeddings),
            windows=family.windows(hf),
            eos_token_ids=_token_ids(generation.get("eos_token_id", hf.eos_token_id)),
            bos_token_id=generation.get("bos_token_id", hf.bos_token_id),
            dtype=hf.dtype or torch.float32,
            default_sampling=_default_sampling(generation),
        )
        config._check()
        return config

    def _check(self) -> None:
        for name in ("vocab_size", "hidden_size", "mlp_size", "num_layers", "q_heads", "kv_heads",
                     "head_dim", "max_position_embeddings"):  # fmt: skip
            value = getattr(self, name)
            if value < 1:
                raise ConfigurationError(f"config.json: {name} is {value}; it must be 1 or more")
        if self.q_heads % self.kv_heads:
            raise ConfigurationError(
                f"config.json: {self.q_heads} query heads cannot share "
                f"{self.kv_heads} key-value heads evenly"
            )
        if self.head_dim % 2:
            raise ConfigurationError(
                f"config.json: head_dim is {self.head_dim}; rotary embedding needs an even one"
            )
        if len(self.windows) != self.num_layers:
            raise ConfigurationError(
                f"config.json: layer_types has {len(self.windows)} entries for "
                f"{self.num_layers} layers"
            )
        for window in self.windows:
            if window is not None and window < 1:
                raise ConfigurationError(
                    f"config.json: sliding_window is {window}; it must be 1 or more"
                )


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in ``path``; :class:`ConfigurationError` with the reason otherwise."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigurationError(f"{path.name} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise ConfigurationError(
            f"{path.name} is not valid JSON ({error}): fetch the model again"
        ) from error
    if not isinstance(value, dict):
        raise ConfigurationError(f"{path.name} is not a JSON object: fetch the model again")
    return value


def _read_config(directory: Path) -> dict[str, Any]:
    if not directory.is_dir():
        raise ConfigurationError(f"model directory {directory} does not exist: check --model")
    if not (directory / "config.json").is_file():
        raise ConfigurationError(
            f"{directory} has no config.json: --model needs a directory in Hugging Face layout "
            "(config.json, *.safetensors, tokenizer.json)"
        )
    return read_json(directory / "config.json")


def _read_optional(path: Path) -> dict[str, Any]:
    return read_json(path) if path.is_file() else {}


def _architecture(raw: dict[str, Any]) -> str:
    """The registered architecture; a directory's own code (auto_map) is never considered."""
    names = raw.get("architectures") or [
        name for name, family in _FAMILIES.items() if family.model_type == raw.get("model_type")
    ]
    name = names[0] if isinstance(names, list) and names else raw.get("model_type")
    if name not in _FAMILIES:
        own_code = " (it brings its own code, which is never run)" if "auto_map" in raw else ""
        raise UnsupportedError(
            f"model architecture {name!r} is not supported{own_code}; "
            f"supported: {', '.join(_FAMILIES)}"
        )
    if raw.get("quantization_config"):
        raise UnsupportedError(
            "quantized checkpoints (quantization_config in config.json) are not supported: "
            "use the model's float32, bfloat16 or float16 weights"
        )
    return str(name)


def _parse(config_class: type[PreTrainedConfig], raw: dict[str, Any]) -> PreTrainedConfig:
    try:
        hf = config_class.from_dict(raw)
    except (ArithmeticError, LookupError, AttributeError, TypeError, ValueError) as error:
        raise ConfigurationError(f"config.json: {_reason(error)}") from error
    except StrictDataclassError as error:
        raise ConfigurationError(f"config.json: {_reason(error.__cause__ or error)}") from error
    if hf.hidden_act not in ("silu", "swish"):
        raise UnsupportedError(
            f"activation {hf.hidden_act!r} is not supported; supported: silu (as SwiGLU)"
        )
    return hf


def _reason(error: BaseException) -> str:
    """One line of at most 300 characters."""
    text = str(error.args[0]) if error.args else type(error).__name__
    return textwrap.shorten(text, 300)


def _head_dim(hf: PreTrainedConfig) -> int:
    explicit: int | None = getattr(hf, "head_dim", None)
    return explicit or int(hf.hidden_size // hf.num_attention_heads)


def _rope(hf: PreTrainedConfig) -> RopeConfig:
    parameters = dict(hf.rope_parameters)
    return RopeConfig(
        rope_type=str(parameters.get("rope_type", "default")),
        parameters=parameters,
        head_dim=_head_dim(hf),
        max_position_embeddings=hf.max_position_embeddings,
    )


def _token_ids(value: int | list[int] | None) -> tuple[int, ...]:
    if value is None:
        return ()
    return tuple(value) if isinstance(value, list) else (value,)


def _default_sampling(generation: dict[str, Any]) -> dict[str, float | int]:
    defaults = {name: generation.get(name) for name in _SAMPLING_FIELDS}
    for name, value in defaults.items():
        if value is not None and (isinstance(value, bool) or not isinstance(value, int | float)):
            raise ConfigurationError(f"generation_config.json: {name} is {value!r}, not a number")
    return {name: value for name, value in defaults.items() if value is not None}
