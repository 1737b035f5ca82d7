"""Several models of real engines: memory, pinned prefixes, a draft model, and what is refused."""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.helpers import until
from tests.server.conftest import Body, Running
from tests.support.serving import ADMIN, Logs, Patch
from vmserve.client.transports.supervised import Supervision
from vmserve.errors import ConfigurationError
from vmserve.models.hub import resolve_model
from vmserve.server.auth import ApiKey, KeyRing
from vmserve.server.config import ServerConfig
from vmserve.server.models import loading
from vmserve.server.models.loading import ModelLoader
from vmserve.server.models.prefixes import Prefixes
from vmserve.server.models.registry import Models
from vmserve.server.models.specs import spec_of
from vmserve.testing import ByteTokenizer
from vmserve.types import PinnedPrefix

pytestmark = pytest.mark.timeout(300)

SHARED: dict[str, Any] = {"max_model_len": 256, "max_num_seqs": 8, "kv_cache_memory": "8MiB"}
SHARED |= {"kv_page_size": "64KiB"}
EMBEDDED = {"model": "vmserve-embedded"}
GREEDY = {"max_tokens": 8, "temperature": 0}
TEXT = "Once upon a time there was a little fox who lived in a forest. " * 3
#: Also what the longest sequence takes.
MIB = 1 << 20


class Server(Running):
    """A server with models of ``tables``, the first of which is loaded."""

    def __init__(self, tables: dict[str, dict[str, Any]]) -> None:
        config = ServerConfig(served_model_names=("a",), admin_api_key="admin")
        loader = ModelLoader(config, config.key_ring(), SHARED, Supervision(restarts=3))
        models = [loader.make(name, table) for name, table in tables.items()]
        self.models = Models(models, loader.make, loader.pool)
        super().__init__(self.models, served_model_names=("a",), admin_api_key="admin")
        self.http.timeout = 120

    def close(self) -> None:
        asyncio.run_coroutine_threadsafe(self.models.shutdown(), self.loop).result(60)
        super().close()

    def change(self, what: str, status: int = 200, **body: Any) -> Body:
        response = self.post(f"/v1/models/{what}", body, headers=ADMIN)
        assert response.status_code == status, response.text
        reply: Body = response.json()
        return reply

    def refused(self, what: str, **body: Any) -> str:
        return str(self.change(what, 400, **body)["error"]["message"])

    def ask(self, model: str, text: str, **params: Any) -> tuple[str, int]:
        """The answer, and how many tokens of the prompt were in the prefix cache."""
        reply = self.complete(model=model, prompt=text, **params)
        cached = reply["usage"]["prompt_tokens_details"]["cached_tokens"]
        return reply["choices"][0]["text"], cached

    def num_cached(self, model: str, text: str) -> int:
        return self.ask(model, text, max_tokens=1)[1]

    def num_whole(self) -> int:
        """Tokens of :data:`TEXT` in whole blocks."""
        return int(self.ok("/tokenize", {"prompt": TEXT})["count"]) // 16 * 16

    def figure(self, name: str, model: str) -> float:
        pattern = rf'^vmserve:{name}\{{[^}}]*model_name="{model}"[^}}]*\}} (\S+)$'
        found = re.search(pattern, self.http.get("/metrics").text, re.MULTILINE)
        assert found is not None, name
        return float(found[1])

    def memory(self, model: str) -> Body:
        rows = self.http.get("/v1/kv/live").json()["models"]
        [row] = [row for row in rows if row["name"] == model]
        memory: Body = row["memory"]
        return memory


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    files = tmp_path_factory.mktemp("files")
    text = files / "fox.txt"
    text.write_text(TEXT)
    model = files / "model"
    shutil.copytree(resolve_model(None), model)
    pinned = {"model": str(model), "pin_prefix": str(text)}
    running = Server({"a": EMBEDDED, "b": pinned})
    yield running
    running.close()


def test_prefixes_of_one_of_several_models(server: Server) -> None:
    """They are there at its first request, after sleep and death, in memory of their own."""
    whole = server.num_whole()
    assert server.num_cached("b", TEXT + "One day") == whole
    assert server.num_cached("a", TEXT + "One day") == 0
    assert server.memory("a")["floor_bytes"] == MIB
    floor = server.memory("b")["floor_bytes"]
    assert server.figure("kv_pool_floor_bytes", "b") == floor
    assert server.figure("kv_pool_recalls_total", "b") >= 0
    assert floor >= MIB + whole * 4096
    assert "pinned prefixes" in server.refused("change", model="b", kv_floor="1MiB")
    server.change("sleep", model="b")
    for terms in ({"kv_cap": "512KiB"}, {"kv_cap": "none"}, {"kv_floor": "16MiB"}):
        assert server.refused("change", model="b", **terms)
    told = server.refused("change", model="b", kv_cap="1MiB")
    assert f"less than the {floor / MIB:.4g} MiB that it needs" in told.replace(",", "")
    response = server.post("/v1/kv/memory", {"kv_cache_memory": "1MiB"}, headers=ADMIN)
    assert (response.status_code, "b needs" in response.text) == (400, True)
    assert server.num_cached("b", TEXT + "The fox") == whole
    assert server.memory("b")["floor_bytes"] == floor
    served = server.models.find("b")
    engine: Any = served.engine
    os.kill(engine.transport.pid, signal.SIGKILL)
    until(lambda: engine.stats().get("engine_restarts_total") == 1 and not engine.facts.is_dead, 60)
    until(lambda: server.on_loop_async(served.fetch_stats).get("pinned_prefixes") == 1, 60)
    assert server.num_cached("b", TEXT + "He saw") == whole


