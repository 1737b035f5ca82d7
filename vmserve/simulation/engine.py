"""The engine without a model: real scheduler, real memory core, a clock that is computed.

:meth:`SimulatedEngine.step` follows ``vmserve.engine.engine.LLMEngine.step`` line by line. What the
model, the sampler and the output processor do there is one deterministic function of request and
position here, and what they take is what the device profile says of the step's work.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal, Self

from vmserve import _core
from vmserve.errors import DriverError, OutOfMemoryError
from vmserve.memory.base import Regime
from vmserve.memory.manager import MemoryManager, MemoryOptions
from vmserve.scheduler.base import NoRoomError
from vmserve.scheduler.fairness import TenantShares
from vmserve.scheduler.fcfs import FCFSScheduler, SchedulerLimits
from vmserve.scheduler.preemption import Preemption, PreemptionPolicy
from vmserve.scheduler.profile import SequenceWork
from vmserve.scheduler.regime import CostModel, RegimePolicy
from vmserve.simulation.records import MemorySample, RequestRecord, Run, StepRecord
from vmserve.simulation.requests import Asked, build_request, null_candidates, null_token

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import TracebackType

    from vmserve.memory.layout import KVLayout
    from vmserve.scheduler.base import ScheduledSequence, StepPlan
    from vmserve.scheduler.profile import DeviceProfile
    from vmserve.scheduler.sequence import Request, Sequence
    from vmserve.simulation.devices import Device
    from vmserve.simulation.records import End

    Scheduled = tuple[ScheduledSequence, ...]

__all__ = ["SimulatedEngine", "SimulationConfig"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulationConfig:
    """``limit_bytes``: of the KV pool. ``swap_bytes`` 0: nothing is swapped.

    ``mapper`` "manual": each step's background maps are done while it computes; "off": none is in
    the background. ``check_every``: the memory's conservation laws are verified each so many steps;
    ``sample_every``: its statistics are kept. 0: never. ``seconds_per_swap_run``: what each copy to
    or from the host takes besides its bytes.
    """

    layout: KVLayout
    limit_bytes: int
    profile: DeviceProfile
    max_model_len: int = 2048
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 2048
    watermark: float = 0.01
    regime: Literal["auto", "virtual", "paged"] = "auto"
    preemption: Preemption = "recompute"
    swap_bytes: int = 0
    seconds_per_swap_run: float = 0.0
    prefix_caching: bool = True
    mapper: Literal["manual", "off"] = "manual"
    lookahead_tokens: int = 16
    policy: Literal["fcfs", "priority", "v0"] = "fcfs"
    priority_max_wait: float = 60.0
    fair_sharing: bool = False
    check_every: int = 0
    sample_every: int = 0

    @staticmethod
    def of(device: Device, **options: object) -> SimulationConfig:
        """A model on a device, with these fields otherwise."""
        config = SimulationConfig(
            layout=device.layout, limit_bytes=device.kv_bytes, profile=device.profile
        )
        return replace(config, **options)  # type: ignore[arg-type]


class _KnownSpeeds(PreemptionPolicy):
    """Speeds are the profile's: nothing is measured, as no time passes."""

    def copied(self, num_bytes: int, seconds: float) -> None:
        pass

    def prefilled(self, num_tokens: int, seconds: float) -> None:
        pass


@dataclass(slots=True)
class _Open:
    """A request that has not ended."""

    what: Asked
    request: Request


