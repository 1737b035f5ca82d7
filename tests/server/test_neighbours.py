"""Requests that are refused disturb nobody: a stream that runs beside them goes on."""

from __future__ import annotations

import asyncio
import json
import threading

from tests.helpers import until
from tests.server.conftest import CHAT, COMPLETIONS, Start, error_of
from vmserve.testing import ScriptedTransport

JSON = {"content-type": "application/json", "authorization": "Bearer k"}

#: One of each kind: method, path, headers, body, status.
REFUSED: list[tuple[str, str, dict[str, str], bytes, int]] = [
    ("POST", COMPLETIONS, JSON, b"", 400),
    ("POST", COMPLETIONS, JSON, b"[" * 100_000, 400),
    ("POST", COMPLETIONS, JSON, b'{"prompt": [100000]}', 400),
    ("POST", COMPLETIONS, JSON, json.dumps({"prompt": "x" * 1000}).encode(), 400),
    ("POST", COMPLETIONS, JSON, b'{"prompt": "x", "n": 129}', 400),
    ("POST", CHAT, JSON, b'{"messages": [{"role": "refused", "content": "x"}]}', 400),
    ("POST", COMPLETIONS, {"content-type": "application/json"}, b'{"prompt": "x"}', 401),
    ("POST", COMPLETIONS, JSON, b'{"prompt": "x", "model": "other"}', 404),
    ("GET", COMPLETIONS, JSON, b"", 405),
    ("POST", COMPLETIONS, JSON, json.dumps({"prompt": "x" * 2**22}).encode(), 413),
    ("POST", COMPLETIONS, {**JSON, "content-type": "text/plain"}, b"{}", 415),
    ("GET", "/v1/models", {**JSON, "x-large": "x" * 40_000}, b"", 431),
]


def test_a_stream_beside_all_that_is_refused(start: Start) -> None:
    engine = ScriptedTransport()
    server = start(engine, api_keys=("k",))
    engine.pause = server.on_loop(asyncio.Event)
    events: list[str] = []

    def read() -> None:
        body = {"prompt": "Hi", "stream": True}
        with server.http.stream("POST", COMPLETIONS, json=body, headers=JSON) as response:
            events.extend(line for line in response.iter_lines() if line)

    reader = threading.Thread(target=read)
    reader.start()
    until(lambda: len(engine.running) == 1)
    for method, path, headers, body, status in REFUSED:
        response = server.http.request(method, path, headers=headers, content=body)
        assert response.status_code == status, (path, body[:60], response.text)
        error_of(response)
    assert len(engine.running) == 1
    server.on_loop(engine.pause.set)
    reader.join(30)
    assert events[-1] == "data: [DONE]"
    texts = [json.loads(event[6:])["choices"][0]["text"] for event in events[:-1]]
    assert "".join(texts) == "hello"
    assert engine.aborted == []
