"""The engine: requests in, tokens out. ``step`` is the data path and reads like it."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Concatenate, ParamSpec, TypeVar

import numpy as np

from vmserve.config import EngineConfig
from vmserve.engine.accept import TokenAcceptor
from vmserve.engine.build import SCORED_LOGITS, EngineParts, build
from vmserve.engine.deadlines import Deadlines, too_late
from vmserve.engine.drafts import Drafts
from vmserve.engine.grammars import StructuredRequests
from vmserve.engine.lease import Lease
from vmserve.engine.persistence import persist_figures
from vmserve.engine.pins import PinnedPrefixes
from vmserve.engine.requests import RequestIntake, memory_tenant, request_limits
from vmserve.engine.step import EngineStep, InFlightStep
from vmserve.errors import (
    ConfigurationError,
    DriverError,
    InvalidRequestError,
    OutOfMemoryError,
    RankLostError,
    VmserveError,
)
from vmserve.memory.base import Health, Regime
from vmserve.memory.longest import LongestSequence
from vmserve.memory.manager import MemoryManager
from vmserve.models.loader import Progress
from vmserve.numbers.sizes import format_size, parse_size
from vmserve.numbers.values import step_value
from vmserve.pool.shares import Holding
from vmserve.runner.model_runner import AttentionTime
from vmserve.runner.runtime import DeviceRuntime
from vmserve.sampling import GenerationParams
from vmserve.scheduler.base import NoRoomError, StepPlan
from vmserve.scheduler.profile import DeviceProfile
from vmserve.scheduler.sequence import Request
from vmserve.telemetry.counters import EngineCounters
from vmserve.telemetry.kinds import kind_figures
from vmserve.telemetry.phases import StepPhases
from vmserve.telemetry.snapshot import EngineSnapshot, take_snapshot
from vmserve.telemetry.trace import StepTrace
from vmserve.text.prompts import encode_params
from vmserve.text.update import RequestUpdate
from vmserve.types import PinnedPrefix, RequestTerms

__all__ = ["LLMEngine", "PinnedPrefix", "RequestFailure", "StepResult"]

logger = logging.getLogger(__name__)

_USUAL_TERMS = RequestTerms()
#: Seconds that the end of an engine waits for blocks on their way to --kv-persist. A client waits
#: longer for the end of its process.
FLUSH_SECONDS = 8.0
_Given = ParamSpec("_Given")
_Result = TypeVar("_Result")


@dataclass(frozen=True, slots=True)
class RequestFailure:
    """A request that ended with an error instead of an output. The engine continues."""

    request_id: str
    error: VmserveError


@step_value
class StepResult:
    outputs: tuple[RequestUpdate, ...] = ()
    failures: tuple[RequestFailure, ...] = ()

    def __add__(self, other: StepResult) -> StepResult:
        """Join two results. Drop outputs of requests that failed in ``other``."""
        failed = {failure.request_id for failure in other.failures}
        outputs = tuple(each for each in self.outputs if each.request_id not in failed)
        return StepResult(outputs + other.outputs, self.failures + other.failures)


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
        self.model_config = parts.model_config
        self.weights = parts.weights
        self.identity = parts.identity
        self.tokenizer = parts.tokenizer
        self.resolved = parts.resolved
        self.memory = parts.memory
        self.draft_model = parts.draft_model
        #: Other ranks, if there are any. The engine does not work without them.
        self.ranks = parts.ranks
        self.scheduler = parts.scheduler
        self._preemption = parts.preemption
        self._regimes = parts.regimes
        self._runtime = parts.runtime
        self.runner = parts.runner
        self.sampler = parts.sampler
        self._clock = parts.clock
        self._idle_bytes = parts.idle_bytes
        self._is_async = self.resolved.async_scheduling
        #: Requests with grammars.
        self.structured = StructuredRequests(
            self.tokenizer, self.model_config.vocab_size, self.model_config.eos_token_ids
        )
        self.counters = EngineCounters()
        self._acceptor = TokenAcceptor(
            self.tokenizer, self.model_config.eos_token_ids, self.counters, self._clock
        )
        self.steps = EngineStep(
            self.memory,
            self.scheduler,
            self.runner,
            self._runtime,
            self.sampler,
            self.structured,
            self._acceptor,
        )
        #: Drafts; None without speculation.
        self._drafts: Drafts | None = None
        if parts.drafter is not None:
            vocab_size = self.model_config.vocab_size
            self._drafts = Drafts(
                parts.drafter,
                self.memory,
                self.scheduler,
                self.counters,
                vocab_size=vocab_size,
                max_tokens=self.resolved.max_num_batched_tokens,
                max_rows=max(1, SCORED_LOGITS // vocab_size),
            )
        #: The running step, whose tokens are not known yet; only with async_scheduling.
        self._flight: InFlightStep | None = None
        #: Why the next step was not launched before the last one's tokens were known.
        self._wait_reason = "idle"
        self._last_ended = 0.0
        trace_file = self.resolved.trace_file
        self._trace = None if trace_file is None else StepTrace(Path(trace_file))
        self._requests: dict[str, Request] = {}
        #: Whether a call has begun and not ended.
        self._is_halfway = False
        #: Plan of the step that is being made, whose tokens are being computed or taken in; and its
        #: results so far.
        self._concerned: StepPlan | None = None
        #: Step before it, if that one is still running when it is launched.
        self._previous: InFlightStep | None = None
        self._retired: list[str] = []
        self._outputs: list[RequestUpdate] = []
        self._failures: list[RequestFailure] = []
        #: Whether the mapper was waited for since memory was refused to a request that is alone.
        self._has_settled = False
        #: Failures for the next step to return.
        self._unsaid: list[RequestFailure] = []
        #: Limits of a request, checked by the caller of :meth:`add_checked`.
        self.limits = request_limits(self.resolved, self.model_config)
        self._intake = RequestIntake(self.resolved, self.model_config, self._clock)
        self._deadlines = Deadlines(self.resolved.request_timeout, self._requests)
        self._longest = LongestSequence(
            self.memory.layout,
            self.memory.kinds,
            self.memory.max_len,
            self.memory.options.read_slack_tokens,
            self.resolved.max_num_batched_tokens,
        )
        self._pins = PinnedPrefixes(self.memory, self.resolved, self._longest)
        #: Part in a pool that the engine shares with others; None until it is lent something.
        self.lease: Lease | None = None

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
        request = self._requests.pop(request_id, None)
        if request is None:
            return None
        if request.is_compiling:
            self.structured.drop(request)
        else:
            self.scheduler.abort(request)
        if self._drafts is not None:
            self._drafts.forget(request)
        return self._acceptor.abort(request)

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

    # -- pinned prefixes --------------------------------------------------------------

    @_changes
    def hold_prefix(
        self, token_ids: list[int], *, cache_salt: str = "", isolation: str = ""
    ) -> PinnedPrefix:
        """Pin the cached part of these tokens, so that it is never evicted.

        Raises :class:`~vmserve.errors.InvalidRequestError` if nothing is cached, or if too little
        of the pool would be left for the longest sequence.
        """
        return self._pins.hold(token_ids, cache_salt.encode(), memory_tenant(isolation))

    @_changes
    def unpin_prefix(self, handle: int) -> None:
        """Let the prefix be evicted again. Raises ``ValueError`` for an unknown handle."""
        self._pins.release(handle)

    # -- the pool -----------------------------------------------------------------------

    @_changes
    def set_kv_cache_memory(self, size: int | str) -> int:
        """Change the limit of the KV cache; returns it in bytes of whole pages.

        Running requests stay. Pages above a lower limit go back to the system when nothing uses
        them; a request that then needs another page waits or is preempted.

        Raises :class:`~vmserve.errors.ConfigurationError` if the limit is below what the longest
        sequence and the pinned prefixes need, or above the reserved address space.
        """
        if self.lease is not None:
            raise ConfigurationError(
                "kv_cache_memory: a pool lends this model's memory: set its cap"
            )
        memory, num_ranks = self.memory, self.memory.layout.tensor_parallel
        page_bytes = num_ranks * memory.layout.total_page_bytes
        num_bytes, before = parse_size(size, "kv_cache_memory"), memory.limit_pages
        drafting = self.draft_model
        if drafting is not None:
            part = drafting.part_of(num_bytes)
            num_bytes -= part
        if num_bytes // page_bytes > memory.max_pages:
            raise ConfigurationError(
                f"kv_cache_memory: {format_size(num_bytes)} is more than the "
                f"{format_size(memory.max_pages * page_bytes)} that the device has: lower it"
            )
        self._longest.require(num_bytes // num_ranks, self._pins.num_pages)
        try:
            memory.set_limit(num_bytes // num_ranks)
            if drafting is not None:
                drafting.set_limit(part)
        except DriverError as error:
            logger.warning("the pool keeps its pages for now: %s", error)
        limit, former = (pages * page_bytes for pages in (memory.limit_pages, before))
        logger.info("the KV cache may take %s, not %s", format_size(limit), format_size(former))
        return limit + self._draft_bytes

    def kv_bounds(self, pinned: Sequence[int] = ()) -> tuple[int, int]:
        """How far the KV cache may grow, and what the longest sequence and pinned prefixes need.

        ``pinned``: tokens of all prefixes that will be pinned.
        """
        pages = max(self._pins.num_pages, sum(map(self._longest.pages_to_pin, pinned)))
        least = self._longest.least_bytes(pages)
        return self.memory.limit_bytes + self._draft_bytes, least + self._draft_bytes

    @property
    def _draft_bytes(self) -> int:
        return 0 if self.draft_model is None else self.draft_model.limit_bytes

    def lend(self, limit_bytes: int, *, reclaim: bool) -> None:
        """Have ``limit_bytes`` of a pool that other engines share; :meth:`memory_news` answers.

        If more is used, that is kept; with ``reclaim`` requests are preempted down to the limit.
        """
        if self.lease is None:
            self.lease = Lease(
                self.memory,
                self.scheduler,
                self._pins,
                self._longest,
                self._clock,
                self._draft_bytes,
            )
        self.lease.order(limit_bytes, reclaim=reclaim)

    @_changes
    def memory_news(self) -> list[tuple[Holding, bool]]:
        """A report to the pool of :meth:`lend` between two steps, and whether it is an answer."""
        assert self.lease is not None
        if self.lease.has_orders and self._flight is None:
            with self._runtime.active():
                self.lease.obey()
        return self.lease.take_news(is_idle=not self._requests)

    @property
    def awaits_memory(self) -> bool:
        """Whether the last step computed nothing because memory was asked for and may come."""
        return self.lease is not None and self.scheduler.awaits_memory

    @_changes
    def reset_prefix_cache(self) -> None:
        """Forget every cached prefix, pinned ones and those that outlive the process too.

        Running requests keep their pages, but share them no more.
        """
        self._pins.clear()
        for memory in self._memories:
            memory.clear_cache()
        if not self._requests:
            self._idle()

    def convert(self, request_id: str, regime: Regime) -> None:
        """Keep the request in ``regime``, from the next step on that has memory for it.

        No byte is copied if its blocks fill whole pages in order. Unknown ids are ignored.
        """
        request = self._requests.get(request_id)
        if request is not None:
            self.scheduler.convert(request, regime)

    # -- the step ---------------------------------------------------------------------

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
            result = self._step_of_ranks()
        except RankLostError:
            raise
        except Exception as error:  # noqa: BLE001  it must not end the engine
            result = self._survive(error)
        self._forget_step()
        self._is_halfway = False
        return result

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
            self._pins.keep(pins)
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
        if self._concerned is not None:
            computed = {sequence.request.request_id for sequence in self._concerned.sequences}
            concerned |= computed & self._requests.keys()  # others were aborted before
        elif self._requests and not (concerned or self._failures):
            suspect = self.scheduler.suspect()
            concerned = {suspect if suspect in self._requests else next(reversed(self._requests))}
        failures = self._failures = self._start_over(concerned)
        previous, self._previous = self._previous, None
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
        self._flight = None
        self._runtime.synchronize()
        if self._drafts is not None:
            self._drafts.start_over()
        self.memory.start_over(self._pins.memory_ids)
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
        self._concerned = self._previous = None
        self._retired.clear()
        self._outputs.clear()
        self._failures.clear()

    def _step_of_ranks(self) -> StepResult:
        if self.ranks is None:
            with self._runtime.active():
                return self._step()
        self.ranks.check()
        try:
            with self._runtime.active():
                return self._step()
        except DriverError as error:
            if self._concerned is not None:
                raise
            raise self.ranks.lost(error) from error

    @property
    def failure(self) -> str | None:
        """Why there will be no more steps: a rank has ended. None while there can be."""
        return None if self.ranks is None else self.ranks.failure

    def _step(self) -> StepResult:
        if self._deadlines and (late := self._expire(self._clock())):
            return StepResult(failures=tuple(late))
        if self.structured.num_compiling and (result := self._take_compiled()):
            return result
        previous, self._flight = self._flight, None
        if previous is None:
            following = self._launch()
            return following if isinstance(following, StepResult) else self._finish_alone(following)
        previous.was_kept = True
        self._previous = previous
        ahead = self._launch_ahead(previous)
        self._previous = None
        previous.phases.resume()
        result = self._collect(previous)
        if isinstance(ahead, StepResult):
            return result + ahead
        if ahead is None:
            return result
        ahead.phases.resume()
        return result + self._draw(ahead)

    def _launch(self, previous: InFlightStep | None = None) -> InFlightStep | StepResult:
        """Plan a step and launch it; a result if there is none.

        ``previous``: the step that still runs. Then nothing is preempted or waited for.
        """
        phases = StepPhases(self._clock)
        try:
            add_drafts = self._drafts.add if self._drafts is not None and previous is None else None
            plan = self.scheduler.schedule(ahead=previous is not None, add_drafts=add_drafts)
        except NoRoomError as error:
            return StepResult(failures=(self._fail(error.request_id, error),))
        if plan is None:
            if previous is None and not self.scheduler.awaits_memory:
                self._idle()
                self.structured.wait()
            return StepResult()
        phases.end("schedule")
        try:
            epoch = self.memory.apply(plan.memory)
        except (OutOfMemoryError, DriverError) as error:
            if self.ranks is not None and isinstance(error, DriverError) and error.sticky:
                raise  # a rank's memory is lost
            return StepResult() if previous is not None else self._make_room_after(error, plan)
        self._has_settled = False
        self.scheduler.applied(plan)
        self._mark_scheduled(plan)
        phases.end("memory")
        self._concerned = plan
        flight = self.steps.launch(plan, epoch, phases, previous)
        if previous is None and _reads_prompts_mostly(plan):
            self._runtime.synchronize()  # else only its launches would be timed
        self._concerned = None
        seconds = phases.end("model")
        if previous is None:
            self._learn(plan, seconds)
        self._count_attention(flight.logits.attention)
        return flight

    def _launch_ahead(self, previous: InFlightStep) -> InFlightStep | StepResult | None:
        """Launch the step after ``previous`` before its tokens are known; None if that is
        impossible."""
        self._wait_reason = previous.blocking_reason() or "room"
        if self.lease is not None and self.lease.has_orders:
            return None  # they are carried out when no step is in flight
        if self._drafts is not None and self._drafts.wanted(previous.logits.samplers):
            self._wait_reason = "speculation"  # drafts continue tokens that are known
        if self._wait_reason != "room":
            return None
        with previous.with_placeholder_tokens(), self.memory.without_waiting():
            flight = self._launch(previous)
        if isinstance(flight, StepResult):
            return flight if flight.failures else None
        self.counters.steps_overlapped += 1
        return flight

    def _draw(self, flight: InFlightStep) -> StepResult:
        """Draw the step's tokens; the next call of :meth:`step` collects them."""
        self._concerned = flight.plan
        self.steps.draw(flight)
        self._concerned = None
        flight.phases.end("sample")
        if not self._requests:  # all have ended meanwhile: there is no next step
            return self._collect(flight)
        self._flight = flight
        return StepResult()

    def _finish_alone(self, flight: InFlightStep) -> StepResult:
        """Finish a launched step that has no other in flight.

        Collects its tokens now, unless the next step is to be launched before they are known.
        """
        if self._is_async:
            self.counters.synchronous(self._wait_reason)
            self._wait_reason = "idle"
        result = self._draw(flight)
        if self._flight is None:
            return result
        if self._is_async:
            reason = flight.blocking_reason()
            if reason is None:
                return result
            self._wait_reason = reason
        self._flight = None
        return self._collect(flight)

    def _collect(self, flight: InFlightStep) -> StepResult:
        outputs = self._take_in(flight)
        if self.structured.broken:
            return self._without_broken(outputs)
        return StepResult(outputs=tuple(outputs))

    def _take_in(self, flight: InFlightStep) -> list[RequestUpdate]:
        self._concerned = flight.plan
        outputs = self.steps.collect(flight, self._drafts if flight.plan.drafts else None)
        if self.resolved.prefix_caching:
            self.steps.publish_tokens(flight.plan)
        self._retire(outputs)
        flight.phases.end("output")
        self._record(flight, outputs)
        self._outputs += outputs
        self._concerned = None
        return outputs

    def _take_compiled(self) -> StepResult | None:
        """Queue requests whose grammars are compiled, and end those that were refused."""
        ready, failed = self.structured.take_compiled()
        outputs = []
        for request in ready:
            self.scheduler.add(request)
            if request.stream:
                outputs.append(self._acceptor.queued(request))
        failures = tuple(self._fail(request.request_id, error) for request, error in failed)
        return StepResult(tuple(outputs), failures) if outputs or failures else None

    def _without_broken(self, outputs: list[RequestUpdate]) -> StepResult:
        """Replace the outputs of requests whose grammars met a limit in this step by failures."""
        failures = []
        finished = {output.request_id for output in outputs}
        for request_id, error in self.structured.take_broken():
            if request_id not in self._requests and request_id not in finished:
                continue  # aborted since its token was drawn
            failures.append(self._fail(request_id, error))
        ended = {failure.request_id for failure in failures}
        left = tuple(output for output in outputs if output.request_id not in ended)
        return StepResult(left, tuple(failures))

    def _expire(self, now: float) -> list[RequestFailure]:
        """Abort the requests whose deadlines are over."""
        late = []
        while (request := self._deadlines.pop_late(now)) is not None:
            late.append(self._fail(request.request_id, too_late(request)))
        return late

    def _record(self, flight: InFlightStep, outputs: list[RequestUpdate]) -> None:
        plan, phases = flight.plan, flight.phases
        self.counters.step(plan.num_tokens, phases)
        # Steps overlap: each is counted from the end of the one before it.
        began, ended = phases.spans[0].began, phases.spans[-1].ended
        self._regimes.stepped(ended - max(began, self._last_ended))
        self._last_ended = ended
        # Elsewhere than on a CPU, attention is not timed.
        if self._drafts is not None and not flight.is_ahead and self._runtime.device_type == "cpu":
            attention = sum(part.seconds for part in flight.logits.attention)
            seconds = sum(span.ended - span.began for span in phases.spans)
            self._drafts.learn(seconds, attention)
        if self._trace is None:
            return
        self._trace.step(plan, phases, self.scheduler, self.memory.stats(), ahead=flight.is_ahead)
        for output in outputs:
            if output.finished and output.metrics is not None:
                self._trace.request(output.request_id, output.metrics)

    def _learn(self, plan: StepPlan, seconds: float) -> None:
        """Learn the speed of prefill from steps that mostly read prompts."""
        if _reads_prompts_mostly(plan):
            self._preemption.prefilled(plan.num_tokens, seconds)

    def _count_attention(self, parts: tuple[AttentionTime, ...]) -> None:
        """Record attention time and, with a profile, the predicted time."""
        for regime, batch, seconds in parts:
            predicted = self._regimes.attended(regime, batch, seconds)
            self.counters.attended(regime.value, seconds, predicted)

    def _fail(self, request_id: str, error: VmserveError) -> RequestFailure:
        """End a request with an error instead of an output."""
        failure = RequestFailure(request_id, error)
        self._failures.append(failure)
        self._abort(request_id)
        return failure

    def _retire(self, outputs: list[RequestUpdate]) -> None:
        for output in outputs:
            if output.finished:
                self._retired.append(output.request_id)
                request = self._requests.pop(output.request_id)
                # A finished beam search has no sequences left: its outputs come all at once.
                lengths = [seq.num_output for seq in request.sequences]
                lengths = lengths or [len(choice.token_ids) for choice in output.outputs]
                self._regimes.finished(max(lengths, default=0), request.metrics.num_preemptions)
                if self._drafts is not None:
                    self._drafts.forget(request)
        if not self._requests:
            self._idle()

    def _idle(self) -> None:
        """Give free pages of the pool back to the system when nothing runs."""
        for memory in self._memories:
            memory.write_when_idle()
        self._tell_persistence()
        # Keep cached prefixes; without prefix caching drop parked slots.
        for memory in self._memories:
            keep_pages = self._idle_bytes // memory.layout.total_page_bytes
            keep_pages = max(keep_pages, memory.ready_pages)
            try:
                memory.wait()
                memory.trim(keep_pages, drop_idle=not self.resolved.prefix_caching)
            except (OutOfMemoryError, DriverError) as error:
                logger.warning("the pool keeps its pages for now: %s", error)

    def _tell_persistence(self) -> None:
        for memory in self._memories:
            for message in memory.persist_messages():
                logger.warning("kv_persist: %s", message)

    def _make_room_after(self, error: VmserveError, plan: StepPlan) -> StepResult:
        """The system refused memory that the plan counted on: preempt; alone, try once more; then
        fail the only request."""
        if self.scheduler.make_room():
            logger.warning("made room: %s", error)
            return StepResult()
        if not self._has_settled:  # the mapper may hold pages that the plan counts on
            self._has_settled = True
            self.memory.settle()
            return StepResult()
        return StepResult(failures=(self._fail(plan.sequences[0].request.request_id, error),))

    def _mark_scheduled(self, plan: StepPlan) -> None:
        if plan.only_decodes:
            return
        now = self._clock()
        for index in np.flatnonzero(plan.reads_prompt).tolist():
            sequence = plan.sequences[index]
            metrics = sequence.request.metrics
            metrics.num_prefill_chunks += 1
            if metrics.first_scheduled_time is None:
                metrics.first_scheduled_time = now
                self._count_lookup(sequence.request)

    def _count_lookup(self, request: Request) -> None:
        if self.resolved.prefix_caching and not request.params.reads_whole_prompt:
            self.counters.prefix_cache_queries += len(request.prompt_token_ids)
            self.counters.prefix_cache_hits += request.metrics.num_cached_tokens

    # -- life -------------------------------------------------------------------------

    def stats(self) -> dict[str, float | int]:
        """All metrics, by names without prefix, including those of the memory."""
        self._tell_persistence()
        memory = self.memory.stats()
        draft = None if self.draft_model is None else self.draft_model.memory.stats()
        return {
            "num_requests_running": self.scheduler.num_running,
            "num_requests_waiting": self.scheduler.num_waiting,
            "kv_cache_usage_perc": memory.used_pages / memory.limit_pages,
            **self.scheduler.counters(),
            "num_sequences_swapped": memory.swapped_seqs,
            "pinned_prefixes": len(self._pins),
            "tensor_parallel_size": self.memory.layout.tensor_parallel,
            **self.counters.as_dict(),
            **memory.as_dict(),
            **({} if draft is None else persist_figures(memory, draft)),
            **kind_figures(self.memory),
        }

    def snapshot(self) -> EngineSnapshot:
        """A snapshot for live views; see :mod:`vmserve.telemetry.snapshot`."""
        return take_snapshot(self.stats(), self.memory, self._requests.values())

    def close(self) -> None:
        """Abort all requests and free all memory. Later calls are errors."""
        self._mend()
        for request_id in self.request_ids:
            self._abort(request_id)
        if self._trace is not None:
            self._trace.close()
        self.structured.close()
        self._flight = None
        self._runtime.synchronize()
        seconds = FLUSH_SECONDS / len(self._memories)
        if not all(memory.flush(seconds) for memory in self._memories):
            logger.warning("kv_persist: not all blocks were written in %g seconds", FLUSH_SECONDS)
        self._tell_persistence()
        for memory in self._memories:
            memory.close()
        if self.ranks is not None:
            self.ranks.close()

    @property
    def _memories(self) -> list[MemoryManager]:
        """The KV memory, and that of the draft model."""
        return [self.memory, *([] if self.draft_model is None else [self.draft_model.memory])]


def _reads_prompts_mostly(plan: StepPlan) -> bool:
    num_tokens = plan.num_tokens - sum(map(len, plan.drafts))
    return num_tokens >= 64 and num_tokens >= 8 * len(plan)
