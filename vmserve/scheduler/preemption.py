"""What becomes of a sequence that must make room: computed again later, or swapped to the host."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

__all__ = ["Preemption", "PreemptionCosts", "PreemptionPolicy"]

Preemption = Literal["auto", "recompute", "swap"]
#: Weight of a new measurement in a running average.
_NEWEST = 0.2


class PreemptionCosts(NamedTuple):
    """Seconds that a victim's way out and back is predicted to take."""

    recompute: float
    swap: float


@dataclass(slots=True)
class PreemptionPolicy:
    """Bytes over the measured copy bandwidth against tokens over the measured prefill speed.

    (SOSP'23 PagedAttention, sections 4.5 and 7.3.) The starting values hold until there are
    measurements: 4 GB/s is what one core copies, 2,000 tokens/s a small model's prefill on two.
    """

    preemption: Preemption = "auto"
    copy_bytes_per_second: float = 4e9
    prefill_tokens_per_second: float = 2e3

    def costs(self, num_tokens: int, num_bytes: int) -> PreemptionCosts:
        """Of a victim with ``num_tokens`` computed, in ``num_bytes``; there and back."""
        return PreemptionCosts(
            num_tokens / self.prefill_tokens_per_second,
            2 * num_bytes / self.copy_bytes_per_second,
        )

    def swaps(self, num_tokens: int, num_bytes: int) -> bool:
        if self.preemption != "auto":
            return self.preemption == "swap"
        costs = self.costs(num_tokens, num_bytes)
        return costs.swap < costs.recompute

    def copied(self, num_bytes: int, seconds: float) -> None:
        """A copy was measured."""
        if num_bytes and seconds > 0:
            self.copy_bytes_per_second += _NEWEST * (
                num_bytes / seconds - self.copy_bytes_per_second
            )

    def prefilled(self, num_tokens: int, seconds: float) -> None:
        """A step that mostly read prompts was measured."""
        if seconds > 0:
            self.prefill_tokens_per_second += _NEWEST * (
                num_tokens / seconds - self.prefill_tokens_per_second
            )
