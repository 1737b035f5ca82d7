"""What is decided before anything is loaded is what the engine then is."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest
from typer.testing import CliRunner

from vmserve import LLM
from vmserve.cli.main import app
from vmserve.config import EngineConfig
from vmserve.engine.choose import choices_for
from vmserve.errors import ConfigurationError
from vmserve.memory.base import Regime
from vmserve.models.hub import EMBEDDED_NAME as EMBEDDED

OPTIONS: list[dict[str, Any]] = [
    {},
    {"linear_backend": "torch"},
    {"attention_backend": "sdpa"},
    {"attention_backend": "reference", "max_model_len": 64},
    {"kv_cache_dtype": "int8"},
    {"dtype": "bfloat16", "kv_regime": "paged"},
    {"quantization": "int8", "speculative": "auto"},
    {"async_scheduling": "on", "kv_regime": "virtual"},
    {"scheduling_policy": "priority", "swap_space": "1MiB", "preemption": "swap"},
    {"tensor_parallel_size": 2},
    {"speculative": "draft-model", "speculative_model": EMBEDDED},
    {"speculative": "auto", "speculative_model": EMBEDDED, "num_speculative_tokens": 3},
]


@pytest.mark.parametrize("options", OPTIONS, ids=lambda options: "-".join(options) or "plain")
def test_an_engine_is_what_was_chosen(options: dict[str, Any]) -> None:
    given = {"kv_cache_memory": "8MiB", "max_model_len": 256, "max_num_seqs": 4, **options}
    choices = choices_for(EngineConfig(model=EMBEDDED, **given))
    with LLM(EMBEDDED, **given) as llm:
        engine = llm.engine
        assert engine.resolved == choices.resolved
        kernels = engine.runner._kernels  # type: ignore[attr-defined]
        names = {regime: kernels[regime].backend.name for regime in Regime}
        assert names == {regime: choices.target.backends[regime].name for regime in Regime}
        assert engine.memory.layout.dtype == choices.target.kv_dtype
        assert (
            type(engine.runner.model.network).__name__ == "NativeDecoder"
        ) is choices.target.native  # type: ignore[attr-defined]
        assert engine.ranks.size == choices.num_ranks
        draft = engine.draft_model
        assert (draft is None) is (choices.draft is None)
        if draft is not None and choices.draft is not None:
            pools = draft.memory.limit_bytes + engine.memory.limit_bytes
            assert draft.memory.max_len == choices.draft.resolved.max_model_len
            assert draft.memory.limit_bytes == engine.memory.limit_bytes  # of two equal models
            assert pools <= 8 << 20


def test_choosing_loads_nothing_and_says_what_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="max_model_len"):
        choices_for(EngineConfig(model=EMBEDDED, max_model_len=1 << 20))
    with pytest.raises(ConfigurationError, match="3 ranks cannot divide this model"):
        choices_for(EngineConfig(model=EMBEDDED, tensor_parallel_size=3))


def test_choices_are_values() -> None:
    config = EngineConfig(model=EMBEDDED, kv_cache_memory="8MiB")
    one, other = choices_for(config), choices_for(config)
    assert one.to_dict() == other.to_dict()
    target = dataclasses.replace(
        one.target, backends=other.target.backends, model=other.target.model
    )
    assert dataclasses.replace(one, target=target) == other


def test_a_plan_shows_them() -> None:
    def planned(*args: str) -> dict[str, Any]:
        done = CliRunner().invoke(app, ["plan", "--format", "json", *args])
        assert done.exit_code == 0, done.output
        [report] = json.loads(done.stdout)
        return dict(report["engine"] or {})

    chosen = planned("--model", EMBEDDED, "--kv-cache-memory", "8MiB")
    assert chosen["computed_by"] == "native decoder"
    assert chosen["kv_cache_bytes"] == 8 << 20
    assert planned("--model", "llama-3-8b") == {}
    refused = planned("--model", EMBEDDED, "--max-model-len", "1000000")
    assert "max_model_len: 1000000" in refused["refused"]
