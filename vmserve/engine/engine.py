"""The engine: requests in, tokens out. ``step`` is the data path and reads like it."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Concatenate, ParamSpec, TypeVar

from vmserve.config import EngineConfig
from vmserve.engine.accept import TokenAcceptor
from vmserve.engine.build import EngineParts, build
from vmserve.engine.deadlines import Deadlines, too_late
from vmserve.engine.drafts import drafts_of
from vmserve.engine.figures import StepFigures
from vmserve.engine.flight import InFlightStep
from vmserve.engine.grammars import StructuredRequests
from vmserve.engine.pool import Pool
from vmserve.engine.requests import RequestIntake, memory_tenant, request_limits
from vmserve.engine.results import RequestFailure, StepResult
from vmserve.engine.steps import Steps
from vmserve.errors import DriverError, InvalidRequestError, RankLostError, VmserveError
from vmserve.memory.base import Health, Regime
from vmserve.models.loader import Progress
from vmserve.pool.shares import Holding
from vmserve.runner.runtime import DeviceRuntime
from vmserve.sampling import GenerationParams
from vmserve.scheduler.profile import DeviceProfile
from vmserve.scheduler.sequence import Request
from vmserve.telemetry.counters import EngineCounters
from vmserve.telemetry.snapshot import EngineSnapshot, take_snapshot
from vmserve.text.prompts import encode_params
from vmserve.text.update import RequestUpdate
from vmserve.types import PinnedPrefix, RequestTerms

__all__ = ["LLMEngine"]

logger = logging.getLogger(__name__)

_USUAL_TERMS = RequestTerms()
_Given = ParamSpec("_Given")
_Result = TypeVar("_Result")


def _changes(
    method: Callable[Concatenate[LLMEngine, _Given], _Result],
) -> Callable[Concatenate[LLMEngine, _Given], _Result]:
    """A method that changes the engine: what an interrupt leaves halfway is mended before the next
    one."""

    @functools.wraps(method)
    def call(self: LLMEngine, /, *args: _Given.args, **kwargs: _Given.kwargs) -> _Result:
        self._mend()
        self._is_halfway = True
        try:
            result = method(self, *args, **kwargs)
        except (VmserveError, ValueError):  # refused, and nothing was changed
            self._is_halfway = False
            raise
        self._is_halfway = False
        return result

    return call


class LLMEngine:
    """Continuous batching over a KV cache in two views of one pool of pages.

    Single-threaded: whoever calls :meth:`step` owns it (:class:`vmserve.LLM`: the caller's thread;
    :class:`vmserve.AsyncLLM`: a thread of its own). An exception in a step ends requests, not the
    engine; so does an interrupt (``KeyboardInterrupt``, or what a signal's handler raises) at any
    point of a call: decision 0084.

    ``runtime``: replaces the device that ``config`` names. ``parts``: replaces everything, for
    example for an engine without a model; ``config`` is then not read.

    Raises :class:`~vmserve.errors.ConfigurationError` for options or model files that cannot be
    used, and :class:`~vmserve.errors.OutOfMemoryError` if there is no room.
    """

    def __init__(
        self,
        config: EngineConfig,
        progress: Progress | None = None,
        runtime: DeviceRuntime | None = None,
        *,
        parts: EngineParts | None = None,
    ) -> None:
        parts = parts or build(config, progress, runtime)
        self.config = config
        self.model_config = model = parts.model_config
        self.weights = parts.weights
        self.identity = parts.identity
        self.tokenizer = parts.tokenizer
        self.resolved = resolved = parts.resolved
        self.memory = parts.memory
        self.draft_model = parts.draft_model
        self.ranks = parts.ranks
        self.scheduler = parts.scheduler
        self.runner = parts.runner
        self.sampler = parts.sampler
        self._regimes = parts.regimes
        self._runtime = parts.runtime
        self._clock = parts.clock
        #: Requests with grammars.
        self.structured = StructuredRequests(self.tokenizer, model.vocab_size, model.eos_token_ids)
        self.counters = EngineCounters()
        self._acceptor = TokenAcceptor(
            self.tokenizer, model.eos_token_ids, self.counters, self._clock
        )
        self._drafts = drafts_of(parts, self.counters)
        self.pool = Pool(parts)
        self._figures = StepFigures(parts, self.counters, self._drafts)
        self.steps = Steps(
            parts, self.pool, self._drafts, self.structured, self._acceptor, self._figures
        )
        #: Limits of a request, checked by the caller of :meth:`add_checked`.
        self.limits = request_limits(resolved, model)
        self._intake = RequestIntake(resolved, model, self._clock)
        self._requests: dict[str, Request] = {}
        self._deadlines = Deadlines(resolved.request_timeout, self._requests)
        #: Whether a call has begun and not ended.
        self._is_halfway = False
        #: Results of the step that is being made, so far, and requests that have ended in it.
        self._outputs: list[RequestUpdate] = []
        self._failures: list[RequestFailure] = []
        self._retired: list[str] = []
        #: Failures for the next step to return.
        self._unsaid: list[RequestFailure] = []

    # -- requests ---------------------------------------------------------------------

    def add_request(
        self,
        request_id: str,
        prompt_token_ids: list[int],
        params: GenerationParams,
        terms: RequestTerms = _USUAL_TERMS,
    ) -> None:
        """Queue a request; later steps return its outputs.

        Raises :class:`~vmserve.errors.InvalidRequestError`, and queues nothing then.
        """
        encoded = encode_params(params, self.tokenizer)
        self.limits.check(prompt_token_ids, encoded)
        self.add_checked(request_id, prompt_token_ids, encoded, terms)

    @_changes
    def add_checked(
        self,
        request_id: str,
        prompt_token_ids: list[int],
        params: GenerationParams,
        terms: RequestTerms,
    ) -> None:
        """:meth:`add_request` for a request that :attr:`limits` allow, its texts encoded.

        Raises :class:`~vmserve.errors.InvalidRequestError` if the id is in use.
        """
        if request_id in self._requests:
            raise InvalidRequestError(f"request_id {request_id!r} is already in use", "request_id")
        request = self._intake.build(request_id, prompt_token_ids, params, terms)
        self._deadlines.set(request, terms.timeout)
        self._requests[request_id] = request
        self._acceptor.open(request)
        if params.structured_outputs is not None:
            self.structured.add(request)
        else:
            self.scheduler.add(request)
        self.counters.prompt_tokens += len(prompt_token_ids)

    def accepted_output(self, request_id: str) -> RequestUpdate | None:
        """An update without choices, which informs a stream that its request is queued.

        None while its grammar is compiled, which may still refuse it; a later step returns the
        update.
        """
        request = self._requests[request_id]
        return None if request.is_compiling else self._acceptor.queued(request)

    @_changes
    def abort(self, request_id: str) -> RequestUpdate | None:
        """End a request now and free its pages. Unknown or finished ids are ignored."""
        return self._abort(request_id)

    def _abort(self, request_id: str) -> RequestUpdate | None:
        request = self._requests.get(request_id)
        if request is None:
            return None
        if request.is_compiling:
            self.structured.drop(request)
        else:
            self.scheduler.abort(request)
        self._drafts.forget(request)
        update = self._acceptor.abort(request)
        del self._requests[request_id]  # last: what an interrupt leaves halfway is found by it
        return update

    @property
    def has_unfinished(self) -> bool:
        return bool(self._requests or self._unsaid)

    @property
    def requests(self) -> Mapping[str, Request]:
        """Unfinished requests by id, in order of arrival."""
        return self._requests

    @property
    def request_ids(self) -> list[str]:
        return list(self._requests)

    @property
    def profile(self) -> DeviceProfile | None:
        """The device profile that regimes are chosen with; None if they are not chosen."""
        return self._regimes.profile

    # -- the pool -----------------------------------------------------------------------

    @_changes
    def hold_prefix(
        self, token_ids: list[int], *, cache_salt: str = "", isolation: str = ""
    ) -> PinnedPrefix:
        """Pin the cached part of these tokens, so that it is never evicted.

        Raises :class:`~vmserve.errors.InvalidRequestError` if nothing is cached, or if too little
        of the pool would be left for the longest sequence.
        """
        return self.pool.pins.hold(token_ids, cache_salt.encode(), memory_tenant(isolation))

    @_changes
    def unpin_prefix(self, handle: int) -> None:
        """Let the prefix be evicted again. Raises ``ValueError`` for an unknown handle."""
        self.pool.pins.release(handle)

    @_changes
    def set_kv_cache_memory(self, size: int | str) -> int:
        """Change the limit of the KV cache; returns it in bytes of whole pages.

        Running requests stay. Pages above a lower limit go back to the system when nothing uses
        them; a request that then needs another page waits or is preempted.

        Raises :class:`~vmserve.errors.ConfigurationError` if the limit is below what the longest
        sequence and the pinned prefixes need, or above the reserved address space.
        """
        return self.pool.set_limit(size)

    def kv_bounds(self, pinned: Sequence[int] = ()) -> tuple[int, int]:
        """How far the KV cache may grow, and what the longest sequence and pinned prefixes need.

        ``pinned``: tokens of all prefixes that will be pinned.
        """
        return self.pool.bounds(pinned)

    def lend(self, limit_bytes: int, *, reclaim: bool) -> None:
        """Have ``limit_bytes`` of a pool that other engines share; :meth:`memory_news` answers.

        If more is used, that is kept; with ``reclaim`` requests are preempted down to the limit.
        """
        self.pool.lease.order(limit_bytes, reclaim=reclaim)

    @property
    def is_lent(self) -> bool:
        """Whether the memory is a pool's, which hears :meth:`memory_news`."""
        return self.pool.lease.is_lent

    @_changes
    def memory_news(self) -> list[tuple[Holding, bool]]:
        """Reports to the pool of :meth:`lend` between two steps, and whether each is an answer."""
        lease = self.pool.lease
        if lease.has_orders and self.steps.in_flight is None:
            with self._runtime.active():
                lease.obey()
        return lease.take_news(is_idle=not self._requests)

    @property
    def awaits_memory(self) -> bool:
        """Whether the last step computed nothing because memory was asked for and may come."""
        return self.scheduler.awaits_memory

    @_changes
    def reset_prefix_cache(self) -> None:
        """Forget every cached prefix, pinned ones and those that outlive the process too.

        Running requests keep their pages, but share them no more.
        """
        self.pool.forget_prefixes()
        if not self._requests:
            self.pool.idle()

    def convert(self, request_id: str, regime: Regime) -> None:
        """Keep the request in ``regime``, from the next step on that has memory for it.

        No byte is copied if its blocks fill whole pages in order. Unknown ids are ignored.
        """
        request = self._requests.get(request_id)
        if request is not None:
            self.scheduler.convert(request, regime)

    # -- the step -----------------------------------------------------------------------

    def step(self) -> StepResult:
        """Compute once for every sequence that fits; returns what became known.

        With ``async_scheduling``, returns the results of the step before while this one is
        computed. An exception ends the requests that it concerns, and all others are computed
        again. Raises :class:`~vmserve.errors.RankLostError` once a rank is lost, and what the
        memory raises once its device is.
        """
        self._mend()
        if self._unsaid:
            unsaid, self._unsaid = self._unsaid, []
            return StepResult(failures=tuple(unsaid))
        self._is_halfway = True
        try:
            self.ranks.check()
            with self._runtime.active():
                result = self._step()
        except RankLostError:
            raise
        except Exception as error:  # noqa: BLE001  it must not end the engine
            if isinstance(error, DriverError) and self.steps.concerned is None:
                self.ranks.memory_failed(error)
            result = self._survive(error)
        self._forget_step()
        self._is_halfway = False
        return result

    def _step(self) -> StepResult:
        if self._deadlines and (late := self._expire(self._clock())):
            return StepResult(failures=tuple(late))
        if self.structured.num_compiling and (result := self._take_compiled()):
            return result
        running = self.steps.take_running()
        if running is None:
            launched = self.steps.launch()
            if isinstance(launched, InFlightStep):
                return self._draw(launched)
            failures = () if launched is None else (self._fail(launched),)
            return StepResult(failures=failures)
        ahead = self.steps.launch_ahead(running)
        result = self._collect(running)
        return result if ahead is None else result + self._draw(ahead)

    def _draw(self, flight: InFlightStep) -> StepResult:
        """Draw the step's tokens, and collect them unless the next call does."""
        self.steps.draw(flight)
        # If all have ended meanwhile, there is no next step.
        if self._requests and self.steps.leave_running(flight):
            return StepResult()
        return self._collect(flight)

    def _collect(self, flight: InFlightStep) -> StepResult:
        outputs = self._take_in(flight)
        if self.structured.broken:
            return self._without_broken(outputs)
        return StepResult(outputs=tuple(outputs))

    def _take_in(self, flight: InFlightStep) -> list[RequestUpdate]:
        outputs = self.steps.collect(flight)
        self._retire(outputs)
        self._outputs += outputs
        self.steps.collected(flight, outputs)
        return outputs

    def _retire(self, outputs: list[RequestUpdate]) -> None:
        for output in outputs:
            if output.finished:
                self._retired.append(output.request_id)
                request = self._requests.pop(output.request_id)
                # A finished beam search has no sequences left: its outputs come all at once.
                lengths = [seq.num_output for seq in request.sequences]
                lengths = lengths or [len(choice.token_ids) for choice in output.outputs]
                self._regimes.finished(max(lengths, default=0), request.metrics.num_preemptions)
                self._drafts.forget(request)
        if not self._requests:
            self.pool.idle()

    def _take_compiled(self) -> StepResult | None:
        """Queue requests whose grammars are compiled, and end those that were refused."""
        ready, failed = self.structured.take_compiled()
        outputs = []
        for request in ready:
            self.scheduler.add(request)
            if request.stream:
                outputs.append(self._acceptor.queued(request))
        failures = tuple(
            self._fail(RequestFailure(request.request_id, error)) for request, error in failed
        )
        return StepResult(tuple(outputs), failures) if outputs or failures else None

    def _without_broken(self, outputs: list[RequestUpdate]) -> StepResult:
        """Replace the outputs of requests whose grammars met a limit in this step by failures."""
        failures = []
        finished = {output.request_id for output in outputs}
        for request_id, error in self.structured.take_broken():
            if request_id not in self._requests and request_id not in finished:
                continue  # aborted since its token was drawn
            failures.append(self._fail(RequestFailure(request_id, error)))
        ended = {failure.request_id for failure in failures}
        left = tuple(output for output in outputs if output.request_id not in ended)
        return StepResult(left, tuple(failures))

    def _expire(self, now: float) -> list[RequestFailure]:
        """Abort the requests whose deadlines are over."""
        late = []
        while (request := self._deadlines.pop_late(now)) is not None:
            late.append(self._fail(RequestFailure(request.request_id, too_late(request))))
        return late

    def _fail(self, failure: RequestFailure) -> RequestFailure:
        """End a request with an error instead of an output."""
        self._failures.append(failure)
        self._abort(failure.request_id)
        return failure

    # -- after an exception -------------------------------------------------------------

    def _mend(self) -> None:
        """End all requests if a call was left halfway. The next step returns the failures."""
        if self._is_halfway:
            self._unsaid = self.start_over()

    def start_over(self, pins: Collection[int] | None = None) -> list[RequestFailure]:
        """End all requests and free their memory, also after a call that was left halfway.

        Cached prefixes stay, and pinned ones whose handles ``pins`` has; None: all. Returns what
        no step has said.
        """
        self._is_halfway = True
        if pins is not None:
            self.pool.pins.keep(pins)
        failures = self._unsaid + self._start_over({*self._requests, *self._retired})
        self._unsaid = []
        self._forget_step()
        self._is_halfway = False
        return failures

    def _survive(self, error: Exception) -> StepResult:
        """End the requests that an exception in a step concerns, and begin anew with the others.

        It concerns those that were being computed, or whose tokens were being taken in: what these
        would report next would have a gap. Where a step was being planned, it concerns the one
        that the scheduler suspects.
        """
        if self.memory.health is Health.FAILED:
            raise error
        logger.error("a step failed", exc_info=error)
        reported = {output.request_id for output in self._outputs if output.finished}
        concerned = set(self._retired) - reported
        if self.steps.concerned is not None:
            computed = {seq.request.request_id for seq in self.steps.concerned.sequences}
            concerned |= computed & self._requests.keys()  # others were aborted before
        elif self._requests and not (concerned or self._failures):
            suspect = self.scheduler.suspect()
            concerned = {suspect if suspect in self._requests else next(reversed(self._requests))}
        failures = self._failures = self._start_over(concerned)
        previous, self.steps.previous = self.steps.previous, None
        if previous is not None:
            try:
                self._take_in(previous)
            except Exception as another:  # noqa: BLE001  as above
                return self._survive(another)
        return StepResult(tuple(self._outputs)) + StepResult(failures=tuple(failures))

    def _start_over(self, request_ids: Iterable[str]) -> list[RequestFailure]:
        """End these requests; compute all others again. Returns the failures of this step.

        Everything here may be done twice: an interrupt may come here, too.
        """
        failed = VmserveError("the step that computed this request failed; send it again")
        failures = {each.request_id: each for each in self._failures}
        for request_id in sorted(request_ids):
            failures.setdefault(request_id, RequestFailure(request_id, failed))
        self.steps.start_over()
        self._drafts.start_over()
        self.memory.start_over(self.pool.pins.memory_ids)
        ended = [request for name, request in self._requests.items() if name in failures]
        others = [request for name, request in self._requests.items() if name not in failures]
        self.scheduler.start_over([each for each in others if not each.is_compiling], ended)
        for request in ended:
            self.structured.drop(request)
        for request_id in failures:
            self._acceptor.forget(request_id)
            self._requests.pop(request_id, None)
        return list(failures.values())

    def _forget_step(self) -> None:
        self.steps.forget()
        self._retired.clear()
        self._outputs.clear()
        self._failures.clear()

    @property
    def failure(self) -> str | None:
        """Why there will be no more steps: a rank has ended. None while there can be."""
        return self.ranks.failure

    # -- life -------------------------------------------------------------------------

    def stats(self) -> dict[str, float | int]:
        """All metrics, by names without prefix, including those of the memory."""
        return {
            "num_requests_running": self.scheduler.num_running,
            "num_requests_waiting": self.scheduler.num_waiting,
            **self.scheduler.totals.by_name(),
            **self.counters.as_dict(),
            **self.pool.figures(),
        }

    def snapshot(self) -> EngineSnapshot:
        """A snapshot for live views; see :mod:`vmserve.telemetry.snapshot`."""
        return take_snapshot(self.stats(), self.memory, self._requests.values())

    def close(self) -> None:
        """Abort all requests and free all memory. Later calls are errors."""
        self._mend()
        for request_id in self.request_ids:
            self._abort(request_id)
        self._figures.trace.close()
        self.structured.close()
        self.steps.start_over()
        self.pool.close()
        self.ranks.close()
