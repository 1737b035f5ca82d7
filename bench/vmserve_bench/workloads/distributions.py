"""Length distributions for request shapes, driven by correlated standard normals.

Every marginal maps standard normal deviates to lengths in tokens. Drawing the deviates
of a request's input and output with a correlation (a Gaussian copula) then gives the two
lengths a rank correlation without changing either marginal.

Integer lengths depend on transcendental functions only through rounding, so the last-bit
differences between mathematical libraries do not reach the result.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

FloatArray: TypeAlias = NDArray[np.float64]
IntArray: TypeAlias = NDArray[np.int64]
#: Lengths in tokens, not yet rounded, of standard normal deviates; rising.
Marginal: TypeAlias = Callable[[FloatArray], FloatArray]


def normal_cdf(z: FloatArray) -> FloatArray:
    """Standard normal cumulative distribution of each deviate, in [0, 1]."""
    erf = np.fromiter(map(math.erf, (z / math.sqrt(2.0)).tolist()), np.float64, count=len(z))
    return 0.5 * (1.0 + erf)


def percentile_table(percents: Sequence[float], lengths: Sequence[float]) -> Marginal:
    """Measured percentiles, from 0 to 100 and rising, linear in between."""
    levels = np.asarray(percents) / 100.0

    def length(z: FloatArray) -> FloatArray:
        return np.asarray(np.interp(normal_cdf(z), levels, lengths))

    return length


def log_normal(mu: float, sigma: float) -> Marginal:
    """The logarithm of the length has mean ``mu`` and standard deviation ``sigma``."""
    return lambda z: np.exp(mu + sigma * z)


def log_normal_of_mean(mean: float, sigma: float) -> Marginal:
    """The log-normal with this mean in tokens: mu = ln(mean) - sigma^2 / 2."""
    return log_normal(math.log(mean) - sigma * sigma / 2.0, sigma)


def piecewise_log_normal(p50: float, p90: float, p99: float) -> Marginal:
    """Goes through a median, a 90th and a 99th percentile exactly.

    The logarithm of the length is piecewise linear in the normal deviate: one slope up to
    the 90th percentile (below the median too, where nothing was published) and another
    beyond it. A single log-normal cannot meet all three where the two slopes differ.
    """
    z90, z99 = NormalDist().inv_cdf(0.90), NormalDist().inv_cdf(0.99)
    body_slope = math.log(p90 / p50) / z90
    tail_slope = math.log(p99 / p90) / (z99 - z90)

    def length(z: FloatArray) -> FloatArray:
        body = math.log(p50) + body_slope * np.minimum(z, z90)
        return np.asarray(np.exp(body + tail_slope * np.maximum(z - z90, 0.0)))

    return length


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

    def sample(self, num_requests: int, rng: np.random.Generator) -> tuple[IntArray, IntArray]:
        """Draw input and output lengths, two arrays ``[num_requests]``, each at least 1.

        The first k requests are the same for every ``num_requests`` of k or more.
        """
        z = rng.standard_normal((num_requests, 2))
        z_outputs = self.rho * z[:, 0] + math.sqrt(1.0 - self.rho * self.rho) * z[:, 1]
        round_input = np.floor if self.floor_inputs else np.rint
        inputs = np.maximum(round_input(self.inputs(z[:, 0])), 1.0)
        outputs = np.maximum(np.rint(self.outputs(z_outputs)), 1.0)
        if self.max_total_tokens is not None:
            inputs = np.minimum(inputs, self.max_total_tokens - 1)
            outputs = np.minimum(outputs, self.max_total_tokens - inputs)
        return inputs.astype(np.int64), outputs.astype(np.int64)
