"""A directory in which blocks of the KV cache outlive the process (decision 0079).

``DIR/SPACE/DIGEST.kv`` is a block. A *space* has the blocks of one identity: of all that decides
about the bytes of a block besides its tokens. ``SPACE/NUMBER.generation`` says how often its blocks
were forgotten (``POST /reset_prefix_cache``). ``csrc/store/`` reads and writes the files; what is
here opens the directory, and lists, checks and empties it.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import secrets
import stat
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vmserve import _core
from vmserve.errors import ConfigurationError
from vmserve.numbers.sizes import format_size
from vmserve.system.files import write_private

__all__ = [
    "BrokenFile",
    "Space",
    "clear",
    "core_digest",
    "directory_secret",
    "list_spaces",
    "open_stores",
    "verify",
]

logger = logging.getLogger(__name__)

_ABOUT = "about.json"
_SECRET = "secret"
_SUFFIX = ".kv"
#: Bytes of a file besides the block's; a file takes whole sectors of this size.
_FILE_BYTES = 4096


def open_stores(
    directory: str | Path,
    limit_bytes: int,
    identity: Mapping[str, Any],
    block_bytes: Sequence[int],
    blocks_per_page: int,
) -> list[_core.PageStore]:
    """A store for each kind of layers, whose blocks have so many bytes.

    ``identity``: what else than tokens, tenant and salt the content of blocks depends on, as JSON.
    Raises :class:`~vmserve.errors.ConfigurationError` for a directory that cannot be written, and
    for a limit below one page.
    """
    path = Path(directory)
    least = sum(block_bytes) * blocks_per_page + _FILE_BYTES * len(block_bytes)
    if limit_bytes < least:
        raise ConfigurationError(
            f"kv_persist_bytes: {format_size(limit_bytes)} does not hold a page of "
            f"{format_size(least)}: raise --kv-persist-bytes"
        )
    names = []
    for kind in range(len(block_bytes)):
        text = json.dumps({**identity, "kind": kind}, sort_keys=True)
        digest = hashlib.sha256(text.encode()).digest()
        names.append((digest.hex()[:24], digest, text))
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        for name, _, text in names:
            _make_space(path / name, text)
        spaces = list_spaces(path)
    except OSError as error:
        raise ConfigurationError(
            f"kv_persist: cannot write to {path} ({error.strerror}): give --kv-persist a directory "
            "that can be written, or leave it out"
        ) from error
    opened = _core.StoreDirectory(str(path), limit_bytes)
    own_names = {name for name, _, _ in names}
    own = [space for space in spaces if space.name in own_names]
    others = [space for space in spaces if space.name not in own_names]
    logger.info(
        "blocks of the KV cache outlive the process in %s, up to %s: %s are there%s",
        path,
        format_size(limit_bytes),
        format_size(sum(space.num_bytes for space in own)),
        f"; {format_size(sum(space.num_bytes for space in others))} there are of other models, "
        "builds, processors or options and are not used"
        if others
        else "",
    )
    return [opened.space(name, digest) for name, digest, _ in names]


def core_digest() -> str:
    """Digest of the compiled core: kernels of another build may add in another order."""
    return hashlib.sha256(Path(_core.__file__).read_bytes()).hexdigest()[:16]


def _make_space(path: Path, text: str) -> None:
    path.mkdir(mode=0o700, exist_ok=True)
    # Written anew each time, which shows that the directory can be written.
    write_private(path / _ABOUT, text.encode())


def directory_secret(directory: str | Path) -> bytes:
    """The secret from which servers that use this directory derive the salts of their tenants.

    The first process that needs it makes it. Raises
    :class:`~vmserve.errors.ConfigurationError` if it can neither be read nor made.
    """
    path = Path(directory) / _SECRET
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        temporary = path.with_name(f".{secrets.token_hex(8)}.secret")
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            file.write(secrets.token_bytes(32))
        try:
            os.link(temporary, path)  # fails if there is one
        except FileExistsError:
            pass
        finally:
            temporary.unlink()
        secret = path.read_bytes()
    except OSError as error:
        raise ConfigurationError(
            f"kv_persist: cannot keep a secret in {path.parent} ({error.strerror}): give "
            "--kv-persist a directory that can be written"
        ) from error
    if len(secret) != 32:
        raise ConfigurationError(
            f"kv_persist: {path} has {len(secret)} bytes, not 32: remove it, and what tenants had "
            "cached is computed again"
        )
    return secret


@dataclass(frozen=True, slots=True)
class Space:
    """Blocks of one identity. ``used``: when the last was written or found, in seconds of Unix."""

    name: str
    identity: Mapping[str, Any]
    num_blocks: int
    num_bytes: int
    used: float


@dataclass(frozen=True, slots=True)
class BrokenFile:
    path: Path
    reason: str


def list_spaces(directory: str | Path) -> list[Space]:
    """The spaces of a directory, the last used first. Raises ``OSError`` if it cannot be read."""
    path = Path(directory)
    spaces = [_space(each) for each in path.iterdir() if _is_space(each)]
    return sorted(spaces, key=lambda space: -space.used)


def _is_space(path: Path) -> bool:
    return not path.name.startswith(".") and path.is_dir() and (path / _ABOUT).exists()


def _space(path: Path) -> Space:
    try:
        identity = json.loads((path / _ABOUT).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        identity = {}
    sizes, times = [], [0.0]
    for file in _files(path):
        try:
            found = file.lstat()
        except FileNotFoundError:  # evicted meanwhile
            continue
        if not stat.S_ISREG(found.st_mode):
            continue
        sizes.append(found.st_size)
        times.append(found.st_mtime)
    return Space(
        path.name,
        identity if isinstance(identity, dict) else {},
        len(sizes),
        sum(sizes),
        max(times),
    )


def _files(space: Path) -> Iterator[Path]:
    return (each for each in space.iterdir() if each.suffix == _SUFFIX)


def verify(directory: str | Path, *, remove: bool = False) -> tuple[int, int, list[BrokenFile]]:
    """Read every block and compare its checksums; returns blocks, bytes, and those that are broken.

    ``remove``: remove the broken ones. An engine does that, too, when it meets one. What has the
    name of a block and is no file counts as broken; a directory stays.
    """
    num_blocks = num_bytes = 0
    broken = []
    for space in Path(directory).iterdir():
        if not _is_space(space):
            continue
        for file in _files(space):
            reason = _core.verify_file(str(file))
            if reason and not (file.exists() or file.is_symlink()):
                continue  # evicted meanwhile
            num_blocks += 1
            num_bytes += file.lstat().st_size if file.is_file() else 0
            if reason:
                broken.append(BrokenFile(file, reason))
                if remove and not file.is_dir():
                    file.unlink(missing_ok=True)
    return num_blocks, num_bytes, broken


def clear(directory: str | Path, space: str | None = None) -> tuple[int, int]:
    """Remove the blocks of a space, or of all; returns their number and bytes.

    Engines that use the directory go on, and compute what they do not find. What a killed engine
    was writing goes, too, if it is older than a minute.
    """
    num_blocks = num_bytes = 0
    for each in Path(directory).iterdir():
        if not _is_space(each) or (space is not None and each.name != space):
            continue
        for file in list(each.iterdir()):
            is_block = file.suffix == _SUFFIX
            try:
                found = file.lstat()
            except FileNotFoundError:  # evicted meanwhile
                continue
            is_old = file.suffix == ".tmp" and found.st_mtime < time.time() - 60
            if not (is_block or is_old) or stat.S_ISDIR(found.st_mode):
                continue
            size = found.st_size
            file.unlink(missing_ok=True)
            num_blocks += int(is_block)
            num_bytes += size if is_block else 0
    return num_blocks, num_bytes
