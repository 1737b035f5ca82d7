"""What ``vmserve plan`` says that a model needs is what the engine asks for, to the byte."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from tests.models.checkpoints import (
    deepseek_v3,
    gemma3,
    gpt_oss,
    llama,
    phi3,
    qwen3_next,
    save,
)
from vmserve import LLM, SamplingParams
from vmserve.cli.main import app
from vmserve.errors import ConfigurationError
from vmserve.models.hub import resolve_model

_SIZES = {"vocab_size": 2048, "hidden_size": 64, "max_position_embeddings": 1100}
MODELS = {
    "gemma3": gemma3(**_SIZES, sliding_window=24),
    "gpt-oss": gpt_oss(**_SIZES, sliding_window=100, rope_parameters=None),
    "qwen3-next": qwen3_next(**_SIZES),
    "windows-alone": phi3(**_SIZES, sliding_window=40),
    "latent": deepseek_v3(**_SIZES),
    "llama": llama(**_SIZES),
}
#: Beside the model: what several models take is said of several.
OTHER = "embedded"


def planned(path: Path) -> dict[str, Any]:
    command = ["plan", "--model", f"it={path}", "--model", OTHER, "--format", "json"]
    done = CliRunner().invoke(app, command)
    assert done.exit_code == 0, done.output
    need: dict[str, Any] = json.loads(done.stdout)["together"]["models"][0]
    return need


@pytest.mark.parametrize("name", MODELS)
def test_the_floor_is_accepted_and_a_byte_less_is_refused(name: str, tmp_path: Path) -> None:
    path = save(MODELS[name], tmp_path / name)
    need = planned(path)
    floor, longest = need["floor_bytes"], need["max_len"]
    options: dict[str, Any] = {"model": str(path), "tokenizer": str(resolve_model(None))}
    with pytest.raises(ConfigurationError, match=f"a sequence of {longest} tokens needs"):
        LLM(**options, kv_cache_memory=floor - 1)
    with LLM(**options, kv_cache_memory="least") as llm:
        assert llm.engine.memory.limit_bytes == floor
    with LLM(**options, kv_cache_memory=floor) as llm:
        prompt = [token % 2000 for token in range(longest - 4)]
        [answer] = llm.generate([prompt], SamplingParams(max_tokens=4, ignore_eos=True))
        assert len(answer.outputs[0].token_ids) == 4
