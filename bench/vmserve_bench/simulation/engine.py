"""The real engine without a model, over a null driver, with a computed clock.

Model and sampler are one deterministic function of request and position. A step takes the time that
the device profile predicts for its work.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Literal, Self, cast

import numpy as np

from vmserve import _core
from vmserve.config import LEAST, EngineConfig, resolve
from vmserve.engine.build import EngineParts
from vmserve.engine.engine import LLMEngine
from vmserve.engine.parts import create_scheduler
from vmserve.memory.base import Regime
from vmserve.memory.manager import MemoryManager, MemoryOptions
from vmserve.models.config import ModelConfig
from vmserve.numbers.dtypes import DType
from vmserve.runner.cpu_runtime import CpuRuntime
from vmserve.runner.model_runner import null_logits
from vmserve.sampling.tokens import SampledToken
from vmserve.scheduler.budget import SchedulerLimits
from vmserve.scheduler.preemption import Preemption, PreemptionPolicy
from vmserve.scheduler.profile import SequenceWork
from vmserve.scheduler.regime import CostModel, RegimePolicy
from vmserve.types import RequestTerms
from vmserve_bench.simulation.records import RequestRecord, Run, StepRecord
from vmserve_bench.simulation.requests import (
    END_ID,
    VOCAB_SIZE,
    Asked,
    null_candidates,
    null_token,
    sampling_params,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

    from vmserve.config import ResolvedConfig
    from vmserve.memory.base import KVMemory, MemoryPlan
    from vmserve.memory.layout import KVLayout, LayerKind
    from vmserve.runner.model_runner import StepLogits
    from vmserve.sampling.tokens import Logits, SamplingRow, TokenSampler
    from vmserve.scheduler.base import Scheduler, StepPlan
    from vmserve.scheduler.profile import DeviceProfile
    from vmserve.scheduler.sequence import Request
    from vmserve.text.tokenizer import Tokenizer
    from vmserve_bench.simulation.devices import Device
    from vmserve_bench.simulation.records import End

__all__ = ["SimulatedEngine", "SimulationConfig"]

#: Statistics of the memory that a run keeps.
_COUNTED = (
    *("converted_to_virtual_total", "converted_to_paged_total", "forks_total"),
    *("swapped_out_blocks_total", "swapped_in_blocks_total", "copied_blocks_total"),
    *("pages_mapped_total", "unhidden_calls_total", "hidden_calls_total"),
    "prefix_hit_blocks_total",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulationConfig:
    """``limit_bytes``: of the KV pool. ``swap_bytes`` 0: never swap.

    ``mapper`` "manual": a step's background maps are done while it computes; "off": no background
    maps. ``check_every``: steps between checks of the memory's conservation laws; 0: never.
    ``seconds_per_swap_run``: time of each copy to or from the host besides its bytes. ``kinds``: of
    layers that have pages of their own, as :class:`~vmserve.memory.manager.MemoryManager` takes
    them. ``scheduler``: another one than the engine's own, which then obeys the first three limits
    only.
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
    policy: Literal["fcfs", "priority"] = "fcfs"
    priority_max_wait: float = 60.0
    fair_sharing: bool = False
    check_every: int = 0
    kinds: tuple[LayerKind, ...] = ()
    scheduler: Callable[[KVMemory, SchedulerLimits], Scheduler] | None = None

    @staticmethod
    def of(device: Device, **options: object) -> SimulationConfig:
        """The configuration of a model on a device, with ``options`` changed."""
        config = SimulationConfig(
            layout=device.layout, limit_bytes=device.kv_bytes, profile=device.profile
        )
        return replace(config, **options)  # type: ignore[arg-type]


class _KnownSpeeds(PreemptionPolicy):
    """Speeds are the profile's: nothing is measured, because no time passes."""

    def copied(self, num_bytes: int, seconds: float) -> None:
        pass

    def prefilled(self, num_tokens: int, seconds: float) -> None:
        pass


class _WatchedMemory(MemoryManager):
    """Remembers how many pages were mapped before a plan was applied."""

    mapped_before = 0

    def apply(self, plan: MemoryPlan) -> int:
        self.mapped_before = self._core.stats().pages_mapped_total
        return super().apply(plan)


