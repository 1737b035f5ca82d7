"""Pages of other sites, and names that are not ours: what a server without keys refuses."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import httpx
import pytest

from tests.server.conftest import Running, error_of
from vmserve.errors import ConfigurationError
from vmserve.server.access.origins import OriginPolicy
from vmserve.server.config import ServerConfig
from vmserve.server.errors import ApiError

Start = Callable[..., Running]
EVIL = "http://evil.example"
PREFLIGHT = {"access-control-request-method": "POST"}


def allows(called: str | None, origin: str | None = None, **options: Any) -> bool:
    policy = OriginPolicy(ServerConfig(served_model_names=("m",), **options))
    given = {"host": called, "origin": origin}
    headers = [(name.encode(), value.encode()) for name, value in given.items() if value]
    try:
        policy.check({"headers": headers})
    except ApiError:
        return False
    return True


OURS = ["localhost", "LOCALHOST:8000", "localhost.", "a.localhost", "127.0.0.1:8000", "[::1]:1"]
FOREIGN = ["evil.example", "evil.example:8000", "localhost.evil.example", "x@localhost", "[", "x y"]


@pytest.mark.parametrize("host", [None, *OURS, "192.0.2.1"])
def test_names_that_are_ours(host: str | None) -> None:
    assert allows(host)
    assert allows(host, api_keys=("k",))


@pytest.mark.parametrize("host", FOREIGN)
def test_a_name_made_to_resolve_to_loopback(host: str) -> None:
    assert not allows(host)
    assert not allows(host, f"http://{host}")  # DNS rebinding: the page's own site
    # A key protects by itself; elsewhere than on loopback there are names that we do not know.
    assert allows(host, api_keys=("k",))
    assert allows(host, host="0.0.0.0")
    assert allows(host, uds="/s")
    assert allows(host, allowed_hosts=("*",))


def test_hosts_that_are_allowed() -> None:
    asked: Any = {"allowed_hosts": ("llm.example",)}
    assert allows("llm.example:443", **asked)
    assert allows("LLM.example", "https://llm.example", **asked)
    assert allows("localhost", **asked)
    assert not allows("other.example", **asked)
    # Asked for, it holds for every server.
    assert not allows("other.example", api_keys=("k",), **asked)
    assert not allows("other.example", host="0.0.0.0", **asked)
    assert allows("box.example", host="box.example", **asked)


@pytest.mark.parametrize(
    ("origin", "allowed"),
    [
        ("http://localhost:3000", True),
        ("https://127.0.0.1", True),
        ("http://[::1]:5173", True),
        ("http://app.localhost", True),
        (EVIL, False),
        ("null", False),
        ("", True),
        ("http://localhost.evil.example", False),
        ("http://evil.example:8000", False),
        ("chrome-extension://localhost", False),
        ("localhost", False),
    ],
)
def test_pages_that_are_allowed(origin: str, allowed: bool) -> None:
    assert allows("localhost:8000", origin) == allowed
    assert allows("192.0.2.1:8000", origin, host="0.0.0.0") == allowed
    assert allows("localhost:8000", origin, api_keys=("k",))
    assert allows("localhost:8000", origin, allowed_origins=("*",))
    if "://" in origin:
        assert allows("localhost:8000", origin, allowed_origins=(origin,))


def test_pages_of_the_server_itself() -> None:
    assert allows("192.0.2.1:8000", "http://192.0.2.1:8000", host="0.0.0.0")
    assert not allows("192.0.2.1:8000", "http://192.0.2.1:9000", host="0.0.0.0")
    # A list given to a server with keys is all that it allows.
    assert not allows("a:1", EVIL, api_keys=("k",), allowed_origins=("http://a",))


def test_pages_over_http(shared: Running) -> None:
    body = {"prompt": "x"}
    for path in ("/v1/completions", "/v1/messages", "/nope"):
        answer = shared.post(path, body, headers={"origin": EVIL})
        assert answer.status_code == 403
        error = error_of(answer, path)
        assert "--allowed-origin http://evil.example" in error["message"]
        assert "access-control-allow-origin" not in answer.headers
    for path in ("/", "/health", "/v1/kv/live"):
        assert shared.http.get(path, headers={"origin": EVIL}).status_code == 403
        answer = shared.http.get(path, headers={"host": "evil.example"})
        assert answer.status_code == 403
        assert "--allowed-host evil.example" in error_of(answer)["message"]
    answer = shared.http.options("/v1/completions", headers={"origin": EVIL, **PREFLIGHT})
    assert answer.status_code == 403
    assert "access-control-allow-origin" not in answer.headers
    mine = shared.http.get("/v1/kv/live", headers={"origin": shared.url})
    assert mine.status_code == 200


def test_cors_for_pages_of_loopback(shared: Running) -> None:
    page = {"origin": "http://localhost:3000"}
    answer = shared.http.options("/v1/completions", headers=page | PREFLIGHT)
    assert answer.status_code == 200
    assert answer.headers["access-control-allow-origin"] == page["origin"]
    answer = shared.post("/v1/completions", {"prompt": "x"}, headers=page)
    assert answer.status_code == 200
    assert answer.headers["access-control-allow-origin"] == page["origin"]
    assert answer.headers["vary"] == "Origin"


def test_origins_that_are_allowed_over_http(start: Start) -> None:
    server = start(allowed_origins=("https://app.example",))
    page = {"origin": "https://app.example"}
    answer = server.http.options("/v1/completions", headers=page | PREFLIGHT)
    assert answer.headers["access-control-allow-origin"] == page["origin"]
    assert server.http.get("/v1/models", headers=page).status_code == 200
    assert server.http.get("/v1/models", headers={"origin": EVIL}).status_code == 403


@pytest.mark.parametrize("name", ["authorization", "x-api-key", "origin"])
def test_two_headers_that_say_who_calls(start: Start, name: str) -> None:
    server = start(api_keys=("k",))
    for values in (("Bearer k", "Bearer wrong"), ("Bearer wrong", "Bearer k"), ("k", "k")):
        headers = httpx.Headers([(name, value) for value in values])
        answer = server.http.get("/v1/models", headers=headers)
        assert answer.status_code == 400
        assert f"2 {name} headers" in error_of(answer)["message"]


@pytest.mark.parametrize(
    "options",
    [
        {"allowed_origins": ("evil.example",)},
        {"allowed_origins": ("http://a/path",)},
        {"allowed_origins": ("http://A",)},
        {"allowed_origins": ("",)},
        {"allowed_hosts": ("http://a",)},
        {"allowed_hosts": ("a:8000",)},
        {"allowed_hosts": ("A",)},
        {"allowed_hosts": ("*.a",)},
    ],
)
def test_options_that_are_none(options: Any) -> None:
    [name] = options
    with pytest.raises(ConfigurationError, match=name.removesuffix("s")):
        ServerConfig(served_model_names=("m",), **options)
