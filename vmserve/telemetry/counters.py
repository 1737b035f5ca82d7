"""Counters that the engine raises as it works; they only grow."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["EngineCounters"]


@dataclass(slots=True)
class EngineCounters:
    steps: int = 0
    tokens_computed: int = 0
    prompt_tokens: int = 0
    generation_tokens: int = 0
    requests_finished: int = 0
    requests_aborted: int = 0

    def as_dict(self) -> dict[str, int]:
        return {
            "engine_steps_total": self.steps,
            "tokens_computed_total": self.tokens_computed,
            "prompt_tokens_total": self.prompt_tokens,
            "generation_tokens_total": self.generation_tokens,
            "request_success_total": self.requests_finished,
            "requests_aborted_total": self.requests_aborted,
        }
