"""Measure a device profile in a few tens of milliseconds as the engine starts.

The kernels of both regimes run at a few shapes on a scratch pool with one group of the layout, so
with the same strides and pages; mapping is timed on the same pool. Times are the least of several
interleaved tries, because other work on the machine only ever adds.

On a GPU, kernels are timed on the device, by events around replays of a graph: a captured step has
no launches, and the host's part of a step is hidden by the step before.

Caches are warm, because one layer's keys and values are read again and again. So the times compare
the two views, and are lower bounds of what either costs in a model that fills memory.
"""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from vmserve.attention.base import AttentionBackend, RaggedBatch
from vmserve.memory.base import Growth, MemoryPlan, Regime
from vmserve.memory.manager import MemoryManager, MemoryOptions
from vmserve.scheduler.profile import DeviceProfile, KernelCosts
from vmserve.system.threads import num_threads

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from vmserve.memory.layout import KVLayout
    from vmserve.runner.runtime import DeviceRuntime, HeadShape

__all__ = ["measure_profile"]

_TRIES = 5
#: Relative difference below which kernels of two regimes count as equally fast, if any try has it:
#: times differ by this much by chance on a machine with other work.
_RESOLUTION = 0.15
#: Sequences and positions of the decoding shapes, tokens of the prompt.
_FEW, _MANY = 1, 4
_SHORT = 16
_LONG = {"cpu": 512, "cuda": 4096}  # a GPU needs more to be busy
_PROMPT = {"cpu": 128, "cuda": 1024}
_MAPPED_PAGES = 8
_COPIED_BYTES = 8 << 20


def measure_profile(
    layout: KVLayout,
    backends: Mapping[Regime, AttentionBackend],
    heads: HeadShape,
    max_len: int,
    runtime: DeviceRuntime,
) -> DeviceProfile:
    """Measure attention, mapping and copying for a model with this layout.

    Other costs of a step are not measured: they are 0 in the profile.
    """
    slack = max(b.read_slack_tokens for b in backends.values())
    with runtime.active():
        scratch = _Scratch(dataclasses.replace(layout, state_bytes=0), max_len, slack, runtime)
        try:
            kernels = _measure_kernels(scratch, layout, backends, heads)
            map_page = scratch.map_page_seconds() * layout.num_groups
        finally:
            runtime.synchronize()
            scratch.close()
        copy = _copy_bytes_per_second(runtime)
    # Background mapping is free only if the kernels leave a processor free.
    on_cpu = runtime.device_type == "cpu"
    is_busy = on_cpu and num_threads() >= len(os.sched_getaffinity(0))
    return DeviceProfile(
        name="measured at start",
        virtual=kernels[Regime.VIRTUAL],
        paged=kernels[Regime.PAGED],
        step=0.0,
        weights=0.0,
        token=0.0,
        map_page=map_page,
        map_page_hidden=map_page if is_busy else 0.0,
        copy_bytes_per_second=copy,
        swap_bytes_per_second=copy,
    )


class _Scratch:
    """A small pool with the first group of a layout, and sequences in both regimes."""

    def __init__(
        self, layout: KVLayout, max_len: int, read_slack_tokens: int, runtime: DeviceRuntime
    ) -> None:
        self.runtime = runtime
        shape = layout.shape
        group = dataclasses.replace(shape, num_layers=shape.layers_per_group)
        self.layout = dataclasses.replace(layout, parts=(group,))
        self.length = min(_LONG[runtime.device_type], max_len - 1)
        pages = 2 * _MANY * self.layout.pages_for(self.length + 1 + read_slack_tokens)
        self._memory = MemoryManager(
            self.layout,
            num_slots=_MANY + 1,
            num_seqs=2 * _MANY + 1,
            max_len=max(self.length + 1, self.layout.page_tokens * _MAPPED_PAGES),
            limit_bytes=(pages + _MAPPED_PAGES) * self.layout.total_page_bytes,
            options=MemoryOptions(
                read_slack_tokens=read_slack_tokens,
                zero_pages="never",
                deferred_reclamation=False,
                seal_read_only=False,  # the same positions are written again and again
                driver=runtime.memory(),
            ),
        )
        self.views = runtime.views(self._memory)
        self.places = {regime: self._grown(regime) for regime in Regime}

    def _grown(self, regime: Regime) -> list[int]:
        seqs = [self._open(regime) for _ in range(_MANY)]
        self._grow(seqs, self.length + 1)
        if regime is Regime.PAGED:
            return seqs
        slots: list[int] = self._memory.slots(seqs).tolist()
        return slots

    def _open(self, regime: Regime) -> int:
        seq = self._memory.open(regime=regime)
        assert seq is not None, "the pool was made for these"
        return seq

    def _grow(self, seqs: list[int], num_tokens: int) -> None:
        plan = self._memory.plan([Growth(seq, num_tokens) for seq in seqs])
        assert isinstance(plan, MemoryPlan), "the pool was made for these"
        self._memory.launched(self._memory.apply(plan))

    def map_page_seconds(self) -> float:
        """Seconds to map and unmap one page of the group in a slot: the least of some tries."""

        def map_and_release() -> None:
            seq = self._open(Regime.VIRTUAL)
            self._grow([seq], _MAPPED_PAGES * self.layout.page_tokens)
            self._memory.release(seq)

        return float(_host_samples([map_and_release], self.runtime).min()) / _MAPPED_PAGES

    def close(self) -> None:
        self._memory.close()


