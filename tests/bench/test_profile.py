"""``vmserve bench profile`` and the calibration behind it."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

from tests.profiles import steady_profile
from tests.support.bench import bench
from vmserve import LLM, SamplingParams, plan_layout
from vmserve.attention.reference import ReferenceBackend
from vmserve.errors import ConfigurationError
from vmserve.memory.base import Regime
from vmserve.models.native import NativeDecoder
from vmserve.numbers.dtypes import DType
from vmserve.runner import calibration
from vmserve.runner.model_runner import ModelRunner
from vmserve.runner.runtime import HeadShape
from vmserve.runner.torch_runtime import TorchCpuRuntime
from vmserve.scheduler.profile import DeviceProfile, SequenceWork
from vmserve_bench.profile import decoded_tokens, measured_profile


def test_the_profile_is_measured_written_and_used(tmp_path: Path) -> None:
    path = tmp_path / "new" / "profile.json"
    output = bench("profile --kv-cache-memory 32MiB --output", path)
    assert "each token read in decode" in output
    assert "decoding one stream" in output
    profile = DeviceProfile.read(path)
    for kernel in (profile.virtual, profile.paged):
        assert 0 < kernel.call < 1
        assert 0 < min(kernel.read, kernel.pair) <= max(kernel.read, kernel.pair) < 1e-3
    for seconds in (profile.map_page, profile.token, profile.weights, profile.step):
        assert 0 < seconds < 1
    assert profile.copy_bytes_per_second > 1e8
    with LLM(kv_cache_memory="32MiB", regime_profile=str(path)) as llm:
        assert llm.engine.profile == profile
    with pytest.raises(ConfigurationError, match="cannot read the device profile"):
        LLM(kv_cache_memory="32MiB", regime_profile=str(tmp_path / "none.json"))


def test_decoded_tokens_read_the_packed_weights() -> None:
    with LLM(kv_cache_memory="32MiB") as llm:
        tokens = decoded_tokens(llm.engine)
        network = cast("ModelRunner", llm.engine.runner).model.network
    assert isinstance(network, NativeDecoder)
    assert tokens is not None
    assert tokens.num_bytes == network.packed_bytes
    assert len(tokens.read) > 100
    assert all(times.min() > 0 for times in tokens[1:])
    with LLM(kv_cache_memory="32MiB", linear_backend="torch") as llm:
        assert decoded_tokens(llm.engine) is None


def test_forced_regimes_have_no_profile() -> None:
    with LLM(kv_cache_memory="32MiB", kv_regime="paged") as llm:
        assert llm.engine.profile is None
        with pytest.raises(ConfigurationError, match="use auto"):
            measured_profile(llm.engine)


def test_kernels_that_differ_by_chance_are_equally_fast() -> None:
    """Pairs of calls, the same in two regimes: one differs at random, one in most tries, one by a
    half."""
    chance = np.array([[1.0, 1.1, 1.0, 1.2, 1.0], [1.1, 1.0, 1.05, 1.1, 1.2]])
    mostly = np.array([[1.0, 1.0, 1.0, 1.0, 1.0], [1.3, 1.4, 1.3, 1.1, 1.3]])
    real = np.array([[1.5, 1.6, 1.55, 1.5, 1.7], [1.0, 1.1, 1.0, 1.0, 1.1]])
    level = calibration._level
    all_of_them = np.concatenate([chance, mostly, real])
    assert level(all_of_them, same_kernel=False) == [1.0, 1.0, 1.0, 1.0, 1.5, 1.0]
    assert level(real[::-1], same_kernel=False) == [1.0, 1.5]
    assert level(all_of_them, same_kernel=True) == [1.0] * 6


class TimedDevice(TorchCpuRuntime):
    """The processor in the place of a GPU that takes a microsecond for each layer."""

    device_type = "cuda"

    def __init__(self) -> None:
        super().__init__()
        self.num_rows: list[int] = []

    def layer_probe(self, call: Any, num_tokens: int, heads: Any) -> Any:
        self.num_rows.append(num_tokens)
        return super().layer_probe(call, num_tokens, heads)

    def copy_probe(self, num_bytes: int) -> Any:
        return lambda: None

    def timer(self, work: Any) -> Any:
        work()
        return lambda: 1e-6


def test_on_a_gpu_kernels_are_timed_by_the_device() -> None:
    """Neither launching nor laying out a step is in the prices: graphs and the step before hide
    them."""
    layout = plan_layout(3, 2, 16, "float32", 4096, page_tokens=64)
    backends = {regime: ReferenceBackend() for regime in Regime}
    runtime = TimedDevice()
    heads = HeadShape(4, 2, 16, DType.FLOAT32)
    profile = calibration.measure_profile(layout, backends, heads, 8192, runtime)
    for kernel in (profile.virtual, profile.paged):
        assert kernel.call == pytest.approx(3e-6)
        assert (kernel.sequence, kernel.read, kernel.pair) == (0, 0, 0)
    assert sorted(runtime.num_rows) == [1, 1, 4, 4, 4, 4, 1024, 1024]


def test_one_kernel_over_both_views_has_one_price() -> None:
    with LLM(kv_cache_memory="32MiB", attention_backend="cpu") as llm:
        profile = llm.engine.profile
        assert profile is not None
        assert profile.virtual == profile.paged


def test_attention_is_counted_beside_what_was_predicted(tmp_path: Path) -> None:
    profile = steady_profile()
    path = tmp_path / "profile.json"
    path.write_text(profile.to_json())
    with LLM(kv_cache_memory="32MiB", regime_profile=str(path), enable_prefix_caching=False) as llm:
        llm.generate([[5, 6, 7]], SamplingParams(temperature=0, max_tokens=2, ignore_eos=True))
        stats = llm.stats()
    # A prompt of three tokens, and a step that reads four: nothing was learnt of either before.
    work = [SequenceWork(Regime.VIRTUAL, past, new) for past, new in ((0, 3), (3, 1))]
    expected = sum(profile.attention_seconds([item]) for item in work)
    assert expected == pytest.approx(6e-8 + 4e-6)
    predicted = [stats[f"attention_{regime.value}_predicted_seconds_total"] for regime in Regime]
    measured = [stats[f"attention_{regime.value}_seconds_total"] for regime in Regime]
    [used] = {index for index, seconds in enumerate(measured) if seconds}
    scale = profile.paged.read / profile.virtual.read
    assert predicted[used] == pytest.approx(expected if used == 0 else 6e-8 + 4e-6 * scale)
    assert predicted[1 - used] == 0
    assert stats["iteration_tokens_le_1"] == 1
    assert stats["iteration_tokens_le_8"] == 2


def test_columns_and_sequences_cost_the_same() -> None:
    kernel = dataclasses.replace(steady_profile().virtual, call=1e-4, sequence=1e-5)
    past = np.array([10, 0, 700, 5])
    for new in np.array([1, 40, 1, 2]), np.ones(4, dtype=np.int64):
        work = [
            SequenceWork(Regime.VIRTUAL, int(p), int(n)) for p, n in zip(past, new, strict=True)
        ]
        found = kernel.batch_seconds(past, new, int(new.sum()))
        assert found == pytest.approx(kernel.seconds(work))
