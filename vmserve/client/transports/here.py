"""Engines of this process."""

from __future__ import annotations

from vmserve.client.transports.base import Facts
from vmserve.engine.engine import LLMEngine

__all__ = ["facts_of"]


def facts_of(engine: LLMEngine) -> Facts:
    """What is known of an engine of this process."""
    return Facts(
        resolved=engine.resolved,
        limits=engine.limits,
        model=engine.model_config,
        tokenizer=engine.tokenizer,
        default_sampling=engine.model_config.default_sampling,
        identity=engine.identity,
        weights=engine.weights,
        kv_cache_memory=engine.config.kv_cache_memory,
        max_num_running=engine.resolved.max_num_seqs,
    )
