"""Fakes at the engine's seams, for tests of what is built on it.

``LLM(...)`` and ``LLMEngine(...)`` do all that they do with a model, but for the forward pass:

    >>> from vmserve.config import EngineConfig
    >>> from vmserve.engine.engine import LLMEngine
    >>> engine = LLMEngine(EngineConfig(device="cpu"), runtime=NullRuntime(token_id=7))

:class:`ScriptedTransport` takes the engine's place behind a client: there is no engine at all.
:class:`vmserve_bench.simulation.SimulatedEngine` goes without a tokenizer and real memory.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import numpy as np

from vmserve import _core
from vmserve.client.callers import Callers
from vmserve.client.messages import (
    Abort,
    Add,
    Ask,
    Ended,
    Lost,
    Noted,
    Reply,
    Revived,
    StepUpdate,
    ToEngine,
    Unpin,
)
from vmserve.client.transports.base import Facts, Receive
from vmserve.engine.limits import RequestLimits
from vmserve.errors import (
    ConfigurationError,
    EngineDeadError,
    InvalidRequestError,
    VmserveError,
)
from vmserve.runner.null_runtime import NullRuntime
from vmserve.sampling import SamplingParams
from vmserve.sampling.tokens import TopTokens
from vmserve.telemetry.snapshot import (
    PAGE_MAPPED,
    PAGE_SHARED,
    EngineSnapshot,
    PoolMap,
    RequestSnapshot,
)
from vmserve.text.scores import PromptScores
from vmserve.text.update import ChoiceUpdate, RequestUpdate
from vmserve.types import (
    FinishReason,
    RequestMetrics,
)

__all__ = [
    "BOS",
    "EOS",
    "VOCAB_SIZE",
    "ByteTokenizer",
    "FaultInjectingDriver",
    "NullDriver",
    "NullRuntime",
    "ScriptedTransport",
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
    fingerprint = "bytes"
    specials: Mapping[int, str] = {0: "<pad>", BOS: "<s>", EOS: "</s>"}
    special_ids = frozenset(specials)
    is_byte_level = True

    @property
    def table(self) -> ByteTokenizer:
        """What single tokens decode to: :class:`~vmserve.text.detokenizer.TokenTable`."""
        return self

    def piece(self, token_id: int) -> str | bytes:
        special = self.specials.get(token_id)
        return bytes([token_id - FIRST_BYTE]) if special is None else special

    def token_text(self, token_id: int) -> str:
        return self.decode([token_id], False)

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
    """The fields of the configuration, and of the model's, which clients read."""

    max_model_len: int = 256
    max_logprobs: int = 20
    max_num_seqs: int = 128
    vocab_size: int = VOCAB_SIZE
    request_timeout: float | None = None
    kv_cache_dtype: str = "auto"
    block_tokens: int = 4
    prefix_caching: bool = True
    kv_limit_bytes: int = 0


def scripted(text: str) -> Callable[[list[int], int], list[int]]:
    """A ``reply`` of :class:`ScriptedTransport`: ``text`` and its end; of choice j > 0, ``text``
    j."""

    def reply(prompt: list[int], index: int) -> list[int]:
        suffix = str(index) if index else ""
        return [*ByteTokenizer().encode(text + suffix, False), EOS]

    return reply


