"""What takes long for one client holds up no other's stream: it is done aside, without the lock.

By order, not by the clock: while one request is in the middle of it, another is served whole. And
what the server gives back when requests are over.
"""

from __future__ import annotations

import gc
import os
import signal
import threading
import time
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import pytest

import vmserve.system.heap as heap
from tests.helpers import until
from tests.server.conftest import Body
from tests.support.serving import COMPLETIONS, Patch, Start, later, pause, raw_request, refused
from vmserve.models import resolve_model
from vmserve.server.access import admission as admission_module
from vmserve.server.net import aside_process as aside_module
from vmserve.server.net import idle as idle_module
from vmserve.server.net import workers as workers_module
from vmserve.server.net.aside_process import MOST_BYTES_IN_THREAD, MOST_CHARS_IN_THREAD
from vmserve.server.routes import body as body_module
from vmserve.system.heap import MemoryReturn
from vmserve.testing import ByteTokenizer, ScriptedTransport
from vmserve.text.tokenizer import Tokenizer, load_tokenizer

MESSAGES = [{"role": "user", "content": "slow"}]
LARGE = "x" * (body_module.MOST_BYTES_ON_LOOP + 1)
VERY_LARGE = "z" * 2 * MOST_BYTES_IN_THREAD
CUT = {"truncate_prompt_tokens": 4, "max_tokens": 1}
#: With it a request is long in the tests below: what others send is shorter.
PADDING = {"ignored": "x" * 1000}
MANY, ONE = ({"authorization": f"Bearer {key}"} for key in ("many", "one"))


class Held:
    """Wraps a function: whoever calls it waits inside until :attr:`go` is set."""

    def __init__(self, inner: Callable[..., Any], held: Callable[..., bool]) -> None:
        self._inner = inner
        self._held = held
        self.inside = threading.Event()
        self.go = threading.Event()
        self.thread = ""
        self.seen: list[Any] = []

    def __call__(self, given: Any, *args: Any, **kwargs: Any) -> Any:
        self.seen.append(given)
        if self._held(given):
            self.thread = threading.current_thread().name
            self.inside.set()
            assert self.go.wait(60)
        return self._inner(given, *args, **kwargs)


Hold = Callable[..., Held]


@pytest.fixture
def hold(monkeypatch: Patch) -> Hold:
    """Replaces a function; without a condition it holds who asks it for "slow"."""

    def begin(owner: Any, name: str, held: Callable[..., bool] = "slow".__eq__) -> Held:
        wrapped = Held(getattr(owner, name), held)
        monkeypatch.setattr(owner, name, wrapped)
        return wrapped

    return begin


@pytest.fixture
def engine(monkeypatch: Patch) -> ScriptedTransport:
    monkeypatch.setattr(workers_module, "LONG_WORK", 500)
    return ScriptedTransport()


def statuses(asked: list[Future[Any]]) -> list[int]:
    return [each.result(60).status_code for each in asked]


