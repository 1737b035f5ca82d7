"""The kernels on the CPU: emulator.cpp compiled with g++, behind the backend's launcher.

:class:`EmulatedLauncher` runs the very source that NVRTC compiles for a GPU, over CPU tensors. A
kernel may touch only memory that was allowed: :meth:`EmulatedLauncher.allow` names it.
"""

from __future__ import annotations

import ctypes
import hashlib
import subprocess
import tempfile
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from tests.attention.views import NO_BLOCK, of_layer, places_of
from vmserve.attention.cuda.compile import source_directory
from vmserve.attention.cuda.plan import Resident
from vmserve.attention.cuda.variant import KERNELS, Sizes, Variant, sizes_for
from vmserve.memory.views import KVView, PagedView

__all__ = ["EmulatedLauncher", "EmulationError", "Emulators", "kv_ranges", "tensor_range"]

HERE = Path(__file__).parent
#: Shared memory of an H100: for a block, and of a multiprocessor.
BLOCK_BYTES, MULTIPROCESSOR_BYTES = 232_448, 233_472
SMALL = Resident(8, 8)
ORDERS = ("forward", "backward", "random")
Range = tuple[int, int, bool]


class EmulationError(AssertionError):
    """A kernel did what a device would punish, or silently get wrong."""


def tensor_range(tensor: torch.Tensor, writable: bool) -> Range:
    """The whole of a tensor that has no holes."""
    return tensor.data_ptr(), tensor.numel() * tensor.element_size(), writable


