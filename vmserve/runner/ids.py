"""Token ids of a step that is launched before the host knows all of them."""

from __future__ import annotations

import torch

__all__ = ["known"]


def known(token_ids: torch.Tensor, drawn: torch.Tensor | None) -> torch.Tensor:
    """``token_ids`` int64 ``[rows]``, with each ``-1 - i`` replaced by ``drawn[i]``.

    Does not wait. ``drawn``: int64, on the same device; None: all are known.
    """
    if drawn is None:
        return token_ids
    rows = (-1 - token_ids).clamp_(min=0)
    return torch.where(token_ids < 0, drawn[rows], token_ids)
