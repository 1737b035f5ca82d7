"""The pictures of the documentation: ``python -m tests_browser.screenshots DIRECTORY [REPORT]``.

The live page idle, and under load after a chat; the report of ``vmserve bench ab`` if one is named.
"""

from __future__ import annotations

import argparse
import contextlib
import threading
from pathlib import Path

import httpx

from tests.server.conftest import Running
from tests_browser.chromium import Browser, Page
from vmserve import AsyncLLM

_LOADED = "!document.querySelector('main').hidden"
_STORY = "Once upon a time there was a little fox who lived in a wood. "


def _ask(url: str, number: int, stop: threading.Event) -> None:
    """Requests of several kinds, one after the other, until ``stop``."""
    while not stop.is_set():
        body = {
            "prompt": _STORY * (1, 3, 12)[number % 3] + str(number),
            "max_tokens": (80, 200, 400)[number % 3],
            "n": 3 if number % 4 == 0 else 1,
            "ignore_eos": True,
            "request_id": f"reader-{number}",
        }
        with contextlib.suppress(httpx.HTTPError):
            httpx.post(f"{url}/v1/completions", json=body, timeout=300)


def _live(browser: Browser, directory: Path) -> None:
    engine = AsyncLLM(dtype="float32", kv_cache_memory="96MiB", max_num_seqs=16)
    server = Running(engine, served_model_names=("embedded",))
    stop = threading.Event()
    readers = [
        threading.Thread(target=_ask, args=(server.url, number, stop)) for number in range(12)
    ]
    try:
        with browser.page(server.url, width=1280, height=800) as page:
            page.until(_LOADED)
            directory.joinpath("live-idle.png").write_bytes(page.screenshot())
            for reader in readers:
                reader.start()
            page.until("document.querySelectorAll('#requests tbody tr').length >= 10")
            page.run("new Promise(done => setTimeout(done, 25000))")
            for example in range(2):
                page.run(f"document.querySelectorAll('#chat-empty button')[{example}].click()")
                page.until("document.getElementById('chat-send').textContent == 'Send'")
            page.size(1280, 1130)
            page.run("new Promise(done => setTimeout(done, 1500))")
            directory.joinpath("live-load.png").write_bytes(page.screenshot())
    finally:
        stop.set()
        for reader in readers:
            if reader.ident is not None:
                reader.join()
        server.close()


def _report(page: Page, directory: Path) -> None:
    page.size(1000, 1300)
    directory.joinpath("ab-report.png").write_bytes(page.screenshot())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("directory", type=Path)
    parser.add_argument("report", type=Path, nargs="?")
    given = parser.parse_args()
    given.directory.mkdir(parents=True, exist_ok=True)
    with Browser() as browser:
        _live(browser, given.directory)
        if given.report is not None:
            with browser.page(given.report.resolve().as_uri()) as page:
                _report(page, given.directory)


if __name__ == "__main__":
    main()
