"""KV memory that one request holds and wastes: by kinds of layers, and with pages of equal size."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from vmserve_bench.lab.table import SectionResult, Table

from benchmarks.kinds.counted import counted_bytes
from vmserve import _core
from vmserve.cli.planning.report import PRESETS
from vmserve.memory.kind_pages import (
    KindPages,
    KindShape,
    equal_pages,
    held_bytes,
    kind_pages,
    needed_bytes,
)
from vmserve.memory.layout import CUDA_GRANULARITY, HOST_GRANULARITY
from vmserve.numbers.sizes import format_size

LENGTHS = (12, 200, 1000, 8000)
MODELS = ("gemma-3-27b", "gpt-oss-20b", "qwen3-next-80b-a3b", "deepseek-v3")
#: Granularity and tokens of a page (None: the planner's choice).
PAGES: dict[str, tuple[int, int | None]] = {
    "4 KiB, 16 tokens": (HOST_GRANULARITY, 16),
    "4 KiB": (HOST_GRANULARITY, None),
    "2 MiB": (CUDA_GRANULARITY, None),
}
_WAYS = ("slots", "blocks", "whole", "equal")


def waste(lengths: Sequence[int] = LENGTHS) -> SectionResult:
    """The section: rows of every model, page and length, and a table of each model."""
    rows = list(_rows(lengths))
    return SectionResult({"rows": rows}, tuple(_table(model, rows) for model in MODELS))


def _rows(lengths: Sequence[int]) -> Iterator[dict[str, Any]]:
    for model in MODELS:
        shapes = PRESETS[model].kinds()
        for pages, (granularity, page_tokens) in PAGES.items():
            kinds = kind_pages(shapes, granularity, page_tokens=page_tokens)
            for length in lengths:
                needed = needed_bytes(kinds, length)
                held = {
                    "slots": counted_bytes(kinds, length, _core.View.VIRTUAL),
                    "blocks": counted_bytes(kinds, length, _core.View.PAGED),
                    "whole": _whole(kinds, length),
                    "equal": held_bytes(equal_pages(shapes), length),
                }
                yield {
                    "model": model,
                    "pages": pages,
                    "page_tokens": max(kind.page_tokens for kind in kinds),
                    "num_tokens": length,
                    "needed_bytes": needed,
                    **{f"{way}_bytes": size for way, size in held.items()},
                    **{f"{way}_waste": 1 - needed / size for way, size in held.items()},
                }


def _whole(kinds: Sequence[KindPages], length: int) -> int:
    """Bytes held if one page has all layers, so that windows give nothing up."""
    return sum(
        KindPages(_without_window(kind.shape), kind.page_bytes, kind.page_tokens)
        .in_blocks(16)
        .held_bytes(length)
        for kind in kinds
    )


def _without_window(shape: KindShape) -> KindShape:
    return KindShape(
        num_layers=shape.num_layers, token_bytes=shape.token_bytes, state_bytes=shape.state_bytes
    )


def _table(model: str, rows: Sequence[dict[str, Any]]) -> Table:
    return Table(
        title=f"{model}: held by one request, and the share that it wastes",
        columns=(
            *("pages", "tokens/page", "tokens", "needed", "slots", "block tables"),
            *("one page for all layers", "vLLM's groups"),
        ),
        rows=tuple(
            (
                row["pages"],
                f"{row['page_tokens']}",
                f"{row['num_tokens']:,}",
                format_size(row["needed_bytes"]),
                *(_cell(row, way) for way in _WAYS),
            )
            for row in rows
            if row["model"] == model
        ),
        note="* more than vLLM's groups hold. One page for all layers: where it holds more.",
    )


def _cell(row: dict[str, Any], way: str) -> str:
    if way == "whole" and row["whole_bytes"] == row["blocks_bytes"]:
        return ""
    mark = "*" if way in ("slots", "blocks") and row[f"{way}_bytes"] > row["equal_bytes"] else ""
    return f"{format_size(row[f'{way}_bytes'])} ({row[f'{way}_waste']:.1%}){mark}"
