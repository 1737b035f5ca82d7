"""Published figures, quoted for comparison and never mixed with our own.

* PagedAttention: Kwon et al., "Efficient Memory Management for Large Language Model Serving
  with PagedAttention", SOSP 2023.
* vAttention: Prabhu et al., "vAttention: Dynamic Memory Management for Serving LLMs without
  PagedAttention", arXiv 2405.04437; measured on an NVIDIA A100.
* kvcached: ``benchmarks/bench_idle_footprint/README.md`` of ovg-project/kvcached at 5315e343;
  measured on an NVIDIA L40.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = [
    "KVCACHED_CACHED_TOKENS",
    "KVCACHED_IDLE_OVER_FLOOR",
    "OPT_13B_TOKEN_BYTES",
    "PAGED_ATTENTION_USED_PERCENT_ABOVE",
    "PAPER_EXISTING_USED_PERCENT",
    "PAPER_TIMES_MAX_BATCH",
    "PAPER_TIMES_ORACLE_BATCH",
    "VATTENTION_GB_PER_S",
    "VATTENTION_MAX_BATCH",
    "VATTENTION_SPIKE_MS",
]

#: PagedAttention, figure 2: share of KV memory that holds token states in existing systems,
#: from the worst (Orca, Max) to the best (Orca, Oracle).
PAPER_EXISTING_USED_PERCENT = (20.4, 38.2)
#: The same share with PagedAttention: more than this.
PAGED_ATTENTION_USED_PERCENT_ABOVE = 96.0
#: PagedAttention, OPT-13B on ShareGPT: ratios of the numbers of requests that run at once.
PAPER_TIMES_ORACLE_BATCH = 2.2
PAPER_TIMES_MAX_BATCH = 4.3

#: vAttention, table 7: allocation bandwidth in GB/s by page size, on an A100.
VATTENTION_GB_PER_S: Mapping[int, float] = MappingProxyType(
    {64 << 10: 7.59, 128 << 10: 14.56, 256 << 10: 27.04, 2 << 20: 35.17}
)
#: vAttention: latency spikes of synchronous mapping, from and to, on an A100.
VATTENTION_SPIKE_MS = (5.0, 20.0)
#: vAttention, figure 12: largest batches of its three models, by page size, on an A100.
VATTENTION_MAX_BATCH: Mapping[int, tuple[int, int, int]] = MappingProxyType(
    {2 << 20: (187, 203, 56), 64 << 10: (240, 258, 68)}
)

#: kvcached: most tokens that its prefix cache keeps; and memory of an idle instance over that of as
#: many tokens: 22 pages over 16 (38 and 75 in earlier versions).
KVCACHED_CACHED_TOKENS = 16_000
KVCACHED_IDLE_OVER_FLOOR = 1.4

#: K and V of one token in OPT-13B, by arithmetic: 2 x 40 layers x 5,120 x 2 bytes.
OPT_13B_TOKEN_BYTES = 2 * 40 * 5120 * 2
