"""Structured output and enforced calls on the embedded model, through several clients."""

from __future__ import annotations

import json
import re
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any, Literal

import jsonschema
import openai
import pytest
from pydantic import BaseModel, Field

from tests.helpers import until
from tests.server.conftest import CHAT, COMPLETIONS, MESSAGES, RESPONSES, Body, Running
from tests.server.test_tools import DATE, WORD
from tests.structured.gate import Gate
from vmserve import AsyncLLM
from vmserve.server.auth import ApiKey

ASKED: Any = [{"role": "user", "content": "What is the weather in Paris?"}]
#: Takes minutes and gigabytes, on any machine.
BOMB = {"json": {"type": "integer", "multipleOf": 9_999_991}}


class Answer(BaseModel):
    kind: Literal["sun", "rain"]
    degrees: int = Field(ge=-20, le=40)
    words: list[Literal["a", "b"]] = Field(max_length=3)


WEATHER = {
    "type": "object",
    "properties": {
        "city": {"enum": ["Paris", "Rome"]},
        "days": {"type": "integer", "minimum": 1, "maximum": 9},
    },
    "required": ["city", "days"],
    "additionalProperties": False,
}
TOOLS: Any = [
    {"type": "function", "function": {"name": "get_weather", "parameters": WEATHER}},
    {"type": "function", "function": {"name": "now"}},
]


def embedded(memory: str = "64MiB", **options: Any) -> Running:
    engine = AsyncLLM(kv_cache_memory=memory, max_model_len=1024, max_num_seqs=16)
    return Running(engine, served_model_names=("embedded",), **options)


@pytest.fixture(scope="module")
def real() -> Iterator[Running]:
    running = embedded("128MiB")
    yield running
    running.close()


@pytest.fixture(scope="module")
def client(real: Running) -> Iterator[openai.OpenAI]:
    with real.openai() as opened:
        yield opened


def check(arguments: str) -> None:
    jsonschema.validate(json.loads(arguments), WEATHER)


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_both_routes_whole_streamed_and_of_beams(real: Running, path: str) -> None:
    """With a schema; what else there is: structured/test_generation.py."""
    schema = {"name": "weather", "schema": WEATHER, "strict": True}
    body: Body = {"messages": ASKED, "prompt": "The sky is", "n": 2, "max_tokens": 80}
    body["response_format"] = {"type": "json_schema", "json_schema": schema}

    def texts_of(**more: Any) -> list[str]:
        choices = real.ok(path, {**body, **more})["choices"]
        assert all(choice["finish_reason"] == "stop" for choice in choices)
        return [c["message"]["content"] if path == CHAT else c["text"] for c in choices]

    texts = texts_of(seed=1)
    joined = ["", ""]
    for chunk in real.stream(path, {**body, "seed": 1}):
        [choice] = chunk["choices"]
        text = choice["delta"]["content"] if path == CHAT else choice["text"]
        joined[choice["index"]] += text or ""
    assert joined == texts
    for text in (*texts, *texts_of(use_beam_search=True)):
        check(text)


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS, RESPONSES])
@pytest.mark.parametrize("stream", [False, True])
def test_what_is_not_enforced_is_named(shared: Running, path: str, stream: bool) -> None:
    """pydantic writes a set as an array of unique items, which no grammar can remember."""
    asked = {"prompt": "x", "messages": ASKED, "input": "x", "stream": stream}
    for items, told in (({"type": "string"}, "uniqueItems"), ({"enum": ["a", "b"]}, None)):
        schema = {"type": "array", "items": items, "uniqueItems": True}
        reply = shared.post(path, {**asked, "structured_outputs": {"json": schema}})
        assert reply.status_code == 200, reply.text
        assert reply.headers.get("x-vmserve-unenforced") == told


def test_token_strings_join_to_the_content(real: Running) -> None:
    body = {"messages": ASKED, "logprobs": True, "structured_outputs": {"regex": "ab{2}c"}}
    [choice] = real.ok(CHAT, body)["choices"]
    entries = choice["logprobs"]["content"]
    assert "".join(entry["token"] for entry in entries) == choice["message"]["content"] == "abbc"


