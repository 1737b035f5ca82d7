"""Find the directory of a model that the user names."""

from __future__ import annotations

import os
import pwd
import re
from pathlib import Path
from typing import Final, overload

from vmserve.errors import ConfigurationError
from vmserve.models.gguf.reader import is_gguf
from vmserve.models.pullable import PULLABLE, find_pulled
from vmserve.numbers.sizes import format_size

__all__ = ["EMBEDDED_NAME", "is_embedded", "resolve_model"]

#: Name of the embedded model for a server and for users.
EMBEDDED_NAME: Final = "vmserve-embedded"
# Not by importlib.resources, which imports more than it finds; the package is always in files.
#: Files of a model's directory that are read if they are there.
_READ_FILES: Final = (
    *(
        "*.gguf",
        "*.safetensors",
        "*.safetensors.index.json",
        "*.jinja",
        "tokenizer.model",
        "merges.txt",
    ),
    *("config.json", "generation_config.json", "*token*.json", "vocab.json"),
)
_EMBEDDED = Path(__file__).parents[1] / "assets" / "embedded"


def is_embedded(model: str | None) -> bool:
    """None, :data:`EMBEDDED_NAME` and ``embedded`` are the model inside the package.

    A directory of that name is a model like any other.
    """
    names = (EMBEDDED_NAME, "embedded")
    return model is None or (model in names and not Path(model).exists())


@overload
def resolve_model(model: str | None) -> Path: ...
@overload
def resolve_model(model: str | None, *, download: bool) -> Path | None: ...
def resolve_model(model: str | None, *, download: bool = True) -> Path | None:
    """Return the directory of a model, or its GGUF file; without ``download`` None for one that the
    cache does not have.

    ``model``: that inside the package (:func:`is_embedded`); an existing directory; a GGUF file, or
    a directory that holds one, or ``hub-id:FILE.gguf`` in the local Hugging Face cache; the name of
    a pulled model; or a hub id such as ``Qwen/Qwen3-0.6B``, taken from that cache, else downloaded
    (``huggingface_hub`` shows the progress on standard error).

    Raises :class:`~vmserve.errors.ConfigurationError` when there is no such model, it is not in
    the cache and cannot be downloaded, or this process may not read its files.
    """
    if model is None or is_embedded(model):
        return _EMBEDDED
    directory = Path(model).expanduser()
    _check_readable(directory)
    if directory.is_dir():
        return _gguf_within(directory) or directory
    if is_gguf(directory):
        return directory if directory.exists() else _cached_gguf(model)
    if directory.exists():
        raise ConfigurationError(
            f"{model} is a file: --model needs the directory with config.json and *.safetensors, "
            "or a *.gguf file"
        )
    if model in PULLABLE:
        return _pulled(model)
    if model.startswith(("/", "./", "../", "~")) or model.count("/") > 1:
        raise ConfigurationError(f"model directory {model} does not exist: check --model")
    # Only now: the hub's client is slow to import.
    from vmserve.models.hub_download import cached, downloaded  # noqa: PLC0415

    found = cached(model)
    if found is None:
        if not download:
            return None
        found = downloaded(model)
    _check_readable(found)
    return found


def _pulled(name: str) -> Path:
    path = find_pulled(PULLABLE[name])
    if path is None:
        size = format_size(PULLABLE[name].num_bytes)
        raise ConfigurationError(
            f"model {name} is not here yet: fetch it with `vmserve pull {name}` ({size})"
        )
    _check_readable(path)
    return path


def _cached_gguf(model: str) -> Path:
    repo_id, _, file = model.rpartition(":")
    if not repo_id:
        raise ConfigurationError(f"model file {model} does not exist: check --model")
    # Only now: the hub's client is slow to import.
    from vmserve.models.hub_download import cached_file  # noqa: PLC0415

    path = cached_file(repo_id, file)
    if path is None:
        raise ConfigurationError(
            f"{file} of {repo_id} is not in the local Hugging Face cache: fetch it with "
            f"`hf download {repo_id} {file}`"
        )
    _check_readable(path)
    return path


def _gguf_within(directory: Path) -> Path | None:
    """The GGUF file of a directory that has no config.json; of a split one the first part."""
    if (directory / "config.json").exists():
        return None
    found = sorted(directory.glob("*.gguf"))
    if found and len({re.sub(r"-\d{5}-of-(\d{5})\.gguf$", r"\1", str(each)) for each in found}) > 1:
        raise ConfigurationError(
            f"{directory} has {len(found)} GGUF files: name one of them, as --model {found[0]}"
        )
    return found[0] if found else None


def _check_readable(path: Path) -> None:
    """Raises :class:`~vmserve.errors.ConfigurationError` for what belongs to another user.

    Asked before anything is read: readers take a file that they may not open for a missing or
    a damaged one.
    """
    _check_access(path, os.F_OK)
    if path.is_dir():
        _check_access(path, os.R_OK | os.X_OK)
        for file in sorted({file for pattern in _READ_FILES for file in path.glob(pattern)}):
            _check_access(file, os.R_OK)


def _check_access(path: Path, access: int) -> None:
    """Check access to the path, to what it links to, and to the directories on the way."""
    target = Path(os.path.realpath(path))
    for directory in reversed(target.parents):
        if directory.is_dir():
            _check_one(directory, os.X_OK)
    _check_one(target, access)


def _check_one(path: Path, access: int) -> None:
    # A missing file is reported where it is needed.
    if os.access(path, access, effective_ids=True) or not path.exists():
        return
    found = path.stat()
    wanted = "a+rx" if path.is_dir() else "a+r"
    raise ConfigurationError(
        f"{path} cannot be read: it belongs to {_user(found.st_uid)} with mode "
        f"{found.st_mode & 0o777:04o}, and this process runs as {_user(os.geteuid())}: "
        f"chmod {wanted} it, or run as its owner"
    )


def _user(number: int) -> str:
    try:
        return pwd.getpwuid(number).pw_name
    except KeyError:
        return f"user {number}"
