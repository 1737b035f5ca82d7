"""From what the user calls a model to the directory that has its files."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from vmserve.errors import ConfigurationError

__all__ = ["EMBEDDED_NAME", "is_embedded", "resolve_model"]

#: What the embedded model is called by a server, and may be called by users.
EMBEDDED_NAME: Final = "vmserve-embedded"
# Not by importlib.resources, which imports more than it finds; the package is always in files.
_EMBEDDED = Path(__file__).parent / "assets" / "embedded"


def is_embedded(model: str | None) -> bool:
    """None and :data:`EMBEDDED_NAME` are the model inside the package.

    A directory of that name is a model like any other.
    """
    return model is None or (model == EMBEDDED_NAME and not Path(model).exists())


def resolve_model(model: str | None) -> Path:
    """The directory of a model.

    ``model``: None or ``vmserve-embedded`` for the model inside the package; an existing
    directory; or a hub id such as ``Qwen/Qwen3-0.6B``, taken from the local Hugging Face cache,
    else downloaded (``huggingface_hub`` shows the progress on standard error).

    Raises :class:`~vmserve.errors.ConfigurationError` when there is no such model, or it
    is not in the cache and cannot be downloaded.
    """
    if model is None or is_embedded(model):
        return _EMBEDDED
    directory = Path(model).expanduser()
    if directory.is_dir():
        return directory
    if directory.exists():
        raise ConfigurationError(
            f"{model} is a file: --model needs the directory with config.json and *.safetensors"
        )
    if model.startswith(("/", "./", "../", "~")) or model.count("/") > 1:
        raise ConfigurationError(f"model directory {model} does not exist: check --model")
    # Only now: the hub's client is slow to import.
    from vmserve.hub_download import cached, downloaded  # noqa: PLC0415

    return cached(model) or downloaded(model)
