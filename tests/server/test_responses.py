"""The responses API over a model whose text is known, raw and through the official client."""

from __future__ import annotations

import json
import tracemalloc
from collections.abc import Callable
from typing import Any

import openai
import pytest
from pydantic import BaseModel

from tests.server.conftest import Body, Running, error_of
from vmserve.server.routes import response_store
from vmserve.server.routes.response_store import ResponseStore, StoredResponse
from vmserve.testing import ScriptedTransport

PATH = "/v1/responses"
TOOLS: Any = [{"type": "function", "name": "now", "parameters": {"type": "object"}, "strict": True}]
CALL = 'Wait.<tool_call>{"name": "now", "arguments": {"a": 1}}</tool_call>'

Start = Callable[..., Running]


def test_a_text(start: Start) -> None:
    running = start("hello")
    with running.openai() as client:
        reply = client.responses.create(
            model="fake", input="Hi", instructions="Be brief.", metadata={"k": "v"}, temperature=0.5
        )
    assert reply.output_text == "hello"
    assert (reply.object, reply.status, reply.model) == ("response", "completed", "fake")
    assert (reply.temperature, reply.metadata) == (0.5, {"k": "v"})
    assert running.prompt == "[system]Be brief.|[user]Hi|[assistant]"
    assert reply.usage is not None
    assert (reply.usage.output_tokens, reply.usage.input_tokens_details.cached_tokens) == (6, 0)
    assert reply.usage.total_tokens == reply.usage.input_tokens + 6
    raw = running.ok(PATH, {"input": "Hi"})
    assert raw["usage"]["input_tokens_details"] == {"cached_tokens": 0, "cache_write_tokens": 0}
    assert "user" not in raw
    assert running.ok(PATH, {"input": "Hi", "user": "u"})["user"] == "u"


def test_a_stream_has_the_events_in_order(start: Start) -> None:
    running = start("hey")
    with running.openai() as client:
        events = list(client.responses.create(model="fake", input="Hi", stream=True))
    assert [event.type for event in events] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
        "response.output_text.delta",
        "response.output_text.delta",
        "response.output_text.delta",
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.completed",
    ]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    final: Any = events[-1]
    assert final.response.output_text == "hey"
    assert events[0].type == "response.created"
    assert events[0].response.status == "in_progress"
    raw = list(running.http.post(PATH, json={"input": "x", "stream": True}).iter_lines())
    assert raw[0] == "event: response.created"
    assert "data: [DONE]" not in raw


@pytest.mark.parametrize("stream", [False, True])
def test_calls_of_functions(start: Start, stream: bool) -> None:
    running = start(CALL)
    with running.openai() as client:
        if stream:
            with client.responses.stream(model="fake", input="Hi", tools=TOOLS) as opened:
                types = [event.type for event in opened]
                reply: Any = opened.get_final_response()
            assert types[-5:] == [
                "response.output_item.added",
                "response.function_call_arguments.delta",
                "response.function_call_arguments.done",
                "response.output_item.done",
                "response.completed",
            ]
        else:
            reply = client.responses.create(model="fake", input="Hi", tools=TOOLS)
        message, call = reply.output
        assert message.content[0].text == "Wait."
        assert (call.type, call.name, call.arguments) == ("function_call", "now", '{"a": 1}')
        again = client.responses.create(
            model="fake",
            tools=TOOLS,
            previous_response_id=reply.id,
            input=[{"type": "function_call_output", "call_id": call.call_id, "output": "12:00"}],
        )
    assert again.previous_response_id == reply.id
    engine: Any = running.engine
    assert "[tool]12:00|" in engine.requests[-1][2]["prompt"]


def test_a_conversation_goes_on_without_the_old_instructions(start: Start) -> None:
    running = start("hello")
    first = running.ok(PATH, {"input": "One", "instructions": "A"})
    running.ok(PATH, {"input": "Two", "instructions": "B", "previous_response_id": first["id"]})
    text = running.prompt
    assert text.startswith("[system]B|[user]One|[assistant]")
    assert "hello" in text
    assert text.endswith("[user]Two|[assistant]")
    assert "[system]A" not in text


