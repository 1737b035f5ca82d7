from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.models.checkpoints import MODELS, Saved, save
from vmserve import _core
from vmserve.attention.cpu import ISA_VARIABLE


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Saved:
    """``checkpoint(name)``: the directory of one of ``MODELS``, written at first use."""
    written: dict[str, Path] = {}

    def get(name: str) -> Path:
        if name not in written:
            written[name] = save(MODELS[name].config, tmp_path_factory.mktemp(name))
        return written[name]

    return get


@pytest.fixture
def copied(checkpoint: Saved, tmp_path: Path) -> Saved:
    """``copied(name)``: one that a test may damage."""
    return lambda name: Path(shutil.copytree(checkpoint(name), tmp_path / "model"))


@pytest.fixture(params=_core.cpu_isas())
def isa(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Each instruction set of this machine, which decoders and attention then use."""
    monkeypatch.setenv(ISA_VARIABLE, request.param)
    return str(request.param)