class ScriptedTransport:
    """A transport to an engine that is not there, with a byte-level toy model.

    >>> client = Client(ScriptedTransport("hello"))
    >>> app = create_app(client, ServerConfig(served_model_names=("m",)))

    Every request gets one token for each of its choices per pass of the event loop. ``text`` is the
    answer; ``reply(prompt ids, choice index)`` may be replaced and returns the ids of one, which
    repeat if they do not end. ``shape``: max_model_len, max_logprobs, max_num_seqs, vocab_size,
    request_timeout. :func:`position` has the log-probabilities.

    What a test sets: ``facts``; ``pause``, an event that holds all requests after ``pause_after``
    tokens; ``fail``, which each request then raises; ``died``, whose result says that the engine is
    not started again. What it reads: ``requests``, ``running``, and the ids in ``finished`` and
    ``aborted``.
    """

    def __init__(self, text: str = "hello", **shape: Any) -> None:
        resolved: Any = _Shape(**shape)
        tokenizer: Any = ByteTokenizer()
        self.facts = Facts(
            resolved=resolved,
            limits=RequestLimits(
                "Scripted",
                True,
                resolved.vocab_size,
                resolved.max_model_len,
                resolved.max_num_seqs,
                resolved.max_logprobs,
            ),
            model=resolved,
            tokenizer=tokenizer,
            default_sampling={},
            identity="scripted",
            can_sleep=True,
            latest=lambda: self.stats(),
            max_num_running=resolved.max_num_seqs,
        )
        self.callers = Callers()
        self.reply = scripted(text)
        self.pause: asyncio.Event | None = None
        self.pause_after = 1
        self.fail: Exception | None = None
        #: Prompt ids, parameters, and the request's id, prompt and terms that are set.
        self.requests: list[tuple[list[int], SamplingParams, dict[str, Any]]] = []
        self.aborted: list[str] = []
        self.finished: list[str] = []
        #: Events that end requests, by request id.
        self.running: dict[str, asyncio.Event] = {}
        self._num_waiting = 0
        self.stopped = False
        self.num_cached = 0
        self.died: Future[None] = Future()
        self.num_snapshots = 0
        self.num_resets = 0
        self.kv_cache_memory: int | str = 0
        #: Tokens of pinned prefixes, by handle; an error: pinning is refused.
        self.pins: dict[int, list[int]] = {}
        self.refuses_pins: VmserveError | None = None
        #: Cleared to hold :meth:`start` again.
        self.waking = asyncio.Event()
        self.waking.set()
        self.fail_to_wake: VmserveError | None = None
        self.num_wakes = 0
        #: Names and work of requests by handle.
        self._tasks: dict[int, tuple[str, asyncio.Task[None]]] = {}
        self._death: asyncio.Task[None] | None = None
        self._receive: Receive = lambda message: None

    @property
    def num_waiting(self) -> int:
        """How many of those in ``running`` wait in the engine's queue."""
        return self._num_waiting

    @num_waiting.setter
    def num_waiting(self, value: int) -> None:
        self._num_waiting = value
        self._count()

    def _count(self) -> None:
        self.facts.num_running = len(self.running) - self._num_waiting

    def stats(self) -> dict[str, float | int]:
        return {
            "num_requests_running": self.facts.num_running,
            "num_requests_waiting": self.num_waiting,
            "kv_cache_usage_perc": 0.0,
            "num_preemptions_total": 0,
            "prompt_tokens_total": 7,
            "generation_tokens_total": 9,
            "limit_pages": 64,
            "blocks_per_page": 4,
            "page_bytes": 512,
        }

    # -- the transport ------------------------------------------------------------------

    def on(self, receive: Receive) -> None:
        self._receive = receive

    async def start(self, *, again: bool = False) -> None:
        if again:
            await self.waking.wait()
            if self.fail_to_wake is not None:
                raise self.fail_to_wake
            self.num_wakes += 1
            self.stopped = False
            self._receive(Revived())
        if self._death is None:
            self._death = asyncio.ensure_future(self._await_death())

    async def _await_death(self) -> None:
        await asyncio.wrap_future(self.died)
        self.facts.is_dead = self.facts.is_ended = True
        self._receive(Ended())

    async def close(self) -> None:
        self.stopped = True
        for abort in self.running.values():
            abort.set()

    def lose(self) -> None:
        """Die, as an engine that can be started again."""
        self.facts.is_dead = True
        for _, task in list(self._tasks.values()):
            task.cancel()
        self._receive(Lost())

    def revive(self) -> None:
        """Serve again after :meth:`lose`."""
        self.facts.is_dead = False
        self._receive(Revived())

    def suspect(self, is_suspect: bool = True) -> None:
        """Be silent for long, or heard of again."""
        self.facts.is_suspect = is_suspect
        self._receive(Noted())

    def send(self, message: ToEngine) -> None:
        match message:  # also if the engine is dead
            case Unpin():
                self.pins.pop(message.pin, None)
            case Ask(_, "pin_prefix", arguments):
                self.pins[arguments["pin"]] = arguments["token_ids"]
        if self.facts.is_dead or self.stopped:
            raise EngineDeadError("the engine has stopped")
        match message:
            case Add():
                task = asyncio.ensure_future(self._serve(message))
                self._tasks[message.handle] = message.request_id, task
                task.add_done_callback(lambda _: self._tasks.pop(message.handle, None))
            case Abort(handle, tell) if handle in self._tasks:
                name, task = self._tasks[handle]
                if tell and name in self.running:
                    self.running[name].set()
                else:
                    task.cancel()
            case Ask():
                try:
                    value = self._answer(message.question, message.arguments)
                except VmserveError as error:
                    self._receive(Reply(message.serial, None, error))
                else:
                    self._receive(Reply(message.serial, value))

    def _answer(self, question: str, arguments: Mapping[str, Any]) -> Any:
        match question:
            case "snapshot":
                return self._snapshot()
            case "set_kv_cache_memory":  # 4096: the new limit in bytes
                if arguments["size"] == "1KiB":
                    raise ConfigurationError("raise --kv-cache-memory to 2KiB")
                self.kv_cache_memory = arguments["size"]
                return 4096
            case "reset_prefix_cache":
                self.num_resets += 1
            case "pin_prefix":
                if self.refuses_pins is not None:
                    raise self.refuses_pins
                return len(arguments["token_ids"])
        return None

    def _snapshot(self) -> EngineSnapshot:
        """All running requests; four pages: absent, free, shared in the virtual view, cached."""
        self.num_snapshots += 1
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

    # -- requests -----------------------------------------------------------------------

    async def _serve(self, add: Add) -> None:
        try:
            await self._run(add)
        except Exception as error:  # noqa: BLE001  a test's
            self._say(failures=[(add.handle, error)])

    async def _run(self, add: Add) -> None:
        params = add.params.as_sampling()  # beams become independent choices
        terms, request_id = add.terms, add.request_id
        extra = {
            "request_id": request_id,
            "prompt": self.facts.tokenizer.decode(add.prompt_token_ids),
            "priority": terms.priority,
        }
        for name in ("cache_salt", "tenant", "isolation", "timeout"):
            if getattr(terms, name):
                extra[name] = getattr(terms, name)
        self.requests.append((add.prompt_token_ids, params, extra))
        run = _Run(self, add, params)
        abort = self.running[request_id] = asyncio.Event()
        ended = False
        try:
            self._say(accepted=[add.handle] if add.is_stream else [])
            while not ended:
                await self._pace(run, abort)
                news = run.abort() if abort.is_set() else run.step()
                ended = all(choice.finish_reason for choice in run.choices)
                if ended:
                    self.finished.append(request_id)
                    del self.running[request_id]
                if terms.stream or ended:
                    news = news if terms.stream else [each.whole() for each in run.choices]
                    self._say(updates=[(add.handle, run.update(news, finished=ended))])
        finally:
            if not ended:
                self.aborted.append(request_id)
                del self.running[request_id]
                self._say()

    def _say(self, **news: Any) -> None:
        self._count()
        if self.facts.is_dead:
            return  # nobody hears it
        fields = {"accepted": [], "updates": [], "failures": [], **news}
        self._receive(StepUpdate(self.facts.num_running, self.num_waiting, **fields))

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

    def __init__(self, engine: ScriptedTransport, add: Add, params: SamplingParams) -> None:
        self._prompt_ids = prompt_ids = add.prompt_token_ids
        self._params = params
        self._num_cached = engine.num_cached
        self.num_steps = 0
        left = engine.facts.resolved.max_model_len - len(prompt_ids)
        most = left if params.max_tokens is None else min(params.max_tokens, left)
        self.choices = [
            _Choice(index, engine.reply(prompt_ids, index), most, params)
            for index in range(params.n)
        ]

    def step(self) -> list[ChoiceUpdate]:
        self.num_steps += 1
        return [choice.step() for choice in self.choices if not choice.finish_reason]

    def abort(self) -> list[ChoiceUpdate]:
        return [choice.end("abort") for choice in self.choices if not choice.finish_reason]

    def _state(self) -> bytes:
        """The embedding of a prompt: its number of tokens, then 0, 1, 2."""
        return np.array([len(self._prompt_ids), 0, 1, 2], np.float32).tobytes()

    def update(self, news: list[ChoiceUpdate], *, finished: bool) -> RequestUpdate:
        wanted = self._params.prompt_logprobs
        scores = None
        if wanted is not None and (finished or self.num_steps == 1):
            scores = PromptScores(None)
            scores.extend(position(token_id, wanted) for token_id in self._prompt_ids[1:])
        metrics = RequestMetrics(
            arrival_time=10.0,
            first_scheduled_time=10.5,
            first_token_time=11.0,
            last_token_time=13.0,
            finished_time=13.0,
            num_cached_tokens=self._num_cached,
        )
        return RequestUpdate(
            "",
            news,
            finished,
            metrics,
            None if scores is None else scores.pack(),
            self._state() if finished and self._params.pooling is not None else None,
        )


