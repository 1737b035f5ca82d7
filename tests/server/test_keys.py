"""Keys with names, tenants, the routes behind them, TLS."""

from __future__ import annotations

import hashlib
import ssl
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest

from tests.helpers import until
from tests.server.conftest import Running, error_of
from vmserve import AsyncLLM
from vmserve.client.transports.sealed.handshake import read_key
from vmserve.errors import ConfigurationError, EngineDeadError
from vmserve.server.auth import ApiKey, KeyRing, read_key_file
from vmserve.server.config import ServerConfig
from vmserve.server.net.listen import check_certificate
from vmserve.testing import ScriptedTransport

Start = Callable[..., Running]
#: Routes that need no key, whatever the options are.
OPEN = {("GET", "/health"), ("GET", "/live")}


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


def test_every_route_needs_a_key(start: Start) -> None:
    """Whatever routes there are: a new one is closed unless somebody opens it here."""
    server = start(api_keys=("k",))
    schema = server.http.get("/openapi.json", headers=bearer("k")).json()
    routes = {
        (method.upper(), path) for path, methods in schema["paths"].items() for method in methods
    }
    routes |= {("GET", "/openapi.json"), ("GET", "/nope"), ("POST", "/nope")}
    assert len(routes) > 15
    for method, path in sorted(routes):
        target = path.replace("{model}", "fake")
        for headers in ({}, bearer("x"), {"authorization": "k"}):
            response = server.http.request(method, target, headers=headers)
            if (method, path) in OPEN:
                assert response.status_code == 200
            else:
                assert response.status_code == 401, (method, path)
                assert error_of(response, path)["type"] == "authentication_error"
                assert response.headers["www-authenticate"] == "Bearer"


def test_files_with_keys_that_others_may_read(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "keys"
    file.write_text("alice:sixteen letters are enough")
    for read in (read_key_file, lambda path: read_key(path, "api_key_file")):
        for mode, is_told in ((0o600, False), (0o400, False), (0o644, True), (0o640, True)):
            caplog.clear()
            file.chmod(mode)
            read(file)
            told = f"api_key_file: other users may use {file} (mode {mode:04o}): chmod 600 it"
            assert (told in caplog.text) == is_told


def test_a_key_file(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    digest = hashlib.sha256(b"two:parts").hexdigest()
    file.write_text(f"# who\n\nalice:one\nbob:sha256:{digest.upper()}\nalice: three \n")
    keys = KeyRing(read_key_file(file))
    names = {}
    for key in (b"one", b"two:parts", b"three"):
        caller = keys.caller(b"Bearer " + key)
        assert caller is not None
        names[key] = caller.name
    assert names == {b"one": "alice", b"two:parts": "bob", b"three": "alice"}
    assert keys.caller(b"Bearer four") is None
    assert keys.caller(b"Basic one") is None
    assert keys.caller(None) is None
    assert sorted(caller.name for caller in keys.callers) == ["alice", "bob"]


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("", "has no key"),
        ("alice\n", "line 1 .* is not name:key"),
        ("a:b\n:secret\n", "line 2 .* is not name:key"),
        ("alice:sha256:12\n", "64 hexadecimal digits"),
        (f"alice:sha256:{'x' * 64}\n", "64 hexadecimal digits"),
    ],
)
def test_key_files_that_are_wrong(tmp_path: Path, text: str, told: str) -> None:
    file = tmp_path / "keys"
    file.write_text(text)
    with pytest.raises(ConfigurationError, match=told) as refused:
        read_key_file(file)
    assert "secret" not in str(refused.value)
    with pytest.raises(ConfigurationError, match="cannot read"):
        read_key_file(tmp_path / "nowhere")


def test_salts_belong_to_whoever_has_the_key() -> None:
    keys = [ApiKey.of("a", "1"), ApiKey.of("b", "2"), ApiKey.of("a", "3")]

    def salts(ring: KeyRing) -> list[str]:
        found = []
        for key in (b"1", b"2", b"3"):
            caller = ring.caller(b"Bearer " + key)
            assert caller is not None
            found += [caller.cache_salt(""), caller.cache_salt("own")]
        return found

    ring = KeyRing(keys)
    given = salts(ring)
    assert given[:2] == given[4:]  # two keys of one tenant
    assert len(set(given)) == 4
    assert not set(salts(KeyRing(keys))) & set(given)  # another server cannot tell them
    shared = KeyRing(keys, share_prefix_cache=True)
    assert salts(shared) == ["", "own"] * 3
    assert {caller.isolation for caller in shared.callers} == {""}
    assert {caller.isolation for caller in ring.callers} == {"a", "b"}


