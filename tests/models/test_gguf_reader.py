"""What the reader of GGUF files takes, what it refuses, and in which words."""

from __future__ import annotations

import os
import struct
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Kind

from tests.models.fuzz_gguf import fuzz
from tests.models.gguf_files import (
    QUANTIZED,
    TYPES,
    add_byte_level,
    add_llama,
    llama_tensors,
    random_blocks,
    write,
)
from vmserve import _core
from vmserve.errors import ConfigurationError, UnsupportedError
from vmserve.models.gguf.block_types import BLOCK_TYPES
from vmserve.models.gguf.dequantize import dequantize
from vmserve.models.gguf.reader import GgufFile, open_gguf
from vmserve.models.gguf.repack import repack

_Entry = tuple[str, tuple[int, ...], int, int]


def _text(text: str | bytes) -> bytes:
    data = text if isinstance(text, bytes) else text.encode()
    return struct.pack("<Q", len(data)) + data


def _file(
    path: Path,
    *,
    magic: bytes = b"GGUF",
    version: int = 3,
    metadata: tuple[bytes, ...] = (),
    tensors: tuple[_Entry, ...] = (),
    num_tensors: int | None = None,
    num_metadata: int | None = None,
    data: int = 256,
) -> Path:
    """A file by hand, with whatever counts. ``tensors``: name, dimensions, type, offset."""
    counts = (len(tensors) if num_tensors is None else num_tensors,
              len(metadata) if num_metadata is None else num_metadata)  # fmt: skip
    head = magic + struct.pack("<IQQ", version, *counts) + b"".join(metadata)
    for name, dimensions, kind, offset in tensors:
        head += _text(name) + struct.pack("<I", len(dimensions))
        head += b"".join(struct.pack("<Q", each) for each in dimensions)
        head += struct.pack("<IQ", kind, offset)
    head += b"\0" * (-len(head) % 32)
    path.write_bytes(head + b"\1" * data)
    return path


def _u32(key: str, value: int) -> bytes:
    return _text(key) + struct.pack("<II", 4, value)


