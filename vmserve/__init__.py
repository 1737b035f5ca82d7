"""vmserve: LLM serving from a KV cache in contiguous virtual memory.

from vmserve import LLM, SamplingParams

with LLM() as llm:
    [result] = llm.generate("Once upon a time", SamplingParams(temperature=0, max_tokens=64))
    print(result.outputs[0].text)
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from vmserve.system.imports import import_quickly

if TYPE_CHECKING:
    from vmserve.client.async_llm import AsyncLLM
    from vmserve.client.lending import KVPool
    from vmserve.client.llm import LLM
    from vmserve.config import EngineConfig
    from vmserve.errors import (
        ConfigurationError,
        DriverError,
        EngineDeadError,
        InvalidRequestError,
        OutOfMemoryError,
        RankLostError,
        UnsupportedError,
        VmserveError,
    )
    from vmserve.memory.kv_cache import KVCache
    from vmserve.memory.layout import KVLayout, plan_layout
    from vmserve.sampling.params import BeamSearchParams, SamplingParams
    from vmserve.structured.spec import StructuredOutputsParams
    from vmserve.types import (
        CompletionOutput,
        EmbeddingOutput,
        Logprob,
        RequestMetrics,
        RequestOutput,
    )
    from vmserve.version import __version__

__all__ = [
    "LLM",
    "AsyncLLM",
    "BeamSearchParams",
    "CompletionOutput",
    "ConfigurationError",
    "DriverError",
    "EmbeddingOutput",
    "EngineConfig",
    "EngineDeadError",
    "InvalidRequestError",
    "KVCache",
    "KVLayout",
    "KVPool",
    "Logprob",
    "OutOfMemoryError",
    "RankLostError",
    "RequestMetrics",
    "RequestOutput",
    "SamplingParams",
    "StructuredOutputsParams",
    "UnsupportedError",
    "VmserveError",
    "__version__",
    "plan_layout",
]

# Torch's threads would otherwise spin at every barrier, and where cores are shared with the
# server or with another process a step then waits for threads that burn their time slice.
# Read by the OpenMP runtime when torch is loaded, which is later than this.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

# Names are imported when first used: `vmserve --help` and the planner must not pay for
# torch and transformers.
_HOMES = {
    "LLM": "vmserve.client.llm",
    "AsyncLLM": "vmserve.client.async_llm",
    "EngineConfig": "vmserve.config",
    "KVCache": "vmserve.memory.kv_cache",
    "KVLayout": "vmserve.memory.layout",
    "KVPool": "vmserve.client.lending",
    "plan_layout": "vmserve.memory.layout",
    "BeamSearchParams": "vmserve.sampling.params",
    "SamplingParams": "vmserve.sampling.params",
    "StructuredOutputsParams": "vmserve.structured.spec",
    "CompletionOutput": "vmserve.types",
    "EmbeddingOutput": "vmserve.types",
    "Logprob": "vmserve.types",
    "RequestMetrics": "vmserve.types",
    "RequestOutput": "vmserve.types",
    "__version__": "vmserve.version",
}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'vmserve' has no attribute {name!r}")
    return getattr(import_quickly(_HOMES.get(name, "vmserve.errors")), name)
