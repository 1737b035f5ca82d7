from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.cuda_kernels.cases import VARIANTS
from tests.cuda_kernels.emulation import Emulators
from tests.sim.conftest import sim, sim_library

__all__ = ["emulators", "sim", "sim_library"]


@pytest.fixture(scope="session")
def emulators(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Emulators]:
    """Emulators of all variants, compiled once for a state of the sources and kept in pytest's
    cache; compiled anew where that is turned off."""
    cache = getattr(request.config, "cache", None)
    built = Emulators(
        tmp_path_factory.mktemp("cuda_emulators")
        if cache is None
        else cache.mkdir("cuda_emulators")
    )
    built.forget_others(VARIANTS)
    built.prepare(VARIANTS)
    yield built
    built.close()
