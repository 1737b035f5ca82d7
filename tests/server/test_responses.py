"""The responses API over a model whose text is known, raw and through the official client."""

from __future__ import annotations

import json
import tracemalloc
from itertools import groupby
from typing import Any

import openai
import pytest
from pydantic import BaseModel

from tests.server.conftest import RESPONSES, Body, Start
from tests.server.test_tools import CODE, LARK, THINKS, THOUGHT
from vmserve.server import wire
from vmserve.server.routes import response_store
from vmserve.server.routes.response_store import ResponseStore, StoredResponse
from vmserve.testing import ScriptedTransport

FUNCTION = {"type": "function", "name": "now", "parameters": {"type": "object"}, "strict": True}
TOOLS: Any = [{"type": "custom", "name": "run"}, FUNCTION]
CALL = '<tool_call>{"name": "now", "arguments": {"a": 1}}</tool_call>'
WRITTEN = json.dumps({"name": "run", "arguments": {"input": CODE}}, ensure_ascii=False)
ENTRY = StoredResponse.of({}, []).num_bytes

#: The events of each type of item, of which deltas come several times.
EVENTS = {
    "message": "content_part.added output_text.delta output_text.done content_part.done",
    "reasoning": "reasoning_text.delta reasoning_text.done",
    "function_call": "function_call_arguments.delta function_call_arguments.done",
    "custom_tool_call": "custom_tool_call_input.delta custom_tool_call_input.done",
}


def said(item: Any) -> tuple[str, str, str]:
    """The type of an item, what it calls, and its text."""
    match item.type:
        case "function_call":
            return item.type, item.name, item.arguments
        case "custom_tool_call":
            return item.type, item.name, item.input
    [part] = item.content
    return item.type, "", part.text


NOW = ("function_call", "now", '{"a": 1}')
RUN = ("custom_tool_call", "run", CODE)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("text", "options", "items"),
    [
        ("hey", {}, [("message", "", "hey")]),
        (f"Wait.{CALL}", {}, [("message", "", "Wait."), NOW]),
        (f"I do.<tool_call>{WRITTEN}</tool_call>{CALL}", {}, [("message", "", "I do."), RUN, NOW]),
        (THOUGHT, THINKS, [("reasoning", "", "well"), ("message", "", "yes")]),
    ],
)
def test_items(
    serving: Start, text: str, options: Body, items: list[tuple[str, str, str]], stream: bool
) -> None:
    """Whole and streamed; a conversation goes on from them, kept or sent again."""
    running = serving(text, **options)
    client = running.openai()
    asked: Any = {"model": "fake", "tools": TOOLS}
    if stream:
        with client.responses.stream(input="Hi", **asked) as opened:
            events: list[Any] = list(opened)
            reply: Any = opened.get_final_response()
        expected = ["created", "in_progress"]
        for kind, _, _ in items:
            expected += ["output_item.added", *EVENTS[kind].split(), "output_item.done"]
        assert [kind for kind, _ in groupby(event.type for event in events)] == [
            f"response.{event}" for event in [*expected, "completed"]
        ]
        texts = [event.delta for event in events if event.type.endswith(".delta")]
        assert "".join(texts) == "".join(text for _, _, text in items)
        assert len(texts) > len(items)
        assert [event.sequence_number for event in events] == list(range(len(events)))
        assert events[0].response.status == "in_progress"
        assert events[-1].response.output_text == reply.output_text
    else:
        reply = client.responses.create(input="Hi", **asked)
    assert [said(item) for item in reply.output] == items
    results: list[Any] = [
        {"type": f"{item.type}_output", "call_id": item.call_id, "output": "12:00"}
        for item in reply.output
        if item.type.endswith("_call")
    ]
    results.append({"role": "user", "content": "So?"})
    history: Any = [{"role": "user", "content": "Hi"}, *(i.model_dump() for i in reply.output)]
    again = client.responses.create(input=results, previous_response_id=reply.id, **asked)
    assert again.previous_response_id == reply.id
    text = "".join(text for kind, _, text in items if kind == "message")
    tools = "[tool]12:00|" * (len(results) - 1)
    assert running.prompt == f"TT[user]Hi|[assistant]{text}|{tools}[user]So?|[assistant]"
    counted = client.responses.input_tokens.count(
        input=results, previous_response_id=reply.id, **asked
    )
    assert counted.input_tokens == len(running.prompt)
    client.responses.create(input=[*history, *results], **asked)
    assert running.prompt.startswith("TT[user]Hi|[assistant]")
    assert running.prompt.endswith(f"{tools}[user]So?|[assistant]")


