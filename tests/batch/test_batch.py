"""``vmserve batch``: replies of the server, every line once, whatever ends a run."""

import asyncio
import itertools
import json
import os
import re
import resource
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

import psutil
import pytest

from tests.batch.commands import check_killed_runs
from tests.batch.killed import line, replies, run_batch, write
from tests.helpers import run_python, start_python
from tests.server.conftest import Running
from vmserve.batch.lines import MAX_LINE_BYTES, Index, read_lines
from vmserve.batch.output import Output
from vmserve.batch.run import Figures
from vmserve.cli.main import main
from vmserve.client.async_llm import AsyncLLM
from vmserve.errors import ConfigurationError, EngineDeadError, VmserveError
from vmserve.server.limits import MAX_BODY_BYTES
from vmserve.testing import ScriptedTransport

CHAT, RESPONSES = "/v1/chat/completions", "/v1/responses"
MESSAGES = [{"role": "user", "content": "Hi"}]


def at(url: str, custom_id: str, body: Any) -> dict[str, Any]:
    return {"custom_id": custom_id, "method": "POST", "url": url, "body": body}


def test_replies_are_those_of_the_server(tmp_path: Path) -> None:
    bodies: list[tuple[str, Any]] = [
        ("/v1/completions", {"prompt": "Hi", "n": 2, "logprobs": 2, "seed": 1}),
        (CHAT, {"messages": MESSAGES, "model": "fake", "metadata": {"a": "é\n"}}),
        (RESPONSES, {"input": "Hi"}),
        (CHAT, {"messages": MESSAGES, "model": "other"}),
        (CHAT, {"messages": MESSAGES, "temperature": 9}),
        (CHAT, {"messages": [{"role": "user", "content": "x" * 300}]}),
        ("/v1/completions", {"prompt": "x" * MAX_BODY_BYTES}),
        ("/v1/embeddings", [1, 2]),
    ]
    source = write(tmp_path / "in", [at(url, f"{i}", body) for i, (url, body) in enumerate(bodies)])
    run_batch(source, tmp_path / "out")
    server = Running(ScriptedTransport())
    try:
        found = replies(tmp_path / "out")
        for i, (url, body) in enumerate(bodies):
            told = server.http.post(url, json=body)
            response = found[str(i)]["response"]
            assert (response["status_code"], found[str(i)]["error"]) == (told.status_code, None)
            assert without_ids(response["body"]) == without_ids(told.json())
    finally:
        server.close()
    assert [found[str(i)]["response"]["status_code"] for i in range(8)] == [200] * 3 + [
        404, 400, 400, 413, 400
    ]  # fmt: skip


def without_ids(body: Any) -> str:
    return re.sub(r'"(id|created|created_at|item_id)": *("[^"]*"|[0-9.]+)', "", json.dumps(body))


def test_lines_that_the_server_never_sees(tmp_path: Path) -> None:
    good = line("good")
    bad: list[Any] = [
        ("nonsense\n", "invalid_json_line"),
        ('{"custom_id": "x", "method": "POST", "body": {"n": NaN}}\n', "invalid_json_line"),
        ('{"body":' + "[" * 100_000 + "]" * 100_000 + "}\n", "invalid_json_line"),
        ("[]\n", "invalid_json_line"),
        ({**good, "custom_id": 7}, "invalid_custom_id"),
        ({**good, "custom_id": ""}, "invalid_custom_id"),
        ({**good, "custom_id": "get", "method": "GET"}, "invalid_method"),
        ({**good, "custom_id": "models", "url": "/v1/models"}, "invalid_url"),
        ({"custom_id": "none", "method": "POST", "url": CHAT}, "missing_required_parameter"),
        (line("streams", stream=True), "invalid_stream"),
        (line("long", prompt="x" * MAX_LINE_BYTES), "line_too_long"),
    ]
    blank = " \n"
    lines = [good, blank, *(text for text, _ in bad), line("last")]
    source = write(tmp_path / "in", lines)
    source.write_bytes(b"\xef\xbb\xbf" + source.read_bytes().rstrip(b"\n"))
    figures = run_batch(source, tmp_path / "out")
    found = replies(tmp_path / "out")
    for number, (_, code) in enumerate(bad, start=3):
        assert found.pop(str(number))["error"]["code"] == code
    assert set(found) == {"good", "last"}
    assert (figures.num_succeeded, figures.num_failed, figures.num_lines) == (2, len(bad), 13)


