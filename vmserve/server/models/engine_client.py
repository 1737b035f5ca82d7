"""The interface between server and engine; tests replace the engine here."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any, Protocol

from vmserve.sampling import GenerationParams
from vmserve.telemetry.snapshot import EngineSnapshot
from vmserve.text.prompts import Prompt
from vmserve.types import RequestOutput, RequestTerms

__all__ = ["EngineClient", "TokenizerLike"]


class TokenizerLike(Protocol):
    """The part of :class:`vmserve.text.tokenizer.Tokenizer` that serving takes."""

    @property
    def vocab_size(self) -> int: ...

    @property
    def eos_ids(self) -> frozenset[int]: ...

    @property
    def chat_template_text(self) -> str: ...

    def encode(
        self, text: str, /, add_special_tokens: bool = True, max_tokens: int | None = None
    ) -> list[int]: ...

    def encode_bad_words(self, words: Sequence[str], /) -> tuple[tuple[int, ...], ...]: ...

    def encode_infill(
        self, prefix: str, suffix: str, /, max_tokens: int | None = None
    ) -> list[int]: ...

    def decode(self, token_ids: Sequence[int], /, skip_special_tokens: bool = True) -> str: ...

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        /,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        chat_template: str | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        add_special_tokens: bool = False,
        max_tokens: int | None = None,
    ) -> tuple[str, list[int]]: ...

    def to_json(self) -> str: ...

    def forget(self) -> None: ...

    def token_str(self, token_id: int, /) -> str: ...


class _ModelShape(Protocol):
    @property
    def vocab_size(self) -> int: ...


class _Resolved(Protocol):
    @property
    def request_timeout(self) -> float | None: ...

    @property
    def max_model_len(self) -> int: ...

    @property
    def kv_cache_dtype(self) -> str: ...

    @property
    def max_logprobs(self) -> int: ...

    @property
    def max_num_seqs(self) -> int: ...


class EngineClient(Protocol):
    """The common interface of :class:`vmserve.AsyncLLM` and
    :class:`vmserve.client.process_llm.ProcessLLM`.

    ``stats`` is as of the engine's last word, ``fetch_stats`` of now. ``num_running`` and
    ``max_num_running``, requests that run and that can at most, cost nothing to ask for.
    ``retry_seconds``: how long after its death, at least, an engine is started again; None: not by
    itself. ``identity`` changes with the weights and with settings that can change the bits of an
    answer; empty: unknown.
    """

    @property
    def identity(self) -> str: ...

    @property
    def resolved(self) -> _Resolved: ...

    @property
    def model_config(self) -> _ModelShape: ...

    @property
    def tokenizer(self) -> TokenizerLike: ...

    @property
    def default_sampling(self) -> dict[str, Any]: ...

    @property
    def errored(self) -> bool: ...

    @property
    def num_running(self) -> int: ...

    @property
    def max_num_running(self) -> int: ...

    @property
    def retry_seconds(self) -> float | None: ...

    def serve(
        self, prompt: Prompt, params: GenerationParams, *, request_id: str, terms: RequestTerms
    ) -> AsyncIterator[RequestOutput]: ...

    def stats(self) -> dict[str, float | int]: ...

    async def fetch_stats(self) -> dict[str, float | int]: ...

    async def until_dead(self) -> None: ...

    async def snapshot(self) -> EngineSnapshot: ...

    async def set_kv_cache_memory(self, size: int | str) -> int: ...

    async def reset_prefix_cache(self) -> None: ...

    async def shutdown(self, timeout: float = 0.0) -> None: ...
