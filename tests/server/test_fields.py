"""Whoever adds a field to a request says what its size costs: :mod:`tests.chaos.fields`."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.chaos.fields import FIELDS, attacks_of, entry_of, fields_of
from tests.chaos.fields import Shape as AttackedShape
from tests.engine.interrupting import count_instructions
from vmserve import AsyncLLM
from vmserve.client.client import Client
from vmserve.server.app import create_app
from vmserve.server.config import ServerConfig
from vmserve.server.wire import dump_json
from vmserve.testing import ScriptedTransport


@pytest.fixture(scope="module")
def document() -> dict[str, Any]:
    """With admin routes, which are the most there are."""
    config = ServerConfig(served_model_names=("fake",), admin_api_key="x")
    return create_app(Client(ScriptedTransport()), config).openapi()


def test_every_field_has_an_entry(document: dict[str, Any]) -> None:
    assert {
        f"{owner}.{name}"
        for (owner, name), is_flag in fields_of(document).items()
        if not is_flag and entry_of(owner, name) is None
    } == set()


def test_no_entry_is_of_a_field_that_has_gone(document: dict[str, Any]) -> None:
    known = fields_of(document)
    names = {name for _, name in known} | {f"{owner}.{name}" for owner, name in known}
    assert FIELDS.keys() - names == set()


# -- on the event loop -------------------------------------------------------------------

SHAPE = AttackedShape(context=1024, vocabulary=2048)
ATTACKS = attacks_of(SHAPE)
#: Instructions of a request with 128 choices of one token as a stream, and of each prompt.
OF_A_REQUEST, OF_A_PROMPT = 45_000, 500


class Loop:
    """The application over an engine, on an event loop of this thread: it alone is traced."""

    def __init__(self) -> None:
        self.runner = asyncio.Runner()
        self.engine = self.runner.run(self._load())
        self.app = create_app(self.engine, ServerConfig(served_model_names=("embedded",)))
        transport = httpx.ASGITransport(self.app)
        self.http = httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1", timeout=60)

    @staticmethod
    async def _load() -> AsyncLLM:
        return AsyncLLM(max_model_len=SHAPE.context, kv_cache_memory="64MiB")

    def post(self, path: str, content: bytes) -> httpx.Response:
        headers = {"content-type": "application/json"}
        response = self.runner.run(self.http.post(path, content=content, headers=headers))
        assert response.status_code != 413, "it is refused before its fields are read"
        return response

    def close(self) -> None:
        self.runner.run(self.http.aclose())
        self.runner.run(self.engine.shutdown())
        self.app.state.context.close()
        self.runner.close()


def short_of(name: str) -> tuple[str, bytes]:
    """Path and body of an attack that asks for answers of one token."""
    path, body, *_ = ATTACKS[name]
    short = {key: 1 for key in body if key.startswith("m") and key.endswith("_tokens")}
    return path, dump_json({**body, **short})


@pytest.fixture(scope="module")
def loop() -> Iterator[Loop]:
    loop = Loop()
    loop.post(*short_of("logprob_token_ids 1"))  # what the first of many choices makes, stays
    yield loop
    loop.close()


@pytest.mark.parametrize("name", ATTACKS)
def test_nothing_of_a_client_s_size_is_computed_on_the_event_loop(loop: Loop, name: str) -> None:
    """By instructions of the interpreter, with answers of one token: threads do the rest."""
    _, body, ends, _ = ATTACKS[name]
    replies: list[httpx.Response] = []
    num = count_instructions(lambda: replies.append(loop.post(*short_of(name))))
    [reply] = replies
    assert reply.status_code in ends
    prompts = body.get("prompt", body.get("input"))
    are_several = isinstance(prompts, list) and not isinstance(prompts[0], int)
    num_prompts = len(prompts) if are_several and reply.status_code == 200 else 1
    assert num < OF_A_REQUEST + OF_A_PROMPT * num_prompts
