"""Read GGUF files: header, metadata and tensor table, memory-mapped.

Numbers are little-endian. A file has a magic word, a version, the number of tensors and of metadata
entries; the entries; the tensor table; and, aligned, the tensors' data (versions 2 and 3 of the
format). Nothing in a file is believed: every length, count and offset is checked against the
file's size before it is used.
"""

from __future__ import annotations

import math
import mmap
import re
import stat
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import IO, Any, TypeVar, cast

import numpy as np
from numpy.typing import NDArray

from vmserve.errors import ConfigurationError, UnsupportedError
from vmserve.models.file_rows import FileRows, keep_open
from vmserve.models.gguf.block_types import BLOCK_TYPES, BlockType, type_name

__all__ = ["GgufFile", "GgufModel", "GgufTensor", "is_gguf", "open_gguf", "shown"]

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_DEFAULT_ALIGNMENT = 32
#: Limits far above what models have; a count in a damaged file is often huge.
_MOST_ENTRIES = 1 << 16
_MOST_TENSORS = 1 << 18
_MOST_ELEMENTS = 1 << 24
_MOST_KEY_BYTES = 1 << 16
_MOST_TEXT_BYTES = 1 << 24
_MOST_DIMENSIONS = 4
_MOST_PARTS = 99_999
_MOST_ALIGNMENT = 1 << 24
_SHOWN_CHARS = 80

_U32, _U64 = struct.Struct("<I"), struct.Struct("<Q")
_BOOL, _STRING, _ARRAY = 7, 8, 9
_SCALARS = {
    0: struct.Struct("<B"), 1: struct.Struct("<b"), 2: struct.Struct("<H"), 3: struct.Struct("<h"),
    4: struct.Struct("<I"), 5: struct.Struct("<i"), 6: struct.Struct("<f"),
    _BOOL: struct.Struct("<B"), 10: struct.Struct("<Q"), 11: struct.Struct("<q"),
    12: struct.Struct("<d"),
}  # fmt: skip
_PART_NAME = re.compile(r"(?P<stem>.*)-(?P<part>\d{5})-of-(?P<parts>\d{5})\.gguf", re.DOTALL)

_T = TypeVar("_T")


@dataclass(frozen=True)
class _Strings:
    """An array of strings that has been checked, and is decoded when it is asked for."""

    start: int
    count: int


@dataclass(frozen=True)
class GgufTensor:
    """A tensor's place in its file, in bytes from the file's start.

    ``shape``: outermost dimension first, as numpy has it; the last is a whole number of blocks.
    """

    name: str
    type: BlockType
    shape: tuple[int, ...]
    start: int

    @property
    def num_elements(self) -> int:
        return math.prod(self.shape)

    @property
    def num_bytes(self) -> int:
        return self.num_elements // self.type.num_elements * self.type.num_bytes


def is_gguf(path: Path) -> bool:
    """Whether the path is named as a GGUF file; nothing is opened."""
    return path.suffix == ".gguf" and not path.is_dir()


