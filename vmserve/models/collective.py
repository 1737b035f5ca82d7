"""What ranks do together where torch computes them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import torch

__all__ = ["Collective"]


class Collective(Protocol):
    """The ranks of one forward pass, which all make the same calls in the same order.

    Calls raise :class:`~vmserve.errors.DriverError`, which is sticky, when a rank is lost.
    """

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        """Add the ranks' ``x``, which is contiguous, in its memory and its type."""

    def gather(self, x: torch.Tensor, widths: Sequence[int]) -> torch.Tensor:
        """Put the ranks' ``[rows, widths[rank]]`` side by side on rank 0; the others get no rows.

        Returns ``[rows, sum(widths)]``.
        """
