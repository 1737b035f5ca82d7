"""What the reader takes, what it refuses, and in which words."""

from __future__ import annotations

import os
import struct
from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import pytest

from tests.models.fuzz_gguf import fuzz
from tests.models.gguf_files import (
    TYPES,
    add_byte_level,
    add_llama,
    llama_tensors,
    random_blocks,
    write,
)
from vmserve.errors import ConfigurationError, UnsupportedError
from vmserve.models.gguf.dequantize import dequantize
from vmserve.models.gguf.reader import GgufFile, open_gguf

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


def test_everything_that_the_package_reads(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    tensors = {f"{name}.weight": (name, random_blocks(name, 3, 512, rng)) for name in TYPES}
    tensors["deep"] = ("F32", rng.standard_normal((2, 3, 4)).astype(np.float32))

    def metadata(writer: gguf.GGUFWriter) -> None:
        add_byte_level(writer)
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
    metadata_read = ours.metadata
    assert metadata_read.flag("a.bool") is True
    assert metadata_read.number("a.double") == 0.1
    assert metadata_read.integer("a.small") == -3
    assert metadata_read.integer("a.large") == 1 << 63
    assert metadata_read.numbers("a.numbers").tolist() == [1, 2, 3]
    assert metadata_read.string("a.text") == "naïve\n日本"
    for key in ("tokenizer.ggml.tokens", "tokenizer.ggml.merges"):
        assert metadata_read.strings(key) == theirs.fields[key].contents()


@pytest.mark.parametrize("alignment", [8, 64, 4096])
def test_alignment(tmp_path: Path, alignment: int) -> None:
    tensors = llama_tensors(np.random.default_rng(0))

    def metadata(writer: gguf.GGUFWriter) -> None:
        writer.add_custom_alignment(alignment)

    path = write(tmp_path / "a.gguf", "llama", tensors, metadata)
    for tensor in gguf.GGUFReader(path).tensors:
        file, found = open_gguf(path).tensors[tensor.name]
        assert file.raw(found).tobytes() == tensor.data.tobytes()


def test_metadata_of_another_kind(tmp_path: Path) -> None:
    file = GgufFile(_file(tmp_path / "x.gguf", metadata=(_u32("n", 7),)))
    with pytest.raises(ConfigurationError, match=r"x\.gguf: metadata n is 7, not a string"):
        file.string("n")
    with pytest.raises(ConfigurationError, match="metadata n is 7, not a list of strings"):
        file.strings("n")
    with pytest.raises(ConfigurationError, match="metadata n is 7, not true or false"):
        file.flag("n")
    with pytest.raises(ConfigurationError, match="metadata m is missing"):
        file.integer("m")


def test_strings_that_are_not_utf8(tmp_path: Path) -> None:
    strings = _text("good") + _text(b"a\xff")
    path = _file(
        tmp_path / "x.gguf", metadata=(_text("a") + struct.pack("<IIQ", 9, 8, 2) + strings,)
    )
    with pytest.raises(ConfigurationError, match=r"x\.gguf: string 1 of metadata a is not UTF-8"):
        GgufFile(path).strings("a")


_HUGE = 1 << 62


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
        (
            {"metadata": (_text("a") + struct.pack("<IQ", 8, 1 << 23),)},
            r"metadata 'a' has 8,388,608 bytes from byte \d+, where \d+ are left",
        ),
        (
            {"metadata": (_text("a") + struct.pack("<IQ", 8, (1 << 64) - 1),)},
            "metadata 'a' has 18,446,744,073,709,551,615 bytes; 16,777,216 is the limit",
        ),
        (
            {"metadata": (_text("a") + struct.pack("<IIQ", 9, 4, _HUGE),)},
            "4,611,686,018,427,387,904 elements of metadata 'a'; 16,777,216 is the limit",
        ),
        (
            {"metadata": (_text("a") + struct.pack("<IIQ", 9, 12, 1 << 20),)},
            "metadata 'a' has 8,388,608 bytes",
        ),
        (
            {"metadata": (_text("a") + struct.pack("<IIQ", 9, 8, 1 << 20),)},
            "metadata 'a' has 8,388,608 bytes",
        ),
        (
            {"metadata": (_text("a") + struct.pack("<IIQQ", 9, 8, 1, (1 << 64) - 1),)},
            "string 0 of metadata 'a' ends behind the file's end",
        ),
        ({"metadata": (_text("a") + struct.pack("<IIQ", 9, 9, 1),)}, "is a list of lists"),
        ({"metadata": (_u32("general.alignment", 24),)}, "general.alignment is 24, not a power"),
        ({"metadata": (_u32("general.alignment", 0),)}, "general.alignment is 0, not a power"),
        (
            {"tensors": (("t", (4,), 0, 0), ("t", (4,), 0, 32))},
            "tensor 't' is there twice",
        ),
        (
            {"tensors": (("t", (8,), 0, 0), ("u", (4,), 0, 0))},
            r"tensor '[tu]' ends at byte \d+, but tensor '[ut]' begins at byte \d+",
        ),
        ({"tensors": (("t", (64,), 0, 32),)}, r"tensor 't' has 256 bytes from byte \d+, behind"),
        ({"tensors": (("t", (4,), 0, (1 << 64) - 32),)}, "tensor 't' has 16 bytes from byte"),
        (
            {"tensors": (("t", (1 << 63, 1 << 63), 0, 0),)},
            "tensor 't' has 340,282,366,920,938,463,463,374,607,431,768,211,456 bytes",
        ),
        ({"tensors": (("t", (4,), 0, 8),)}, "tensor 't' is at offset 8, not a multiple of the al"),
        ({"tensors": (("t", (), 0, 0),)}, "tensor 't' has 0 dimensions, not 1 to 4"),
        ({"tensors": (("t", (1,) * 5, 0, 0),)}, "tensor 't' has 5 dimensions, not 1 to 4"),
        ({"tensors": (("t", (0, 4), 0, 0),)}, r"tensor 't' has shape \[4, 0\], without any"),
        (
            {"tensors": (("t", (48,), 2, 0),)},
            "tensor 't' has rows of 48 elements, not a multiple of the 32 of Q4_0",
        ),
        ({"tensors": (("t", (256,), 16, 0),)}, "tensor 't' has type IQ2_XXS; supported: F32, F16"),
        ({"tensors": (("t", (256,), 4, 0),)}, "tensor 't' has type number 4; supported"),
        ({"tensors": (("new\nline" + "x" * 200, (0,), 0, 0),)}, r"tensor 'new\\nlinex+…' has"),
    ],
)  # fmt: skip
def test_hostile_files(tmp_path: Path, changes: dict[str, object], said: str) -> None:
    path = _file(tmp_path / "x.gguf", **changes)  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match=said) as raised:
        open_gguf(path)
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


