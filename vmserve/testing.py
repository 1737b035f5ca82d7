"""Fakes at the engine's seams, for tests of what is built on it.

``LLM(...)`` and ``LLMEngine(...)`` do all that they do with a model, but for the forward pass:

    >>> from vmserve.config import EngineConfig
    >>> from vmserve.engine.engine import LLMEngine
    >>> engine = LLMEngine(EngineConfig(device="cpu"), runtime=NullRuntime(token_id=7))

:class:`ScriptedEngine` takes the engine's place behind a server: there is no engine at all.
:class:`vmserve_bench.simulation.SimulatedEngine` goes without a tokenizer and real memory.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vmserve import _core
from vmserve.errors import (
    ConfigurationError,
    EngineDeadError,
    InvalidRequestError,
    VmserveError,
)
from vmserve.runner.null_runtime import NullRuntime
from vmserve.sampling import GenerationParams, SamplingParams
from vmserve.telemetry.snapshot import (
    PAGE_MAPPED,
    PAGE_SHARED,
    EngineSnapshot,
    PoolMap,
    RequestSnapshot,
)
from vmserve.text.prompts import Prompt
from vmserve.types import (
    CompletionOutput,
    FinishReason,
    Logprob,
    LogprobsList,
    RequestMetrics,
    RequestOutput,
    RequestTerms,
)

__all__ = [
    "BOS",
    "EOS",
    "VOCAB_SIZE",
    "ByteTokenizer",
    "FaultInjectingDriver",
    "NullDriver",
    "NullRuntime",
    "ScriptedEngine",
    "scripted",
]

#: A page driver around another one, of which chosen calls fail.
FaultInjectingDriver = _core.FaultInjectingDriver
#: A page driver that keeps the books of the contract and touches no memory.
NullDriver = _core.NullDriver

BOS, EOS, FIRST_BYTE = 1, 2, 3
VOCAB_SIZE = FIRST_BYTE + 256


class ByteTokenizer:
    """One token per UTF-8 byte. Ids 0 to 2 are special: padding, start and end.

    A chat is rendered as ``[user]Hi|[assistant]``. The role "refused" is refused.
    """

    vocab_size = VOCAB_SIZE
    bos_id = BOS
    eos_ids = frozenset({EOS})
    chat_template_text = "{{ tools }}<tool_call>"
    specials: Mapping[int, str] = {0: "<pad>", BOS: "<s>", EOS: "</s>"}

    def encode(
        self, text: str, add_special_tokens: bool = True, max_tokens: int | None = None
    ) -> list[int]:
        ids = [byte + FIRST_BYTE for byte in text.encode()]
        return [BOS, *ids] if add_special_tokens else ids

    def encode_bad_words(self, words: Sequence[str]) -> tuple[tuple[int, ...], ...]:
        return tuple(tuple(self.encode(word, add_special_tokens=False)) for word in words)

    def encode_infill(self, prefix: str, suffix: str, max_tokens: int | None = None) -> list[int]:
        return self.encode(f"<PRE>{prefix}<SUF>{suffix}<MID>")

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        text, run = "", bytearray()
        for token_id in token_ids:
            if token_id >= FIRST_BYTE:
                run.append(token_id - FIRST_BYTE)
                continue
            text += run.decode("utf-8", "replace")
            run.clear()
            text += "" if skip_special_tokens else self.specials[token_id]
        return text + run.decode("utf-8", "replace")

    def to_json(self) -> str:
        raise NotImplementedError("ByteTokenizer cannot be loaded in another process")

    def forget(self) -> None:
        """There are no caches."""

    def token_str(self, token_id: int) -> str:
        return self.specials.get(token_id) or f"<0x{token_id - FIRST_BYTE:02X}>"

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        chat_template: str | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        add_special_tokens: bool = False,
        max_tokens: int | None = None,
    ) -> tuple[str, list[int]]:
        if any(message["role"] == "refused" for message in messages):
            raise InvalidRequestError("the chat template refuses this role", "messages")
        text = f"{chat_template or ''}{'T' * len(tools or ())}"
        text += "".join(f"[{message['role']}]{message['content']}|" for message in messages)
        if continue_final_message:
            text = text[:-1]
        elif add_generation_prompt:
            text += "[assistant]"
        return text, self.encode(text, add_special_tokens)


@dataclass(frozen=True, kw_only=True)
class _Shape:
    """The fields of the configuration, and of the model's, which a server reads."""

    max_model_len: int = 256
    max_logprobs: int = 20
    max_num_seqs: int = 128
    vocab_size: int = VOCAB_SIZE
    request_timeout: float | None = None
    kv_cache_dtype: str = "auto"


