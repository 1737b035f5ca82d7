"""Replay traces in virtual time: the real engine and memory core, without model or memory.

>>> from vmserve.workloads.shapes import sharegpt
>>> from vmserve.simulation import SimulatedEngine, SimulationConfig, asked, replay
>>> from vmserve.simulation.devices import OPT_13B_A100
>>> config = SimulationConfig.of(OPT_13B_A100, regime="paged", prefix_caching=False)
>>> with SimulatedEngine(config) as engine:
...     run = replay(engine, asked(sharegpt(4, seed=0, request_rate=1.0)))
>>> run.num_finished, run.seconds > 4.0
(4, True)

Results are simulated: they show what policy and memory bookkeeping do. Times are only as good as
the device profile that steps are charged with.
"""

from vmserve.simulation.engine import SimulatedEngine, SimulationConfig
from vmserve.simulation.records import RequestRecord, Run, StepRecord
from vmserve.simulation.replay import System, replay
from vmserve.simulation.requests import Asked, asked

__all__ = [
    "Asked",
    "RequestRecord",
    "Run",
    "SimulatedEngine",
    "SimulationConfig",
    "StepRecord",
    "System",
    "asked",
    "replay",
]
