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

#: ``logits(token_ids)``: of the token that follows, ``[vocab]``.
Logits = Callable[[list[int]], torch.Tensor]


def disagreement(
    prompt: list[int], ours: list[int], logits: Logits, margin: float
) -> tuple[int, float]:
    """How many of our tokens are the reference's until the first that is not, and by how much the
    reference prefers its own there (0.0 where all are equal).

    Raises ``AssertionError`` where that is more than ``margin``.
    """
    tokens = list(prompt)
    for position, token in enumerate(ours):
        found = logits(tokens).float()
        best = int(found.argmax())
        if best != token:
            gap = float(found[best] - found[token])
            assert gap <= margin, (
                f"token {position} is {token}, and the reference prefers {best} by {gap:.4f}, "
                f"more than {margin}"
            )
            return position, gap
        tokens.append(token)
    return len(ours), 0.0
