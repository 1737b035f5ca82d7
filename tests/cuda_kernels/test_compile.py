"""NVRTC compiles the kernels without a GPU: no spills on any architecture; the cache of cubins."""

from __future__ import annotations

import re
import stat
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from benchmarks.gpu import compile_matrix
from vmserve.attention.cuda import compile as compiling
from vmserve.attention.cuda.compile import (
    CompileError,
    CubinCache,
    KernelResources,
    compile_cubin,
    resources_of,
    source_text,
)
from vmserve.attention.cuda.variant import KERNELS, Variant, sizes_for

H100_BYTES = (232_448, 233_472)
BF16 = Variant(torch.bfloat16, 128, True)
SIZES = sizes_for(128, *H100_BYTES)


@pytest.mark.parametrize(
    ("variant", "architecture"),
    [
        (Variant(torch.bfloat16, 128, True), "sm_80"),
        (Variant(torch.bfloat16, 128, False), "sm_90a"),
        (Variant(torch.float16, 256, False), "sm_90a"),
        (Variant(torch.bfloat16, 256, True), "sm_100a"),
        (Variant(torch.float16, 64, False), "sm_100a"),
        (Variant(torch.bfloat16, 128, True, fp8=True), "sm_80"),
        (Variant(torch.float16, 256, False, fp8=True), "sm_90a"),
        (Variant(torch.bfloat16, 64, True, fp8=True), "sm_100a"),
    ],
    ids=lambda value: value.name if isinstance(value, Variant) else value,
)
def test_kernels_compile_without_spills(variant: Variant, architecture: str) -> None:
    """A cross-section; benchmarks/gpu/compile_matrix.py does all of them."""
    rows = compile_matrix.measure(variant, architecture)
    assert {row["resources"]["kernel"] for row in rows} == {kernel.name for kernel in KERNELS}
    assert not [row for row in rows if row["spills"]]
    counts = {row["resources"]["kernel"]: row["instructions"] for row in rows}
    # Nothing lives in local memory, and products are the tensor cores': of a tile's scores, and of
    # its values, one instruction for each 16 x 8 x 16.
    assert all(each["LDL"] == each["STL"] == 0 for each in counts.values())
    dim = variant.head_dim
    # Eight of a tile's 32 positions for a warp of the decode, and a quarter of the columns.
    assert counts["vms_decode"]["HMMA"] == dim // 16 + (32 // 16) * (dim // 4 // 8)
    products = loads = 0
    # Of 32 rows a warp, and of 16 where an item has no more than 64, or heads of 256. Keys and
    # values are loaded once for both blocks of rows; codes are half of that. Queries that are not
    # held in registers are loaded for each tile; with codes such loops are unrolled in part.
    for blocks in (1,) if dim == 256 else (1, 2):
        steps = 4 if variant.fp8 and dim * blocks > 128 else dim // 16
        products += blocks * ((32 // 8) * steps + (32 // 16) * (dim // 8))
        loads += blocks * steps + (2 * steps + 2 * (dim // 16)) // (2 if variant.fp8 else 1)
    assert counts["vms_append"]["HMMA"] == products
    assert counts["vms_append"]["LDSM"] == loads
    # As many blocks as the launch bounds ask for have their registers.
    by_name = {row["resources"]["kernel"]: row["resources"]["registers"] for row in rows}
    sizes = compile_matrix.sizes_of(variant, architecture)
    assert by_name["vms_decode"] * 128 * sizes.decode_blocks <= 65_536
    assert by_name["vms_append"] * 128 * sizes.append_blocks <= 65_536


def test_a_mistake_in_the_source_is_told_with_its_place(monkeypatch: pytest.MonkeyPatch) -> None:
    broken = source_text().replace("ptx::sync_block();", "ptx::sync_blocks();", 1)
    monkeypatch.setattr(compiling, "source_text", lambda: broken)
    with pytest.raises(CompileError, match=r"bf16-128-paged for sm_80(.|\n)*sync_blocks") as raised:
        compile_cubin(BF16, SIZES, "sm_80")
    line = int(re.search(r"(?:append|decode)\.cuh\((\d+)\)", str(raised.value))[1])
    assert line > 1


def test_without_the_bindings_or_nvrtc_the_remedy_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_library(*arguments: object) -> None:
        raise RuntimeError("libnvrtc.so was not found")

    nvrtc = SimpleNamespace(nvrtcCreateProgram=no_library, nvrtcVersion=no_library)
    monkeypatch.setattr(compiling, "_imported", lambda name: nvrtc)
    for ask in (lambda: compile_cubin(BF16, SIZES, "sm_90a"), compiling.compiler_version):
        with pytest.raises(CompileError, match=r"was not found; install vmserve\[cuda\]"):
            ask()


def test_the_log_is_read() -> None:
    log = (
        "ptxas info    : Compiling entry function 'a' for 'sm_80'\n"
        "ptxas info    : Function properties for a\n"
        "ptxas         .     16 bytes stack frame, 8 bytes spill stores, 12 bytes spill loads\n"
        "ptxas info    : Used 255 registers, used 1 barriers\n"
    )
    found = resources_of(log)
    assert found == {"a": KernelResources("a", 255, 16, 8, 12)}
    assert found["a"].spills
    with pytest.raises(CompileError, match="says nothing of b"):
        resources_of("Compiling entry function 'b' for 'sm_80'\n")


@pytest.fixture
def compilations(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Which variants were compiled; the compiler is not run."""
    done: list[str] = []

    def fake(variant: Variant, sizes: object, architecture: str) -> tuple[bytes, str]:
        done.append(f"{variant.name} {architecture}")
        return f"cubin of {variant.name} {architecture} {sizes}".encode(), ""

    monkeypatch.setattr(compiling, "compile_cubin", fake)
    monkeypatch.setattr(compiling, "compiler_version", lambda: "nvrtc 13.0")
    return done


def test_a_cubin_is_compiled_once(tmp_path: Path, compilations: list[str]) -> None:
    directory = tmp_path / "cache" / "cubins"
    first = CubinCache(directory).get(BF16, SIZES, "sm_80")
    assert CubinCache(directory).get(BF16, SIZES, "sm_80") == first
    assert compilations == ["bf16-128-paged sm_80"]
    assert stat.S_IMODE(directory.stat().st_mode) == 0o700
    assert len(list(directory.iterdir())) == 1, "nothing half-written is left"


def test_whatever_makes_another_cubin_is_compiled(
    tmp_path: Path, compilations: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = CubinCache(tmp_path / "cubins")
    cache.get(BF16, SIZES, "sm_80")
    cache.get(BF16, SIZES, "sm_90a")
    cache.get(BF16, SIZES._replace(stages=2), "sm_80")
    cache.get(Variant(torch.float16, 128, True), SIZES, "sm_80")
    monkeypatch.setattr(compiling, "compiler_version", lambda: "nvrtc 13.1")
    cache.get(BF16, SIZES, "sm_80")
    monkeypatch.setattr(compiling, "source_text", lambda: "another")
    cache.get(BF16, SIZES, "sm_80")
    assert len(compilations) == 6


@pytest.mark.parametrize("damage", [b"", b"not a cubin", None])
def test_a_damaged_file_is_compiled_again(
    tmp_path: Path, compilations: list[str], damage: bytes | None
) -> None:
    cache = CubinCache(tmp_path / "cubins")
    good = cache.get(BF16, SIZES, "sm_80")
    (path,) = (tmp_path / "cubins").iterdir()
    content = path.read_bytes()
    path.write_bytes(content[:-1] + b"?" if damage is None else damage)
    assert cache.get(BF16, SIZES, "sm_80") == good
    assert len(compilations) == 2
    assert path.read_bytes() == content


def test_a_directory_that_others_may_write_is_not_used(
    tmp_path: Path, compilations: list[str]
) -> None:
    directory = tmp_path / "cubins"
    directory.mkdir()
    directory.chmod(0o777)
    cache = CubinCache(directory)
    assert cache.get(BF16, SIZES, "sm_80") == cache.get(BF16, SIZES, "sm_80")
    assert len(compilations) == 2
    assert list(directory.iterdir()) == []


def test_a_cache_that_cannot_be_made_is_done_without(
    tmp_path: Path, compilations: list[str]
) -> None:
    (tmp_path / "file").write_text("in the way")
    cache = CubinCache(tmp_path / "file" / "cubins")
    assert cache.get(BF16, SIZES, "sm_80").startswith(b"cubin of")


def test_the_source_has_every_header_once() -> None:
    text = source_text()
    assert text.count("struct KvLayer {") == 1
    assert text.count("extern __shared__") == 1
    assert "#include" not in text.replace("#include VMSERVE_EMULATED_PTX", "")
    assert "pragma once" not in text
