from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tests.cuda_kernels.cases import VARIANTS
from tests.cuda_kernels.emulation import Emulators


@pytest.fixture(scope="session")
def emulators(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Emulators]:
    built = Emulators(tmp_path_factory.mktemp("emulators"))
    built.prepare(VARIANTS)
    yield built
    built.close()


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Tiny operations spend their time waiting for the other thread where cores are shared."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
