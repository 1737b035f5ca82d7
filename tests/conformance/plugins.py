"""Builds plugins with g++, once per state of their sources."""

from __future__ import annotations

import hashlib
import os
import subprocess
from collections.abc import Sequence
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
EXT = ROOT / "drivers_ext"
_INCLUDE = EXT / "include"
_BUILD = ROOT / "build" / "test-plugins"


@cache
def build(*sources: Path, defines: Sequence[str] = (), pedantic_c: bool = False) -> Path:
    """The shared library of the sources, which are C++17 (or C99), warnings being errors."""
    compiler = ["gcc", "-std=c99", "-pedantic"] if pedantic_c else ["g++", "-std=c++17"]
    command = [
        *compiler,
        *("-O1", "-g", "-shared", "-fPIC", "-fvisibility=hidden", "-Wall", "-Wextra", "-Werror"),
        *(f"-D{define}" for define in defines),
        f"-I{_INCLUDE}",
    ]
    digest = hashlib.sha256(" ".join(command).encode())
    beside = (path for s in sources for path in s.parent.glob("*.[ch]"))
    headers = [*_INCLUDE.glob("*.h"), *beside]
    for path in sorted({*sources, *headers}):
        digest.update(path.read_bytes())
    library = _BUILD / f"{sources[0].stem}-{digest.hexdigest()[:16]}.so"
    if not library.exists():
        _BUILD.mkdir(parents=True, exist_ok=True)
        partial = library.with_suffix(f".{os.getpid()}")
        subprocess.run(
            [*command, *map(str, sources), "-ldl", "-o", str(partial)], check=True, timeout=110
        )
        partial.replace(library)
    return library


_UVM = EXT / "uvm_small_pages"


def uvm_small_pages() -> Path:
    return build(_UVM / "uvm_driver.cpp", _UVM / "uvm_memory.cpp", _UVM / "cuda_device.cpp")


def simulated_uvm() -> Path:
    """A device that stands in for the modified nvidia-uvm module."""
    return build(_UVM / "simulation" / "simulated_device.cpp")


def sample() -> Path:
    return build(EXT / "sample" / "sample_driver.cpp")