def test_stored_responses(start: Start) -> None:
    running = start("hello")
    with running.openai() as client:
        kept = client.responses.create(model="fake", input="Hi")
        assert client.responses.retrieve(kept.id).output_text == "hello"
        client.responses.delete(kept.id)
        for gone in (kept, client.responses.create(model="fake", input="Hi", store=False)):
            with pytest.raises(openai.NotFoundError):
                client.responses.retrieve(gone.id)
            with pytest.raises(openai.NotFoundError):
                client.responses.delete(gone.id)
        most = {f"{i:64}": "v" * 512 for i in range(16)}
        kept = client.responses.create(model="fake", input="Hi", metadata=most)
        assert client.responses.retrieve(kept.id).metadata == most
    error = running.error(PATH, {"input": "x", "previous_response_id": "resp_x"}, 404)
    assert error["param"] == "previous_response_id"


@pytest.mark.parametrize("stream", [False, True])
def test_a_response_that_is_not_kept_says_so(
    start: Start, monkeypatch: pytest.MonkeyPatch, stream: bool
) -> None:
    monkeypatch.setattr(response_store, "MAX_STORED_BYTES", ENTRY + 2048)
    running = start("hello")
    for text, kept in (("Hi", True), ("x" * 1000, False)):
        body = {"input": [{"role": "user", "content": text}], "metadata": {"a": text[:500]}}
        if stream:
            lines = running.post(PATH, {**body, "stream": True}).text.splitlines()
            [last] = [line for line in lines if '"type":"response.completed"' in line]
            reply = json.loads(last.removeprefix("data: "))["response"]
        else:
            reply = running.ok(PATH, body)
        assert reply["store"] == kept
        status = 200 if kept else 404
        assert running.http.get(f"{PATH}/{reply['id']}").status_code == status


def test_what_one_key_stores_another_does_not_find(start: Start) -> None:
    running = start("hello", api_keys=("one", "two"))
    with running.openai(api_key="one") as one, running.openai(api_key="two") as two:
        kept = one.responses.create(model="fake", input="secret")
        assert one.responses.retrieve(kept.id).id == kept.id
        with pytest.raises(openai.NotFoundError):
            two.responses.retrieve(kept.id)
        with pytest.raises(openai.NotFoundError):
            two.responses.delete(kept.id)
        with pytest.raises(openai.NotFoundError):
            two.responses.create(model="fake", input="x", previous_response_id=kept.id)
    assert running.http.get(f"{PATH}/{kept.id}").status_code == 401


def test_a_limit_and_a_schema(start: Start) -> None:
    class Answer(BaseModel):
        a: int

    running = start('{"a": 5}')
    with running.openai() as client:
        cut = client.responses.create(model="fake", input="Hi", max_output_tokens=3)
        assert cut.status == "incomplete"
        assert cut.incomplete_details is not None
        assert cut.incomplete_details.reason == "max_output_tokens"
        parsed = client.responses.parse(model="fake", input="Hi", text_format=Answer)
        assert parsed.output_parsed == Answer(a=5)
    engine: Any = running.engine
    assert '"integer"' in engine.requests[-1][1].structured_outputs.json


def test_an_error_in_a_stream(start: Start) -> None:
    engine = ScriptedTransport()
    engine.fail = RuntimeError("secret")
    running = start(engine)
    text = running.http.post(PATH, json={"input": "x", "stream": True}).text
    last = text.strip().split("\n\n")[-1]
    assert last.startswith("event: error\ndata: {")
    assert "secret" not in last
    event = json.loads(last.partition("data: ")[2])
    assert (event["type"], event["code"], event["status"]) == ("error", None, 500)