def test_two_lines_with_one_custom_id_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    target = tmp_path / "out"
    wrong = {**line("b"), "method": "GET"}  # its reply would have the name, too
    for again in (line("b"), wrong):
        source = write(tmp_path / "in", [line("a"), {}, "\n", line("b"), line("c"), again, {}])
        told = "line 6 of the input has the custom_id of line 4, and 1 in all"
        with source.open("rb") as file, pytest.raises(ConfigurationError, match=told):
            Index(read_lines(file))
    target.write_text("precious")
    monkeypatch.setattr("sys.argv", ["vmserve", "batch", str(source), str(target), "--overwrite"])
    with pytest.raises(SystemExit):
        main()
    assert told in capsys.readouterr().err
    assert target.read_text() == "precious"


def test_a_torn_line_is_asked_again(tmp_path: Path) -> None:
    source = write(tmp_path / "in", [line("a"), "{}\n", line("b")])
    target = tmp_path / "out"
    run_batch(source, target, concurrency=1)
    whole = target.read_bytes()
    ends = [match.end() for match in re.finditer(b"\n", whole)]
    for size in itertools.chain(range(ends[1] - 3, ends[1] + 3), range(0, len(whole), 37)):
        target.write_bytes(whole[:size])
        figures = run_batch(source, target)
        assert figures.num_before == sum(end <= size for end in ends)
        assert set(replies(target)) == {"a", "2", "b"}
        kept = max((end for end in ends if end <= size), default=0)
        assert target.read_bytes()[:kept] == whole[:kept]


def test_failed_lines_are_finished_unless_they_are_retried(tmp_path: Path) -> None:
    target = tmp_path / "out"
    lines = [line("a"), line("b", model="other"), {}, line("c", model="other")]
    source = write(tmp_path / "in", lines)
    run_batch(source, target)
    ok = next(text for text in target.read_text().splitlines() if '"a"' in text)
    left = tmp_path / ".out.part"  # by a run that was killed
    left.write_text("half")
    assert run_batch(source, target).num_before == 4
    assert not left.exists()
    write(source, [line("a"), line("b"), line("new"), line("c", model="other")])
    with pytest.raises(ConfigurationError, match="1 of its lines answer no line"):
        run_batch(source, target)  # line 3 was refused, and is another one now
    target.chmod(0o640)
    figures = run_batch(source, target, retry_failed=True)
    assert (figures.num_before, figures.num_succeeded, figures.num_failed) == (1, 2, 1)
    assert target.read_text().startswith(ok)
    assert set(replies(target)) == {"a", "b", "new", "c"}
    assert target.stat().st_mode & 0o777 == 0o640
    assert not list(tmp_path.glob("*.part"))


@pytest.mark.parametrize(
    ("content", "told"),
    [
        ("a note without an end", "line 1 is no reply"),
        ('{"custom_id": "a"}\n', "line 1 is no reply"),
        ('{"id":"batch_req_1","custom_id":"z","response":{"status_code":200}}\n', "1 of its lines"),
    ],
)
def test_an_output_of_something_else_is_left_alone(tmp_path: Path, content: str, told: str) -> None:
    source, target = write(tmp_path / "in", [line("a")]), tmp_path / "out"
    target.write_text(content)
    with pytest.raises(ConfigurationError, match=told):
        run_batch(source, target)
    assert target.read_text() == content
    run_batch(source, target, overwrite=True)
    assert set(replies(target)) == {"a"}


def test_two_runs_do_not_write_one_file(tmp_path: Path) -> None:
    output = Output(tmp_path / "out")
    try:
        with pytest.raises(ConfigurationError, match="another run"):
            Output(tmp_path / "out")
        (tmp_path / "out").unlink()
    finally:
        output.close()
    Output(tmp_path / "out").close()


