"""What is timed: attention over KV memory of one shape, and products of linear layers."""

from __future__ import annotations

import math
import os
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from vmserve import _core
from vmserve.attention.base import LayerAttention, RaggedBatch
from vmserve.attention.cpu import ISA_VARIABLE, CpuBackend
from vmserve.memory.views import ContiguousView, KVView, PagedView
from vmserve.numbers.dtypes import DType
from vmserve.numbers.host_arrays import array_tuple, rounded
from vmserve.system.threads import num_threads

if TYPE_CHECKING:
    from collections.abc import Callable

    from vmserve.attention.base import AttentionBackend

__all__ = ["FORMS", "SHAPES", "Form", "Products", "Rig", "Shape"]

#: Numbers of one random stretch, which fills the memory again and again: drawing all takes minutes.
_PATTERN = 1 << 22


class Shape(NamedTuple):
    """The attention of one layer."""

    shape: str
    q_heads: int
    kv_heads: int
    head_dim: int

    @property
    def token_numbers(self) -> int:
        """Of K and V."""
        return 2 * self.kv_heads * self.head_dim


#: Grouped heads have rows of 256 numbers, which are short to fetch.
SHAPES = (Shape("125M", 12, 12, 64), Shape("125M GQA", 12, 4, 64), Shape("8B", 32, 8, 128))


class Rig:
    """``num_seqs`` sequences of ``context`` tokens; the last ``num_new`` are computed.

    As many layers as it takes for ``least_bytes`` of K and V: a timed function computes all of
    them, so that none finds its memory in a cache. The contiguous view reads the memory in order;
    a paged view reads the same bytes through block tables that place every block at random.
    """

    def __init__(
        self,
        shape: Shape,
        dtype: torch.dtype,
        sizes: tuple[int, int, int],
        least_bytes: int,
        seed: int = 0,
    ) -> None:
        """``sizes``: ``num_seqs``, ``context``, ``num_new``."""
        self._num_seqs, self._context, num_new = sizes
        self._shape, self._random = shape, torch.Generator().manual_seed(seed)
        numbers = self._num_seqs * self._context * shape.token_numbers
        self.layer_bytes = numbers * dtype.itemsize
        self.num_layers = math.ceil(least_bytes / self.layer_bytes)
        past = self._context - num_new
        pairs = num_new * past + num_new * (num_new + 1) // 2
        #: Multiplications and additions of one causal layer.
        self.layer_products = 4 * self._num_seqs * pairs * shape.q_heads * shape.head_dim
        pattern = self._draw(_PATTERN).to(dtype)
        numbers *= self.num_layers
        self.memory = pattern.repeat(math.ceil(numbers / _PATTERN))[:numbers]
        heads = (shape.q_heads, shape.kv_heads, shape.kv_heads)
        rows = self._num_seqs * num_new
        self.inputs = tuple(self._draw(rows, each, shape.head_dim).to(dtype) for each in heads)
        every = range(self._num_seqs)
        self._batch = RaggedBatch.build([*every], [past for _ in every], [num_new for _ in every])
        self._backend = CpuBackend()

    def view(self, block_tokens: int | None = None) -> KVView:
        """The contiguous view, or the paged one: a block to a page, whole blocks of a context."""
        rows = self.memory.view(
            *(self.num_layers, -1, block_tokens or self._context, 2), *self._shape[2:]
        )
        keys, values = (tuple(layer[:, :, side] for layer in rows) for side in range(2))
        if block_tokens is None:
            return ContiguousView(keys, values)
        tables = torch.randperm(rows.shape[1], generator=self._random, dtype=torch.int32)
        return PagedView.of_one_kind(keys, values, tables.view(self._num_seqs, -1), block_tokens)

    def attention(
        self, block_tokens: int | None = None, backend: AttentionBackend | None = None
    ) -> Callable[[], object]:
        """All layers over a view, by default by our kernels."""
        call = (backend or self._backend).bind(self.view(block_tokens), self._batch)
        scale = 1 / math.sqrt(self._shape.head_dim)
        layers = [LayerAttention(layer, scale) for layer in range(self.num_layers)]

        queries, keys, values = self.inputs

        def step() -> None:
            for layer in layers:
                call(layer, queries, keys, values)

        return step

    def read(self) -> int:
        """Read the memory once, with the kernels' threads: the machine's bandwidth."""
        return self._backend.fold(self.memory)

    def _draw(self, *size: int) -> torch.Tensor:
        return torch.randn(size, generator=self._random)


class Form(NamedTuple):
    """How weights are stored, and what rows are rounded to (``--quantization``)."""

    name: str
    bits: int  # 4 or 8: grouped integers; 0: floats
    quantization: str = "none"
    minima: bool = False
    steps: bool = False  # scales are int8 multiples of a step of eight groups


#: Grouped ones are as Q4_0, Q4_1, Q4_K and Q8_0 of GGUF.
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


class Products:
    """As many layers ``[size, size]`` as it takes for ``least_bytes`` of packed weights: one row
    goes through all of them, so that none finds its weights in a cache."""

    def __init__(self, form: Form, size: int, least_bytes: int, seed: int) -> None:
        random, isa = np.random.default_rng(seed), os.environ.get(ISA_VARIABLE, "")
        floats = rounded(random.standard_normal((size, size), np.float32), DType.BFLOAT16)
        weights = _grouped(form, size, random) if form.bits else array_tuple(floats, DType.BFLOAT16)

        def layer() -> _core.CpuLinear:
            return _core.CpuLinear(
                weights,
                quantization=form.quantization,
                bf16_rows=True,
                num_threads=num_threads(),
                isa=isa,
            )

        self.layers = [layer()]
        for _ in range(math.ceil(least_bytes / self.layers[0].weight_bytes) - 1):
            self.layers.append(layer())
        self.memory = np.ones(sum(each.weight_bytes for each in self.layers), np.uint8)
        self._reader = _core.CpuAttention(num_threads(), isa)
        self._row = np.ones((1, size), np.float32)

    def one_row(self) -> None:
        for layer in self.layers:
            layer.multiply(self._row)

    def read(self) -> int:
        """Read as many bytes once, with as many threads: the machine's bandwidth."""
        return self._reader.fold(self.memory.ctypes.data, self.memory.nbytes)


def _grouped(form: Form, size: int, random: np.random.Generator) -> _core.GroupedWeights:
    scales = np.full((size, size // 32), 0.5, np.float32)
    steps = None
    if form.steps:
        scales = random.integers(1, 64, scales.shape).astype(np.float32) / np.float32(512)
        steps = np.full((size, size // 256), 1 / 512, np.float32)
    return _core.GroupedWeights(
        codes=random.integers(0, 1 << form.bits, (size, size), np.uint8),
        bits=form.bits,
        group=32,
        scales=scales,
        minima=-scales if form.minima else None,
        scale_steps=steps,
        minimum_steps=-steps if form.minima and steps is not None else None,
    )