class GgufFile:
    """Maps one file; the mapping lives as long as this object or an array over it.

    The file must not be changed while it is mapped (replacing it by renaming is fine).

    Raises :class:`~vmserve.errors.ConfigurationError` for a file that is damaged,
    :class:`~vmserve.errors.UnsupportedError` for versions and types that are not offered.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        with _opened(path) as opened:
            self._descriptor = keep_open(opened, self)
            self._map = mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ)
        cursor = _Cursor(path, self._map)
        if cursor.bytes(len(_MAGIC), "the header") != _MAGIC:
            raise ConfigurationError(f"{path.name} is not a GGUF file: it does not begin with GGUF")
        version = cursor.number(_U32, "the version")
        if version not in _VERSIONS:
            raise UnsupportedError(
                f"{path.name} has version {version} of GGUF; supported: 2 and 3, little-endian"
            )
        num_tensors = cursor.count(_MOST_TENSORS, "tensors")
        num_entries = cursor.count(_MOST_ENTRIES, "metadata entries")
        self._metadata: dict[str, Any] = {}
        for _ in range(num_entries):
            key = cursor.text(_MOST_KEY_BYTES, "the name of a metadata entry")
            if key in self._metadata:
                raise cursor.damaged(f"metadata {shown(key)} is there twice")
            self._metadata[key] = cursor.entry(key)
        entries = _tensor_table(cursor, num_tensors)
        alignment = self._alignment(cursor)
        data_start = -(-cursor.at // alignment) * alignment
        self.tensors = {
            name: _placed(cursor, name, entry, data_start, alignment)
            for name, entry in entries.items()
        }
        _refuse_overlaps(cursor, self.tensors)
        self.drop_metadata_pages()

    def _alignment(self, cursor: _Cursor) -> int:
        alignment = self.integer("general.alignment", _DEFAULT_ALIGNMENT)
        if not 1 <= alignment <= _MOST_ALIGNMENT or alignment & (alignment - 1):
            raise cursor.damaged(f"general.alignment is {alignment:,}, not a power of two")
        return alignment

    def raw(self, tensor: GgufTensor) -> NDArray[np.uint8]:
        """Return a tensor's bytes over the file's pages, ``[rows, bytes of a row]``, read-only."""
        rows = tensor.num_elements // tensor.shape[-1]
        flat = np.frombuffer(self._map, np.uint8, count=tensor.num_bytes, offset=tensor.start)
        return flat.reshape(rows, -1)

    def rows(self, tensor: GgufTensor) -> FileRows:
        """A matrix whose rows are read one by one, and never mapped."""
        row_bytes = tensor.num_bytes // tensor.shape[0]
        return FileRows(self._descriptor, tensor.start, row_bytes)

    def drop_metadata_pages(self) -> None:
        """Take the header out of memory, and all else that is mapped: a vocabulary is megabytes,
        read again by whoever asks for it."""
        self._map.madvise(mmap.MADV_DONTNEED)

    def drop_pages(self, tensor: GgufTensor) -> None:
        """Take a tensor's pages out of memory; a later access reads them again."""
        first = tensor.start // mmap.PAGESIZE * mmap.PAGESIZE
        self._map.madvise(mmap.MADV_DONTNEED, first, tensor.start + tensor.num_bytes - first)

    # -- metadata -----------------------------------------------------------------------

    def __contains__(self, key: str) -> bool:
        return key in self._metadata

    @property
    def metadata(self) -> Mapping[str, Any]:
        """Scalars and strings as they are; numeric arrays as numpy's; for strings see strings()."""
        return self._metadata

    def integer(self, key: str, default: int | None = None) -> int:
        """Raises :class:`~vmserve.errors.ConfigurationError`, as the others do, if ``key`` is
        missing without a default, or another kind of value."""
        return self._scalar(key, "an integer", (int,), default)

    def number(self, key: str, default: float | None = None) -> float:
        value = float(self._scalar(key, "a number", (int, float), default))
        if not math.isfinite(value):
            raise ConfigurationError(f"{self.path.name}: metadata {key} is {value}")
        return value

    def string(self, key: str, default: str | None = None) -> str:
        return self._scalar(key, "a string", (str,), default)

    def flag(self, key: str, default: bool | None = None) -> bool:
        return self._scalar(key, "true or false", (bool,), default)

    def numbers(self, key: str) -> NDArray[Any]:
        return cast("NDArray[Any]", self._scalar(key, "a list of numbers", (np.ndarray,), None))

    def count(self, key: str) -> int:
        """The length of a list of strings; 0 if there is none."""
        found = self._metadata.get(key)
        return found.count if isinstance(found, _Strings) else 0

    def strings(self, key: str) -> list[str]:
        found: _Strings = self._scalar(key, "a list of strings", (_Strings,), None)
        data, length, at = self._map, _U64.unpack_from, found.start
        strings = []
        # Lengths were checked when the file was opened.
        for index in range(found.count):
            first = at + _U64.size
            at = first + length(data, at)[0]
            try:
                strings.append(data[first:at].decode())
            except UnicodeDecodeError as error:
                raise ConfigurationError(
                    f"{self.path.name}: string {index:,} of metadata {key} is not UTF-8 (byte "
                    f"{error.start}): fetch the model again"
                ) from None
        return strings

    def _scalar(self, key: str, kind: str, types: tuple[type, ...], default: _T | None) -> _T:
        value = self._metadata.get(key, default)
        if value is None:
            raise ConfigurationError(f"{self.path.name}: metadata {key} is missing")
        if type(value) not in types and key in self._metadata:
            raise ConfigurationError(
                f"{self.path.name}: metadata {key} is {_described(value)}, not {kind}"
            )
        return cast("_T", value)


# -- split files --------------------------------------------------------------------------


@dataclass(frozen=True)
class GgufModel:
    """One file, or all parts of a split one. Metadata are those of the first."""

    files: tuple[GgufFile, ...]
    tensors: Mapping[str, tuple[GgufFile, GgufTensor]]
    #: Name of such files in messages, in the plural.
    kind: str = "GGUF files"

    @property
    def path(self) -> Path:
        return self.files[0].path

    @property
    def metadata(self) -> GgufFile:
        return self.files[0]

    def raw(self, name: str) -> NDArray[np.uint8]:
        """See :meth:`GgufFile.raw`."""
        file, tensor = self.tensors[name]
        return file.raw(tensor)


