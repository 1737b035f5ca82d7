"""Routes other than generation, and what all routes share: keys, prefixes, errors."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from fastapi.routing import APIRoute

from tests.server.conftest import (
    CHAT,
    COMPLETIONS,
    MESSAGES,
    RESPONSES,
    VALID,
    Body,
    Running,
    Start,
    error_of,
)
from vmserve import __version__
from vmserve.client.client import Client
from vmserve.errors import ConfigurationError
from vmserve.server.app import create_app
from vmserve.server.config import ServerConfig
from vmserve.server.routes.admin import ADMIN_PATHS, MODEL_PATHS
from vmserve.server.routes.live import LIVE_PAGE_PATHS
from vmserve.server.words.openapi_replies import REPLIES
from vmserve.testing import ByteTokenizer, ScriptedTransport

APP = create_app(Client(ScriptedTransport()), ServerConfig(served_model_names=("fake",)))
ROUTES = sorted(
    {
        (method, getattr(route, "path").replace("{model:path}", "fake"))  # noqa: B009
        for route in APP.routes
        for method in (route.methods if isinstance(route, APIRoute) else {"GET"})
    }
)


def test_the_routes_of_the_contract_are_there() -> None:
    pages = "/ /live.css /chat.css /chat.js /text.js /live.js /docs /docs.js /openapi.json"
    status = "/health /live /load /metrics /ping /ready /version /tokenizer_info"
    tokens = "/detokenize /tokenize /invocations"
    versioned = (
        "chat/completions completions embeddings kv kv/live messages messages/count_tokens models "
        "models/fake responses responses/input_tokens responses/{response_id}"
    )
    expected = {*pages.split(), *status.split(), *tokens.split()}
    expected |= {f"/v1/{path}" for path in versioned.split()}
    assert {path for _, path in ROUTES} == expected


# -- keys -------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def keyed() -> Iterator[Running]:
    running = Running(ScriptedTransport(), api_keys=("first", "second"), root_path="/llm")
    yield running
    running.close()


@pytest.mark.parametrize("prefix", ["", "/llm"])
@pytest.mark.parametrize(("method", "path"), ROUTES)
def test_every_route_but_health_and_the_live_page_needs_a_key(
    keyed: Running, method: str, path: str, prefix: str
) -> None:
    wrong = [{}, {"authorization": "Bearer third"}, {"authorization": "Basic first"}]
    for headers in [*wrong, {"authorization": "first"}, {"authorization": "Bearer"}]:
        response = keyed.http.request(method, prefix + path, headers=headers)
        if path in {"/health", "/live", *LIVE_PAGE_PATHS}:
            assert response.status_code == 200
            continue
        assert response.status_code == 401
        if method != "HEAD":
            assert error_of(response, path)["type"] == "authentication_error"
        assert response.headers["www-authenticate"] == "Bearer"
    for key in ("first", "second"):
        headers = {"authorization": f"Bearer {key}"}
        assert keyed.http.request(method, prefix + path, headers=headers).status_code != 401


def test_a_tenant_is_a_key(keyed: Running) -> None:
    """Whomever the client names."""
    body = {"prompt": "x", "user": "somebody"}
    for key, tenant in (("first", "key-0"), ("second", "key-1")):
        headers = {"authorization": f"Bearer {key}"}
        assert keyed.post(f"/llm{COMPLETIONS}", body, headers=headers).status_code == 200
        assert keyed.last[2]["tenant"] == tenant


def test_without_keys_any_header_is_fine(shared: Running) -> None:
    for value in ("", "Bearer x", "nonsense"):
        response = shared.http.get("/v1/models", headers={"authorization": value})
        assert response.status_code == 200


UNDER_ROOT: Body = {"root_path": "/llm"}
KEYED: Body = {"api_keys": ("k",)}
OPENED: Body = {**KEYED, "open_status_routes": True}


@pytest.mark.parametrize(
    ("options", "status", "paths"),
    [
        ({**KEYED, **UNDER_ROOT}, 401, "/nope /version/ //health /llm/llm/version /llmx"),
        (OPENED, 200, "/health /ping /ready /version"),
        (OPENED, 401, "/metrics /v1/models /load /openapi.json"),
        (UNDER_ROOT, 200, "/v1/models /llm/v1/models /openapi.json /llm/openapi.json"),
        (UNDER_ROOT, 404, "/nope /llm/nope /llmv1/models"),
        ({}, 404, "/v1/nope /tokenizer_info"),
        ({}, 405, "/v1/completions"),
    ],
)
def test_what_is_got(serving: Start, options: Body, status: int, paths: str) -> None:
    server = serving(**options)
    for path in paths.split():
        response = server.http.get(f"{server.url}{path}")
        assert response.status_code == status, path
        if status == 404:
            assert error_of(response)["type"] == "NotFoundError"
        if status == 405:
            assert response.headers["allow"] == "POST"
            error_of(response)


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"api_keys": ("",)}, "empty key"),
        ({"root_path": "llm"}, "root_path"),
        ({"root_path": "/llm/"}, "root_path"),
    ],
)
def test_options_that_are_wrong(options: Body, told: str) -> None:
    with pytest.raises(ConfigurationError, match=told):
        ServerConfig(served_model_names=("m",), **options)


def test_preflight_needs_no_key(keyed: Running) -> None:
    headers = {
        "origin": "http://page.example",
        "access-control-request-method": "POST",
        "access-control-request-headers": "authorization,content-type",
    }
    response = keyed.http.options("/v1/chat/completions", headers=headers)
    assert response.status_code == 200
    assert response.headers["access-control-allow-origin"] == "*"
    assert "POST" in response.headers["access-control-allow-methods"]
    # Errors can be read by the page too.
    response = keyed.http.get("/v1/models", headers={"origin": "http://page.example"})
    assert response.status_code == 401
    assert response.headers["access-control-allow-origin"] == "*"


# -- prefix and socket --------------------------------------------------------------------


def test_unix_socket(start: Start, tmp_path: Path) -> None:
    path = tmp_path / "s"
    server = start(uds=str(path))
    assert path.stat().st_mode & 0o777 == 0o600
    assert server.url == f"unix:{path}"
    assert server.complete()["choices"][0]["text"] == "hello"
    server.close()
    assert not path.exists()


def test_status_routes(shared: Running) -> None:
    asked = [shared.http.get(path) for path in ("/health", "/live", "/ping", "/ready")]
    for response in (*asked, shared.http.post("/ping")):
        assert (response.status_code, response.content) == (200, b"")
    assert shared.http.get("/version").json() == {"version": __version__}
    assert shared.http.get("/load").json() == {"server_load": 0}
    assert shared.http.get("/v1/kv").json()["num_requests_running"] == 0


def test_a_dead_engine(start: Start) -> None:
    engine = ScriptedTransport()
    server = start(engine)
    engine.facts.is_dead = True
    for path in ("/health", "/ready", "/ping"):
        response = server.http.get(path)
        assert response.status_code == 503
        assert "stopped" in error_of(response)["message"]
    server.error("/v1/completions", {"prompt": "x"}, 503)
    for path in ("/live", "/metrics"):
        assert server.http.get(path).status_code == 200


def test_head_is_get_without_the_body(shared: Running) -> None:
    for path in ("/", "/docs", "/health", "/ping", "/ready", "/version", "/metrics", "/load"):
        assert shared.http.get(path).status_code == 200
        response = shared.http.head(path)
        assert (response.status_code, response.content) == (200, b"")
    whole, head = shared.http.get("/v1/models"), shared.http.head("/v1/models")
    assert head.headers["content-length"] == whole.headers["content-length"] != "0"
    assert shared.http.head("/v1/completions").status_code == 405


def test_a_slash_at_the_end_changes_nothing(shared: Running) -> None:
    for path in ("/v1/models", "/health", "/version"):
        assert shared.http.get(f"{path}/").text == shared.http.get(path).text
    assert shared.ok(f"{COMPLETIONS}/", {"prompt": "x"})["choices"][0]["text"] == "hello"


@pytest.mark.parametrize("root", ["", "/llm"])
def test_a_base_url_may_leave_out_the_version(serving: Start, root: str) -> None:
    running = serving(api_keys=("k",), root_path=root)
    key = {"authorization": "Bearer k"}
    count = f"{MESSAGES}/count_tokens"
    bodies = {path: VALID[path] for path in (COMPLETIONS, CHAT, RESPONSES, MESSAGES)}
    for path, body in {**bodies, count: {"messages": VALID[CHAT]["messages"]}}.items():
        short = root + path.removeprefix("/v1")
        for given in (short, f"{short}/"):
            assert running.post(given, body, headers=key).status_code == 200, given
        refused = running.post(short, body)
        assert refused.status_code == 401
        assert error_of(refused, path)
    assert running.http.get(f"{root}/models", headers=key).json()["data"][0]["id"] == "fake"
    assert running.http.get(f"{root}/models/fake/", headers=key).json()["id"] == "fake"
    assert running.http.get(f"{root}/responses/x", headers=key).status_code == 404
    assert running.http.get(f"{root}/v1/chat.css").status_code in (401, 404)


TWO_LENGTHS = (
    b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    b"Content-Length: 4\r\nTransfer-Encoding: chunked\r\n\r\n"
    b'e\r\n{"prompt":"x"}\r\n0\r\n\r\n'
)


@pytest.mark.parametrize(
    ("sent", "told"),
    [
        # One that a proxy took by the other length could hold a second request.
        (TWO_LENGTHS, "exclude each other"),
        (b"nonsense\r\n\r\n", ""),
    ],
)
def test_what_is_not_http_ends_the_connection(shared: Running, sent: bytes, told: str) -> None:
    head, body = shared.raw(sent)
    assert head.startswith(b"HTTP/1.1 400")
    json = {"content-type": "application/json"}
    assert told in error_of(httpx.Response(400, content=body, headers=json))["message"]


def test_a_request_line_with_a_whole_url(shared: Running) -> None:
    """As for a proxy; its host counts, not the header's."""
    here = f"127.0.0.1:{shared.port}"
    for target, host, status in (
        (f"http://{here}/v1/models/?x=y", "other.example", 200),
        (f"http://{here}", here, 200),
        ("http://other.example/v1/models", here, 403),
        ("ftp://x/v1/models", here, 404),
    ):
        request = f"GET {target} HTTP/1.1\r\nhost: {host}\r\nconnection: close\r\n\r\n"
        head, body = shared.raw(request.encode())
        assert head.startswith(f"HTTP/1.1 {status} ".encode())
        assert (b'"object":"list"' in body) == ("/v1/models/?x=y" in target)


