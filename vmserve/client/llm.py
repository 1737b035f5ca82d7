"""The offline API: prompts in, finished outputs out, computed in the caller's thread."""

from __future__ import annotations

import itertools
import logging
import os
from collections.abc import Callable, Coroutine, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, TypeVar, get_args

from vmserve.client.client import Client
from vmserve.client.inbox import OpenRequest
from vmserve.client.lending import KVPool
from vmserve.client.loop_thread import LoopThread
from vmserve.client.transports.inline import InlineTransport
from vmserve.client.transports.supervised import Supervision
from vmserve.config import LEAST, EngineConfig
from vmserve.engine.engine import LLMEngine
from vmserve.errors import ConfigurationError, InvalidRequestError
from vmserve.models.hub import EMBEDDED_NAME
from vmserve.models.loader import Progress
from vmserve.options import rules
from vmserve.router.policy import Policy
from vmserve.sampling import BeamSearchParams, GenerationParams, SamplingParams
from vmserve.sampling.params import Pooling
from vmserve.system.progress import generation_progress
from vmserve.text.prompts import Prompt, PromptLike, encode_prompt, split_prompts
from vmserve.text.tokenizer import Tokenizer
from vmserve.types import (
    EmbeddingOutput,
    PinnedPrefix,
    RequestOutput,
    RequestTerms,
    shaped_embedding,
)

__all__ = ["LLM"]

T = TypeVar("T")
Message = Mapping[str, Any]
#: Restarts of an engine within an hour, if it is one of several.
_RESTARTS = 10