def open_gguf(path: Path) -> GgufModel:
    """Open a GGUF file; of a split one (``-00001-of-0000N.gguf``) any part, and so all of them.

    Raises as :class:`GgufFile` does, and for parts that are missing or do not belong together.
    """
    given = GgufFile(path)
    num_parts = given.integer("split.count", 1)
    files = [given] if num_parts <= 1 else _parts(given, num_parts)
    tensors: dict[str, tuple[GgufFile, GgufTensor]] = {}
    for file in files:
        for name, tensor in file.tensors.items():
            if name in tensors:
                raise ConfigurationError(
                    f"{file.path.name}: tensor {shown(name)} is also in "
                    f"{tensors[name][0].path.name}: fetch the model again"
                )
            tensors[name] = file, tensor
    expected = files[0].integer("split.tensors.count", len(tensors))
    if num_parts > 1 and expected != len(tensors):
        raise ConfigurationError(
            f"{files[0].path.name}: split.tensors.count is {expected:,}, but the {num_parts} parts "
            f"have {len(tensors):,} tensors: fetch the model again"
        )
    return GgufModel(tuple(files), tensors)


def _parts(given: GgufFile, num_parts: int) -> list[GgufFile]:
    path = given.path
    match = _PART_NAME.fullmatch(path.name)
    if num_parts > _MOST_PARTS or match is None or int(match["parts"]) != num_parts:
        raise ConfigurationError(
            f"{path.name} is one of {num_parts:,} parts (split.count), but its name does not end "
            f"in -00001-of-{num_parts:05d}.gguf: give the parts their names back"
        )
    files = []
    for part in range(num_parts):
        name = f"{match['stem']}-{part + 1:05d}-of-{num_parts:05d}.gguf"
        file = given if name == path.name else GgufFile(path.with_name(name))
        said = file.integer("split.no"), file.integer("split.count")
        if said != (part, num_parts):
            raise ConfigurationError(
                f"{name} says that it is part {said[0] + 1:,} of {said[1]:,}: the parts do not "
                "belong together, fetch the model again"
            )
        files.append(file)
    return files


# -- parsing ------------------------------------------------------------------------------


def shown(name: str) -> str:
    """Quote a name of a file that may be hostile, in one short line."""
    return repr(name if len(name) <= _SHOWN_CHARS else name[:_SHOWN_CHARS] + "…")


def _described(value: object) -> str:
    if isinstance(value, np.ndarray | _Strings):
        return "a list"
    return shown(value) if isinstance(value, str) else repr(value)


def _opened(path: Path) -> IO[bytes]:
    try:
        found = path.stat()
        # Asked before it is opened: a pipe would block.
        if stat.S_ISREG(found.st_mode) and found.st_size:
            return path.open("rb")
    except OSError as error:
        raise ConfigurationError(f"{path.name} cannot be read: {error.strerror}") from error
    what = "is empty" if stat.S_ISREG(found.st_mode) else "is not a file"
    raise ConfigurationError(f"{path.name} {what}: --model needs a GGUF file")


class _Cursor:
    """A place in the file that moves on by what is read, and never past the file's end."""

    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self.path = path
        self.at = 0
        self.size = len(data)
        self._data = data

    def damaged(self, reason: str) -> ConfigurationError:
        return ConfigurationError(
            f"{self.path.name} ({self.size:,} bytes) is truncated or damaged ({reason}): "
            "fetch the model again"
        )

    def skip(self, num_bytes: int, what: str) -> int:
        """Move on by ``num_bytes``; return where they begin."""
        start = self.at
        if num_bytes > self.size - start:
            raise self.damaged(
                f"{what} has {num_bytes:,} bytes from byte {start:,}, where "
                f"{self.size - start:,} are left"
            )
        self.at = start + num_bytes
        return start

    def bytes(self, num_bytes: int, what: str) -> bytes:
        start = self.skip(num_bytes, what)
        return self._data[start : start + num_bytes]

    def number(self, kind: struct.Struct, what: str) -> Any:
        return kind.unpack_from(self._data, self.skip(kind.size, what))[0]

    def count(self, most: int, what: str) -> int:
        number: int = self.number(_U64, f"the number of {what}")
        if number > most:
            raise self.damaged(f"it has {number:,} {what}; {most:,} is the limit")
        return number

    def text(self, most: int, what: str) -> str:
        num_bytes = self.number(_U64, f"the length of {what}")
        if num_bytes > most:
            raise self.damaged(f"{what} has {num_bytes:,} bytes; {most:,} is the limit")
        data = self.bytes(num_bytes, what)
        try:
            return data.decode()
        except UnicodeDecodeError as error:
            raise self.damaged(f"{what} is not UTF-8 (byte {error.start})") from None

    def entry(self, key: str) -> Any:
        what = f"metadata {shown(key)}"
        kind = self.number(_U32, f"the type of {what}")
        if kind == _STRING:
            return self.text(_MOST_TEXT_BYTES, what)
        if kind == _ARRAY:
            return self._array(what)
        value = self.number(self._scalar(kind, what), what)
        return bool(value) if kind == _BOOL else value

    def _scalar(self, kind: int, what: str) -> struct.Struct:
        if kind not in _SCALARS:
            raise self.damaged(f"{what} has type {kind}, which GGUF does not have")
        return _SCALARS[kind]

    def _array(self, what: str) -> NDArray[Any] | _Strings:
        kind = self.number(_U32, f"the element type of {what}")
        if kind == _ARRAY:
            raise UnsupportedError(f"{self.path.name}: {what} is a list of lists: not supported")
        count = self.count(_MOST_ELEMENTS, f"elements of {what}")
        if kind == _STRING:
            return self._skipped_strings(count, what)
        scalar = self._scalar(kind, what)
        start = self.skip(count * scalar.size, what)
        return np.frombuffer(self._data, np.dtype(scalar.format), count=count, offset=start)

    def _skipped_strings(self, count: int, what: str) -> _Strings:
        start = self.at
        if count > (self.size - start) // _U64.size:
            self.skip(count * _U64.size, what)  # raises
        # By itself, not by text(): a vocabulary has up to a million strings.
        at, size, data, length = start, self.size, self._data, _U64.unpack_from
        for index in range(count):
            if at + _U64.size > size or (end := at + _U64.size + length(data, at)[0]) > size:
                raise self.damaged(f"string {index:,} of {what} ends behind the file's end")
            at = end
        self.at = at
        return _Strings(start, count)


