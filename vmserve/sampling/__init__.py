"""From logits to tokens: sampling parameters, and the samplers."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from vmserve.sampling.params import BeamSearchParams, GenerationParams, SamplingParams

if TYPE_CHECKING:
    from vmserve.sampling.device import DeviceSampler
    from vmserve.sampling.sampler import Sampler
    from vmserve.sampling.tokens import Drawing, SampledToken, SamplingRow, TokenSampler

__all__ = [
    "BeamSearchParams",
    "DeviceSampler",
    "Drawing",
    "GenerationParams",
    "SampledToken",
    "Sampler",
    "SamplingParams",
    "SamplingRow",
    "TokenSampler",
]


def __getattr__(name: str) -> Any:
    # The device's sampler needs torch; code that only builds parameters must not wait for it.
    if name not in __all__:
        raise AttributeError(f"module 'vmserve.sampling' has no attribute {name!r}")
    module = {"DeviceSampler": "device", "Sampler": "sampler"}.get(name, "tokens")
    return getattr(importlib.import_module(f"vmserve.sampling.{module}"), name)