def test_a_model_sleeps_in_the_pause_before_its_restart(server: Server, monkeypatch: Patch) -> None:
    monkeypatch.setattr("vmserve.client.transports.restarts._RESTART_SECONDS", 25.0)
    engine: Any = server.models.find("b").engine
    server.change("wake", model="b")
    os.kill(engine.transport.pid, signal.SIGKILL)
    until(lambda: engine.facts.is_dead and engine.facts.retry_seconds is not None, 60)
    response = server.post("/v1/models/wake", {"model": "b"}, headers=ADMIN)
    assert (response.status_code, int(response.headers["retry-after"]) >= 25) == (503, True)
    assert server.change("sleep", model="b")["state"] == "asleep"
    assert server.change("wake", model="b")["state"] == "ready"  # no pause


def test_models_that_cannot_be_added_change_nothing(server: Server, tmp_path: Path) -> None:
    expected = server.complete(model="a", **GREEDY)["choices"]
    messages, long = tmp_path / "messages.json", tmp_path / "long.txt"
    messages.write_text(json.dumps({"role": "user"}))
    long.write_text(TEXT * 9)
    b = server.change("wake", model="b")["memory"]["floor_bytes"]
    for table, told in (
        ({"name": "b"}, "two models have the name 'b'"),
        ({"model": "/no/such/model"}, "such"),
        ({"options": {"pin_prefix": "none.txt"}}, "model c: pin_prefix: cannot read none.txt"),
        ({"options": {"pin_prefix": 7}}, "model c: pin_prefix: 7 is not a file"),
        ({"options": {"pin_prefix": str(messages)}}, "is not a list of messages"),
        ({"options": {"pin_prefix": [str(long)]}}, "256"),
        ({"options": {"kv_cache_memory": "1MiB"}}, "model c: kv_cache_memory"),
        ({"kv_cap": "512KiB"}, "c: at most 512 KiB of the pool is less than the 1 MiB"),
        (
            {"options": {"max_model_len": 4096}},
            f"a pool of 8 MiB: a needs 1 MiB, b needs {b / MIB:.4g} MiB, c needs 16 MiB, ",
        ),
    ):
        told_here = server.refused("add", **{**EMBEDDED, "name": "c", **table})
        assert told in told_here.replace(str(tmp_path), "")
    assert [card["id"] for card in server.http.get("/v1/models").json()["data"]] == ["a", "b"]
    assert {row.name for row in server.models.pool.state()} == {"a", "b"}
    assert server.complete(model="a", **GREEDY)["choices"] == expected


def test_a_model_whose_files_changed_while_it_slept(server: Server) -> None:
    expected = server.complete(model="b", **GREEDY)["choices"]
    directory = Path(str(server.models.find("b").engine.transport.source._config.model))  # type: ignore[attr-defined]
    weights = directory / "model.safetensors"
    server.change("sleep", model="b")
    away = weights.rename(directory / "away")
    error = server.error("/v1/completions", {"model": "b", "prompt": "x"}, 503)["message"]
    assert error.startswith("The model b did not start: ")
    assert str(directory) not in error
    assert server.complete(model="a", max_tokens=1)
    away.rename(weights)
    config = directory / "config.json"
    kept = config.read_text()
    config.write_text(json.dumps({**json.loads(kept), "max_position_embeddings": 128}))
    assert "128" in server.change("wake", 503, model="b")["error"]["message"]
    config.write_text(kept)
    assert server.change("wake", model="b")["state"] == "ready"
    assert server.complete(model="b", **GREEDY)["choices"] == expected


def test_a_draft_model_of_one_of_several_models(server: Server) -> None:
    prompt = {"prompt": "Once upon a time", "max_tokens": 40, "temperature": 0.7, "seed": 3}
    expected = server.complete(model="a", **prompt)["choices"]
    drafts = {"speculative": "draft-model", "speculative_model": "vmserve-embedded"}
    row = server.change("add", name="d", **EMBEDDED, options=drafts)
    assert row["weight"] == 1
    assert row["memory"]["floor_bytes"] == 2 * MIB  # each model's longest sequence
    assert server.complete(model="d", **prompt)["choices"] == expected
    figures = server.http.get("/v1/kv?model=d").json()
    assert figures["spec_decode_num_accepted_tokens_total"] > 20
    server.change("remove", model="d")