@pytest.mark.parametrize("shares", [False, True])
def test_tenants_reach_the_engine(start: Start, shares: bool) -> None:
    engine = ScriptedTransport()
    keys = (ApiKey.of("alice", "a"), ApiKey.of("bob", "b"))
    server = start(engine, named_keys=keys, share_prefix_cache_across_keys=shares)
    for key in "ab":
        reply = server.http.post(
            "/v1/completions", json={"prompt": "x", "cache_salt": "s"}, headers=bearer(key)
        )
        assert reply.status_code == 200
    alice, bob = (extra for _, _, extra in engine.requests)
    assert (alice["tenant"], bob["tenant"]) == ("alice", "bob")
    if shares:
        assert alice["cache_salt"] == bob["cache_salt"] == "s"
        assert "isolation" not in alice
    else:
        assert alice["cache_salt"] != bob["cache_salt"]
        assert (alice["isolation"], bob["isolation"]) == ("alice", "bob")


@pytest.mark.parametrize("shares", [False, True])
def test_what_tenants_leave_is_seen_by_nobody(start: Start, shares: bool) -> None:
    """The same prompt from two keys: found in the cache of one's own only, and pages are zeroed
    when they change hands."""
    engine = AsyncLLM(kv_cache_memory="16MiB", max_model_len=1024, max_num_seqs=2)
    keys = (ApiKey.of("alice", "a"), ApiKey.of("bob", "b"))
    server = start(engine, named_keys=keys, share_prefix_cache_across_keys=shares)
    body = {"prompt": [5] * 400, "max_tokens": 1}

    def cached(key: str) -> int:
        reply = server.http.post("/v1/completions", json=body, headers=bearer(key)).json()
        return int(reply["usage"]["prompt_tokens_details"]["cached_tokens"])

    def stats() -> dict[str, int]:
        found: dict[str, int] = server.http.get("/v1/kv", headers=bearer("a")).json()
        return found

    assert cached("a") == 0
    assert cached("a") >= 384
    assert (cached("b") >= 384) == shares
    assert cached("b") >= 384
    until(lambda: stats()["used_pages"] == 0)
    if not shares:
        for round_number in range(40):  # until the pool is through
            body["prompt"] = [6 + round_number] * 400
            cached("ab"[round_number % 2])
        assert stats()["pages_zeroed_total"] > 0


def test_a_dead_engine_lingers_and_then_ends(start: Start) -> None:
    engine = ScriptedTransport()
    server = start(engine, engine_death_linger=3600)
    assert server.http.get("/health").status_code == 200
    engine.facts.is_dead = True
    engine.died.set_result(None)
    for path in ("/health", "/ready"):
        assert server.http.get(path).status_code == 503
    server.error("/v1/completions", {"prompt": "x"}, 503)
    assert server.death is None
    server.begin_stop()
    brief = start(engine, engine_death_linger=0.1)  # this one ends by itself
    for each in (server, brief):
        each.join()
        assert isinstance(each.death, EngineDeadError)
        with pytest.raises(httpx.ConnectError):
            httpx.get(f"{each.url}/health")


def test_tls(start: Start, tmp_path: Path) -> None:
    # Made for these tests: it is good for 127.0.0.1 only, and trusted by nobody.
    assets = Path(__file__).parents[1] / "assets" / "tls"
    certificate, key = assets / "cert.pem", assets / "key.pem"
    server = start(ssl_certfile=str(certificate), ssl_keyfile=str(key))
    trust = ssl.create_default_context(cafile=str(certificate))
    with httpx.Client(base_url=f"https://127.0.0.1:{server.port}", verify=trust) as client:
        assert client.get("/health").status_code == 200
        reply = client.post("/v1/completions", json={"prompt": "x", "stream": True})
        assert reply.text.endswith("data: [DONE]\n\n")
    with pytest.raises(httpx.RemoteProtocolError):
        server.http.get("/health")  # plain HTTP
    with pytest.raises(ConfigurationError, match="go together"):
        ServerConfig(served_model_names=("m",), ssl_certfile=str(certificate))
    for wrong in (certificate, tmp_path / "nowhere"):
        config = ServerConfig(
            served_model_names=("m",), ssl_certfile=str(certificate), ssl_keyfile=str(wrong)
        )
        with pytest.raises(ConfigurationError, match=r"ssl_certfile: .* cannot be used"):
            check_certificate(config)