def test_a_full_disk_keeps_whole_lines(tmp_path: Path) -> None:
    source, target = write(tmp_path / "in", [line(f"{i}") for i in range(9)]), tmp_path / "out"
    unlimited = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, unlimited[1]))
    try:
        with pytest.raises(VmserveError, match="the same command goes on"):
            run_batch(source, target)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, unlimited)
    num_kept = len(replies(target))
    assert num_kept > 0
    assert target.read_bytes().endswith(b"\n")
    assert run_batch(source, target).num_before == num_kept
    assert len(replies(target)) == 9


def test_only_what_runs_is_in_memory(tmp_path: Path) -> None:
    """Lines are read as places, and bytes, become free."""
    big = "x" * (3 * 1024**2)
    engine = ScriptedTransport(max_model_len=2**23)
    num_read = 0
    most_ahead = 0

    def counted(file: BinaryIO) -> Iterator[bytes]:
        nonlocal num_read, most_ahead
        for each in read_lines(file):
            num_read += 1
            most_ahead = max(most_ahead, num_read - len(engine.finished))
            yield each

    small = write(tmp_path / "in", [line(f"{i}") for i in range(100)])
    run_batch(small, tmp_path / "out", engine, lines=counted, concurrency=5)
    assert num_read == 100
    assert most_ahead <= 5
    engine.finished.clear()
    num_read = most_ahead = 0
    large = write(tmp_path / "large", [line(f"{i}", prompt=big) for i in range(14)])
    run_batch(large, tmp_path / "out2", engine, lines=counted, concurrency=14)
    assert num_read == 14
    assert most_ahead <= 11  # ten of 3 MiB are less than 32 MiB; one more waits for its place


def test_a_stop_lets_running_lines_end(tmp_path: Path) -> None:
    source, target = write(tmp_path / "in", [line(f"{i}") for i in range(50)]), tmp_path / "out"
    engine = ScriptedTransport()
    engine.pause = asyncio.Event()
    stop = asyncio.Event()

    def stop_soon(figures: Figures) -> None:
        stop.set()
        engine.pause.set()  # type: ignore[union-attr]

    figures = run_batch(source, target, engine, stop=stop, concurrency=4, report=stop_soon)
    assert (figures.num_succeeded, engine.aborted) == (4, [])
    engine.pause = asyncio.Event()
    stop = asyncio.Event()

    def stop_once_they_run(figures: Figures) -> None:
        if len(engine.running) == 4:
            stop.set()

    how: Any = {"concurrency": 4, "grace": 0.01, "report": stop_once_they_run}
    figures = run_batch(source, target, engine, stop=stop, **how)
    assert (figures.num_before, figures.num_now, len(engine.aborted)) == (4, 0, 4)
    assert run_batch(source, target).num_now == 46
    assert len(replies(target)) == 50


def test_lines_of_an_engine_that_dies_are_left(tmp_path: Path) -> None:
    source, target = write(tmp_path / "in", [line(f"{i}") for i in range(6)]), tmp_path / "out"
    engine = ScriptedTransport()
    engine.facts.is_dead = True
    with pytest.raises(EngineDeadError, match="the same command goes on"):
        run_batch(source, target, engine)
    assert target.read_bytes() == b""
    engine.facts.is_dead, engine.fail = False, VmserveError("one batch raised")
    assert run_batch(source, target, engine).num_failed == 6  # answered: 500


def test_kills(tmp_path: Path) -> None:
    """The union is exact; in a process that may fork, for it has no threads."""
    code = f"""
from pathlib import Path
from tests.batch.killed import kill_runs
kill_runs(Path({str(tmp_path)!r}), 15, 4711)
"""
    ended = run_python(code)
    assert ended.returncode == 0, ended.stderr


#: A process loads a model, which takes its time on a busy machine.
ENGINE = {"kv_cache_memory": "64MiB", "max_model_len": 512, "max_num_seqs": 4}
OPTIONS = ["--kv-cache-memory", "64MiB", "--max-model-len", "512", "--max-num-seqs", "4"]

