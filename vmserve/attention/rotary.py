"""Rotary position embedding of queries and keys (RoFormer, Su et al. 2021)."""

from __future__ import annotations

from typing import NamedTuple

import torch

__all__ = ["Rotary", "rotate"]


class Rotary(NamedTuple):
    """The rotations of one step's tokens; component i pairs with i + rotary_dim / 2.

    ``cos`` and ``signed_sin``: ``[tokens, 1, rotary_dim]`` in the dtype of q and k; the sine
    of the first half is negated.
    """

    cos: torch.Tensor
    signed_sin: torch.Tensor

    def rows(self, first: int, end: int) -> Rotary:
        """The rotations of the tokens ``first`` to ``end`` only."""
        return Rotary(self.cos[first:end], self.signed_sin[first:end])


def rotate(x: torch.Tensor, rotary: Rotary) -> torch.Tensor:
    """Rotate the first ``rotary_dim`` components of ``x`` ``[tokens, heads, head_dim]``; returns a
    new tensor."""
    rotary_dim = rotary.cos.shape[-1]
    if rotary_dim < x.shape[-1]:
        rotated = rotate(x[..., :rotary_dim], rotary)
        return torch.cat((rotated, x[..., rotary_dim:]), dim=-1)
    half = rotary_dim // 2
    return (x * rotary.cos).add_(x.roll(half, -1).mul_(rotary.signed_sin))
