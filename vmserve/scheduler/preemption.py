"""Decide how a preempted sequence comes back: computed again, or swapped to the host."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

__all__ = ["Preemption", "PreemptionCosts", "PreemptionPolicy"]

Preemption = Literal["auto", "recompute", "swap"]
#: Weight of a new measurement in a running average.
_NEWEST = 0.2


class PreemptionCosts(NamedTuple):
    """Predicted seconds of a victim's way out and back."""

    recompute: float
    swap: float


@dataclass(slots=True)
class PreemptionPolicy:
    """Compares swapping at the measured copy bandwidth with computing at the measured prefill
    speed.

    After SOSP'23 PagedAttention, sections 4.5 and 7.3. The initial values hold until there are
    measurements: one core copies 4 GB/s; a small model prefills 2,000 tokens/s on two cores.
    """

    preemption: Preemption = "auto"
    copy_bytes_per_second: float = 4e9
    prefill_tokens_per_second: float = 2e3

    def costs(self, num_tokens: int, num_bytes: int) -> PreemptionCosts:
        """Costs of both ways for a victim with ``num_tokens`` computed, in ``num_bytes``."""
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
        """Learn from a measured copy."""
        if num_bytes and seconds > 0:
            self.copy_bytes_per_second += _NEWEST * (
                num_bytes / seconds - self.copy_bytes_per_second
            )

    def prefilled(self, num_tokens: int, seconds: float) -> None:
        """Learn from a measured step that mostly read prompts."""
        if seconds > 0:
            self.prefill_tokens_per_second += _NEWEST * (
                num_tokens / seconds - self.prefill_tokens_per_second
            )