def kv_ranges(
    view: KVView, places: Iterable[int], lengths: Iterable[int], writable_from: Iterable[int]
) -> list[Range]:
    """The rows of K and V that exist: each sequence's positions below its length, and what of them
    may be written. In layers with pages of their own, what has no block does not exist."""
    if isinstance(view, PagedView) and len(view.tables) > 1:
        parts = [*places], [*lengths], [*writable_from]
        of_kinds = [kv_ranges(of_layer(view, layer), *parts) for layer in range(len(view.keys))]
        return [each for ranges in of_kinds for each in ranges]
    ranges: list[Range] = []
    for place, length, first in zip(places, lengths, writable_from, strict=True):
        position = torch.arange(length)
        if isinstance(view, PagedView):
            blocks = view.block_tables[place].to(torch.int64)
            position = position[blocks[position // view.block_tokens] < NO_BLOCK]
        index, token = places_of(view, place, position)
        for tensor in (*view.keys, *view.values):
            size = tensor.element_size()
            offsets = (index * tensor.stride(0) + token * tensor.stride(1)) * size
            row = tensor.shape[2] * tensor.stride(2) * size
            if tensor.dtype == torch.float8_e4m3fn:
                row += tensor.shape[2] * 4  # scales, and not the padding behind them
            assert tensor.stride(2) == tensor.shape[3], "a row with holes"
            ranges += [
                (tensor.data_ptr() + offset, row, at >= first)
                for at, offset in zip(position.tolist(), offsets.tolist(), strict=True)
            ]
    return ranges


class _Library:
    """One variant, compiled and loaded."""

    def __init__(self, path: Path) -> None:
        library = ctypes.CDLL(str(path))

        def function(name: str, result: Any, *arguments: Any) -> Any:
            found = getattr(library, f"emu_{name}")
            found.argtypes, found.restype = arguments, result
            return found

        self.allow = function("allow", None, ctypes.c_void_p, ctypes.c_int64)
        self.code = function("code", ctypes.c_uint32, ctypes.c_float)
        self.widen_code = function("widen_code", ctypes.c_uint32, ctypes.c_uint32)
        arguments = [ctypes.c_char_p, *[ctypes.c_int64] * 3, ctypes.c_void_p, ctypes.c_int64]
        arguments += [ctypes.c_int, ctypes.c_uint32, ctypes.c_int]
        self.run = function("launch", ctypes.c_char_p, *arguments)


class Emulators:
    """Compiles variants into ``directory``, each once, two at a time; ``prepare`` does not wait.

    ``sources``: of the kernels; None is the project's own.
    """

    def __init__(self, directory: Path, sources: Path | None = None) -> None:
        self._directory = directory
        self._sources = sources or source_directory()
        self._compilers = ThreadPoolExecutor(2)
        self._libraries: dict[Variant, Future[_Library]] = {}

    def prepare(self, variants: Iterable[Variant]) -> None:
        for variant in variants:
            if variant not in self._libraries:
                self._libraries[variant] = self._compilers.submit(self._compile, variant)

    def get(self, variant: Variant) -> _Library:
        self.prepare([variant])
        return self._libraries[variant].result()

    def forget_others(self, variants: Iterable[Variant]) -> None:
        """Deletes what was compiled from other sources."""
        kept = {self._path(variant) for variant in variants}
        for path in self._directory.glob("*.so"):
            if path not in kept:
                path.unlink(missing_ok=True)

    def close(self) -> None:
        """Waits for a compiler that nobody asked for."""
        self._compilers.shutdown(cancel_futures=True)

    def _compile(self, variant: Variant) -> _Library:
        path = self._path(variant)
        if not path.exists():
            with tempfile.TemporaryDirectory(dir=self._directory) as folder:
                compiled = Path(folder, path.name)
                subprocess.run(self._command(variant, compiled), check=True)
                compiled.replace(path)
        return _Library(path)

    def _path(self, variant: Variant) -> Path:
        """By its sources, so that a directory may be kept."""
        hashed = hashlib.sha256()
        for folder in (HERE, self._sources):
            for path in sorted(folder.iterdir()):
                if path.suffix in (".h", ".cpp", ".cu", ".cuh"):
                    hashed.update(path.read_bytes())
        return self._directory / f"{variant.name}-{hashed.hexdigest()[:16]}.so"

    def _command(self, variant: Variant, target: Path) -> list[str]:
        macros = [("VMSERVE_EMULATED_PTX", '"emulated_ptx.h"')]
        macros += variant.macros(emulated_sizes(variant))
        return [
            "g++", "-std=c++17", "-O1", "-ffp-contract=off", "-fPIC", "-shared",
            "-Wall", "-Wextra", "-Werror", "-Wno-unknown-pragmas", f"-I{HERE}",
            f"-I{self._sources}", *(f"-D{name}={value}" for name, value in macros),
            str(HERE / "emulator.cpp"), "-o", str(target),
        ]  # fmt: skip


def emulated_sizes(variant: Variant) -> Sizes:
    return sizes_for(variant.head_dim, BLOCK_BYTES, MULTIPROCESSOR_BYTES, fp8=variant.fp8)


@dataclass
class Launch:
    """One kernel that ran."""

    kernel: str
    blocks: int


class EmulatedLauncher:
    """:class:`vmserve.attention.cuda.launcher.Launcher` over the emulator.

    ``order``: how threads take turns. ``eager_copies``: asynchronous copies are done at once rather
    than as late as may be. Without :meth:`allowing`, any memory may be touched.
    """

    def __init__(
        self,
        emulators: Emulators,
        *,
        resident: Resident = SMALL,
        order: str = "forward",
        seed: int = 0,
        eager_copies: bool = False,
    ) -> None:
        self.emulators = emulators
        self.device = torch.device("cpu")
        self.launches: list[Launch] = []
        #: At most so many blocks of an attention kernel, each of which then has more items.
        self.launch_blocks = 1 << 30
        self._resident = resident
        self._order, self._seed, self._eager = ORDERS.index(order), seed, eager_copies
        self._ranges: NDArray[np.int64] = np.array([[4096, 2**62, 1]], np.int64)

    @contextmanager
    def allowing(self, ranges: Iterable[Range]) -> Any:
        """Only these may be touched inside; plans and buffers of the backend's own are among them
        if they are listed."""
        before, self._ranges = self._ranges, np.array(list(ranges), np.int64).reshape(-1, 3)
        try:
            yield
        finally:
            self._ranges = before

    def resident(self, variant: Variant) -> Resident:
        return self._resident

    def launch(self, variant: Variant, kernel: str, blocks: int, args: ctypes.Structure) -> None:
        library = self.emulators.get(variant)
        library.allow(self._ranges.ctypes.data, len(self._ranges))
        [written] = [each for each in KERNELS if each.name == kernel]
        shared = emulated_sizes(variant).shared_bytes(kernel) or written.shared_bytes
        self.launches.append(Launch(kernel, blocks))
        if kernel in ("vms_decode", "vms_append"):
            blocks = min(blocks, self.launch_blocks)
        structure = ctypes.addressof(args), ctypes.sizeof(args)
        turns = self._order, self._seed, int(self._eager)
        error = library.run(kernel.encode(), blocks, written.threads, shared, *structure, *turns)
        if error is not None:
            raise EmulationError(f"{kernel}: {error.decode()}")
