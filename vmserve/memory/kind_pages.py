"""What each kind of layers takes of a pool, by arithmetic; and the same with pages of equal size.

Lengths are those of a sequence that decodes: its last token sees the window that ends with it, and
pages wholly before that are given up. While a prompt is computed, its chunk is held in addition
(``most_bytes``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from vmserve.memory.layout import CUDA_GRANULARITY, KVLayout, LayerKind, plan_layout
from vmserve.numbers.sizes import format_size

__all__ = [
    "KindPages",
    "KindShape",
    "equal_pages",
    "held_bytes",
    "kind_pages",
    "most_bytes",
    "most_units",
    "needed_bytes",
    "pages_of_layout",
]

#: Ratio of layers of the commonest kind to those of the rarest up to which groups have one size.
_ONE_GROUP_EACH = 1.5


@dataclass(frozen=True, kw_only=True)
class KindShape:
    """Layers of one kind; bytes are those of one layer.

    A token takes ``token_bytes``, for the last ``window`` tokens (None: all). Or the kind has no
    tokens, and a sequence takes ``state_bytes`` however long it is.
    """

    num_layers: int
    token_bytes: int = 0
    window: int | None = None
    state_bytes: int = 0
    #: Tokens before the window which are kept too.
    head_slack_tokens: int = 0

    @property
    def kept_tokens(self) -> int | None:
        return None if self.window is None else self.window + self.head_slack_tokens

    @property
    def name(self) -> str:
        if self.state_bytes:
            return "state"
        return "all" if self.window is None else f"window {self.window}"

    def needed_bytes(self, num_tokens: int) -> int:
        """Bytes that a sequence of ``num_tokens`` fills."""
        seen = num_tokens if self.window is None else min(num_tokens, self.window)
        return self.num_layers * (seen * self.token_bytes + self.state_bytes)


@dataclass(frozen=True)
class KindPages:
    """Pages of one kind. ``page_bytes``: of one page over all its layers. ``page_tokens``: 0 for
    the page of a state."""

    shape: KindShape
    page_bytes: int
    page_tokens: int

    def pages(self, num_tokens: int) -> int:
        """Pages of a sequence of ``num_tokens``."""
        if not self.page_tokens:
            return 1
        kept = self.shape.kept_tokens
        behind = 0 if kept is None else max(0, num_tokens - kept)
        return -(-num_tokens // self.page_tokens) - behind // self.page_tokens

    def most_pages(self, num_tokens: int, chunk_tokens: int) -> int:
        """The most while its prompt is read, ``chunk_tokens`` a step, and while it decodes.

        The states are two for a moment: a checkpoint is kept, and the next step copies it.
        """
        if not self.page_tokens:
            return 2
        return most_units(num_tokens, self.page_tokens, self.shape.kept_tokens, chunk_tokens)

    def needs(self, num_pages: int) -> str:
        """What so many pages are, for an error."""
        return (
            f"{format_size(num_pages * self.page_bytes)} in {num_pages:,} pages of "
            f"{format_size(self.page_bytes)} ({self.shape.name}: {self.shape.num_layers} layers)"
        )

    def held_bytes(self, num_tokens: int) -> int:
        return self.pages(num_tokens) * self.page_bytes

    def in_blocks(self, block_tokens: int) -> KindPages:
        """The same pages as sequences with block tables take them: block by block."""
        if not self.page_tokens:
            return self
        block_bytes = self.page_bytes // self.page_tokens * block_tokens
        return replace(self, page_bytes=block_bytes, page_tokens=block_tokens)


def most_units(num_tokens: int, unit: int, window: int | None, chunk_tokens: int) -> int:
    """Most pages or blocks of ``unit`` tokens of a sequence of up to ``num_tokens``.

    A step needs its chunk and the window of its first token, wherever they begin in a unit.
    """
    units = -(-num_tokens // unit)
    if window is None:
        return units
    return min(units, (window + chunk_tokens - 3) // unit + 2)


def pages_of_layout(layout: KVLayout, kinds: Sequence[LayerKind]) -> tuple[KindPages, ...]:
    """The pages of a pool in this layout. No ``kinds``: one page has all layers."""
    of_tokens = [kind for kind in kinds if not kind.has_state]
    of_tokens = of_tokens or [LayerKind(tuple(range(layout.num_layers)), None)]
    pages = [
        KindPages(
            KindShape(
                num_layers=part.num_layers,
                token_bytes=part.total_page_bytes // part.num_layers // part.page_tokens,
                window=kind.window,
                head_slack_tokens=kind.head_slack_tokens,
            ),
            part.total_page_bytes,
            part.page_tokens,
        )
        for kind, part in zip(of_tokens, layout.of_kinds(of_tokens).parts, strict=True)
    ]
    if layout.state_bytes:
        # One page has the states of all layers, of which the layout knows no number.
        shape = KindShape(num_layers=1, state_bytes=layout.state_bytes)
        pages.append(KindPages(shape, layout.state_bytes, 0))
    return tuple(pages)


def needed_bytes(kinds: Sequence[KindPages], num_tokens: int) -> int:
    return sum(kind.shape.needed_bytes(num_tokens) for kind in kinds)


def held_bytes(kinds: Sequence[KindPages], num_tokens: int) -> int:
    return sum(kind.held_bytes(num_tokens) for kind in kinds)


def most_bytes(kinds: Sequence[KindPages], num_tokens: int, chunk_tokens: int) -> int:
    return sum(kind.most_pages(num_tokens, chunk_tokens) * kind.page_bytes for kind in kinds)


def kind_pages(
    shapes: Sequence[KindShape],
    granularity: int,
    *,
    page_tokens: int | None = None,
    page_bytes: int | None = None,
    block_tokens: int = 16,
) -> tuple[KindPages, ...]:
    """The pages of kinds that share one pool; a page has equally many tokens in all of them.

    On the host a page is a multiple of ``granularity`` for each layer (``page_bytes``, if given),
    with coarse pages of a GPU for all layers of the kind together. The states of a sequence are one
    page. ``page_tokens`` None: the most that a kind would choose for itself
    (:func:`~vmserve.memory.layout.plan_layout`).

    Raises :class:`~vmserve.errors.ConfigurationError` for sizes that do not fit.
    """

    def pages(shape: KindShape, tokens: int | None) -> tuple[int, int]:
        if shape.state_bytes:
            return -(-shape.state_bytes * shape.num_layers // granularity) * granularity, 0
        together = shape.num_layers if granularity >= CUDA_GRANULARITY else 1
        layout = plan_layout(
            shape.num_layers,
            1,
            shape.token_bytes // 2,
            "float16",
            granularity,
            layers_per_group=together,
            keys_only=True,
            page_tokens=tokens,
            page_bytes=page_bytes,
            block_tokens=block_tokens,
        )
        return layout.total_page_bytes, layout.page_tokens

    tokens = page_tokens or max(pages(shape, None)[1] for shape in shapes) or None
    return tuple(KindPages(shape, *pages(shape, tokens)) for shape in shapes)


def equal_pages(shapes: Sequence[KindShape], *, block_tokens: int = 16) -> tuple[KindPages, ...]:
    """The same kinds in pages of one size, after the rule of vLLM's hybrid manager.

    Layers of a kind are put in groups of equally many layers, padded where they do not divide; a
    group takes one page for each block. A block of a layer has one size in all kinds: blocks of
    narrower layers have more tokens, or are padded; those of attention grow, in steps of
    ``block_tokens``, until a state fits, which is padded. The source: vLLM of 2026,
    ``vllm/v1/core/kv_cache_utils.py`` and, for states, ``vllm/platforms/interface.py``.
    """
    state_bytes = max(shape.state_bytes for shape in shapes)
    widest = max(shape.token_bytes for shape in shapes)
    block = block_tokens
    if state_bytes:
        block *= -(-state_bytes // (block_tokens * widest))
    layer_bytes = block * widest

    def tokens(shape: KindShape) -> int:
        if shape.state_bytes:
            return 0
        times, rest = divmod(layer_bytes, block * shape.token_bytes)
        return block if rest else block * times

    counts = [shape.num_layers for shape in shapes]
    group = max(counts) if max(counts) < _ONE_GROUP_EACH * min(counts) else min(counts)
    return tuple(
        KindPages(shape, -(-shape.num_layers // group) * group * layer_bytes, tokens(shape))
        for shape in shapes
    )
