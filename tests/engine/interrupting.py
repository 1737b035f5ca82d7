"""Raise an exception at one instruction of the package, as a signal's handler may."""

from __future__ import annotations

import dis
import itertools
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import vmserve

__all__ = ["count_instructions", "raise_at"]

_PACKAGE = str(Path(vmserve.__file__).parent)
#: Before the instruction after one of these, the interpreter calls handlers of signals.
_CHECKED = {"CALL", "CALL_FUNCTION_EX", "RESUME", "JUMP_BACKWARD"}


@cache
def _points(code: CodeType) -> frozenset[int]:
    """Offsets of the instructions at which a signal's handler may raise."""
    instructions = list(dis.get_instructions(code))
    pairs = itertools.pairwise(instructions)
    points = {after.offset for before, after in pairs if before.opname in _CHECKED}
    points |= {each.argval for each in instructions if each.opname == "JUMP_BACKWARD"}
    return frozenset(points)


class _Tracer:
    def __init__(self, number: int, error: type[BaseException]) -> None:
        self.left = number
        self.error = error
        self.place = ""

    def call(self, frame: FrameType, event: str, arg: Any) -> Any:
        if not frame.f_code.co_filename.startswith(_PACKAGE):
            return None
        frame.f_trace_opcodes = True
        return self.within

    def within(self, frame: FrameType, event: str, arg: Any) -> Any:
        if event == "opcode" and frame.f_lasti in _points(frame.f_code):
            self.left -= 1
            if self.left == 0:
                self.place = f"{frame.f_code.co_filename}:{frame.f_lineno} {frame.f_code.co_name}"
                sys.settrace(None)
                raise self.error("interrupted at " + self.place)
        return self.within


def _traced(tracer: _Tracer, call: Callable[[], Any]) -> Any:
    before = sys.gettrace()
    sys.settrace(tracer.call)
    try:
        return call()
    finally:
        sys.settrace(before)


def count_instructions(call: Callable[[], Any]) -> int:
    """At how many instructions of the package, in the course of ``call``, a signal may raise."""
    tracer = _Tracer(-1, KeyboardInterrupt)
    _traced(tracer, call)
    return -1 - tracer.left


def raise_at(number: int, error: type[BaseException], call: Callable[[], Any]) -> Any:
    """Call, and raise ``error`` at the so-manieth of these instructions, if there is one.

    Returns what the call returns; it may raise ``error``.
    """
    return _traced(_Tracer(number, error), call)