class _NullModel:
    """The engine's runner and sampler; moves the clock by the time of each step."""

    vocab_size = VOCAB_SIZE + 1
    num_repaired_rows = 0

    def __init__(self, engine: SimulatedEngine) -> None:
        self._engine = engine
        self._step: StepLogits | None = None

    def execute(self, plan: StepPlan, slots: NDArray[np.int32], drawn: object = None) -> StepLogits:
        self._engine.compute(plan)
        self._step = null_logits(plan)
        return self._step

    def start(self, logits: Logits, rows: Sequence[SamplingRow]) -> None:
        """It draws on the host."""

    def sample(self, logits: Logits, rows: Sequence[SamplingRow]) -> list[SampledToken]:
        """The null model's token, or the end if the choice is to end here."""
        assert self._step is not None
        tokens = []
        for sequence in self._step.samplers:
            num_output = self._engine.asked(sequence.request).outputs[sequence.index]
            is_last = sequence.num_output + 1 >= num_output
            tokens.append(SampledToken(END_ID if is_last else null_token(sequence), 0.0))
        return tokens

    def beam_candidates(
        self, logits: Logits, num: int, masks: Sequence[NDArray[np.bool_] | None] = ()
    ) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        assert self._step is not None
        beams = self._step.beams
        ids = np.zeros((len(beams), num), dtype=np.int64)
        logprobs = np.full((len(beams), num), -np.inf, dtype=np.float32)
        for row, sequence in enumerate(beams):
            assert sequence.request.beams is not None
            own = sequence.request.beams.num_candidates
            seed = self._engine.asked(sequence.request).seed
            ids[row, :own], logprobs[row, :own] = null_candidates(seed, sequence, own)
        return ids, logprobs


