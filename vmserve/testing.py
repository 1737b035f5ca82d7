"""Fakes at the engine's seams, for tests of what is built on it.

``LLM(...)`` and ``LLMEngine(...)`` do all that they do with a model, but for the forward pass:

    >>> from vmserve.config import EngineConfig
    >>> from vmserve.engine.engine import LLMEngine
    >>> engine = LLMEngine(EngineConfig(device="cpu"), runtime=NullRuntime(token_id=7))

:class:`vmserve.simulation.SimulatedEngine` goes without a tokenizer and real memory too.
"""

from __future__ import annotations

from vmserve import _core
from vmserve.runner.null_runtime import NullRuntime

__all__ = ["FaultInjectingDriver", "NullDriver", "NullRuntime"]

#: A page driver around another, of which chosen calls fail.
FaultInjectingDriver = _core.FaultInjectingDriver
#: A page driver that keeps the books of the contract and touches no memory.
NullDriver = _core.NullDriver
