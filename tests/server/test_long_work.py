"""What takes long for one client holds up no other's stream: it is done aside, without the lock.

By order, not by the clock: while one request is in the middle of it, another is served whole.
"""

from __future__ import annotations

import asyncio
import gc
import json
import os
import signal
import socket
import threading
import time
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tests.helpers import until
from tests.server.conftest import Body, Running, error_of
from vmserve.models import resolve_model
from vmserve.server.access import admission as admission_module
from vmserve.server.net import aside_process as aside_module
from vmserve.server.net import workers as workers_module
from vmserve.server.net.aside_process import MOST_BYTES_IN_THREAD, MOST_CHARS_IN_THREAD
from vmserve.server.routes import body as body_module
from vmserve.testing import ByteTokenizer, ScriptedTransport
from vmserve.text.tokenizer import Tokenizer, load_tokenizer

Start = Callable[..., Running]
JSON = {"content-type": "application/json"}
MESSAGES = [{"role": "user", "content": "slow"}]
LARGE = "x" * (body_module.MOST_BYTES_ON_LOOP + 1)
engine_ids = ByteTokenizer().encode


class Held:
    """Wraps a function: whoever calls it waits inside until :attr:`go` is set."""

    def __init__(self, inner: Callable[..., Any], held: Callable[..., bool]) -> None:
        self._inner = inner
        self._held = held
        self.inside = threading.Event()
        self.go = threading.Event()
        self.thread = ""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._held(*args, **kwargs):
            self.thread = threading.current_thread().name
            self.inside.set()
            assert self.go.wait(60)
        return self._inner(*args, **kwargs)


def hold(patch: pytest.MonkeyPatch, owner: Any, name: str, held: Callable[..., bool]) -> Held:
    wrapped = Held(getattr(owner, name), held)
    patch.setattr(owner, name, wrapped)
    return wrapped


CUT = {"truncate_prompt_tokens": 4, "max_tokens": 1}
#: With it a request is long in the tests below: what others send is shorter.
PADDING = {"ignored": "x" * 1000}


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> ScriptedTransport:
    monkeypatch.setattr(workers_module, "LONG_WORK", 500)
    return ScriptedTransport()


@pytest.mark.parametrize(
    ("what", "path", "sent"),
    [
        ("encode", "/v1/completions", {"prompt": "slow", "max_tokens": 1}),
        ("encode", "/v1/embeddings", {"input": "slow"}),
        ("encode_infill", "/v1/completions", {"prompt": "slow", "suffix": "x", "max_tokens": 1}),
        ("encode", "/tokenize", {"prompt": "slow"}),
        ("token_str", "/tokenize", {"prompt": "slow", "return_token_strs": True}),
        ("decode", "/detokenize", {"tokens": [118] * 4}),
        ("apply_chat_template", "/v1/chat/completions", {"messages": MESSAGES, "max_tokens": 1}),
        ("apply_chat_template", "/v1/responses", {"input": "slow", "max_output_tokens": 1}),
        ("apply_chat_template", "/v1/responses/input_tokens", {"input": "slow"}),
        ("apply_chat_template", "/v1/messages", {"messages": MESSAGES, "max_tokens": 1}),
        ("apply_chat_template", "/v1/messages/count_tokens", {"messages": MESSAGES}),
        ("apply_chat_template", "/tokenize", {"messages": MESSAGES}),
        ("parse_json", "/tokenize", {"prompt": "x", "other": LARGE}),
    ],
)
def test_a_stream_goes_on(
    start: Start,
    engine: ScriptedTransport,
    monkeypatch: pytest.MonkeyPatch,
    what: str,
    path: str,
    sent: Body,
) -> None:
    running = start(engine)
    if what == "parse_json":
        held = hold(monkeypatch, aside_module, what, lambda data: len(data) > len(LARGE))
    elif what == "decode":
        held = hold(monkeypatch, engine.facts.tokenizer, what, lambda ids, *_: ids == [118] * 4)
    else:
        held = hold(
            monkeypatch, engine.facts.tokenizer, what, lambda given, *_, **__: given != "Hi"
        )
    with ThreadPoolExecutor(1) as pool:
        slow = pool.submit(running.post, path, {**sent, **PADDING})
        assert held.inside.wait(30)
        chunks = running.stream("/v1/completions", {"prompt": "Hi"})
        assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == "hello"
        assert not slow.done()
        held.go.set()
        assert slow.result(60).status_code in (200, 400)  # the fake engine has no embeddings
    assert held.thread.startswith("vmserve-aside")


