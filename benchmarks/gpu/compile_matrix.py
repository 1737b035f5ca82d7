"""Compiles every variant of the CUDA kernels for every architecture, without a GPU.

    python benchmarks/gpu/compile_matrix.py                # all: about four minutes
    python benchmarks/gpu/compile_matrix.py --out results/compile.json

Prints registers, shared memory and spills of each kernel; the exit status is 1 if any kernel
spills. The JSON has the tensor cores' instructions, too.
"""

from __future__ import annotations

import argparse
import itertools
import json
import struct
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch

from vmserve.attention.cuda.compile import (
    CompileError,
    compile_cubin,
    compiler_version,
    resources_of,
)
from vmserve.attention.cuda.variant import HEAD_DIMS, Sizes, Variant, sizes_for
from vmserve_bench.lab.report import replace_text

#: Shared memory in bytes: for a block, and of a multiprocessor (CUDA programming guide, technical
#: specifications per compute capability).
ARCHITECTURES = {
    "sm_80": (166_912, 167_936),
    "sm_90a": (232_448, 233_472),
    "sm_100a": (232_448, 233_472),
}
#: The lowest 12 bits of an instruction of 16 bytes, which say what it does (`nvdisasm -hex`).
OPCODES: Mapping[str, int] = {
    "HMMA": 0x23C,  # 16 x 8 x 16 in half precision
    "LDSM": 0x83B,  # fragments from shared memory
    "LDL": 0x983,  # from and to local memory: arrays that are not in registers, spills
    "STL": 0x387,
}
VARIANTS = {
    variant.name: variant
    for variant in (
        Variant(dtype, head_dim, paged, fp8)
        for fp8, dtype, head_dim, paged in itertools.product(
            (False, True), (torch.bfloat16, torch.float16), HEAD_DIMS, (True, False)
        )
    )
}


def sizes_of(variant: Variant, architecture: str) -> Sizes:
    return sizes_for(variant.head_dim, *ARCHITECTURES[architecture], fp8=variant.fp8)


def measure(variant: Variant, architecture: str) -> list[dict[str, Any]]:
    """One row for each kernel; ``instructions``: how many of each of :data:`OPCODES`."""
    sizes = sizes_of(variant, architecture)
    cubin, log = compile_cubin(variant, sizes, architecture)
    return [
        {
            "variant": variant.name,
            "architecture": architecture,
            "resources": asdict(resources),
            "spills": resources.spills,
            "shared_bytes": sizes.shared_bytes(name),
            "cubin_bytes": len(cubin),
            "instructions": instructions(cubin, name),
        }
        for name, resources in resources_of(log).items()
    ]


def instructions(cubin: bytes, kernel: str) -> dict[str, int]:
    """How many of :data:`OPCODES` ``kernel`` has. Raises ``KeyError`` for one that is not there."""
    code = np.frombuffer(_section(cubin, f".text.{kernel}"), dtype="<u4")[::4] & 0xFFF
    return {name: int((code == opcode).sum()) for name, opcode in OPCODES.items()}


def _section(elf: bytes, wanted: str) -> bytes:
    """Find a section of a little-endian 64-bit ELF."""
    (table,) = struct.unpack_from("<Q", elf, 0x28)
    size, number, names = struct.unpack_from("<HHH", elf, 0x3A)
    headers = [struct.unpack_from("<IIQQQQ", elf, table + i * size) for i in range(number)]
    strings = headers[names][4]
    for name, _, _, _, offset, length in headers:
        end = elf.index(b"\0", strings + name)
        if elf[strings + name : end].decode() == wanted:
            return elf[offset : offset + length]
    raise KeyError(wanted)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--variants", nargs="*", choices=list(VARIANTS), default=list(VARIANTS))
    parser.add_argument(
        "--architectures", nargs="*", choices=list(ARCHITECTURES), default=list(ARCHITECTURES)
    )
    parser.add_argument("--out", type=Path, help="where to write the rows as JSON")
    options = parser.parse_args(arguments)
    rows: list[dict[str, Any]] = []
    print(f"{compiler_version()}; registers of a thread, KiB of shared memory of a block")
    try:
        for architecture, name in itertools.product(options.architectures, options.variants):
            found = measure(VARIANTS[name], architecture)
            rows += found
            cells = [
                f"{row['resources']['kernel']} {row['resources']['registers']}"
                + f" {row['shared_bytes'] / 1024:.0f} K" * bool(row["shared_bytes"])
                + " SPILLS" * row["spills"]
                for row in found
            ]
            print(f"{name:18} {architecture:8} {', '.join(cells)}", flush=True)
    except CompileError as error:
        sys.exit(f"compile_matrix.py: {' '.join(str(error).split())}")
    num_spilling = sum(row["spills"] for row in rows)
    verdict = f"{num_spilling} kernels spill" if num_spilling else "no kernel spills"
    print(f"{len(rows)} kernels, {verdict}")
    if options.out is not None:
        report = {"compiler": compiler_version(), "rows": rows}
        replace_text(options.out, json.dumps(report, indent=1) + "\n")
    return 1 if num_spilling else 0


if __name__ == "__main__":
    sys.exit(main())
