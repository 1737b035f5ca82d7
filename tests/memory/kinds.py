"""A small memory of several kinds of layers, and steps on it from their plan to their end."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from tests.memory.model_types import Kind, Op, Shape
from tests.memory.rig import Layers, Options, Rig
from vmserve._core import ZeroPolicy

KINDS = (Layers(0, 1), Layers(6, 2), Layers(11, 1))
WHOLE_GROUPS = sum(kind.groups for kind in KINDS)
#: The kind after these, with a state, and the tokens between its checkpoints.
STATE = len(KINDS)
CHECKPOINT_TOKENS = 8

SHAPE = Shape(block_tokens=4, blocks_per_page=1, max_seqs=6, num_slots=3, max_len=40, max_pages=32)


def make_kinds(
    *, has_state: bool = False, files: Path | None = None, limit_pages: int = 16, **options: Any
) -> Rig:
    """``options``: of the memory's shape, or its other ones."""
    shape = {name: options.pop(name) for name in list(options) if hasattr(SHAPE, name)}
    options = {"zero_policy": ZeroPolicy.ALWAYS, "persists": files is not None} | options
    return Rig(
        Options(
            replace(SHAPE, **shape),
            limit_pages,
            KINDS,
            CHECKPOINT_TOKENS if has_state else 0,
            **options,
        ),
        files=files,
    )


def grow(seq: int, num_tokens: int) -> Op:
    return Op(Kind.GROW, seq, num_tokens)


def opened(rig: Rig, tokens: Sequence[int], *, paged: bool = False) -> int:
    seq = rig.open(paged=paged, stream=tokens, known=len(tokens))
    assert seq is not None
    return seq


def begin(rig: Rig, *ops: Op) -> int:
    """A step that runs."""
    assert rig.step(ops)
    rig.check()
    return rig.model.begun


def do(rig: Rig, *ops: Op) -> None:
    rig.complete(begin(rig, *ops))
    rig.check()


def attached(rig: Rig, seq: int) -> list[Op]:
    """All that the cache has of it."""
    found = rig.match(seq)
    return [Op(Kind.ATTACH, seq, found)] if found else []


def start(rig: Rig, tokens: Sequence[int], *, paged: bool = False, to: int = 0) -> int:
    """A sequence that has computed its tokens, or those up to `to`, after what is cached."""
    seq = opened(rig, tokens, paged=paged)
    do(rig, *attached(rig, seq), grow(seq, to or len(tokens)))
    return seq


def matched(rig: Rig, tokens: Sequence[int]) -> int:
    """What a request of these tokens would find."""
    seq = opened(rig, tokens, paged=True)
    found = rig.match(seq)
    rig.release(seq)
    return found


def blocks_of(rig: Rig, kind: int, seq: int) -> list[int]:
    return [int(block) for block in rig.core.blocks(seq, kind)]


def used_pages(rig: Rig) -> list[int]:
    return [stats.used_pages for stats in rig.core.kind_stats()]
