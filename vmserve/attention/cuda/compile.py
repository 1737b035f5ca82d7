"""Compiles the kernels with NVRTC at first use and keeps the cubins on disk.

A cubin is found again by the SHA-256 of everything that made it: the source with all its headers,
the options, the architecture and the compiler's version. Files are written under another name and
renamed, so that a reader never sees half of one; one that does not match its own checksum is
compiled again.
"""

from __future__ import annotations

import hashlib
import importlib
import os
import re
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from vmserve.attention.cuda.variant import Sizes, Variant
from vmserve.errors import ConfigurationError
from vmserve.system.cache import user_cache

__all__ = [
    "CompileError",
    "CubinCache",
    "KernelResources",
    "compile_cubin",
    "compile_source",
    "resources_of",
    "source_text",
]

_INCLUDE = re.compile(r'\s*#include "([\w./]+)"\s*$')
_MAGIC = b"vmserve cubin 1\n"
_REMEDY = "install vmserve[cuda] (cuda-bindings and nvidia-cuda-nvrtc, 13 or later)"


class CompileError(ConfigurationError):
    """The kernels could not be compiled; the text has the compiler's reasons."""


def source_directory() -> Path:
    """Find the sources: next to this file if vmserve is installed, else in csrc."""
    here = Path(__file__).parent
    installed = here / "kernels"
    return installed if installed.is_dir() else here.parents[2] / "csrc" / "cuda"


@cache
def source_text(directory: Path | None = None) -> str:
    """kernels.cu with its headers in place of their includes, each once."""
    root = directory or source_directory()
    seen: set[str] = set()

    def expanded(name: str) -> str:
        if name in seen:
            return ""
        seen.add(name)
        lines = [f'#line 1 "{name}"']
        for number, line in enumerate((root / name).read_text("utf-8").splitlines(), start=1):
            include = _INCLUDE.match(line)
            if include:
                lines += [expanded(include[1]), f'#line {number + 1} "{name}"']
            else:
                lines.append("" if line == "#pragma once" else line)
        return "\n".join(lines)

    return expanded("kernels.cu") + "\n"


@dataclass(frozen=True)
class Request:
    """The inputs of one compilation."""

    variant: Variant
    sizes: Sizes
    architecture: str
    compiler: str

    def digest(self) -> str:
        parts = (
            source_text(),
            repr(self.variant.macros(self.sizes)),
            self.architecture,
            self.compiler,
        )
        hashed = hashlib.sha256()
        for part in parts:
            data = part.encode()
            hashed.update(len(data).to_bytes(8, "little") + data)
        return hashed.hexdigest()


def compiler_version() -> str:
    """Return NVRTC's version, as ``nvrtc 13.0``; raises :class:`CompileError` without one."""
    nvrtc = _imported("cuda.bindings.nvrtc")
    try:
        status, major, minor = nvrtc.nvrtcVersion()
    except RuntimeError as error:  # the library was not found
        raise CompileError(f"NVRTC: {error}; {_REMEDY}") from error
    if int(status) != 0:
        raise CompileError(f"nvrtcVersion: {status}; {_REMEDY}")
    return f"nvrtc {major}.{minor}"


def compile_cubin(variant: Variant, sizes: Sizes, architecture: str) -> tuple[bytes, str]:
    """Compile; return the cubin and the assembler's log. Takes seconds; needs no GPU.

    Raises :class:`CompileError` with the compiler's log.
    """
    macros = (f"--define-macro={name}={macro}" for name, macro in variant.macros(sizes))
    options = ("--ptxas-options=-v", *macros)
    return compile_source(
        source_text(), f"{variant.name} for {architecture}", architecture, options
    )


