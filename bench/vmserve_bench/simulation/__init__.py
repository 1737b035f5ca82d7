"""Replay traces in virtual time: the real engine and memory core, without model or memory.

>>> from vmserve_bench.workloads.shapes import sharegpt
>>> from vmserve_bench.simulation import SimulatedEngine, SimulationConfig, asked, replay
>>> from vmserve_bench.simulation.devices import OPT_13B_A100
>>> config = SimulationConfig.of(OPT_13B_A100, regime="paged", prefix_caching=False)
>>> with SimulatedEngine(config) as engine:
...     run = replay(engine, asked(sharegpt(4, seed=0, request_rate=1.0)))
>>> run.num_finished, run.seconds > 4.0
(4, True)

Results are simulated: they show what policy and memory bookkeeping do. Times are only as good as
the device profile that steps are charged with.
"""

from vmserve_bench.simulation.engine import SimulatedEngine, SimulationConfig
from vmserve_bench.simulation.records import RequestRecord, Run, StepRecord
from vmserve_bench.simulation.replay import System, replay
from vmserve_bench.simulation.requests import Asked, asked

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
