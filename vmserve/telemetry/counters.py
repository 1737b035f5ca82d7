"""Counters that the engine raises as it works; they only grow."""

from __future__ import annotations

from dataclasses import dataclass, field

from vmserve.telemetry.phases import PHASES, StepPhases

__all__ = ["EngineCounters"]


@dataclass(slots=True)
class EngineCounters:
    steps: int = 0
    tokens_computed: int = 0
    prompt_tokens: int = 0
    generation_tokens: int = 0
    requests_finished: int = 0
    requests_aborted: int = 0
    #: Prompt tokens of requests, looked up once each, and those that the cache had.
    prefix_cache_queries: int = 0
    prefix_cache_hits: int = 0
    #: Seconds that steps spent, by phase.
    phase_seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PHASES, 0.0))

    def step(self, num_tokens: int, phases: StepPhases) -> None:
        """A step has ended."""
        self.steps += 1
        self.tokens_computed += num_tokens
        for span in phases.spans:
            self.phase_seconds[span.phase] += span.ended - span.began

    def as_dict(self) -> dict[str, float | int]:
        seconds = {f"step_{name}_seconds_total": s for name, s in self.phase_seconds.items()}
        return {
            **seconds,
            "engine_steps_total": self.steps,
            "tokens_computed_total": self.tokens_computed,
            "prompt_tokens_total": self.prompt_tokens,
            "generation_tokens_total": self.generation_tokens,
            "request_success_total": self.requests_finished,
            "requests_aborted_total": self.requests_aborted,
            "prefix_cache_queries_total": self.prefix_cache_queries,
            "prefix_cache_hits_total": self.prefix_cache_hits,
        }
