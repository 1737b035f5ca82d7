"""Figures of the PagedAttention paper, for comparison only.

Kwon et al., "Efficient Memory Management for Large Language Model Serving with PagedAttention",
SOSP 2023, sections 6.3 and 6.4.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["PAPER_BLOCK_TOKENS", "PAPER_PREFIX_SPEEDUP", "PAPER_SAVED_PERCENT", "SHOT_TOKENS"]

#: The paper's block size, in tokens, where it does not vary it.
PAPER_BLOCK_TOKENS = 16
#: Section 6.3, figure 15, OPT-13B: percent of blocks saved by sharing, at the least and the most of
#: the paper's widths (2, 4, 6).
PAPER_SAVED_PERCENT: Mapping[tuple[str, str], tuple[float, float]] = MappingProxyType(
    {
        ("alpaca", "parallel"): (6.1, 9.8),
        ("alpaca", "beam"): (37.6, 55.2),
        ("sharegpt", "parallel"): (16.2, 30.5),
        ("sharegpt", "beam"): (44.3, 66.3),
    }
)
#: Section 6.4, figure 16: tokens of the common prefix, WMT16 English to German, LLaMA-13B.
SHOT_TOKENS: Mapping[str, int] = MappingProxyType({"one-shot": 80, "five-shot": 341})
#: Section 6.4, figure 16: throughput over Orca (Oracle), another system, not over itself without
#: sharing.
PAPER_PREFIX_SPEEDUP: Mapping[str, float] = MappingProxyType({"one-shot": 1.67, "five-shot": 3.58})
