"""The layout planner: how the KV cache of a model is cut into pages. Pure functions.

A page holds a whole number of tokens at one uniform distance. Otherwise a sequence's pages, mapped
one after the other, would not be a strided tensor. Layers are put in equal *groups*; the layers of
a group lie side by side for each token,

* ``[token, layer_in_group, 2, kv_heads, head_dim]``, or
* with ``split_kv`` K and V in groups of their own, ``[token, layer_in_group, kv_heads, head_dim]``
  (one layer per group is the layout of vAttention, arXiv 2405.04437), or
* with ``keys_only`` K alone, ``[token, layer_in_group, kv_heads, head_dim]``: V is a slice of K's
  row (the latent of multi-head latent attention, arXiv 2405.04434 §2.1).

With int8, the last dimension has ``head_dim`` integers + 128, each a byte, and their float32 scale.
With fp8, the last two have ``kv_heads * head_dim`` bytes of e4m3, then ``kv_heads`` float32 scales,
padded to 16 bytes (docs/decisions/0080).

Layers that keep a *state* of constant size instead (recurrent layers) are not among these. The
states of a sequence lie in one page of their own, whatever its length.

Each group has its own reservations. Page ``p`` is one physical page per group, all mapped together.
So fewer groups mean fewer map calls, and more unused tokens in a short sequence's page.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

from vmserve.errors import ConfigurationError
from vmserve.numbers.dtypes import DType, head_stride, vector_bytes
from vmserve.numbers.sizes import format_size

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

__all__ = [
    "CUDA_GRANULARITY",
    "HOST_GRANULARITY",
    "KVLayout",
    "LayerKind",
    "LayerPages",
    "LayerPlace",
    "candidates",
    "join_layouts",
    "kind_of_layers",
    "layer_kinds",
    "layer_places",
    "layers_for_granularity",
    "plan_layout",
]

HOST_GRANULARITY = 4 << 10
CUDA_GRANULARITY = 2 << 20

#: Page sizes in tokens that the planner aims for: below, map calls cost more than they save; above,
#: short sequences waste most of a page.
_MIN_PAGE_TOKENS = 64
#: The lower one on a GPU: half as many calls of the driver for as many tokens, and 128 pages
#: in 60 ms.
_MIN_DEVICE_PAGE_TOKENS = 128
_MAX_PAGE_TOKENS = 256
_MAX_PADDING = 1 / 8
#: Kernels load vectors of this many bytes. A token stride that is not a multiple is only accepted
#: if the size of a token is not one either.
_VECTOR_BYTES = 16
#: Share of vm.max_map_count that the longest sequence's slot may take if no two of its pages
#: adjoin. It is less than a process's KV caches may hold, so a sequence alone always fits.
_SLOT_SHARE = 1 / 2


@dataclass(frozen=True, kw_only=True)
class LayerPages:
    """Where K and V of layers of one shape lie in their pages.

    ``kv_heads`` are those of one tensor-parallel rank; ``page_bytes`` is one page of one group.
    """

    num_layers: int
    kv_heads: int
    #: Of K, and of V; with ``keys_only`` V takes no memory, as a slice of K's row.
    head_dim: int
    value_dim: int
    dtype: DType
    layers_per_group: int
    split_kv: bool
    keys_only: bool
    page_bytes: int
    page_tokens: int

    @property
    def num_groups(self) -> int:
        return self.num_layers // self.layers_per_group * (2 if self.split_kv else 1)

    @property
    def total_page_bytes(self) -> int:
        """Bytes of one page over all groups."""
        return self.page_bytes * self.num_groups

    @property
    def token_bytes(self) -> int:
        """Bytes of one token in one group, without padding."""
        return self.layers_per_group * self._layer_bytes

    @property
    def token_stride(self) -> int:
        """Bytes from one token to the next in one group."""
        return self.page_bytes // self.page_tokens

    @property
    def dims(self) -> tuple[int, int]:
        """Numbers of a head in K, and in V."""
        return self.head_dim, self.value_dim

    @property
    def head_strides(self) -> tuple[int, int]:
        """Bytes from one head to the next in K, and in V, of one token."""
        return head_stride(self.head_dim, self.dtype), head_stride(self.value_dim, self.dtype)

    @property
    def _vector_bytes(self) -> tuple[int, int]:
        """Of K and of V."""
        return (
            vector_bytes(self.kv_heads, self.head_dim, self.dtype),
            vector_bytes(self.kv_heads, self.value_dim, self.dtype),
        )

    @property
    def _layer_bytes(self) -> int:
        """Bytes of one layer and token in a group: of K and V, or of one of them."""
        return _layer_bytes(self._vector_bytes, split_kv=self.split_kv, keys_only=self.keys_only)

    def key_location(self, layer: int) -> tuple[int, int]:
        """``(group, offset)`` of the layer's K; the offset is in bytes inside a token."""
        group, index = divmod(layer, self.layers_per_group)
        return group * (2 if self.split_kv else 1), index * self._layer_bytes

    def value_location(self, layer: int) -> tuple[int, int]:
        """``(group, offset)`` of the layer's V, that of K with ``keys_only``; as above."""
        group, offset = self.key_location(layer)
        if self.split_kv:
            return group + 1, offset
        return group, offset + (0 if self.keys_only else self._vector_bytes[0])