class SimulatedEngine:
    """See the module's text. Single-threaded, deterministic; ``now`` is its clock.

    ``wrap_driver``: a driver around the null driver, say one that injects faults.
    """

    def __init__(
        self,
        config: SimulationConfig,
        *,
        wrap_driver: Callable[[_core.PageDriver], _core.PageDriver] | None = None,
    ) -> None:
        self.config = config
        self.now = 0.0
        self.run = Run()
        self.num_steps = 0
        self._wrap_driver = wrap_driver
        self.memory = self._create_memory()
        # A mapper that is stepped, and statistics in one call, are no part of KVMemory.
        self._core = self.memory._core
        self.scheduler = self._create_scheduler()
        self._open: dict[str, _Open] = {}
        self._num_arrived = 0
        #: The next step's batch fails as if its kernels had.
        self.fail_next_batch = False
        self._num_generated = 0
        self._moved = (0, 0)
        self._swap_runs = 0

    def _create_memory(self) -> MemoryManager:
        config = self.config

        def null_driver(host: _core.PageDriver) -> _core.PageDriver:
            """In place of the host's, which has not touched any memory yet."""
            self._driver = _core.NullDriver(host.frame_bytes, host.num_frames)
            return self._wrap_driver(self._driver) if self._wrap_driver else self._driver

        return MemoryManager(
            config.layout,
            num_slots=config.max_num_seqs,
            num_seqs=2 * config.max_num_seqs,
            max_len=config.max_model_len,
            limit_bytes=config.limit_bytes,
            options=MemoryOptions(
                max_limit_bytes=config.limit_bytes,
                prefix_caching=config.prefix_caching,
                mapper=config.mapper,
                swap_bytes=config.swap_bytes,
                lookahead_tokens=config.lookahead_tokens if config.mapper != "off" else 0,
            ),
            wrap_driver=null_driver,
        )

    def _create_scheduler(self) -> FCFSScheduler:
        config = self.config
        preemption = _KnownSpeeds(
            config.preemption if config.swap_bytes else "recompute",
            copy_bytes_per_second=config.profile.swap_bytes_per_second,
            prefill_tokens_per_second=1 / config.profile.token if config.profile.token else 1e12,
        )
        limits = SchedulerLimits(
            config.max_num_seqs,
            config.max_num_batched_tokens,
            watermark=config.watermark,
            priority_max_wait=config.priority_max_wait if config.policy == "priority" else None,
            separates_phases=config.policy == "v0",
        )
        self._regimes = RegimePolicy(config.regime, CostModel(config.profile, config.layout))
        shares = TenantShares() if config.fair_sharing else None
        return FCFSScheduler(
            self.memory, limits, self._regimes, preemption, shares, clock=lambda: self.now
        )

    # -- requests -----------------------------------------------------------------------

    @property
    def has_unfinished(self) -> bool:
        return bool(self._open)

    @property
    def open_names(self) -> list[str]:
        return list(self._open)

    def add(self, what: Asked) -> None:
        """Raises ``ValueError`` for one that exceeds the context, or a name that is in use."""
        if (
            len(what.prompt) + what.max_output > self.config.max_model_len
            or what.name in self._open
        ):
            raise ValueError(
                f"request {what.name!r} cannot be added: too long, or its name is used"
            )
        arrived = min(self.now, what.arrival_s) if what.arrival_s else self.now
        by_priority = self.config.policy == "priority"
        request = build_request(what, self._num_arrived, arrived, by_priority=by_priority)
        self._num_arrived += 1
        self._open[what.name] = _Open(what, request)
        self.scheduler.add(request)

    def abort(self, name: str) -> None:
        """Ends a request now; one that has ended is ignored."""
        if name in self._open:
            self._abort(name, "aborted")

    def convert(self, name: str, regime: Regime) -> None:
        if name in self._open:
            self.scheduler.convert(self._open[name].request, regime)

    def _abort(self, name: str, end: End) -> None:
        request = self._open[name].request
        self.scheduler.abort(request)
        self._end(name, end)

    def _end(self, name: str, end: End) -> None:
        entry = self._open.pop(name)
        what, request, metrics = entry.what, entry.request, entry.request.metrics
        num_output = sum(sequence.num_output for sequence in request.sequences)
        if end == "finished" and what.beam_width:
            num_output = what.beam_width * what.max_output
        self.run.requests.append(
            RequestRecord(
                name=name,
                num_prompt=len(what.prompt),
                num_output=num_output,
                longest_output=what.max_output,
                arrival=metrics.arrival_time,
                end=end,
                finished=self.now,
                first_scheduled=metrics.first_scheduled_time,
                first_token=metrics.first_token_time,
                num_preemptions=metrics.num_preemptions,
                num_cached_tokens=metrics.num_cached_tokens,
                regime=metrics.kv_regime,
                order=request.arrival,
            )
        )

    # -- the step -----------------------------------------------------------------------

    def step(self) -> None:
        """Compute once for every sequence that fits; the clock moves by what that takes."""
        self.num_steps += 1
        try:
            plan = self.scheduler.schedule()
        except NoRoomError as error:
            self._abort(error.request_id, "failed")
            return
        if plan is None:
            self._idle()
            return
        mapped = self._pages_mapped()
        try:
            epoch = self.memory.apply(plan.memory)
        except (OutOfMemoryError, DriverError):
            self._make_room_after_refusal(plan)
            return
        self.scheduler.applied(plan)
        scheduled = plan.scheduled
        unhidden = self._pages_mapped() - mapped
        self._mark_scheduled(scheduled)
        hidden = self._map_ahead() - mapped - unhidden
        seconds = self._seconds(scheduled, unhidden, hidden)
        self.now += seconds
        if self.fail_next_batch:
            self.fail_next_batch = False
            self.memory.abandon(epoch)
            for name in {item.sequence.request.request_id for item in scheduled}:
                self._abort(name, "failed")
            return
        self.memory.complete(epoch)
        self.scheduler.computed(plan)
        self._num_generated = 0
        ended = self._take_tokens(scheduled)
        if self.config.prefix_caching:
            self.memory.append_tokens(*plan.take_unpublished())
        self._record(scheduled, seconds)
        self._regimes.stepped(seconds)
        for request in ended:
            num_output = self._open[request.request_id].what.max_output
            self._regimes.finished(num_output, request.metrics.num_preemptions)
            self._end(request.request_id, "finished")
        if not self._open:
            self._idle()

    def _pages_mapped(self) -> int:
        return self._core.stats().pages_mapped_total

    def _map_ahead(self) -> int:
        """The mapper's commands, while the step computes; how many pages are mapped so far."""
        if self.config.mapper == "manual":
            self._core.settle_mapper()
        return self._pages_mapped()

    def _seconds(self, scheduled: Scheduled, unhidden: int, hidden: int) -> float:
        _, copied, swapped = self._driver.work()
        copied_before, swapped_before = self._moved
        self._moved = (copied, swapped)
        seconds = self.config.profile.step_seconds(
            [SequenceWork(item.regime, item.num_past, item.num_new) for item in scheduled],
            unhidden_pages=unhidden,
            hidden_pages=hidden,
            copied_bytes=copied - copied_before,
            swapped_bytes=swapped - swapped_before,
        )
        if self.config.seconds_per_swap_run:
            runs = self._core.stats().swap_copy_runs_total
            seconds += self.config.seconds_per_swap_run * (runs - self._swap_runs)
            self._swap_runs = runs
        return seconds

    def _mark_scheduled(self, scheduled: Scheduled) -> None:
        for item in scheduled:
            metrics = item.sequence.request.metrics
            if metrics.first_scheduled_time is None:
                metrics.first_scheduled_time = self.now

    def _make_room_after_refusal(self, plan: StepPlan) -> None:
        if not self.scheduler.make_room():
            self._abort(plan.sequences[0].request.request_id, "failed")

    def _idle(self) -> None:
        # Refused, the pool keeps its pages.
        with suppress(OutOfMemoryError, DriverError):
            self.memory.trim(drop_idle=not self.config.prefix_caching)

    # -- the null model -----------------------------------------------------------------

    def _take_tokens(self, scheduled: Scheduled) -> list[Request]:
        """The requests that are complete by it."""
        touched: dict[Request, None] = {}
        beams: dict[Request, None] = {}
        for item in scheduled:
            if not item.samples:
                continue
            sequence, request = item.sequence, item.sequence.request
            if request.beams is not None:
                request.beams.take(
                    sequence, null_candidates(sequence, request.beams.num_candidates)
                )
                beams[request] = None
                continue
            drawing = [sequence]
            if sequence.num_output == 0:
                drawing += request.first_tokens_due
            for drawn in drawing:
                self._take_token(drawn)
            touched[request] = None
        ended = [request for request in touched if request.finished]
        return ended + [request for request in beams if self._search_on(request)]

    def _take_token(self, sequence: Sequence) -> None:
        request = sequence.request
        sequence.tokens.append(null_token(sequence))
        self._num_generated += 1
        request.metrics.token_at(self.now)
        if sequence.num_output >= self._open[request.request_id].what.outputs[sequence.index]:
            self.scheduler.finish(sequence)

    def _search_on(self, request: Request) -> bool:
        """Whether the search is over."""
        assert request.beams is not None
        if request.beams.advance(self.scheduler):
            request.metrics.token_at(self.now)
        if request.beams.done:
            self._num_generated += request.num_branches * request.max_tokens
        return request.beams.done

    # -- records ------------------------------------------------------------------------

    def _record(self, scheduled: Scheduled, seconds: float) -> None:
        config = self.config
        self.run.steps.append(
            StepRecord(
                self.now,
                seconds,
                sum(item.num_new for item in scheduled),
                len(scheduled),
                len({item.sequence.request for item in scheduled}),
                self.scheduler.num_waiting,
                sum(item.regime is Regime.VIRTUAL for item in scheduled),
                self._num_generated,
            )
        )
        if config.check_every and self.num_steps % config.check_every == 0:
            self.memory.check()
        if config.sample_every and self.num_steps % config.sample_every == 0:
            self.run.memory.append(MemorySample(self.now, self.memory.stats()))

    def counters(self) -> dict[str, int]:
        """Totals so far; also kept in ``run`` when the engine is closed."""
        stats = self.memory.stats()
        names = (
            "converted_to_virtual_total",
            "converted_to_paged_total",
            "swapped_out_blocks_total",
            "swapped_in_blocks_total",
            "copied_blocks_total",
            "forks_total",
            "pages_mapped_total",
            "unhidden_calls_total",
            "hidden_calls_total",
            "prefix_hit_blocks_total",
        )
        return {
            **self.scheduler.counters(),
            **{name: getattr(stats, name) for name in names},
        }

    def close(self) -> None:
        """Aborts what runs; verifies the memory a last time."""
        for name in self.open_names:
            self.abort(name)
        self.run.counters = self.counters()
        self.memory.check()
        self.memory.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if kind is None:
            self.close()
