"""What a server on another machine needs of a model: its tokenizer's files."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from vmserve.errors import ConfigurationError
from vmserve.models.gguf.reader import is_gguf, open_gguf

__all__ = ["MOST_TOKENIZER_BYTES", "SentFile", "digest_of", "tokenizer_files", "write_files"]

#: Most bytes of all files of a tokenizer together.
MOST_TOKENIZER_BYTES = 64 << 20
_SUFFIXES = frozenset({".json", ".jinja", ".model", ".txt"})
_MOST_FILES = 64


class SentFile(NamedTuple):
    """A file's beginning (for most the whole), and how long the file is."""

    name: str
    size: int
    content: bytes


def tokenizer_files(path: Path) -> list[SentFile]:
    """Read the files of a tokenizer: of a directory, or the head of a GGUF file.

    Raises :class:`~vmserve.errors.ConfigurationError` if they are too long to be sent.
    """
    if is_gguf(path):
        model = open_gguf(path)
        if len(model.files) > 1:
            raise ConfigurationError(
                f"{path} is a part of a split GGUF file, whose tokenizer cannot be sent: give "
                "--tokenizer with a directory"
            )
        size = path.stat().st_size
        head = min((each.start for each in model.metadata.tensors.values()), default=size)
        wanted = [(path, head)]
    else:
        found = sorted(each for each in path.iterdir() if each.suffix in _SUFFIXES)
        wanted = [
            (each, each.stat().st_size)
            for each in found
            if each.is_file() and not each.name.endswith(".index.json")
        ]
    if (total := sum(length for _, length in wanted)) > MOST_TOKENIZER_BYTES:
        raise ConfigurationError(
            f"{path} has {total:,} bytes of tokenizer, above the limit of "
            f"{MOST_TOKENIZER_BYTES:,}: give --tokenizer with a directory of its own"
        )
    return [SentFile(each.name, each.stat().st_size, _begin(each, n)) for each, n in wanted]


def _begin(path: Path, num_bytes: int) -> bytes:
    with path.open("rb") as file:
        return file.read(num_bytes)


def digest_of(files: Iterable[SentFile]) -> str:
    digest = hashlib.sha256()
    for each in files:
        for part in (each.name.encode(), str(each.size).encode(), each.content):
            digest.update(len(part).to_bytes(8, "big") + part)
    return digest.hexdigest()


def write_files(files: Sequence[SentFile], directory: Path) -> Path:
    """Write what was sent into an empty directory; returns what to load a tokenizer from.

    Raises :class:`~vmserve.errors.ConfigurationError` for names that no tokenizer's files have.
    """
    if not 0 < len(files) <= _MOST_FILES:
        raise ConfigurationError(f"the engine sent {len(files)} files of a tokenizer")
    path = directory
    for name, size, content in files:
        plain = Path(name).name == name and not name.startswith(".") and "\0" not in name
        if not plain or Path(name).suffix not in _SUFFIXES | {".gguf"} or size < len(content):
            raise ConfigurationError(f"the engine sent a tokenizer's file named {name!r}")
        with (directory / name).open("xb") as file:
            file.write(content)
            file.truncate(size)  # weights that were not sent: a hole in the file
        if is_gguf(directory / name):
            path = directory / name
    return path