@pytest.mark.parametrize(
    ("what", "path", "sent"),
    [
        ("encode", COMPLETIONS, {"prompt": "slow", "max_tokens": 1}),
        ("encode", "/v1/embeddings", {"input": "slow"}),
        ("encode_infill", COMPLETIONS, {"prompt": "slow", "suffix": "x", "max_tokens": 1}),
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
    start: Start, engine: ScriptedTransport, hold: Hold, what: str, path: str, sent: Body
) -> None:
    running = start(engine)
    if what == "parse_json":
        held = hold(aside_module, what, lambda data: len(data) > len(LARGE))
    elif what == "decode":
        held = hold(engine.facts.tokenizer, what, lambda ids: ids == [118] * 4)
    else:
        held = hold(engine.facts.tokenizer, what, lambda given: given != "Hi")
    slow = later(running.post, path, {**sent, **PADDING})
    assert held.inside.wait(30)
    chunks = running.stream(COMPLETIONS, {"prompt": "Hi"})
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == "hello"
    assert not slow.done()
    held.go.set()
    assert slow.result(60).status_code in (200, 400)  # the fake engine has no embeddings
    assert held.thread.startswith("vmserve-aside")


@pytest.mark.parametrize("padding", [{}, PADDING], ids=["short", "long"])
def test_who_sends_much_holds_up_nobody_else(
    start: Start, engine: ScriptedTransport, hold: Hold, padding: Body
) -> None:
    """One key's requests are as many as you like, and as slow: another's is served whole."""
    running = start(engine, api_keys=("many", "one"))
    held = hold(engine.facts.tokenizer, "encode")
    waiting = running.app_context.workers
    body = {"prompt": "slow", **padding}
    slow = [later(running.post, "/tokenize", body, headers=MANY) for _ in range(12)]
    until(lambda: waiting.num_waiting == 11)
    for path in ("/tokenize", COMPLETIONS):
        assert running.post(path, {"prompt": "Hi", **padding}, headers=ONE).status_code == 200
    assert waiting.num_waiting == 11
    assert not any(each.done() for each in slow)
    held.go.set()
    assert statuses(slow) == [200] * 12


def test_a_key_has_so_many_requests_prepared_and_no_more(start: Start, hold: Hold) -> None:
    """As many as can run and wait."""
    engine = ScriptedTransport(max_num_seqs=1)
    running = start(engine, max_queued_requests=1)
    held = hold(engine.facts.tokenizer, "encode")
    slow = [later(running.post, "/tokenize", {"prompt": "slow"}) for _ in range(3)]
    until(lambda: running.app_context.workers.num_waiting == 2)
    reply = running.post("/tokenize", {"prompt": "Hi"})
    message = refused(reply, 429)["message"]
    assert reply.headers["retry-after"] == "1"
    for told in ("2 of your requests", "at most 2 may", "--max-queued-requests"):
        assert told in message
    held.go.set()
    assert statuses(slow) == [200] * 3
    assert running.post("/tokenize", {"prompt": "Hi"}).status_code == 200


def test_what_waits_is_dropped_with_its_client(
    start: Start, engine: ScriptedTransport, hold: Hold
) -> None:
    running = start(engine)
    held = hold(engine.facts.tokenizer, "encode")
    workers = running.app_context.workers
    slow = later(running.post, COMPLETIONS, {"prompt": "slow", "max_tokens": 1})
    assert held.inside.wait(30)
    with raw_request(running, COMPLETIONS, {"prompt": "gone", "max_tokens": 1}):
        until(lambda: workers.num_waiting == 1)
    until(lambda: workers.num_waiting == 0)
    held.go.set()
    assert slow.result(60).status_code == 200
    assert running.post("/tokenize", {"prompt": "Hi"}).status_code == 200
    assert held.seen == ["slow", "Hi"]


@pytest.mark.parametrize(("path", "more"), [("/tokenize", {}), (COMPLETIONS, CUT)])
def test_what_is_being_done_is_stopped_with_its_client(
    start: Start, monkeypatch: Patch, path: str, more: Body
) -> None:
    """A process that reads a large request ends with it: it could take seconds yet."""
    running = start()
    processes: list[Any] = []
    ask = aside_module._Process.ask

    def stopped(process: Any, task: str, *arguments: Any) -> Any:
        if task == "load":  # the tokenizer, which here is none
            processes.append(process)
            os.kill(process.pid, signal.SIGSTOP)  # it will never answer
        return ask(process, task, *arguments)

    monkeypatch.setattr(aside_module._Process, "ask", stopped)
    monkeypatch.setattr(ByteTokenizer, "to_json", lambda self: "")
    with raw_request(running, path, {"prompt": "x" * (MOST_CHARS_IN_THREAD + 1), **more}):
        until(lambda: bool(processes))
    [process] = processes
    until(lambda: process._popen.poll() is not None)
    # The thread is free again.
    monkeypatch.setattr(aside_module._Process, "ask", ask)
    running.ok("/tokenize", {"prompt": "Hi", "z": VERY_LARGE})
    assert process.pid not in running.app_context.processes.idle_pids


def test_bodies_of_a_key_are_held_up_to_a_bound(
    start: Start, engine: ScriptedTransport, monkeypatch: Patch
) -> None:
    """Also while their requests run: what was made of them stays for as long."""
    monkeypatch.setattr(admission_module, "MAX_HELD_BYTES_OF_ONE", 2500)
    running = start(engine, api_keys=("many", "one"))
    go_on = pause(running, engine)
    body = {"prompt": "Hi", **PADDING}
    slow = [later(running.post, COMPLETIONS, body, headers=MANY) for _ in range(2)]
    until(lambda: len(engine.running) == 2)
    reply = running.post(COMPLETIONS, body, headers=MANY)
    assert "at most 2500" in refused(reply, 429)["message"]
    assert running.post("/tokenize", body, headers=ONE).status_code == 200
    go_on()
    assert statuses(slow) == [200, 200]
    assert running.post(COMPLETIONS, body, headers=MANY).status_code == 200


@pytest.mark.parametrize("size", [MOST_BYTES_IN_THREAD // 2, 2 * MOST_BYTES_IN_THREAD])
def test_large_bodies_are_read_as_small_ones(start: Start, size: int) -> None:
    running = start(ScriptedTransport(max_model_len=16))
    value = {"prompt": "Hä\n😀", "ignored": [1.5, -(2**60), None, True, {"x": "y" * size}]}
    reply = running.ok("/tokenize", value)
    assert reply["tokens"] == ByteTokenizer().encode("Hä\n😀")
    assert len(running.app_context.processes.idle_pids) == (size > MOST_BYTES_IN_THREAD)
    long, empty = b"z" * size, b"[]," * max(size, 70_000)
    for body, told in (
        (b'{"prompt": "x", "prompt": "y", "z": "%b"}' % long, "key 'prompt' twice"),
        (b'{"prompt": NaN, "z": "%b"}' % long, "NaN"),
        (b'{"prompt": "%b' % long, "not JSON"),
        (b'{"prompt": "x", "z": [%b[]]}' % empty, "65536 arrays and objects"),
    ):
        headers = {"content-type": "application/json"}
        response = running.http.post("/tokenize", content=body, headers=headers)
        assert told in refused(response)["message"]
    assert running.ok("/tokenize", value)["count"] == reply["count"]


def test_the_process_that_reads_large_bodies_may_die(start: Start) -> None:
    running = start()
    body = {"prompt": "Hi", "z": VERY_LARGE}
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
    began = threading.Event()
    running = later(lambda: (began.set(), work()))
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
    assert running.post(COMPLETIONS, given).status_code == 200
    assert engine.requests[-1][0] == tokenizer.encode(text)[-20:]
    assert len(running.app_context.processes.idle_pids) == 1


class Kept(list[Any]):
    """A list that weak references know."""


@pytest.mark.parametrize(
    ("path", "body", "status"),
    [
        (COMPLETIONS, {"prompt": 5}, 400),
        (COMPLETIONS, {"prompt": "x", "n": "many"}, 400),
        (COMPLETIONS, {"prompt": "x" * 5000}, 400),
        ("/v1/chat/completions", {"messages": [{"role": "refused", "content": "x"}]}, 400),
        ("/v1/responses", {"input": "x", "metadata": {"x": ["y"]}}, 400),
        ("/v1/responses", {"input": "x"}, 200),
        (COMPLETIONS, {"prompt": "x", "stream": True}, 200),
        ("/tokenize", {"prompt": "x", "messages": []}, 400),
    ],
)
def test_what_a_request_held_goes_with_it(
    start: Start, monkeypatch: Patch, path: str, body: Body, status: int
) -> None:
    """It does not wait for the garbage collector, for which all would wait."""
    running = start()
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


# -- what is given back


def test_memory_goes_back_when_it_grew_and_when_it_shrank(monkeypatch: Patch) -> None:
    has, trims, forgets = [100], list[int](), list[int]()
    monkeypatch.setattr(heap, "_own_bytes", lambda: has[0] << 20)
    monkeypatch.setattr(heap, "trim_memory", lambda: trims.append(has[0]))
    memory = MemoryReturn()
    for has[0] in (110, 400, 401, 300, 301):  # 400: while there is still something to do
        memory.give_back(lambda: forgets.append(has[0]))
    assert trims == forgets == [400, 300]


def test_a_heap_that_is_never_idle_is_trimmed(monkeypatch: Patch) -> None:
    now, trims = [1000.0], list[float]()
    monkeypatch.setattr(heap.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(heap, "trim_memory", lambda: trims.append(now[0]))
    memory = MemoryReturn()
    for now[0] in (1001.0, 1059.0, 1060.0, 1061.0, 1119.0, 1125.0):
        memory.trim()
    assert trims == [1060.0, 1125.0]


def test_work_that_goes_on_trims_and_processes_end_after_it(
    start: Start, monkeypatch: Patch
) -> None:
    trims, given = list[bool](), list[bool]()
    monkeypatch.setattr(idle_module, "_IDLE_SECONDS", 0.05)
    monkeypatch.setattr(MemoryReturn, "trim", lambda _: trims.append(True))
    monkeypatch.setattr(MemoryReturn, "give_back", lambda _, forget: given.append(not forget()))
    running = start()

    def worked() -> bool:
        running.ok("/tokenize", {"prompt": "Hi"})
        return bool(trims)

    until(worked)
    given.clear()
    running.ok("/tokenize", {"prompt": "Hi", "z": VERY_LARGE})
    # It may have looked once before the request, too.
    until(lambda: bool(given) and running.app_context.processes.idle_pids == [])