INPUTS: list[Any] = [None, "", [], ["x"], 5, [{"role": 5, "content": "x"}]]
INPUTS += [[{"type": "image"}], [{"role": "user", "content": 5}], [{"type": "function_call"}]]
INPUTS += [[{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]]


@pytest.mark.parametrize("given", INPUTS)
def test_bad_input(shared: Running, given: Any) -> None:
    assert shared.error(PATH, {"input": given})["param"] == "input"


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"background": True}, "background"),
        ({"conversation": "c"}, "conversation"),
        ({"tools": [{"type": "web_search"}]}, "tools"),
        ({"tools": "x"}, "tools"),
        ({"tools": TOOLS, "tool_choice": {"type": "function", "name": "x"}}, "tool_choice"),
        ({"text": "x"}, "text"),
        ({"text": {"format": {"type": "yaml"}}}, "text.format"),
        ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "text.format"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"metadata": {str(i): "" for i in range(17)}}, "metadata"),
        ({"metadata": {"k" * 65: ""}}, f"metadata.{'k' * 65}.[key]"),
        ({"metadata": {"k": "v" * 513}}, "metadata.k"),
        ({"metadata": {"k": {"nested": {}}}}, "metadata.k"),
        ({"metadata": {"k": 5}}, "metadata.k"),
    ],
)
def test_refusals(shared: Running, body: Body, param: str) -> None:
    response = shared.post(PATH, {"input": "x", **body})
    assert response.status_code == 400
    assert error_of(response)["param"] == param


ENTRY = StoredResponse.of({}, []).num_bytes


class Stored:
    """A store of ten small responses a tenant, and a clock that stands."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, num_tenants: int = 2) -> None:
        monkeypatch.setattr(response_store, "MAX_STORED_BYTES", num_tenants * 10 * ENTRY)
        self.now = 0.0
        self.store = ResponseStore(num_tenants, clock=lambda: self.now)

    def put(self, tenant: str, *names: str, more_bytes: int = 0) -> None:
        for name in names:
            self.store.put(tenant, name, StoredResponse(b"{}" + b" " * more_bytes, b"[]"))

    def known(self, tenant: str) -> str:
        names = "abcdefghijklmnopqrstuvwxyz"
        return "".join(name for name in names if self.store.get(tenant, name) is not None)


def test_the_oldest_give_way_to_the_newest(monkeypatch: pytest.MonkeyPatch) -> None:
    stored = Stored(monkeypatch)
    stored.put("t", *"abcdefghijkl")
    assert stored.known("t") == "cdefghijkl"
    stored.put("t", "m", more_bytes=8 * ENTRY)
    assert stored.known("t") == "lm"
    stored.put("t", "n", more_bytes=10 * ENTRY)
    assert stored.known("t") == "lm"  # larger than all the room: not kept
    assert stored.store.delete("t", "m")
    stored.put("t", *"nopqrstuv")
    assert stored.known("t") == "lnopqrstuv"


def test_a_conversation_is_kept_while_a_request_may_be_as_long(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It grows with each response that goes on from the last."""
    monkeypatch.setattr(response_store, "MAX_BODY_BYTES", 500)
    running = start(ScriptedTransport(max_model_len=100_000))
    last: dict[str, Any] = {}
    for number in range(10):
        if last:
            last = {"previous_response_id": last["id"]}
        last = running.ok(PATH, {"input": f"{number}" + "x" * 50, **last})
        if not last["store"]:
            break
    assert 2 < number < 9
    assert running.http.get(f"{PATH}/{last['id']}").status_code == 404


def test_a_tenant_evicts_its_own_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    stored = Stored(monkeypatch)
    stored.put("one", "a")
    for index in range(1001):
        stored.put("two", f"{index}")
    assert stored.known("one") == "a"
    assert stored.known("two") == ""
    assert stored.store.get("two", "1000") is not None


def test_responses_are_forgotten_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    stored = Stored(monkeypatch)
    stored.put("t", "a")
    stored.now = 1.0
    stored.put("t", "b")
    stored.now = response_store.STORED_SECONDS
    assert stored.known("t") == "b"
    stored.now += 1.0
    assert not stored.store.delete("t", "b")
    stored.put("t", *"cdefghijkl")
    assert stored.known("t") == "cdefghijkl"  # nothing of what is gone is counted


def test_what_is_stored_takes_as_much_memory_as_is_counted() -> None:
    """Small objects within each other took some thirty times the size of their JSON."""
    store = ResponseStore(1)
    num_bytes = 0
    tracemalloc.start()
    try:
        for index in range(18):
            nested: Any = [[{"": {}}] * 20_000]
            stored = StoredResponse.of({"metadata": nested}, [{"role": "user", "content": nested}])
            store.put("t", f"{index}", stored)
            num_bytes += stored.num_bytes
        del nested, stored
        held, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert num_bytes > 5_000_000
    assert held <= num_bytes
