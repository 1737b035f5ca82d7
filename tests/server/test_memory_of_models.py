"""What several models take together is counted before the first of them is loaded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from vmserve.client.transports.supervised import Supervision
from vmserve.models.hub import resolve_model
from vmserve.server.config import ServerConfig
from vmserve.server.models import loading
from vmserve.server.models.specs import spec_of

MIB = 1 << 20
FREE = 1000 * MIB
EMBEDDED = {"model": "vmserve-embedded"}
TABLES: dict[str, dict[str, Any]] = {
    "a": EMBEDDED,
    "b": {**EMBEDDED, "preload": False},
    "c": {**EMBEDDED, "preload": False, "quantization": "int8"},
    "int8": {**EMBEDDED, "quantization": "int8"},
    "elsewhere": {"model": "nobody/nothing"},
    "nowhere": {"model": "/no/such/model", "preload": False},
}


def pool_bytes(**shared: Any) -> int:
    shared = {"device": "cpu", **shared}
    specs = [spec_of(name, table, shared) for name, table in TABLES.items()]
    config = ServerConfig(served_model_names=("a",))
    loader = loading.ModelLoader(config, config.key_ring(), shared, Supervision(), specs=specs)
    return loader.pool.size_bytes


def test_weights_of_all_models_are_counted(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(loading, "available_memory", lambda: (FREE, "in a test"))
    file = sum(path.stat().st_size for path in Path(resolve_model(None)).glob("*.safetensors"))
    # Half of the weights' 2 bytes, and scales; one of those that load later counts.
    assert pool_bytes() == pytest.approx(0.4 * (FREE - 2.53 * file), rel=0.01)
    assert not [each for each in caplog.records if each.levelname == "WARNING"]
    assert pool_bytes(kv_cache_memory="990MiB") == 990 * MIB
    told = caplog.messages[-1]
    assert "19.93 MiB of weights (6.508 MiB a, 6.508 MiB b, 3.455 MiB c, 3.455 MiB int8)" in told
    assert "up to 990 MiB of KV cache, and 1000 MiB are free (in a test)" in told
    assert "--idle-unload" in told
    caplog.clear()
    pool_bytes(kv_cache_memory="980MiB")
    assert not caplog.messages
