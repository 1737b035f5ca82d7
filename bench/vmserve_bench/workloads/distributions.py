"""Length distributions for request shapes, driven by correlated standard normals.

Every marginal maps standard normal deviates to lengths in tokens. Drawing the deviates
of a request's input and output with a correlation (a Gaussian copula) then gives the two
lengths a rank correlation without changing either marginal.

Integer lengths depend on transcendental functions only through rounding, so the last-bit
differences between mathematical libraries do not reach the result.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import NormalDist
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]


class Marginal(Protocol):
    """A distribution of lengths, as a monotone function of a standard normal deviate."""

    def from_normal(self, z: FloatArray) -> FloatArray:
        """Map deviates to lengths in tokens, element by element; not yet rounded."""
        ...


def normal_cdf(z: FloatArray) -> FloatArray:
    """Standard normal cumulative distribution of each element, in [0, 1]."""
    scaled = np.asarray(z, dtype=np.float64) / math.sqrt(2.0)
    erf = np.fromiter(map(math.erf, scaled.ravel().tolist()), np.float64, count=scaled.size)
    return 0.5 * (1.0 + erf.reshape(scaled.shape))


@dataclass(frozen=True, slots=True)
class PercentileTable:
    """Percentiles of a measured distribution, linear in between.

    ``percents`` rises from 0 to 100; ``lengths`` holds the length in tokens at each.
    """

    percents: tuple[float, ...]
    lengths: tuple[float, ...]

    def __post_init__(self) -> None:
        if len(self.percents) != len(self.lengths) or len(self.percents) < 2:
            raise ValueError(
                f"a percentile table needs two or more percentiles with one length each, "
                f"got {len(self.percents)} percentiles and {len(self.lengths)} lengths"
            )
        if self.percents[0] != 0 or self.percents[-1] != 100:
            raise ValueError(
                f"a percentile table must run from 0 to 100, "
                f"got {self.percents[0]:g} to {self.percents[-1]:g}"
            )
        if np.any(np.diff(self.percents) <= 0) or np.any(np.diff(self.lengths) < 0):
            raise ValueError("percentiles must rise and their lengths must not fall")

    def quantile(self, u: FloatArray) -> FloatArray:
        """Length at each cumulative probability ``u`` in [0, 1]."""
        lengths: FloatArray = np.interp(
            u, np.asarray(self.percents) / 100.0, np.asarray(self.lengths)
        )
        return lengths

    def from_normal(self, z: FloatArray) -> FloatArray:
        """Length at the cumulative probability of each deviate."""
        return self.quantile(normal_cdf(z))


@dataclass(frozen=True, slots=True)
class LogNormal:
    """Log-normal lengths: the logarithm has mean ``mu`` and standard deviation ``sigma``."""

    mu: float
    sigma: float

    def __post_init__(self) -> None:
        if not math.isfinite(self.mu) or not (math.isfinite(self.sigma) and self.sigma >= 0):
            raise ValueError(
                f"mu must be finite and sigma finite and at least 0, "
                f"got mu={self.mu} and sigma={self.sigma}"
            )

    @classmethod
    def from_mean(cls, mean: float, sigma: float) -> LogNormal:
        """The log-normal with this mean in tokens: mu = ln(mean) - sigma^2 / 2."""
        if not (math.isfinite(mean) and mean >= 1):
            raise ValueError(f"a mean length must be finite and at least 1 token, got {mean}")
        return cls(math.log(mean) - sigma * sigma / 2.0, sigma)

    @property
    def mean(self) -> float:
        """Mean length in tokens, before rounding."""
        return math.exp(self.mu + self.sigma * self.sigma / 2.0)

    def from_normal(self, z: FloatArray) -> FloatArray:
        """exp(mu + sigma z)."""
        return np.exp(self.mu + self.sigma * np.asarray(z, dtype=np.float64))


@dataclass(frozen=True, slots=True)
class PiecewiseLogNormal:
    """Goes through a median, a 90th and a 99th percentile exactly.

    The logarithm of the length is piecewise linear in the normal deviate: one slope up to
    the 90th percentile (below the median too, where nothing was published) and another
    beyond it. A single log-normal cannot meet all three where the two slopes differ.
    """

    p50: float
    p90: float
    p99: float

    def __post_init__(self) -> None:
        if not 1 <= self.p50 <= self.p90 <= self.p99:
            raise ValueError(
                f"percentiles must be at least 1 token and not fall, "
                f"got p50={self.p50}, p90={self.p90}, p99={self.p99}"
            )

    def from_normal(self, z: FloatArray) -> FloatArray:
        """Length at each deviate."""
        deviates = np.asarray(z, dtype=np.float64)
        z90, z99 = NormalDist().inv_cdf(0.90), NormalDist().inv_cdf(0.99)
        body_slope = math.log(self.p90 / self.p50) / z90
        tail_slope = math.log(self.p99 / self.p90) / (z99 - z90)
        body = math.log(self.p50) + body_slope * np.minimum(deviates, z90)
        return np.exp(body + tail_slope * np.maximum(deviates - z90, 0.0))


@dataclass(frozen=True, slots=True)
class LengthModel:
    """Joint distribution of a request's input and output lengths.

    ``rho`` is the correlation of the underlying normals. With ``max_total_tokens`` the
    input is cut to leave room for one output token, and the output to what is then left.
    ``floor_inputs`` rounds inputs down instead of to the nearest token.
    """

    inputs: Marginal
    outputs: Marginal
    rho: float = 0.0
    max_total_tokens: int | None = None
    floor_inputs: bool = False

    def __post_init__(self) -> None:
        if not -1.0 <= self.rho <= 1.0:
            raise ValueError(f"rho is a correlation, from -1 to 1, got {self.rho}")
        if self.max_total_tokens is not None and self.max_total_tokens < 2:
            raise ValueError(
                f"max_total_tokens must leave room for one input and one output token, "
                f"got {self.max_total_tokens}"
            )

    def sample(self, num_requests: int, rng: np.random.Generator) -> tuple[IntArray, IntArray]:
        """Draw input and output lengths, two arrays ``[num_requests]``, each at least 1.

        The first k requests are the same for every ``num_requests`` of k or more.
        """
        z = rng.standard_normal((num_requests, 2))
        z_outputs = self.rho * z[:, 0] + math.sqrt(1.0 - self.rho * self.rho) * z[:, 1]
        raw_inputs = self.inputs.from_normal(z[:, 0])
        inputs = np.floor(raw_inputs) if self.floor_inputs else np.rint(raw_inputs)
        inputs = np.maximum(inputs, 1.0)
        outputs = np.maximum(np.rint(self.outputs.from_normal(z_outputs)), 1.0)
        if self.max_total_tokens is not None:
            inputs = np.minimum(inputs, self.max_total_tokens - 1)
            outputs = np.minimum(outputs, self.max_total_tokens - inputs)
        return inputs.astype(np.int64), outputs.astype(np.int64)
