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
_REFUSED: Final = frozenset({400})
_EITHER: Final = frozenset({200, 400})


def _user(content: Any = "Hi") -> list[dict[str, Any]]:
    return [{"role": "user", "content": content}]


def _chat(messages: Any = None, **more: Any) -> dict[str, Any]:
    return {"messages": messages or _user(), "max_tokens": 1, **more}


def chat(ends: frozenset[int] = frozenset({200}), **fields: Any) -> Make:
    return lambda shape: Attack(CHAT, _chat(**fields), ends)


def completion(ends: frozenset[int] = frozenset({200}), **fields: Any) -> Make:
    return lambda shape: Attack(COMPLETIONS, {"prompt": "Hi", "max_tokens": 1, **fields}, ends)


def response(**fields: Any) -> Make:
    body = {"input": "Hi", "max_output_tokens": 8, "stream": True, **fields}
    return lambda shape: Attack(RESPONSES, body, _EITHER)


def message(ends: frozenset[int] = _EITHER, **fields: Any) -> Make:
    body = {"messages": _user(), "max_tokens": 8, **fields}
    return lambda shape: Attack(MESSAGES, body, ends)


def of_shape(path: str, make: Callable[[Shape], dict[str, Any]], *ends: int) -> Make:
    return lambda shape: Attack(path, make(shape), frozenset(ends or (200,)))


