"""Engine options: parsing, refusals, and what is chosen for the user."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any

import pytest

from vmserve import LLM, _core
from vmserve.config import CPU_KV_SHARE, EngineConfig, resolve
from vmserve.errors import ConfigurationError
from vmserve.models import ModelConfig, resolve_model
from vmserve.numbers.dtypes import DType
from vmserve.numbers.sizes import format_size, parse_size
from vmserve.sampling.tokens import sampling_bytes

MIB = 1 << 20


@pytest.fixture(scope="module")
def model() -> ModelConfig:
    return ModelConfig.from_directory(resolve_model(None))


def test_sizes() -> None:
    for text, size in (
        (0, 0), (4096, 4096), ("4096", 4096), ("64KiB", 64 << 10), ("512MiB", 512 * MIB),
        ("1.5 GiB", 1536 * MIB), ("2tib", 2 << 40), ("4K", 4 << 10), ("3MB", 3_000_000),
        ("10B", 10),
    ):  # fmt: skip
        assert parse_size(text) == size
    wrong: tuple[Any, ...] = ("", "many", "4 QiB", "-1", "1e3", "MiB", -1, True)
    for text in wrong:
        with pytest.raises(ConfigurationError, match="kv_cache_memory"):
            parse_size(text, "kv_cache_memory")
    units = {0: "0 B", 1023: "1023 B", 1024: "1 KiB", 1536 * MIB: "1.5 GiB", 3 << 40: "3 TiB"}
    assert {size: format_size(size) for size in units} == units


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"kv_regime": "both"}, "kv_regime: 'both' is not one of auto, virtual, paged"),
        ({"max_num_seqs": 2**20 + 1}, "max_num_seqs: 1048577 is above the greatest value"),
        ({"enable_prefix_caching": "no"}, "'no' is neither True nor False"),
        ({"model": 3}, "model: 3 is not a text or a path"),
        ({"speed": 1, "colour": 2, "seed": 3}, "unknown engine options colour, speed"),
        ({"preemption": "swap"}, r"give --swap-space, e\.g\. 4GiB"),
    ],
)
def test_wrong_values(options: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigurationError, match=text):
        EngineConfig.from_options(options)


GPU = 8 << 30
TOO_MUCH = "kv_cache_memory: .* TiB is more than {}, .*: lower --kv-cache-memory"


@pytest.mark.parametrize(
    ("options", "gpu_bytes", "text"),
    [
        # In vLLM a number is gibibytes.
        ({"swap_space": 4}, None, r"4 B holds no KV block of 64 KiB; .*write e\.g\. 4GiB"),
        ({"swap_space": "1000TiB"}, None, "1000 TiB is more than this machine's memory"),
        ({"swap_space": 0.5}, None, "swap_space: 0.5 is not a size"),
        ({"kv_cache_memory": "128TiB"}, None, TOO_MUCH.format("this machine's memory")),
        ({"kv_cache_memory": "1000TB"}, None, TOO_MUCH.format("this machine's memory")),
        ({"kv_cache_memory": "128TiB"}, GPU, TOO_MUCH.format("the GPU's memory") + "$"),
        ({"kv_cache_memory": "1000TB"}, GPU, TOO_MUCH.format("the GPU's memory") + "$"),
        ({"gpu_memory_utilization": 0.01}, GPU, r"0\.01 of the GPU's 8 GiB is less than"),
        ({"max_num_batched_tokens": 32}, None, "32 is below max_num_seqs, 64"),
    ],
)
def test_what_a_machine_or_a_model_cannot_do(
    options: dict[str, Any], gpu_bytes: int | None, text: str, model: ModelConfig
) -> None:
    with pytest.raises(ConfigurationError, match=text):
        resolve(EngineConfig(**options), model, gpu_bytes=gpu_bytes)


def test_defaults(model: ModelConfig) -> None:
    resolved = resolve(EngineConfig(), model)
    assert resolved.max_model_len == model.max_position_embeddings == 8192
    assert (resolved.max_num_seqs, resolved.max_num_batched_tokens) == (64, 512)
    # Never more than all slots can hold: 4 layers x K and V x 2 heads x 64 x 4 bytes a token.
    assert 0 < resolved.kv_limit_bytes <= 64 * 8192 * 4096
    assert resolve(EngineConfig(swap_space="64KiB"), model).swap_bytes == 64 << 10


def test_the_cap_counts_weights_as_they_are_kept(
    model: ModelConfig, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Of a Llama of 8B parameters, where 32 GiB are free."""
    gib = 1 << 30
    large = dataclasses.replace(model, num_weights=8_030_000_000, dtype=DType.BFLOAT16)
    monkeypatch.setattr("vmserve.config.available_memory", lambda: (32 * gib, "in a test"))

    def cap(free: int = 32, **options: Any) -> float:
        monkeypatch.setattr("vmserve.config.available_memory", lambda: (free * gib, "in a test"))
        stored = options.pop("stored_bytes", None)
        # So many slots that only memory bounds it.
        config = EngineConfig(max_num_seqs=4096, max_num_batched_tokens=4096, **options)
        resolved = resolve(config, large, stored_bytes=stored)
        share = resolved.kv_limit_bytes / CPU_KV_SHARE
        return (free * gib - share - resolved.activation_bytes) / 1e9

    assert cap() == pytest.approx(16.06, abs=0.1)
    assert cap(dtype="bfloat16") == cap(stored_bytes=16_060_000_000) == pytest.approx(cap(), 0.01)
    assert cap(free=48, dtype="float32") == pytest.approx(32.12, abs=0.1)
    assert cap(stored_bytes=4_700_000_000) == pytest.approx(4.7, abs=0.1)
    assert cap(stored_bytes=16_060_000_000, quantization="int8") == pytest.approx(8.5, abs=0.1)
    assert not caplog.records
    cap(free=8)
    [record] = caplog.records
    assert "14.96 GiB of weights" in record.getMessage()
    assert "more than the 8 GiB that are free (in a test)" in record.getMessage()


