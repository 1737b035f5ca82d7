"""Tokenizers that ``transformers`` loads, by the shortest way to the class that it would choose."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from vmserve.errors import ConfigurationError
from vmserve.json_files import read_json

__all__ = ["chosen_class", "load_from_transformers"]

_GENERAL = ("PreTrainedTokenizerFast", "TokenizersBackend")
_BUILT = ("GPT2Tokenizer", "Qwen2Tokenizer")
#: Files that hold a vocabulary; the first is what nearly every model brings.
_VOCABULARIES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model")
_MODEL_TYPES = ("gpt2", "llama", "opt", "qwen3")


def load_from_transformers(directory: Path) -> Any:
    """Raises :class:`~vmserve.errors.ConfigurationError`."""
    name = _class_name(directory)
    try:
        # Only now: transformers is slow to import, and its AutoTokenizer, which imports every
        # configuration and torch, much slower than the classes of tokenizers.
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
    """What AutoTokenizer would choose, if that is known without it."""
    try:
        config = read_json(directory / "tokenizer_config.json")
        model = read_json(directory / "config.json")
    except ConfigurationError:
        return None
    return chosen_class(model, config)


def chosen_class(model: Mapping[str, Any], config: Mapping[str, Any]) -> str | None:
    """By config.json and tokenizer_config.json; None where AutoTokenizer has to say."""
    if "auto_map" in config or "model_name" in model or "tokenizer_class" in model:
        return None
    model_type, given = model.get("model_type"), config.get("tokenizer_class")
    if model_type == "qwen2":  # whatever is given: it is known to be wrong in many repositories
        return "Qwen2Tokenizer"
    if model_type not in _MODEL_TYPES or not isinstance(given, str | None):
        return None
    if given is None:
        return {"qwen3": "Qwen2Tokenizer", "llama": None}.get(model_type, "GPT2Tokenizer")
    if given in _GENERAL:
        return "PreTrainedTokenizerFast"
    return given.removesuffix("Fast") if given.removesuffix("Fast") in _BUILT else None
