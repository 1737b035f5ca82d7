"""``vmserve chat``: the conversation, and its two ways to an engine."""

import asyncio
import io
import threading
from collections.abc import Callable, Generator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
import typer

from tests.helpers import until
from tests.server.conftest import Running
from vmserve.cli.chat import LocalBackend, Message, RemoteBackend, chat_command, converse
from vmserve.errors import ConfigurationError, InvalidRequestError, VmserveError
from vmserve.testing import ByteTokenizer, ScriptedTransport

Start = Callable[..., Running]


class Parrot:
    """Answers with the number of messages it was given and the last one's text."""

    def __init__(self) -> None:
        self.seen: list[list[Message]] = []
        self.error: BaseException | None = None
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


def test_the_conversation_grows() -> None:
    parrot = Parrot()
    out, notes = talk(parrot, "a\n", "  \n", "b\n", "/exit", "c\n", system="be kind")
    assert (out, notes) == ("2 a\n4 b\n", "")
    assert parrot.seen[1] == [
        {"role": "system", "content": "be kind"},
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "2 a"},
        {"role": "user", "content": "b"},
    ]


def test_commands() -> None:
    out, notes = talk(Parrot(), "a", "/new", "b", "/system be brief", "c", "/system", "d", "/what")
    assert out == "1 a\n1 b\n2 c\n1 d\n"
    assert "/exit" in notes


def test_history_undo_and_retry() -> None:
    parrot = Parrot()
    out, notes = talk(parrot, "a", "b", "/undo", "/retry", "/history", "/retry", system="be kind")
    assert out == "2 a\n4 b\n2 a\n2 a\n"
    assert notes == "system: be kind\nuser: a\nassistant: 2 a\n"
    assert [len(messages) for messages in parrot.seen] == [2, 4, 2, 2]
    assert talk(Parrot(), "/undo", "/retry") == ("", "error: nothing has been asked yet\n" * 2)


def test_models() -> None:
    assert talk(Parrot(), "/model", "/model x", "a") == ("1 a\n", "parrot\nerror: no x\n")


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (VmserveError("broken"), "error: broken\n"),
        (InvalidRequestError("too long"), "error: too long\n/new starts over"),
    ],
)
def test_a_failed_question_is_forgotten(error: Exception, told: str) -> None:
    parrot = Parrot()
    parrot.error = error
    _, notes = talk(parrot, "a", "b")
    assert notes.startswith(told)
    assert [len(messages) for messages in parrot.seen] == [1, 1]
    assert parrot.num_ended == 2


def test_an_answer_can_be_stopped() -> None:
    parrot = Parrot()
    parrot.error = KeyboardInterrupt()
    out, notes = talk(parrot, "a", "b")
    assert out == "1 \n3 \n"
    assert notes == " [stopped]\n" * 2


@pytest.mark.parametrize("suffix", ["", "/", "/v1", "/v1/"])
def test_with_a_server(shared: Running, suffix: str) -> None:
    backend = RemoteBackend(shared.url + suffix, None, None, {"temperature": 0, "max_tokens": 4})
    assert talk(backend, "a", "b") == ("hell\nhell\n", "")
    ids, params, _ = shared.engine.requests[-1]  # type: ignore[attr-defined]
    assert ByteTokenizer().decode(ids) == "[user]a|[assistant]hell|[user]b|[assistant]"
    assert (params.temperature, params.max_tokens) == (0.0, 4)


def test_models_of_a_server(start: Start) -> None:
    server = start(served_model_names=("one", "two"))
    backend = RemoteBackend(server.url, None, None, {"max_tokens": 1})
    out, notes = talk(backend, "/model", "a", "/model two", "/model", "/model three", "a")
    assert out == "h\nh\n"
    assert notes == "one, two\ntwo, one\nerror: no such model: there are two, one\n"


class _Canned(BaseHTTPRequestHandler):
    """Answers every request with the same bytes."""

    body = b""

    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b'{"data": [{"id": "m"}]}')

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["content-length"]))
        self.send_response(200)
        self.end_headers()
        self.wfile.write(self.body)

    def log_message(self, format: str, *args: object) -> None:
        pass


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
        (b"data: nonsense\n\n", "", "error: the server's stream is not one of chat completions\n"),
        (b"data: []\n\n", "", "error: the server's stream is not one of chat completions\n"),
    ],
)
def test_streams_of_other_servers(stream: bytes, out: str, notes: str) -> None:
    handler = type("_Handler", (_Canned,), {"body": stream})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        backend = RemoteBackend(f"http://127.0.0.1:{server.server_port}", None, None, {})
        answer = talk(backend, "hi")
        server.shutdown()
        thread.join()
    assert answer == (out, notes)


def test_errors_of_a_server(start: Start) -> None:
    engine = ScriptedTransport()
    server = start(engine, api_keys=("k",))
    _, notes = talk(RemoteBackend(server.url, None, None, {}), "a")
    assert notes.startswith("error: This server needs an API key")
    _, notes = talk(RemoteBackend(server.url, "k", "other", {}), "a")
    assert notes == "error: The model `other` does not exist.\n"
    engine.fail = RuntimeError("x")
    out, notes = talk(RemoteBackend(server.url, "k", None, {}), "a")
    assert (out, notes[:24]) == ("h", "error: The server failed")
    server.close()
    _, notes = talk(RemoteBackend(server.url, "k", None, {}), "a")
    assert notes.startswith(f"error: no answer from {server.url}")


def test_stopping_an_answer_ends_the_request(start: Start) -> None:
    engine = ScriptedTransport()
    server = start(engine)
    engine.pause = server.on_loop(asyncio.Event)
    reply = RemoteBackend(server.url, None, None, {}).reply([{"role": "user", "content": "x"}])
    while next(reply) != "h":
        pass
    reply.close()
    server.close()
    assert len(engine.aborted) == 1


def ended(stats: dict[str, float | int]) -> float | int:
    return stats["requests_aborted_total"] + stats["request_success_total"]


def test_with_an_own_engine() -> None:
    options = {"kv_cache_memory": "64MiB", "max_model_len": 256}
    backend = LocalBackend({"temperature": 0, "max_tokens": 8}, options)
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
        until(lambda: ended(backend.engine.stats()) == 3)
        assert talk(backend, "Hello.") == (first, "")
        _, notes = talk(backend, "word " * 500)
        assert "maximum context length is 256 tokens" in notes
    finally:
        backend.close()


def test_a_script_is_told_what_failed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("Hello\n"))
    with pytest.raises(typer.Exit) as ended:
        chat_command("http://127.0.0.1:1")
    assert ended.value.exit_code == 1
    assert "no answer from" in capsys.readouterr().err
    assert converse(Parrot(), iter(["Hello", "/nope"]), None, io.StringIO(), io.StringIO()) == 0
    assert converse(Parrot(), iter(["/undo"]), None, io.StringIO(), io.StringIO()) == 1


def test_wrong_urls_and_options() -> None:
    for wrong in ("localhost:8000", "http://", "http://[::1", "http://127.0.0.1:99999"):
        with pytest.raises(ConfigurationError, match="not a URL"):
            RemoteBackend(wrong, None, None, {})
    with pytest.raises(ConfigurationError, match="block_size"):
        chat_command("http://127.0.0.1:1", block_size=16)
    with pytest.raises(ConfigurationError, match="two servers"):
        chat_command("http://127.0.0.1:1", base_url="http://127.0.0.1:2")
    with pytest.raises(InvalidRequestError, match="temperature"):
        chat_command("http://127.0.0.1:1", temperature=9.0)
