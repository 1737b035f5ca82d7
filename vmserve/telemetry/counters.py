"""Counters that the engine raises as it works, which only grow; figures of several as one."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate

from vmserve.telemetry.phases import PHASES, StepPhases

__all__ = ["STEP_TOKENS", "WAITS", "EngineCounters", "merged_stats"]

REGIMES = ("virtual", "paged")
#: Reasons why a step was not launched while the one before it ran: none ran ("idle"), or what the
#: step had. "sampler": tokens drawn by the host. "forks": their first tokens. "speculation": drafts
#: in it, or maybe in the next one. "room": no request could go on (no memory, or all ended with
#: it).
WAITS = ("idle", "beams", "prompt_logprobs", "pooling", "sampler", "forks", "speculation", "room")
#: Bounds of the histogram of a step's tokens, prompts' and generated ones.
STEP_TOKENS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
#: Ends of names of figures that are the same for all engines.
_CONSTANTS = (
    "page_bytes", "page_tokens", "block_tokens", "blocks_per_page", "tensor_parallel_size"
)  # fmt: skip
_SHARES = ("kv_cache_usage_perc",)
#: Figures of what engines share: each reports all of it.
_COMMON = ("persist_bytes",)


@dataclass(slots=True)
class EngineCounters:
    steps: int = 0
    tokens_computed: int = 0
    #: With asynchronous scheduling: steps launched while the one before ran, and others, by reason.
    steps_overlapped: int = 0
    steps_synchronous: dict[str, int] = field(default_factory=lambda: dict.fromkeys(WAITS, 0))
    prompt_tokens: int = 0
    generation_tokens: int = 0
    #: First tokens of sequences among these: drawn from prompts' logits, in addition to the tokens
    #: that their steps computed.
    first_tokens: int = 0
    requests_finished: int = 0
    requests_aborted: int = 0
    #: Prompt tokens of requests, looked up once each, and those that the cache had.
    prefix_cache_queries: int = 0
    prefix_cache_hits: int = 0
    #: Drafts that were computed, their tokens, and the tokens that the sampler drew too.
    drafts: int = 0
    draft_tokens: int = 0
    accepted_tokens: int = 0
    #: Seconds that steps spent, by phase.
    phase_seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PHASES, 0.0))
    #: Seconds in attention by regime: as measured, and as predicted from the device profile and its
    #: learnt error.
    attention_seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(REGIMES, 0.0))
    predicted_seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(REGIMES, 0.0))
    #: Steps by their tokens: as many as each of STEP_TOKENS, or more than all.
    steps_by_tokens: list[int] = field(default_factory=lambda: [0] * (len(STEP_TOKENS) + 1))
    #: First tokens of the steps so far: they are counted as they come, before their step ends.
    _first_tokens_of_steps: int = 0

    def step(self, num_tokens: int, phases: StepPhases) -> None:
        """Count a step that has ended."""
        self.steps += 1
        self.tokens_computed += num_tokens
        num_first = self.first_tokens - self._first_tokens_of_steps
        self._first_tokens_of_steps = self.first_tokens
        self.steps_by_tokens[bisect_left(STEP_TOKENS, num_tokens + num_first)] += 1
        for span in phases.spans:
            self.phase_seconds[span.phase] += span.ended - span.began

    def synchronous(self, reason: str) -> None:
        """Count a step that waited for the last one's tokens; ``reason``: one of WAITS."""
        self.steps_synchronous[reason] += 1

    def drafted(self, num_drafted: int, num_accepted: int) -> None:
        """Count a draft that a step computed, and how many of its tokens were accepted."""
        self.drafts += 1
        self.draft_tokens += num_drafted
        self.accepted_tokens += num_accepted

    def attended(self, regime: str, seconds: float, predicted: float) -> None:
        """Add the measured and predicted attention seconds of a step's sequences in one regime."""
        self.attention_seconds[regime] += seconds
        self.predicted_seconds[regime] += predicted

    def as_dict(self) -> dict[str, float | int]:
        seconds = {f"step_{name}_seconds_total": s for name, s in self.phase_seconds.items()}
        for regime in REGIMES:
            seconds[f"attention_{regime}_seconds_total"] = self.attention_seconds[regime]
            predicted = self.predicted_seconds[regime]
            seconds[f"attention_{regime}_predicted_seconds_total"] = predicted
        below = accumulate(self.steps_by_tokens)
        names = [f"iteration_tokens_le_{bound}" for bound in STEP_TOKENS]
        return {
            **seconds,
            **dict(zip(names, below, strict=False)),
            "iteration_tokens_sum": self.tokens_computed + self._first_tokens_of_steps,
            "engine_steps_total": self.steps,
            "tokens_computed_total": self.tokens_computed,
            "steps_overlapped_total": self.steps_overlapped,
            **{f"steps_synchronous_{why}_total": n for why, n in self.steps_synchronous.items()},
            "prompt_tokens_total": self.prompt_tokens,
            "generation_tokens_total": self.generation_tokens,
            "request_success_total": self.requests_finished,
            "requests_aborted_total": self.requests_aborted,
            "prefix_cache_queries_total": self.prefix_cache_queries,
            "prefix_cache_hits_total": self.prefix_cache_hits,
            "spec_decode_num_drafts_total": self.drafts,
            "spec_decode_num_draft_tokens_total": self.draft_tokens,
            "spec_decode_num_accepted_tokens_total": self.accepted_tokens,
        }


def merged_stats(each: Sequence[Mapping[str, float | int]]) -> dict[str, float | int]:
    """Sum counts, take the mean of shares, and keep what is the same for all or common to them."""
    merged: dict[str, float | int] = {}
    for stats in each:
        for name, value in stats.items():
            if name in _COMMON:
                merged[name] = max(merged.get(name, 0), value)
            elif name not in merged or not name.endswith(_CONSTANTS):
                merged[name] = merged.get(name, 0) + value
    return merged | {name: merged[name] / len(each) for name in _SHARES if name in merged}
