"""When two greedy decodings agree: equal tokens, or a tie that rounding may break either way.

Kernels add in another order than the reference does, so logits differ in their last bits. Ours may
leave the reference's tokens only where the reference itself holds our token to be as good as its
own, within ``margin``; behind that, the two continue different texts and say nothing.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

__all__ = ["MARGINS", "disagreement"]

#: Logits of these models are below 32: half a step of bfloat16 there is 0.0625, and a few layers
#: of them add up; float32 has 2^-19.
MARGINS = {torch.float32: 1e-3, torch.float16: 0.05, torch.bfloat16: 0.4}

#: ``logits(token_ids)``: of the tokens that follow each, ``[tokens, vocab]``.
Logits = Callable[[list[int]], torch.Tensor]


def disagreement(
    prompt: list[int], ours: list[int], logits: Logits, margin: float
) -> tuple[int, float]:
    """How many of our tokens are the reference's until the first that is not, and by how much the
    reference prefers its own there (0.0 where all are equal).

    Raises ``AssertionError`` where that is more than ``margin``.
    """
    found = logits([*prompt, *ours[:-1]])[len(prompt) - 1 :].float()
    for position, (token, best) in enumerate(zip(ours, found.argmax(-1).tolist(), strict=True)):
        if best == token:
            continue
        gap = float(found[position, best] - found[position, token])
        assert gap <= margin, (
            f"token {position} is {token}, and the reference prefers {best} by {gap:.4f}, more "
            f"than {margin}"
        )
        return position, gap
    return len(ours), 0.0