@pytest.mark.parametrize("alignment", [None, 8, 64, 4096])
def test_everything_that_the_package_reads(alignment: int | None, tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    tensors = {f"{name}.weight": (name, random_blocks(name, 3, 512, rng)) for name in TYPES}
    tensors["deep"] = ("F32", rng.standard_normal((2, 3, 4)).astype(np.float32))

    def metadata(writer: gguf.GGUFWriter) -> None:
        add_byte_level(writer)
        if alignment is not None:
            writer.add_custom_alignment(alignment)
        writer.add_bool("a.bool", True)
        writer.add_float64("a.double", 0.1)
        writer.add_int8("a.small", -3)
        writer.add_uint64("a.large", 1 << 63)
        writer.add_array("a.numbers", [1, 2, 3])
        writer.add_string("a.text", "naïve\n日本")

    path = write(tmp_path / "all.gguf", "llama", tensors, metadata)
    ours, theirs = open_gguf(path), gguf.GGUFReader(path)
    assert list(ours.tensors) == [tensor.name for tensor in theirs.tensors]
    for tensor in theirs.tensors:
        file, found = ours.tensors[tensor.name]
        assert found.start == tensor.data_offset
        assert found.shape == tuple(int(each) for each in reversed(tensor.shape))
        assert found.type.name == tensor.tensor_type.name
        assert file.raw(found).tobytes() == tensor.data.tobytes()
    read = ours.metadata
    assert read.flag("a.bool") is True
    assert read.number("a.double") == 0.1
    assert (read.integer("a.small"), read.integer("a.large")) == (-3, 1 << 63)
    assert read.numbers("a.numbers").tolist() == [1, 2, 3]
    assert read.string("a.text") == "naïve\n日本"
    for key in ("tokenizer.ggml.tokens", "tokenizer.ggml.merges"):
        assert read.strings(key) == theirs.fields[key].contents()


def test_metadata_of_another_kind(tmp_path: Path) -> None:
    strings = _text("a") + struct.pack("<IIQ", 9, 8, 2) + _text("good") + _text(b"a\xff")
    file = GgufFile(_file(tmp_path / "x.gguf", metadata=(_u32("n", 7), strings)))
    for read, key, told in [
        (file.string, "n", "metadata n is 7, not a string"),
        (file.strings, "n", "metadata n is 7, not a list of strings"),
        (file.flag, "n", "metadata n is 7, not true or false"),
        (file.integer, "m", "metadata m is missing"),
        (file.strings, "a", "string 1 of metadata a is not UTF-8"),
    ]:
        with pytest.raises(ConfigurationError, match=rf"x\.gguf: {told}"):
            read(key)


_HUGE = 1 << 62


def _string(length: int) -> dict[str, Any]:
    return {"metadata": (_text("a") + struct.pack("<IQ", 8, length),)}


def _list(kind: int, count: int, *first: int) -> dict[str, Any]:
    """Of elements of a kind; ``first``: the length of the first string."""
    numbers = struct.pack("<IIQ", 9, kind, count) + struct.pack(f"<{len(first)}Q", *first)
    return {"metadata": (_text("a") + numbers,)}


def _tensors(*tensors: _Entry) -> dict[str, Any]:
    return {"tensors": tensors}


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"magic": b"GGML"}, "not a GGUF file: it does not begin with GGUF"),
        ({"version": 1}, "has version 1 of GGUF; supported: 2 and 3, little-endian"),
        ({"version": 0x03000000}, "has version 50331648 of GGUF"),
        ({"num_tensors": _HUGE}, "it has 4,611,686,018,427,387,904 tensors; 262,144 is the limit"),
        ({"num_metadata": 65_537}, "it has 65,537 metadata entries; 65,536 is the limit"),
        ({"metadata": (_u32("a", 1), _u32("a", 2))}, "metadata 'a' is there twice"),
        ({"metadata": (_text(b"\xff") + struct.pack("<II", 4, 1),)}, "is not UTF-8"),
        ({"metadata": (_text("a") + struct.pack("<I", 13),)}, "metadata 'a' has type 13"),
        (_string(1 << 23), r"metadata 'a' has 8,388,608 bytes from byte \d+, where \d+ are left"),
        (_string((1 << 64) - 1),
         "metadata 'a' has 18,446,744,073,709,551,615 bytes; 16,777,216 is the limit"),
        (_list(4, _HUGE),
         "4,611,686,018,427,387,904 elements of metadata 'a'; 16,777,216 is the limit"),
        (_list(12, 1 << 20), "metadata 'a' has 8,388,608 bytes"),
        (_list(8, 1 << 20), "metadata 'a' has 8,388,608 bytes"),
        (_list(8, 1, (1 << 64) - 1), "string 0 of metadata 'a' ends behind the file's end"),
        (_list(9, 1), "is a list of lists"),
        ({"metadata": (_u32("general.alignment", 24),)}, "general.alignment is 24, not a power"),
        ({"metadata": (_u32("general.alignment", 0),)}, "general.alignment is 0, not a power"),
        (_tensors(("t", (4,), 0, 0), ("t", (4,), 0, 32)), "tensor 't' is there twice"),
        (_tensors(("t", (8,), 0, 0), ("u", (4,), 0, 0)),
         r"tensor '[tu]' ends at byte \d+, but tensor '[ut]' begins at byte \d+"),
        (_tensors(("t", (64,), 0, 32)), r"tensor 't' has 256 bytes from byte \d+, behind"),
        (_tensors(("t", (4,), 0, (1 << 64) - 32)), "tensor 't' has 16 bytes from byte"),
        (_tensors(("t", (1 << 63, 1 << 63), 0, 0)),
         "tensor 't' has 340,282,366,920,938,463,463,374,607,431,768,211,456 bytes"),
        (_tensors(("t", (4,), 0, 8)), "tensor 't' is at offset 8, not a multiple of the al"),
        (_tensors(("t", (), 0, 0)), "tensor 't' has 0 dimensions, not 1 to 4"),
        (_tensors(("t", (1,) * 5, 0, 0)), "tensor 't' has 5 dimensions, not 1 to 4"),
        (_tensors(("t", (0, 4), 0, 0)), r"tensor 't' has shape \[4, 0\], without any"),
        (_tensors(("t", (48,), 2, 0)),
         "tensor 't' has rows of 48 elements, not a multiple of the 32 of Q4_0"),
        (_tensors(("t", (256,), 4, 0)), "tensor 't' has type number 4; supported: F32, F16"),
        (_tensors(("new\nline" + "x" * 200, (0,), 0, 0)), r"tensor 'new\\nlinex+…' has"),
        # Types that are not read are named as the package names them.
        *((_tensors(("t", (256,), int(kind), 0)), f"tensor 't' has type {kind.name};")
          for kind in Kind if kind.name not in TYPES),
    ],
)  # fmt: skip
def test_hostile_files(tmp_path: Path, changes: dict[str, Any], said: str) -> None:
    path = _file(tmp_path / "x.gguf", **changes)
    with pytest.raises(ConfigurationError, match=said) as raised:
        open_gguf(path)
    assert isinstance(raised.value, UnsupportedError) or "tensor 't' has type" not in said
    assert str(raised.value).startswith("x.gguf")
    assert str(raised.value).isprintable()


