"""Values that are made in each step, and lists that are made for each request."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TypeVar, dataclass_transform

from vmserve._core import untrack

__all__ = ["step_value", "token_list"]

_Value = TypeVar("_Value")


@dataclass_transform(frozen_default=True, eq_default=False)
def step_value(cls: type[_Value]) -> type[_Value]:
    """A dataclass that only the type checker keeps from being changed.

    ``frozen=True`` makes each field five times as dear, and a step makes a dozen such values.
    """
    return dataclass(eq=False)(cls)


def token_list(ids: Iterable[int]) -> list[int]:
    """A list of token ids that the garbage collector does not visit.

    It would visit each id of each prompt and of each choice while everything else waits. What is
    put into the list later has to be a number too.
    """
    tokens = list(ids)
    untrack(tokens)
    return tokens
