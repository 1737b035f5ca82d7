"""What takes long for one client holds up no other's stream: it is done aside, without the lock.

By order, not by the clock: while one request is in the middle of it, another is served whole.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tests.server.conftest import Body, Running
from tests.server.fake_engine import FakeAsyncLLM
from vmserve.models import resolve_model
from vmserve.server import body as body_module
from vmserve.server import context as context_module
from vmserve.tokenizer import Tokenizer, load_tokenizer

Start = Callable[..., Running]
LARGE = "x" * (body_module.MOST_BYTES_ON_LOOP + 1)


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


@pytest.mark.parametrize(
    ("what", "path", "sent"),
    [
        ("encode", "/v1/completions", {"prompt": "slow", "max_tokens": 1}),
        ("encode", "/tokenize", {"prompt": "slow"}),
        ("token_str", "/tokenize", {"prompt": "slow", "return_token_strs": True}),
        ("decode", "/detokenize", {"tokens": [118] * 4}),
        ("apply_chat_template", "/v1/chat/completions", {"max_tokens": 1}),
        ("parse_json", "/tokenize", {"prompt": "x", "ignored": LARGE}),
    ],
)
def test_a_stream_goes_on(
    start: Start, monkeypatch: pytest.MonkeyPatch, what: str, path: str, sent: Body
) -> None:
    engine = FakeAsyncLLM()
    running = start(engine)
    monkeypatch.setattr(context_module, "LONG_WORK", 3)  # what others send is longer than "Hi"
    if what == "apply_chat_template":
        sent = {**sent, "messages": [{"role": "user", "content": "slow"}]}
    if what == "parse_json":
        held = hold(monkeypatch, body_module, what, lambda data: len(data) > len(LARGE))
    elif what == "decode":
        held = hold(monkeypatch, engine.tokenizer, what, lambda ids, *_: ids == [118] * 4)
    else:
        held = hold(monkeypatch, engine.tokenizer, what, lambda given, *_, **__: given != "Hi")
    with ThreadPoolExecutor(1) as pool:
        slow = pool.submit(running.post, path, sent)
        assert held.inside.wait(30)
        chunks = running.stream("/v1/completions", {"prompt": "Hi"})
        assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == "hello"
        assert not slow.done()
        held.go.set()
        assert slow.result(60).status_code == 200
    assert held.thread.startswith("vmserve-aside")


def test_two_long_texts_hold_up_no_short_one(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = FakeAsyncLLM()
    running = start(engine)
    monkeypatch.setattr(context_module, "LONG_WORK", 3)
    held = hold(monkeypatch, engine.tokenizer, "encode", lambda text, *_, **__: text != "Hi")
    with ThreadPoolExecutor(2) as pool:
        slow = [pool.submit(running.post, "/tokenize", {"prompt": "slow"}) for _ in range(2)]
        assert held.inside.wait(30)
        time.sleep(0.05)  # for the other one to arrive; it may be late, and then nothing is shown
        assert running.post("/tokenize", {"prompt": "Hi"}).status_code == 200
        assert not any(one.done() for one in slow)
        held.go.set()
        assert [one.result(60).status_code for one in slow] == [200, 200]


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