def scripted(text: str) -> Callable[[list[int], int], list[int]]:
    """A ``reply`` of :class:`ScriptedEngine`: ``text`` and its end; of choice j > 0, ``text`` j."""

    def reply(prompt: list[int], index: int) -> list[int]:
        suffix = str(index) if index else ""
        return [*ByteTokenizer().encode(text + suffix, False), EOS]

    return reply


class ScriptedEngine:
    """The interface of :class:`vmserve.AsyncLLM` which a server uses, over a byte-level toy model.

    >>> app = create_app(ScriptedEngine("hello"), ServerConfig(served_model_names=("m",)))

    Every request gets one token for each of its choices per pass of the event loop. ``text`` is the
    answer; ``reply(prompt ids, choice index)`` may be replaced and returns the ids of one, which
    repeat if they do not end. ``shape``: max_model_len, max_logprobs, max_num_seqs, vocab_size,
    request_timeout. :func:`position` has the log-probabilities.

    What a test sets: ``identity``, as of weights and settings; ``pause``, an event that holds all
    requests after ``pause_after`` tokens; ``fail``, which each request then raises; ``errored``, as
    of an engine that has died, and ``retry_seconds`` of one that is started again; ``died``, whose
    result ends :meth:`until_dead`. What it reads: ``requests``, ``running``, and the ids in
    ``finished`` and ``aborted``.
    """

    def __init__(self, text: str = "hello", **shape: Any) -> None:
        self.tokenizer = ByteTokenizer()
        self.resolved = self.model_config = _Shape(**shape)
        self.identity = "scripted"
        self.default_sampling: dict[str, Any] = {}
        self.reply = scripted(text)
        self.errored = False
        self.retry_seconds: float | None = None
        self.pause: asyncio.Event | None = None
        self.pause_after = 1
        self.fail: Exception | None = None
        #: Prompt ids, parameters, and the request's id, prompt and terms that are set.
        self.requests: list[tuple[list[int], SamplingParams, dict[str, Any]]] = []
        self.aborted: list[str] = []
        self.finished: list[str] = []
        #: Events that end requests, by request id.
        self.running: dict[str, asyncio.Event] = {}
        self.num_waiting = 0
        self.stopped = False
        self.num_cached = 0
        self.died: Future[None] = Future()
        self.num_snapshots = 0
        self.num_resets = 0
        self.kv_cache_memory: int | str = 0
        #: Cleared to hold :meth:`wake`.
        self.waking = asyncio.Event()
        self.waking.set()
        self.fail_to_wake: VmserveError | None = None
        self.num_wakes = 0

    def stats(self) -> dict[str, float | int]:
        return {
            "num_requests_running": len(self.running) - self.num_waiting,
            "num_requests_waiting": self.num_waiting,
            "kv_cache_usage_perc": 0.0,
            "num_preemptions_total": 0,
            "prompt_tokens_total": 7,
            "generation_tokens_total": 9,
        }

    @property
    def num_running(self) -> int:
        return int(self.stats()["num_requests_running"])

    @property
    def max_num_running(self) -> int:
        return self.resolved.max_num_seqs

    async def fetch_stats(self) -> dict[str, float | int]:
        return self.stats()

    async def until_dead(self) -> None:
        """Return when a test sets a result of ``died``."""
        await asyncio.wrap_future(self.died)

    async def snapshot(self) -> EngineSnapshot:
        """All running requests; four pages: absent, free, shared in the virtual view, cached."""
        self.num_snapshots += 1
        if self.errored or self.stopped:
            raise EngineDeadError("the engine has stopped")
        shared = 2 + PAGE_SHARED + PAGE_MAPPED
        pool = PoolMap(4, 1, bytes([0, 1, shared, 5]), {0: 1, 1: 1, shared: 1, 5: 1}, [(2, 1)])
        rows = [
            RequestSnapshot(
                request_id=extra["request_id"],
                tenant=extra.get("tenant", ""),
                state="running",
                regime="virtual",
                reason="kernels",
                costs={"virtual": 0.001, "paged": 0.002},
                slots=[0],
                num_prompt_tokens=len(prompt),
                num_cached_tokens=0,
                num_computed_tokens=len(prompt),
                num_output_tokens=1,
                max_tokens=params.max_tokens or 16,
                num_branches=params.n,
                num_preemptions=0,
                priority=extra["priority"],
                age_seconds=1.5,
                queue_seconds=0.5,
                ttft_seconds=1.0,
                itl_seconds=None,
            )
            for prompt, params, extra in self.requests
            if extra["request_id"] in self.running
        ]
        return EngineSnapshot(self.stats(), pool, rows, len(rows))

    async def set_kv_cache_memory(self, size: int | str) -> int:
        """4096, the new limit in bytes; "1KiB" is refused."""
        if size == "1KiB":
            raise ConfigurationError("raise --kv-cache-memory to 2KiB")
        self.kv_cache_memory = size
        return 4096

    async def reset_prefix_cache(self) -> None:
        self.num_resets += 1

    async def sleep(self, timeout: float = 0.0) -> None:
        await self.shutdown(timeout)

    async def wake(self) -> None:
        """Serve again after :meth:`sleep`; raise ``fail_to_wake``, if that is set."""
        await self.waking.wait()
        if self.fail_to_wake is not None:
            raise self.fail_to_wake
        self.num_wakes += 1
        self.stopped = False

    async def shutdown(self, timeout: float = 0.0) -> None:
        self.stopped = True
        for abort in self.running.values():
            abort.set()

    async def serve(
        self, prompt: Prompt, params: GenerationParams, *, request_id: str, terms: RequestTerms
    ) -> AsyncIterator[RequestOutput]:
        params = params.as_sampling()  # beams become independent choices
        params.validate_for(self.model_config.vocab_size, self.resolved.max_logprobs)
        if self.errored or self.stopped:
            raise EngineDeadError("the engine has stopped")
        extra = {"request_id": request_id, "prompt": prompt.text, "priority": terms.priority}
        for name in ("cache_salt", "tenant", "isolation", "timeout"):
            if getattr(terms, name):
                extra[name] = getattr(terms, name)
        self.requests.append((prompt.token_ids, params, extra))
        run = _Run(self, prompt.token_ids, params, request_id, prompt.text)
        abort = self.running[request_id] = asyncio.Event()
        ended = False
        try:
            if terms.stream:
                yield run.output([], delta=True)
            while not ended:
                await self._pace(run, abort)
                news = run.abort() if abort.is_set() else run.step()
                ended = all(choice.finish_reason for choice in run.choices)
                if ended:
                    self.finished.append(request_id)
                    del self.running[request_id]
                if terms.stream and news:
                    yield run.output(news, delta=True, finished=ended)
                elif ended:
                    yield run.output([choice.total() for choice in run.choices], finished=True)
        finally:
            if not ended:
                self.aborted.append(request_id)
                del self.running[request_id]

    async def _pace(self, run: _Run, abort: asyncio.Event) -> None:
        await asyncio.sleep(0)
        if run.num_steps < self.pause_after:
            return
        if self.fail is not None:
            raise self.fail
        if self.pause is not None:
            waits = [asyncio.ensure_future(event.wait()) for event in (self.pause, abort)]
            try:
                await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for wait in waits:
                    wait.cancel()


