"""Conversations of four kinds: three whose answers repeat what was given, and one that cannot.

Texts are the repository's own: ``vmserve/assets/quality/text.md`` and functions of ``vmserve/``.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

__all__ = ["WORKLOADS", "conversations"]

_PACKAGE = Path(__file__).resolve().parents[2] / "vmserve"
WORKLOADS = ("copying", "editing", "summarising", "stories")
_TOPICS = (
    "a fox who learns to read maps",
    "two brothers who repair a bridge",
    "a clock that runs backwards",
    "the last baker of a mountain village",
    "a girl who collects echoes",
    "an old ship in a desert",
    "a letter that arrives forty years late",
    "a gardener on the moon",
)


def conversations(workload: str, num: int) -> list[str]:
    """The user's message of each of ``num`` conversations."""
    made = {
        "copying": _copying,
        "editing": _editing,
        "summarising": _summarising,
        "stories": _stories,
    }[workload]()
    return [message for message, _ in zip(made, range(num), strict=False)]


def _copying() -> Iterator[str]:
    for text in _passages(900):
        yield f"Repeat the following text word for word, and write nothing else.\n\n{text}"


def _summarising() -> Iterator[str]:
    for text in _passages(2500):
        yield f"Summarize the following text, quoting its most important sentences.\n\n{text}"


def _stories() -> Iterator[str]:
    for topic in _TOPICS:
        yield f"Write a story about {topic}."


def _editing() -> Iterator[str]:
    """Functions with a local name to replace throughout."""
    for path in sorted(_PACKAGE.rglob("*.py")):
        source = path.read_text(encoding="utf-8")
        for node in ast.walk(ast.parse(source)):
            if not isinstance(node, ast.FunctionDef):
                continue
            code = ast.get_source_segment(source, node) or ""
            names = [each.arg for each in node.args.args if each.arg != "self"]
            if not 500 <= len(code) <= 1100 or not names:
                continue
            name = max(names, key=lambda each: len(re.findall(rf"\b{each}\b", code)))
            yield (
                f"Rename the variable `{name}` to `{name}_value` in this function, and write the "
                f"whole function.\n\n```python\n{code}\n```"
            )


def _passages(num_chars: int) -> Iterator[str]:
    """Paragraphs of the text together, as many as have about ``num_chars`` characters."""
    text = (_PACKAGE / "assets" / "quality" / "text.md").read_text(encoding="utf-8")
    gathered = ""
    for paragraph in text.split("\n\n"):
        gathered += paragraph.replace("\n", " ") + "\n\n"
        if len(gathered) >= num_chars:
            yield gathered.strip()
            gathered = ""
