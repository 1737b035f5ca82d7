"""Beam search: what to keep, and the sequences that keep it."""

from __future__ import annotations

from vmserve.decoding.beam import BeamSearch, BeamStep, Continuation, Hypothesis
from vmserve.decoding.group import BeamGroup

__all__ = ["BeamGroup", "BeamSearch", "BeamStep", "Continuation", "Hypothesis"]