class _Run:
    """One request, whose choices step together."""

    def __init__(
        self,
        engine: ScriptedEngine,
        prompt_ids: list[int],
        params: SamplingParams,
        request_id: str,
        prompt: str | None,
    ) -> None:
        self._engine = engine
        self._prompt_ids = prompt_ids
        self._prompt = prompt
        self._params = params
        self._request_id = request_id
        self.num_steps = 0
        left = engine.resolved.max_model_len - len(prompt_ids)
        most = left if params.max_tokens is None else min(params.max_tokens, left)
        self.choices = [
            _Choice(index, engine.reply(prompt_ids, index), most, params)
            for index in range(params.n)
        ]

    def step(self) -> list[CompletionOutput]:
        self.num_steps += 1
        news = [choice.step() for choice in self.choices if not choice.finish_reason]
        return [new for new in news if new is not None]

    def abort(self) -> list[CompletionOutput]:
        return [choice.end("abort") for choice in self.choices if not choice.finish_reason]

    def _state(self) -> NDArray[np.float32]:
        """The embedding of a prompt: its number of tokens, then 0, 1, 2."""
        return np.array([len(self._prompt_ids), 0, 1, 2], np.float32)

    def output(
        self, outputs: list[CompletionOutput], delta: bool = False, finished: bool = False
    ) -> RequestOutput:
        wanted = self._params.prompt_logprobs
        scores: list[dict[int, Logprob] | None] | None = None
        if wanted is not None and (outputs or not delta):
            rest = [position(token_id, wanted) for token_id in self._prompt_ids[1:]]
            scores = [None, *rest]
        return RequestOutput(
            request_id=self._request_id,
            prompt=self._prompt,
            prompt_token_ids=self._prompt_ids,
            outputs=outputs,
            finished=finished,
            metrics=RequestMetrics(
                arrival_time=10.0,
                first_scheduled_time=10.5,
                first_token_time=11.0,
                last_token_time=13.0,
                finished_time=13.0,
                num_cached_tokens=self._engine.num_cached,
            ),
            prompt_logprobs=scores,
            embedding=None if self._params.pooling is None else self._state(),
            delta=delta,
        )


