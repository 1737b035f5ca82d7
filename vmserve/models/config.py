"""What a Hugging Face model directory says about a model, as one frozen value."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from vmserve.attention.base import LayerAttention
from vmserve.errors import ConfigurationError, UnsupportedError
from vmserve.models.decoder_config import DecoderConfig
from vmserve.models.families import FAMILIES
from vmserve.models.gguf.config import describe
from vmserve.models.gguf.reader import GgufModel, is_gguf, open_gguf
from vmserve.models.loader import weight_files
from vmserve.models.plan import tensor_shapes
from vmserve.models.quantized.formats import QuantizedFormat, describe_quantization
from vmserve.models.safetensors_file import SafetensorsFile
from vmserve.numbers.dtypes import DType
from vmserve.options import rules
from vmserve.system.files import read_json

if TYPE_CHECKING:
    from vmserve.models.foreign import ForeignConfig

__all__ = ["SUPPORTED_ARCHITECTURES", "ModelConfig"]

#: Architectures of our decoder; others run through the attention interface of transformers.
SUPPORTED_ARCHITECTURES = tuple(FAMILIES)

#: Fields of generation_config.json that are defaults of a request's sampling parameters.
_SAMPLING_FIELDS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")

#: Most layers of a model which is described without a look at its files.
_FEW_LAYERS = 1000


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """What the engine knows of a model. Sizes are in elements, positions in tokens."""

    architecture: str
    vocab_size: int
    kv_heads: int
    head_dim: int
    #: Longest sequence: positions beyond have no embedding, or one never trained.
    max_position_embeddings: int
    #: Attention of each layer with keys and values, in order.
    attention: tuple[LayerAttention, ...]
    #: Elements of all weights; tied ones count once.
    num_weights: int
    #: An upper bound on the elements that live at once, per token of a step.
    activation_width: int
    eos_token_ids: tuple[int, ...]
    bos_token_id: int | None
    #: Type of the weights according to the checkpoint.
    dtype: DType
    #: Keyword arguments of SamplingParams that the model's authors recommend.
    default_sampling: Mapping[str, float | int]
    #: Source of its embeddings: "last" or "mean" of the final hidden states.
    pooling: Literal["last", "mean"]
    #: Our decoder, or a model of ``transformers``.
    network: DecoderConfig | ForeignConfig
    #: Format of its files, if only the native decoder multiplies by their matrices as they are.
    native_only: GgufModel | QuantizedFormat | None = field(default=None, compare=False, repr=False)

    @property
    def num_layers(self) -> int:
        return len(self.attention)

    @property
    def keys_only(self) -> bool:
        """Whether values are parts of the keys' rows, and take no memory."""
        return isinstance(self.network, DecoderConfig) and self.network.latent is not None

    @property
    def kv_elements(self) -> int:
        """What a token keeps in all layers."""
        parts = 1 if self.keys_only else 2
        return self.num_layers * parts * self.kv_heads * self.head_dim

    @property
    def windows(self) -> tuple[int | None, ...]:
        """Per layer, how many positions a query sees, itself included; None: all of them."""
        return tuple(layer.window for layer in self.attention)

    @property
    def num_states(self) -> int:
        """Layers that keep a state in place of keys and values."""
        delta = self.network.delta if isinstance(self.network, DecoderConfig) else None
        return 0 if delta is None else len(delta.layers)

    @property
    def state_bytes(self) -> int:
        """What a sequence keeps in all of these, whatever its length."""
        delta = self.network.delta if isinstance(self.network, DecoderConfig) else None
        return 0 if delta is None else 4 * delta.state_floats * self.num_states

    @classmethod
    def from_directory(cls, path: str | Path) -> ModelConfig:
        """Read config.json and, where there is one, generation_config.json; or a GGUF file.

        Only classes of ``transformers`` run, never code of the directory. A model that the
        decoder does not know is built without its weights, to see what its layers ask of
        attention (see :mod:`vmserve.models.foreign`).

        Raises :class:`~vmserve.errors.UnsupportedError` for an architecture or a feature
        that is not offered, :class:`~vmserve.errors.ConfigurationError` for bad files.
        """
        directory = Path(path)
        if is_gguf(directory):
            return cls._from_gguf(directory)
        raw = _read_config(directory)
        _check_layers(raw, directory)
        architecture = _architecture(raw)
        quantized = describe_quantization(raw)
        network: DecoderConfig | ForeignConfig
        if architecture in FAMILIES:
            family = FAMILIES[architecture]
            hf: Any = family.read(raw) or _parse(family.model_type, raw)
            network = family.describe(hf)
            num_weights = _num_weights(network)
            text = hf
        else:
            hf = _parse(str(raw["model_type"]), raw)
            by = None if quantized is None else quantized.name
            rules.check({"quantized_by": by, "no_family": architecture})
            network = _inspect(architecture, hf)
            num_weights = network.num_weights
            text = hf.get_text_config()
        generation = _read_optional(directory / "generation_config.json")
        dtype = DType.of(hf.dtype or text.dtype or DType.FLOAT32)
        if quantized is not None and dtype is DType.FLOAT16:
            dtype = DType.BFLOAT16  # that of scales says nothing of what to compute in
        return cls(
            architecture=architecture,
            vocab_size=network.vocab_size,
            kv_heads=network.kv_heads,
            head_dim=network.head_dim,
            max_position_embeddings=network.max_position_embeddings,
            attention=(
                network.attention_layers if isinstance(network, DecoderConfig) else network.layers
            ),
            num_weights=num_weights,
            activation_width=network.activation_width,
            eos_token_ids=_token_ids(generation.get("eos_token_id", text.eos_token_id)),
            bos_token_id=generation.get("bos_token_id", text.bos_token_id),
            dtype=dtype,
            default_sampling=_default_sampling(generation),
            pooling=_pooling(_read_optional(directory / "1_Pooling" / "config.json")),
            network=network,
            native_only=quantized,
        )

    @classmethod
    def _from_gguf(cls, path: Path) -> ModelConfig:
        model = open_gguf(path)
        described = describe(model)
        network = described.network
        return cls(
            architecture=described.architecture,
            vocab_size=network.vocab_size,
            kv_heads=network.kv_heads,
            head_dim=network.head_dim,
            max_position_embeddings=network.max_position_embeddings,
            attention=network.attention_layers,
            num_weights=_num_weights(network),
            activation_width=network.activation_width,
            eos_token_ids=described.eos_token_ids,
            bos_token_id=described.bos_token_id,
            dtype=described.dtype,
            default_sampling={},
            pooling="last",
            network=network,
            native_only=model,
        )


