"""Rotary position embedding (RoFormer, section 3.4.2) and its context-extension scalings."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vmserve.errors import ConfigurationError, UnsupportedError
from vmserve.numbers.dtypes import DType
from vmserve.numbers.host_arrays import rounded

__all__ = [
    "ROPE_TYPES",
    "HostRotations",
    "RopeConfig",
    "halves_first",
    "inverse_frequencies",
    "sharpness",
]

logger = logging.getLogger(__name__)

#: Types of rotary embedding. "dynamic" changes nothing below the model's own context, which no
#: request exceeds.
ROPE_TYPES = ("default", "dynamic", "linear", "llama3", "longrope", "yarn")


@dataclass(frozen=True)
class RopeConfig:
    """``parameters`` are those of ``rope_parameters`` in config.json, ``rope_theta`` included.

    Raises :class:`~vmserve.errors.UnsupportedError` for an unknown type;
    :class:`~vmserve.errors.ConfigurationError` for parameters that are no numbers, and lists of the
    wrong length.
    """

    rope_type: str
    parameters: Mapping[str, Any]
    #: First components of a head, which are rotated.
    rotary_dim: int
    max_position_embeddings: int

    def __post_init__(self) -> None:
        if self.rope_type not in ROPE_TYPES:
            raise UnsupportedError(
                f"rotary embedding of type {self.rope_type!r} is not supported; "
                f"supported: {', '.join(ROPE_TYPES)}"
            )
        for name, value in self.parameters.items():
            self._check_parameter(name, value)

    def _check_parameter(self, name: str, value: Any) -> None:
        if isinstance(value, list):
            if len(value) != self.rotary_dim // 2:
                raise ConfigurationError(
                    f"config.json: rope parameter {name} has {len(value)} factors; "
                    f"{self.rotary_dim} rotated components need {self.rotary_dim // 2}"
                )
        elif name not in ("rope_type", "type") and not isinstance(value, int | float | None):
            raise ConfigurationError(f"config.json: rope parameter {name} is {value!r}, no number")


def halves_first(heads: int, plain: int, rotated: int) -> NDArray[np.int64]:
    """The order of rows in which, of the last ``rotated`` of each head, even ones come before odd
    ones."""
    by_head = np.arange(heads * (plain + rotated)).reshape(heads, -1)
    pairs = by_head[:, plain:].reshape(heads, -1, 2)
    halves = pairs.transpose(0, 2, 1).reshape(heads, -1)
    return np.concatenate((by_head[:, :plain], halves), axis=1).reshape(-1)


class HostRotations:
    """Cosines and sines of positions, each correctly rounded (but for a rare last bit).

    ``max_len`` chooses between longrope's two sets of factors: it is fixed for all requests,
    because keys rotated with one set cannot be used with the other.
    """

    def __init__(self, rope: RopeConfig, max_len: int) -> None:
        exponents = np.arange(0, rope.rotary_dim, 2, dtype=np.float32) / rope.rotary_dim
        periods = np.float64(rope.parameters["rope_theta"]) ** exponents.astype(np.float64)
        frequencies, self._scaling = inverse_frequencies(rope, max_len, periods.astype(np.float32))
        self._frequencies = frequencies

    def upto(self, num_positions: int, dtype: DType) -> tuple[NDArray[Any], NDArray[Any]]:
        """Compute positions 0 up to ``num_positions``, rounded to ``dtype`` (bfloat16: its bits).

        Cosines and sines, each ``[num_positions, 1, rotary_dim]``; the sine of the first half is
        negated. The angle is a product in float32, as models are trained with.
        """
        positions = np.arange(num_positions, dtype=np.float32)
        angles = np.outer(positions, self._frequencies).astype(np.float64)
        cos, sin = np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)
        if self._scaling != 1.0:
            cos, sin = cos * self._scaling, sin * self._scaling
        both = np.concatenate((cos, cos), axis=1), np.concatenate((-sin, sin), axis=1)
        cos, sin = (rounded(each[:, None, :], dtype) for each in both)
        return cos, sin


_Numbers = NDArray[np.float32]


def inverse_frequencies(
    rope: RopeConfig, max_len: int, periods: _Numbers
) -> tuple[_Numbers, float]:
    """``[rotary_dim / 2]`` float32 radians per position, and the factor on cos and sin.

    ``periods`` ``[rotary_dim / 2]``: positions per radian without scaling, the powers of
    ``rope_theta``. From those of torch it makes the same numbers, bit for bit, as ``transformers``:
    checkpoints were trained and are compared with those.
    """
    parameters = rope.parameters
    match rope.rope_type:
        case "linear":
            return 1.0 / periods / parameters["factor"], 1.0
        case "llama3":
            return _llama3(1.0 / periods, parameters), 1.0
        case "yarn":
            return _yarn(rope, periods)
        case "longrope":
            return _longrope(rope, periods, max_len)
        case _:
            return 1.0 / periods, 1.0


def _llama3(frequencies: _Numbers, parameters: Mapping[str, Any]) -> _Numbers:
    """Slow rotations are slowed further, fast ones left alone, those between blended (Llama 3.1).

    What is slow and fast is said in turns that a vector makes within the original context.
    """
    context = parameters["original_max_position_embeddings"]
    few, many = parameters["low_freq_factor"], parameters["high_freq_factor"]
    # A number by an array is, in torch, the number times the reciprocal: rounded twice.
    wavelengths = 1.0 / frequencies * (2 * math.pi)
    slowed = frequencies / parameters["factor"]
    share = (1.0 / wavelengths * context - few) / (many - few)
    blended = (1 - share) * frequencies / parameters["factor"] + share * frequencies
    faster = np.where(wavelengths < context / many, frequencies, blended)
    return np.where(wavelengths > context / few, slowed, faster)


def _yarn(rope: RopeConfig, periods: _Numbers) -> tuple[_Numbers, float]:
    """YaRN (Peng et al. 2023): as with llama3, by a ramp over the dimensions (section 3.2), and
    attention that is sharper (section 3.4)."""
    parameters = rope.parameters
    context = parameters["original_max_position_embeddings"]
    factor = parameters["factor"]
    if factor is None:
        factor = rope.max_position_embeddings / context
    scaling = parameters.get("attention_factor")
    if scaling is None:
        mscale, all_dim = parameters.get("mscale"), parameters.get("mscale_all_dim")
        if mscale and all_dim:
            scaling = sharpness(factor, mscale) / sharpness(factor, all_dim)
        else:
            scaling = sharpness(factor, 1)

    def dimension(turns: float) -> float:
        """Return the dimension whose vector makes so many turns within the original context."""
        theta = parameters["rope_theta"]
        return rope.rotary_dim * math.log(context / (turns * 2 * math.pi)) / (2 * math.log(theta))

    first = dimension(parameters.get("beta_fast") or 32)
    last = dimension(parameters.get("beta_slow") or 1)
    if parameters.get("truncate", True):
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, rope.rotary_dim - 1)
    if first == last:
        last += 0.001  # a step instead of a ramp
    ramp = (np.arange(rope.rotary_dim // 2, dtype=np.float32) - first) / (last - first)
    kept = 1 - ramp.clip(0, 1)
    return 1.0 / (factor * periods) * (1 - kept) + 1.0 / periods * kept, float(scaling)


def sharpness(factor: float, mscale: float) -> float:
    """YaRN's factor on queries and on keys, for contexts ``factor`` times as long."""
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


def _longrope(rope: RopeConfig, periods: _Numbers, max_len: int) -> tuple[_Numbers, float]:
    """LongRoPE (Ding et al. 2024): a factor for each dimension, of two sets."""
    parameters = rope.parameters
    context = parameters["original_max_position_embeddings"]
    scaling = parameters.get("attention_factor")
    if scaling is None:
        factor = parameters.get("factor")
        if factor is None:
            factor = rope.max_position_embeddings / context
        scaling = 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(context))
    chosen = parameters["long_factor" if max_len > context else "short_factor"]
    if parameters["long_factor"] != parameters["short_factor"]:
        logger.info(
            "rotary embedding: factors for sequences of %s than %s tokens, since max_model_len is "
            "%s; --max-model-len chooses them for all requests",
            "more" if max_len > context else "no more",
            f"{context:,}",
            f"{max_len:,}",
        )
    return 1.0 / (np.array(chosen, dtype=np.float32) * periods), float(scaling)