def test_every_isolated_caller_has_its_prefixes() -> None:
    pinned: list[tuple[int, str, str]] = []

    class Engine:
        async def pin_prefix(
            self, token_ids: list[int], *, cache_salt: str = "", isolation: str = ""
        ) -> PinnedPrefix:
            pinned.append((len(token_ids), cache_salt, isolation))
            return PinnedPrefix(0, len(token_ids))

    keys = KeyRing([ApiKey.of("x", "1" * 9), ApiKey.of("y", "2" * 9)])
    texts = {Path("a.txt"): "abc", Path("m.json"): '[{"role": "user", "content": "Hi"}]'}
    prefixes = Prefixes(texts, keys)
    tokens = prefixes.tokens(ByteTokenizer(), None)
    asyncio.run(prefixes.pin(Engine(), tokens))
    salts = {caller.isolation: caller.cache_salt("") for caller in keys.callers}
    assert [each[2] for each in pinned] == ["x", "y", "x", "y"]
    assert all(salt == salts[name] for _, salt, name in pinned)
    assert [each[0] for each in pinned] == prefixes.lengths(tokens)
    assert prefixes.lengths(tokens)[0] == len(ByteTokenizer().encode("abc"))
    with pytest.raises(ConfigurationError, match=r"pin_prefix: m\.json is not a list"):
        Prefixes({Path("m.json"): "{"}, keys).tokens(ByteTokenizer(), None)


def test_models_of_one_directory_keep_their_prefixes_apart(tmp_path: Path) -> None:
    """Two models that differ in a number of their configuration; sleep is a restart."""
    model, kept = tmp_path / "model", tmp_path / "kv"
    shutil.copytree(resolve_model(None), model)
    text = (model / "config.json").read_text()
    config = json.loads(text)
    (model / "config.json").write_text(json.dumps({**config, "rms_norm_eps": 0.01}))
    limit = 1 << 20
    options = {"kv_persist": str(kept), "kv_persist_bytes": limit}
    server = Server({"a": {**EMBEDDED, **options}, "b": {"model": str(model), **options}})

    try:
        whole = server.num_whole()
        answers = {name: server.ask(name, TEXT, **GREEDY) for name in "ab"}
        assert [cached for _, cached in answers.values()] == [0, 0]
        for name in "ab":
            server.change("sleep", model=name)
        for name, (answer, _) in answers.items():
            assert server.ask(name, TEXT, **GREEDY) == (answer, whole)
            assert server.figure("persist_restored_blocks_total", name) == whole // 16
            assert server.figure("persist_read_bytes_total", name) > whole * 4096
            assert 0 < server.figure("persist_bytes", name) <= limit
        assert len(list(kept.iterdir())) >= 2 + 2  # a space for each, and digests of weights
        for number in range(6):
            for name in "ab":
                server.ask(name, f"{number} {TEXT}", **GREEDY)
        for name in "ab":
            server.change("sleep", model=name)
        assert sum(file.stat().st_size for file in kept.glob("*/*.kv")) <= limit
    finally:
        server.close()


# -- what models take together, before the first of them is loaded

FREE = 1000 * MIB
TABLES: dict[str, dict[str, Any]] = {
    "a": EMBEDDED,
    "b": {**EMBEDDED, "preload": False},
    "c": {**EMBEDDED, "preload": False, "quantization": "int8"},
    "int8": {**EMBEDDED, "quantization": "int8"},
    "elsewhere": {"model": "nobody/nothing"},
    "nowhere": {"model": "/no/such/model", "preload": False},
}


def pool_bytes(**shared: Any) -> int:
    shared = {"device": "cpu", **shared}
    specs = [spec_of(name, table, shared) for name, table in TABLES.items()]
    config = ServerConfig(served_model_names=("a",))
    loader = ModelLoader(config, config.key_ring(), shared, Supervision(), specs=specs)
    return loader.pool.size_bytes


def test_weights_of_all_models_are_counted(monkeypatch: Patch, caplog: Logs) -> None:
    monkeypatch.setattr(loading, "available_memory", lambda: (FREE, "in a test"))
    file = sum(path.stat().st_size for path in Path(resolve_model(None)).glob("*.safetensors"))
    # Half of the weights' 2 bytes, and scales; one of those that load later counts.
    assert pool_bytes() == pytest.approx(0.4 * (FREE - 2.53 * file), rel=0.01)
    assert not [each for each in caplog.records if each.levelname == "WARNING"]
    assert pool_bytes(kv_cache_memory="990MiB") == 990 * MIB
    told = caplog.messages[-1]
    assert "19.93 MiB of weights (6.508 MiB a, 6.508 MiB b, 3.455 MiB c, 3.455 MiB int8)" in told
    assert "up to 990 MiB of KV cache, and 1000 MiB are free (in a test)" in told
    assert "--idle-unload" in told
    caplog.clear()
    pool_bytes(kv_cache_memory="980MiB")
    assert not caplog.messages
