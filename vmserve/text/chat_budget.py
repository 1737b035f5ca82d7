"""A budget for rendering a chat template: time, and how much it may write.

The sandbox in which templates run limits what they can reach, but not how long they take: a few
nested loops can take for ever. Here the rendering thread checks the clock at each line of the
template's code, and counts what is written before it is joined.

NOTE: a single operation is not interrupted, and what a template computes without writing it is
bounded by time alone. Templates come from the model or from the command line, never from requests.
"""

from __future__ import annotations

import sys
import time
from types import FrameType, TracebackType
from typing import Any, Final

__all__ = ["OverBudgetError", "RenderBudget"]

#: File names that jinja2 gives to the code of a template that came as a text.
_TEMPLATE_FILES: Final = frozenset({"<template>", "<unknown>"})


class OverBudgetError(Exception):
    """The template takes too long or writes too much; the message says which."""


class RenderBudget:
    """Limits templates that this thread renders inside the ``with`` block.

    Raises :class:`OverBudgetError` from inside a template after ``seconds``, and once it has
    written ``num_chars``.
    """

    def __init__(self, seconds: float, num_chars: int) -> None:
        self._seconds = seconds
        self._num_chars = num_chars
        self._left = num_chars
        self._deadline = 0.0
        self._previous: Any = None

    def __enter__(self) -> RenderBudget:
        self._deadline = time.monotonic() + self._seconds
        self._left = self._num_chars
        self._previous = sys.gettrace()
        sys.settrace(self._enter_frame)
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        sys.settrace(self._previous)

    def _enter_frame(self, frame: FrameType, event: str, arg: Any) -> Any:
        self._look()  # a filter calls a function for each item
        return self._in_template if frame.f_code.co_filename in _TEMPLATE_FILES else None

    def _in_template(self, frame: FrameType, event: str, arg: Any) -> Any:
        if event == "line":
            self._look()
        elif event == "return" and isinstance(arg, str):  # a piece of the text, or a macro's
            self._left -= len(arg)
            if self._left < 0:
                raise OverBudgetError(f"it writes more than {self._num_chars} characters")
        return self._in_template

    def _look(self) -> None:
        if time.monotonic() > self._deadline:
            raise OverBudgetError(f"it did not finish within {self._seconds:g} seconds")
