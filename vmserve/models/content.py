"""Digests of a model's files: of the weights, and of what says how they are computed."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

from vmserve.models.gguf.reader import GgufModel, is_gguf, open_gguf
from vmserve.system.files import write_private

__all__ = ["content_digest", "fingerprint"]

_WEIGHTS = frozenset({".safetensors", ".bin", ".gguf"})
_CONFIGS = ("config.json", "quantize_config.json", "quantization_config.json")

_SAMPLES = 64
_SAMPLE_BYTES = 4096


def fingerprint(path: Path, gguf: GgufModel | None = None) -> str:
    """Return a digest of the weights' files: their lengths, and pieces spread over each.

    It distinguishes models, not a model from one that somebody changed on purpose. ``gguf``: the
    model of ``path``, if it is open already.
    """
    files = _files(path) if gguf is None else sorted(file.path for file in gguf.files)
    digest = hashlib.sha256()
    for each in files:
        if each.suffix not in _WEIGHTS:
            continue
        size = each.stat().st_size
        digest.update(size.to_bytes(8, "big"))
        with each.open("rb") as file:
            for index in range(_SAMPLES):
                file.seek(max(0, size - _SAMPLE_BYTES) * index // (_SAMPLES - 1))
                digest.update(file.read(_SAMPLE_BYTES))
    return digest.hexdigest()[:32]


def content_digest(path: Path, memo: Path | None = None) -> str:
    """SHA-256 of a model's weights and configuration, in hex.

    ``memo``: a directory in which the digest of a file is remembered with its size, times and
    inode, so that large files are read once. Raises ``OSError`` for files that cannot be read.
    """
    digest = hashlib.sha256()
    for file in _files(path):
        digest.update(file.name.encode() + b"\0" + _digest_of(file, memo).encode() + b"\n")
    return digest.hexdigest()


def _files(path: Path) -> list[Path]:
    if is_gguf(path):
        return sorted(file.path for file in open_gguf(path).files)
    return sorted(
        each
        for each in path.iterdir()
        if each.is_file() and (each.suffix in _WEIGHTS or each.name in _CONFIGS)
    )


def _digest_of(file: Path, memo: Path | None) -> str:
    found = file.stat()
    state = [found.st_size, found.st_mtime_ns, found.st_ctime_ns, found.st_ino, found.st_dev]
    kept = None
    if memo is not None:
        name = hashlib.sha256(str(file.resolve()).encode()).hexdigest()[:24]
        kept = memo / f"weights-{name}.json"
        try:
            known = json.loads(kept.read_text(encoding="utf-8"))
            if known["state"] == state:
                return str(known["sha256"])
        except (OSError, ValueError, KeyError, TypeError):
            pass
    with file.open("rb") as stream:
        digest = hashlib.file_digest(stream, "sha256").hexdigest()
    if kept is not None:
        try:
            kept.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            write_private(kept, json.dumps({"state": state, "sha256": digest}).encode())
        except OSError:
            pass  # it is computed again
    return digest
