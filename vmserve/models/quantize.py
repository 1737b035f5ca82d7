"""Quantize a checkpoint: one of compressed-tensors, format pack-quantized."""

from __future__ import annotations

import json
import os
import shutil
import socket
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vmserve.errors import ConfigurationError, UnsupportedError
from vmserve.models.config import ModelConfig
from vmserve.models.decoder_config import DecoderConfig
from vmserve.models.gguf.reader import is_gguf
from vmserve.models.loader import Progress, find_tensors
from vmserve.models.native import refusal
from vmserve.models.plan import DecoderPlan
from vmserve.models.quantized.layout import KERNEL_GROUP, WORD_BITS
from vmserve.models.rounding import round_weights
from vmserve.models.safetensors_file import SafetensorsFile, StoredTensor
from vmserve.numbers.dtypes import DType
from vmserve.numbers.host_arrays import as_float32
from vmserve.system.files import lock_for_writing, read_json
from vmserve.system.threads import num_threads

__all__ = ["GROUP", "quantize"]

#: Columns that share a scale.
GROUP = KERNEL_GROUP
#: Weights that a thread rounds at a time.
_CHUNK_WEIGHTS = 1 << 20
_NAMES = {DType.FLOAT32: "F32", DType.BFLOAT16: "BF16", DType.FLOAT16: "F16"}
#: Other files of a model.
_COPIED = ("*.json", "*.jinja", "*.model", "*.txt", "LICENSE*", "NOTICE*", "1_Pooling/config.json")
_NOT_COPIED = ("config.json", "*.safetensors.index.json")


@dataclass(frozen=True)
class _Entry:
    """A tensor of the new file; ``offset``: from the first one's start."""

    name: str
    element: str
    itemsize: int
    shape: tuple[int, ...]
    offset: int = 0

    @property
    def num_bytes(self) -> int:
        return self.itemsize * int(np.prod(self.shape, dtype=np.int64))


