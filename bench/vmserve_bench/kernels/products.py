"""Products of linear layers, by the form of their weights: one row, and a prompt's rows."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from vmserve import _core
from vmserve.attention.cpu import ISA_VARIABLE
from vmserve.numbers.dtypes import DType
from vmserve.numbers.host_arrays import array_tuple, rounded
from vmserve.system.threads import num_threads

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

__all__ = ["BASE", "FORMS", "Form", "Products"]


class Form(NamedTuple):
    """How weights are stored, and what rows are rounded to (``--quantization``)."""

    name: str
    bits: int  # 4 or 8: grouped integers; 0: floats
    quantization: str = "none"
    minima: bool = False
    steps: bool = False  # scales are int8 multiples of a step of eight groups


#: Forms of matrices; grouped ones are as Q4_0, Q4_1, Q4_K and Q8_0 of GGUF.
FORMS = (
    Form("bfloat16", 0),
    Form("int8", 0, "int8"),
    Form("int8-dynamic", 0, "int8-dynamic"),
    Form("q4_0", 4),
    Form("q4_0 dynamic", 4, "int8-dynamic"),
    Form("q4_1", 4, minima=True),
    Form("q4_1 dynamic", 4, "int8-dynamic", minima=True),
    Form("q4_k", 4, minima=True, steps=True),
    Form("q4_k dynamic", 4, "int8-dynamic", minima=True, steps=True),
    Form("q8_0", 8),
    Form("q8_0 dynamic", 8, "int8-dynamic"),
)


#: Form with whose prompts those of other forms are compared.
BASE = FORMS[1]


@dataclass(frozen=True)
class Products:
    """As many layers ``[size, size]`` as it takes for ``least_bytes`` of packed weights, and the
    calls that are timed: a function of one row computes all of them, so that none finds its weights
    in a cache."""

    layers: tuple[_core.CpuLinear, ...]
    size: int
    isa: str

    @staticmethod
    def pack(form: Form, size: int, least_bytes: int, seed: int) -> Products:
        generator = np.random.default_rng(seed)
        floats = rounded(generator.standard_normal((size, size), np.float32), DType.BFLOAT16)
        weights: Any = array_tuple(floats, DType.BFLOAT16)
        if form.bits:
            weights = _grouped(form, size, generator)
        threads, isa = num_threads(), os.environ.get(ISA_VARIABLE, "")

        def layer() -> _core.CpuLinear:
            return _core.CpuLinear(
                weights,
                quantization=form.quantization,
                bf16_rows=True,
                num_threads=threads,
                isa=isa,
            )

        first = layer()
        count = math.ceil(least_bytes / first.weight_bytes)
        return Products((first, *(layer() for _ in range(count - 1))), size, isa)

    @property
    def num_bytes(self) -> int:
        return sum(layer.weight_bytes for layer in self.layers)

    def one_row(self) -> Callable[[], object]:
        """One row by every layer."""
        row = np.ones((1, self.size), np.float32)

        def step() -> None:
            for layer in self.layers:
                layer.multiply(row)

        return step

    def prompt(self, num_rows: int, seed: int) -> Callable[[], object]:
        """Many rows by one layer."""
        rows = np.random.default_rng(seed).standard_normal((num_rows, self.size), np.float32)
        return lambda: self.layers[0].multiply(rows)

    def read(self) -> Callable[[], object]:
        """Read as many bytes once, with as many threads: the machine's bandwidth."""
        memory = np.ones(self.num_bytes, np.uint8)
        attention = _core.CpuAttention(num_threads(), self.isa)
        return lambda: attention.fold(memory.ctypes.data, memory.nbytes)


def _grouped(form: Form, size: int, generator: np.random.Generator) -> _core.GroupedWeights:
    codes = generator.integers(0, 1 << form.bits, (size, size), np.uint8)
    scales: NDArray[np.float32] = np.full((size, size // 32), 0.5, np.float32)
    steps = None
    if form.steps:
        factors = generator.integers(1, 64, scales.shape).astype(np.float32)
        scales = factors * np.float32(1 / 512)
        steps = np.full((size, size // 256), 1 / 512, np.float32)
    return _core.GroupedWeights(
        codes=codes,
        bits=form.bits,
        group=32,
        scales=scales,
        minima=-scales if form.minima else None,
        scale_steps=steps,
        minimum_steps=-steps if form.minima and steps is not None else None,
    )