CTRL_C_AT_THE_FIFTH_LINE = """
import os, signal
from vmserve.batch.output import Output
append, lines = Output.append, []
def counted(self, line):
    append(self, line)
    lines.append(line)
    if len(lines) == 5:
        os.kill(os.getpid(), signal.SIGINT)
Output.append = counted
"""


@pytest.mark.timeout(400)
def test_the_command_is_interrupted_and_goes_on(tmp_path: Path) -> None:
    """Ctrl-C, then the same command; tokens are those over HTTP."""
    bodies: list[tuple[str, Any]] = [
        (CHAT, {"messages": MESSAGES, "seed": i, "temperature": 1, "max_tokens": 8 + i})
        for i in range(40)
    ]
    bodies.append(("/v1/completions", {"prompt": ["Once", "upon"], "max_tokens": 9, "seed": 3}))
    bodies.append(("/v1/embeddings", {"input": "Once upon a time"}))
    source = write(tmp_path / "in", [at(url, f"{i}", body) for i, (url, body) in enumerate(bodies)])
    target = tmp_path / "out"
    args = ["vmserve", "batch", str(source), str(target), "--served-model-name", "m", *OPTIONS]
    code = f"import sys; sys.argv = {args!r}; from vmserve.cli.main import main; main()"
    with start_python(CTRL_C_AT_THE_FIFTH_LINE + code) as process:
        _, told = process.communicate(timeout=180)
    assert process.returncode == 130, told
    num_before = len(replies(target))
    assert 5 <= num_before < len(bodies)
    assert f"{num_before} of {len(bodies)} lines" in told
    with start_python(code.replace("'--served", "'--format', 'json', '--served")) as process:
        out, told = process.communicate(timeout=180)
    assert process.returncode == 0, told
    summary = json.loads(out)
    assert (summary["num_before"], summary["num_left"], summary["num_failed"]) == (num_before, 0, 0)
    found = replies(target)
    server = Running(AsyncLLM(**ENGINE), served_model_names=("m",))
    try:
        for i, (url, body) in enumerate(bodies):
            told_there = without_ids(server.ok(url, body))
            assert without_ids(found[str(i)]["response"]["body"]) == told_there
    finally:
        server.close()
    assert sum(found[str(i)]["response"]["body"]["usage"]["completion_tokens"] for i in range(40))


@pytest.mark.timeout(400)
@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="two engines need two cores")
def test_kills_of_the_command_and_of_an_engine_lose_and_repeat_no_line(tmp_path: Path) -> None:
    def kill_an_engine(command: psutil.Process) -> None:
        one, _ = (
            each for each in command.children() if "vmserve.client.engine_main" in each.cmdline()
        )
        one.kill()

    check_killed_runs(tmp_path, "--data-parallel-size", "2", during=kill_an_engine)


def test_standard_streams(tmp_path: Path) -> None:
    """A pipe is read twice; nothing is left to do, so that no model is loaded."""
    script = """
import sys
sys.argv = ["vmserve", "batch", "-", "-", "--model", "/nowhere"]
from vmserve.cli.main import main
main()
"""
    with start_python(script) as process:
        out, told = process.communicate("\n\n", timeout=110)
    assert (process.returncode, out) == (0, ""), told
    assert "0 of 0 lines" in told


@pytest.mark.parametrize(
    ("args", "told"),
    [
        (["in", "in"], "is the input itself"),
        (["none", "out"], "No such file"),
        (["in", "-", "--format", "json"], "give OUTPUT a name"),
        (["in", "out", "--model", "/nowhere"], "/nowhere"),
        (["in", "out", "--chat-template", "none"], "chat_template: cannot read"),
    ],
)
def test_what_cannot_begin(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    args: list[str],
    told: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "in", [line("a")])
    monkeypatch.setattr("sys.argv", ["vmserve", "batch", *args])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code in (1, 2)
    assert told in capsys.readouterr().err
    assert (tmp_path / "in").read_text() == json.dumps(line("a")) + "\n"
