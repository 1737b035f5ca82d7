"""Layout arithmetic of the probe: how layers, tokens and pages lie in a slot.

One layer group is stored token by token, ``[token, layer_in_group, 2, kv_heads, head_dim]``,
or with K and V apart as ``[token, kv_heads, head_dim]``. A slot is a whole number of pages,
and a page a whole number of tokens, so that one token stride holds over the whole slot.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ModelShape:
    """Attention geometry of a model; ``dtype_bytes`` is 2 for bf16."""

    name: str
    num_layers: int
    q_heads: int
    kv_heads: int
    head_dim: int
    dtype_bytes: int = 2

    @property
    def row_bytes(self) -> int:
        """Bytes of K (or of V) of one token in one layer."""
        return self.kv_heads * self.head_dim * self.dtype_bytes

    def read_bytes(self, num_tokens: int) -> int:
        """K and V bytes that one layer's attention must read for ``num_tokens`` tokens."""
        return 2 * self.row_bytes * num_tokens


@dataclass(frozen=True)
class SlotLayout:
    """How a group of layers lies in a slot; ``split_kv`` keeps K and V in separate regions."""

    shape: ModelShape
    layers_per_group: int
    split_kv: bool = False

    def __post_init__(self) -> None:
        if self.layers_per_group < 1 or self.shape.num_layers % self.layers_per_group:
            raise ValueError(
                f"{self.shape.num_layers} layers do not divide into groups of "
                f"{self.layers_per_group}"
            )
        if self.split_kv and self.layers_per_group != 1:
            raise ValueError("K and V apart is only laid out for one layer per group")

    @property
    def label(self) -> str:
        """A short name: ``K|V`` or the number of layers per group."""
        return "K|V" if self.split_kv else str(self.layers_per_group)

    @property
    def token_stride_bytes(self) -> int:
        """Bytes from one token's K to the next token's K of the same layer."""
        parts = 1 if self.split_kv else 2 * self.layers_per_group
        return parts * self.shape.row_bytes

    def page_tokens(self, page_bytes: int) -> int:
        """Tokens of one page; ValueError when a page does not hold a whole number of them."""
        tokens, rest = divmod(page_bytes, self.token_stride_bytes)
        if rest or not tokens:
            raise ValueError(
                f"a page of {page_bytes} bytes does not hold whole tokens of "
                f"{self.token_stride_bytes} bytes"
            )
        return tokens

    def region_bytes(self, num_tokens: int) -> int:
        """Bytes of one group over ``num_tokens`` tokens, K and V together."""
        return num_tokens * self.token_stride_bytes * (2 if self.split_kv else 1)

    def k_offset(self, layer: int) -> int:
        """Byte offset of ``layer``'s K (index in the group) from the group's region."""
        if not 0 <= layer < self.layers_per_group:
            raise ValueError(f"layer {layer} is not in a group of {self.layers_per_group}")
        return 2 * layer * self.shape.row_bytes

    def v_offset(self, layer: int, num_tokens: int) -> int:
        """Byte offset of ``layer``'s V in a region of ``num_tokens`` tokens."""
        if self.split_kv:
            return num_tokens * self.token_stride_bytes
        return self.k_offset(layer) + self.shape.row_bytes


@dataclass(frozen=True)
class Instance:
    """One layer's K and V in the pool: byte offsets of the first token of slot 0."""

    k_offset: int
    v_offset: int


def candidate_layouts(shape: ModelShape) -> list[SlotLayout]:
    """K and V apart, then 1, 2, 4 and all layers per group, as far as they divide the model."""
    sizes = [size for size in (1, 2, 4) if shape.num_layers % size == 0]
    if shape.num_layers not in sizes:
        sizes.append(shape.num_layers)
    return [SlotLayout(shape, 1, split_kv=True), *(SlotLayout(shape, size) for size in sizes)]


def place_instances(layout: SlotLayout, num_tokens: int, count: int) -> list[Instance]:
    """Where ``count`` layers lie when the groups follow one another in one pool."""
    instances = []
    for index in range(count):
        group, layer = divmod(index, layout.layers_per_group)
        base = group * layout.region_bytes(num_tokens)
        instances.append(
            Instance(base + layout.k_offset(layer), base + layout.v_offset(layer, num_tokens))
        )
    return instances


def pool_bytes_needed(layout: SlotLayout, num_tokens: int, count: int) -> int:
    """Bytes of the pool that ``count`` layers occupy, whole groups counted."""
    groups = -(-count // layout.layers_per_group)
    return groups * layout.region_bytes(num_tokens)


def instances_to_defeat_cache(read_bytes: int, cache_bytes: int, most: int) -> int:
    """Layers to rotate through so that each pass reads four times the cache; 1..``most``."""
    return max(1, min(most, -(-4 * cache_bytes // read_bytes)))


def round_up(value: int, multiple: int) -> int:
    """The smallest multiple of ``multiple`` that is at least ``value``."""
    return -(-value // multiple) * multiple
