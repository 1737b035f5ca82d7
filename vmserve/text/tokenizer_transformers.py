"""Load tokenizers by ``transformers``, and choose their class without AutoTokenizer."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from vmserve.errors import ConfigurationError
from vmserve.system.files import read_json

__all__ = ["chosen_class", "load_from_transformers"]

_GENERAL = ("PreTrainedTokenizerFast", "TokenizersBackend")
_BUILT = ("GPT2Tokenizer", "Qwen2Tokenizer")
#: Files that hold a vocabulary; nearly every model has the first.
_VOCABULARIES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model")
_MODEL_TYPES = ("gpt2", "llama", "opt", "qwen3")


def load_from_transformers(directory: Path) -> Any:
    """Load a directory's tokenizer. Raises :class:`~vmserve.errors.ConfigurationError`."""
    name = _class_name(directory)
    try:
        # Imported late because it is slow. Its AutoTokenizer is much slower than the classes of
        # tokenizers, because it imports every configuration and torch.
        import transformers  # noqa: PLC0415

        if name is not None:
            return getattr(transformers, name).from_pretrained(
                str(directory), local_files_only=True
            )
        return transformers.AutoTokenizer.from_pretrained(
            str(directory), trust_remote_code=False, local_files_only=True
        )
    except (OSError, ValueError, KeyError, ImportError) as error:
        if not any((directory / file).exists() for file in _VOCABULARIES):
            raise ConfigurationError(
                f"{directory} has no tokenizer ({_VOCABULARIES[0]}): copy the model's own there, "
                "or say where it is with --tokenizer"
            ) from error
        raise ConfigurationError(
            f"no tokenizer could be loaded from {directory}: {error}"
        ) from error


def _class_name(directory: Path) -> str | None:
    """The class that AutoTokenizer would choose, or None if only it knows."""
    try:
        config = read_json(directory / "tokenizer_config.json")
        model = read_json(directory / "config.json")
    except ConfigurationError:
        return None
    return chosen_class(model, config)


def chosen_class(model: Mapping[str, Any], config: Mapping[str, Any]) -> str | None:
    """Choose by config.json and tokenizer_config.json; None if AutoTokenizer has to choose."""
    if "auto_map" in config or "model_name" in model or "tokenizer_class" in model:
        return None
    model_type, given = model.get("model_type"), config.get("tokenizer_class")
    if model_type == "qwen2":  # the class that is given is wrong in many repositories
        return "Qwen2Tokenizer"
    if model_type not in _MODEL_TYPES or not isinstance(given, str | None):
        return None
    if given is None:
        return {"qwen3": "Qwen2Tokenizer", "llama": None}.get(model_type, "GPT2Tokenizer")
    if given in _GENERAL:
        return "PreTrainedTokenizerFast"
    return given.removesuffix("Fast") if given.removesuffix("Fast") in _BUILT else None
