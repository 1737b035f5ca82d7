"""Rows of values, one of each axis, so that every pair of values of two axes is in some row."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

__all__ = ["Pair", "Row", "covering_rows", "pairs_of"]

Row = dict[str, Any]
#: (axis, value), (axis, value), of which the first axis comes first.
Pair = tuple[tuple[str, Any], tuple[str, Any]]
#: Rows that are tried for each that is taken.
_CANDIDATES = 12
_ATTEMPTS = 500


def pairs_of(row: Row) -> set[Pair]:
    return set(itertools.combinations(row.items(), 2))


def covering_rows(
    axes: Mapping[str, Sequence[Any]], allowed: Callable[[Row], bool], seed: int
) -> list[Row]:
    """Rows with every pair that an allowed row can have; greedy, so about as few as there can be.

    ``allowed`` is asked about whole rows. Other seeds give other rows. A pair that no attempt
    finds an allowed row for counts as forbidden.
    """
    rng = random.Random(seed)

    def draw(fixed: Row) -> Row | None:
        for _ in range(_ATTEMPTS):
            row = {name: fixed.get(name, rng.choice(values)) for name, values in axes.items()}
            if allowed(row):
                return row
        return None

    wanted = [
        ((a, x), (b, y))
        for (a, xs), (b, ys) in itertools.combinations(axes.items(), 2)
        for x, y in itertools.product(xs, ys)
    ]
    missing = set(wanted)
    rows: list[Row] = []
    for first in wanted:
        if first not in missing:
            continue
        drawn = [row for _ in range(_CANDIDATES) if (row := draw(dict(first))) is not None]
        if not drawn:
            continue
        best = max(drawn, key=lambda row: len(pairs_of(row) & missing))
        missing -= pairs_of(best)
        rows.append(best)
    return rows