class SimulatedEngine:
    """Drives an engine and records what it does. Deterministic; ``now`` is its clock.

    ``wrap_driver``: puts a driver around the null driver, for example one that injects faults.
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
        # Stepping the mapper, and all statistics in one call, are no part of KVMemory.
        self._core = self.memory._core
        #: Unfinished requests.
        self._open: dict[str, tuple[Asked, Request]] = {}
        #: Whether the next step's batch fails as if its kernels had failed.
        self.fail_next_batch = False
        self._moved = (0, 0)
        self._swap_runs = 0
        self.engine = LLMEngine(EngineConfig(), parts=self._parts())
        self.scheduler = self.engine.scheduler

    def _create_memory(self) -> _WatchedMemory:
        config = self.config
        self._drivers: list[_core.NullDriver] = []

        def null_driver(host: _core.PageDriver) -> _core.PageDriver:
            """Replace the host's driver, which has not touched any memory yet."""
            driver = _core.NullDriver(host.frame_bytes, host.num_frames)
            self._drivers.append(driver)
            return self._wrap_driver(driver) if self._wrap_driver else driver

        return _WatchedMemory(
            config.layout,
            num_slots=config.max_num_seqs,
            num_seqs=2 * config.max_num_seqs,
            max_len=config.max_model_len,
            limit_bytes=config.limit_bytes,
            kinds=config.kinds,
            options=MemoryOptions(
                max_limit_bytes=config.limit_bytes,
                prefix_caching=config.prefix_caching,
                mapper=config.mapper,
                swap_bytes=config.swap_bytes,
                lookahead_tokens=config.lookahead_tokens if config.mapper != "off" else 0,
            ),
            wrap_driver=null_driver,
        )

    def _parts(self) -> EngineParts:
        config, memory = self.config, self.memory
        model_config = _model_config(config)
        resolved = _resolved(config, model_config)
        preemption = _KnownSpeeds(
            config.preemption if config.swap_bytes else "recompute",
            copy_bytes_per_second=config.profile.swap_bytes_per_second,
            prefill_tokens_per_second=1 / config.profile.token if config.profile.token else 1e12,
        )
        regimes = RegimePolicy(config.regime, CostModel(config.profile, config.layout))
        model = _NullModel(self)
        scheduler: Scheduler
        if config.scheduler is not None:
            limits = (config.max_num_seqs, config.max_num_batched_tokens, config.watermark)
            scheduler = config.scheduler(memory, SchedulerLimits(*limits))
        else:
            scheduler = create_scheduler(
                resolved,
                memory,
                regimes,
                preemption,
                lambda: self.now,
                watermark=config.watermark,
            )
        return EngineParts(
            resolved=resolved,
            model_config=model_config,
            tokenizer=cast("Tokenizer", SimpleNamespace(eos_ids=frozenset({END_ID}))),
            memory=memory,
            scheduler=scheduler,
            regimes=regimes,
            preemption=preemption,
            runtime=CpuRuntime(),
            runner=model,
            sampler=cast("TokenSampler", model),
            clock=lambda: self.now,
            idle_bytes=0,
        )

    # -- requests -----------------------------------------------------------------------

    @property
    def has_unfinished(self) -> bool:
        return bool(self._open)

    @property
    def open_names(self) -> list[str]:
        return list(self._open)

    def asked(self, request: Request) -> Asked:
        """What an unfinished request was made of."""
        return self._open[request.request_id][0]

    def add(self, what: Asked) -> None:
        """Raises ``ValueError`` for a request that exceeds the context, or a name in use."""
        is_long = len(what.prompt) + what.max_output > self.config.max_model_len
        if is_long or what.name in self._open:
            raise ValueError(
                f"request {what.name!r} cannot be added: too long, or its name is used"
            )
        terms = RequestTerms(
            priority=what.priority, cache_salt=what.salt.decode(), tenant=what.tenant
        )
        self.engine.add_checked(what.name, list(what.prompt), sampling_params(what), terms)
        request = self.engine.requests[what.name]
        if what.arrival_s:
            request.metrics.arrival_time = min(self.now, what.arrival_s)
        self._open[what.name] = what, request

    def abort(self, name: str) -> None:
        """End a request now. Finished ones are ignored."""
        if name in self._open:
            self.engine.abort(name)
            self._end(name, "aborted")

    def convert(self, name: str, regime: Regime) -> None:
        self.engine.convert(name, regime)

    def _end(self, name: str, end: End) -> None:
        what, request = self._open.pop(name)
        metrics = request.metrics
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
        """Compute once for every sequence that fits; moves the clock by the step's time."""
        self.num_steps += 1
        steps, counters = self.run.steps, self.engine.counters
        before, generated = len(steps), counters.generation_tokens
        result = self.engine.step()
        if len(steps) > before:
            steps[-1] = steps[-1]._replace(
                num_waiting=self.scheduler.num_waiting,
                num_generated=counters.generation_tokens - generated,
            )
            if self.config.check_every and self.num_steps % self.config.check_every == 0:
                self.memory.check()
        for output in result.outputs:
            self._end(output.request_id, "finished")
        for failure in result.failures:
            self._end(failure.request_id, "failed")

    def compute(self, plan: StepPlan) -> None:
        """Move the clock by the plan's work and the memory work that it waits for."""
        mapped = self._pages_mapped()
        if self.config.mapper == "manual":
            self._core.settle_mapper()  # its commands are done while the step computes
        scheduled = plan.scheduled
        work = [SequenceWork(item.regime, item.num_past, item.num_new) for item in scheduled]
        unhidden = mapped - self.memory.mapped_before
        seconds = self._seconds(work, unhidden, self._pages_mapped() - mapped)
        self.now += seconds
        if self.fail_next_batch:
            self.fail_next_batch = False
            raise RuntimeError("the batch was to fail")
        self.run.steps.append(
            StepRecord(
                ended=self.now,
                seconds=seconds,
                num_tokens=plan.num_tokens,
                num_seqs=len(scheduled),
                num_requests=len({item.sequence.request for item in scheduled}),
                num_waiting=0,  # known when the step is over
                num_virtual=sum(item.regime is Regime.VIRTUAL for item in scheduled),
            )
        )

    def _pages_mapped(self) -> int:
        return self._core.stats().pages_mapped_total

    def _seconds(self, work: list[SequenceWork], unhidden: int, hidden: int) -> float:
        work_of = [driver.work() for driver in self._drivers]
        copied, swapped = (sum(each[k] for each in work_of) for k in (1, 2))
        copied_before, swapped_before = self._moved
        self._moved = (copied, swapped)
        seconds = self.config.profile.step_seconds(
            work,
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

    # -- the end ------------------------------------------------------------------------

    def close(self) -> None:
        """Abort all requests, keep the counters, and verify the memory a last time."""
        for name in self.open_names:
            self.abort(name)
        stats = self.memory.stats()
        self.run.counters = {
            **self.scheduler.totals.by_name(),
            **{name: getattr(stats, name) for name in _COUNTED},
        }
        self.memory.check()
        self.engine.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        if kind is None:
            self.close()


def _resolved(config: SimulationConfig, model: ModelConfig) -> ResolvedConfig:
    """The engine's options; sizes are of no machine, so that none is held against this one's."""
    asked = EngineConfig(
        kv_cache_memory=LEAST,
        max_model_len=config.max_model_len,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
    )
    return replace(
        resolve(asked, model),
        kv_regime=config.regime,
        kv_limit_bytes=config.limit_bytes,
        kv_page_bytes=config.layout.shape.page_bytes,
        kv_mapper="off",
        block_tokens=config.layout.block_tokens,
        prefix_caching=config.prefix_caching,
        swap_bytes=config.swap_bytes,
        preemption=config.preemption,
        scheduling_policy=config.policy,
        priority_max_wait=config.priority_max_wait if config.policy == "priority" else None,
        fair_sharing=config.fair_sharing,
    )


def _model_config(config: SimulationConfig) -> ModelConfig:
    """A configuration of which only the vocabulary is used."""
    layout, unknown = config.layout, cast("Any", None)
    return ModelConfig(
        architecture="null",
        vocab_size=VOCAB_SIZE + 1,
        kv_heads=layout.shape.kv_heads,
        head_dim=layout.shape.head_dim,
        max_position_embeddings=config.max_model_len,
        attention=(),
        num_weights=0,
        activation_width=0,
        eos_token_ids=(END_ID,),
        bos_token_id=None,
        dtype=DType.of(layout.dtype),
        default_sampling={},
        pooling="last",
        network=unknown,
    )
