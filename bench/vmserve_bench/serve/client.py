"""Load client: sends jobs to a server over HTTP, by arrival times or concurrency."""

from __future__ import annotations

import asyncio
import gc
import hashlib
import json
import time
from collections import Counter
from dataclasses import dataclass, field
from email.utils import parsedate_to_datetime
from typing import TYPE_CHECKING, Any, Literal

import httpx

from vmserve_bench.ab.jobs import sampling_seed
from vmserve_bench.ab.record import RequestSample, RunRecord
from vmserve_bench.serve.events import Answer, EventReader

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from vmserve_bench.ab.client import Load
    from vmserve_bench.ab.jobs import Job, Prompts

__all__ = ["Failure", "ServedRun", "Target", "send_load"]

_PATHS = {"completions": "/completions", "chat": "/chat/completions"}
#: Statuses with which a server may ask for a later attempt.
_BUSY = (429, 503)
_LONGEST_WAIT_S = 60.0
_MESSAGE_CHARS = 200
#: Frequent words, which are one token each in most vocabularies.
_TEXT = """
    the of and to in is it you that he was for on are with as his they be at one have this from
    or had by not but what all were when we there can an your which their said if do will each
    about how up out them then she many some so these would other into has more her two like him
    see time could no make than first been its who now people my made over did down only way find
    use may water long little very after words called just where most know
"""
_WORDS = tuple(_TEXT.split())


@dataclass(frozen=True, slots=True)
class Target:
    """``base_url`` ends before ``/completions``. ``extra_body`` is added to every request."""

    base_url: str
    model: str
    endpoint: Literal["completions", "chat"] = "completions"
    headers: Mapping[str, str] = field(default_factory=dict)
    timeout_s: float = 600.0
    #: Prompts as text instead of token ids; a chat's always are.
    is_text: bool = False
    ignore_eos: bool = True
    max_retries: int = 0
    extra_body: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Failure:
    """``status``: of HTTP, or the kind of error where there was none."""

    index: int
    status: str
    message: str


@dataclass(frozen=True, slots=True)
class ServedRun:
    """``record`` has what succeeded; its processor time is the client's."""

    record: RunRecord
    failures: tuple[Failure, ...]
    num_retries: int
    #: Answers whose length the server did not report: events were counted.
    num_counted: int
    #: Answers whose length is not the one that was asked for.
    num_other_length: int
    #: Mean seconds from when requests were due to when the client sent them: a part of each TTFT,
    #: which other clients do not count.
    mean_send_delay_s: float = 0.0

    @property
    def statuses(self) -> dict[str, int]:
        """How many requests failed with each status."""
        return dict(Counter(failure.status for failure in self.failures).most_common())


class _RequestFailed(Exception):
    def __init__(self, status: str, message: str) -> None:
        super().__init__(message)
        self.status = status


async def send_load(
    target: Target,
    jobs: Sequence[Job],
    load: Load,
    prompts: Prompts,
    seed: int,
    on_finished: Callable[[], None] = lambda: None,
) -> ServedRun:
    """Send all jobs, from the first request to the last token. Count failures."""
    # A connection per request; a server that does not listen fails at once.
    async with httpx.AsyncClient(
        headers=dict(target.headers),
        timeout=httpx.Timeout(target.timeout_s, connect=10.0),
        limits=httpx.Limits(max_connections=None, max_keepalive_connections=None),
    ) as client:
        run = _Run(client, target, prompts, seed, on_finished)
        conversations = _conversations(jobs)
        # Written before the clock starts: long prompts take milliseconds each.
        firsts = [(turns[0], prompts.of(turns[0])) for turns in conversations]
        bodies = [run.encode(job, prompt, prompt, []) for job, prompt in firsts]
        gc.collect()
        gc.freeze()
        try:
            return await run.run(list(zip(conversations, bodies, strict=True)), load)
        finally:
            gc.unfreeze()