def compile_source(
    source: str, what: str, architecture: str, options: Sequence[str] = ()
) -> tuple[bytes, str]:
    """Compile any source; ``what`` names it in errors. Otherwise as :func:`compile_cubin`."""
    nvrtc = _imported("cuda.bindings.nvrtc")

    def value(result: tuple[Any, ...]) -> Any:
        if int(result[0]) != 0:
            raise CompileError(f"{what}: {getattr(result[0], 'name', result[0])}")
        return result[1] if len(result) > 1 else None

    def text(size: Any, get: Any) -> bytes:
        room = bytes(int(value(size(program))))  # which the call fills
        value(get(program, room))
        return room

    try:
        program = value(nvrtc.nvrtcCreateProgram(source.encode(), b"kernels.cu", 0, None, None))
    except RuntimeError as error:  # the library was not found
        raise CompileError(f"NVRTC: {error}; {_REMEDY}") from error
    try:
        given = (f"--gpu-architecture={architecture}", "--std=c++17", *options)
        arguments = [option.encode() for option in given]
        (status,) = nvrtc.nvrtcCompileProgram(program, len(arguments), arguments)
        log = text(nvrtc.nvrtcGetProgramLogSize, nvrtc.nvrtcGetProgramLog)
        said = log.rstrip(b"\0").decode(errors="replace")
        if int(status) != 0:
            raise CompileError(f"{what}: {getattr(status, 'name', status)}\n{said}")
        return text(nvrtc.nvrtcGetCUBINSize, nvrtc.nvrtcGetCUBIN), said
    finally:
        nvrtc.nvrtcDestroyProgram(program)


def _imported(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise CompileError(f"the cuda backend compiles its kernels: {error}; {_REMEDY}") from error


class CubinCache:
    """``directory``: made if need be, for this user alone. Where it cannot be written, or belongs
    to somebody else, nothing is kept and every process compiles."""

    def __init__(self, directory: Path | None = None) -> None:
        self._directory = directory or user_cache("cubins")

    def get(self, variant: Variant, sizes: Sizes, architecture: str) -> bytes:
        """Return the cubin, compiled at first use. Raises :class:`CompileError`."""
        request = Request(variant, sizes, architecture, compiler_version())
        path = self._directory / f"{variant.name}-{architecture}-{request.digest()}.cubin"
        private = self._is_private()
        cubin = _read_checked(path) if private else None
        if cubin is None:
            cubin, _ = compile_cubin(variant, sizes, architecture)
            if private:
                _write_checked(path, cubin)
        return cubin

    def _is_private(self) -> bool:
        """Return whether only this user may write to the directory; else its code is not run."""
        try:
            self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            status = self._directory.stat()
        except OSError:
            return False
        return status.st_uid == os.getuid() and not status.st_mode & 0o022


def _read_checked(path: Path) -> bytes | None:
    try:
        data = path.read_bytes()
    except OSError:
        return None
    header, digest, cubin = data[: len(_MAGIC)], data[len(_MAGIC) :][:32], data[len(_MAGIC) + 32 :]
    if header != _MAGIC or hashlib.sha256(cubin).digest() != digest:
        return None
    return cubin


def _write_checked(path: Path, cubin: bytes) -> None:
    """Write the file atomically; ignore errors."""
    try:
        descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=".writing-")
    except OSError:
        return
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(_MAGIC + hashlib.sha256(cubin).digest() + cubin)
        Path(name).replace(path)
    except OSError:
        Path(name).unlink(missing_ok=True)


@dataclass(frozen=True)
class KernelResources:
    kernel: str
    registers: int
    stack_bytes: int
    spill_store_bytes: int
    spill_load_bytes: int

    @property
    def spills(self) -> bool:
        return bool(self.stack_bytes or self.spill_store_bytes or self.spill_load_bytes)


def resources_of(log: str) -> dict[str, KernelResources]:
    """Read each kernel's resources from the assembler's log."""
    found: dict[str, KernelResources] = {}
    for entry in re.split(r"Compiling entry function '", log)[1:]:
        name = entry.split("'", 1)[0]
        frame = re.search(
            r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", entry
        )
        registers = re.search(r"Used (\d+) registers", entry)
        if frame is None or registers is None:
            raise CompileError(f"the assembler's log says nothing of {name}: {entry[:200]}")
        found[name] = KernelResources(name, int(registers[1]), *map(int, frame.groups()))
    return found