def test_what_is_no_file(tmp_path: Path) -> None:
    (tmp_path / "empty.gguf").touch()
    with pytest.raises(ConfigurationError, match=r"empty\.gguf is empty"):
        open_gguf(tmp_path / "empty.gguf")
    with pytest.raises(ConfigurationError, match=r"none\.gguf cannot be read: No such file"):
        open_gguf(tmp_path / "none.gguf")
    os.mkfifo(tmp_path / "pipe.gguf")
    with pytest.raises(ConfigurationError, match=r"pipe\.gguf is not a file"):
        open_gguf(tmp_path / "pipe.gguf")


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


def _rename(split: Path) -> None:
    split.rename(split.with_name("other.gguf"))


def _miss(split: Path) -> None:
    split.with_name("m-00002-of-00003.gguf").unlink()


def _swap(split: Path) -> None:
    second = split.with_name("m-00002-of-00003.gguf")
    second.write_bytes(split.with_name("m-00003-of-00003.gguf").read_bytes())


@pytest.mark.parametrize(
    ("damage", "opened", "said"),
    [
        (_rename, "other.gguf", r"other.gguf is one of 3 parts .*-00001-of-00003\.gguf"),
        (_miss, "m-00001-of-00003.gguf", "m-00002-of-00003.gguf cannot be read: No such file"),
        (_swap, "m-00001-of-00003.gguf", "m-00002-of-00003.gguf says that it is part 3 of 3"),
    ],
)
def test_parts_that_do_not_fit(
    split: Path, damage: Callable[[Path], None], opened: str, said: str
) -> None:
    damage(split)
    with pytest.raises(ConfigurationError, match=said):
        open_gguf(split.with_name(opened))


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


def test_dequantize_takes_some_rows(tmp_path: Path) -> None:
    """As embedded tokens are looked up."""
    raw = random_blocks("Q6_K", 8, 512, np.random.default_rng(0))
    path = write(tmp_path / "x.gguf", "llama", {"t": ("Q6_K", raw)})
    model = open_gguf(path)
    file, tensor = model.tensors["t"]
    rows = np.array([5, 0, 5])
    expected = gguf.quants.dequantize(raw, gguf.GGMLQuantizationType.Q6_K)[rows]
    np.testing.assert_array_equal(dequantize(tensor.type, file.raw(tensor)[rows]), expected)


def test_types_that_are_not_read_are_named_as_the_package_names_them(tmp_path: Path) -> None:
    for kind in gguf.GGMLQuantizationType:
        if kind.name in TYPES:
            continue
        path = _file(tmp_path / "x.gguf", tensors=(("t", (256,), int(kind), 0),))
        with pytest.raises(UnsupportedError, match=f"tensor 't' has type {kind.name};"):
            open_gguf(path)