def _measure_kernels(
    scratch: _Scratch,
    layout: KVLayout,
    backends: Mapping[Regime, AttentionBackend],
    heads: HeadShape,
) -> dict[Regime, KernelCosts]:
    long = scratch.length
    prompt = min(_PROMPT[scratch.runtime.device_type], long)
    shapes = [
        ([0], [_SHORT], [1]),
        (range(_MANY), [_SHORT] * _MANY, [1] * _MANY),
        (range(_MANY), [long] * _MANY, [1] * _MANY),
        ([0], [0], [prompt]),
    ]
    regimes = list(Regime)
    steps = [
        _steps(backends[regime], scratch, regime, heads, shape)
        for shape in shapes
        for regime in regimes
    ]
    # One kernel over both views does the same work: any difference here, in every try, comes from
    # where the pages happen to lie in the caches.
    same = len({backend.name for backend in backends.values()}) == 1
    layers = _level(_in_turn([scratch.runtime.timer(layer) for _, layer in steps]), same)
    seconds = [layer * layout.num_layers for layer in layers]
    if scratch.runtime.device_type == "cpu":
        binds = _level(_host_samples([bind for bind, _ in steps], scratch.runtime), same)
        seconds = [bind + layer for bind, layer in zip(binds, seconds, strict=True)]
    costs = {}
    for index, regime in enumerate(regimes):
        few, many, far, read = seconds[index :: len(regimes)]
        sequence = max(0.0, (many - few) / (_MANY - _FEW))
        per_token = max(0.0, (far - many) / (_MANY * max(1, long - _SHORT)))
        call = max(0.0, few - sequence)
        pairs = prompt * (prompt + 1) / 2
        pair = max(0.0, (read - call - sequence) / pairs)
        costs[regime] = KernelCosts(call=call, sequence=sequence, read=per_token, pair=pair)
    return costs


def _steps(
    backend: AttentionBackend,
    scratch: _Scratch,
    regime: Regime,
    heads: HeadShape,
    shape: tuple[Sequence[int], list[int], list[int]],
) -> tuple[Callable[[], object], Callable[[], object]]:
    """Two calls for a step with these sequences: its once-per-step part, and one layer."""
    which, num_past, num_new = shape
    places = [scratch.places[regime][i] for i in which]
    batch = RaggedBatch.build(places, num_past, num_new)
    view = scratch.views[regime]
    call = backend.bind(view, batch)
    return (
        lambda: backend.bind(view, RaggedBatch.build(places, num_past, num_new)),
        scratch.runtime.layer_probe(call, batch.num_tokens, heads),
    )


def _level(samples: NDArray[np.float64], same_kernel: bool) -> list[float]:
    """The least time of each call, equal for neighbours that do not differ reliably.

    Neighbours do the same in two regimes. With ``same_kernel`` they are equal; else they differ
    only if every try, in which they ran one after the other, says so.

    samples: ``[calls, tries]``, an even number of calls.
    """
    least = samples.min(axis=1)
    for first in range(0, len(least), 2):
        ratios = samples[first] / samples[first + 1]
        by_chance = ratios.min() < 1 + _RESOLUTION and ratios.max() > 1 / (1 + _RESOLUTION)
        if same_kernel or by_chance:
            least[first : first + 2] = least[first : first + 2].min()
    return [float(seconds) for seconds in least]


def _in_turn(timers: list[Callable[[], float]]) -> NDArray[np.float64]:
    """Seconds of each timer in several interleaved tries: ``[timers, tries]``."""
    samples = np.empty((len(timers), _TRIES))
    for attempt in range(_TRIES):
        for index, seconds in enumerate(timers):
            samples[index, attempt] = seconds()
    return samples


def _host_samples(calls: list[Callable[[], object]], runtime: DeviceRuntime) -> NDArray[np.float64]:
    """:func:`_in_turn` by the host's clock, until the device has done each call's work.

    Each runs once before it is timed, so that what ran before does not affect its time.
    """

    def timer(call: Callable[[], object]) -> Callable[[], float]:
        def seconds() -> float:
            call()
            runtime.synchronize()
            began = time.perf_counter()
            call()
            runtime.synchronize()
            return time.perf_counter() - began

        return seconds

    return _in_turn([timer(call) for call in calls])


def _copy_bytes_per_second(runtime: DeviceRuntime) -> float:
    """Bandwidth from host memory to the device, for swapping."""
    copies = _host_samples([runtime.copy_probe(_COPIED_BYTES)], runtime)
    return _COPIED_BYTES / float(copies.min())
