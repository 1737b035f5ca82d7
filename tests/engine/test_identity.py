"""What a reply's ``system_fingerprint`` is made of."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from vmserve.config import EngineConfig
from vmserve.engine.engine import LLMEngine
from vmserve.models.content import content_digest
from vmserve.models.hub import resolve_model

OPTIONS = {"max_model_len": 256, "kv_cache_memory": "16MiB"}


def identity(**options: Any) -> str:
    engine = LLMEngine(EngineConfig.from_options({**OPTIONS, **options}))
    engine.close()
    return engine.identity


def test_it_changes_with_what_changes_bits(tmp_path: Path) -> None:
    model = tmp_path / "model"
    shutil.copytree(resolve_model(None), model)
    seen = {
        identity(),
        identity(dtype="bfloat16"),
        identity(quantization="int8"),
        identity(kv_cache_dtype="int8"),
    }
    assert len(seen) == 4
    assert identity(model=str(model)) in seen  # a copy of the model has its identity
    [weights] = model.glob("*.safetensors")
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    assert identity(model=str(model)) not in seen


def test_it_does_not_change_with_what_changes_no_bits() -> None:
    others = {"max_num_seqs": 3, "kv_regime": "paged", "max_num_batched_tokens": 64, "seed": 5}
    assert identity(**others) == identity()


def test_it_is_the_same_in_every_process() -> None:
    code = "from tests.engine.test_identity import identity\nprint(identity())"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True, text=True)
    assert run.stdout.split() == [identity()]


def test_it_reads_no_file_whole(monkeypatch: Any, tmp_path: Path) -> None:
    """The digest of whole files is for blocks on a disk alone."""
    calls = []

    def counted(*args: Any) -> str:
        calls.append(args)
        return content_digest(*args)

    monkeypatch.setattr("vmserve.engine.persistence.content_digest", counted)
    first = identity()
    assert calls == []
    assert identity(kv_persist=str(tmp_path)) == first
    assert len(calls) == 1