def test_truncation_anywhere(tmp_path: Path) -> None:
    tensors = llama_tensors(np.random.default_rng(0))
    whole = write(tmp_path / "x.gguf", "llama", tensors, add_llama).read_bytes()
    path = tmp_path / "cut.gguf"
    header = whole.index(b"blk.1.ffn_down.weight") + 64
    for size in [*range(1, header, 7), len(whole) - 64]:
        path.write_bytes(whole[:size])
        with pytest.raises(ConfigurationError, match=r"truncated or damaged|not a GGUF file"):
            open_gguf(path)


@pytest.mark.parametrize(
    ("name", "told"),
    [("empty", "is empty"), ("none", "cannot be read: No such file"), ("pipe", "is not a file")],
)
def test_what_is_no_file(tmp_path: Path, name: str, told: str) -> None:
    (tmp_path / "empty.gguf").touch()
    os.mkfifo(tmp_path / "pipe.gguf")
    with pytest.raises(ConfigurationError, match=rf"{name}\.gguf {told}"):
        open_gguf(tmp_path / f"{name}.gguf")


def test_arrays_outlive_the_file(tmp_path: Path) -> None:
    path = _file(tmp_path / "x.gguf", tensors=(("t", (4,), 0, 0),))
    file = GgufFile(path)
    raw = file.raw(file.tensors["t"])
    del file
    path.unlink()
    assert raw.tobytes() == b"\1" * 16
    with pytest.raises(ValueError, match="read-only"):
        raw[0] = 0


# -- split files --------------------------------------------------------------------------


@pytest.fixture
def split(tmp_path: Path) -> Path:
    """The first of several parts."""
    tensors = llama_tensors(np.random.default_rng(0))
    write(tmp_path / "m.gguf", "llama", tensors, add_llama, split_max_tensors=8)
    return tmp_path / "m-00001-of-00003.gguf"


def test_split_files_from_any_part(split: Path) -> None:
    expected = llama_tensors(np.random.default_rng(0))
    for part in (1, 2, 3):
        model = open_gguf(split.with_name(f"m-0000{part}-of-00003.gguf"))
        assert model.path == split
        assert model.metadata.string("general.architecture") == "llama"
        assert set(model.tensors) == set(expected)
        for name, (kind, array) in expected.items():
            file, tensor = model.tensors[name]
            assert tensor.type.name == kind
            assert file.raw(tensor).tobytes() == array.tobytes()


def test_parts_that_do_not_fit(split: Path) -> None:
    second, third = (split.with_name(f"m-0000{part}-of-00003.gguf") for part in (2, 3))

    def refused(path: Path, told: str) -> None:
        with pytest.raises(ConfigurationError, match=told):
            open_gguf(path)

    second.write_bytes(third.read_bytes())
    refused(split, "m-00002-of-00003.gguf says that it is part 3 of 3")
    second.unlink()
    refused(split, "m-00002-of-00003.gguf cannot be read: No such file")
    other = split.rename(split.with_name("other.gguf"))
    refused(other, r"other.gguf is one of 3 parts .*-00001-of-00003\.gguf")