WRONG = {"type": "integer", "minimum": 2, "maximum": 1}
OF_WRONG = {"type": "function", "function": {"name": "f", "parameters": {"type": "wrong"}}}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("name", "asked", "told"),
    [
        ("structured_outputs", {"structured_outputs": {"regex": "("}}, "unclosed group"),
        ("structured_outputs", {"structured_outputs": {"grammar": "start: a"}}, "unknown name"),
        ("structured_outputs", {"structured_outputs": {"json": {"items": 3}}}, "schema must be"),
        ("structured_outputs", {"structured_outputs": {"json": WRONG}}, "Unsatisfiable"),
        ("json_schema", {"json_schema": WRONG}, "Unsatisfiable"),
        ("guided_json", {"guided_json": WRONG}, "Unsatisfiable"),
        ("response_format", {"response_format": {"type": "json_object", "schema": WRONG}}, "Unsat"),
        ("tools", {"tools": [OF_WRONG], "tool_choice": "required"}, "wrong"),
        ("tools", {"tools": [OF_WRONG], "tool_choice": OF_WRONG}, "wrong"),
    ],
)
def test_what_cannot_be_compiled_is_told_under_the_name_that_the_client_gave(
    real: Running, name: str, asked: Body, told: str, stream: bool
) -> None:
    error = real.error(CHAT, {"messages": ASKED, "stream": stream, **asked})
    assert error["param"] == name
    assert error["message"].startswith(f"{name}: this ")
    assert told in error["message"]


def test_other_streams_go_on_while_a_bomb_is_refused(real: Running) -> None:
    body: Body = {"prompt": "Once", "max_tokens": 900, "ignore_eos": True}
    times: list[float] = []
    ended = threading.Event()

    def read() -> None:
        for _ in real.events(COMPLETIONS, body):
            times.append(time.monotonic())
            if ended.is_set():
                return

    reader = threading.Thread(target=read)
    reader.start()
    while not times:
        time.sleep(0.01)
    began = time.monotonic()
    error = real.error(COMPLETIONS, {"prompt": "x", "structured_outputs": BOMB})
    refused = time.monotonic()
    ended.set()
    reader.join()
    assert "make it simpler" in error["message"]
    # Or it has come to its end before.
    assert any(began < at < refused for at in times) or len(times) >= 900


def test_what_clients_left_is_not_compiled_and_what_waits_is_bounded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gate = Gate(monkeypatch)
    keys = (ApiKey.of("a", "of-a"), ApiKey.of("b", "of-b"))
    running = embedded("32MiB", named_keys=keys, max_queued_requests=8)
    engine: Any = running.engine
    compiler = engine.transport._engine.structured.compiler
    of_a, of_b = ({"authorization": f"Bearer of-{name}"} for name in "ab")

    def send(number: int) -> socket.socket:
        grammar = {"grammar": f'start: "bomb {number}"'}
        body = json.dumps({"prompt": "x", "structured_outputs": grammar})
        head = f"POST {COMPLETIONS} HTTP/1.1\r\nhost: x\r\nauthorization: Bearer of-a\r\n"
        head += f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
        client = socket.create_connection(("127.0.0.1", running.port))
        client.sendall((head + body).encode())
        return client

    choice = {"prompt": "x", "structured_outputs": {"choice": ["yes"]}}
    clients = [send(number) for number in range(8)]
    try:
        until(lambda: len(gate.begun) == 2 and compiler.num_waiting == 6)
        full = running.post(COMPLETIONS, choice, headers=of_a)
        assert (full.status_code, full.headers["retry-after"]) == (429, "1")
        assert "8 requests" in full.json()["error"]["message"]
        for client in clients:
            client.close()
        until(lambda: compiler.num_waiting == 0)
        reply = running.post(COMPLETIONS, choice, headers=of_b)
        assert reply.json()["choices"][0]["text"] == "yes"
        assert len(gate.begun) == 3
    finally:
        gate.open.set()
        running.close()


def test_the_official_client_parses(client: openai.OpenAI) -> None:
    parsed = client.chat.completions.parse(
        model="embedded", messages=ASKED, response_format=Answer, seed=2
    )
    assert isinstance(parsed.choices[0].message.parsed, Answer)
    response = client.responses.parse(model="embedded", input="x", text_format=Answer)
    assert isinstance(response.output_parsed, Answer)


NAMED: Any = {"type": "function", "function": {"name": "get_weather"}}


