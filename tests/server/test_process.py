"""``vmserve serve`` as a process: what it says, and how it ends."""

import json
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.helpers import until
from tests.server.conftest import Running
from tests.support.serving import Patch, Said
from vmserve.cli.main import main

# A process imports torch, which takes its time on a busy machine.
pytestmark = pytest.mark.timeout(400)

Launch = Callable[..., "Process"]
COMMAND = [sys.executable, "-c", "from vmserve.cli.main import main; main()", "serve"]
BASE = ["--kv-cache-memory", "64MiB", "--max-model-len", "1024"]


class Process:
    """A server whose standard error goes to a file, so that it can never block."""

    def __init__(self, log: Path, *args: str) -> None:
        self._log = log
        with log.open("w") as file:
            self.popen = subprocess.Popen([*COMMAND, *args], stderr=file, text=True)

    @property
    def said(self) -> str:
        return self._log.read_text()

    def wait_ready(self) -> str:
        """The URL that it serves at."""
        until(lambda: "ready:" in self.said or self.popen.poll() is not None, 180)
        match = re.search(r"ready: serving .* at (\S+)", self.said)
        assert match is not None, self.said
        return match.group(1)


@pytest.fixture
def launch(tmp_path: Path) -> Iterator[Launch]:
    started: list[Process] = []

    def begin(*args: str) -> Process:
        started.append(Process(tmp_path / f"log{len(started)}", *args))
        return started[-1]

    yield begin
    for process in started:
        process.popen.kill()
        process.popen.wait(60)


@contextmanager
def streamed(url: str, num_choices: int) -> Iterator[Iterator[str]]:
    """The lines of a long answer; that nobody reads them is the client's departure."""
    body = {"prompt": "x", "max_tokens": 1000, "ignore_eos": True, "stream": True}
    body["n"] = num_choices
    with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=60) as response:
        yield response.iter_lines()


def test_serve_drain_and_end(launch: Launch) -> None:
    process = launch(*BASE, "--port", "0", "--shutdown-timeout", "0.5")
    url = process.wait_ready()
    phases = [process.said.index(word) for word in ("loading", "loaded", "reserved", "ready:")]
    assert phases == sorted(phases)
    with streamed(url, 8) as lines:
        next(lines)
        process.popen.send_signal(signal.SIGTERM)
        events = [line.removeprefix("data: ") for line in lines if line]
    assert events[-1] == "[DONE]"
    assert json.loads(events[-2])["choices"][0]["finish_reason"] in ("abort", "length")
    assert process.popen.wait(180) == 0
    assert "stopped" in process.said
    assert "Traceback" not in process.said


def test_a_server_of_one_model_takes_others(launch: Launch) -> None:
    process = launch(*BASE, "--port", "0", "--admin-api-key", "admin", "--max-num-seqs", "8")
    url = process.wait_ready()

    def post(path: str, status: int = 200, **body: Any) -> Any:
        headers = {"authorization": "Bearer admin"}
        reply = httpx.post(f"{url}/v1/{path}", json=body, headers=headers, timeout=120)
        assert reply.status_code == status, reply.text
        return reply.json()

    def answer(model: str) -> str:
        asked = {"model": model, "prompt": "Once", "max_tokens": 8, "temperature": 0}
        text: str = post("completions", **asked)["choices"][0]["text"]
        return text

    said = answer("vmserve-embedded")
    assert "kv_pool" not in httpx.get(f"{url}/v1/kv/live").json()
    embedded = {"model": "vmserve-embedded"}
    told = post("models/add", 400, **embedded, name="b", kv_floor="61MiB")["error"]["message"]
    assert "vmserve-embedded needs 4 MiB, b needs 61 MiB, 65 MiB in all" in told
    row = post("models/add", **embedded, name="b", kv_floor="30MiB")
    assert row["memory"]["granted_bytes"] == 30 << 20
    assert answer("b") == said
    live = httpx.get(f"{url}/v1/kv/live").json()
    assert live["kv_pool"]["size_bytes"] == 64 << 20
    assert [each["name"] for each in live["models"]] == ["vmserve-embedded", "b"]
    assert post("models/change", **embedded, kv_cap="32MiB")["memory"]["cap_bytes"] == 32 << 20
    post("models/sleep", **embedded)
    assert answer("vmserve-embedded") == said
    post("models/remove", **embedded)
    assert answer("b") == said
    process.popen.terminate()
    assert process.popen.wait(180) == 0


def test_a_second_signal_ends_it_at_once(launch: Launch) -> None:
    process = launch(*BASE, "--port", "0", "--shutdown-timeout", "600")
    url = process.wait_ready()
    with streamed(url, 64) as lines:
        next(lines)
        process.popen.send_signal(signal.SIGINT)
        until(lambda: "draining" in process.said)
        process.popen.send_signal(signal.SIGINT)
        assert process.popen.wait(180) == -signal.SIGINT


def test_a_signal_while_loading(launch: Launch) -> None:
    process = launch(*BASE, "--port", "0")
    until(lambda: "loading" in process.said, 180)
    process.popen.send_signal(signal.SIGTERM)
    assert process.popen.wait(180) == 0
    assert "Traceback" not in process.said


# -- what cannot start: in this process, since that loads nothing ---------------------------


@pytest.mark.parametrize(
    ("args", "status", "told"),
    [
        (["--port", "{used}"], 1, r"\S+ is in use .*--port"),
        (["--max-model-len", "10000000"], 2, "10000000.*8192.*--max-model-len"),
        (["--model", "no/such/directory"], 2, "no/such/directory"),
        (["--kv-page-size", "7"], 2, "page"),
        (["--chat-template", "{broken}", *BASE], 2, "chat template is broken"),
        (["--shutdown-timeout", "-1"], 2, "shutdown_timeout"),
        (["--host", "203.0.113.1"], 2, "cannot listen on 203.0.113.1"),
        (["--pin-prefix", "none.txt", "--model", "no/such"], 2, "pin_prefix: cannot read none.txt"),
    ],
)
def test_what_cannot_start_ends_in_one_line(
    shared: Running,
    monkeypatch: Patch,
    capsys: Said,
    tmp_path: Path,
    args: list[str],
    status: int,
    told: str,
) -> None:
    broken = tmp_path / "t"
    broken.write_text("{% if %}")
    given = [text.format(used=shared.port, broken=broken) for text in args]
    monkeypatch.setattr(sys, "argv", ["vmserve", "serve", "--port", "0", *given])
    with pytest.raises(SystemExit) as ended:
        main()
    [line] = capsys.readouterr().err.splitlines()
    assert ended.value.code == status
    assert re.match(f"vmserve: .*{told}", line), line
