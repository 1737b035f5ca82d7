"""Conversations of text: three kinds whose answers repeat what was given, and one that cannot.

Texts are our own: ``text.md``, and the functions of vmserve's modules.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from pathlib import Path

import vmserve

__all__ = ["OWN_TEXT", "TEXTS", "conversations"]

#: The text that is copied and summarised, and that `bench quality` scores.
OWN_TEXT = Path(__file__).with_name("text.md")
_PACKAGE = Path(vmserve.__file__).resolve().parent
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
_FORMS = ("story", "dialogue", "fairy tale", "letter", "newspaper report")


def _copying() -> Iterator[str]:
    for text in _passages(900):
        yield f"Repeat the following text word for word, and write nothing else.\n\n{text}"


def _summarising() -> Iterator[str]:
    for text in _passages(2500):
        yield f"Summarize the following text, quoting its most important sentences.\n\n{text}"


def _stories() -> Iterator[str]:
    for form in _FORMS:
        for topic in _TOPICS:
            yield f"Write a {form} about {topic}."


def _editing() -> Iterator[str]:
    """Functions with a local name to replace throughout."""
    for path in sorted(_PACKAGE.rglob("*.py")):
        source = path.read_text(encoding="utf-8")
        lines = source.splitlines(keepends=True)
        for node in ast.walk(ast.parse(source)):
            if not isinstance(node, ast.FunctionDef):
                continue
            code = "".join(lines[node.lineno - 1 : node.end_lineno]).strip()
            names = [each.arg for each in node.args.args if each.arg != "self"]
            if not 500 <= len(code) <= 1100 or not names:
                continue
            name = max(names, key=lambda each: len(re.findall(rf"\b{each}\b", code)))
            yield (
                f"Rename the variable `{name}` to `{name}_value` in this function, and write the "
                f"whole function.\n\n```python\n{code}\n```"
            )


def _passages(num_chars: int) -> Iterator[str]:
    """Paragraphs of the text together, as many as have about ``num_chars`` characters.

    First one after the other, then from the second paragraph on, and so forth.
    """
    paragraphs = OWN_TEXT.read_text(encoding="utf-8").split("\n\n")
    for first in range(len(paragraphs)):
        gathered = ""
        for paragraph in paragraphs[first:]:
            gathered += paragraph.replace("\n", " ") + "\n\n"
            if len(gathered) >= num_chars:
                yield gathered.strip()
                gathered = ""


#: Tasks of texts by name: a summary, and what makes the user's messages.
_TASKS: Mapping[str, tuple[str, Callable[[], Iterator[str]]]] = {
    "copying": ("repeat 900 characters word for word", _copying),
    "editing": ("rename a variable of a function", _editing),
    "summarising": ("summarise 2,500 characters with quotations", _summarising),
    "stories": ("write about something, with nothing to repeat", _stories),
}
TEXTS = {name: f"real text: {summary}" for name, (summary, _) in _TASKS.items()}


@cache
def conversations(kind: str) -> tuple[str, ...]:
    """The user's message of every conversation of a kind, always in the same order."""
    return tuple(dict.fromkeys(_TASKS[kind][1]()))
