"""The least pool: what the longest sequence needs when it has the pool for itself."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from math import gcd

from vmserve.errors import ConfigurationError
from vmserve.memory.kind_pages import KindPages, most_bytes, pages_of_layout
from vmserve.memory.layout import KVLayout, LayerKind, layer_kinds, layers_for_granularity
from vmserve.numbers.dtypes import DType, vector_bytes
from vmserve.numbers.sizes import format_size, size_to_set

__all__ = ["LongestSequence", "layers_for_kinds", "own_kinds"]


#: Most tokens of a page: larger pages would take from short requests more than windows give back.
_MOST_PAGE_TOKENS = 512


def own_kinds(
    layout: KVLayout, windows: Sequence[int | None], head_slack_tokens: int = 0
) -> tuple[LayerKind, ...]:
    """The kinds of layers that get pages of their own in this layout; none if all have the same.

    ``windows``: of each layer. ``head_slack_tokens``: how far before a window kernels read.
    Separate pages need a kind that sees all, and groups that divide the layers of each kind.
    """
    kinds = layer_kinds(windows, head_slack_tokens)
    if len(kinds) == 1 or kinds[0].window is not None or layout.parts[0].split_kv:
        return ()
    try:
        layout.of_kinds(kinds)
    except ConfigurationError:
        return ()
    return kinds


def layers_for_kinds(
    windows: Sequence[int | None],
    kv_heads: int,
    head_dim: int,
    dtype: DType,
    granularity: int,
    *,
    keys_only: bool = False,
) -> int | None:
    """Layers per group with which kinds can have pages of their own; None if the smallest page of
    such a group, or of all layers, has room for more than 512 tokens, or if there is one kind."""
    kinds = layer_kinds(windows)
    if len(kinds) == 1 or kinds[0].window is not None:
        return None
    common = gcd(*(len(kind.layers) for kind in kinds))
    shape = (kv_heads, head_dim, dtype, granularity)
    group = layers_for_granularity(common, *shape, keys_only=keys_only)
    layer_bytes = (1 if keys_only else 2) * vector_bytes(kv_heads, head_dim, dtype)
    return group if granularity <= _MOST_PAGE_TOKENS * group * layer_bytes else None


@dataclass(frozen=True)
class LongestSequence:
    """A sequence of ``max_len`` tokens that is alone, at its worst step.

    ``kinds``: of layers that have pages of their own. ``chunk_tokens``: the most that a sequence
    computes in a step.
    """

    layout: KVLayout
    kinds: Sequence[LayerKind]
    max_len: int
    read_slack_tokens: int
    chunk_tokens: int

    @property
    def num_pages(self) -> int:
        """What it needs, in whole pages."""
        return self._num_pages(self.max_len)

    def least_bytes(self, pinned_pages: int = 0) -> int:
        """The least limit with which it fits together with the pinned prefixes."""
        return (self.num_pages + pinned_pages) * self.layout.total_page_bytes

    def pages_to_pin(self, num_tokens: int) -> int:
        """What a pinned prefix of ``num_tokens`` takes at most, in whole pages."""
        layout = self.layout
        state_pages = -(-layout.state_bytes // layout.total_page_bytes)
        return layout.pages_for(num_tokens) + state_pages

    def require(self, limit_bytes: int, pinned_pages: int = 0) -> None:
        """Raises :class:`~vmserve.errors.ConfigurationError` unless it fits next to the pinned
        prefixes."""
        layout, needed = self.layout, self.num_pages
        available = layout.num_pages(limit_bytes) - pinned_pages
        if needed <= available:
            return
        fitting = bisect_right(range(1, self.max_len + 1), available, key=self._num_pages)
        beside = f" beside {pinned_pages} pages of pinned prefixes" if pinned_pages else ""
        ranks = layout.tensor_parallel  # options are those of all
        raise ConfigurationError(
            f"a sequence of {self.max_len} tokens needs {needed} pages of "
            f"{format_size(ranks * layout.total_page_bytes)}{self._by_kind()}, "
            f"{max(0, available)} fit in the KV cache of {format_size(ranks * limit_bytes)}{beside}"
            f": raise --kv-cache-memory to {size_to_set(ranks * self.least_bytes(pinned_pages))}"
            + (f" or lower --max-model-len to {fitting}" if fitting > 0 else "")
        )

    def by_kind(self) -> list[tuple[KindPages, int]]:
        """The kinds, and the pages of each at its own worst step."""
        longest = self.max_len + self.read_slack_tokens
        return [(kind, kind.most_pages(longest, self.chunk_tokens)) for kind in self._kind_pages]

    def _num_pages(self, num_tokens: int) -> int:
        slack = self.read_slack_tokens
        needed = most_bytes(self._kind_pages, num_tokens + slack, self.chunk_tokens)
        return -(-needed // self.layout.total_page_bytes)

    def _by_kind(self) -> str:
        if len(self._kind_pages) == 1:
            return ""
        return f" ({'; '.join(kind.needs(pages) for kind, pages in self.by_kind())})"

    @cached_property
    def _kind_pages(self) -> tuple[KindPages, ...]:
        return pages_of_layout(self.layout, self.kinds)
