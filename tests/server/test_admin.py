"""Routes that change how the server runs: who may call them, and what comes of it."""

from __future__ import annotations

from typing import Any

import pytest

from tests.clients import ProcessClient
from tests.server.conftest import Running
from tests.support.serving import ADMIN, Start, bearer, later, refused
from vmserve.errors import ConfigurationError
from vmserve.server.config import ServerConfig
from vmserve.server.routes.admin import ADMIN_PATHS, ENGINE_PATHS, MODEL_PATHS
from vmserve.testing import ScriptedTransport

MEMORY = "/v1/kv/memory"


@pytest.mark.parametrize("keys", [(), ("user",)], ids=["open", "keys"])
def test_they_need_the_admin_key_which_opens_nothing_else(
    start: Start, keys: tuple[str, ...]
) -> None:
    engine = ScriptedTransport()
    server = start(engine, api_keys=keys, admin_api_key="admin")
    for path in ADMIN_PATHS:
        for headers in ({}, bearer("user"), {"x-api-key": "wrong"}):
            response = server.post(path, {"kv_cache_memory": "4GiB"}, headers=headers)
            assert "admin key" in refused(response, 401)["message"]
        assert server.http.get(path, headers=ADMIN).status_code == 405
    assert (engine.num_resets, engine.kv_cache_memory) == (0, 0)
    assert server.http.get("/version", headers=ADMIN).status_code == (401 if keys else 200)
    for path in ("/reset_prefix_cache", "/flush_cache"):
        response = server.http.post(path, headers={"x-api-key": "admin"})
        assert (response.status_code, response.content) == (200, b"")
    reply = server.post(MEMORY, {"kv_cache_memory": "4GiB"}, headers=ADMIN)
    assert reply.json() == {"kv_cache_memory": 4096}
    assert (engine.num_resets, engine.kv_cache_memory) == (2, "4GiB")


def test_they_come_with_the_admin_key(start: Start) -> None:
    server = start()
    added = start(admin_api_key="admin").paths - server.paths
    of_engines = {path for path in added if path.startswith(ENGINE_PATHS)}
    assert (added - of_engines, len(of_engines)) == (ADMIN_PATHS | MODEL_PATHS, 3)
    for path in ADMIN_PATHS:
        assert server.http.post(path, headers=ADMIN).status_code == 404
    assert not ADMIN_PATHS & server.http.get("/openapi.json").json()["paths"].keys()
    with pytest.raises(ConfigurationError, match="admin_api_key: an empty key"):
        ServerConfig(served_model_names=("m",), admin_api_key="")


def test_sizes_that_cannot_be(start: Start) -> None:
    server = start(admin_api_key="admin")
    for size in (None, 0, -1, 1.5, True, "", "x" * 33, [1], 2**63):
        error = refused(server.post(MEMORY, {"kv_cache_memory": size}, headers=ADMIN))
        assert error["param"].startswith("kv_cache_memory"), size
    error = refused(server.post(MEMORY, {"kv_cache_memory": "1KiB"}, headers=ADMIN))
    assert error["message"] == "raise --kv-cache-memory to 2KiB"
    assert error["param"] == "kv_cache_memory"


def test_a_real_engine_under_load() -> None:
    """Memory falls and rises, the cache is cleared, pins come back: streams end as they would."""
    engine = ProcessClient(
        kv_cache_memory="64MiB", max_model_len=512, max_num_seqs=8, kv_page_size="64KiB"
    )
    server = Running(engine, served_model_names=("m",), admin_api_key="admin")
    story = {"prompt": "Once upon a time", "max_tokens": 200, "temperature": 0, "ignore_eos": True}

    def kv(name: str) -> float:
        figure: float = server.http.get("/v1/kv").json()[name]
        return figure

    def change(path: str, **body: Any) -> Any:
        response = server.post(path, body, headers=ADMIN)
        assert response.status_code == 200, response.text
        return response

    try:
        head = list(range(10, 74))
        pin = server.on_loop_async(lambda: engine.pin_prefix(head))
        assert pin.num_tokens == len(head)
        expected = server.complete(**story)["choices"]
        replies = [later(server.complete, **story) for _ in range(6)]
        while not all(reply.done() for reply in replies):
            assert change(MEMORY, kv_cache_memory="3MiB").json() == {"kv_cache_memory": 3 << 20}
            assert kv("limit_pages") * kv("page_bytes") == 3 << 20
            change("/reset_prefix_cache")
            assert change(MEMORY, kv_cache_memory=64 << 20).json() == {"kv_cache_memory": 64 << 20}
        assert [reply.result()["choices"] for reply in replies] == [expected] * 6
        assert kv("pinned_prefixes") == 1
        error = refused(server.post(MEMORY, {"kv_cache_memory": 65536}, headers=ADMIN))
        assert "raise --kv-cache-memory to" in error["message"]
        text = server.http.get("/metrics").text
        assert f'vmserve:limit_pages{{engine="0",model_name="m"}} {kv("limit_pages")}' in text
        hits = kv("prefix_cache_hits_total")
        server.complete(prompt=[*head, 5], max_tokens=1)
        assert kv("prefix_cache_hits_total") - hits == len(head)
    finally:
        server.close()