class _Choice:
    def __init__(self, index: int, script: list[int], most: int, params: SamplingParams) -> None:
        self._index = index
        self._script = script
        self._most = most
        self._params = params
        self._ids: list[int] = []
        self._logprobs: LogprobsList = []
        self._sent_ids = 0
        self._sent_text = ""
        self._text = ""
        self._stop_reason: int | str | None = None
        self.finish_reason: FinishReason | None = None

    def step(self) -> CompletionOutput | None:
        if len(self._ids) >= self._most:
            return self.end("length")
        token_id = self._script[len(self._ids) % len(self._script)]
        self._ids.append(token_id)
        if self._params.logprobs is not None:
            wanted = self._params.logprob_token_ids
            self._logprobs.append(
                position(token_id, self._params.logprobs)
                if wanted is None
                else {token_id: entry(token_id, 1), **{i: entry(i, 2) for i in wanted}}
            )
        self._text = ByteTokenizer().decode(self._ids, self._params.skip_special_tokens)
        if token_id == EOS and not self._params.ignore_eos:
            return self.end("stop")
        if token_id in self._params.stop_token_ids:
            self._text = ByteTokenizer().decode(self._ids[:-1], self._params.skip_special_tokens)
            return self.end("stop", token_id)
        for stop in self._params.stop:
            at = self._text.find(stop)
            if at >= 0:
                keep = len(stop) if self._params.include_stop_str_in_output else 0
                self._text = self._text[: at + keep]
                return self.end("stop", stop)
        if len(self._ids) == self._most:
            return self.end("length")
        return self._news(self._settled())

    def end(self, reason: FinishReason, stop: int | str | None = None) -> CompletionOutput:
        self.finish_reason = reason
        self._stop_reason = stop
        return self._news(self._text)

    def total(self) -> CompletionOutput:
        logprobs = self._logprobs if self._params.logprobs is not None else None
        return CompletionOutput(
            self._index, self._text, self._ids, 0.0, logprobs, self.finish_reason, self._stop_reason
        )

    def _settled(self) -> str:
        """The text without a part of a character or the start of a stop string at its end."""
        text = self._text.rstrip("\ufffd")
        held = max((_overlap(text, stop) for stop in self._params.stop), default=0)
        return text[: len(text) - held]

    def _news(self, text: str) -> CompletionOutput:
        new = dataclasses.replace(
            self.total(),
            text=text[len(self._sent_text) :],
            token_ids=self._ids[self._sent_ids :],
            logprobs=self._logprobs[self._sent_ids :] if self._logprobs else None,
        )
        self._sent_ids, self._sent_text = len(self._ids), text
        return new


def position(token_id: int, k: int) -> dict[int, Logprob]:
    """The token, then the k likeliest, which are 100, 101, … with log-probabilities −1, −2, …

    A token below 100 is none of them and has rank 50.
    """
    k = VOCAB_SIZE - 100 if k == -1 else k
    likeliest = {100 + i: entry(100 + i, i + 1) for i in range(k)}
    own = entry(token_id, token_id - 99 if token_id >= 100 else 50)
    return {token_id: own, **{i: e for i, e in likeliest.items() if i != token_id}}


def entry(token_id: int, rank: int) -> Logprob:
    return Logprob(-float(rank), rank, ByteTokenizer().decode([token_id], False))


def _overlap(text: str, stop: str) -> int:
    return max((n for n in range(1, len(stop)) if text.endswith(stop[:n])), default=0)
