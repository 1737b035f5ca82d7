"""The live page in a browser: what it shows is what the server says."""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
from collections.abc import Callable, Iterator
from typing import Any

import httpx

from tests.server.conftest import Running
from tests_browser.chromium import Browser, Page
from vmserve.server.config import ServerConfig
from vmserve.server.models.registry import Models
from vmserve.server.models.served import ServedModel
from vmserve.testing import ScriptedEngine

Start = Callable[..., Running]

LOADED = "!document.querySelector('main').hidden && document.getElementById('model').textContent"
FIGURES = (
    "Object.fromEntries([...document.querySelectorAll('#figures dd')]"
    ".map(dd => [dd.dataset.figure, dd.textContent]))"
)
LEGEND = (
    "Object.fromEntries([...document.querySelectorAll('#legend li')]"
    ".map(li => [li.dataset.use, Number(li.querySelector('b').textContent.replaceAll(',', ''))]))"
)
ROWS = (
    "[...document.querySelectorAll('#requests tbody tr')]"
    ".map(row => [...row.cells].map(cell => cell.textContent))"
)


def healthy(page: Page) -> None:
    assert page.hosts() == {"127.0.0.1", ""} or page.hosts() == {"127.0.0.1"}
    assert page.complaints == []


def as_shown(value: float) -> str:
    """As JavaScript writes a number."""
    return str(int(value)) if value == int(value) else json.dumps(value)


@contextlib.contextmanager
def long_request(server: Running, name: str) -> Iterator[None]:
    """It runs until the block ends."""
    body = {
        "prompt": "Once upon a time",
        "max_tokens": 4000,
        "ignore_eos": True,
        "stream": True,
        "request_id": name,
    }
    with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=60) as response:
        left = threading.Event()
        lines = response.iter_lines()
        next(lines)
        reader = threading.Thread(target=_read_until, args=(left, lines))
        reader.start()
        yield
        left.set()
        reader.join()


def _read_until(left: threading.Event, lines: Iterator[str]) -> None:
    while not left.is_set() and next(lines, None) is not None:
        pass


def test_idle(browser: Browser, real: Running) -> None:
    real.complete(max_tokens=40)
    with browser.page(real.url) as page:
        assert page.until(LOADED).startswith("embedded · ")
        page.run("document.querySelector('#figures').parentElement.open = true")
        told = real.http.get("/v1/kv").json()
        shown = page.until(f"(figures => figures.generation_tokens_total && figures)({FIGURES})")
        assert {name: shown[name] for name in told} == {
            name: as_shown(value) for name, value in told.items()
        }
        counts = page.run(LEGEND)
        assert counts["free"] == told["free_pages"]
        assert counts["cached"] + counts["parked"] + counts["spare"] == told["idle_pages"]
        assert counts["absent"] == told["limit_pages"] - told["committed_pages"]
        assert page.text("#state") == "live"
        assert page.text("#running") == "0"
        assert page.run(ROWS) == []
        healthy(page)


def test_under_load(browser: Browser, real: Running) -> None:
    with browser.page(real.url) as page, long_request(real, "the-first"):
        [row] = page.until(f"(rows => rows.length == 1 && rows)({ROWS})")
        assert row[0].startswith("cmpl-the-first")
        assert row[1] == "running"
        assert row[2].split()[0] in ("virtual", "paged")
        assert row[3].split()[0] == "5"
        before = int(row[4].split()[0].replace(",", ""))
        page.until(f"Number({ROWS}[0][4].split(' ')[0].replaceAll(',', '')) > {before}")
        page.until("Number(document.getElementById('rate').textContent.replaceAll(',', '')) > 0")
        with long_request(real, "the-second"):
            page.until(f"{ROWS}.length == 2")
        page.until(f"{ROWS}.length == 1")
        counts = page.run(LEGEND)
        assert counts["virtual"] + counts["paged"] > 0
        healthy(page)
    assert real.http.get("/v1/kv").status_code == 200


def test_a_request_is_one_line_and_its_bound_is_that_of_all_sequences(
    browser: Browser, start: Start
) -> None:
    engine = ScriptedEngine()
    server = start(engine)
    engine.pause_after, engine.pause = 1, server.on_loop(asyncio.Event)
    body = {"prompt": "x", "max_tokens": 16, "n": 2, "stream": True, "request_id": "y" * 60}
    with browser.page(server.url) as page:
        page.until(LOADED)
        with server.http.stream("POST", "/v1/completions", json=body):
            page.until(f"{ROWS}.length == 1")
            row = "document.querySelector('#requests tbody tr')"
            assert page.run(f"{ROWS}[0][4]") == "1 of 32 in 2 sequences"
            assert page.run(f"{row}.cells[0].title").startswith(f"cmpl-{'y' * 60}")
            assert page.run(f"{row}.offsetHeight") < 40
            assert "1.0 ms virtual, 2.0 ms paged" in page.run(f"{row}.cells[2].title")
        healthy(page)