@dataclass(eq=False)
class _Run:
    client: httpx.AsyncClient
    target: Target
    prompts: Prompts
    seed: int
    on_finished: Callable[[], None]
    finished: list[RequestSample] = field(default_factory=list)
    failures: list[Failure] = field(default_factory=list)
    send_delays_s: list[float] = field(default_factory=list)
    num_retries: int = 0
    num_counted: int = 0
    num_other_length: int = 0
    began: float = 0.0

    async def run(self, conversations: Sequence[tuple[list[Job], bytes]], load: Load) -> ServedRun:
        self.began, cpu = time.perf_counter(), time.process_time()
        if load.is_open:
            starts = [turns[0].shape.arrival_s for turns, _ in conversations]
            begun = zip(conversations, starts, strict=True)
            tasks = [self._converse(turns, body, at) for (turns, body), at in begun]
        else:
            waiting = iter(conversations)
            width = min(load.concurrency or len(conversations), len(conversations))

            async def work() -> None:
                for turns, body in waiting:
                    await self._converse(turns, body, None)

            tasks = [work() for _ in range(width)]
        await asyncio.gather(*tasks)
        cpu = time.process_time() - cpu
        ended = max((one.token_times_s[-1] for one in self.finished), default=self._now())
        return ServedRun(
            RunRecord(ended, cpu, tuple(sorted(self.finished, key=lambda one: one.index))),
            tuple(sorted(self.failures, key=lambda one: one.index)),
            self.num_retries,
            self.num_counted,
            self.num_other_length,
            sum(self.send_delays_s) / max(len(self.send_delays_s), 1),
        )

    def _now(self) -> float:
        return time.perf_counter() - self.began

    async def _converse(self, turns: Sequence[Job], body: bytes, due_s: float | None) -> None:
        """Send turns one after the other; ``due_s`` None: at once. Stop after a failure."""
        history: list[int] = []
        messages: list[dict[str, str]] = []
        for place, job in enumerate(turns):
            if due_s is not None:
                await asyncio.sleep(max(0.0, due_s - self._now()))
            prompt = self.prompts.of(job, history)
            own = prompt[len(history) :]
            if place:
                body = self.encode(job, prompt, own, messages)
            now = self._now()
            self.send_delays_s.append(0.0 if due_s is None else now - due_s)
            try:
                answer = await self._ask(job, body, now if due_s is None else due_s)
            except _RequestFailed as failure:
                self.failures.append(Failure(job.shape.index, failure.status, str(failure)))
                for later in turns[place + 1 :]:
                    told = "an earlier turn failed"
                    self.failures.append(Failure(later.shape.index, "not sent", told))
                    self.on_finished()
                return
            finally:
                self.on_finished()
            if place + 1 < len(turns):
                history = prompt + self._answer_ids(job, answer)
                messages += [
                    {"role": "user", "content": _as_text(own)},
                    {"role": "assistant", "content": answer.texts[min(answer.texts)]},
                ]
                if due_s is not None:
                    due_s = self._now() + turns[place + 1].think_s

    def _answer_ids(self, job: Job, answer: Answer) -> list[int]:
        """Tokens of the answer for the next prompt; random ones if the server sends none."""
        wanted = job.shape.num_output_tokens
        if given := answer.token_ids.get(min(answer.token_ids, default=0)):
            return (given * wanted)[:wanted]
        return self.prompts.fresh(wanted, job.shape.index + 10**6)

    def encode(
        self, job: Job, prompt: Sequence[int], own: Sequence[int], messages: Sequence[Any]
    ) -> bytes:
        """The request's body; a chat's has ``messages`` before the turn's ``own`` tokens."""
        target = self.target
        is_greedy = job.decoding.kind == "greedy"
        body: dict[str, Any] = {
            "model": target.model,
            "max_tokens": job.shape.num_output_tokens,
            "temperature": 0.0 if is_greedy else 1.0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if target.endpoint == "chat":
            body["messages"] = [*messages, {"role": "user", "content": _as_text(own)}]
        else:
            body["prompt"] = _as_text(prompt) if target.is_text else list(prompt)
        if target.ignore_eos:
            body["ignore_eos"] = True
        if not is_greedy:
            body |= {"n": job.decoding.width, "seed": sampling_seed(job, self.seed)}
        return json.dumps(body | dict(target.extra_body)).encode()

    async def _ask(self, job: Job, body: bytes, due_s: float) -> Answer:
        for attempt in range(self.target.max_retries + 1):
            answer = Answer()
            try:
                wait_s = await self._stream(body, answer, attempt)
            except httpx.HTTPError as error:
                raise _RequestFailed(type(error).__name__, str(error)) from error
            except ValueError as error:
                raise _RequestFailed("bad event", str(error)) from error
            if wait_s is None:
                break
            self.num_retries += 1
            await asyncio.sleep(wait_s)
        if answer.error:
            raise _RequestFailed("error event", answer.error[:_MESSAGE_CHARS])
        if not (answer.times_s and answer.is_complete):
            raise _RequestFailed("cut off", f"the stream ended after {answer.num_events} events")
        self.finished.append(self._sample(job, due_s, answer))
        return answer

    async def _stream(self, body: bytes, answer: Answer, attempt: int) -> float | None:
        """Send once; return the seconds to wait before a retry, None when answered."""
        url = self.target.base_url + _PATHS[self.target.endpoint]
        kind = {"content-type": "application/json"}
        async with self.client.stream("POST", url, content=body, headers=kind) as response:
            if response.status_code != httpx.codes.OK:
                text = (await response.aread()).decode("utf-8", "replace")
                if response.status_code in _BUSY and attempt < self.target.max_retries:
                    return retry_after_s(response.headers.get("retry-after"))
                raise _RequestFailed(str(response.status_code), error_text(text))
            reader = EventReader()
            async for received in response.aiter_bytes():
                now = self._now()
                for data in reader.feed(received):
                    answer.take(data, now)
        return None

    def _sample(self, job: Job, due_s: float, answer: Answer) -> RequestSample:
        width = len(answer.times_s)
        self.num_counted += answer.num_output_tokens is None
        num_tokens = answer.num_output_tokens or answer.num_events
        self.num_other_length += num_tokens != job.shape.num_output_tokens * width
        texts = [answer.texts[index] for index in sorted(answer.texts)]
        return RequestSample(
            index=job.shape.index,
            part=job.part,
            num_input_tokens=answer.num_prompt_tokens or job.shape.num_input_tokens,
            num_output_tokens=max(1, round(num_tokens / width)),
            num_sequences=width,
            due_s=due_s,
            token_times_s=tuple(answer.token_times_s()),
            is_streamed=True,
            num_cached_tokens=answer.num_cached_tokens,
            num_preemptions=0,
            kv_regime="",
            kv_regime_reason="",
            digest=hashlib.sha256(repr(texts).encode()).hexdigest()[:16],
        )


def _conversations(jobs: Sequence[Job]) -> list[list[Job]]:
    """Group jobs in order, each turn after the one that it follows."""
    found: dict[int, list[Job]] = {}
    for job in jobs:
        found[job.shape.index] = [] if job.previous is None else found[job.previous]
        found[job.shape.index].append(job)
    return [turns for index, turns in found.items() if turns[0].shape.index == index]


def _as_text(token_ids: Sequence[int]) -> str:
    """Write a word for each token; equal tokens give equal words, so prefixes stay shared."""
    return " ".join(_WORDS[token_id % len(_WORDS)] for token_id in token_ids)


def retry_after_s(header: str | None) -> float:
    """Seconds to wait by a Retry-After header, 1 without one, a minute at most."""
    try:
        seconds = float(header or 1.0)
    except ValueError:
        try:
            seconds = parsedate_to_datetime(header or "").timestamp() - time.time()
        except ValueError:
            return 1.0
    return min(max(seconds, 0.0), _LONGEST_WAIT_S)


def error_text(body: str) -> str:
    """The message of an error's reply, whatever its shape, in one short line."""
    try:
        told = json.loads(body)
        error = told.get("error", told.get("detail", told)) if isinstance(told, dict) else told
        message = error.get("message", error) if isinstance(error, dict) else error
    except ValueError:
        message = body
    return " ".join(str(message).split())[:_MESSAGE_CHARS]
