"""A headless Chromium, driven over its DevTools protocol."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Self
from urllib.parse import urlsplit

from websockets.sync.client import ClientConnection, connect

__all__ = ["Browser", "Page", "chromium"]

#: It may fetch nothing of its own accord, and reach nothing but this machine.
_FLAGS = (
    "--headless=new",
    "--remote-debugging-port=0",
    "--disable-gpu",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--no-first-run",
    "--no-default-browser-check",
    "--hide-scrollbars",
    "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1",
)
_START_SECONDS = 60
_ANSWER_SECONDS = 60


def chromium() -> str:
    """The program to run, found by scripts/test-browser or on the PATH."""
    names = ("chromium", "chromium-browser", "google-chrome", "chrome")
    found = os.environ.get("VMSERVE_CHROMIUM") or next(filter(None, map(shutil.which, names)), None)
    assert found, "no Chromium: run scripts/test-browser, which finds or fetches one"
    return found


class Browser:
    """A process of its own with an empty profile; a context manager."""

    def __init__(self) -> None:
        self._profile = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        # Its sandbox needs a user other than root.
        sandbox = () if os.geteuid() else ("--no-sandbox",)
        command = [chromium(), *_FLAGS, *sandbox, f"--user-data-dir={self._profile.name}"]
        self._process = subprocess.Popen(
            [*command, "about:blank"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        self._stack = contextlib.ExitStack()
        self._socket: ClientConnection | None = None
        self._last_id = 0
        self._events: list[dict[str, Any]] = []

    def __enter__(self) -> Self:
        try:
            connection = connect(self._debugging_url(), max_size=None)
            self._socket = self._stack.enter_context(connection)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._stack.close()
        self._process.terminate()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._profile.cleanup()

    def _debugging_url(self) -> str:
        """It writes its port and path into its profile once it listens."""
        file = Path(self._profile.name, "DevToolsActivePort")
        deadline = time.monotonic() + _START_SECONDS
        while time.monotonic() < deadline:
            assert self._process.poll() is None, "Chromium ended as it started"
            with contextlib.suppress(OSError, ValueError):
                port, path = file.read_text().split()
                return f"ws://127.0.0.1:{port}{path}"
            time.sleep(0.05)
        raise TimeoutError("Chromium did not start")

    def call(self, method: str, session: str | None = None, **params: Any) -> dict[str, Any]:
        """A command's result; events that come before it are kept."""
        assert self._socket is not None
        self._last_id += 1
        message: dict[str, Any] = {"id": self._last_id, "method": method, "params": params}
        if session is not None:
            message["sessionId"] = session
        self._socket.send(json.dumps(message))
        while True:
            answer = json.loads(self._socket.recv(timeout=_ANSWER_SECONDS))
            if answer.get("id") != self._last_id:
                self._events.append(answer)
                continue
            assert "error" not in answer, f"{method}: {answer['error']}"
            result: dict[str, Any] = answer["result"]
            return result

    def take_events(self, session: str) -> list[dict[str, Any]]:
        mine = [event for event in self._events if event.get("sessionId") == session]
        self._events = [event for event in self._events if event.get("sessionId") != session]
        return mine

    @contextlib.contextmanager
    def page(self, url: str, *, width: int = 1200, height: int = 900) -> Iterator[Page]:
        """A tab of its own, without cookies or storage of others."""
        context = self.call("Target.createBrowserContext")["browserContextId"]
        target = self.call("Target.createTarget", url="about:blank", browserContextId=context)[
            "targetId"
        ]
        session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        page = Page(self, session)
        try:
            page.size(width, height)
            for domain in ("Page", "Runtime", "Log", "Network"):
                page.call(f"{domain}.enable")
            page.call("Page.navigate", url=url)
            page.until("document.readyState == 'complete' && location.href != 'about:blank'")
            yield page
        finally:
            self.call("Target.disposeBrowserContext", browserContextId=context)


class Page:
    """What a test does with a tab, and what went on in it."""

    def __init__(self, browser: Browser, session: str) -> None:
        self._browser = browser
        self._session = session
        #: What the console showed as a warning or an error, and uncaught exceptions.
        self.complaints: list[str] = []
        #: Whatever it asked for.
        self.requested: list[str] = []

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        return self._browser.call(method, self._session, **params)

    def size(self, width: int, height: int, *, mobile: bool = False) -> None:
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=mobile,
        )

    def dark(self, dark: bool = True) -> None:
        feature = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[feature])

    def run(self, script: str) -> Any:
        """The value of an expression, awaited."""
        result = self.call(
            "Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True
        )
        assert "exceptionDetails" not in result, result["exceptionDetails"]
        self._listen()
        return result["result"].get("value")

    def until(self, script: str, seconds: float = 40) -> Any:
        """The first value of the expression that is true."""
        deadline = time.monotonic() + seconds
        while not (value := self.run(script)):
            assert time.monotonic() < deadline, f"it never came true: {script}"
            time.sleep(0.05)
        return value

    def text(self, selector: str) -> str:
        text = self.run(f"document.querySelector({json.dumps(selector)})?.textContent")
        assert isinstance(text, str), f"there is no {selector}"
        return text

    def press(self, key: str) -> None:
        for kind in ("keyDown", "keyUp"):
            self.call("Input.dispatchKeyEvent", type=kind, key=key, code=key)

    def type(self, text: str) -> None:
        self.call("Input.insertText", text=text)

    def screenshot(self) -> bytes:
        return base64.b64decode(self.call("Page.captureScreenshot", format="png")["data"])

    def pdf(self) -> bytes:
        return base64.b64decode(self.call("Page.printToPDF", printBackground=True)["data"])

    def hosts(self) -> set[str]:
        """Of everything that it asked for; "" for files and data."""
        self.run("0")
        return {urlsplit(url).hostname or "" for url in self.requested}

    def _listen(self) -> None:
        for event in self._browser.take_events(self._session):
            params = event["params"]
            match event["method"]:
                case "Runtime.exceptionThrown":
                    self.complaints.append(str(params["exceptionDetails"]))
                case "Runtime.consoleAPICalled" if params["type"] in ("error", "warning"):
                    self.complaints.append(str(params["args"]))
                case "Log.entryAdded" if params["entry"]["level"] in ("error", "warning"):
                    self.complaints.append(str(params["entry"]))
                case "Network.requestWillBeSent":
                    self.requested.append(params["request"]["url"])