def test_drafts_are_shown_where_there_are_some(browser: Browser, start: Start) -> None:
    engine = ScriptedEngine()
    server, told = start(engine), engine.stats
    with browser.page(server.url) as page:
        page.until(LOADED)
        assert page.run("document.getElementById('drafts').hidden")
        drafts = {
            "spec_decode_num_draft_tokens_total": 80,
            "spec_decode_num_accepted_tokens_total": 60,
            "generation_tokens_total": 100,
        }
        engine.stats = lambda: {**told(), **drafts}  # type: ignore[method-assign]
        page.until("!document.getElementById('drafts').hidden")
        assert (page.text("#drafts-accepted"), page.text("#drafts-step")) == ("75 %", "2.50")
        healthy(page)


def test_kinds_of_layers_are_shown_where_there_are_several(browser: Browser, start: Start) -> None:
    engine = ScriptedEngine()
    server, told = start(engine), engine.stats
    with browser.page(server.url) as page:
        page.until(LOADED)
        assert page.run("document.getElementById('kinds').hidden")
        figures = {"page_bytes": 1 << 20, "used_pages": 3, "cached_pages": 2, "free_pages": 0}
        kinds = {f"kv_kind:window 32:{name}": number for name, number in figures.items()}
        engine.stats = lambda: {**told(), **kinds}  # type: ignore[method-assign]
        page.until("!document.getElementById('kinds').hidden")
        text = "window 32: pages of 1.0 MiB; 3 used (3.0 MiB), 2 cached (2.0 MiB), 0 free (0 B)"
        assert page.text("#kinds") == text
        healthy(page)


def test_what_went_wrong_is_in_front(browser: Browser, start: Start) -> None:
    engine = ScriptedEngine()
    server = start(engine)
    failed = "[...document.querySelectorAll('#counters .bad')].map(item => item.textContent)"
    with browser.page(server.url) as page:
        page.until(LOADED)
        assert "0 rejected" in page.text("#counters")
        assert page.run(failed) == []
        engine.fail = RuntimeError("a defect")
        server.error("/v1/completions", {"prompt": "x"}, 500)
        page.until(f"{failed}.length == 1")
        assert page.run(failed) == ["1 failed"]
        healthy(page)


def test_active_pages_stand_out_from_cached_ones(browser: Browser, start: Start) -> None:
    """By luminance against the card that the map lies on, as WCAG computes contrast."""
    contrast = """(() => {
      const style = getComputedStyle(document.documentElement);
      const light = (name) => {
        const hex = style.getPropertyValue(name).trim();
        const part = (at) => {
          const value = parseInt(hex.slice(at, at + 2), 16) / 255;
          return value <= 0.04045 ? value / 12.92 : ((value + 0.055) / 1.055) ** 2.4;
        };
        return 0.2126 * part(1) + 0.7152 * part(3) + 0.0722 * part(5);
      };
      const ratio = (a, b) => (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
      return ["virtual", "paged", "both", "cached", "parked", "free", "absent"]
        .map((use) => ratio(light(`--page-${use}`), light("--card")));
    })()"""
    with browser.page(start(ScriptedEngine()).url) as page:
        page.until(LOADED)
        for dark in (False, True):
            page.dark(dark)
            *active, cached, parked, free, absent = page.run(contrast)
            assert min(active) > 1.4 * max(cached, parked, free, absent)


def test_what_does_not_change_agrees_with_the_map(browser: Browser, start: Start) -> None:
    server = start(ScriptedEngine())
    with browser.page(server.url) as page:
        page.until(LOADED)
        assert page.text("#map-note") == "4 pages"
        page.run("document.getElementById('map').focus()")
        told = []
        for _ in range(4):
            page.press("ArrowRight")
            told.append(page.text("#map-cell"))
        assert [text.split(" (")[0] for text in told] == [
            "Page 1: free",
            "Page 2: virtual, shared",
            "Page 3: cached",
            "Page 3: cached",
        ]
        page.press("Home")
        assert page.text("#map-cell").startswith("Page 0: absent")
        page.run("document.querySelector('#legend [data-use=cached] button').click()")
        pressed = "[...document.querySelectorAll('[aria-pressed=true]')].map(b => b.textContent)"
        assert page.run(pressed) == [" cached 1"]
        healthy(page)


