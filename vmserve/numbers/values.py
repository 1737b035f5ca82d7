"""Values that are made in each step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar, dataclass_transform

__all__ = ["step_value"]

_Value = TypeVar("_Value")


@dataclass_transform(frozen_default=True, eq_default=False)
def step_value(cls: type[_Value]) -> type[_Value]:
    """A dataclass that only the type checker keeps from being changed.

    ``frozen=True`` makes each field five times as dear, and a step makes a dozen such values.
    """
    return dataclass(eq=False)(cls)
