"""KV memory that one request holds and wastes: by kinds of layers, and with pages of equal size."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from benchmarks.kinds.counted import counted_bytes
from vmserve import _core
from vmserve.cli.planning.report import PRESETS
from vmserve.memory.kind_pages import KindPages, equal_pages, held_bytes, kind_pages, needed_bytes
from vmserve.memory.layout import CUDA_GRANULARITY, HOST_GRANULARITY
from vmserve.numbers.sizes import format_size
from vmserve_bench.lab import script

LENGTHS = (12, 200, 1000, 8000)
MODELS = ("gemma-3-27b", "gpt-oss-20b", "qwen3-next-80b-a3b", "deepseek-v3")
#: Granularity and tokens of a page (None: the planner's choice).
PAGES: dict[str, tuple[int, int | None]] = {
    "4 KiB, 16 tokens": (HOST_GRANULARITY, 16),
    "4 KiB": (HOST_GRANULARITY, None),
    "2 MiB": (CUDA_GRANULARITY, None),
}


def rows(lengths: Sequence[int] = LENGTHS) -> Iterator[dict[str, Any]]:
    """What is held by every model, page and length."""
    for model in MODELS:
        shapes = PRESETS[model].kinds()
        for pages, (granularity, page_tokens) in PAGES.items():
            kinds = kind_pages(shapes, granularity, page_tokens=page_tokens)
            for length in lengths:
                needed = needed_bytes(kinds, length)
                held = {
                    "slots": counted_bytes(kinds, length, _core.View.VIRTUAL),
                    "blocks": counted_bytes(kinds, length, _core.View.PAGED),
                    "whole": sum(_without_window(kind).held_bytes(length) for kind in kinds),
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


def _without_window(kind: KindPages) -> KindPages:
    """The kind if one page has all layers, so that windows give nothing up."""
    shape = replace(kind.shape, window=None, head_slack_tokens=0)
    return KindPages(shape, kind.page_bytes, kind.page_tokens).in_blocks(16)


def held(way: str) -> script.Cell:
    def cell(row: dict[str, Any]) -> str:
        if way == "whole" and row["whole_bytes"] == row["blocks_bytes"]:
            return ""
        more = way in ("slots", "blocks") and row[f"{way}_bytes"] > row["equal_bytes"]
        return f"{format_size(row[f'{way}_bytes'])} ({row[f'{way}_waste']:.1%}){'*' * more}"

    return cell


TITLE = "{}: held by one request, and the share that it wastes"
COLUMNS: dict[str, script.Cell] = {
    "pages": "{pages}",
    "tokens/page": "{page_tokens}",
    "tokens": "{num_tokens:,}",
    "needed": lambda row: format_size(row["needed_bytes"]),
    "slots": held("slots"),
    "block tables": held("blocks"),
    "one page for all layers": held("whole"),
    "vLLM's groups": held("equal"),
}
NOTE = "* more than vLLM's groups hold. One page for all layers: where it holds more."