def test_openapi(shared: Running, keyed: Running) -> None:
    document = shared.http.get("/openapi.json").json()
    assert document["info"]["version"] == __version__
    body = document["paths"]["/v1/completions"]["post"]["requestBody"]
    schema = {"$ref": "#/components/schemas/CompletionRequest"}
    assert body["content"]["application/json"]["schema"] == schema
    n = document["components"]["schemas"]["CompletionRequest"]["properties"]["n"]
    assert n["anyOf"][0] == {"maximum": 128, "minimum": 1, "type": "integer"}
    operations = [
        operation["operationId"]
        for methods in document["paths"].values()
        for operation in methods.values()
    ]
    assert len(operations) == len(set(operations))
    assert REPLIES.keys() == document["paths"].keys() | ADMIN_PATHS | MODEL_PATHS
    [name] = document["paths"]["/v1/models/{model}"]["get"]["parameters"]
    assert name["schema"]["enum"] == ["fake"]
    assert "text/html" in shared.http.get("/docs").headers["content-type"]
    headers = {"authorization": "Bearer first"}
    assert keyed.http.get("/openapi.json", headers=headers).json()["security"] == [{"key": []}]


# -- tokens -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("asked", "text"),
    [
        ({"prompt": ""}, "<s>"),
        ({"prompt": "Hi"}, "<s>Hi"),
        ({"prompt": "Hi", "add_special_tokens": False, "return_token_strs": True}, "Hi"),
        # What chats of other kinds are: test_chat.py.
        ({**VALID[CHAT], "add_special_tokens": True}, "<s>[user]Hi|[assistant]"),
        ({**VALID[CHAT], "tools": [{"function": {"name": "f"}}]}, "T[user]Hi|[assistant]"),
    ],
)
def test_tokenize(shared: Running, asked: Body, text: str) -> None:
    ids = ByteTokenizer().encode(text.removeprefix("<s>"), text.startswith("<s>"))
    strings = ["<0x48>", "<0x69>"] if "return_token_strs" in asked else None
    expected = {"count": len(ids), "max_model_len": 256, "tokens": ids, "token_strs": strings}
    assert shared.ok("/tokenize", asked) == expected


@pytest.mark.parametrize(
    ("path", "asked", "status", "told"),
    [
        ("/invocations", {}, 400, "messages"),
        ("/tokenize", {}, 400, "either prompt or messages"),
        ("/tokenize", {"prompt": "x", "messages": [{"role": "a"}]}, 400, "either prompt or mess"),
        ("/tokenize", {"prompt": ["x"]}, 400, "prompt"),
        ("/tokenize", {"prompt": "x", "model": "y"}, 404, "does not exist"),
        ("/detokenize", {"tokens": [259]}, 400, "out of vocabulary"),
        *(
            ("/detokenize", {"tokens": tokens}, 400, "tokens")
            for tokens in ([-1], ["1"], [1.0], None, "x")
        ),
    ],
)
def test_tokens_that_are_wrong(
    shared: Running, path: str, asked: Body, status: int, told: str
) -> None:
    assert told in shared.error(path, asked, status)["message"]


def test_tokenizer_info(serving: Start) -> None:
    server = serving(tokenizer_info={"tokenizer_class": "T"})
    assert server.http.get("/tokenizer_info").json() == {"tokenizer_class": "T"}
