"""What needs an NVIDIA GPU: ``pytest -m gpu tests/gpu``; everywhere else it is deselected.

``--gpu-tests-on cpu`` runs all but the driver's tests on the processor: the suite's own logic.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.conformance.conftest import bench
from tests.conformance.subjects import Subject, read_by_copy, write_by_copy
from vmserve import _core  # first: it sets how torch's threads wait
from vmserve.config import EngineConfig
from vmserve.engine import LLMEngine
from vmserve.models import resolve_model
from vmserve.runner.runtime import TorchRuntime, open_runtime
from vmserve.runner.torch_runtime import TorchCpuRuntime

import torch  # isort: skip

__all__ = ["bench"]

#: The real library, with the smallest pages of stock CUDA.
GPU = Subject(
    "gpu",
    lambda size, num_frames: _core.CudaDriver(size, num_frames),
    frozenset({"unmap", "read_only", "host_memory", "asynchronous", "copy_stream"}),
    frame_bytes=2 << 20,
    read=read_by_copy,
    write=write_by_copy,
    traps=False,
)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.getgroup("GPU").addoption("--gpu-tests-on", choices=("cuda", "cpu"), default="cuda")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "subject" not in metafunc.fixturenames:
        return
    needed: Sequence[str] = getattr(metafunc.function, "needed", ())
    lacked: Sequence[str] = getattr(metafunc.function, "lacked", ())
    fits = GPU.features.issuperset(needed) and GPU.features.isdisjoint(lacked)
    metafunc.parametrize("subject", [GPU] if fits else [], ids=lambda subject: subject.name)


@pytest.fixture(scope="session")
def runtime(request: pytest.FixtureRequest) -> TorchRuntime:
    if request.config.getoption("--gpu-tests-on", default="cuda") == "cpu":
        return TorchCpuRuntime(graphs=True)
    return open_runtime("cuda").with_torch()


@pytest.fixture
def active(runtime: TorchRuntime) -> Iterator[TorchRuntime]:
    with runtime.active(), torch.inference_mode():
        yield runtime


@pytest.fixture(scope="session")
def model_dir() -> Path:
    return resolve_model(None)


@pytest.fixture
def make_engine(runtime: TorchRuntime) -> Iterator[Callable[..., LLMEngine]]:
    engines: list[LLMEngine] = []

    def make(**options: Any) -> LLMEngine:
        defaults = {"max_model_len": 512, "max_num_seqs": 16, "kv_cache_memory": "512MiB"}
        config = EngineConfig(**(defaults | options))  # type: ignore[arg-type]
        engines.append(LLMEngine(config, runtime=runtime))
        return engines[-1]

    yield make
    for engine in engines:
        engine.close()
