"""Every field of a request, and what one can do with those whose size a client chooses.

:data:`FIELDS` has an entry for each field of the OpenAPI document that is not a flag or a choice
among names (:func:`fields_of`); ``tests/server/test_fields.py`` fails for a field without one. An
entry is either why its size makes no work, or requests that make as much work as they may:
``python -m tests.chaos.attack --each 10`` sends them one kind at a time.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any, Final, NamedTuple

from vmserve.sampling.params import MAX_CHOICES
from vmserve.server.limits import MAX_BODY_BYTES, SIZES

__all__ = ["FIELDS", "Attack", "Shape", "attacks_of", "entry_of", "fields_of"]

CHAT, COMPLETIONS, EMBEDDINGS = "/v1/chat/completions", "/v1/completions", "/v1/embeddings"
RESPONSES, MESSAGES = "/v1/responses", "/v1/messages"
COUNT = MESSAGES + "/count_tokens"
#: A body's largest text: the rest is for the other fields.
_TEXT: Final = MAX_BODY_BYTES - 4096


class Shape(NamedTuple):
    """Of the model that is attacked."""

    context: int
    vocabulary: int


class Attack(NamedTuple):
    path: str
    body: dict[str, Any]
    #: How it may end; 429 for too many at once too.
    ends: frozenset[int] = frozenset({200})
    #: Seconds after which the client leaves; None reads the answer.
    leaves: float | None = None


Make = Callable[[Shape], Attack]
#: Why its size makes no work; or the requests that make most of it.
Entry = str | tuple[Make, ...]

_NO_WORK: Final = "a number that changes how a token is chosen, not how much is computed"
_SHORT: Final = "a short text, compared or passed on"
_ADMIN: Final = "for who has the admin key"
_IGNORED: Final = "not read"


def to(path: str, *ends: int, **body: Any) -> Make:
    """``ends``: 200 if there are none. Values that are functions are called with the shape."""

    def make(shape: Shape) -> Attack:
        values = {name: value(shape) if callable(value) else value for name, value in body.items()}
        return Attack(path, values, frozenset(ends or (200,)))

    return make


def _user(content: Any = "Hi") -> list[dict[str, Any]]:
    return [{"role": "user", "content": content}]


def chat(*ends: int, **fields: Any) -> Make:
    return to(CHAT, *ends, **{"messages": _user(), "max_tokens": 1, **fields})


def completion(*ends: int, **fields: Any) -> Make:
    return to(COMPLETIONS, *ends, **{"prompt": "Hi", "max_tokens": 1, **fields})


def response(*ends: int, **fields: Any) -> Make:
    return to(RESPONSES, *ends, **{"input": "Hi", **fields})


def message(*ends: int, **fields: Any) -> Make:
    return to(MESSAGES, *ends, **{"messages": _user(), "max_tokens": 1, **fields})


def _words(num_chars: int) -> str:
    words = "the quick brown fox "
    return (words * (num_chars // len(words) + 1))[:num_chars]


def _long_ids(shape: Shape) -> list[int]:
    return [100 + i % 800 for i in range(shape.context - 8)]


def _long_ids_but_64(shape: Shape) -> list[int]:
    return _long_ids(shape)[:-64]


def _forty_contexts(shape: Shape) -> str:
    return _words(40 * shape.context)


def _vocabulary(shape: Shape) -> list[int]:
    return list(range(shape.vocabulary))


def _distinct(num: int, num_chars: int) -> list[str]:
    """Texts that no tokenizer has seen."""
    return [f"{i:05d}" + _words(num_chars - 5) for i in range(num)]


_TOOL: Final = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
_TOOLS: Final = [
    {**_TOOL, "function": {"name": f"f{i}", "parameters": {"type": "object"}}} for i in range(1000)
]
_CALLS: Final = [
    {"role": "assistant", "content": None, "function_call": {"name": "f", "arguments": "{}"}},
    {"role": "function", "name": "f", "content": "x"},
]
_FLAT_TOOLS: Final = [{"type": "function", **tool["function"]} for tool in _TOOLS]  # type: ignore[dict-item]
_CLAUDE_TOOLS: Final = [{"name": f"f{i}", "input_schema": {"type": "object"}} for i in range(1000)]


def _nested(levels: int) -> Any:
    value: Any = "x"
    for _ in range(levels):
        value = [value]
    return value


_BOMB: Final = (
    "start: "
    + " | ".join(f'"{"ab" * 9}{i}" x{i % 40}' for i in range(480))
    + "\n"
    + "\n".join(f"x{i}: (/[a-z]{{1,{40 + i}}}/ | x{(i + 1) % 40})+" for i in range(40))
)
_CUSTOM: Final = {"name": "f", "description": "x"}
_LARK: Final = {"type": "grammar", "syntax": "lark", "definition": _BOMB}
_SCHEMA: Final = {
    "type": "object",
    "properties": {f"p{i}": {"type": "string", "maxLength": 40} for i in range(900)},
}
_REGEX: Final = "(" + "|".join(f"[a-z]{{1,{i % 50 + 1}}}{i}" for i in range(2000)) + ")+"
_CUSTOM_TOOLS: Final = [
    {
        "type": "custom",
        "custom": {
            "name": f"f{i}",
            "format": {"type": "grammar", "syntax": "regex", "definition": f"[a-z]{{1,{i + 1}}}"},
        },
    }
    for i in range(1000)
]
_CHOICES: Final = [f"choice {i} of many" for i in range(2500)]
_MOST: Final = {"n": MAX_CHOICES, "max_tokens": 16}
_STREAM: Final = {"max_output_tokens": 8, "stream": True}
_LONG: Final = {"max_tokens": 64, "ignore_eos": True}
_NESTED: Final = {"x": [_nested(40)] * 1500}
_TEXTS: Final = {"x": "y" * _TEXT}

#: By name; ``Schema.name`` where a name means something else in one schema.
FIELDS: Final[Mapping[str, Entry]] = {
    # -- constraints
    "response_format": (
        chat(
            200,
            400,
            response_format={"type": "json_schema", "json_schema": {"schema": _SCHEMA}},
            **_MOST,
        ),
    ),
    "structured_outputs": (
        chat(200, 400, structured_outputs={"grammar": _BOMB}),
        completion(
            400,
            prompt=["x"] * 1024,
            structured_outputs={"choice": [_words(1000) + str(i) for i in range(64)]},
        ),
    ),
    "guided_regex": (chat(200, 400, guided_regex=_REGEX, **_MOST),),
    "guided_choice": (chat(200, 400, guided_choice=_CHOICES, **_MOST),),
    **{
        name: (chat(200, 400, **{name: value}),)
        for value, names in (
            (_SCHEMA, ("guided_json", "json_schema")),
            (_BOMB, ("guided_grammar", "grammar", "ebnf", "grammar_string")),
            (_REGEX, ("regex", "regex_pattern")),
            ({"guided_json": _SCHEMA}, ("nvext",)),
        )
        for name in names
    },
    "guided_whitespace_pattern": (chat(400, guided_whitespace_pattern="x" * _TEXT),),
    "structural_tag": (chat(400, structural_tag="x" * _TEXT),),
    # -- who and where
    **dict.fromkeys(("model", "request_id", "user", "cache_salt", "reasoning_effort"), _SHORT),
    **dict.fromkeys(("response_id", "previous_response_id"), _SHORT),
    **dict.fromkeys(("stream_options", "MessagesRequest.metadata", "thinking"), _IGNORED),
    **dict.fromkeys(("seed", "priority", "request_timeout", "dimensions"), _NO_WORK),
    # -- how a token is chosen
    **dict.fromkeys(("temperature", "top_p", "top_k", "min_p"), _NO_WORK),
    "presence_penalty": (completion(presence_penalty=1.0, n=MAX_CHOICES, max_tokens=200),),
    "frequency_penalty": (completion(frequency_penalty=1.0, n=MAX_CHOICES, max_tokens=200),),
    "repetition_penalty": (completion(prompt=_long_ids_but_64, repetition_penalty=1.5, **_MOST),),
    "logit_bias": (
        completion(logit_bias={str(i): 1 for i in range(1024)}, n=MAX_CHOICES, max_tokens=64),
    ),
    "allowed_token_ids": (
        completion(400, prompt=["x"] * SIZES["prompt"][1], allowed_token_ids=_vocabulary),
        completion(
            prompt="x",
            allowed_token_ids=_vocabulary,
            min_tokens=16,
            stop_token_ids=list(range(1024)),
            **_MOST,
        ),
        completion(
            prompt="x",
            allowed_token_ids=lambda shape: [i % shape.vocabulary for i in range(300_000)],
        ),
    ),
    "stop_token_ids": (completion(stop_token_ids=list(range(1, 1025)), min_tokens=16, **_MOST),),
    "bad_words": (
        chat(200, 400, bad_words=_distinct(1024, 1000)),
        chat(bad_words=_distinct(64, 1000), **_MOST),
        chat(bad_words=_distinct(1024, 12), **_MOST),
    ),
    "min_tokens": (completion(min_tokens=200, max_tokens=200, n=MAX_CHOICES),),
    # -- how much is computed
    "n": (chat(n=MAX_CHOICES, max_tokens=64), chat(n=MAX_CHOICES, max_tokens=64, stream=True)),
    "best_of": (completion(best_of=MAX_CHOICES, max_tokens=64),),
    "max_tokens": (chat(max_tokens=1000, ignore_eos=True),),
    "max_completion_tokens": (chat(max_completion_tokens=1000, n=16, ignore_eos=True),),
    "max_output_tokens": (response(max_output_tokens=1000, ignore_eos=True),),
    "logprobs": (completion(logprobs=20, n=16, **_LONG),),
    "top_logprobs": (
        chat(n=16, logprobs=True, top_logprobs=20, **_LONG),
        chat(n=16, logprobs=True, top_logprobs=20, stream=True, **_LONG),
    ),
    "prompt_logprobs": (
        completion(
            prompt=lambda shape: [_long_ids(shape)] * max(1, 23_000 // shape.context),
            prompt_logprobs=20,
        ),
    ),
    "logprob_token_ids": (
        completion(
            logprob_token_ids=list(range(1024)), logprobs=0, n=7, max_tokens=60, ignore_eos=True
        ),
        completion(400, logprob_token_ids=list(range(1024)), logprobs=0, n=16),
    ),
    "length_penalty": (
        completion(use_beam_search=True, n=60, length_penalty=2.0, **_LONG),
        completion(use_beam_search=True, n=60, logprobs=20, **_LONG),
    ),
    # -- texts
    "prompt": (
        completion(400, prompt=_words(_TEXT)),
        completion(prompt=["x"] * 1024),
        completion(prompt=[[100] * 30] * 1024, max_tokens=16),
        completion(400, prompt=[[]] * 60_000),
        to(
            COMPLETIONS,
            200,
            400,
            prompt=lambda shape: [_long_ids(shape)] * (780_000 // shape.context),
        ),
        to("/tokenize", prompt=_words(_TEXT), return_token_strs=True),
        to("/tokenize", prompt="x" * _TEXT),
    ),
    "truncate_prompt_tokens": (
        completion(prompt=_words(_TEXT), truncate_prompt_tokens=16),
        to(COMPLETIONS, prompt=lambda shape: [5] * (16 * shape.context), truncate_prompt_tokens=16),
        completion(400, prompt=[5] * 1_300_000, truncate_prompt_tokens=16),
    ),
    "suffix": (completion(400, suffix=_words(_TEXT)),),
    "echo": (
        completion(prompt=_long_ids_but_64, echo=True, n=MAX_CHOICES),
        completion(
            200, 400, prompt=lambda shape: " " * (8 * shape.context), echo=True, n=MAX_CHOICES
        ),
    ),
    "return_token_ids": (
        completion(prompt=_long_ids_but_64, return_token_ids=True, n=MAX_CHOICES),
    ),
    "stop": (
        chat(stop=["a" * 4095 + str(i % 10) for i in range(16)], **_MOST),
        completion(400, prompt=["x"] * 1024, stop=[_words(4090) + str(i) for i in range(16)]),
    ),
    "prediction": (
        chat(prediction={"type": "content", "content": _words(_TEXT)}, n=16, max_tokens=64),
        completion(
            200,
            400,
            prompt=["x"] * 1024,
            max_tokens=4,
            prediction=lambda shape: {"type": "content", "content": _words(8 * shape.context)},
        ),
    ),
    "messages": (
        chat(400, messages=_user("") * 60_000),
        chat(400, messages=[{"role": "<|im_end|>" * 25}] * 14_000),
        chat(400, messages=_user(_words(_TEXT))),
        chat(200, 400, messages=_user([{"type": "text", "text": ""}] * 65_000)),
        to("/tokenize", 200, 400, messages=_user("") * 60_000),
    ),
    "MessagesRequest.messages": (
        message(400, messages=_user("x") * 50_000),
        message(400, messages=_user(_words(_TEXT))),
    ),
    "CountMessageTokensRequest.messages": (to(COUNT, 200, 400, messages=_user("x") * 50_000),),
    "system": (message(400, system=_words(_TEXT)),),
    "chat_template_kwargs": (
        chat(chat_template_kwargs={"x": _words(_TEXT)}),
        chat(chat_template_kwargs=_NESTED),
    ),
    "tools": (
        chat(200, 400, tools=_TOOLS),
        chat(200, 400, tools=_TOOLS, tool_choice="required", **_MOST),
        chat(200, 400, tools=_CUSTOM_TOOLS, tool_choice="required", **_MOST),
        chat(
            200,
            400,
            tools=[{"type": "custom", "custom": {**_CUSTOM, "format": _LARK}}],
            tool_choice="required",
        ),
    ),
    "functions": (
        chat(200, 400, functions=[tool["function"] for tool in _TOOLS]),
        chat(400, functions=[{"name": "f"}] * 60_000),
        chat(200, 400, messages=_user() + _CALLS * 30_000, functions=[{"name": "f"}]),
    ),
    "function_call": (chat(400, functions=[{"name": "f"}], function_call=_TEXTS),),
    "tool_choice": (chat(400, tools=[_TOOL], tool_choice=_TEXTS),),
    "ResponsesRequest.tools": (
        response(
            200, 400, tools=[{**tool, "description": "d" * 3000} for tool in _FLAT_TOOLS], **_STREAM
        ),
    ),
    "MessagesRequest.tools": (message(200, 400, tools=_CLAUDE_TOOLS),),
    "CountMessageTokensRequest.tools": (
        to(COUNT, 200, 400, messages=_user(), tools=_CLAUDE_TOOLS),
    ),
    "modalities": (chat(400, modalities=["x"] * 500_000),),
    # -- responses and messages
    "input": (
        response(200, 400, input=_user("") * 30_000),
        response(input=_forty_contexts, truncation="auto", max_output_tokens=1),
        response(400, input=_words(_TEXT), truncation="auto", max_output_tokens=1),
    ),
    "EmbeddingRequest.input": (
        to(EMBEDDINGS, input=["x"] * 1024),
        to(EMBEDDINGS, 200, 400, input=lambda shape: [_long_ids(shape)] * 32),
    ),
    "instructions": (response(instructions=_forty_contexts, truncation="auto", **_STREAM),),
    "metadata": (response(400, metadata=_NESTED),),
    "text": (response(200, 400, text=_NESTED, **_STREAM),),
    "reasoning": (response(200, 400, reasoning=_TEXTS, **_STREAM),),
    "output_config": (
        message(
            200,
            400,
            max_tokens=8,
            output_config={"format": {"type": "json_schema", "schema": _SCHEMA}},
        ),
    ),
    "output_format": (
        message(200, 400, max_tokens=8, output_format={"type": "json_schema", "schema": _SCHEMA}),
    ),
    "stop_sequences": (
        message(max_tokens=8, stop_sequences=["a" * 4095 + str(i % 10) for i in range(16)]),
    ),
    "tokens": (to("/detokenize", tokens=[100 + i % 800 for i in range(800_000)]),),
    # -- refused whatever they hold
    "prompt_embeds": (completion(400, prompt_embeds="x" * _TEXT),),
    "chat_template": (chat(400, chat_template="x" * _TEXT),),
    "audio": (chat(400, audio=_TEXTS),),
    "web_search_options": (chat(400, web_search_options=_TEXTS),),
    "conversation": (response(400, 501, conversation="x" * _TEXT),),
    # -- admin routes
    **dict.fromkeys(("kv_cache_memory", "timeout", "weight", "kv_floor", "kv_cap"), _ADMIN),
    **dict.fromkeys(("name", "options", "engine"), _ADMIN),
}


def _is_flag(schema: Mapping[str, Any]) -> bool:
    """Whether a field says yes or no, or one of several names."""
    if "anyOf" in schema:
        return all(_is_flag(each) for each in schema["anyOf"] if each.get("type") != "null")
    return schema.get("type") == "boolean" or "enum" in schema or "const" in schema


def fields_of(document: Mapping[str, Any]) -> dict[tuple[str, str], bool]:
    """Each (schema or path, field) that requests of an OpenAPI document have, and whether it is
    only a flag."""
    schemas = document["components"]["schemas"]
    found = {}
    for path, operations in document["paths"].items():
        found |= {(path, name): False for name in re.findall(r"{(\w+)", path)}
        for operation in operations.values():
            found |= {(path, each["name"]): False for each in operation.get("parameters", ())}
            content = operation.get("requestBody", {}).get("content", {})
            for body in content.values():
                for reference in body["schema"].get("anyOf", [body["schema"]]):
                    name = reference["$ref"].rpartition("/")[2]
                    fields = schemas[name]["properties"]
                    found |= {(name, key): _is_flag(each) for key, each in fields.items()}
    return found


def entry_of(owner: str, name: str) -> Entry | None:
    """The entry of a field of a schema or path; None if there is none."""
    return FIELDS.get(f"{owner}.{name}", FIELDS.get(name))


def attacks_of(shape: Shape) -> dict[str, Attack]:
    """All attacks by name: the field's, with a number where there are several."""
    found = {}
    for name, entry in FIELDS.items():
        if isinstance(entry, str):
            continue
        for place, make in enumerate(entry, start=1):
            found[f"{name} {place}" if len(entry) > 1 else name] = make(shape)
    return found