def _words(num_chars: int) -> str:
    words = "the quick brown fox "
    return (words * (num_chars // len(words) + 1))[:num_chars]


def _long_ids(shape: Shape) -> list[int]:
    return [100 + i % 800 for i in range(shape.context - 8)]


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

_CONSTRAINTS: Final[dict[str, Entry]] = {
    "response_format": (
        chat(
            response_format={"type": "json_schema", "json_schema": {"schema": _SCHEMA}},
            **_MOST,
            ends=_EITHER,
        ),
    ),
    "structured_outputs": (
        chat(structured_outputs={"grammar": _BOMB}, ends=_EITHER),
        of_shape(
            COMPLETIONS,
            lambda shape: {
                "prompt": ["x"] * 1024,
                "max_tokens": 1,
                "structured_outputs": {"choice": [_words(1000) + str(i) for i in range(64)]},
            },
            400,
        ),
    ),
    "guided_json": (chat(guided_json=_SCHEMA, ends=_EITHER),),
    "guided_regex": (chat(guided_regex=_REGEX, **_MOST, ends=_EITHER),),
    "guided_choice": (chat(guided_choice=_CHOICES, **_MOST, ends=_EITHER),),
    "guided_grammar": (chat(guided_grammar=_BOMB, ends=_EITHER),),
    "grammar": (chat(grammar=_BOMB, ends=_EITHER),),
    "json_schema": (chat(json_schema=_SCHEMA, ends=_EITHER),),
    "regex": (chat(regex=_REGEX, ends=_EITHER),),
    "ebnf": (chat(ebnf=_BOMB, ends=_EITHER),),
    "regex_pattern": (chat(regex_pattern=_REGEX, ends=_EITHER),),
    "grammar_string": (chat(grammar_string=_BOMB, ends=_EITHER),),
    "nvext": (chat(nvext={"guided_json": _SCHEMA}, ends=_EITHER),),
    "guided_whitespace_pattern": (chat(guided_whitespace_pattern="x" * _TEXT, ends=_REFUSED),),
    "structural_tag": (chat(structural_tag="x" * _TEXT, ends=_REFUSED),),
}

#: By name; ``Schema.name`` where a name means something else in one schema.
FIELDS: Final[Mapping[str, Entry]] = {
    **_CONSTRAINTS,
    # -- who and where
    "model": _SHORT,
    "request_id": _SHORT,
    "user": _SHORT,
    "cache_salt": _SHORT,
    "reasoning_effort": _SHORT,
    "response_id": _SHORT,
    "seed": _NO_WORK,
    "priority": _NO_WORK,
    "request_timeout": _NO_WORK,
    "stream_options": _IGNORED,
    # -- how a token is chosen
    "temperature": _NO_WORK,
    "top_p": _NO_WORK,
    "top_k": _NO_WORK,
    "min_p": _NO_WORK,
    "presence_penalty": (completion(presence_penalty=1.0, n=MAX_CHOICES, max_tokens=200),),
    "frequency_penalty": (completion(frequency_penalty=1.0, n=MAX_CHOICES, max_tokens=200),),
    "repetition_penalty": (
        of_shape(
            COMPLETIONS,
            lambda shape: {
                "prompt": _long_ids(shape)[:-64],
                "repetition_penalty": 1.5,
                **_MOST,
            },
        ),
    ),
    "logit_bias": (
        completion(logit_bias={str(i): 1 for i in range(1024)}, n=MAX_CHOICES, max_tokens=64),
    ),
    "allowed_token_ids": (
        of_shape(
            COMPLETIONS,
            lambda shape: {
                "prompt": ["x"] * SIZES["prompt"][1],
                "max_tokens": 1,
                "allowed_token_ids": list(range(shape.vocabulary)),
            },
            400,
        ),
        of_shape(
            COMPLETIONS,
            lambda shape: {
                "prompt": "x",
                **_MOST,
                "allowed_token_ids": list(range(shape.vocabulary)),
                "min_tokens": 16,
                "stop_token_ids": list(range(1024)),
            },
        ),
        of_shape(
            COMPLETIONS,
            lambda shape: {
                "prompt": "x",
                "max_tokens": 1,
                "allowed_token_ids": [i % shape.vocabulary for i in range(300_000)],
            },
        ),
    ),
    "stop_token_ids": (completion(stop_token_ids=list(range(1, 1025)), min_tokens=16, **_MOST),),
    "bad_words": (
        chat(bad_words=_distinct(1024, 1000), ends=_EITHER),
        chat(bad_words=_distinct(64, 1000), n=MAX_CHOICES, max_tokens=16),
        chat(bad_words=_distinct(1024, 12), n=MAX_CHOICES, max_tokens=16),
    ),
    "min_tokens": (completion(min_tokens=200, max_tokens=200, n=MAX_CHOICES),),
    # -- how much is computed
    "n": (chat(n=MAX_CHOICES, max_tokens=64), chat(n=MAX_CHOICES, max_tokens=64, stream=True)),
    "best_of": (completion(best_of=MAX_CHOICES, max_tokens=64),),
    "max_tokens": (chat(max_tokens=1000, ignore_eos=True),),
    "max_completion_tokens": (chat(max_completion_tokens=1000, n=16, ignore_eos=True),),
    "max_output_tokens": (
        of_shape(
            RESPONSES,
            lambda shape: {"input": "Hi", "max_output_tokens": 1000, "ignore_eos": True},
        ),
    ),
    "logprobs": (completion(logprobs=20, n=16, max_tokens=64, ignore_eos=True),),
    "top_logprobs": (
        chat(n=16, max_tokens=64, ignore_eos=True, logprobs=True, top_logprobs=20),
        chat(n=16, max_tokens=64, ignore_eos=True, logprobs=True, top_logprobs=20, stream=True),
    ),
    "prompt_logprobs": (
        of_shape(
            COMPLETIONS,
            lambda shape: {
                "prompt": [_long_ids(shape)] * max(1, 23_000 // shape.context),
                "max_tokens": 1,
                "prompt_logprobs": 20,
            },
        ),
    ),
    "logprob_token_ids": (
        completion(
            logprob_token_ids=list(range(1024)), logprobs=0, n=7, max_tokens=60, ignore_eos=True
        ),
        completion(logprob_token_ids=list(range(1024)), logprobs=0, n=16, ends=_REFUSED),
    ),
    "length_penalty": (
        completion(use_beam_search=True, n=60, max_tokens=64, length_penalty=2.0, ignore_eos=True),
        completion(use_beam_search=True, n=60, max_tokens=64, logprobs=20, ignore_eos=True),
    ),
    # -- texts
    "prompt": (
        completion(prompt=_words(_TEXT), ends=_REFUSED),
        completion(prompt=["x"] * 1024),
        completion(prompt=[[100] * 30] * 1024, max_tokens=16),
        completion(prompt=[[]] * 60_000, ends=_REFUSED),
        of_shape(
            COMPLETIONS,
            lambda shape: {"prompt": [_long_ids(shape)] * (780_000 // shape.context)},
            200,
            400,
        ),
        of_shape("/tokenize", lambda shape: {"prompt": _words(_TEXT), "return_token_strs": True}),
        of_shape("/tokenize", lambda shape: {"prompt": "x" * _TEXT}),
    ),
    "truncate_prompt_tokens": (
        completion(prompt=_words(_TEXT), truncate_prompt_tokens=16),
        of_shape(
            COMPLETIONS,
            lambda shape: {"prompt": [5] * (16 * shape.context), "truncate_prompt_tokens": 16},
        ),
        completion(prompt=[5] * 1_300_000, truncate_prompt_tokens=16, ends=_REFUSED),
    ),
    "suffix": (completion(suffix=_words(_TEXT), ends=_REFUSED),),
    "echo": (
        of_shape(
            COMPLETIONS,
            lambda shape: {
                "prompt": _long_ids(shape)[:-64],
                "echo": True,
                "n": MAX_CHOICES,
                "max_tokens": 1,
            },
        ),
        of_shape(
            COMPLETIONS,
            lambda shape: {
                "prompt": " " * (8 * shape.context),
                "echo": True,
                "n": MAX_CHOICES,
                "max_tokens": 1,
            },
            200,
            400,
        ),
    ),
    "return_token_ids": (
        of_shape(
            COMPLETIONS,
            lambda shape: {
                "prompt": _long_ids(shape)[:-64],
                "return_token_ids": True,
                "n": MAX_CHOICES,
                "max_tokens": 1,
            },
        ),
    ),
    "stop": (
        chat(stop=["a" * 4095 + str(i % 10) for i in range(16)], n=MAX_CHOICES, max_tokens=16),
        of_shape(
            COMPLETIONS,
            lambda shape: {
                "prompt": ["x"] * 1024,
                "max_tokens": 1,
                "stop": [_words(4090) + str(i) for i in range(16)],
            },
            400,
        ),
    ),
    "prediction": (
        chat(prediction={"type": "content", "content": _words(_TEXT)}, n=16, max_tokens=64),
        of_shape(
            COMPLETIONS,
            lambda shape: {
                "prompt": ["x"] * 1024,
                "max_tokens": 4,
                "prediction": {"type": "content", "content": _words(8 * shape.context)},
            },
            200,
            400,
        ),
    ),
    "messages": (
        chat(messages=_user("") * 60_000, ends=_REFUSED),
        chat(messages=[{"role": "<|im_end|>" * 25}] * 14_000, ends=_REFUSED),
        chat(messages=_user(_words(_TEXT)), ends=_REFUSED),
        chat(messages=_user([{"type": "text", "text": ""}] * 65_000), ends=_EITHER),
        of_shape("/tokenize", lambda shape: {"messages": _user("") * 60_000}, 200, 400),
    ),
    "MessagesRequest.messages": (
        of_shape(MESSAGES, lambda shape: {"messages": _user("x") * 50_000, "max_tokens": 1}, 400),
        of_shape(MESSAGES, lambda shape: {"messages": _user(_words(_TEXT)), "max_tokens": 1}, 400),
    ),
    "CountMessageTokensRequest.messages": (
        of_shape(
            MESSAGES + "/count_tokens", lambda shape: {"messages": _user("x") * 50_000}, 200, 400
        ),
    ),
    "system": (
        of_shape(
            MESSAGES,
            lambda shape: {"messages": _user(), "system": _words(_TEXT), "max_tokens": 1},
            400,
        ),
    ),
    "chat_template_kwargs": (
        chat(chat_template_kwargs={"x": _words(_TEXT)}),
        chat(chat_template_kwargs={"x": [_nested(40)] * 1500}),
    ),
    "tools": (
        chat(tools=_TOOLS, ends=_EITHER),
        chat(tools=_TOOLS, tool_choice="required", **_MOST, ends=_EITHER),
        chat(tools=_CUSTOM_TOOLS, tool_choice="required", **_MOST, ends=_EITHER),
        chat(
            tools=[{"type": "custom", "custom": {**_CUSTOM, "format": _LARK}}],
            tool_choice="required",
            ends=_EITHER,
        ),
    ),
    "functions": (
        chat(functions=[tool["function"] for tool in _TOOLS], ends=_EITHER),
        chat(functions=[{"name": "f"}] * 60_000, ends=_REFUSED),
        chat(messages=_user() + _CALLS * 30_000, functions=[{"name": "f"}], ends=_EITHER),
    ),
    "function_call": (
        chat(functions=[{"name": "f"}], function_call={"x": "y" * _TEXT}, ends=_REFUSED),
    ),
    "tool_choice": (chat(tools=[_TOOL], tool_choice={"x": "y" * _TEXT}, ends=_REFUSED),),
    "ResponsesRequest.tools": (
        response(tools=[{**tool, "description": "d" * 3000} for tool in _FLAT_TOOLS]),
    ),
    "MessagesRequest.tools": (
        of_shape(
            MESSAGES,
            lambda shape: {"messages": _user(), "max_tokens": 1, "tools": _CLAUDE_TOOLS},
            200,
            400,
        ),
    ),
    "CountMessageTokensRequest.tools": (
        of_shape(
            MESSAGES + "/count_tokens",
            lambda shape: {"messages": _user(), "tools": _CLAUDE_TOOLS},
            200,
            400,
        ),
    ),
    "modalities": (chat(modalities=["x"] * 500_000, ends=_REFUSED),),
    # -- responses and messages
    "input": (
        of_shape(RESPONSES, lambda shape: {"input": _user("") * 30_000}, 200, 400),
        of_shape(
            RESPONSES,
            lambda shape: {
                "input": _words(40 * shape.context),
                "truncation": "auto",
                "max_output_tokens": 1,
            },
        ),
        of_shape(
            RESPONSES,
            lambda shape: {
                "input": _words(_TEXT),
                "truncation": "auto",
                "max_output_tokens": 1,
            },
            400,
        ),
    ),
    "EmbeddingRequest.input": (
        of_shape(EMBEDDINGS, lambda shape: {"input": ["x"] * 1024}),
        of_shape(EMBEDDINGS, lambda shape: {"input": [_long_ids(shape)] * 32}, 200, 400),
    ),
    "dimensions": _NO_WORK,
    "instructions": (
        of_shape(
            RESPONSES,
            lambda shape: {
                "input": "Hi",
                "instructions": _words(40 * shape.context),
                "truncation": "auto",
                "max_output_tokens": 8,
                "stream": True,
            },
        ),
    ),
    "previous_response_id": _SHORT,
    "metadata": (
        of_shape(
            RESPONSES,
            lambda shape: {"input": "Hi", "metadata": {"x": [_nested(40)] * 1500}},
            400,
        ),
    ),
    "MessagesRequest.metadata": _IGNORED,
    "text": (response(text={"x": [_nested(40)] * 1500}),),
    "reasoning": (response(reasoning={"x": "y" * _TEXT}),),
    "thinking": _IGNORED,
    "output_config": (
        message(output_config={"format": {"type": "json_schema", "schema": _SCHEMA}}),
    ),
    "output_format": (message(output_format={"type": "json_schema", "schema": _SCHEMA}),),
    "stop_sequences": (
        message(frozenset({200}), stop_sequences=["a" * 4095 + str(i % 10) for i in range(16)]),
    ),
    "tokens": (
        of_shape("/detokenize", lambda shape: {"tokens": [100 + i % 800 for i in range(800_000)]}),
    ),
    # -- refused whatever they hold
    "prompt_embeds": (completion(prompt_embeds="x" * _TEXT, ends=_REFUSED),),
    "chat_template": (chat(chat_template="x" * _TEXT, ends=_REFUSED),),
    "audio": (chat(audio={"x": "y" * _TEXT}, ends=_REFUSED),),
    "web_search_options": (chat(web_search_options={"x": "y" * _TEXT}, ends=_REFUSED),),
    "conversation": (
        of_shape(RESPONSES, lambda shape: {"input": "Hi", "conversation": "x" * _TEXT}, 400, 501),
    ),
    # -- admin routes
    "kv_cache_memory": _ADMIN,
    "timeout": _ADMIN,
    "weight": _ADMIN,
    "kv_floor": _ADMIN,
    "kv_cap": _ADMIN,
    "name": _ADMIN,
    "options": _ADMIN,
    "engine": _ADMIN,
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
