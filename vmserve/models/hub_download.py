"""Models of the hub: from the local Hugging Face cache, else downloaded.

Apart from :mod:`vmserve.models.hub` because the hub's client takes as long to import as all of our
own modules, and a directory needs none of it.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import cast

from huggingface_hub import constants, snapshot_download, try_to_load_from_cache
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
)

from vmserve.errors import ConfigurationError

__all__ = ["cached", "cached_file", "cached_snapshots", "downloaded"]

logger = logging.getLogger(__name__)

#: Files of a repository that a model needs: never code, never pickled weights, and not Mistral's
#: second copy of the weights (consolidated*).
_WANTED_FILES = ["*.json", "*.safetensors", "*.jinja", "tokenizer.model", "*.txt"]
_UNWANTED_FILES = ["consolidated*", "*/*"]
#: OSError, and the base error of the HTTP library which this huggingface_hub is built on.
_TRANSPORT_ERRORS = cast(tuple[type[Exception], ...], HfHubHTTPError.__bases__)


def cached(repo_id: str) -> Path | None:
    """Return the model's directory in the cache; None if it is not complete."""
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


def cached_snapshots() -> Iterator[tuple[str, Path | None]]:
    """Yield each repository of models in the cache with its files' directory, or None."""
    for directory in sorted(Path(constants.HF_HUB_CACHE).glob("models--*")):
        repo_id = directory.name.removeprefix("models--").replace("--", "/")
        try:
            yield repo_id, _snapshot(repo_id, local_files_only=True)
        except (LocalEntryNotFoundError, OSError, HFValidationError):
            yield repo_id, None


def cached_file(repo_id: str, name: str) -> Path | None:
    """Return a file of a repository in the cache; None if it is not there."""
    try:
        found = try_to_load_from_cache(repo_id, name)
    except HFValidationError as error:
        raise ConfigurationError(
            f"{repo_id!r} is not a hub id such as Qwen/Qwen3-0.6B: check --model"
        ) from error
    return Path(found) if isinstance(found, str) else None


def downloaded(repo_id: str) -> Path:
    """Download the model. Raises :class:`~vmserve.errors.ConfigurationError` with the reason."""
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