def test_the_key_is_asked_for(browser: Browser, start: Start) -> None:
    server = start(ScriptedEngine(), api_keys=("right",))
    with browser.page(server.url) as page:
        page.until("!document.getElementById('key-form').hidden")
        assert page.run("document.activeElement.id") == "key"
        assert page.complaints == []
        assert not any("/v1/kv" in url for url in page.requested)
        page.type("right")
        page.run("document.querySelector('#key-form button').click()")
        page.until(LOADED)
        assert page.run("sessionStorage.getItem('vmserve-key')") == "right"
        assert page.run("localStorage.length + document.cookie.length") == 0
        assert "right" not in page.run("document.documentElement.outerHTML + location.href")
        healthy(page)


def test_a_wrong_key_is_told(browser: Browser, start: Start) -> None:
    server = start(ScriptedEngine(), api_keys=("right",))
    with browser.page(server.url) as page:
        page.until("!document.getElementById('key-form').hidden")
        page.type("wrong")
        page.run("document.querySelector('#key-form button').click()")
        page.until("document.getElementById('key-told').textContent")
        assert page.text("#key-told") == "This key is not accepted."
        assert page.run("sessionStorage.length") == 0


def test_a_server_that_goes_away(browser: Browser, start: Start) -> None:
    server = start(ScriptedEngine())
    with browser.page(server.url) as page:
        page.until(LOADED)
        server.close()
        page.until("document.getElementById('state').className == 'away'")
        assert page.text("#state") == "no answer from the server"


def test_pausing_stops_asking(browser: Browser, start: Start) -> None:
    engine = ScriptedEngine()
    server = start(engine)
    with browser.page(server.url) as page:
        page.until(LOADED)
        page.run("document.getElementById('pause').click()")
        assert page.text("#state") == "paused"
        page.run("new Promise(done => setTimeout(done, 300))")  # one may be on its way
        asked = len(page.requested)
        page.run("new Promise(done => setTimeout(done, 1500))")
        assert len(page.requested) == asked
        page.run("document.getElementById('pause').click()")
        page.until("document.getElementById('state').textContent == 'live'")
        healthy(page)


def test_it_fits_a_telephone_and_the_dark(browser: Browser, start: Start) -> None:
    server = start(ScriptedEngine())
    with browser.page(server.url) as page:
        page.size(360, 700, mobile=True)
        page.until(LOADED)
        assert page.run("document.documentElement.scrollWidth <= 360")
        background = "getComputedStyle(document.body).backgroundColor"
        light = page.run(background)
        page.dark()
        assert page.run(background) != light
        healthy(page)


def pool_of(num_pages: int) -> Any:
    """A script that shows a pool of so many pages, as the server would tell of it."""
    cells = "1" * num_pages
    return (
        "(async () => { const data = await (await fetch('v1/kv/live')).json();"
        f" data.pool.cells = '{cells}'; data.pool.num_pages = {num_pages};"
        " window.fetch = async () => new Response(JSON.stringify(data)); })()"
    )


def test_ten_and_ten_thousand_pages_are_legible(browser: Browser, start: Start) -> None:
    server = start(ScriptedEngine())
    shape = "[document.getElementById('map').clientWidth, document.getElementById('map').height]"
    for num_pages, least, most in ((10, 18, 40), (10_000, 100, 500)):
        with browser.page(server.url) as page:
            page.until(LOADED)
            page.run(pool_of(num_pages))
            note = f"{num_pages:,} pages"
            page.until(f"document.getElementById('map-note').textContent == '{note}'")
            width, height = page.run(shape)
            assert 600 < width < 1200
            assert least <= height <= most
            assert width * height / num_pages >= 9  # pixels of a cell
            healthy(page)


def test_one_of_several_models_is_chosen(browser: Browser) -> None:
    configs = [ServerConfig(served_model_names=(name,)) for name in ("a", "b")]
    engines = ScriptedEngine("alpha"), ScriptedEngine("beta")
    models = [ServedModel(*each) for each in zip(configs, engines, strict=True)]
    server = Running(Models(models))
    names = "[...document.querySelectorAll('#models tbody button')]"
    try:
        with browser.page(server.url) as page:
            assert page.until(LOADED).startswith("a · ")
            assert page.run(f"{names}.map(each => each.textContent)") == ["a", "b"]
            server.on_loop_async(models[1].sleep)
            page.run(f"{names}[1].click()")
            page.until("document.getElementById('model').textContent.startsWith('b · ')")
            page.until(
                "document.querySelector('#models tbody tr:last-child').cells[1].textContent"
                " == 'asleep'"
            )
            page.run("document.getElementById('chat-text').value = 'Hi'")
            page.run("document.getElementById('chat-form').requestSubmit()")
            page.until("document.querySelector('#chat-log .answer .text')?.textContent == 'beta'")
            healthy(page)
    finally:
        server.close()
    assert len(engines[1].requests) == 1


def test_one_model_is_shown_without_a_table(browser: Browser, start: Start) -> None:
    with browser.page(start().url) as page:
        page.until(LOADED)
        assert page.run("document.getElementById('models-box').hidden")
