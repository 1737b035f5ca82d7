"""Token counts and times, as replies report them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from vmserve.types import RequestMetrics, RequestOutput

__all__ = ["Usage", "per_request_metrics"]


class Usage:
    """Counts of one reply. A prompt counts once, however many choices it has."""

    __slots__ = (
        "_num_accepted", "_num_cached", "_num_drafted", "_tells_drafts", "num_completion",
        "num_prompt",
    )  # fmt: skip

    def __init__(
        self, num_prompt: int = 0, num_completion: int = 0, *, tells_drafts: bool = False
    ) -> None:
        self.num_prompt = num_prompt
        self.num_completion = num_completion
        self._num_cached = self._num_drafted = self._num_accepted = 0
        self._tells_drafts = tells_drafts

    @classmethod
    def of(cls, results: Sequence[RequestOutput], *, tells_drafts: bool = False) -> Usage:
        """Sum the usage of finished requests."""
        usage = cls(
            sum(len(result.prompt_token_ids) for result in results),
            sum(len(choice.token_ids) for result in results for choice in result.outputs),
            tells_drafts=tells_drafts,
        )
        for result in results:
            usage.finished(result.metrics)
        return usage

    def finished(self, metrics: RequestMetrics) -> None:
        """Add what is known of a request at its end."""
        self._num_cached += metrics.num_cached_tokens
        self._num_drafted += metrics.num_drafted_tokens
        self._num_accepted += metrics.num_accepted_tokens

    def as_dict(self) -> dict[str, Any]:
        """Drafted tokens are reported where there were some, or with ``tells_drafts``."""
        rendered: dict[str, Any] = {
            "prompt_tokens": self.num_prompt,
            "completion_tokens": self.num_completion,
            "total_tokens": self.num_prompt + self.num_completion,
            "prompt_tokens_details": {"cached_tokens": self._num_cached},
        }
        if self._tells_drafts or self._num_drafted:
            rendered["completion_tokens_details"] = {
                "accepted_prediction_tokens": self._num_accepted,
                "rejected_prediction_tokens": self._num_drafted - self._num_accepted,
            }
        return rendered


def per_request_metrics(metrics: RequestMetrics, num_tokens: int) -> dict[str, float]:
    """Times in milliseconds of a request with one choice; what has no value is absent.

    ``tokens_per_second`` counts from the first scheduling to the last token, so that it
    includes the prompt's computation.
    """
    scheduled, first, last = (
        metrics.first_scheduled_time,
        metrics.first_token_time,
        metrics.last_token_time,
    )
    values: dict[str, float] = {}
    if scheduled is not None:
        values["queue_time_ms"] = 1000 * (scheduled - metrics.arrival_time)
    if scheduled is not None and first is not None:
        values["time_to_first_token_ms"] = 1000 * (first - scheduled)
    if first is not None and last is not None:
        values["generation_time_ms"] = 1000 * (last - first)
        if num_tokens > 1:
            values["mean_itl_ms"] = 1000 * (last - first) / (num_tokens - 1)
    if scheduled is not None and last is not None and last > scheduled and num_tokens:
        values["tokens_per_second"] = num_tokens / (last - scheduled)
    return values