class _Choice:
    def __init__(self, index: int, script: list[int], most: int, params: SamplingParams) -> None:
        self._index = index
        self._script = script
        self._most = most
        self._params = params
        self._ids: list[int] = []
        self._logprobs: list[TopTokens] = []
        self._num_sent = 0
        self._stop_reason: int | str | None = None
        self._hides_last = False
        self.finish_reason: FinishReason | None = None

    def step(self) -> ChoiceUpdate:
        params = self._params
        if len(self._ids) >= self._most:
            return self.end("length")
        token_id = self._script[len(self._ids) % len(self._script)]
        self._ids.append(token_id)
        if params.logprobs is not None:
            wanted = params.logprob_token_ids
            self._logprobs.append(
                position(token_id, params.logprobs)
                if wanted is None
                else {token_id: (-1.0, 1), **dict.fromkeys(wanted, (-2.0, 2))}
            )
        if token_id == EOS and not params.ignore_eos:
            return self.end("stop", hides_last=True)
        if token_id in params.stop_token_ids:
            return self.end("stop", token_id, hides_last=True)
        text = ByteTokenizer().decode(self._ids, params.skip_special_tokens)
        for stop in params.stop:
            if stop in text:
                return self.end("stop", stop)
        return self.end("length") if len(self._ids) == self._most else self._news()

    def end(
        self, reason: FinishReason, stop: int | str | None = None, *, hides_last: bool = False
    ) -> ChoiceUpdate:
        self.finish_reason, self._stop_reason, self._hides_last = reason, stop, hides_last
        return self._news()

    def whole(self) -> ChoiceUpdate:
        self._num_sent = 0
        return self._news()

    def _news(self) -> ChoiceUpdate:
        begin, self._num_sent = self._num_sent, len(self._ids)
        return ChoiceUpdate(
            self._index,
            self._ids[begin:],
            0.0,
            self._logprobs[begin:] if self._params.logprobs is not None else None,
            self.finish_reason,
            self._stop_reason,
            self._hides_last,
        )


def position(token_id: int, k: int) -> TopTokens:
    """The token, then the k likeliest, which are 100, 101, … with log-probabilities −1, −2, …

    A token below 100 is none of them and has rank 50. Log-probability and rank by id.
    """
    k = VOCAB_SIZE - 100 if k == -1 else k
    rank = token_id - 99 if token_id >= 100 else 50
    likeliest = {100 + place: (-1.0 - place, place + 1) for place in range(k)}
    return {token_id: (-float(rank), rank)} | {
        each: entry for each, entry in likeliest.items() if each != token_id
    }