# -- any damage ---------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_damaged_files(tmp_path: Path) -> None:
    count = int(os.environ.get("VMSERVE_DAMAGED_FILES", "2000"))
    said = list(fuzz(count, 1, tmp_path))
    refused = [each for each in said if each]
    # Some changes are of no concern, or of names alone.
    assert 0.2 * count < len(refused) < 0.99 * count


def test_some_damaged_files(tmp_path: Path) -> None:
    kinds = {each.partition("(")[2][:12] for each in fuzz(300, 2, tmp_path)}
    assert len(kinds) > 5


# -- blocks of every type against the ``gguf`` package's numbers --------------------------

_BY_NAME = {each.name: each for each in BLOCK_TYPES.values()}


def _blocks(name: str, seed: int) -> Any:
    return random_blocks(name, 37, 1024, np.random.default_rng(seed))


def test_types_are_those_of_the_format() -> None:
    for number, block in BLOCK_TYPES.items():
        assert (block.num_elements, block.num_bytes) == gguf.GGML_QUANT_SIZES[Kind(number)]
        assert Kind(number).name == block.name


@pytest.mark.parametrize("name", TYPES)
def test_float32_is_the_same(name: str) -> None:
    for seed in range(5):
        raw = _blocks(name, seed)
        expected = gguf.quants.dequantize(raw, Kind[name])
        assert expected.dtype == np.float32
        assert expected.shape == (37, 1024)
        np.testing.assert_array_equal(dequantize(_BY_NAME[name], raw), expected)
        rows = np.array([5, 0, 5])  # as embedded tokens are looked up
        np.testing.assert_array_equal(dequantize(_BY_NAME[name], raw[rows]), expected[rows])


#: What a weight takes once it is packed for the kernels, in bits: no more than in its form.
PACKED = {
    "Q4_0": 4 + 16 / 32,
    "Q4_1": 4 + 32 / 32,
    "Q4_K": 4 + 16 / 32 + 32 / 256,
    "Q5_0": 5 + 16 / 32,
    "Q5_1": 5 + 32 / 32,
    "Q5_K": 5 + 16 / 32 + 32 / 256,
    "Q6_K": 6 + 8 / 16 + 16 / 256,
    "Q8_0": 8 + 16 / 32,
}


@pytest.mark.parametrize("name", QUANTIZED)
def test_products_are_those_of_the_dequantized_weights(name: str) -> None:
    """On the processor's own kernels, against float64."""
    raw = random_blocks(name, 64, 1024, np.random.default_rng(5))
    linear = _core.CpuLinear(repack(_BY_NAME[name], raw).packable())
    assert linear.weight_bytes * 8 / (64 * 1024) == PACKED[name]
    rows = np.random.default_rng(6).standard_normal((5, 1024)).astype(np.float32)
    weights = gguf.quants.dequantize(raw, Kind[name]).astype(np.float64)
    scale = np.abs(rows.astype(np.float64)) @ np.abs(weights).T
    assert (np.abs(linear.multiply(rows) - rows @ weights.T) <= 2e-4 * scale).all()


@pytest.mark.parametrize("name", QUANTIZED)
def test_the_stored_form_is_exact_and_some_rows_of_it_are_a_matrix(name: str) -> None:
    raw = _blocks(name, 4)
    grouped = repack(_BY_NAME[name], raw)
    exact = grouped.expand(np.float64).astype(np.float32)
    np.testing.assert_array_equal(exact, gguf.quants.dequantize(raw, Kind[name]))
    for factors in (grouped.scale, grouped.minimum):
        if factors is not None and factors.fine is not None:
            repeats = factors.fine.shape[1] // factors.coarse.shape[1]
            coarse = np.repeat(factors.coarse.astype(np.float64), repeats, axis=1)
            np.testing.assert_array_equal(factors.expanded(), coarse * factors.fine)
    part = slice(5, 20)
    np.testing.assert_array_equal(grouped.rows(part).expand(), grouped.expand()[part])
