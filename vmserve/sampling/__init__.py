"""From logits to tokens: what a caller may ask for, and the sampler that does it."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from vmserve.sampling.params import BeamSearchParams, GenerationParams, SamplingParams

if TYPE_CHECKING:
    from vmserve.sampling.device import DeviceSampler, Drawing
    from vmserve.sampling.sampler import SampledToken, Sampler, SamplingRow
    from vmserve.sampling.tokens import TokenSampler

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
    # The device's sampler needs torch; whoever only builds parameters must not wait for it.
    if name not in __all__:
        raise AttributeError(f"module 'vmserve.sampling' has no attribute {name!r}")
    modules = {"DeviceSampler": "device", "Drawing": "device", "TokenSampler": "tokens"}
    module = modules.get(name, "sampler")
    return getattr(importlib.import_module(f"vmserve.sampling.{module}"), name)