@dataclass(frozen=True, kw_only=True)
class KVLayout:
    """Where K and V of every layer and token lie inside a page.

    ``parts``: layers of one shape each, which follow each other. All have equally many tokens in a
    page and numbers of one type. Build it with :func:`plan_layout`, which checks that the numbers
    agree, and :func:`join_layouts`. What a scheduler asks for each sequence is computed once.
    """

    parts: tuple[LayerPages, ...]
    block_tokens: int
    granularity: int
    tensor_parallel: int = 1
    #: Bytes of the page with the states of a sequence; 0: no layer has one.
    state_bytes: int = 0

    @cached_property
    def num_layers(self) -> int:
        return sum(part.num_layers for part in self.parts)

    @cached_property
    def num_groups(self) -> int:
        return sum(part.num_groups for part in self.parts)

    @cached_property
    def page_tokens(self) -> int:
        return self.parts[0].page_tokens

    @property
    def dtype(self) -> DType:
        return self.parts[0].dtype

    @property
    def itemsize(self) -> int:
        return self.dtype.itemsize

    @property
    def shape(self) -> LayerPages:
        """What the layers have in common, if their shapes are one. Else raises ``ValueError``."""
        first = self.parts[0]
        if any(replace(part, num_layers=first.num_layers) != first for part in self.parts):
            raise ValueError("the layers of this layout have several shapes: see its parts")
        return replace(first, num_layers=self.num_layers)

    @cached_property
    def total_page_bytes(self) -> int:
        """Bytes of one page over all groups: the unit of the pool."""
        return sum(part.total_page_bytes for part in self.parts)

    @property
    def padding_waste(self) -> float:
        """Share of every page, 0 to 1, that no token can use."""
        used = sum(part.token_bytes * part.num_groups for part in self.parts)
        return 1 - used * self.page_tokens / self.total_page_bytes

    @cached_property
    def blocks_per_page(self) -> int:
        return self.page_tokens // self.block_tokens

    @property
    def worst_case_waste_bytes(self) -> int:
        """Bytes that one request can leave unused, over all ranks: one page of every group.

        The measure of the vAttention paper (Table 8): a sequence whose last page holds one token.
        """
        return self.total_page_bytes * self.tensor_parallel

    @property
    def map_calls_per_1k_tokens(self) -> float:
        """Map calls per rank for 1,000 tokens of one sequence, if no two pages adjoin."""
        return 1000 / self.page_tokens * self.num_groups

    def num_pages(self, num_bytes: int) -> int:
        """Whole pages (over all groups) in ``num_bytes``."""
        return num_bytes // self.total_page_bytes

    def pages_for(self, num_tokens: int) -> int:
        """Pages of one sequence of ``num_tokens``."""
        return -(-num_tokens // self.page_tokens)

    @property
    def state_blocks(self) -> int:
        """A sequence's states in blocks of all layers, rounded up."""
        return -(-self.state_bytes * self.blocks_per_page // self.total_page_bytes)

    def slot_mappings(self, num_tokens: int) -> int:
        """Mappings of a slot of ``num_tokens``, if no two of its pages adjoin."""
        return self.pages_for(num_tokens) * self.num_groups

    def of_kinds(self, kinds: Sequence[LayerKind]) -> KVLayout:
        """The same with a part for each kind that keeps tokens, whose layers follow each other.

        Raises :class:`ConfigurationError` for kinds that are not these layers, or whose layers are
        not whole groups of one shape.
        """
        counts = [len(kind.layers) for kind in kinds]
        if counts == [part.num_layers for part in self.parts]:
            return self
        shape = self.shape
        if sum(counts) != self.num_layers or any(n % shape.layers_per_group for n in counts):
            raise ConfigurationError(
                f"kinds of {', '.join(map(str, counts))} layers are not whole groups of "
                f"{shape.layers_per_group} of the {self.num_layers} layers"
            )
        return replace(self, parts=tuple(replace(shape, num_layers=n) for n in counts))

    def to_dict(self) -> dict[str, Any]:
        """The fields and derived figures as plain JSON values."""
        of_shape = ("num_layers", "kv_heads", "head_dim", "dtype", "layers_per_group", "split_kv")
        sizes = ("page_bytes", "page_tokens", "keys_only", "value_dim", "num_groups", "token_bytes")
        own = ("block_tokens", "granularity", "tensor_parallel", "state_bytes", "padding_waste")
        derived = ("total_page_bytes", "blocks_per_page", "worst_case_waste_bytes")
        shape = self.shape
        values = {name: getattr(shape, name) for name in (*of_shape, *sizes, "token_stride")}
        names = (*own, *derived, "map_calls_per_1k_tokens")
        return values | {name: getattr(self, name) for name in names}


def join_layouts(layouts: Sequence[KVLayout]) -> KVLayout:
    """One layout of layers of several shapes, which have been planned one by one.

    Raises :class:`ConfigurationError` unless they have equal tokens in pages and blocks, one type,
    and as many ranks.
    """
    first = layouts[0]
    for layout in layouts[1:]:
        for name in ("page_tokens", "block_tokens", "dtype", "granularity", "tensor_parallel"):
            if getattr(layout, name) != getattr(first, name):
                raise ConfigurationError(
                    f"layouts with {name} {getattr(first, name)} and {getattr(layout, name)} are "
                    "not one pool's: plan them with equal ones"
                )
    parts = tuple(part for layout in layouts for part in layout.parts)
    return replace(first, parts=parts, state_bytes=sum(each.state_bytes for each in layouts))


@dataclass(frozen=True)
class LayerKind:
    """Layers that keep the same positions of a sequence: all, those of a sliding window, or the
    state after the last.
    """

    #: Layers by their number in the layout, which does not count layers with a state.
    layers: tuple[int, ...]
    #: How many positions a query sees, itself included; None: all. With a state 1: nothing of the
    #: past but the state.
    window: int | None
    has_state: bool = False
    #: Tokens before the window that are kept too, because kernels read whole tiles.
    head_slack_tokens: int = 0

    @property
    def kept_tokens(self) -> int | None:
        """How many positions are kept, that of the query included; None: all."""
        return None if self.window is None else self.window + self.head_slack_tokens

    @property
    def name(self) -> str:
        if self.has_state:
            return "state"
        return "all" if self.window is None else f"window {self.window}"


def layer_kinds(windows: Sequence[int | None], head_slack_tokens: int = 0) -> tuple[LayerKind, ...]:
    """Group layers by window, those that see everything first, then the widest window.

    ``windows``: of each layer. ``head_slack_tokens``: see :class:`LayerKind`.
    """
    found = sorted(set(windows), key=lambda window: -math.inf if window is None else -window)
    return tuple(
        LayerKind(
            tuple(layer for layer, each in enumerate(windows) if each == window),
            window,
            head_slack_tokens=0 if window is None else head_slack_tokens,
        )
        for window in found
    )


class LayerPlace(NamedTuple):
    """Where a layer's K and V lie: ``(group, offset)``, of all groups of the layout."""

    part: LayerPages
    key: tuple[int, int]
    value: tuple[int, int]


def layer_places(layout: KVLayout, kinds: Sequence[LayerKind]) -> list[LayerPlace]:
    """The place of each layer. ``layout`` has a part for each kind."""
    places: dict[int, LayerPlace] = {}
    first = 0  # group of the part
    for part, kind in zip(layout.parts, kinds, strict=True):
        for number, layer in enumerate(kind.layers):
            (key_group, key), (value_group, value) = (
                part.key_location(number),
                part.value_location(number),
            )
            places[layer] = LayerPlace(part, (first + key_group, key), (first + value_group, value))
        first += part.num_groups
    return [places[layer] for layer in range(len(places))]


def kind_of_layers(layers: Sequence[Sequence[int]]) -> list[int]:
    """The number of each layer's kind. ``layers``: of each kind."""
    numbers = {layer: number for number, of_kind in enumerate(layers) for layer in of_kind}
    return [numbers[layer] for layer in range(len(numbers))]


def plan_layout(
    num_layers: int,
    kv_heads: int,
    head_dim: int,
    dtype: str | torch.dtype,
    granularity: int,
    *,
    layers_per_group: int = 1,
    split_kv: bool = False,
    page_bytes: int | None = None,
    page_tokens: int | None = None,
    block_tokens: int = 16,
    tensor_parallel: int = 1,
    keys_only: bool = False,
    value_dim: int | None = None,
    state_bytes: int = 0,
    max_len: int | None = None,
    max_map_count: int | None = None,
) -> KVLayout:
    """Choose the page of a model's KV cache.

    ``value_dim``: of V's heads, if they are not those of K. ``state_bytes``: those of a sequence's
    states, all together; rounded up to a page. ``granularity``: bytes that the driver's pages are
    multiples of (4 KiB on the host, 2 MiB with stock CUDA). ``page_bytes`` (of one group) and
    ``page_tokens`` fix what they name. What is left open is chosen: at least 64 tokens a page (128
    on a GPU), and up to 256 tokens the size with the least padding.
    With ``max_len`` and ``max_map_count``, pages that were not fixed are doubled until a slot of
    ``max_len`` tokens takes less than half of ``max_map_count`` mappings however its pages lie. All
    slots together can need more, because pages that sequences share are mapped in each slot. The
    pool counts mappings, and does without slots if there are no more.

    Raises :class:`ConfigurationError`, with the numbers, for sizes that do not fit.
    """
    kind = DType.of(dtype)
    _check_shape(num_layers, kv_heads, head_dim, layers_per_group, tensor_parallel)
    _check_positive(granularity=granularity, block_tokens=block_tokens)
    if split_kv and keys_only:
        raise ConfigurationError("keys without values cannot be split from them: drop split_kv")
    value_dim = head_dim if value_dim is None else value_dim
    if value_dim != head_dim and (split_kv or keys_only):
        raise ConfigurationError(
            f"K of {head_dim} and V of {value_dim} numbers a head are only laid out side by side: "
            "drop split_kv and keys_only"
        )
    rank_heads = kv_heads // tensor_parallel
    vectors = (
        vector_bytes(rank_heads, head_dim, kind),
        vector_bytes(rank_heads, value_dim, kind),
    )
    token_bytes = layers_per_group * _layer_bytes(vectors, split_kv=split_kv, keys_only=keys_only)
    if page_bytes is not None:
        _check_page_bytes(page_bytes, granularity)
    if page_tokens is not None:
        _check_page_tokens(page_tokens, block_tokens)
    if page_bytes is not None and page_tokens is not None:
        _check_both(page_bytes, page_tokens, token_bytes)
        tokens, size = page_tokens, page_bytes
    elif page_bytes is not None:
        tokens, size = _most_tokens(page_bytes, token_bytes, block_tokens, granularity), page_bytes
    else:
        tokens = page_tokens or _choose_tokens(token_bytes, block_tokens, granularity)
        size = tokens * _stride(tokens, token_bytes, granularity)

    def layout(tokens: int, size: int) -> KVLayout:
        pages = LayerPages(
            num_layers=num_layers,
            kv_heads=rank_heads,
            head_dim=head_dim,
            value_dim=value_dim,
            dtype=kind,
            layers_per_group=layers_per_group,
            split_kv=split_kv,
            keys_only=keys_only,
            page_bytes=size,
            page_tokens=tokens,
        )
        return KVLayout(
            parts=(pages,),
            block_tokens=block_tokens,
            granularity=granularity,
            tensor_parallel=tensor_parallel,
            state_bytes=-(-state_bytes // granularity) * granularity,
        )

    planned = layout(tokens, size)
    if page_bytes is None and page_tokens is None and max_len and max_map_count:
        while planned.slot_mappings(max_len) >= _SLOT_SHARE * max_map_count:
            planned = layout(planned.page_tokens * 2, planned.shape.page_bytes * 2)
    return planned


def candidates(
    num_layers: int,
    kv_heads: int,
    head_dim: int,
    dtype: str | torch.dtype,
    granularity: int,
    *,
    page_bytes: int | None = None,
    block_tokens: int = 16,
    tensor_parallel: int = 1,
    keys_only: bool = False,
    state_bytes: int = 0,
    max_len: int | None = None,
    max_map_count: int | None = None,
) -> list[KVLayout]:
    """One layout per way to group the layers: for each divisor of their number.

    First with K and V together (fewest groups last), then apart, without ``keys_only``. Groupings
    whose tokens do not fit a page of ``page_bytes`` are left out. If none fits, raises the first
    one's :class:`ConfigurationError`.
    """
    _check_positive(num_layers=num_layers)
    layouts: list[KVLayout] = []
    refusals: list[ConfigurationError] = []
    for split_kv in (False,) if keys_only else (False, True):
        for layers_per_group in (n for n in range(1, num_layers + 1) if num_layers % n == 0):
            try:
                layout = plan_layout(
                    num_layers,
                    kv_heads,
                    head_dim,
                    dtype,
                    granularity,
                    layers_per_group=layers_per_group,
                    split_kv=split_kv,
                    page_bytes=page_bytes,
                    block_tokens=block_tokens,
                    tensor_parallel=tensor_parallel,
                    keys_only=keys_only,
                    state_bytes=state_bytes,
                    max_len=max_len,
                    max_map_count=max_map_count,
                )
            except ConfigurationError as error:
                refusals.append(error)
            else:
                layouts.append(layout)
    if not layouts and refusals:
        raise refusals[0]
    return layouts


def layers_for_granularity(
    num_layers: int,
    kv_heads: int,
    head_dim: int,
    dtype: str | torch.dtype,
    granularity: int,
    *,
    keys_only: bool = False,
) -> int:
    """The fewest layers per group with at most 256 tokens in the smallest page, or all layers.

    On the host that is one. On a GPU it is all layers: a call of the driver costs the same for a
    page of 2 or of 16 MiB, and interleaving all layers costs attention nothing that was measured
    (decision 0086).
    """
    _check_shape(num_layers, kv_heads, head_dim, 1, 1)
    if granularity >= CUDA_GRANULARITY:
        return num_layers
    vector = vector_bytes(kv_heads, head_dim, DType.of(dtype))
    layer_bytes = _layer_bytes((vector, vector), split_kv=False, keys_only=keys_only)
    divisors = [n for n in range(1, num_layers + 1) if num_layers % n == 0]
    return next(
        (n for n in divisors if granularity <= _MAX_PAGE_TOKENS * n * layer_bytes), num_layers
    )


def _layer_bytes(vectors: tuple[int, int], *, split_kv: bool, keys_only: bool) -> int:
    """Bytes of a layer's vectors that lie side by side in a group: K and V, or one of them."""
    return vectors[0] if split_kv or keys_only else sum(vectors)


def _alignment(token_bytes: int) -> int:
    return math.gcd(_VECTOR_BYTES, token_bytes)


def _stride(page_tokens: int, token_bytes: int, granularity: int) -> int:
    """The smallest token stride with which ``page_tokens`` fill whole granules."""
    step = math.lcm(_alignment(token_bytes), granularity // math.gcd(page_tokens, granularity))
    return -(-token_bytes // step) * step


def _choose_tokens(token_bytes: int, block_tokens: int, granularity: int) -> int:
    """The tokens of a page with the least padding, the fewest of these; 64 to 256 if possible, on a
    GPU 128 to 256.

    More if one granule holds more, or if fewer would pad more than an eighth.
    """

    def stride(tokens: int) -> int:
        return _stride(tokens, token_bytes, granularity)

    least = _MIN_PAGE_TOKENS if granularity < CUDA_GRANULARITY else _MIN_DEVICE_PAGE_TOKENS
    first = -(-least // block_tokens) * block_tokens
    last = max(_MAX_PAGE_TOKENS, -(-granularity // token_bytes), first)
    while True:
        best = min(range(first, last + 1, block_tokens), key=stride)
        if 1 - token_bytes / stride(best) <= _MAX_PADDING:
            return best
        last *= 2


def _most_tokens(page_bytes: int, token_bytes: int, block_tokens: int, granularity: int) -> int:
    """The most tokens, in whole blocks, that divide a page of ``page_bytes`` evenly."""
    alignment = _alignment(token_bytes)
    most = page_bytes // token_bytes // block_tokens * block_tokens
    for tokens in range(most, 0, -block_tokens):
        if page_bytes % tokens == 0 and page_bytes // tokens % alignment == 0:
            return tokens
    block_bytes = block_tokens * token_bytes
    least = -(-block_bytes // granularity) * granularity
    raise ConfigurationError(
        f"a page of {format_size(page_bytes)} holds {page_bytes // token_bytes} tokens of "
        f"{format_size(token_bytes)}: not one block of {block_tokens} at an even distance; use "
        f"pages of {format_size(least)} or more (--kv-page-size), fewer layers per group, or "
        "smaller blocks (--block-size)"
    )


def _check_positive(**numbers: int) -> None:
    for name, value in numbers.items():
        if value < 1:
            raise ConfigurationError(f"{name} is {value}: it must be 1 or more")


def _check_shape(
    num_layers: int,
    kv_heads: int,
    head_dim: int,
    layers_per_group: int,
    tensor_parallel: int,
) -> None:
    _check_positive(
        num_layers=num_layers,
        kv_heads=kv_heads,
        head_dim=head_dim,
        layers_per_group=layers_per_group,
        tensor_parallel=tensor_parallel,
    )
    if num_layers % layers_per_group:
        divisors = [str(n) for n in range(1, num_layers + 1) if num_layers % n == 0]
        raise ConfigurationError(
            f"{num_layers} layers cannot be put in equal groups of {layers_per_group}: use one of "
            f"{', '.join(divisors)}"
        )
    if kv_heads % tensor_parallel:
        raise ConfigurationError(
            f"{kv_heads} KV heads cannot be shared by {tensor_parallel} tensor-parallel ranks: use "
            f"a divisor of {kv_heads}"
        )


def _check_page_bytes(page_bytes: int, granularity: int) -> None:
    if page_bytes < 1 or page_bytes % granularity:
        up = max(1, -(-page_bytes // granularity)) * granularity
        raise ConfigurationError(
            f"a page of {page_bytes} bytes is not a multiple of the driver's granularity, "
            f"{granularity}: use e.g. {format_size(up)}"
        )


def _check_page_tokens(page_tokens: int, block_tokens: int) -> None:
    if page_tokens < 1 or page_tokens % block_tokens:
        up = max(1, -(-page_tokens // block_tokens)) * block_tokens
        raise ConfigurationError(
            f"a page of {page_tokens} tokens is not whole blocks of {block_tokens}: use e.g. {up} "
            "tokens a page, or smaller blocks (--block-size)"
        )


def _check_both(page_bytes: int, page_tokens: int, token_bytes: int) -> None:
    needed = page_tokens * token_bytes
    if needed > page_bytes:
        raise ConfigurationError(
            f"{page_tokens} tokens of {format_size(token_bytes)} need {format_size(needed)}, the "
            f"page has {format_size(page_bytes)}: lower page_tokens to "
            f"{page_bytes // token_bytes} or less"
        )
    if page_bytes % page_tokens or page_bytes // page_tokens % _alignment(token_bytes):
        raise ConfigurationError(
            f"a page of {page_bytes} bytes does not place {page_tokens} tokens at an even, aligned "
            "distance: leave page_tokens open"
        )
