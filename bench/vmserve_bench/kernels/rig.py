"""KV memory of one shape under both views, and the calls that are timed over it."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

import torch

from vmserve.attention.base import LayerAttention, RaggedBatch
from vmserve.attention.cpu import CpuBackend
from vmserve.attention.sdpa import SdpaBackend
from vmserve.memory.views import ContiguousView, KVView, PagedView

if TYPE_CHECKING:
    from collections.abc import Callable

    from vmserve.attention.base import AttentionBackend

__all__ = ["DTYPES", "SHAPES", "Rig", "Shape"]

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
#: Numbers of one random stretch, which fills the memory again and again: drawing all takes minutes.
_PATTERN_ELEMENTS = 1 << 22


class Shape(NamedTuple):
    """The attention of one layer."""

    name: str
    q_heads: int
    kv_heads: int
    head_dim: int

    def token_bytes(self, dtype: torch.dtype) -> int:
        """K and V of one token in one layer."""
        return 2 * self.kv_heads * self.head_dim * dtype.itemsize


#: Grouped heads have rows of 256 numbers, which are short to fetch.
SHAPES = (Shape("125M", 12, 12, 64), Shape("125M GQA", 12, 4, 64), Shape("8B", 32, 8, 128))


@dataclass(frozen=True)
class Rig:
    """``num_seqs`` sequences of ``context`` tokens; the last ``num_new`` are computed.

    As many layers as it takes for ``least_bytes`` of K and V: a timed function computes all of
    them, so that none finds its memory in a cache. The contiguous view reads the memory in order;
    a paged view reads the same bytes through block tables that place every block at random. Both
    share one backend, and so its threads.
    """

    shape: Shape
    dtype: torch.dtype
    num_seqs: int
    context: int
    num_new: int
    least_bytes: int
    seed: int = 0
    backend: CpuBackend = field(default_factory=CpuBackend)
    memory: torch.Tensor = field(init=False)
    inputs: tuple[torch.Tensor, torch.Tensor, torch.Tensor] = field(init=False)

    def __post_init__(self) -> None:
        generator = torch.Generator().manual_seed(self.seed)
        pattern = torch.randn(_PATTERN_ELEMENTS, generator=generator).to(self.dtype)
        tokens, shape = self.num_seqs * self.context, self.shape
        memory = torch.empty(
            self.num_layers, tokens, 2, shape.kv_heads, shape.head_dim, dtype=self.dtype
        )
        numbers = memory.view(-1)
        for start in range(0, numbers.numel(), _PATTERN_ELEMENTS):
            part = numbers[start : start + _PATTERN_ELEMENTS]
            part.copy_(pattern[: part.numel()])
        rows = self.num_seqs * self.num_new
        inputs = tuple(
            torch.randn(rows, heads, shape.head_dim, generator=generator).to(self.dtype)
            for heads in (shape.q_heads, shape.kv_heads, shape.kv_heads)
        )
        object.__setattr__(self, "memory", memory)
        object.__setattr__(self, "inputs", inputs)

    @property
    def layer_bytes(self) -> int:
        """K and V of all sequences in one layer."""
        return self.num_seqs * self.context * self.shape.token_bytes(self.dtype)

    @property
    def num_layers(self) -> int:
        return math.ceil(self.least_bytes / self.layer_bytes)

    @property
    def layer_products(self) -> int:
        """Multiplications and additions of one causal layer."""
        past = self.context - self.num_new
        pairs = self.num_new * past + self.num_new * (self.num_new + 1) // 2
        return 4 * self.num_seqs * pairs * self.shape.q_heads * self.shape.head_dim

    def contiguous_view(self) -> ContiguousView:
        slots = self._rows_of(self.context)
        return ContiguousView(
            keys=tuple(layer[:, :, 0] for layer in slots),
            values=tuple(layer[:, :, 1] for layer in slots),
        )

    def paged_view(self, block_tokens: int) -> PagedView:
        """One block to a page. ``context`` must be whole blocks."""
        pages = self._rows_of(block_tokens)
        generator = torch.Generator().manual_seed(self.seed)
        tables = torch.randperm(pages.shape[1], generator=generator, dtype=torch.int32)
        return PagedView(
            keys=tuple(layer[:, :, 0] for layer in pages),
            values=tuple(layer[:, :, 1] for layer in pages),
            block_tables=tables.view(self.num_seqs, -1),
            block_tokens=block_tokens,
        )

    def read(self) -> Callable[[], object]:
        """Read the memory once, with the kernels' threads: the machine's bandwidth."""
        return lambda: self.backend.fold(self.memory)

    def contiguous(self) -> Callable[[], object]:
        """Our kernels over the contiguous view, all layers."""
        return self._attention(self.backend, self.contiguous_view())

    def paged(self, block_tokens: int) -> Callable[[], object]:
        """Our kernels over the paged view, all layers."""
        return self._attention(self.backend, self.paged_view(block_tokens))

    def sdpa(self) -> Callable[[], object]:
        """Stock ``scaled_dot_product_attention``, sequence after sequence, all layers."""
        return self._attention(SdpaBackend(), self.contiguous_view())

    def _rows_of(self, num_tokens: int) -> torch.Tensor:
        """``[layers, rows, num_tokens, 2, kv_heads, head_dim]``."""
        return self.memory.view(
            self.num_layers, -1, num_tokens, 2, self.shape.kv_heads, self.shape.head_dim
        )

    def _attention(self, backend: AttentionBackend, view: KVView) -> Callable[[], object]:
        past = self.context - self.num_new
        batch = RaggedBatch.build(
            list(range(self.num_seqs)),
            [past] * self.num_seqs,
            [self.num_new] * self.num_seqs,
        )
        call = backend.bind(view, batch)
        scale = 1 / math.sqrt(self.shape.head_dim)
        layers = [LayerAttention(layer, scale) for layer in range(self.num_layers)]

        def step() -> None:
            for layer in layers:
                call(layer, *self.inputs)

        return step