def test_fields_of_a_response(serving: Start) -> None:
    running = serving("hello")
    asked: Any = {"instructions": "Be brief.", "metadata": {"k": "v"}, "temperature": 0.5}
    with running.openai() as client:
        reply: Any = client.responses.create(model="fake", input="Hi", **asked)
    assert (reply.object, reply.status, reply.model) == ("response", "completed", "fake")
    assert {name: getattr(reply, name) for name in asked} == asked
    assert running.prompt == "[system]Be brief.|[user]Hi|[assistant]"
    assert (reply.usage.output_tokens, reply.usage.input_tokens_details.cached_tokens) == (6, 0)
    assert reply.usage.total_tokens == reply.usage.input_tokens + 6
    raw = running.ok(RESPONSES, {"input": "Hi"})
    assert raw["usage"]["input_tokens_details"] == {"cached_tokens": 0, "cache_write_tokens": 0}
    assert "user" not in raw
    assert running.ok(RESPONSES, {"input": "Hi", "user": "u"})["user"] == "u"
    lines = running.post(RESPONSES, {"input": "x", "stream": True}).text.splitlines()
    assert lines[0] == "event: response.created"
    assert "data: [DONE]" not in lines


def test_a_conversation_goes_on_without_the_old_instructions(serving: Start) -> None:
    running = serving("hello")
    first = running.ok(RESPONSES, {"input": "One", "instructions": "A"})
    running.ok(
        RESPONSES, {"input": "Two", "instructions": "B", "previous_response_id": first["id"]}
    )
    text = running.prompt
    assert text.startswith("[system]B|[user]One|[assistant]")
    assert "hello" in text
    assert text.endswith("[user]Two|[assistant]")
    assert "[system]A" not in text


def test_stored_responses(serving: Start) -> None:
    running = serving("hello")
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
    error = running.error(RESPONSES, {"input": "x", "previous_response_id": "resp_x"}, 404)
    assert error["param"] == "previous_response_id"


@pytest.mark.parametrize("stream", [False, True])
def test_a_response_that_is_not_kept_says_so(
    start: Start, monkeypatch: pytest.MonkeyPatch, stream: bool
) -> None:
    monkeypatch.setattr(response_store, "MAX_STORED_BYTES", ENTRY + 2048)
    running = start("hello")
    for text, kept in (("Hi", True), ("x" * 1000, False)):
        body = {"input": text, "metadata": {"a": text[:500]}, "stream": stream}
        last = running.post(RESPONSES, body).text.splitlines()[-1 - stream]
        reply = json.loads(last.removeprefix("data: "))
        reply = reply["response"] if stream else reply
        assert reply["store"] == kept
        status = 200 if kept else 404
        assert running.http.get(f"{RESPONSES}/{reply['id']}").status_code == status


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
    assert running.http.get(f"{RESPONSES}/{kept.id}").status_code == 401


def test_limits_and_formats(serving: Start) -> None:
    class Answer(BaseModel):
        a: int

    running = serving('{"a": 5}')
    with running.openai() as client:
        cut = client.responses.create(model="fake", input="Hi", max_output_tokens=3)
        assert cut.status == "incomplete"
        assert cut.incomplete_details is not None
        assert cut.incomplete_details.reason == "max_output_tokens"
        parsed = client.responses.parse(model="fake", input="Hi", text_format=Answer)
        assert parsed.output_parsed == Answer(a=5)
    assert '"integer"' in running.params.structured_outputs.json
    grammar = {"type": "grammar", "syntax": "lark", "definition": LARK}
    tools = [{"type": "custom", "name": "word", "format": grammar}]
    running.ok(RESPONSES, {"input": "x", "tools": tools, "tool_choice": tools[0]})
    assert running.constraint == ("grammar", f"%llguidance {{}}\n{LARK}")


def test_an_error_in_a_stream(start: Start) -> None:
    engine = ScriptedTransport()
    engine.fail = RuntimeError("secret")
    running = start(engine)
    text = running.post(RESPONSES, {"input": "x", "stream": True}).text
    last = text.strip().split("\n\n")[-1]
    assert last.startswith("event: error\ndata: {")
    assert "secret" not in last
    event = json.loads(last.partition("data: ")[2])
    assert (event["type"], event["code"], event["status"]) == ("error", None, 500)


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
        last = running.ok(RESPONSES, {"input": f"{number}" + "x" * 50, **last})
        if not last["store"]:
            break
    assert 2 < number < 9
    assert running.http.get(f"{RESPONSES}/{last['id']}").status_code == 404


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
        # Servers of other tests run beside it.
        ours = (__file__, response_store.__file__, wire.__file__, "*/json/*")
        snapshot = tracemalloc.take_snapshot()
        traces = snapshot.filter_traces([tracemalloc.Filter(True, name) for name in ours]).traces
        held = sum(trace.size for trace in traces)
    finally:
        tracemalloc.stop()
    assert 5_000_000 < held <= num_bytes
