"""``vmserve plan``: what kinds of layers take, and what requests of some lengths waste."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rich.console import Group
from rich.table import Table

from vmserve.memory.kind_pages import KindPages, held_bytes, most_bytes, needed_bytes
from vmserve.numbers.sizes import format_size

if TYPE_CHECKING:
    from rich.console import RenderableType

__all__ = ["KindsReport"]


@dataclass(frozen=True, kw_only=True)
class KindsReport:
    """Pages by kind, and what requests of ``lengths`` tokens hold; prints itself with rich.

    ``chunk_tokens``: of a prompt that a step reads, held besides the window before them.
    ``equal``: the same kinds in pages of one size (:func:`~vmserve.memory.kind_pages.equal_pages`).
    """

    name: str
    kinds: tuple[KindPages, ...]
    equal: tuple[KindPages, ...]
    block_tokens: int
    lengths: tuple[int, ...]
    chunk_tokens: int
    limit_bytes: int | None = None
    max_len: int | None = None

    def to_dict(self) -> dict[str, Any]:
        return {
            "kinds": [self._kind(kind) for kind in self.kinds],
            "equal_pages": [{"kind": kind.shape.name, **_size(kind)} for kind in self.equal],
            "requests": [self._request(length) for length in self.lengths],
        }

    def _kind(self, kind: KindPages) -> dict[str, Any]:
        shape = kind.shape
        most = None if self.max_len is None else kind.most_pages(self.max_len, self.chunk_tokens)
        return {
            "kind": shape.name,
            "num_layers": shape.num_layers,
            "token_bytes": shape.num_layers * shape.token_bytes,
            "state_bytes": shape.num_layers * shape.state_bytes,
            "window": shape.window,
            **_size(kind),
            "max_len_pages": most,
            "max_len_bytes": None if most is None else most * kind.page_bytes,
        }

    def _ways(self) -> Iterator[tuple[str, Sequence[KindPages]]]:
        yield "slots", self.kinds
        yield "blocks", [kind.in_blocks(self.block_tokens) for kind in self.kinds]
        yield "equal", self.equal

    def _request(self, length: int) -> dict[str, Any]:
        needed = needed_bytes(self.kinds, length)
        held = {way: held_bytes(kinds, length) for way, kinds in self._ways()}
        return {
            "num_tokens": length,
            "needed_bytes": needed,
            "most_bytes": most_bytes(self.kinds, length, self.chunk_tokens),
            **{f"{way}_bytes": size for way, size in held.items()},
            **{f"{way}_waste": 1 - needed / size for way, size in held.items()},
        }

    def __rich__(self) -> RenderableType:
        parts: list[RenderableType] = [self._kinds_table()]
        if self.lengths:
            parts.append(self._requests_table())
        return Group(*parts)

    def _kinds_table(self) -> Table:
        longest = "" if self.max_len is None else f" at {self.max_len:,}"
        table = Table(title=f"{self.name}: kinds of layers", caption=self._room())
        table.add_column("kind")
        for heading in ("layers", "a token", "a request", "page", "tokens/page"):
            table.add_column(heading, justify="right")
        for heading in (f"most pages{longest}", f"most bytes{longest}"):
            table.add_column(heading, justify="right")
        for kind in self.kinds:
            values = self._kind(kind)
            table.add_row(
                values["kind"],
                f"{values['num_layers']}",
                _bytes(values["token_bytes"]),
                _bytes(values["state_bytes"]),
                format_size(kind.page_bytes),
                f"{kind.page_tokens:,}" if kind.page_tokens else "",
                "" if self.max_len is None else f"{values['max_len_pages']:,}",
                "" if self.max_len is None else format_size(values["max_len_bytes"]),
            )
        return table

    def _room(self) -> str | None:
        if self.limit_bytes is None or self.max_len is None:
            return None
        fitting = self.limit_bytes // held_bytes(self.kinds, self.max_len)
        return (
            f"{fitting:,} requests of {self.max_len:,} tokens fit in "
            f"{format_size(self.limit_bytes)} while they decode"
        )

    def _requests_table(self) -> Table:
        block = max(kind.page_tokens for kind in self.equal)
        table = Table(
            title=f"{self.name}: what one request holds, and the share of it that is wasted",
            caption=f"slots: whole pages. at most: while the prompt is read, {self.chunk_tokens:,} "
            f"tokens a step. block tables: blocks of {self.block_tokens} tokens.\n"
            f"equal pages: as vLLM groups layers, in blocks of up to {block:,} tokens.",
        )
        for heading in ("tokens", "needed", "at most", "slots", "block tables", "equal pages"):
            table.add_column(heading, justify="right")
        for length in self.lengths:
            values = self._request(length)
            table.add_row(
                f"{length:,}",
                format_size(values["needed_bytes"]),
                format_size(values["most_bytes"]),
                *(
                    f"{format_size(values[f'{way}_bytes'])} ({values[f'{way}_waste']:.1%})"
                    for way, _ in self._ways()
                ),
            )
        return table


def _size(kind: KindPages) -> dict[str, int]:
    return {"page_bytes": kind.page_bytes, "page_tokens": kind.page_tokens}


def _bytes(size: int) -> str:
    return format_size(size) if size else ""
