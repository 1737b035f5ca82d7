"""``vmserve chat``: the conversation, and its two ways to an engine."""

from __future__ import annotations

import io
from collections.abc import Generator
from typing import Any

import pytest
import typer

from tests.helpers import until
from tests.server.conftest import Running
from tests.support.serving import Patch, Said, Start, http_server, pause
from vmserve.cli.chat import LocalBackend, Message, RemoteBackend, chat_command, converse
from vmserve.errors import ConfigurationError, InvalidRequestError, VmserveError
from vmserve.testing import ByteTokenizer, ScriptedTransport

NOWHERE = "http://127.0.0.1:1"


class Parrot:
    """Answers with the number of messages it was given and the last one's text."""

    def __init__(self, error: BaseException | None = None) -> None:
        self.seen: list[list[Message]] = []
        self.error = error
        self.num_ended = 0

    def reply(self, messages: list[Message]) -> Generator[str, None, None]:
        self.seen.append(messages)
        try:
            yield f"{len(messages)} "
            if self.error is not None:
                raise self.error
            yield messages[-1]["content"]
        finally:
            self.num_ended += 1

    def models(self) -> list[str]:
        return ["parrot"]

    def choose(self, model: str) -> None:
        raise VmserveError(f"no {model}")

    def close(self) -> None:
        pass


def talk(backend: Any, *lines: str, system: str | None = None) -> tuple[str, str]:
    out, notes = io.StringIO(), io.StringIO()
    converse(backend, iter(lines), system, out, notes)
    return out.getvalue(), notes.getvalue()


def remote(url: str, key: str | None = None, model: str | None = None, **sampling: Any) -> Any:
    return RemoteBackend(url, key, model, sampling)


@pytest.mark.parametrize(
    ("lines", "out", "notes"),
    [
        (["a\n", "  \n", "b\n", "/exit", "c\n"], "2 a\n4 b\n", ""),
        (["a", "/new", "b", "/system", "c", "/system be brief", "d"], "2 a\n2 b\n1 c\n2 d\n", ""),
        (
            ["a", "b", "/undo", "/retry", "/history", "/retry"],
            "2 a\n4 b\n2 a\n2 a\n",
            "system: be kind\nuser: a\nassistant: 2 a\n",
        ),
        (["/undo", "/retry"], "", "error: nothing has been asked yet\n" * 2),
        (["/model", "/model x", "a"], "2 a\n", "parrot\nerror: no x\n"),
    ],
    ids=["exit", "new", "retry", "nothing", "model"],
)
def test_commands(lines: list[str], out: str, notes: str) -> None:
    assert talk(Parrot(), *lines, system="be kind") == (out, notes)


def test_the_conversation_grows() -> None:
    parrot = Parrot()
    assert "/exit" in talk(parrot, "a", "b", "/what", system="be kind")[1]
    assert parrot.seen[1] == [
        {"role": "system", "content": "be kind"},
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "2 a"},
        {"role": "user", "content": "b"},
    ]


@pytest.mark.parametrize(
    ("error", "lengths", "out", "told"),
    [
        (VmserveError("broken"), [1, 1], "1 1 ", "error: broken\n"),
        (InvalidRequestError("too long"), [1, 1], "1 1 ", "error: too long\n/new starts over"),
        (KeyboardInterrupt(), [1, 3], "1 \n3 \n", " [stopped]\n" * 2),
    ],
)
def test_a_failed_question_is_forgotten_and_a_stopped_answer_is_not(
    error: BaseException, lengths: list[int], out: str, told: str
) -> None:
    parrot = Parrot(error)
    said, notes = talk(parrot, "a", "b")
    assert (said, notes[: len(told)]) == (out, told)
    assert [len(messages) for messages in parrot.seen] == lengths
    assert parrot.num_ended == 2


@pytest.mark.parametrize("suffix", ["", "/", "/v1", "/v1/"])
def test_with_a_server(shared: Running, suffix: str) -> None:
    backend = remote(shared.url + suffix, temperature=0, max_tokens=4)
    assert talk(backend, "a", "b") == ("hell\nhell\n", "")
    ids, params, _ = shared.engine.requests[-1]  # type: ignore[attr-defined]
    assert ByteTokenizer().decode(ids) == "[user]a|[assistant]hell|[user]b|[assistant]"
    assert (params.temperature, params.max_tokens) == (0.0, 4)


