"""``vmserve plan``: the possible layouts of a model's KV cache, and what fits in them."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rich.console import Group
from rich.table import Table

from vmserve.cli.planning.kinds import KindsReport
from vmserve.errors import ConfigurationError
from vmserve.memory.kind_pages import (
    KindPages,
    KindShape,
    equal_pages,
    kind_pages,
    pages_of_layout,
)
from vmserve.memory.layout import (
    CUDA_GRANULARITY,
    HOST_GRANULARITY,
    KVLayout,
    LayerKind,
    candidates,
    layer_kinds,
    layers_for_granularity,
    plan_layout,
)
from vmserve.memory.longest import LongestSequence, layers_for_kinds, own_kinds
from vmserve.numbers.dtypes import DType, vector_bytes
from vmserve.numbers.sizes import format_size

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.console import RenderableType

__all__ = [
    "PRESETS",
    "BlockSizeRow",
    "Candidate",
    "ModelShape",
    "PlanReport",
    "block_size_report",
    "block_size_table",
    "plan_report",
    "usual_lengths",
]


#: Tokens of requests whose waste is reported where layers are of several kinds.
_USUAL_LENGTHS = (12, 200, 1000, 8000)


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """What the KV cache needs to know of a model. ``max_len``: its context, in tokens.

    ``windows``: of the first layers, in turn (none: all see everything); ``keys_only``: V takes no
    memory. Besides ``num_layers`` with K and V, ``num_states`` layers have a state of
    ``state_bytes``.
    """

    name: str
    num_layers: int
    kv_heads: int
    head_dim: int
    dtype: str = "bfloat16"
    max_len: int | None = None
    windows: tuple[int | None, ...] = (None,)
    keys_only: bool = False
    num_states: int = 0
    state_bytes: int = 0

    @property
    def layer_windows(self) -> tuple[int | None, ...]:
        """Of each layer with K and V."""
        return tuple(itertools.islice(itertools.cycle(self.windows), self.num_layers))

    def layer_kinds(self) -> tuple[LayerKind, ...]:
        """The layers with K and V, by window."""
        return layer_kinds(self.layer_windows)

    def kinds(self, tensor_parallel: int = 1) -> list[KindShape]:
        """The kinds of layers, those of one rank."""
        vectors = 1 if self.keys_only else 2
        heads = self.kv_heads // tensor_parallel
        token_bytes = vectors * vector_bytes(heads, self.head_dim, DType.of(self.dtype))
        kinds = [
            KindShape(num_layers=len(kind.layers), token_bytes=token_bytes, window=kind.window)
            for kind in self.layer_kinds()
        ]
        if self.num_states:
            state_bytes = self.state_bytes // tensor_parallel
            kinds.append(KindShape(num_layers=self.num_states, state_bytes=state_bytes))
        return kinds


#: Bytes of a layer's state in Qwen3-Next: in float32 32 heads of 128 by 128; in bfloat16 the last 3
#: inputs of a convolution over 16 + 16 heads of 128 and 32 of 128.
_DELTA_STATE = 32 * 128 * 128 * 4 + 3 * 64 * 128 * 2

#: Shapes as their authors published them (config.json of each model).
PRESETS = {
    shape.name: shape
    for shape in (
        ModelShape(name="llama-3-8b", num_layers=32, kv_heads=8, head_dim=128, max_len=8192),
        ModelShape(name="yi-6b", num_layers=32, kv_heads=4, head_dim=128, max_len=4096),
        ModelShape(name="yi-34b", num_layers=60, kv_heads=8, head_dim=128, max_len=4096),
        ModelShape(name="qwen2.5-7b", num_layers=28, kv_heads=4, head_dim=128, max_len=131072),
        ModelShape(
            name="gemma-3-27b",
            num_layers=62,
            kv_heads=16,
            head_dim=128,
            max_len=131072,
            windows=(*(1024,) * 5, None),
        ),
        ModelShape(
            name="gpt-oss-20b",
            num_layers=24,
            kv_heads=8,
            head_dim=64,
            max_len=131072,
            windows=(128, None),
        ),
        ModelShape(
            name="qwen3-next-80b-a3b",
            num_layers=12,
            kv_heads=2,
            head_dim=256,
            max_len=262144,
            num_states=36,
            state_bytes=_DELTA_STATE,
        ),
        ModelShape(
            name="deepseek-v3",
            num_layers=61,
            kv_heads=1,
            head_dim=576,
            max_len=163840,
            keys_only=True,
        ),
    )
}


@dataclass(frozen=True)
class Candidate:
    """One layout, and what a pool of ``limit_bytes`` holds with it."""

    layout: KVLayout
    #: The engine's default layout.
    is_default: bool
    limit_bytes: int | None
    max_len: int | None

    @property
    def num_pages(self) -> int | None:
        return None if self.limit_bytes is None else self.layout.num_pages(self.limit_bytes)

    @property
    def num_tokens(self) -> int | None:
        """Tokens that the pool holds if every page is full."""
        return None if self.num_pages is None else self.num_pages * self.layout.page_tokens

    @property
    def max_len_requests(self) -> int | None:
        """Requests of ``max_len`` tokens that the pool holds at once."""
        if self.num_pages is None or self.max_len is None:
            return None
        return self.num_pages // self.layout.pages_for(self.max_len)

    @property
    def slot_mappings(self) -> int | None:
        """Mappings of a slot of ``max_len`` tokens if no two of its pages adjoin."""
        return None if self.max_len is None else self.layout.slot_mappings(self.max_len)

    def to_dict(self) -> dict[str, Any]:
        return {
            **self.layout.to_dict(),
            "is_default": self.is_default,
            "num_pages": self.num_pages,
            "num_tokens": self.num_tokens,
            "max_len_requests": self.max_len_requests,
            "slot_mappings": self.slot_mappings,
        }


@dataclass(frozen=True)
class PlanReport:
    """Candidates for one model and one granularity; prints itself as a table with rich."""

    shape: ModelShape
    granularity: int
    tensor_parallel: int
    limit_bytes: int | None
    max_len: int | None
    candidates: tuple[Candidate, ...]
    max_map_count: int | None = None
    #: Pages of the default layout, by kind of layers; empty if it is no candidate.
    pages: tuple[KindPages, ...] = ()
    #: Memory that the engine asks for at start; None without a default layout or a length.
    longest: LongestSequence | None = None
    #: Waste by kind of layers; None if all are of one kind and nobody asked.
    kinds: KindsReport | None = None

    def to_dict(self) -> dict[str, Any]:
        return {
            "model": self.shape.name,
            "granularity": self.granularity,
            "tensor_parallel": self.tensor_parallel,
            "limit_bytes": self.limit_bytes,
            "max_len": self.max_len,
            "candidates": [candidate.to_dict() for candidate in self.candidates],
            **({} if self.kinds is None else self.kinds.to_dict()),
        }

    def __rich__(self) -> RenderableType:
        shape = self.shape
        ranks = f", {self.tensor_parallel} ranks" if self.tensor_parallel > 1 else ""
        table = Table(
            title=f"{shape.name}: {shape.num_layers} layers, {shape.kv_heads} KV heads of "
            f"{shape.head_dim}, {shape.dtype}{ranks}; pages in multiples of "
            f"{format_size(self.granularity)}",
            caption=self._caption(),
        )
        table.add_column("layers/group")
        table.add_column("keys" if shape.keys_only else "K and V")
        for heading in ("groups", "page", "tokens/page", "padding", "waste/request", "maps/1k tok"):
            table.add_column(heading, justify="right")
        if self.limit_bytes is not None:
            table.add_column("tokens fit", justify="right")
            table.add_column("max requests", justify="right")
        for candidate in self.candidates:
            table.add_row(*self._cells(candidate), style="bold" if candidate.is_default else None)
        return table if self.kinds is None else Group(table, self.kinds)

    def _caption(self) -> str:
        lines = [
            "page: of one group. waste/request: the most that one request can leave unused.",
            "maps/1k tok: map calls for 1,000 tokens of one sequence. Bold: taken by default.",
        ]
        longest = "" if self.max_len is None else f" of {self.max_len:,} tokens"
        if self.limit_bytes is not None:
            lines.append(f"fit: in {format_size(self.limit_bytes)} per rank, requests{longest}.")
        default = next((each for each in self.candidates if each.is_default), None)
        if self.max_map_count is not None and default is not None and default.slot_mappings:
            lines.append(
                f"Of {self.max_map_count:,} map areas (vm.max_map_count) a request{longest} takes "
                f"{default.slot_mappings:,} by default if no two of its pages adjoin."
            )
        return "\n".join(lines)

    def _cells(self, candidate: Candidate) -> list[str]:
        layout = candidate.layout
        cells = [
            f"{layout.shape.layers_per_group}",
            "alone" if layout.shape.keys_only else "apart" if layout.shape.split_kv else "together",
            f"{layout.num_groups}",
            format_size(layout.shape.page_bytes),
            f"{layout.page_tokens:,}",
            f"{layout.padding_waste:.1%}",
            format_size(layout.worst_case_waste_bytes),
            f"{layout.map_calls_per_1k_tokens:,.1f}",
        ]
        if self.limit_bytes is not None:
            cells += [_number(candidate.num_tokens), _number(candidate.max_len_requests)]
        return cells


def plan_report(
    shape: ModelShape,
    *,
    granularity: int = HOST_GRANULARITY,
    limit_bytes: int | None = None,
    max_len: int | None = None,
    tensor_parallel: int = 1,
    block_tokens: int = 16,
    max_map_count: int | None = None,
    page_bytes: int | None = None,
    lengths: Sequence[int] = (),
    chunk_tokens: int = 512,
) -> PlanReport:
    """The layout candidates of a model: one per way to group its layers.

    ``limit_bytes`` limits the pool of one rank; with it the report says how many tokens and
    requests of ``max_len`` (default: the model's own) fit. ``max_map_count`` bounds the mappings of
    one such request on the host. ``page_bytes`` fixes the size of a group's page and leaves out
    groupings that do not fit into it. ``lengths``: of requests whose waste is reported, by default
    some if layers are of several kinds. ``chunk_tokens``: of a prompt that a step reads at most.

    Raises :class:`ConfigurationError` if no grouping fits, for wrong numbers, and if kinds of
    layers cannot hold one request of ``max_len``, with what each needs.
    """
    max_len = max_len if max_len is not None else shape.max_len
    layouts = candidates(
        shape.num_layers,
        shape.kv_heads,
        shape.head_dim,
        shape.dtype,
        granularity,
        page_bytes=page_bytes,
        tensor_parallel=tensor_parallel,
        block_tokens=block_tokens,
        keys_only=shape.keys_only,
        state_bytes=shape.num_states * shape.state_bytes // tensor_parallel,
        max_len=max_len,
        max_map_count=max_map_count,
    )
    of_layer = (shape.kv_heads // tensor_parallel, shape.head_dim, DType.of(shape.dtype))
    grouped = layers_for_kinds(
        shape.layer_windows, *of_layer, granularity, keys_only=shape.keys_only
    ) or layers_for_granularity(shape.num_layers, *of_layer, granularity, keys_only=shape.keys_only)
    default = next((each for each in layouts if _is_default(each, grouped)), None)
    pages = () if default is None else _pages(shape, default)
    longest = _longest(shape, default, max_len, chunk_tokens)
    has_kinds = len(pages) > 1 or bool(lengths)
    if longest is not None and limit_bytes is not None and has_kinds:
        try:
            longest.require(limit_bytes)
        except ConfigurationError as error:
            raise ConfigurationError(f"{shape.name}: {error}") from None
    return PlanReport(
        shape=shape,
        granularity=granularity,
        tensor_parallel=tensor_parallel,
        limit_bytes=limit_bytes,
        max_len=max_len,
        max_map_count=max_map_count,
        candidates=tuple(
            Candidate(
                layout=layout,
                is_default=layout is default,
                limit_bytes=limit_bytes,
                max_len=max_len,
            )
            for layout in layouts
        ),
        pages=pages,
        longest=longest,
        kinds=_kinds_report(shape, default, pages, limit_bytes, max_len, lengths, chunk_tokens),
    )


def _is_default(layout: KVLayout, layers_per_group: int) -> bool:
    return layout.shape.layers_per_group == layers_per_group and not layout.shape.split_kv


def _longest(
    shape: ModelShape, default: KVLayout | None, max_len: int | None, chunk_tokens: int
) -> LongestSequence | None:
    if default is None or max_len is None:
        return None
    # What kernels read before a window, up to 256 tokens on a GPU, comes on top.
    kinds = own_kinds(default, shape.layer_windows)
    return LongestSequence(default, kinds, max_len, 0, chunk_tokens)


def usual_lengths(max_len: int | None) -> tuple[int, ...]:
    """Lengths of requests that reports have if nobody asks for others."""
    return tuple(length for length in _USUAL_LENGTHS if max_len is None or length <= max_len)


def _pages(shape: ModelShape, default: KVLayout) -> tuple[KindPages, ...]:
    if default.granularity >= CUDA_GRANULARITY:
        return pages_of_layout(default, own_kinds(default, shape.layer_windows))
    return kind_pages(
        shape.kinds(default.tensor_parallel),
        default.granularity,
        page_tokens=default.page_tokens,
        page_bytes=default.shape.page_bytes,
        block_tokens=default.block_tokens,
    )


def _kinds_report(
    shape: ModelShape,
    default: KVLayout | None,
    pages: tuple[KindPages, ...],
    limit_bytes: int | None,
    max_len: int | None,
    lengths: Sequence[int],
    chunk_tokens: int,
) -> KindsReport | None:
    """Of a model with several kinds of layers, or if there are ``lengths``."""
    if default is None or (len(pages) == 1 and not lengths):
        return None
    return KindsReport(
        name=shape.name,
        kinds=pages,
        equal=equal_pages(shape.kinds(default.tensor_parallel)),
        block_tokens=default.block_tokens,
        lengths=tuple(lengths) or usual_lengths(max_len),
        chunk_tokens=chunk_tokens,
        limit_bytes=limit_bytes,
        max_len=max_len,
    )


@dataclass(frozen=True)
class BlockSizeRow:
    """One cell of the block-size table: a model, its ranks and a page size."""

    model: str
    tensor_parallel: int
    page_bytes: int
    tokens_per_page: int
    worst_case_waste_bytes: int


def block_size_table(
    shapes: Sequence[ModelShape],
    *,
    page_sizes: Sequence[int] = (64 << 10, 128 << 10, 256 << 10, CUDA_GRANULARITY),
    tensor_parallel: Sequence[int] = (1, 2),
) -> list[BlockSizeRow]:
    """Tokens per page and worst-case waste per request, by page size and ranks.

    For the layout of vAttention (one layer per group, K and V apart) this is Table 8 of arXiv
    2405.04437.
    """
    rows = []
    for shape in shapes:
        for ranks in tensor_parallel:
            for page_bytes in page_sizes:
                layout = plan_layout(
                    shape.num_layers,
                    shape.kv_heads,
                    shape.head_dim,
                    shape.dtype,
                    page_bytes,
                    split_kv=True,
                    page_bytes=page_bytes,
                    tensor_parallel=ranks,
                )
                rows.append(
                    BlockSizeRow(
                        model=shape.name,
                        tensor_parallel=ranks,
                        page_bytes=page_bytes,
                        tokens_per_page=layout.page_tokens,
                        worst_case_waste_bytes=layout.worst_case_waste_bytes,
                    )
                )
    return rows


def block_size_report(rows: Sequence[BlockSizeRow]) -> RenderableType:
    """The block-size table as two rich tables: tokens per page, and waste per request."""
    return Group(
        _by_page_size(
            "tokens per page (K or V of one layer)",
            rows,
            [f"{row.tokens_per_page:,}" for row in rows],
        ),
        _by_page_size(
            "worst-case waste per request",
            rows,
            [format_size(row.worst_case_waste_bytes) for row in rows],
        ),
    )


def _by_page_size(title: str, rows: Sequence[BlockSizeRow], cells: Sequence[str]) -> Table:
    """A line per model and ranks, a column per page size; ``cells[i]`` is that of ``rows[i]``."""
    page_sizes = sorted({row.page_bytes for row in rows})
    lines: dict[str, dict[int, str]] = {}
    for row, cell in zip(rows, cells, strict=True):
        lines.setdefault(f"{row.model} (TP-{row.tensor_parallel})", {})[row.page_bytes] = cell
    table = Table(title=title)
    table.add_column("model")
    for size in page_sizes:
        table.add_column(format_size(size), justify="right")
    for name, line in lines.items():
        table.add_row(name, *(line[size] for size in page_sizes))
    return table


def _number(value: int | None) -> str:
    return "" if value is None else f"{value:,}"
