"""From what the user calls a model to the directory that has its files."""

from __future__ import annotations

import logging
from importlib.resources import files
from pathlib import Path
from typing import cast

from huggingface_hub import constants, snapshot_download
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
)

from vmserve.errors import ConfigurationError

__all__ = ["resolve_model"]

logger = logging.getLogger(__name__)

#: What a model needs of a repository: never code, never pickled weights, and not Mistral's
#: second copy of the weights (consolidated*).
_WANTED_FILES = ["*.json", "*.safetensors", "*.jinja", "tokenizer.model", "*.txt"]
_UNWANTED_FILES = ["consolidated*", "*/*"]
#: OSError, and the base error of the HTTP library that this huggingface_hub is built on.
_TRANSPORT_ERRORS = cast(tuple[type[Exception], ...], HfHubHTTPError.__bases__)


def resolve_model(model: str | None) -> Path:
    """The directory of a model.

    ``model``: None for the model inside the package; an existing directory; or a hub id
    such as ``Qwen/Qwen3-0.6B``, taken from the local Hugging Face cache, else downloaded
    (``huggingface_hub`` shows the progress on standard error).

    Raises :class:`~vmserve.errors.ConfigurationError` when there is no such model, or it
    is not in the cache and cannot be downloaded.
    """
    if model is None:
        return Path(str(files("vmserve") / "assets" / "embedded"))
    directory = Path(model).expanduser()
    if directory.is_dir():
        return directory
    if directory.exists():
        raise ConfigurationError(
            f"{model} is a file: --model needs the directory with config.json and *.safetensors"
        )
    if model.startswith(("/", "./", "../", "~")) or model.count("/") > 1:
        raise ConfigurationError(f"model directory {model} does not exist: check --model")
    return _cached(model) or _downloaded(model)


def _cached(repo_id: str) -> Path | None:
    try:
        snapshot = _snapshot(repo_id, local_files_only=True)
    except LocalEntryNotFoundError:
        return None
    except HFValidationError as error:
        raise ConfigurationError(
            f"model {repo_id!r} is neither a directory here nor a hub id such as "
            "Qwen/Qwen3-0.6B: check --model"
        ) from error
    # An interrupted download can leave a snapshot without weights behind.
    return snapshot if _is_usable(snapshot) else None


def _downloaded(repo_id: str) -> Path:
    logger.info("%s is not in the local Hugging Face cache: downloading", repo_id)
    try:
        snapshot = _snapshot(repo_id, local_files_only=False)
    except GatedRepoError as error:
        raise ConfigurationError(
            f"model {repo_id} is gated: accept its terms on the hub, then set HF_TOKEN"
        ) from error
    except RepositoryNotFoundError as error:
        raise ConfigurationError(
            f"model {repo_id} is neither a directory here nor on the hub "
            "(for a private one set HF_TOKEN): check --model"
        ) from error
    except _TRANSPORT_ERRORS as error:
        reason = "HF_HUB_OFFLINE is set" if constants.HF_HUB_OFFLINE else "the hub did not answer"
        raise ConfigurationError(
            f"model {repo_id} is neither a directory here nor in the local Hugging Face cache, "
            f"and {reason}: give a directory, or fetch it where there is a network with "
            f"`hf download {repo_id}`"
        ) from error
    if not _is_usable(snapshot):
        raise ConfigurationError(
            f"model {repo_id} has no config.json with *.safetensors beside it, on the hub or as "
            f"far as it was fetched: run `hf download {repo_id}`, or choose a model that has them"
        )
    return snapshot


def _snapshot(repo_id: str, *, local_files_only: bool) -> Path:
    return Path(
        snapshot_download(
            repo_id,
            local_files_only=local_files_only,
            allow_patterns=_WANTED_FILES,
            ignore_patterns=_UNWANTED_FILES,
        )
    )


def _is_usable(snapshot: Path) -> bool:
    return (snapshot / "config.json").is_file() and any(snapshot.glob("*.safetensors"))
