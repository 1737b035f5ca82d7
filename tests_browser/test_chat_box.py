"""The live page's chat box: what it sends, what it shows, and what it keeps to itself."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator

import pytest

from tests.helpers import until
from tests.server.conftest import Running
from tests_browser.chromium import Browser, Page
from tests_browser.test_live_page import LOADED, healthy
from vmserve.testing import ScriptedEngine

Start = Callable[..., Running]

SENDS = "document.getElementById('chat-send').textContent"
TEXTS = (
    "[...document.querySelectorAll('#chat-log article')]"
    ".map(box => [...box.querySelectorAll('.text')].map(text => text.textContent))"
)


def send(page: Page, text: str) -> None:
    page.run("document.getElementById('chat-text').focus()")
    page.type(text)
    page.press("Enter")


def answered(page: Page) -> list[list[str]]:
    """The texts of all boxes once nothing is being answered."""
    texts: list[list[str]] = page.until(f"{SENDS} == 'Send' && {TEXTS}")
    return texts


@pytest.fixture
def chat(browser: Browser, start: Start) -> Iterator[tuple[Page, ScriptedEngine, Running]]:
    engine = ScriptedEngine("hello", max_model_len=1024)
    server = start(engine, reasoning_parser="think")
    with browser.page(server.url) as page:
        page.until(LOADED)
        yield page, engine, server


def test_a_conversation(chat: tuple[Page, ScriptedEngine, Running]) -> None:
    page, engine, _ = chat
    send(page, "Hi")
    assert answered(page) == [["Hi"], ["hello"]]
    page.run("document.getElementById('chat-system').value = 'Be brief.'")
    page.run("document.getElementById('chat-temperature').value = '0.5'")
    page.run("document.getElementById('chat-tokens').value = '3'")
    send(page, "Again")
    assert answered(page) == [["Hi"], ["hello"], ["Again"], ["hel"]]
    assert "cut at the most tokens" in page.text("#chat-log article:last-child .meta")
    (_, first, _), (_, second, told) = engine.requests
    assert (first.temperature, first.max_tokens) == (1.0, None)
    assert (second.temperature, second.max_tokens) == (0.5, 3)
    for part in ("Be brief.", "Hi", "hello", "Again"):
        assert part in told["prompt"]
    page.run("document.getElementById('chat-clear').click()")
    assert page.run(TEXTS) == []
    assert page.run("!document.getElementById('chat-empty').hidden")
    send(page, "New")
    answered(page)
    assert "Again" not in engine.requests[-1][2]["prompt"]
    assert page.run("sessionStorage.length + localStorage.length + document.cookie.length") == 0
    healthy(page)


def test_an_example_is_sent_at_a_click(chat: tuple[Page, ScriptedEngine, Running]) -> None:
    page, engine, _ = chat
    page.run("document.querySelector('#chat-empty button').click()")
    question = page.text("#chat-empty button")
    assert answered(page) == [[question], ["hello"]]
    assert question in engine.requests[0][2]["prompt"]


def test_what_is_said_is_text(chat: tuple[Page, ScriptedEngine, Running]) -> None:
    page, engine, _ = chat
    script = "<img src=x onerror=\"document.title='bad'\"><b>bold</b>"
    engine.reply = ScriptedEngine(script).reply
    send(page, script)
    assert answered(page) == [[script], [script]]
    assert page.run("document.querySelectorAll('#chat-log img, #chat-log .text b').length") == 0
    assert page.text("title") == "vmserve"
    healthy(page)


def test_thoughts_are_folded(chat: tuple[Page, ScriptedEngine, Running]) -> None:
    page, engine, _ = chat
    engine.reply = ScriptedEngine("<think>\nwell\n</think>\n\nyes").reply
    send(page, "Hi")
    assert answered(page)[1] == ["well", "yes"]
    assert page.text("#chat-log summary") == "Thoughts"
    assert page.run("document.querySelector('#chat-log details').open") is False
    send(page, "And?")
    answered(page)
    assert "well" not in engine.requests[-1][2]["prompt"]


def test_stop_ends_the_request_and_keeps_what_came(
    chat: tuple[Page, ScriptedEngine, Running],
) -> None:
    page, engine, server = chat
    engine.pause_after = 2
    engine.pause = server.on_loop(asyncio.Event)
    send(page, "Hi")
    page.until(f'JSON.stringify({TEXTS}) == \'[["Hi"],["he"]]\'')
    assert page.run(SENDS) == "Stop"
    # The live figures tell its regime while it runs.
    page.until("document.querySelectorAll('#requests tbody tr').length == 1")
    page.run("document.getElementById('chat-send').click()")
    until(lambda: len(engine.aborted) == 1)
    assert answered(page) == [["Hi"], ["he"]]
    meta = page.text("#chat-log .meta")
    assert "stopped" in meta
    assert meta.endswith("virtual")
    healthy(page)


def test_errors_are_told_and_the_question_comes_back(
    chat: tuple[Page, ScriptedEngine, Running],
) -> None:
    page, engine, _ = chat
    page.run("document.getElementById('chat-tokens').value = '5000'")
    send(page, "Hi")
    [[question], [_, told]] = answered(page)
    assert question == "Hi"
    assert "maximum context length is 1024" in told
    assert page.run("document.getElementById('chat-text').value") == "Hi"
    page.run("document.getElementById('chat-tokens').value = ''")
    engine.fail, engine.pause_after = RuntimeError("secret"), 2
    page.press("Enter")
    page.until(f"{TEXTS}.length == 4 && {SENDS} == 'Send'")
    [partial, told] = page.run(TEXTS)[3]
    assert partial == "he"
    assert "failed to handle this request" in told
    engine.fail = None
    page.press("Enter")
    page.until(f"{TEXTS}.length == 6 && {SENDS} == 'Send'")
    assert engine.requests[-1][2]["prompt"].count("Hi") == 1  # what failed is forgotten


def test_the_key_goes_with_it(browser: Browser, start: Start) -> None:
    server = start(ScriptedEngine(), api_keys=("right",))
    with browser.page(server.url) as page:
        page.until("!document.getElementById('key-form').hidden")
        page.type("right")
        page.run("document.querySelector('#key-form button').click()")
        page.until(LOADED)
        send(page, "Hi")
        assert answered(page) == [["Hi"], ["hello"]]
        page.run("sessionStorage.setItem('vmserve-key', 'wrong')")
        send(page, "Hi")
        page.until("!document.getElementById('key-form').hidden")
        assert page.text("#key-told") == "This key is not accepted."


def test_the_real_model_answers(browser: Browser, real: Running) -> None:
    with browser.page(real.url) as page:
        page.until(LOADED)
        page.run("document.querySelector('#chat-empty button').click()")
        assert answered(page) == [
            ["What is the capital of France?"],
            ["The capital of France is Paris."],
        ]
        assert "tokens" in page.text("#chat-log .meta")
        healthy(page)
