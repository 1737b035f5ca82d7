"""Keys with names, tenants, the routes behind them, TLS."""

from __future__ import annotations

import hashlib
import ssl
from pathlib import Path

import httpx
import pytest

from tests.helpers import until
from tests.support.serving import COMPLETIONS, Logs, Start, bearer, refused
from vmserve import AsyncLLM
from vmserve.client.transports.sealed.handshake import read_key
from vmserve.errors import ConfigurationError, EngineDeadError
from vmserve.server.auth import ApiKey, KeyRing, read_key_file
from vmserve.server.config import ServerConfig
from vmserve.server.net.listen import check_certificate
from vmserve.testing import ScriptedTransport

#: Routes that need no key, whatever the options are.
OPEN = {("GET", "/health"), ("GET", "/live")}
ALICE_AND_BOB = (ApiKey.of("alice", "a"), ApiKey.of("bob", "b"))


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
        for headers in ({}, bearer("x"), {"authorization": "k"}):
            target = path.replace("{model}", "fake")
            response = server.http.request(method, target, headers=headers)
            if (method, path) in OPEN:
                assert response.status_code == 200
            else:
                assert refused(response, 401, path)["type"] == "authentication_error"
                assert response.headers["www-authenticate"] == "Bearer"


def test_files_with_keys_that_others_may_read(tmp_path: Path, caplog: Logs) -> None:
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
    for given, name in (
        (b"Bearer one", "alice"),
        (b"Bearer two:parts", "bob"),
        (b"Bearer three", "alice"),
        (b"Bearer four", None),
        (b"Basic one", None),
        (None, None),
    ):
        caller = keys.caller(given)
        assert (caller and caller.name) == name
    assert sorted(caller.name for caller in keys.callers) == ["alice", "bob"]


def test_key_files_that_are_wrong(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    for text, told in (
        (None, "cannot read"),
        ("", "has no key"),
        ("alice\n", "line 1 .* is not name:key"),
        ("a:b\n:secret\n", "line 2 .* is not name:key"),
        ("alice:sha256:12\n", "64 hexadecimal digits"),
        (f"alice:sha256:{'x' * 64}\n", "64 hexadecimal digits"),
    ):
        if text is not None:
            file.write_text(text)
        with pytest.raises(ConfigurationError, match=told) as caught:
            read_key_file(file)
        assert "secret" not in str(caught.value)


def test_salts_belong_to_whoever_has_the_key() -> None:
    keys = [ApiKey.of("a", "1"), ApiKey.of("b", "2"), ApiKey.of("a", "3")]

    def salts(ring: KeyRing) -> list[str]:
        callers = [ring.caller(b"Bearer " + key) for key in (b"1", b"2", b"3")]
        return [caller.cache_salt(own) for caller in callers if caller for own in ("", "own")]

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
    server = start(engine, named_keys=ALICE_AND_BOB, share_prefix_cache_across_keys=shares)
    for key in "ab":
        reply = server.post(COMPLETIONS, {"prompt": "x", "cache_salt": "s"}, headers=bearer(key))
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
    server = start(engine, named_keys=ALICE_AND_BOB, share_prefix_cache_across_keys=shares)

    def cached(key: str, token: int = 5) -> int:
        body = {"prompt": [token] * 400, "max_tokens": 1}
        usage = server.post(COMPLETIONS, body, headers=bearer(key)).json()["usage"]
        return int(usage["prompt_tokens_details"]["cached_tokens"])

    def stat(name: str) -> int:
        return int(server.http.get("/v1/kv", headers=bearer("a")).json()[name])

    assert cached("a") == 0
    assert cached("a") >= 384
    assert (cached("b") >= 384) == shares
    assert cached("b") >= 384
    until(lambda: stat("used_pages") == 0)
    if not shares:
        for round_number in range(40):  # until the pool is through
            cached("ab"[round_number % 2], 6 + round_number)
        assert stat("pages_zeroed_total") > 0


def test_a_dead_engine_lingers_and_then_ends(start: Start) -> None:
    engine = ScriptedTransport()
    server = start(engine, engine_death_linger=3600)
    assert server.http.get("/health").status_code == 200
    engine.facts.is_dead = True
    engine.died.set_result(None)
    for path in ("/health", "/ready"):
        assert server.http.get(path).status_code == 503
    server.error(COMPLETIONS, {"prompt": "x"}, 503)
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
    certificate, key = str(assets / "cert.pem"), str(assets / "key.pem")
    server = start(ssl_certfile=certificate, ssl_keyfile=key)
    trust = ssl.create_default_context(cafile=certificate)
    with httpx.Client(base_url=f"https://127.0.0.1:{server.port}", verify=trust) as client:
        assert client.get("/health").status_code == 200
        reply = client.post(COMPLETIONS, json={"prompt": "x", "stream": True})
        assert reply.text.endswith("data: [DONE]\n\n")
    with pytest.raises(httpx.RemoteProtocolError):
        server.http.get("/health")  # plain HTTP
    with pytest.raises(ConfigurationError, match="go together"):
        ServerConfig(served_model_names=("m",), ssl_certfile=certificate)
    for wrong in (certificate, str(tmp_path / "nowhere")):
        config = ServerConfig(
            served_model_names=("m",), ssl_certfile=certificate, ssl_keyfile=wrong
        )
        with pytest.raises(ConfigurationError, match=r"ssl_certfile: .* cannot be used"):
            check_certificate(config)