#: Shows no tools, and takes no system message.
WITHOUT_TOOLS = (
    "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no system') }}"
    "{% endif %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.fixture(scope="module")
def untaught() -> Iterator[Running]:
    """A server whose chat template shows no tools."""
    running = embedded(chat_template=WITHOUT_TOOLS)
    yield running
    running.close()


REQUIRED = {"tool_choice": "required"}
FLAT = [{"type": "function", **tool["function"]} for tool in TOOLS]
OF_MESSAGES = [
    {"name": "get_weather", "input_schema": WEATHER},
    {"name": "now", "input_schema": {"type": "object"}},
]
ON_ROUTES: list[tuple[str, Body, Body]] = [
    (CHAT, {"messages": ASKED, "tools": TOOLS}, REQUIRED),
    (RESPONSES, {"input": "x", "tools": FLAT}, REQUIRED),
    (
        MESSAGES,
        {"messages": ASKED, "max_tokens": 200, "tools": OF_MESSAGES},
        {"tool_choice": {"type": "any"}},
    ),
]


@pytest.mark.parametrize(("path", "body", "forced"), ON_ROUTES)
def test_a_template_without_tools_on_every_route(
    untaught: Running, path: str, body: Body, forced: Body
) -> None:
    with_tools, without = [
        untaught.ok(path, given)["usage"] for given in (body, {**body, "tools": None})
    ]
    name = "prompt_tokens" if path == CHAT else "input_tokens"
    assert with_tools[name] > without[name] + 100
    reply = untaught.ok(path, {**body, **forced, "seed": 1})
    said = (
        reply.get("output") or reply.get("content") or reply["choices"][0]["message"]["tool_calls"]
    )
    assert {part["type"] for part in said} <= {"function_call", "tool_use", "function"}
    for part in said[:-1]:  # the context may end within the last
        call = part.get("function", part)
        given = call["input"] if path == MESSAGES else json.loads(call["arguments"])
        jsonschema.validate(given, WEATHER if call["name"] == "get_weather" else {"type": "object"})
    if path == CHAT:
        shown = untaught.ok("/tokenize", {"messages": ASKED, "tools": TOOLS})
        assert shown["count"] == with_tools[name]


def test_a_tool_is_called_and_its_result_answered(untaught: Running) -> None:
    with untaught.openai() as client:
        options: Any = {"model": "embedded", "tools": TOOLS, "max_tokens": 100}
        with client.chat.completions.stream(messages=ASKED, tool_choice=NAMED, **options) as stream:
            asked: Any = stream.get_final_completion().choices[0]
        assert asked.finish_reason == "stop"
        [call] = asked.message.tool_calls
        check(call.function.arguments)
        result = {"role": "tool", "tool_call_id": call.id, "content": "Sunny."}
        history = [*ASKED, asked.message.model_dump(exclude_none=True), result]
        answer = client.chat.completions.create(messages=history, **options)
        assert answer.choices[0].finish_reason in ("stop", "length", "tool_calls")
        shown = untaught.ok("/tokenize", {"messages": history, "return_token_strs": False})
    text = untaught.ok("/detokenize", {"tokens": shown["tokens"]})["prompt"]
    assert f'"arguments": {call.function.arguments}}}\n</tool_call>' in text
    assert "<tool_response>\nSunny.\n</tool_response>" in text


@pytest.mark.parametrize(("tool", "pattern"), [(DATE, "[0-9]{4}|x"), (WORD, "a+b")])
@pytest.mark.parametrize("is_named", [True, False])
def test_inputs_of_custom_tools_match_their_format(
    real: Running, tool: Body, pattern: str, is_named: bool
) -> None:
    """The embedded model knows nothing of it: all that it writes is what the grammar allows."""
    asked: Body = {"tools": [tool], "tool_choice": tool if is_named else "required"}
    asked |= {"max_tokens": 200, "seed": 1, "parallel_tool_calls": False}
    [answer] = real.chat(**asked)["choices"]
    [call] = answer["message"]["tool_calls"]
    assert answer["finish_reason"] == ("stop" if is_named else "tool_calls")
    assert re.fullmatch(pattern, call["custom"]["input"])


def test_langchain(real: Running) -> None:
    from langchain_openai import ChatOpenAI

    model: Any = ChatOpenAI(
        model="embedded", base_url=f"{real.url}/v1", api_key="x", max_tokens=200, seed=1
    )
    try:
        assert isinstance(model.invoke("Hello").content, str)
        assert "".join(chunk.content for chunk in model.stream("Hello"))
        structured = model.with_structured_output(Answer, method="json_schema")
        assert isinstance(structured.invoke("The weather?"), Answer)
        bound = model.bind_tools(TOOLS, tool_choice="get_weather")
        [call] = bound.invoke("The weather?").tool_calls
        jsonschema.validate(call["args"], WEATHER)
        merged = None
        for chunk in bound.stream("The weather?"):
            merged = chunk if merged is None else merged + chunk
        assert merged is not None
        [streamed] = merged.tool_calls
        assert streamed["args"] == call["args"]
    finally:
        model.root_client.close()


def test_litellm(real: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    # Its list of prices would be fetched when it is imported.
    monkeypatch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")
    import litellm

    options: Any = {"model": "openai/embedded", "messages": ASKED, "seed": 1}
    options |= {"api_base": f"{real.url}/v1", "api_key": "x"}
    reply = litellm.completion(**options, max_tokens=80, response_format=Answer)
    Answer.model_validate_json(reply.choices[0].message.content)
    reply = litellm.completion(**options, max_tokens=100, tools=TOOLS, tool_choice=NAMED)
    [call] = reply.choices[0].message.tool_calls
    check(call.function.arguments)
    chunks = litellm.completion(**options, max_tokens=5, stream=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
