"""Searching among continuations: decisions only, without models, memory or queues."""

from __future__ import annotations

from vmserve.decoding.beam import BeamSearch, BeamStep, Continuation, Hypothesis

__all__ = ["BeamSearch", "BeamStep", "Continuation", "Hypothesis"]