@pytest.mark.parametrize("padding", [{}, PADDING], ids=["short", "long"])
def test_who_sends_much_holds_up_nobody_else(
    start: Start, engine: ScriptedTransport, monkeypatch: pytest.MonkeyPatch, padding: Body
) -> None:
    """One key's requests are as many as you like, and as slow: another's is served whole."""
    running = start(engine, api_keys=("many", "one"))
    held = hold(
        monkeypatch, engine.facts.tokenizer, "encode", lambda text, *_, **__: text == "slow"
    )
    many, one = ({"authorization": f"Bearer {key}"} for key in ("many", "one"))
    waiting = running.app_context.workers
    with ThreadPoolExecutor(12) as pool:
        body = {"prompt": "slow", **padding}
        slow = [pool.submit(running.post, "/tokenize", body, headers=many) for _ in range(12)]
        until(lambda: waiting.num_waiting == 11)
        for path in ("/tokenize", "/v1/completions"):
            given = {"prompt": "Hi", **padding}
            assert running.post(path, given, headers=one).status_code == 200
        assert waiting.num_waiting == 11
        assert not any(each.done() for each in slow)
        held.go.set()
        assert [each.result(60).status_code for each in slow] == [200] * 12


def test_a_key_has_so_many_requests_prepared_and_no_more(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As many as can run and wait."""
    engine = ScriptedTransport(max_num_seqs=1)
    running = start(engine, max_queued_requests=1)
    held = hold(
        monkeypatch, engine.facts.tokenizer, "encode", lambda text, *_, **__: text == "slow"
    )
    workers = running.app_context.workers
    with ThreadPoolExecutor(3) as pool:
        slow = [pool.submit(running.post, "/tokenize", {"prompt": "slow"}) for _ in range(3)]
        until(lambda: workers.num_waiting == 2)
        refused = running.post("/tokenize", {"prompt": "Hi"})
        assert refused.status_code == 429
        assert refused.headers["retry-after"] == "1"
        message = error_of(refused)["message"]
        assert "2 of your requests" in message
        assert "at most 2 may" in message
        assert "--max-queued-requests" in message
        held.go.set()
        assert [each.result(60).status_code for each in slow] == [200] * 3
    assert running.post("/tokenize", {"prompt": "Hi"}).status_code == 200


def test_what_waits_is_dropped_with_its_client(
    start: Start, engine: ScriptedTransport, monkeypatch: pytest.MonkeyPatch
) -> None:
    running = start(engine)
    asked: list[str] = []

    def is_slow(text: str, *_: Any, **__: Any) -> bool:
        asked.append(text)
        return text == "slow"

    held = hold(monkeypatch, engine.facts.tokenizer, "encode", is_slow)
    workers = running.app_context.workers
    with ThreadPoolExecutor(1) as pool:
        slow = pool.submit(running.post, "/v1/completions", {"prompt": "slow", "max_tokens": 1})
        assert held.inside.wait(30)
        body = b'{"prompt": "gone", "max_tokens": 1}'
        head = (
            f"POST /v1/completions HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-length: {len(body)}\r\n"
        )
        with socket.create_connection(("127.0.0.1", running.port)) as client:
            client.sendall(head.encode() + b"content-type: application/json\r\n\r\n" + body)
            until(lambda: workers.num_waiting == 1)
        until(lambda: workers.num_waiting == 0)
        held.go.set()
        assert slow.result(60).status_code == 200
    assert running.post("/tokenize", {"prompt": "Hi"}).status_code == 200
    assert asked == ["slow", "Hi"]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/tokenize", {"prompt": "x" * (MOST_CHARS_IN_THREAD + 1)}),
        ("/v1/completions", {"prompt": "x" * (MOST_CHARS_IN_THREAD + 1), **CUT}),
    ],
)
def test_what_is_being_done_is_stopped_when_its_client_leaves(
    start: Start, monkeypatch: pytest.MonkeyPatch, path: str, body: Body
) -> None:
    """A process that reads a large request ends with it: it could take seconds yet."""
    running = start(ScriptedTransport())
    processes: list[Any] = []
    ask = aside_module._Process.ask

    def stopped(process: Any, task: str, *arguments: Any) -> Any:
        if task == "load":  # the tokenizer, which here is none
            processes.append(process)
            os.kill(process.pid, signal.SIGSTOP)  # it will never answer
        return ask(process, task, *arguments)

    monkeypatch.setattr(aside_module._Process, "ask", stopped)
    monkeypatch.setattr(ByteTokenizer, "to_json", lambda self: "")
    content = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-length: {len(content)}\r\n"
    with socket.create_connection(("127.0.0.1", running.port)) as client:
        client.sendall(head.encode() + b"content-type: application/json\r\n\r\n" + content)
        until(lambda: bool(processes))
    [process] = processes
    until(lambda: process._popen.poll() is not None)
    # The thread is free again.
    monkeypatch.setattr(aside_module._Process, "ask", ask)
    size = {"prompt": "Hi", "z": "z" * 2 * MOST_BYTES_IN_THREAD}
    assert running.post("/tokenize", size).status_code == 200
    assert process.pid not in running.app_context.processes.idle_pids


def test_bodies_of_one_key_are_held_up_to_a_bound(
    start: Start, engine: ScriptedTransport, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also while their requests run: what was made of them stays for as long."""
    monkeypatch.setattr(admission_module, "MAX_HELD_BYTES_OF_ONE", 2500)
    running = start(engine, api_keys=("many", "one"))
    many, one = ({"authorization": f"Bearer {key}"} for key in ("many", "one"))
    engine.pause = running.on_loop(asyncio.Event)
    body = {"prompt": "Hi", **PADDING}
    with ThreadPoolExecutor(2) as pool:
        slow = [pool.submit(running.post, "/v1/completions", body, headers=many) for _ in range(2)]
        until(lambda: len(engine.running) == 2)
        refused = running.post("/v1/completions", body, headers=many)
        assert refused.status_code == 429
        assert "at most 2500" in error_of(refused)["message"]
        assert running.post("/tokenize", body, headers=one).status_code == 200
        running.on_loop(engine.pause.set)
        assert [each.result(60).status_code for each in slow] == [200, 200]
    assert running.post("/v1/completions", body, headers=many).status_code == 200


@pytest.mark.parametrize("size", [MOST_BYTES_IN_THREAD // 2, 2 * MOST_BYTES_IN_THREAD])
def test_large_bodies_are_read_as_small_ones(start: Start, size: int) -> None:
    running = start(ScriptedTransport(max_model_len=16))
    value = {"prompt": "Hä\n😀", "ignored": [1.5, -(2**60), None, True, {"x": "y" * size}]}
    reply = running.ok("/tokenize", value)
    assert reply["tokens"] == engine_ids("Hä\n😀")
    assert len(running.app_context.processes.idle_pids) == (size > MOST_BYTES_IN_THREAD)
    for body, told in (
        (b'{"prompt": "x", "prompt": "y", "z": "%b"}' % (b"z" * size), "key 'prompt' twice"),
        (b'{"prompt": NaN, "z": "%b"}' % (b"z" * size), "NaN"),
        (b'{"prompt": "%b' % (b"z" * size), "not JSON"),
        (
            b'{"prompt": "x", "z": [%b[]]}' % (b"[]," * max(size, 70_000)),
            "65536 arrays and objects",
        ),
    ):
        response = running.http.post("/tokenize", content=body, headers=JSON)
        assert response.status_code == 400
        assert told in error_of(response)["message"]
    assert running.ok("/tokenize", value)["count"] == reply["count"]


def test_the_process_that_reads_large_bodies_may_die(start: Start) -> None:
    running = start(ScriptedTransport())
    body = {"prompt": "Hi", "z": "z" * 2 * MOST_BYTES_IN_THREAD}
    for _ in range(2):
        assert running.post("/tokenize", body).status_code == 200
        [pid] = running.app_context.processes.idle_pids
        os.kill(pid, signal.SIGKILL)
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    assert running.post("/tokenize", body).status_code == 200
    running.app_context.processes.close_idle()
    assert running.app_context.processes.idle_pids == []


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return load_tokenizer(resolve_model(None))


def num_ticks_during(work: Callable[[], Any]) -> int:
    """How often another thread ran while ``work`` did: a few times if it holds the lock."""
    with ThreadPoolExecutor(1) as pool:
        began = threading.Event()

        def run() -> None:
            began.set()
            work()

        running = pool.submit(run)
        assert began.wait(30)
        ticks = 0
        while not running.done():
            time.sleep(0.001)
            ticks += 1
        running.result()
    return ticks


def test_long_texts_leave_the_lock_to_others(tokenizer: Tokenizer) -> None:
    text = "Once upon a time there was a little girl. " * 10_000
    ids = tokenizer.encode(text)
    assert len(ids) > 50_000
    assert num_ticks_during(lambda: tokenizer.encode(text)) >= 20
    assert num_ticks_during(lambda: tokenizer.decode(ids * 20)) >= 20


def test_long_and_short_texts_are_encoded_alike(tokenizer: Tokenizer) -> None:
    part = "Once upon a time, ä 😀 <s>\n"
    short = tokenizer.encode(part)
    long = tokenizer.encode(part * 200)
    assert len(part) < 1024 < 200 * len(part)
    assert long[: len(short) - 2] == short[:-2]
    assert tokenizer.decode(long, skip_special_tokens=False).count("Once upon") == 200
    without = tokenizer.encode(part * 200, add_special_tokens=False)
    assert len(long) - len(without) == len(short) - len(tokenizer.encode(part, False))


def test_long_texts_are_encoded_by_a_process(start: Start, tokenizer: Tokenizer) -> None:
    """Its tokens are those of the tokenizer, with its special tokens or without."""
    engine = ScriptedTransport(vocab_size=tokenizer.vocab_size)
    engine.facts.tokenizer = tokenizer  # type: ignore[assignment]
    running = start(engine)
    text = "Once upon a time, ä 😀 <s>\n" * 12_000
    assert len(text) > MOST_CHARS_IN_THREAD
    for special in (True, False):
        body = {"prompt": text, "add_special_tokens": special, "return_token_strs": True}
        reply = running.ok("/tokenize", body)
        assert reply["tokens"] == tokenizer.encode(text, special)
        assert reply["count"] == len(reply["tokens"])
        assert reply["token_strs"] == list(map(tokenizer.token_str, reply["tokens"]))
    assert running.ok("/tokenize", {"prompt": text})["token_strs"] is None
    given = {"prompt": text, "truncate_prompt_tokens": 20, "max_tokens": 1}
    assert running.post("/v1/completions", given).status_code == 200
    assert engine.requests[-1][0] == tokenizer.encode(text)[-20:]
    assert len(running.app_context.processes.idle_pids) == 1


class Kept(list[Any]):
    """A list that weak references know."""


@pytest.mark.parametrize(
    ("path", "body", "status"),
    [
        ("/v1/completions", {"prompt": 5}, 400),
        ("/v1/completions", {"prompt": "x", "n": "many"}, 400),
        ("/v1/completions", {"prompt": "x" * 5000}, 400),
        ("/v1/chat/completions", {"messages": [{"role": "refused", "content": "x"}]}, 400),
        ("/v1/responses", {"input": "x", "metadata": {"x": ["y"]}}, 400),
        ("/v1/responses", {"input": "x"}, 200),
        ("/v1/completions", {"prompt": "x", "stream": True}, 200),
        ("/tokenize", {"prompt": "x", "messages": []}, 400),
    ],
)
def test_what_a_request_held_goes_with_it(
    start: Start, monkeypatch: pytest.MonkeyPatch, path: str, body: Body, status: int
) -> None:
    """It does not wait for the garbage collector, for which all would wait."""
    running = start(ScriptedTransport())
    parse = aside_module.parse_json
    held: list[weakref.ref[Kept]] = []

    def parsed(data: bytes) -> Any:
        kept = Kept()
        held.append(weakref.ref(kept))
        # In an ignored field, and where pydantic's errors have what was wrong.
        value = {**parse(data), "ignored": kept}
        return value if "metadata" not in value else {**value, "metadata": {"x": kept}}

    monkeypatch.setattr(aside_module, "parse_json", parsed)
    gc.collect()
    gc.disable()
    try:
        for _ in range(3):
            assert running.post(path, {**body, "more": LARGE}).status_code == status
        assert len(held) == 3
        until(lambda: all(each() is None for each in held[:2]), 5)
    finally:
        gc.enable()
