"""The decoder in C++ for CPUs: weights packed once, one call for a step's forward pass.

``csrc/cpu/decoder.cpp`` has the order of the operations, ``csrc/cpu/kernels`` the kernels.
"""

from vmserve.models.native.build import load_native
from vmserve.models.native.choice import choose_native, native_asked, refusal
from vmserve.models.native.decoder import MIN_POSITIONS, NativeDecoder, RankGroup, TimedPart

__all__ = [
    "MIN_POSITIONS",
    "NativeDecoder",
    "RankGroup",
    "TimedPart",
    "choose_native",
    "load_native",
    "native_asked",
    "refusal",
]
