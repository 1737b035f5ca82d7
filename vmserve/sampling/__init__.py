"""From logits to tokens: what a caller may ask for, and the sampler that does it."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from vmserve.sampling.params import BeamSearchParams, GenerationParams, SamplingParams

if TYPE_CHECKING:
    from vmserve.sampling.device import DeviceSampler, Drawing
    from vmserve.sampling.sampler import SampledToken, Sampler, SamplingRow

__all__ = [
    "BeamSearchParams",
    "DeviceSampler",
    "Drawing",
    "GenerationParams",
    "SampledToken",
    "Sampler",
    "SamplingParams",
    "SamplingRow",
]


def __getattr__(name: str) -> Any:
    # The sampler needs torch; whoever only builds parameters must not wait for it.
    if name not in __all__:
        raise AttributeError(f"module 'vmserve.sampling' has no attribute {name!r}")
    module = "device" if name in ("DeviceSampler", "Drawing") else "sampler"
    return getattr(importlib.import_module(f"vmserve.sampling.{module}"), name)