@pytest.mark.parametrize("max_len", [2, 100, 257, 1000])
def test_the_cap_holds_the_whole_context(max_len: int) -> None:
    with LLM(dtype="float32", max_num_seqs=1, max_model_len=max_len) as llm:
        assert llm.stats()["limit_pages"] * llm.stats()["page_tokens"] >= max_len


def test_on_a_gpu_the_cap_is_what_the_share_leaves(model: ModelConfig) -> None:
    gib = 1 << 30
    resolved = resolve(EngineConfig(dtype="float16"), model, gpu_bytes=8 * gib)
    assert (resolved.max_num_seqs, resolved.max_num_batched_tokens) == (256, 2048)
    weights = 2 * model.num_weights
    assert resolved.kv_limit_bytes == int(0.9 * 8 * gib) - weights - resolved.activation_bytes
    on_cpu = resolve(EngineConfig(max_num_seqs=256, max_num_batched_tokens=2048), model)
    sampling = resolved.activation_bytes - on_cpu.activation_bytes
    assert sampling == sampling_bytes(model.vocab_size, 256) > 0
    half = resolve(EngineConfig(dtype="float16", gpu_memory_utilization=0.5), model, 8 * gib)
    assert resolved.kv_limit_bytes - half.kv_limit_bytes == int(0.9 * 8 * gib) - 4 * gib
    assert (resolved.kv_regime, on_cpu.kv_regime) == ("virtual", "auto")
    asked = resolve(EngineConfig(dtype="float16", kv_regime="auto"), model, gpu_bytes=8 * gib)
    assert asked.kv_regime == "auto"
    exact = resolve(EngineConfig(kv_cache_memory="1GiB"), model, gpu_bytes=8 * gib)
    assert exact.kv_limit_bytes == gib


def test_a_cap_above_what_is_free(
    model: ModelConfig, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    free = [1 << 30]
    limits = SimpleNamespace(available_memory=lambda: (free[0], "memory.max"))
    monkeypatch.setattr(_core, "SystemLimits", lambda: limits)
    assert resolve(EngineConfig(kv_cache_memory="512MiB"), model).kv_limit_bytes == 512 << 20
    assert caplog.records == []
    free[0] = 600 << 20
    assert resolve(EngineConfig(kv_cache_memory="600MiB"), model).kv_limit_bytes == 600 << 20
    [record] = caplog.records
    assert "kv_cache_memory: 600 MiB, but " in record.getMessage()
    assert "are free (memory.max)" in record.getMessage()


def test_the_whole_vocabulary_as_logprobs(model: ModelConfig) -> None:
    for asked, num in ((-1, model.vocab_size), (10**6, model.vocab_size), (5, 5)):
        assert resolve(EngineConfig(max_logprobs=asked), model).max_logprobs == num
