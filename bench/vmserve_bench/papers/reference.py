"""Figures of the PagedAttention paper (Kwon et al., SOSP 2023), quoted for comparison."""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = [
    "PAPER_BATCHES",
    "PAPER_BEAM_GAIN",
    "PAPER_EXISTING_SHARE",
    "PAPER_PAGED_SHARE",
    "PAPER_RATE_OVER_MAX",
    "PAPER_RATE_OVER_ORACLE",
    "PAPER_REQUESTS_OVER_MAX",
    "PAPER_REQUESTS_OVER_ORACLE",
]

#: Section 6.2, OPT-13B on ShareGPT: ratios of the numbers of requests that run at once.
PAPER_REQUESTS_OVER_ORACLE = 2.2
PAPER_REQUESTS_OVER_MAX = 4.3
#: Section 6.2, ShareGPT: ratios of the request rates at similar latency, from and to.
PAPER_RATE_OVER_ORACLE = (1.7, 2.7)
PAPER_RATE_OVER_MAX = (2.7, 8.0)
#: Figure 13, OPT-13B: mean number of batched requests at 2 (ShareGPT) and 30 requests/s (Alpaca).
PAPER_BATCHES: Mapping[str, Mapping[str, float]] = MappingProxyType(
    {
        "sharegpt": {
            "Orca (Max)": 7.0,
            "Orca (Pow2)": 9.81,
            "Orca (Oracle)": 13.62,
            "paper": 30.42,
        },
        "alpaca": {
            "Orca (Max)": 7.0,
            "Orca (Pow2)": 43.24,
            "Orca (Oracle)": 72.75,
            "paper": 132.44,
        },
    }
)
#: Section 6.3, OPT-13B on Alpaca: the gain over Orca (Oracle) in basic sampling, and with 6 beams.
PAPER_BEAM_GAIN = (1.3, 2.3)
#: Figure 2: percent of KV memory that holds token states in existing systems, from and to.
#: PagedAttention's share is more than the second constant.
PAPER_EXISTING_SHARE = (20.4, 38.2)
PAPER_PAGED_SHARE = 96
