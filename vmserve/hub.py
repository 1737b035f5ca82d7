"""From what the user calls a model to the directory that has its files."""

from __future__ import annotations

from pathlib import Path

from vmserve.errors import ConfigurationError

__all__ = ["resolve_model"]

# Not by importlib.resources, which imports more than it finds; the package is always in files.
_EMBEDDED = Path(__file__).parent / "assets" / "embedded"


def resolve_model(model: str | None) -> Path:
    """The directory of a model.

    ``model``: None for the model inside the package; an existing directory; or a hub id
    such as ``Qwen/Qwen3-0.6B``, taken from the local Hugging Face cache, else downloaded
    (``huggingface_hub`` shows the progress on standard error).

    Raises :class:`~vmserve.errors.ConfigurationError` when there is no such model, or it
    is not in the cache and cannot be downloaded.
    """
    if model is None:
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