def test_models_of_a_server(start: Start) -> None:
    server = start(served_model_names=("one", "two"))
    backend = remote(server.url, max_tokens=1)
    out, notes = talk(backend, "/model", "a", "/model two", "/model", "/model three", "a")
    assert out == "h\nh\n"
    assert notes == "one, two\ntwo, one\nerror: no such model: there are two, one\n"


FOREIGN = "error: the server's stream is not one of chat completions\n"


@pytest.mark.parametrize(
    ("stream", "out", "notes"),
    [
        # Comments, event names, no space after the colon, chunks without choices or content.
        (
            b': ping\nevent: message\ndata:{"choices": [{"delta": {"content": "a"}}]}\r\n\r\n\
data: {"choices": []}\n\ndata: {"choices": [{"delta": {}}]}\n\ndata: [DONE]\n\n',
            "a\n",
            "",
        ),
        (b'data: {"error": {"message": "full"}}\n\n', "", "error: full\n"),
        (b'data: {"error": "full"}\n\n', "", "error: full\n"),
        (b"data: nonsense\n\n", "", FOREIGN),
        (b"data: []\n\n", "", FOREIGN),
    ],
)
def test_streams_of_other_servers(stream: bytes, out: str, notes: str) -> None:
    def answer(path: str, body: bytes) -> tuple[int, bytes]:
        return 200, stream if body else b'{"data": [{"id": "m"}]}'

    with http_server(answer) as url:
        assert talk(remote(url), "hi") == (out, notes)


def test_errors_of_a_server(start: Start) -> None:
    engine = ScriptedTransport()
    server = start(engine, api_keys=("k",))
    assert talk(remote(server.url), "a")[1].startswith("error: This server needs an API key")
    told = talk(remote(server.url, "k", "other"), "a")[1]
    assert told == "error: The model `other` does not exist.\n"
    engine.fail = RuntimeError("x")
    out, notes = talk(remote(server.url, "k"), "a")
    assert (out, notes[:24]) == ("h", "error: The server failed")
    server.close()
    told = talk(remote(server.url, "k"), "a")[1]
    assert told.startswith(f"error: no answer from {server.url}")


def test_stopping_an_answer_ends_the_request(start: Start) -> None:
    engine = ScriptedTransport()
    server = start(engine)
    pause(server, engine)
    reply = remote(server.url).reply([{"role": "user", "content": "x"}])
    while next(reply) != "h":
        pass
    reply.close()
    server.close()
    assert len(engine.aborted) == 1


def test_with_an_own_engine() -> None:
    options = {"kv_cache_memory": "64MiB", "max_model_len": 256}
    backend = LocalBackend({"temperature": 0, "max_tokens": 8}, options)

    def num_ended() -> float:
        stats = backend.engine.stats()
        return stats["requests_aborted_total"] + stats["request_success_total"]

    try:
        first, notes = talk(backend, "Hello.")
        assert notes == ""
        assert first.strip()
        assert talk(backend, "Hello.") == (first, "")
        reply = backend.reply([{"role": "user", "content": "Hello."}])
        while not next(reply):
            pass
        reply.close()
        # Eight tokens may have been made before it was closed: then there is nothing to stop.
        until(lambda: num_ended() == 3)
        assert talk(backend, "Hello.") == (first, "")
        _, notes = talk(backend, "word " * 500)
        assert "maximum context length is 256 tokens" in notes
    finally:
        backend.close()


def test_a_script_is_told_what_failed(monkeypatch: Patch, capsys: Said) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("Hello\n"))
    with pytest.raises(typer.Exit) as ended:
        chat_command(NOWHERE)
    assert ended.value.exit_code == 1
    assert "no answer from" in capsys.readouterr().err
    assert converse(Parrot(), iter(["Hello", "/nope"]), None, io.StringIO(), io.StringIO()) == 0
    assert converse(Parrot(), iter(["/undo"]), None, io.StringIO(), io.StringIO()) == 1


def test_wrong_urls_and_options() -> None:
    for wrong in ("localhost:8000", "http://", "http://[::1", "http://127.0.0.1:99999"):
        with pytest.raises(ConfigurationError, match="not a URL"):
            remote(wrong)
    with pytest.raises(ConfigurationError, match="block_size"):
        chat_command(NOWHERE, block_size=16)
    with pytest.raises(ConfigurationError, match="two servers"):
        chat_command(NOWHERE, base_url="http://127.0.0.1:2")
    with pytest.raises(InvalidRequestError, match="temperature"):
        chat_command(NOWHERE, temperature=9.0)
