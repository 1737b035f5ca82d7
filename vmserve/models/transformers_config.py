"""What ``transformers`` knows of configurations; slow to import, and so by itself.

It reads those that :mod:`vmserve.models.fields` leaves to it: of models that the decoder does not
know, and those that are unusual or wrong, which it has the words for.
"""

from __future__ import annotations

import textwrap
from typing import Any

from huggingface_hub.errors import StrictDataclassError
from transformers import CONFIG_MAPPING, PreTrainedConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from vmserve.errors import ConfigurationError

__all__ = ["causal_architecture", "parse"]


def causal_architecture(model_type: str) -> str | None:
    """Return transformers' class of causal language models for a ``model_type``, or None."""
    name = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(model_type)
    return None if name is None else str(name)


def parse(model_type: str, raw: dict[str, Any]) -> PreTrainedConfig:
    """config.json as an object of transformers.

    Raises :class:`~vmserve.errors.ConfigurationError` with what transformers says is wrong.
    """
    try:
        return CONFIG_MAPPING[model_type].from_dict(raw)
    except (ArithmeticError, LookupError, AttributeError, TypeError, ValueError) as error:
        raise ConfigurationError(f"config.json: {_reason(error)}") from error
    except StrictDataclassError as error:
        raise ConfigurationError(f"config.json: {_reason(error.__cause__ or error)}") from error


def _reason(error: BaseException) -> str:
    """Format a reason in one line of at most 300 characters."""
    text = str(error.args[0]) if error.args else type(error).__name__
    return textwrap.shorten(text, 300)
