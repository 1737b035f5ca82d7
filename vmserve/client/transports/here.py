"""What transports to an engine of this process have in common."""

from __future__ import annotations

from vmserve.client.transports.base import Facts
from vmserve.engine.engine import LLMEngine
from vmserve.errors import EngineDeadError

__all__ = ["Here"]


class Here:
    """``engine`` is there, and is not started again once it has ended."""

    def __init__(self, engine: LLMEngine) -> None:
        self._engine = engine
        self.facts = Facts(
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

    async def start(self, *, again: bool = False) -> None:
        if again:
            raise EngineDeadError("an engine in this process is not started again")
