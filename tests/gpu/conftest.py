"""What needs an NVIDIA GPU: ``pytest -m gpu tests/gpu``; everywhere else it is deselected.

``--gpu-tests-on cpu`` runs all but the driver's tests on the processor: the suite's own logic.

An illegal address, say, makes the device useless to the process: no test after that would tell
anything, so none is run. With ``--gpu-tests-progress FILE`` another process goes on behind the one
that lost it, or died of it (``benchmarks/gpu/run.sh test``).
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.conformance.conftest import bench
from tests.conformance.subjects import GPU
from vmserve import _core  # first: it sets how torch's threads wait
from vmserve.config import EngineConfig
from vmserve.engine.engine import LLMEngine
from vmserve.errors import DriverError
from vmserve.models import resolve_model
from vmserve.runner.cpu_runtime import open_runtime
from vmserve.runner.runtime import TorchRuntime
from vmserve.runner.torch_runtime import TorchCpuRuntime

import torch  # isort: skip

__all__ = ["bench"]

#: The last line of the progress, once every test has told something.
ALL_TOLD = "all told"
_NONE_LEFT = pytest.ExitCode.NO_TESTS_COLLECTED


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("GPU")
    group.addoption("--gpu-tests-on", choices=("cuda", "cpu"), default="cuda")
    group.addoption(
        "--gpu-tests-progress", type=Path, metavar="FILE",
        help="each test is named here as it begins, and those named are left out",
    )  # fmt: skip


def _progress(config: pytest.Config) -> Path | None:
    file: Path | None = config.getoption("--gpu-tests-progress", default=None)
    return file


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    file = _progress(config)
    if file is None or not file.exists():
        return
    begun = set(file.read_text("utf-8").splitlines())
    config.hook.pytest_deselected(items=[item for item in items if item.nodeid in begun])
    items[:] = [item for item in items if item.nodeid not in begun]


def _note(config: pytest.Config, line: str) -> None:
    file = _progress(config)
    if file is not None:
        with file.open("a", encoding="utf-8") as lines:
            lines.write(line + "\n")


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    _note(item.config, item.nodeid)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item,
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if report.failed and item.config.getoption("--gpu-tests-on", default="cuda") == "cuda":
        loss = device_loss()
        if loss:
            item.session.shouldstop = f"the device is lost since {item.nodeid}: {loss}"
    return report


def device_loss() -> str:
    """Why nothing can be computed in this process any more; empty while it can."""
    try:
        _core.CudaDriver(GPU.frame_bytes, 1).fence()
    except DriverError as error:
        return str(error)
    return ""


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    if exitstatus in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED, _NONE_LEFT):
        _note(session.config, ALL_TOLD)


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
