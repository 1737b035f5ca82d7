"""The life of an engine: requests arrive, are aborted and change their regime at random moments,
while the pool changes its size, the system refuses memory, and steps fail."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from tests.support.small_engine import assert_nothing_left
from vmserve import LLM, BeamSearchParams, RequestOutput
from vmserve.engine.engine import LLMEngine
from vmserve.engine.results import StepResult
from vmserve.errors import ConfigurationError, InvalidRequestError, OutOfMemoryError
from vmserve.memory.base import Regime
from vmserve.sampling import GenerationParams
from vmserve.text.assembly import RequestAssembly
from vmserve.types import RequestTerms

__all__ = ["Asked", "Chances", "Life", "answered", "whole", "without_logprobs"]

#: Far more than any of these lives takes: one that needs more does not end.
MAX_STEPS = 6000


@dataclass
class Asked:
    """A request, and what it was told."""

    prompt: list[int]
    params: GenerationParams
    salt: str = ""
    tenant: str = ""
    priority: int = 0
    stream: bool = False
    assembly: RequestAssembly | None = None
    parts: list[RequestOutput] = field(default_factory=list)


@dataclass(frozen=True)
class Chances:
    """How likely each of these is before a step; faults: how likely they are in it."""

    ask: float = 0.25
    abort: float = 0.02
    convert: float = 0.1
    limit: float = 0.0
    #: A pool lends the memory, and recalls it.
    lend: float = 0.0
    pin: float = 0.0
    reset: float = 0.0
    #: How often the laws of the memory are checked, after a step.
    check: float = 1.0
    #: The memory refuses to apply a plan; a batch fails; planning raises an exception.
    fault_apply: float = 0.0
    fault_batch: float = 0.0
    fault_plan: float = 0.0


class Life:
    """One engine, what was asked of it, and what became of that."""

    def __init__(self, llm: LLM, rng: random.Random, chances: Chances) -> None:
        self.llm = llm
        self.engine: LLMEngine = llm.engine
        self.rng = rng
        self.chances = chances
        self.asked: dict[str, Asked] = {}
        self.done: dict[str, RequestOutput] = {}
        self.failed: dict[str, str] = {}
        self.aborted: set[str] = set()
        #: Requests that an injected fault may have ended.
        self.excused: set[str] = set()
        self._pins: list[int] = []
        self._limit = self._least_limit = self.engine.memory.limit_bytes
        self.num_waits = 0
        #: Seconds of a pool's time: it passes only while nothing can run.
        self._waited = 0.0
        self.engine.pool.lease._clock = lambda: self._waited
        self._inject()

    def _inject(self) -> None:
        memory, runner, chances = self.engine.memory, self.engine.runner, self.chances

        def inject(
            owner: Any,
            method: str,
            chance: float,
            error: Callable[[str], Exception],
            excused: Callable[[Any], Any],
        ) -> None:
            """Raise the error in so many of the calls; ``excused``: whom one concerns."""
            call = getattr(owner, method)

            def failing(*args: Any) -> Any:
                if self.rng.random() < chance:
                    self.excused.update(excused(args[0]))
                    raise error(f"{method} fails (injected)")
                return call(*args)

            if chance:
                setattr(owner, method, failing)

        inject(memory, "apply", chances.fault_apply, OutOfMemoryError, lambda _: self._running())
        inject(runner, "execute", chances.fault_batch, RuntimeError, self._computed)
        inject(memory, "plan", chances.fault_plan, ValueError, lambda _: self.engine.request_ids)

    def _running(self) -> list[str]:
        return list(self.engine.scheduler.running_request_ids)

    @staticmethod
    def _computed(plan: Any) -> list[str]:
        return [item.sequence.request.request_id for item in plan.scheduled]

    # -- what happens -----------------------------------------------------------------

    def live(self, num_requests: int, ask: Callable[[], Asked]) -> None:
        rng, chances = self.rng, self.chances
        for _ in range(MAX_STEPS):
            if len(self.asked) < num_requests and rng.random() < chances.ask:
                self._ask(ask())
            elif not self.engine.has_unfinished and len(self.asked) == num_requests:
                return
            running = self.engine.request_ids
            if running and rng.random() < chances.abort:
                self._abort(rng.choice(running))
            if running and rng.random() < chances.convert:
                self.engine.convert(rng.choice(running), rng.choice(list(Regime)))
            if rng.random() < chances.limit:
                least = self.engine.kv_bounds()[1]
                with contextlib.suppress(ConfigurationError):  # a draft model's part is too small
                    self.engine.set_kv_cache_memory(int(least + rng.random() * self._limit))
                self._least_limit = min(self._least_limit, self.engine.memory.limit_bytes)
            if chances.lend and rng.random() < chances.lend:
                least = self.engine.kv_bounds()[1]
                self.engine.lend(
                    int(least + rng.random() * self._limit), reclaim=rng.random() < 0.4
                )
            if rng.random() < chances.pin:
                self._pin()
            if rng.random() < chances.reset:
                self._pins.clear()
                self.engine.reset_prefix_cache()
            self._step()
            if rng.random() < chances.check:
                self.engine.memory.check()
        raise AssertionError(f"no end: {self.engine.request_ids} {self.engine.stats()}")

    def _ask(self, asked: Asked) -> None:
        name = f"r{len(self.asked)}"
        self.asked[name] = asked
        asked.assembly = RequestAssembly(
            self.engine.tokenizer,
            name,
            None,
            asked.prompt,
            asked.params,
            arrival_time=0.0,
            stream=asked.stream,
        )
        terms = RequestTerms(
            cache_salt=asked.salt,
            stream=asked.stream,
            tenant=asked.tenant,
            isolation=asked.tenant,
            priority=asked.priority,
        )
        self.engine.add_request(name, asked.prompt, asked.params, terms)

    def _abort(self, name: str) -> None:
        output = self.engine.abort(name)
        assert output is not None
        assert output.finished
        self.aborted.add(name)

    def _pin(self) -> None:
        if self._pins and self.rng.random() < 0.5:
            self.engine.unpin_prefix(self._pins.pop())
        elif self.asked:
            asked = self.rng.choice(list(self.asked.values()))
            try:
                pinned = self.engine.hold_prefix(
                    asked.prompt, cache_salt=asked.salt, isolation=asked.tenant
                )
            except (InvalidRequestError, OutOfMemoryError):
                return  # nothing is cached, too little would be left, or the system refuses
            except ValueError:  # planning fails (injected)
                return
            self._pins.append(pinned.handle)

    def _unpin_all(self) -> None:
        while self._pins:
            self.engine.unpin_prefix(self._pins.pop())

    def _step(self) -> None:
        result = self._engine_step()
        for update in result.outputs:
            name = update.request_id
            assert name not in self.done, f"{name} finished twice"
            assert name not in self.aborted
            assert name not in self.failed
            assembly = self.asked[name].assembly
            assert assembly is not None
            for _ in assembly.take((update,), 0.0):
                pass
            if (output := assembly.tell()) is None:
                continue
            self.asked[name].parts.append(output)
            if output.finished:
                self.done[name] = output
        for failure in result.failures:
            assert failure.request_id not in self.failed
            assert failure.request_id not in self.done
            self.failed[failure.request_id] = str(failure.error)

    def _engine_step(self) -> StepResult:
        """A step as a service makes it, which reports to a pool before and after."""
        if not self.engine.is_lent:
            return self.engine.step()
        self.engine.memory_news()
        self._least_limit = min(self._least_limit, self.engine.memory.limit_bytes)
        result = self.engine.step()
        self.engine.memory_news()
        if self.engine.awaits_memory:
            self._waited += 0.01
            self.num_waits += 1
        return result

    # -- what must hold in the end -----------------------------------------------------

    def check_ends(self) -> None:
        """Each request has ended in one way."""
        for name in self.asked:
            ends = [name in self.done, name in self.failed, name in self.aborted]
            assert sum(ends) == 1, (name, ends)

    def check_nothing_left(self) -> None:
        self._unpin_all()
        assert_nothing_left(self.engine)

    def check_failures(self) -> None:
        """Whoever failed without a fault is too much for the pool, alone too."""
        self._unpin_all()
        if self.failed.keys() - self.excused:
            if self.engine.is_lent:
                self.engine.lend(self._limit, reclaim=False)
            else:
                self.engine.set_kv_cache_memory(self._limit)
        for name in self.failed.keys() - self.excused:
            if not self._is_too_wide(self.asked[name].params, len(self.asked[name].prompt)):
                self._check_failure(name)

    def _is_too_wide(self, params: GenerationParams, num_prompt: int) -> bool:
        """Whether beams, at their longest, may not fit.

        Whether such a request comes through depends on what its beams share, and on the pages
        that its blocks happened to find.
        """
        if not isinstance(params, BeamSearchParams):
            return False
        memory = self.engine.memory
        layout = memory.layout
        longest = min(memory.max_len, num_prompt + (params.max_tokens or memory.max_len))
        pages = layout.pages_for(longest) + 1  # one is split with others
        of_beam = pages * layout.total_page_bytes + 2 * layout.state_bytes  # one may be published
        return bool(params.beam_width * of_beam > self._least_limit)

    def _check_failure(self, name: str) -> None:
        asked = self.asked[name]
        self.engine.add_request("again", asked.prompt, asked.params)
        for _ in range(MAX_STEPS):
            result = self._engine_step()
            if result.failures:
                return
            assert not any(out.finished for out in result.outputs), (
                f"{name} failed ({self.failed[name]}), but can be served: {asked}"
            )
        raise AssertionError(f"{name} does not end")


def whole(asked: Asked) -> Sequence[Any]:
    """What a request was told in all: of a stream, the parts put together."""
    if not asked.stream:
        return answered(asked.parts[-1])
    choices: dict[int, list[Any]] = {}
    scores: Any = None
    for part in asked.parts:
        scores = scores or _scores(part)
        for output in part.outputs:
            known = choices.setdefault(output.index, [output.index, [], "", [], 0.0, None])
            assert known[5] is None, "told after its end"
            known[1] += output.token_ids
            known[2] += output.text
            known[3] += _tops(output)
            known[4:] = [output.cumulative_logprob, output.finish_reason]
    return [sorted(choices.values()), scores]


def answered(output: RequestOutput) -> Sequence[Any]:
    """Choices (index, tokens, text, log-probabilities, their sum, how it ended) and the prompt's
    scores."""
    choices = [
        [c.index, c.token_ids, c.text, _tops(c), c.cumulative_logprob, c.finish_reason]
        for c in output.outputs
    ]
    return [choices, _scores(output)]


def without_logprobs(answer: Sequence[Any]) -> list[Any]:
    """Choices (index, tokens, text, how it ended), and the prompt's tokens if it was scored."""
    choices, scores = answer
    texts = [[index, token_ids, text, end] for index, token_ids, text, _, _, end in choices]
    return [texts, scores and [entry and entry[0][0] for entry in scores]]


def _tops(choice: Any) -> list[Any]:
    return [_values(entry) for entry in choice.logprobs or ()]


def _scores(output: RequestOutput) -> list[Any] | None:
    if output.prompt_logprobs is None:
        return None
    return [None if entry is None else _values(entry) for entry in output.prompt_logprobs]


def _values(entry: Any) -> list[tuple[int, float]]:
    return [(token_id, each.logprob) for token_id, each in entry.items()]
