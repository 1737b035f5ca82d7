from tests.sim.conftest import sim, sim_library

__all__ = ["sim", "sim_library"]
