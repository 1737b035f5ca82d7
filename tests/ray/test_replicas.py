"""``--distributed-executor ray``: engines on the nodes of a cluster, one of which is lost."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.batch.commands import check_killed_runs
from tests.chaos.harness import Server, until
from tests.ray.nodes import Nodes
from vmserve import LLM, SamplingParams

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400), pytest.mark.filterwarnings("default")]

PROMPTS = [[5 + index] * (40 + 7 * index) for index in range(4)]


@pytest.fixture(scope="module")
def nodes() -> Iterator[Nodes]:
    made = Nodes(3)
    before = os.environ.get("RAY_ADDRESS")
    os.environ["RAY_ADDRESS"] = made.address
    yield made
    made.close()
    os.environ.pop("RAY_ADDRESS")
    if before is not None:
        os.environ["RAY_ADDRESS"] = before


def texts(server: Server) -> list[str]:
    def ask(prompt: list[int]) -> Any:
        body = {"prompt": prompt, "max_tokens": 12, "temperature": 0}
        reply = server.http.post("/v1/completions", json=body)
        assert reply.status_code == 200, reply.text
        return reply.json()["choices"][0]["text"]

    return [ask(prompt) for prompt in PROMPTS]


def test_a_lost_node_is_replaced_without_a_hand(nodes: Nodes, tmp_path: Path) -> None:
    with LLM(kv_cache_memory="32MiB", max_model_len=1024) as llm:
        params = SamplingParams(temperature=0, max_tokens=12)
        expected = [result.outputs[0].text for result in llm.generate(PROMPTS, params)]
    options = ("--distributed-executor", "ray", "--data-parallel-size", "2")
    server = Server(tmp_path / "log", *options)
    try:
        assert texts(server) == expected
        one, other = nodes.engines()
        assert one.ppid() != other.ppid()  # on two nodes

        def engines() -> list[str]:
            [states] = server.http.get("/health").json()["engines"].values()
            return list(states.values())

        nodes.kill(nodes.node_of(one))
        noticed = until(lambda: "down" in engines(), 20, "the loss is noticed")
        assert texts(server) == expected
        back = until(lambda: engines() == ["ready", "ready"], 120, "the engine is back")
        print(f"a lost node: noticed after {noticed:.2f} s, replaced after {back:.1f} s")
        assert texts(server) == expected
        assert one.pid not in [each.pid for each in nodes.engines()]

        [victim] = [each for each in nodes.engines() if each.pid != other.pid]
        victim.kill()
        until(lambda: "down" in engines(), 20, "the loss is noticed")
        back = until(lambda: engines() == ["ready", "ready"], 120, "the engine is back")
        print(f"a killed engine: replaced after {back:.1f} s")
    finally:
        server.close()
    until(lambda: not nodes.engines(), 30, "the engines have ended")


def test_an_engine_of_two_ranks_is_on_one_node(nodes: Nodes, tmp_path: Path) -> None:
    options = ("--distributed-executor", "ray", "--data-parallel-size", "1")
    server = Server(tmp_path / "log", *options, "--tensor-parallel-size", "2")
    try:
        texts(server)
        [engine] = nodes.engines()
        assert sum("rank_main" in " ".join(each.cmdline()) for each in engine.children()) == 1
    finally:
        server.close()
    until(lambda: not nodes.engines(), 30, "the engine has ended")


def test_a_batch_over_the_cluster_loses_and_repeats_no_line(nodes: Nodes, tmp_path: Path) -> None:
    def kill_an_engine(command: psutil.Process) -> None:
        nodes.engines()[0].kill()

    # Engines of a command that was killed end before the next run's are placed.
    check_killed_runs(tmp_path, "--ray", "--data-parallel-size", "2", during=kill_an_engine)


def test_what_a_node_refuses_and_what_has_no_room_is_one_line(nodes: Nodes, tmp_path: Path) -> None:
    options = ("--distributed-executor", "ray", "--data-parallel-size", "1")
    with pytest.raises(AssertionError, match="no model here"):
        Server(tmp_path / "log", *options, "--model", str(tmp_path / "no model here"))
    assert "Traceback" not in (tmp_path / "log").read_text()
    until(lambda: not nodes.engines(), 30, "the engine has ended")
    # A process of its own: Ray finds no second cluster after that of test_ray.py.
    place = "on_ray.PLACE_SECONDS = 0; on_ray._REMIND_SECONDS = 0.1; on_ray.place_engines(1, "
    code = f"from vmserve.client.engines import on_ray; {place} num_cpus=64)"
    done = subprocess.run([sys.executable, "-c", code], stderr=subprocess.PIPE, text=True)
    last = done.stderr.strip().splitlines()[-1]
    assert "ConfigurationError: " in last
    assert "no room for 1 engines of 64 CPUs" in last
