"""Options that say which engines a command uses: what does not go together is one line."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from vmserve.cli.engines import EngineChoice
from vmserve.client.engines.on_ray import place_engines
from vmserve.errors import ConfigurationError
from vmserve.options.rules import check

KEY: dict[str, Any] = {"engine_key_file": Path("key")}
ELSEWHERE: dict[str, Any] = {"engines": ("127.0.0.1:8100",), **KEY}


@pytest.mark.parametrize(
    ("given", "options", "why"),
    [
        ({"ray_num_cpus": 2}, {}, "ray_num_cpus: --distributed-executor ray is missing"),
        (KEY, {}, "engine_key_file: --engine HOST:PORT is missing"),
        ({"distributed_executor": "slurm"}, {}, "distributed_executor: .*process, ray"),
        ({**ELSEWHERE, "distributed_executor": "ray"}, {}, "distributed_executor: .*--engine"),
        ({**ELSEWHERE, "data_parallel_size": 2}, {}, "data_parallel_size: .*--engine"),
        (ELSEWHERE, {"max_num_seqs": 4}, "max_num_seqs: .*vmserve engine"),
        ({"engines": ("127.0.0.1:8100",)}, {}, "--engine-key-file FILE is missing"),
    ],
)
def test_what_does_not_go_together(given: Any, options: dict[str, Any], why: str) -> None:
    with pytest.raises(ConfigurationError, match=why):
        EngineChoice(**given).check(options)


def test_options_of_our_own_engines_are_refused_by_name_with_ray(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    choice = EngineChoice(distributed_executor="ray")
    with pytest.raises(ConfigurationError, match=r"engine_restarts: .*--distributed-executor ray"):
        check({**choice.facts, "idle_unload": False, "engine_restarts": True})
    check({**EngineChoice(data_parallel_size=2).facts, "engine_restarts": True})
    assert not choice.is_one_process
    assert EngineChoice(data_parallel_size=1).is_one_process
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ConfigurationError, match=r"pip install 'vmserve\[ray\]'"):
        place_engines(2)
