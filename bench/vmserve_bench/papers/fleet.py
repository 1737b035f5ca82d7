"""The engines of the systems that are compared, sized for the model that they have."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple, Self

from vmserve.config import EngineConfig
from vmserve.engine.engine import LLMEngine
from vmserve.models import ModelConfig, resolve_model
from vmserve_bench.papers.served import (
    BLOCK_TOKENS,
    CONTEXT,
    PAGE_TOKENS,
    POOL_TOKENS,
    Served,
    System,
    serve,
)

if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import TracebackType

    from vmserve_bench.papers.served import Job

__all__ = ["Fleet"]

_MAX_SEQS = 256
#: Bytes; a host's page is a multiple of them.
_GRANULARITY = 4096


class _Sizes(NamedTuple):
    """Bytes of a token's keys and values in one layer."""

    num_layers: int
    token_bytes: int
    dtype: str

    @staticmethod
    def of(model: str | None) -> _Sizes:
        config = ModelConfig.from_directory(resolve_model(model))
        token_bytes = 2 * config.kv_heads * config.head_dim * config.dtype.itemsize
        return _Sizes(config.num_layers, token_bytes, str(config.dtype).removeprefix("torch."))

    def page_bytes(self, page_tokens: int) -> int:
        """Page bytes of one layer for at least so many tokens, in whole host pages."""
        return -(-page_tokens * self.token_bytes // _GRANULARITY) * _GRANULARITY

    def pool_bytes(self, pool_tokens: int, page_tokens: int) -> int:
        page_bytes = self.page_bytes(page_tokens)
        return pool_tokens * self.token_bytes // page_bytes * page_bytes * self.num_layers


class Fleet:
    """Engines by their differences, made at first use.

    ``pool_tokens``: of ours; Orca's engine has room for all that is ever admitted.
    """

    def __init__(
        self,
        model: str | None = None,
        *,
        context: int = CONTEXT,
        pool_tokens: int = POOL_TOKENS,
        block_tokens: int = BLOCK_TOKENS,
        page_tokens: int = PAGE_TOKENS,
    ) -> None:
        self.model = model
        self.context = context
        self.pool_tokens = pool_tokens
        self._block_tokens = block_tokens
        self._page_tokens = page_tokens
        self._sizes = _Sizes.of(model)
        self._engines: dict[tuple[object, ...], LLMEngine] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for engine in self._engines.values():
            engine.close()
        self._engines.clear()

    @property
    def token_bytes(self) -> int:
        """Keys and values of a token, all layers."""
        return self._sizes.num_layers * self._sizes.token_bytes

    def engine(self, system: System) -> LLMEngine:
        key = (system.regime, system.knowledge is None, system.options)
        if key not in self._engines:
            self._engines[key] = self._make(system)
        return self._engines[key]

    def _make(self, system: System) -> LLMEngine:
        pool_tokens = self.pool_tokens
        if system.knowledge is not None:  # a reservation, and a page at its end, for each
            pool_tokens += _MAX_SEQS * self._page_tokens
        options: dict[str, Any] = {
            "block_size": self._block_tokens,
            "page_tokens": self._page_tokens,
            **dict(system.options),
        }
        page_tokens = max(options.pop("page_tokens"), options["block_size"])
        return LLMEngine(
            EngineConfig(
                **{
                    "model": self.model,
                    "dtype": self._sizes.dtype,
                    "kv_regime": system.regime,
                    "kv_layers_per_group": 1,
                    "kv_page_size": self._sizes.page_bytes(page_tokens),
                    "kv_cache_memory": self._sizes.pool_bytes(pool_tokens, page_tokens),
                    "max_model_len": self.context,
                    "max_num_seqs": _MAX_SEQS,
                    "enable_prefix_caching": False,
                    "preemption": "recompute",
                    **options,
                }
            )
        )

    def vocabulary(self) -> int:
        return ModelConfig.from_directory(resolve_model(self.model)).vocab_size

    def serve(self, system: System, jobs: Sequence[Job]) -> Served:
        """Serve jobs. Raises RuntimeError if memory was short behind Orca's gate."""
        served = serve(self.engine(system), jobs, system, self.pool_tokens)
        if system.knowledge is not None and served.num_preemptions:
            raise RuntimeError(f"{served.num_preemptions} preemptions behind the gate")
        return served
