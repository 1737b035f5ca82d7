"""Reading the JSON files of a model directory."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from vmserve.errors import ConfigurationError

__all__ = ["read_json"]


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in ``path``; :class:`ConfigurationError` with the reason otherwise."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"), object_hook=_with_floats)
    except OSError as error:
        raise ConfigurationError(f"{path.name} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise ConfigurationError(
            f"{path.name} is not valid JSON ({error}): fetch the model again"
        ) from error
    if not isinstance(value, dict):
        raise ConfigurationError(f"{path.name} is not a JSON object: fetch the model again")
    return value


def _with_floats(value: dict[str, Any]) -> Any:
    """``transformers`` writes what JSON has no number for as ``{"__float__": "Infinity"}``."""
    if value.keys() == {"__float__"} and isinstance(text := value["__float__"], str):
        return float(text)
    return value