def _read_config(directory: Path) -> dict[str, Any]:
    if not directory.is_dir():
        raise ConfigurationError(f"model directory {directory} does not exist: check --model")
    if not (directory / "config.json").is_file():
        raise ConfigurationError(
            f"{directory} has no config.json: --model needs a directory in Hugging Face layout "
            "(config.json, *.safetensors, tokenizer.json)"
        )
    return read_json(directory / "config.json")


def _check_layers(raw: dict[str, Any], directory: Path) -> None:
    """Raises :class:`ConfigurationError` for more layers than there are tensors: describing each
    of a billion takes the machine's memory."""
    text = raw.get("text_config")
    for config in (raw, text if isinstance(text, dict) else {}):
        for name in ("num_hidden_layers", "n_layer", "num_layers"):
            layers = config.get(name)
            if not isinstance(layers, int) or layers <= _FEW_LAYERS:
                continue
            stored = sum(len(SafetensorsFile(file).tensors) for file in weight_files(directory))
            if layers > stored:
                raise ConfigurationError(
                    f"config.json: {name} is {layers:,}, but the files have {stored:,} tensors: "
                    "fetch the model again"
                )


def _read_optional(path: Path) -> dict[str, Any]:
    return read_json(path) if path.is_file() else {}


def _pooling(raw: dict[str, Any]) -> Literal["last", "mean"]:
    """Read the pooling from the files of sentence-transformers; a chat model has none."""
    is_mean = raw.get("pooling_mode_mean_tokens") or raw.get("pooling_mode") == "mean"
    return "mean" if is_mean else "last"


def _architecture(raw: dict[str, Any]) -> str:
    """The causal LM that config.json names; a directory's own code (auto_map) never counts."""
    model_type = str(raw.get("model_type"))
    of_type = next((n for n, family in FAMILIES.items() if family.model_type == model_type), None)
    given = raw.get("architectures")
    name = of_type
    if given:
        name = given[0] if isinstance(given, list) else raw.get("model_type")
    if name not in FAMILIES:
        from vmserve.models.transformers_config import causal_architecture  # noqa: PLC0415 - slow

        of_type = of_type or causal_architecture(model_type)
        name = name or of_type or raw.get("model_type")
    if name not in FAMILIES and (name is None or name != of_type):
        own_code = " (it brings its own code, which is never run)" if "auto_map" in raw else ""
        raise UnsupportedError(
            f"model architecture {name!r} is not supported{own_code}; supported: "
            f"{', '.join(FAMILIES)}, and causal language models of transformers' own"
        )
    return str(name)


def _parse(model_type: str, raw: dict[str, Any]) -> Any:
    """What ``transformers`` makes of config.json, where we leave it to that."""
    from vmserve.models.transformers_config import parse  # noqa: PLC0415 - slow to import

    return parse(model_type, raw)


def _inspect(architecture: str, hf: Any) -> ForeignConfig:
    from vmserve.models.foreign import ForeignConfig  # noqa: PLC0415 - slow to import

    return ForeignConfig.inspect(architecture, hf)


def _num_weights(network: DecoderConfig) -> int:
    return sum(math.prod(shape) for shape in tensor_shapes(network).values())


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