class LLM:
    """A model and its engine, for use from a script.

    ``model``: a directory in Hugging Face layout, a GGUF file, a hub id, a pulled model's name, or
    None (or ``vmserve-embedded``) for the embedded model. Further arguments are engine options
    (:class:`vmserve.EngineConfig`); an unknown one is an error.

    ``kv_pool``: a :class:`vmserve.KVPool` that lends this model, and others, the memory of their KV
    caches. A model gets at least ``kv_floor`` (default: what its longest sequence needs), at most
    ``kv_cap`` (the whole pool), and in between by ``kv_weight`` where models compete.

        with LLM(kv_cache_memory="256MiB") as llm:
            [result] = llm.generate("Once upon a time", SamplingParams(temperature=0))
            print(result.outputs[0].text)

    ``data_parallel_size``: so many engines, in processes of their own, each with its own cores and
    an equal part of ``kv_cache_memory``. ``router`` ("prefix", "least-loaded" or "round-robin")
    chooses for each request. With ``distributed_executor="ray"`` they are on the nodes of a Ray
    cluster, each with ``ray_num_cpus``. Answers are the same; a grammar that cannot be compiled is
    found when other requests may have begun.

    Raises :class:`~vmserve.errors.ConfigurationError` or
    :class:`~vmserve.errors.OutOfMemoryError`. Calls of several threads run one after another: use
    :class:`vmserve.AsyncLLM` for several callers at once.
    """

    def __init__(
        self,
        model: str | os.PathLike[str] | None = None,
        *,
        progress: Progress | None = None,
        kv_pool: KVPool | None = None,
        kv_weight: float = 1.0,
        kv_floor: int | str | None = None,
        kv_cap: int | str | None = None,
        data_parallel_size: int = 1,
        router: Policy = "prefix",
        distributed_executor: Literal["process", "ray"] = "process",
        ray_num_cpus: int | None = None,
        **engine_options: Any,
    ) -> None:
        self._ids = itertools.count()
        self._pool = kv_pool
        self._engine: LLMEngine | None = None
        is_one = data_parallel_size == 1 and distributed_executor == "process"
        rules.check(
            {
                "kv_pool": kv_pool is not None,
                "is_one_process": is_one,
                "own_kv_cache_memory": "kv_cache_memory" in engine_options,
            }
        )
        #: What runs a call of the client to its end, in this thread or another one.
        self._driver: InlineTransport | LoopThread
        if not is_one:
            self._driver = driver = _several(
                data_parallel_size, router, distributed_executor, ray_num_cpus,
                {"model": model, "progress": progress, **engine_options},
            )  # fmt: skip
            self._client = Client(driver.transport)
            return
        if kv_pool is not None:
            engine_options["kv_cache_memory"] = LEAST
        config = EngineConfig.from_options({"model": model, **engine_options})
        self._engine = engine = LLMEngine(config, progress=progress)
        self._driver = transport = InlineTransport(engine)
        self._client = Client(transport)
        if kv_pool is not None:
            self._name = kv_pool.unused_name(Path(config.model or EMBEDDED_NAME).name)
            terms: dict[str, Any] = {"weight": kv_weight, "floor": kv_floor, "cap": kv_cap}
            try:
                kv_pool.join_now(self._client, self._name, **terms)
            except ConfigurationError:
                engine.close()
                raise

    @property
    def engine(self) -> LLMEngine:
        """The engine (memory, scheduler, counters).

        Raises an error after :meth:`close`, and where there are several.
        """
        if self._engine is None:
            raise ConfigurationError("engine: the engines of this LLM are in other processes")
        self._driver.check_open()
        return self._engine

    @property
    def _tokenizer(self) -> Tokenizer:
        self._driver.check_open()
        return self._client.tokenizer

    def generate(
        self,
        prompts: PromptLike | Sequence[PromptLike],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        priority: int | Sequence[int] | None = None,
        use_tqdm: bool = False,
    ) -> list[RequestOutput]:
        """Complete the prompts; returns results in the order of the prompts.

        ``sampling_params`` and ``priority``: one for all prompts, or one for each. Without
        ``sampling_params`` the model's own defaults are used. ``use_tqdm``: show progress. An
        interrupt (Ctrl-C, an exception of a signal's handler) ends the call's requests, and the
        next call finds all memory free.

        Raises :class:`~vmserve.errors.InvalidRequestError` if one prompt or more cannot be served;
        nothing is computed then.
        """
        encoded = [encode_prompt(p, self._tokenizer) for p in split_prompts(prompts)]
        return self._run(encoded, sampling_params, priority, use_tqdm)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        priority: int | Sequence[int] | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template: str | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        add_generation_prompt: bool | None = None,
        continue_final_message: bool = False,
        use_tqdm: bool = False,
    ) -> list[RequestOutput]:
        """Answer one conversation (a list of messages) or several, by the chat template.

        ``add_generation_prompt`` None: True, unless the final message is continued.
        """
        conversations = _conversations(messages)
        encoded = []
        for conversation in conversations:
            text, token_ids = self._tokenizer.apply_chat_template(
                conversation,
                tools=tools,
                chat_template=chat_template,
                chat_template_kwargs=chat_template_kwargs,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
            )
            encoded.append(Prompt(text, token_ids))
        if sampling_params is None:
            # A chat answer ends by itself. The context is its limit, as in the HTTP API.
            sampling_params = self.default_sampling_params(max_tokens=None)
        return self._run(encoded, sampling_params, priority, use_tqdm)

    def beam_search(
        self,
        prompts: PromptLike | Sequence[PromptLike],
        params: BeamSearchParams,
        *,
        use_tqdm: bool = False,
    ) -> list[RequestOutput]:
        """Find the ``params.beam_width`` best answers to each prompt, best first.

        They are those of ``transformers``, ranked by the sum of their tokens' log-probabilities /
        length ** ``length_penalty``.
        """
        given: Any = params  # callers without a type checker pass anything
        if not isinstance(given, BeamSearchParams):
            raise InvalidRequestError(
                f"beam_search takes BeamSearchParams, not {type(given).__name__}", "params"
            )
        encoded = [encode_prompt(p, self._tokenizer) for p in split_prompts(prompts)]
        return self._run(encoded, params, None, use_tqdm)

    def embed(
        self,
        prompts: PromptLike | Sequence[PromptLike],
        *,
        pooling: Pooling = "auto",
        normalize: bool = True,
        dimensions: int | None = None,
        use_tqdm: bool = False,
    ) -> list[EmbeddingOutput]:
        """Compute an embedding of each prompt: the model's final hidden states, pooled.

        ``pooling``: the state of the "last" token, the "mean" of all, or "auto" for what the model
        was trained for (its ``1_Pooling/config.json``, else "last"). ``dimensions``: keep only the
        first ones, which some models are trained for. ``normalize``: scale to length 1.

        Raises :class:`~vmserve.errors.InvalidRequestError`.
        """
        encoded = [encode_prompt(p, self._tokenizer) for p in split_prompts(prompts)]
        params = SamplingParams(max_tokens=0, pooling=pooling, detokenize=False)
        outputs = []
        for result in self._run(encoded, params, None, use_tqdm):
            assert result.embedding is not None
            embedding = shaped_embedding(result.embedding, dimensions, normalize)
            outputs.append(
                EmbeddingOutput(result.prompt, result.prompt_token_ids, embedding, result.metrics)
            )
        return outputs

    def pin_prefix(self, prompt: PromptLike, *, cache_salt: str = "") -> PinnedPrefix:
        """Compute a prefix (a system prompt, say) and keep it in memory.

        Until :meth:`unpin_prefix`, its whole blocks stay in the prefix cache. Requests of the same
        ``cache_salt`` whose prompts begin with it find them there.

        Raises :class:`~vmserve.errors.InvalidRequestError` for a prompt that cannot be served,
        without prefix caching, and if too many prefixes are pinned.
        """
        token_ids = encode_prompt(prompt, self._tokenizer).token_ids
        return self._wait(lambda: self._client.pin_prefix(token_ids, cache_salt=cache_salt))

    def unpin_prefix(self, handle: int) -> None:
        """Let the prefix be evicted again. Raises ``ValueError`` for an unknown handle."""
        self._wait(lambda: self._client.unpin_prefix(handle))

    def set_kv_cache_memory(self, size: int | str) -> int:
        """Change how far the KV cache may grow, e.g. to "2GiB"; returns its bytes in whole pages.

        Raises :class:`~vmserve.errors.ConfigurationError` if the longest sequence and the pinned
        prefixes do not fit, and for more than the device has.
        """
        return self._wait(lambda: self._client.set_kv_cache_memory(size))

    def reset_prefix_cache(self) -> None:
        """Forget every cached prefix, and compute pinned ones again."""
        self._wait(self._client.reset_prefix_cache)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=add_special_tokens)

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        return self._tokenizer.decode(list(token_ids), skip_special_tokens=skip_special_tokens)

    def get_tokenizer(self) -> Any:
        """The ``transformers`` tokenizer."""
        return self._tokenizer.hf

    def default_sampling_params(self, **changes: Any) -> SamplingParams:
        """The sampling parameters of the model's generation_config.json, with ``changes``."""
        return SamplingParams(**{**self._client.default_sampling, **changes})

    def stats(self) -> dict[str, float | int]:
        """The engine's metrics by name (``num_requests_running``, ``pages_mapped_total``, ...)."""
        self._driver.check_open()
        if self._engine is None:
            self._wait(self._client.refresh)
        return self._client.stats()

    def close(self) -> None:
        """Free all memory. Any other call afterwards raises an error; closing twice does not."""
        if self._driver.end() and self._pool is not None:
            self._pool.leave(self._name)

    def __enter__(self) -> LLM:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def _wait(self, work: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Run one call of the client to its end."""
        [result] = self._driver.run(lambda: [work()])
        return result

    def _run(
        self,
        prompts: list[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | BeamSearchParams | None,
        priority: int | Sequence[int] | None,
        show_progress: bool,
    ) -> list[RequestOutput]:
        each_priority = _one_each(
            0 if priority is None else priority, int, len(prompts), "priority"
        )
        each_params: Sequence[GenerationParams]
        if isinstance(params, BeamSearchParams):
            each_params = [params] * len(prompts)
        else:
            given = self.default_sampling_params() if params is None else params
            each_params = _one_each(given, SamplingParams, len(prompts), "sampling_params")

        def works() -> list[Coroutine[Any, Any, RequestOutput]]:
            # All requests are checked before the first is queued.
            opened = [
                self._client.open(prompt, one, request_id=str(next(self._ids)), terms=terms)
                for prompt, one, terms in asked
            ]
            if self._engine is not None:
                for each in opened:
                    if each.add.params.structured_outputs is not None:
                        self._engine.structured.check(each.add.params.structured_outputs)
            return [self._complete(each, report) for each in opened]

        # Those of a lower number begin first, where they do not all begin at once.
        order = sorted(range(len(prompts)), key=lambda place: each_priority[place])
        asked = [
            (prompts[place], each_params[place], RequestTerms(priority=each_priority[place]))
            for place in order
        ]
        with generation_progress(len(prompts), show_progress) as report:
            outputs = self._driver.run(works)
        by_place = dict(zip(order, outputs, strict=True))
        return [by_place[place] for place in range(len(prompts))]

    async def _complete(self, request: OpenRequest, report: Callable[[int], None]) -> RequestOutput:
        await self._client.start()
        output = await self._client.complete(request)
        report(sum(len(choice.token_ids) for choice in output.outputs))
        return output


def _several(
    size: int,
    router: Policy,
    executor: Literal["process", "ray"],
    ray_num_cpus: int | None,
    options: dict[str, Any],
) -> LoopThread:
    from vmserve.client.engines.local import start_engines  # noqa: PLC0415 - most have one engine

    if not 1 <= size <= 1024:
        raise ConfigurationError(f"data_parallel_size: {size} is not between 1 and 1024")
    if router not in get_args(Policy):
        raise ConfigurationError(f"router: {router!r} is not one of {', '.join(get_args(Policy))}")
    quiet = Supervision(log_level=logging.WARNING, restarts=_RESTARTS)
    if executor == "process":
        return LoopThread(lambda: start_engines(size, router, supervision=quiet, **options))
    if executor != "ray":
        raise ConfigurationError(f"distributed_executor: {executor!r} is not process or ray")
    from vmserve.client.engines.on_ray import place_engines  # noqa: PLC0415 - as above

    del options["progress"]
    return LoopThread(
        lambda: place_engines(size, router, num_cpus=ray_num_cpus, supervision=quiet, **options)
    )


def _conversations(messages: Any) -> list[list[Any]]:
    """List the conversations of an argument. The contents of messages are checked later."""
    if isinstance(messages, Mapping | str) or not isinstance(messages, Sequence | None):
        raise InvalidRequestError(
            f"messages: a list of messages, or of such lists, not {type(messages).__name__}",
            "messages",
        )
    if not messages:
        raise InvalidRequestError("messages is empty: give at least one message", "messages")
    if isinstance(messages[0], Mapping):
        return [list(messages)]
    for conversation in messages:
        if isinstance(conversation, str) or not isinstance(conversation, Sequence):
            raise InvalidRequestError(
                f"messages: a message is an object, not {type(conversation).__name__}", "messages"
            )
    return [list(conversation) for conversation in messages]


def _one_each(value: T | Sequence[T], kind: type[T], count: int, name: str) -> list[T]:
    if isinstance(value, kind):
        return [value] * count
    if not isinstance(value, Sequence) or not all(isinstance(item, kind) for item in value):
        raise InvalidRequestError(
            f"{name}: give one {kind.__name__} or a list of them, not {value!r}", name
        )
    if len(value) != count:
        raise InvalidRequestError(
            f"{name}: {len(value)} given for {count} prompts; give one, or one for each", name
        )
    return list(value)
