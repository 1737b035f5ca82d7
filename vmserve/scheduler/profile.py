"""Costs of work on one device for one model, measured at start or stored in a file.

The scheduler predicts with it which regime is cheaper for a request, and a simulation how long a
step takes. Every cost is in seconds and of all layers together, unless its name says otherwise.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from vmserve.errors import ConfigurationError
from vmserve.memory.base import Regime

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["PROFILE_VERSION", "DeviceProfile", "KernelCosts", "SequenceWork"]

PROFILE_VERSION = 1


class SequenceWork(NamedTuple):
    """Work of one sequence in a step: ``num_new`` tokens after ``num_past``."""

    regime: Regime
    num_past: int
    num_new: int

    @property
    def num_pairs(self) -> float:
        """Query-key pairs under the causal mask."""
        return self.num_new * (self.num_past + (self.num_new + 1) / 2)


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelCosts:
    """Costs of attention over one view."""

    #: Seconds per step with any sequence of the regime: launches, arguments.
    call: float
    #: Seconds per sequence.
    sequence: float
    #: Seconds per token read by a decoding sequence.
    read: float
    #: Seconds per pair of a query and a key in prefill.
    pair: float

    def seconds(self, work: Iterable[SequenceWork]) -> float:
        """Seconds of one step with these sequences, all of one regime; 0 for none."""
        total = 0.0
        for item in work:
            if item.num_new == 1:
                total += self.sequence + self.read * (item.num_past + 1)
            else:
                total += self.sequence + self.pair * item.num_pairs
        return total + self.call if total else 0.0

    def batch_seconds(
        self, num_past: NDArray[np.int64], num_new: NDArray[np.int64], num_tokens: int
    ) -> float:
        """:meth:`seconds` for a batch in columns, not empty, with ``num_tokens`` new tokens."""
        num = len(num_new)
        if num_tokens == num:  # most steps; for few sequences lists are faster than numpy
            num_read: int = sum(num_past.tolist()) + num
            return self.call + self.sequence * num + self.read * num_read
        decodes = num_new == 1
        reads = float(num_past[decodes].sum() + np.count_nonzero(decodes))
        past, new = num_past[~decodes], num_new[~decodes]
        pairs = float((new * (past + (new + 1) / 2)).sum())
        return self.call + self.sequence * num + self.read * reads + self.pair * pairs


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceProfile:
    """See the module's docstring. Raises :class:`ConfigurationError` for invalid costs."""

    name: str
    virtual: KernelCosts
    paged: KernelCosts
    #: Seconds per step, whatever is in it; ``weights`` has the time to read the weights.
    step: float
    #: Seconds to read the weights once; they hide the work on few tokens.
    weights: float
    #: Seconds per token, outside attention.
    token: float
    #: Seconds to map one page in a slot, and to unmap one, when the step waits for it.
    map_page: float
    #: Slowdown of the running step by one mapping in the background, in seconds.
    map_page_hidden: float
    copy_bytes_per_second: float
    swap_bytes_per_second: float

    def __post_init__(self) -> None:
        for name, cost in _costs(self):
            if not math.isfinite(cost) or cost < 0:
                raise ConfigurationError(
                    f"device profile {self.name!r}: {name} is {cost}; it must be 0 or more"
                )
        for name in ("copy_bytes_per_second", "swap_bytes_per_second"):
            if getattr(self, name) <= 0:
                raise ConfigurationError(
                    f"device profile {self.name!r}: {name} must be greater than 0"
                )

    def kernels(self, regime: Regime) -> KernelCosts:
        return self.virtual if regime is Regime.VIRTUAL else self.paged

    def attention_seconds(self, work: Iterable[SequenceWork]) -> float:
        """Attention seconds of one step: each regime that it has is called once per layer."""
        items = list(work)
        return sum(
            self.kernels(regime).seconds(item for item in items if item.regime is regime)
            for regime in Regime
        )

    def linear_seconds(self, num_tokens: int) -> float:
        """Seconds of everything but attention, for ``num_tokens`` tokens."""
        return self.step + max(self.weights, self.token * num_tokens)

    def step_seconds(
        self,
        work: Iterable[SequenceWork],
        *,
        unhidden_pages: int = 0,
        hidden_pages: int = 0,
        copied_bytes: int = 0,
        swapped_bytes: int = 0,
    ) -> float:
        """Seconds of one step and of the memory work that it waits for."""
        items = list(work)
        return (
            self.linear_seconds(sum(item.num_new for item in items))
            + self.attention_seconds(items)
            + self.map_page * unhidden_pages
            + self.map_page_hidden * hidden_pages
            + copied_bytes / self.copy_bytes_per_second
            + swapped_bytes / self.swap_bytes_per_second
        )

    # -- files --------------------------------------------------------------------------

    def to_json(self) -> str:
        return json.dumps({"version": PROFILE_VERSION, **dataclasses.asdict(self)}, indent=2)

    @staticmethod
    def from_json(text: str, source: str = "device profile") -> DeviceProfile:
        """Read what :meth:`to_json` writes; raises :class:`ConfigurationError` for anything
        else."""
        try:
            data = json.loads(text)
        except ValueError as error:
            raise ConfigurationError(f"{source} is not JSON: {error}") from error
        if not isinstance(data, dict) or data.pop("version", None) != PROFILE_VERSION:
            raise ConfigurationError(
                f"{source} is no device profile of version {PROFILE_VERSION}: make one with "
                "`vmserve bench profile`"
            )
        for regime in ("virtual", "paged"):
            data[regime] = KernelCosts(**_fields(KernelCosts, data.get(regime), source))
        return DeviceProfile(**_fields(DeviceProfile, data, source))

    @staticmethod
    def read(path: Path) -> DeviceProfile:
        try:
            return DeviceProfile.from_json(path.read_text(encoding="utf-8"), str(path))
        except OSError as error:
            raise ConfigurationError(
                f"cannot read the device profile {path}: {error.strerror}"
            ) from error


def _costs(profile: DeviceProfile) -> Iterable[tuple[str, float]]:
    for field in dataclasses.fields(profile):
        value = getattr(profile, field.name)
        if isinstance(value, KernelCosts):
            yield from (
                (f"{field.name}.{name}", cost) for name, cost in dataclasses.asdict(value).items()
            )
        elif field.name != "name":
            yield field.name, value


def _fields(kind: type, data: Any, source: str) -> Mapping[str, Any]:
    names = [field.name for field in dataclasses.fields(kind)]
    if not isinstance(data, dict) or set(data) != set(names):
        raise ConfigurationError(f"{source}: {kind.__name__} has the fields {', '.join(names)}")
    for name in names:
        value = data[name]
        fits = isinstance(value, str) if name == "name" else not isinstance(value, (bool, str))
        if not fits or value is None:
            raise ConfigurationError(f"{source}: {name} is {value!r}")
    return data
