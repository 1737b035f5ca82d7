"""The tape that stands for a graph on the CPU, and which device is opened."""

from __future__ import annotations

import numpy as np
import pytest

import vmserve  # noqa: F401  first: it sets how torch's threads wait

import torch  # isort: skip

from tests.sim.simcuda import SimCuda
from vmserve.errors import ConfigurationError
from vmserve.memory.cuda import cuda_refusal
from vmserve.runner.cpu_runtime import open_runtime
from vmserve.runner.torch_runtime import TorchCpuRuntime


def test_a_replay_sees_new_numbers_and_not_new_code() -> None:
    runtime = TorchCpuRuntime(graphs=True)
    given, kept, factor = torch.ones(3), torch.zeros(3), 2.0
    runtime.begin_capture()
    doubled = given * factor
    row = doubled.view(3, 1).to(torch.float64)  # a copy, though its schema calls it an alias
    kept.add_(doubled)
    total = row.sum()
    graph = runtime.end_capture()
    factor = 100.0
    given.copy_(torch.tensor([1.0, 2.0, 3.0]))
    graph.replay()
    assert doubled.tolist() == [2.0, 4.0, 6.0]
    assert kept.tolist() == [4.0, 6.0, 8.0]
    assert float(total) == 12.0
    assert factor == 100.0


def test_waiting_for_the_device_cannot_be_captured() -> None:
    runtime = TorchCpuRuntime(graphs=True)
    runtime.begin_capture()
    with pytest.raises(RuntimeError, match="makes the host wait"):
        torch.ones(1).item()
    runtime.abort_capture()
    assert torch.ones(1).item() == 1.0


def test_uploads_and_downloads() -> None:
    runtime = TorchCpuRuntime()
    buffer = torch.zeros(4, dtype=torch.int64)
    runtime.upload(np.array([1, 2]), buffer)
    assert buffer.tolist() == [1, 2, 0, 0]
    [array] = runtime.fetch([buffer]).take()
    assert array.tolist() == [1, 2, 0, 0]


def test_cuda_without_a_gpu_says_why(monkeypatch: pytest.MonkeyPatch, sim: SimCuda) -> None:
    monkeypatch.setattr("torch.version.cuda", None)
    with pytest.raises(ConfigurationError, match=r"build without CUDA.* or use --device cpu"):
        open_runtime("cuda")
    assert open_runtime("auto").device_type == "cpu"
    monkeypatch.setattr("torch.version.cuda", "13.0")
    why = cuda_refusal("/no/libcuda.so.1") or ""
    assert "/no/libcuda.so.1" in why
    # The driver is there, and torch sees nothing of it.
    assert "may be newer than the driver" in (cuda_refusal(str(sim.path)) or "")


def test_a_gpu_that_is_too_old_is_refused_at_start(
    monkeypatch: pytest.MonkeyPatch, sim: SimCuda, caplog: pytest.LogCaptureFixture
) -> None:
    """Every step would fail there: the kernels are not compiled for it."""
    monkeypatch.setattr("torch.version.cuda", "13.0")
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.get_device_name", lambda: "Tesla T4")
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda: (7, 5))
    why = cuda_refusal(str(sim.path)) or ""
    assert why.startswith("Tesla T4 has compute capability 7.5, and the kernels need 8.0 or later")
    monkeypatch.setattr("vmserve.memory.cuda.cuda_refusal", lambda: why)
    monkeypatch.setattr("vmserve.runner.cpu_runtime.driver_refusal", lambda: None)
    assert open_runtime("auto").device_type == "cpu"
    assert "running on the CPU: Tesla T4 has" in caplog.text
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda: (8, 0))
    assert cuda_refusal(str(sim.path)) is None


def test_drivers_and_devices_that_do_not_go_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.version.cuda", None)
    with pytest.raises(ConfigurationError, match="kv_driver: cuda gives memory of a GPU, and"):
        open_runtime("cpu", "cuda")
    assert open_runtime("auto", "host").memory().granularity == 4096
    monkeypatch.setattr("vmserve.memory.cuda.cuda_refusal", lambda: None)
    with pytest.raises(ConfigurationError, match="kv_driver: host gives memory of the processor"):
        open_runtime("cuda", "host")
    assert open_runtime("auto", "host").device_type == "cpu"