@dataclass(frozen=True)
class _Matrix:
    """A matrix ``module.weight`` to be rounded."""

    module: str
    file: SafetensorsFile
    stored: StoredTensor
    bits: int

    @property
    def scale_dtype(self) -> DType:
        """The weights' type, which readers give to scales; float16 holds all that we make."""
        dtype = self.stored.dtype
        return DType.FLOAT16 if dtype is DType.FLOAT32 else dtype

    def entries(self) -> list[_Entry]:
        rows, columns = self.stored.shape
        scale = self.scale_dtype
        words = columns * self.bits // WORD_BITS
        return [
            _Entry(f"{self.module}.weight_packed", "I32", 4, (rows, words)),
            _Entry(f"{self.module}.weight_scale", _NAMES[scale], 2, (rows, columns // GROUP)),
            _Entry(f"{self.module}.weight_shape", "I64", 8, (2,)),
        ]


def quantize(
    source: Path, output: Path, bits: int, progress: Progress = lambda *_: None
) -> list[str]:
    """Write the matrices of a model's layers in ``bits`` (4 or 8), all else as it is, to the
    directory ``output``, which appears complete or not at all.

    Returns the modules of the layers that stay plain, since groups do not fit into their inputs.

    Raises :class:`~vmserve.errors.ConfigurationError` for a model that cannot be quantized and an
    output that is in the way, ``OSError`` where the disk is full.
    """
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise ConfigurationError(f"{output} exists and is not empty: give --output a new directory")
    if is_gguf(source):
        raise UnsupportedError(f"{source.name} is a GGUF file: give a safetensors directory")
    config = ModelConfig.from_directory(source)
    raw = read_json(source / "config.json")
    if config.native_only is not None:
        raise ConfigurationError(
            f"{source} is quantized already ({config.native_only.kind}): give its float32, "
            "bfloat16 or float16 original"
        )
    if (reason := refusal(config.network, DType.FLOAT32)) is not None:
        raise UnsupportedError(f"only what the native CPU decoder runs can be quantized: {reason}")
    assert isinstance(config.network, DecoderConfig), "refusal() said so"
    matrices, kept, plain = _sort(source, config.network, bits)
    with _appearing(output) as directory:
        _copy_others(source, directory)
        _write(directory / "model.safetensors", matrices, plain, progress)
        written = {**raw, "quantization_config": _described(bits, ["lm_head", *kept])}
        (directory / "config.json").write_text(json.dumps(written, indent=2) + "\n")
    return kept


def _sort(
    source: Path, network: DecoderConfig, bits: int
) -> tuple[list[_Matrix], list[str], dict[str, tuple[SafetensorsFile, StoredTensor]]]:
    """Matrices to be rounded; modules of layers that are not; all tensors that are not."""
    plain, plan = find_tensors(source, network), DecoderPlan.of(network)
    routers = plan.routers
    matrices, kept = [], []
    for name, shape in (each for layer in plan.layers for each in layer.tensors()):
        if len(shape) == 2:
            module = name.removesuffix(".weight")
            if shape[1] % GROUP or module in routers:
                kept.append(module)
            else:
                matrices.append(_Matrix(module, *plain.pop(name), bits))
    if not matrices:
        raise UnsupportedError(f"{source}: no matrix has inputs in groups of {GROUP}")
    return matrices, kept, plain


def _described(bits: int, ignored: list[str]) -> dict[str, Any]:
    weights = {
        "num_bits": bits,
        "type": "int",
        "symmetric": True,
        "strategy": "group",
        "group_size": GROUP,
        "dynamic": False,
    }
    group = {"targets": ["Linear"], "weights": weights, "format": "pack-quantized"}
    return {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": ignored,
    }


@contextmanager
def _appearing(output: Path) -> Iterator[Path]:
    """Yield a directory next to ``output`` that gets its name at the end, and goes on an error.

    What a killed run has left there is removed first. Raises
    :class:`~vmserve.errors.ConfigurationError` if one that lives writes it.
    """
    # The host is in the name: a lock on a network file system may hold on one host only.
    made = output.with_name(f".{output.name}.{socket.gethostname()}.vmserve-partial")
    made.mkdir(parents=True, exist_ok=True)
    directory = os.open(made, os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        lock_for_writing(directory, made, output)
        try:
            for left in made.iterdir():
                is_directory = left.is_dir() and not left.is_symlink()
                shutil.rmtree(left) if is_directory else left.unlink()
            yield made
            made.rename(output)
        except BaseException as error:
            shutil.rmtree(made, ignore_errors=True)
            if isinstance(error, OSError) and error.filename is None:
                error.filename = str(output)
            raise
    finally:
        os.close(directory)


def _copy_others(source: Path, target: Path) -> None:
    for pattern in _COPIED:
        for path in source.glob(pattern):
            if path.is_file() and not any(path.match(other) for other in _NOT_COPIED):
                place = target / path.relative_to(source)
                place.parent.mkdir(exist_ok=True)
                shutil.copyfile(path, place)


def _write(
    path: Path,
    matrices: Sequence[_Matrix],
    plain: dict[str, tuple[SafetensorsFile, StoredTensor]],
    progress: Progress,
) -> None:
    wanted = [entry for matrix in matrices for entry in matrix.entries()]
    wanted += [
        _Entry(name, _NAMES[stored.dtype], stored.dtype.itemsize, stored.shape)
        for name, (_, stored) in plain.items()
    ]
    with path.open("wb") as file:
        places = _write_header(file.fileno(), wanted)
        total = sum(matrix.stored.num_bytes for matrix in matrices)
        total += sum(stored.num_bytes for _, stored in plain.values())
        done = 0
        with ThreadPoolExecutor(num_threads()) as pool:
            for matrix in matrices:
                for part in pool.map(
                    lambda rows, matrix=matrix: _round_rows(file.fileno(), places, matrix, rows),
                    _chunks(matrix.stored.shape),
                ):
                    done += part * matrix.stored.dtype.itemsize
                    progress("quantizing", done, total)
        for name, (source, stored) in plain.items():
            _put(file.fileno(), places[name], source.view(stored))
            source.drop_pages(stored.start, stored.num_bytes)
            done += stored.num_bytes
            progress("copying", done, total)
        os.fsync(file.fileno())


def _write_header(file: int, entries: Sequence[_Entry]) -> dict[str, int]:
    """Returns where the tensors are in the file: those of large elements first, all aligned."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for entry in sorted(entries, key=lambda entry: -entry.itemsize):
        end = offset + entry.num_bytes
        header[entry.name] = {
            "dtype": entry.element,
            "shape": entry.shape,
            "data_offsets": [offset, end],
        }
        offset = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    _put(file, 0, np.frombuffer(len(text).to_bytes(8, "little") + text, np.uint8))
    first = 8 + len(text)
    os.truncate(file, first + offset)
    del header["__metadata__"]
    return {name: first + entry["data_offsets"][0] for name, entry in header.items()}


def _chunks(shape: tuple[int, ...]) -> list[slice]:
    rows = max(1, _CHUNK_WEIGHTS // shape[1])
    return [slice(first, min(first + rows, shape[0])) for first in range(0, shape[0], rows)]


def _round_rows(file: int, places: dict[str, int], matrix: _Matrix, rows: slice) -> int:
    """Round some rows and write them; returns how many weights they have."""
    stored, columns = matrix.stored, matrix.stored.shape[1]
    weights = as_float32(matrix.file.view(stored)[rows], stored.dtype)
    largest = np.finfo(np.float16).max
    if not np.abs(weights).max(initial=0) <= largest:  # nor if it is no number
        raise ConfigurationError(
            f"{matrix.file.path.name}: tensor {matrix.module}.weight has weights that are not "
            f"finite, or above {largest:,.0f}"
        )
    codes, scales = round_weights(weights, matrix.bits, GROUP, matrix.scale_dtype)
    row_bytes = columns * stored.dtype.itemsize
    matrix.file.drop_pages(stored.start + rows.start * row_bytes, len(weights) * row_bytes)
    packed = codes if matrix.bits == 8 else codes[:, ::2] | codes[:, 1::2] << np.uint8(4)
    for part, array in (("weight_packed", packed), ("weight_scale", scales)):
        place = places[f"{matrix.module}.{part}"]
        _put(file, place + rows.start * array.shape[1] * array.itemsize, array)
    if rows.start == 0:
        _put(file, places[f"{matrix.module}.weight_shape"], np.array(stored.shape, "<i8"))
    return weights.size


def _put(file: int, offset: int, array: NDArray[Any]) -> None:
    data = np.ascontiguousarray(array).reshape(-1).view(np.uint8).data
    while data:
        written = os.pwrite(file, data, offset)
        data, offset = data[written:], offset + written
