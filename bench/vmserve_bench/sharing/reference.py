"""PagedAttention's figures (SOSP 2023, sections 6.3 and 6.4), for comparison only."""

from __future__ import annotations

__all__ = ["PAPER_PREFIX_SPEEDUP", "PAPER_SAVED_PERCENT", "SHOT_TOKENS"]

#: Figure 15, OPT-13B: percent of blocks saved by sharing, at the least and the most of the widths.
PAPER_SAVED_PERCENT = {
    ("alpaca", "parallel"): (6.1, 9.8),
    ("alpaca", "beam"): (37.6, 55.2),
    ("sharegpt", "parallel"): (16.2, 30.5),
    ("sharegpt", "beam"): (44.3, 66.3),
}
#: Figure 16: tokens of the common prefix, WMT16 English to German, LLaMA-13B; and throughput over
#: Orca (Oracle), another system, not over itself without sharing.
SHOT_TOKENS = {"one-shot": 80, "five-shot": 341}
PAPER_PREFIX_SPEEDUP = {"one-shot": 1.67, "five-shot": 3.58}
