"""The states of a step's sequences, for layers that torch computes and that keep no tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from vmserve.attention.base import RaggedBatch
from vmserve.memory.views import StatePages

if TYPE_CHECKING:
    import torch
    from numpy.typing import NDArray

__all__ = ["Applied", "StepStates"]


class Applied(NamedTuple):
    """The last layer whose states have the step's tokens, and what goes on from it."""

    layer: int
    #: Attention's result in that layer, ``[tokens, value_size]``.
    attended: torch.Tensor
    #: The residual, ``[tokens, hidden]``, to which ``attended`` is added.
    residual: torch.Tensor


@dataclass(eq=False)
class StepStates:
    """Sequences in the order of their rows in the ragged batch.

    A step that is tried again gets the same one: a state takes each token once, so the pass begins
    after the last layer that has done so.
    """

    pages: torch.Tensor
    #: Rows of ``pages``, int64 ``[num_sequences]``.
    rows: NDArray[np.int64]
    num_past: NDArray[np.int64]
    num_new: NDArray[np.int64]
    applied: Applied | None = field(default=None, repr=False)

    @staticmethod
    def of(kept: StatePages, batches: Sequence[RaggedBatch]) -> StepStates:
        """The states of ``batches``, whose rows follow each other."""
        places = [
            batch.places if batch.state_places is None else batch.state_places for batch in batches
        ]
        return StepStates(
            kept.pages,
            kept.table[np.concatenate(places), 0].astype(np.int64),
            np.concatenate([batch.num_past for batch in batches]),
            np.concatenate([batch.num_new for batch in batches]),
        )