@dataclass(frozen=True)
class _Entry:
    """A row of the tensor table. ``offset``: from the start of the data."""

    type: BlockType
    shape: tuple[int, ...]
    offset: int


def _tensor_table(cursor: _Cursor, num_tensors: int) -> dict[str, _Entry]:
    entries: dict[str, _Entry] = {}
    for index in range(num_tensors):
        name = cursor.text(_MOST_KEY_BYTES, f"the name of tensor {index}")
        if name in entries:
            raise cursor.damaged(f"tensor {shown(name)} is there twice")
        entries[name] = _entry(cursor, name)
    return entries


def _entry(cursor: _Cursor, name: str) -> _Entry:
    what = f"tensor {shown(name)}"
    num_dimensions = cursor.number(_U32, f"the number of dimensions of {what}")
    if not 1 <= num_dimensions <= _MOST_DIMENSIONS:
        raise cursor.damaged(
            f"{what} has {num_dimensions:,} dimensions, not 1 to {_MOST_DIMENSIONS}"
        )
    dimensions = [cursor.number(_U64, f"the shape of {what}") for _ in range(num_dimensions)]
    number = cursor.number(_U32, f"the type of {what}")
    offset = cursor.number(_U64, f"the offset of {what}")
    block = BLOCK_TYPES.get(number)
    if block is None:
        raise UnsupportedError(
            f"{cursor.path.name}: {what} has type {type_name(number)}; supported: "
            f"{', '.join(each.name for each in BLOCK_TYPES.values())}"
        )
    if 0 in dimensions:
        raise cursor.damaged(f"{what} has shape {dimensions[::-1]}, without any element")
    if dimensions[0] % block.num_elements:
        raise cursor.damaged(
            f"{what} has rows of {dimensions[0]:,} elements, not a multiple of the "
            f"{block.num_elements} of {block.name}"
        )
    return _Entry(block, tuple(reversed(dimensions)), offset)


def _placed(
    cursor: _Cursor, name: str, entry: _Entry, data_start: int, alignment: int
) -> GgufTensor:
    tensor = GgufTensor(name, entry.type, entry.shape, data_start + entry.offset)
    if entry.offset % alignment:
        raise cursor.damaged(
            f"tensor {shown(name)} is at offset {entry.offset:,}, not a multiple of the "
            f"alignment {alignment}"
        )
    if tensor.start + tensor.num_bytes > cursor.size:
        raise cursor.damaged(
            f"tensor {shown(name)} has {tensor.num_bytes:,} bytes from byte {tensor.start:,}, "
            "behind the file's end"
        )
    return tensor


def _refuse_overlaps(cursor: _Cursor, tensors: Mapping[str, GgufTensor]) -> None:
    in_order = sorted(tensors.values(), key=lambda tensor: tensor.start)
    for first, second in pairwise(in_order):
        if first.start + first.num_bytes > second.start:
            raise cursor.damaged(
                f"tensor {shown(first.name)} ends at byte {first.start + first.num_bytes:,}, but "
                f"tensor {shown(second.name)} begins at byte {second.start:,}"
            )
