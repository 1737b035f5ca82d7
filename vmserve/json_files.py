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
