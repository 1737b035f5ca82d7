"""What several models take together is counted before the first of them is loaded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from vmserve.client.transports.supervised import Supervision
from vmserve.models.hub import resolve_model
from vmserve.server.config import ServerConfig
from vmserve.server.models.loading import ModelLoader
from vmserve.server.models.specs import spec_of

MIB = 1 << 20


def pool_bytes(monkeypatch: pytest.MonkeyPatch, free: int, **shared: Any) -> int:
    monkeypatch.setattr(
        "vmserve.server.models.loading.available_memory", lambda: (free, "in a test")
    )
    shared = {"device": "cpu", **shared}
    tables: dict[str, dict[str, Any]] = {
        "a": {"model": "vmserve-embedded"},
        "b": {"model": "vmserve-embedded", "preload": False},
        "c": {"model": "vmserve-embedded", "preload": False, "quantization": "int8"},
        "int8": {"model": "vmserve-embedded", "quantization": "int8"},
        "elsewhere": {"model": "nobody/nothing"},
        "nowhere": {"model": "/no/such/model", "preload": False},
    }
    specs = [spec_of(name, table, shared) for name, table in tables.items()]
    config = ServerConfig(served_model_names=("a",))
    loader = ModelLoader(config, config.key_ring(), shared, Supervision(), specs=specs)
    return loader.pool.size_bytes


def test_weights_of_all_models_are_counted(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    file = sum(path.stat().st_size for path in Path(resolve_model(None)).glob("*.safetensors"))
    free = 1000 * MIB
    size = pool_bytes(monkeypatch, free)
    # Half of the weights' 2 bytes, and scales; one of those that load later counts.
    assert size == pytest.approx(0.4 * (free - 2.53 * file), rel=0.01)
    assert not [each for each in caplog.records if each.levelname == "WARNING"]
    assert pool_bytes(monkeypatch, free, kv_cache_memory="990MiB") == 990 * MIB
    told = caplog.messages[-1]
    assert "19.93 MiB of weights (6.508 MiB a, 6.508 MiB b, 3.455 MiB c, 3.455 MiB int8)" in told
    assert "up to 990 MiB of KV cache, and 1000 MiB are free (in a test)" in told
    assert "--idle-unload" in told
    caplog.clear()
    pool_bytes(monkeypatch, free, kv_cache_memory="980MiB")
    assert not caplog.messages
