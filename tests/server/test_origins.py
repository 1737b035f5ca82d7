"""Pages of other sites, and names that are not ours: what a server without keys refuses."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from tests.server.conftest import Running
from tests.support.serving import COMPLETIONS, Start, refused
from vmserve.errors import ConfigurationError
from vmserve.server.access.origins import OriginPolicy
from vmserve.server.config import ServerConfig
from vmserve.server.errors import ApiError

EVIL = {"origin": "http://evil.example"}
PREFLIGHT = {"access-control-request-method": "POST"}
KEYS: Any = {"api_keys": ("k",)}
ALLOWED = "access-control-allow-origin"


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
    assert allows(host, **KEYS)


@pytest.mark.parametrize("host", FOREIGN)
def test_a_name_made_to_resolve_to_loopback(host: str) -> None:
    assert not allows(host)
    assert not allows(host, f"http://{host}")  # DNS rebinding: the page's own site
    # A key protects by itself; elsewhere than on loopback there are names that we do not know.
    for options in (KEYS, {"host": "0.0.0.0"}, {"uds": "/s"}, {"allowed_hosts": ("*",)}):
        assert allows(host, **options)


def test_hosts_that_are_allowed() -> None:
    asked: Any = {"allowed_hosts": ("llm.example",)}
    assert allows("llm.example:443", **asked)
    assert allows("LLM.example", "https://llm.example", **asked)
    assert allows("localhost", **asked)
    assert allows("box.example", host="box.example", **asked)
    # Asked for, it holds for every server.
    for options in ({}, KEYS, {"host": "0.0.0.0"}):
        assert not allows("other.example", **options, **asked)


@pytest.mark.parametrize(
    ("origin", "allowed"),
    [
        ("http://localhost:3000", True),
        ("https://127.0.0.1", True),
        ("http://[::1]:5173", True),
        ("http://app.localhost", True),
        ("http://evil.example", False),
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
    assert allows("localhost:8000", origin, **KEYS)
    for listed in ("*", origin) if "://" in origin else ("*",):
        assert allows("localhost:8000", origin, allowed_origins=(listed,))


def test_pages_of_the_server_itself() -> None:
    assert allows("192.0.2.1:8000", "http://192.0.2.1:8000", host="0.0.0.0")
    assert not allows("192.0.2.1:8000", "http://192.0.2.1:9000", host="0.0.0.0")
    # A list given to a server with keys is all that it allows.
    assert not allows("a:1", EVIL["origin"], **KEYS, allowed_origins=("http://a",))


def test_pages_over_http(shared: Running) -> None:
    for path in (COMPLETIONS, "/v1/messages", "/nope"):
        answer = shared.post(path, {"prompt": "x"}, headers=EVIL)
        assert "--allowed-origin http://evil.example" in refused(answer, 403, path)["message"]
        assert ALLOWED not in answer.headers
    for path in ("/", "/health", "/v1/kv/live"):
        assert shared.http.get(path, headers=EVIL).status_code == 403
        answer = shared.http.get(path, headers={"host": "evil.example"})
        assert "--allowed-host evil.example" in refused(answer, 403)["message"]
    answer = shared.http.options(COMPLETIONS, headers=EVIL | PREFLIGHT)
    assert answer.status_code == 403
    assert ALLOWED not in answer.headers
    assert shared.http.get("/v1/kv/live", headers={"origin": shared.url}).status_code == 200


def test_cors_for_pages_of_loopback_and_for_those_that_are_allowed(
    shared: Running, start: Start
) -> None:
    server = start(allowed_origins=("https://app.example",))
    for running, origin in ((shared, "http://localhost:3000"), (server, "https://app.example")):
        page = {"origin": origin}
        for answer in (
            running.http.options(COMPLETIONS, headers=page | PREFLIGHT),
            running.post(COMPLETIONS, {"prompt": "x"}, headers=page),
        ):
            assert answer.status_code == 200
            assert answer.headers[ALLOWED] == origin
        assert answer.headers["vary"] == "Origin"
    assert server.http.get("/v1/models", headers=EVIL).status_code == 403


def test_two_headers_that_say_who_calls(start: Start) -> None:
    server = start(**KEYS)
    for name in ("authorization", "x-api-key", "origin"):
        for values in (("Bearer k", "Bearer wrong"), ("Bearer wrong", "Bearer k"), ("k", "k")):
            headers = httpx.Headers([(name, value) for value in values])
            answer = server.http.get("/v1/models", headers=headers)
            assert f"2 {name} headers" in refused(answer)["message"]


@pytest.mark.parametrize(
    ("option", "value"),
    [
        *(("allowed_origins", each) for each in ("evil.example", "http://a/path", "http://A", "")),
        *(("allowed_hosts", each) for each in ("http://a", "a:8000", "A", "*.a")),
    ],
)
def test_options_that_are_none(option: str, value: str) -> None:
    with pytest.raises(ConfigurationError, match=option.removesuffix("s")):
        ServerConfig(served_model_names=("m",), **{option: (value,)})  # type: ignore[arg-type]
