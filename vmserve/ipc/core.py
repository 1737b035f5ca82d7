"""What callers ask of an engine that runs elsewhere, in a thread or in another process."""

from __future__ import annotations

import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Mapping
from typing import Any

from vmserve.config import EngineConfig, ResolvedConfig
from vmserve.sampling import GenerationParams, SamplingParams
from vmserve.text.assembly import RequestAssembly
from vmserve.text.prompts import PromptLike, encode_prompt
from vmserve.text.tokenizer import Tokenizer
from vmserve.types import PinnedPrefix, RequestOutput, RequestTerms

__all__ = ["ClientCore"]

#: How often a prefix is computed again that was evicted before it could be pinned.
_PIN_ATTEMPTS = 3


class ClientCore(ABC):
    """Requests, pinned prefixes and questions. A subclass carries them to the engine and back."""

    config: EngineConfig
    resolved: ResolvedConfig
    tokenizer: Tokenizer
    _default_sampling: Mapping[str, Any]

    @property
    def default_sampling(self) -> dict[str, Any]:
        """Sampling fields of the model's generation_config.json."""
        return dict(self._default_sampling)

    def generate(
        self,
        prompt: PromptLike,
        params: GenerationParams | None = None,
        *,
        request_id: str | None = None,
        priority: int = 0,
        cache_salt: str = "",
        tenant: str = "",
        isolation: str = "",
        timeout: float | None = None,
        stream: bool = False,
    ) -> AsyncIterator[RequestOutput]:
        """The outputs of one request, until it has finished.

        ``prompt`` and ``params`` are those of :meth:`vmserve.LLM.generate`, for one prompt;
        :class:`vmserve.BeamSearchParams` are taken too. ``request_id``: what :meth:`abort` takes,
        of one request at a time; None: one is made up.

        ``stream=False``: one final output. ``stream=True``: outputs with ``delta`` set, whose
        choices hold what is new; the first has no choices and says that the request was
        accepted. Leaving the iterator early aborts the request and frees its pages. The rest is
        described at :class:`vmserve.types.RequestTerms`.

        Raises :class:`~vmserve.errors.InvalidRequestError` before the first output,
        :class:`~vmserve.errors.DeadlineError` when its time is over, and
        :class:`~vmserve.errors.EngineDeadError` when the engine has stopped.
        """
        terms = RequestTerms(
            priority=priority,
            cache_salt=cache_salt,
            tenant=tenant,
            isolation=isolation,
            timeout=timeout,
            stream=stream,
        )
        return self.serve(prompt, params, request_id=request_id, terms=terms)

    @abstractmethod
    def serve(
        self,
        prompt: PromptLike,
        params: GenerationParams | None,
        *,
        request_id: str | None,
        terms: RequestTerms,
    ) -> AsyncIterator[RequestOutput]:
        """:meth:`generate` with its terms as one value."""

    @abstractmethod
    async def ask(self, question: str, **arguments: Any) -> Any:
        """One of :data:`vmserve.ipc.questions.QUESTIONS`; its answer, or what it raises."""

    async def pin_prefix(
        self, token_ids: list[int], *, cache_salt: str = "", isolation: str = ""
    ) -> PinnedPrefix:
        """Compute a prefix and keep it in memory: see :meth:`vmserve.LLM.pin_prefix`."""
        once = SamplingParams(max_tokens=1, temperature=0, detokenize=False)
        terms = RequestTerms(cache_salt=cache_salt, isolation=isolation)
        whole_blocks = len(token_ids) // self.resolved.block_tokens * self.resolved.block_tokens
        for attempt in range(_PIN_ATTEMPTS):
            request_id = f"pin-{uuid.uuid4().hex}"
            async for _ in self.serve(token_ids, once, request_id=request_id, terms=terms):
                pass
            # Until then others may have evicted some of it.
            held = await self.ask(
                "hold_prefix", token_ids=token_ids, cache_salt=cache_salt, isolation=isolation
            )
            pin = PinnedPrefix(*held)
            if pin.num_tokens == whole_blocks or attempt == _PIN_ATTEMPTS - 1:
                break
            await self.ask("unpin_prefix", handle=pin.handle)
        return pin

    async def unpin_prefix(self, handle: int) -> None:
        """The prefix may be evicted again. Raises ``ValueError`` for an unknown handle."""
        await self.ask("unpin_prefix", handle=handle)

    async def set_kv_cache_memory(self, size: int | str) -> int:
        """Change how far the KV cache may grow while requests run: see
        :meth:`vmserve.engine.engine.LLMEngine.set_kv_cache_memory`."""
        limit: int = await self.ask("set_kv_cache_memory", size=size)
        return limit

    async def reset_prefix_cache(self) -> None:
        """Forget every cached prefix: see :meth:`vmserve.LLM.reset_prefix_cache`."""
        await self.ask("reset_prefix_cache", unpin=False)

    def _assembly(
        self,
        prompt: PromptLike,
        params: GenerationParams | None,
        request_id: str,
        terms: RequestTerms,
    ) -> RequestAssembly:
        """A new request on this side: its prompt is encoded, its parameters are complete."""
        encoded = encode_prompt(prompt, self.tokenizer)
        return RequestAssembly(
            self.tokenizer,
            request_id,
            encoded.text,
            encoded.token_ids,
            SamplingParams(**self._default_sampling) if params is None else params,
            arrival_time=time.monotonic(),
            stream=terms.stream,
        )
