"""What each field of a request refuses, by name, and how the error reads."""

from __future__ import annotations

import re
from typing import Any

import pytest

from tests.server.conftest import (
    ANTHROPIC_PATHS,
    CHAT,
    COMPLETIONS,
    EMBEDDINGS,
    MESSAGES,
    RESPONSES,
    VALID,
    Body,
    Running,
)

#: What differs from a valid body, the field that is named, and a pattern of what is told.
Rows = list[tuple[Body, str, str]]
INT64 = 2**63 - 1


def function(**fields: Any) -> Body:
    return {"tools": [{"type": "function", "function": fields}]}


def custom(**fields: Any) -> Body:
    return {"tools": [{"type": "custom", "custom": fields}]}


def said(role: Any, content: Any, **fields: Any) -> Body:
    return {"messages": [{"role": role, "content": content, **fields}]}


def allowed(mode: str, *names: str) -> Body:
    tools = [{"type": "function", "function": {"name": name}} for name in names]
    return among(mode=mode, tools=tools)


def among(**allowed_tools: Any) -> Body:
    return {"tool_choice": {"type": "allowed_tools", "allowed_tools": allowed_tools}}


def structured(**fields: Any) -> Body:
    return {"structured_outputs": fields}


def wanted(kind: str, **fields: Any) -> Body:
    return {"response_format": {"type": kind, **fields}}


BEAMS: Body = {"use_beam_search": True}
IMAGE = {"type": "image_url", "image_url": {"url": "x"}}
NOW = function(name="now")

COMPLETIONS_AND_CHAT: Rows = [
    ({"n": 0}, "n", "n must be at least 1: .*greater_than_equal"),
    ({"n": 129}, "n", "n must be at most 128: .*less_than_equal"),
    ({"n": "2"}, "n", "int_type"),  # types of all others: test_protocol.py
    ({"max_tokens": 0}, "max_tokens", "max_tokens must be at least 1: .*greater_than_equal"),
    ({"max_tokens": 257}, "max_tokens", "max_completion_tokens is too large.* is 256 tokens"),
    ({"max_tokens": INT64 + 1}, "max_tokens", "less_than_equal"),
    ({"min_tokens": 5, "max_tokens": 4}, "min_tokens", "less_than_equal"),
    ({"temperature": -0.1}, "temperature", "must be at least 0: .*greater_than_equal"),
    ({"temperature": 2.1}, "temperature", "must be at most 2: .*less_than_equal.*got 2.1"),
    ({"top_p": 0}, "top_p", "greater_than"),
    ({"top_p": 1.01}, "top_p", "less_than_equal"),
    ({"top_k": -2}, "top_k", "greater_than_equal"),
    ({"min_p": 1.5}, "min_p", "less_than_equal"),
    ({"presence_penalty": 2.5}, "presence_penalty", "must be at most 2"),
    ({"frequency_penalty": -2.5}, "frequency_penalty", "must be at least -2"),
    ({"repetition_penalty": 0}, "repetition_penalty", "greater_than"),
    ({"seed": INT64 + 1}, "seed", "less_than_equal"),
    ({"seed": -INT64 - 2}, "seed", "greater_than_equal"),
    ({"stop": ""}, "stop[0]", "string_too_short"),
    ({"stop": ["x"] * 17}, "stop", "too_long"),
    ({"stop": [1]}, "stop[0]", "string_type"),
    ({"stop": {"a": 1}}, "stop", "list_type"),
    ({"stop_token_ids": [259]}, "stop_token_ids", "out of vocabulary"),
    ({"allowed_token_ids": []}, "allowed_token_ids", "too_short"),
    ({"allowed_token_ids": [3, 259]}, "allowed_token_ids", "out of vocabulary"),
    ({"bad_words": [""]}, "bad_words[0]", "too_short"),
    ({"logit_bias": {"a": 1, "3": 1, "b2": 2}}, "logit_bias", "logit_bias.*a, b2"),
    ({"logit_bias": {"7": "x"}}, "logit_bias", "logit_bias.*7.*number"),
    ({"logit_bias": {"7": True}}, "logit_bias", "logit_bias.*7.*number"),
    ({"logit_bias": {"7": 100.5}}, "logit_bias", "logit_bias.*7.*100"),
    ({"logit_bias": {"259": 1, "-1": 1, "5": 1}}, "logit_bias", "logit_bias.*259, -1.*259"),
    ({"logit_bias": {str(i): 1 for i in range(1025)}}, "logit_bias", "too_long"),
    ({"logit_bias": [1]}, "logit_bias", "dict_type"),
    ({"prompt_logprobs": 21}, "prompt_logprobs", "greater than max allowed: 20"),
    ({"prompt_logprobs": -1}, "prompt_logprobs", "greater than max allowed: 20"),
    ({"prompt_logprobs": -2}, "prompt_logprobs", "greater_than_equal"),
    ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs", "cannot be streamed"),
    ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens", "from 1 to 256"),
    ({"truncate_prompt_tokens": -2}, "truncate_prompt_tokens", "greater_than_equal"),
    ({"truncate_prompt_tokens": 257}, "truncate_prompt_tokens", "from 1 to 256"),
    ({"truncation_side": "middle"}, "truncation_side", "literal_error"),
    ({"priority": 2**40}, "priority", "less_than_equal"),
    ({"request_id": ""}, "request_id", "too_short"),
    ({"request_id": "x" * 257}, "request_id", "too_long"),
    ({"request_id": "a\nb"}, "request_id", "printable"),
    ({"stream_options": {"include_usage": None}}, "stream_options", "only for requests with s"),
    ({"stream": False, "stream_options": {"x": 1}}, "stream_options", "only for requests"),
    ({"stream": True, "stream_options": {"include_usage": 1}}, "stream_options", "include_usage"),
    ({"stream": True, "stream_options": [1]}, "stream_options", "dict_type"),
    ({**BEAMS, "stream": True}, "stream", "only at the end"),
    ({**BEAMS, "stop": "x"}, "stop", "end token"),
    ({**BEAMS, "length_penalty": 101}, "length_penalty", "less_than_equal"),
    ({"structured_outputs": "a"}, "structured_outputs", "must be an object"),
    (structured(), "structured_outputs", "none is given"),
    (structured(unknown=1), "structured_outputs", "has no 'unknown'"),
    (structured(regex="a", choice=["a"]), "structured_outputs", "got regex"),
    (structured(regex=5), "structured_outputs", "must be a string"),
    (structured(choice=[]), "structured_outputs", "at least one"),
    (wanted("json_schema", json_schema={}), "response_format", "needs a schema"),
    (wanted("json_schema"), "response_format", "needs a schema"),
    ({**wanted("json_object"), **structured(regex="a")}, "response_format", "leave one out"),
    (wanted("yaml"), "response_format", '"text"'),
    ({"response_format": "text"}, "response_format", "must be an object"),
    ({"prompt_embeds": "AAAA"}, "prompt_embeds", "not implemented"),
    ({"logprob_token_ids": [5]}, "logprob_token_ids", "needs logprobs"),
]

COMPLETIONS_ALONE: Rows = [
    ({"suffix": "x", "prompt": [5, 6]}, "suffix", "a text"),
    ({**BEAMS, "logprobs": 1, "logprob_token_ids": [5]}, "logprob_token_ids", "use logprobs"),
    ({**BEAMS, "echo": True, "logprobs": 1}, "echo", "echo with logprobs"),
    ({"logprobs": 21}, "logprobs", "greater than max allowed: 20"),
    ({"logprobs": -1}, "logprobs", "greater than max allowed: 20"),
    ({"logprobs": -2}, "logprobs", "greater_than_equal"),
    ({"logprobs": 1, "logprob_token_ids": [259]}, "logprob_token_ids", "out of vocabulary"),
    ({"best_of": 129}, "best_of", "less_than_equal"),
    ({"n": 3, "best_of": 2}, "best_of", "at least n"),
    ({"best_of": 2, "stream": True}, "best_of", "cannot be streamed"),
    ({"prompt": [300]}, "prompt", "out of vocabulary"),
    ({"prompt": [5, -1]}, "prompt", "out of vocabulary"),
    ({"prompt": [1.0]}, "prompt", "prompt must be"),
    ({"prompt": [True]}, "prompt", "prompt must be"),
    ({"prompt": [[5], [None]]}, "prompt", "prompt must be"),
    ({"prompt": {"text": "x"}}, "prompt", "prompt must be"),
    ({"prompt": 5}, "prompt", "prompt must be"),
    ({"prompt": ["a"] * 1025}, "prompt", "at most 1024"),
]

CHAT_ALONE: Rows = [
    ({"messages": None}, "messages", "must be a list"),
    ({"messages": "Hi"}, "messages", "must be a list"),
    ({"messages": {}}, "messages", "must be a list"),
    ({"messages": []}, "messages", "empty"),
    ({"messages": ["Hi"]}, "messages", r"messages\[0\] must be an object"),
    ({"messages": [{"content": "Hi"}]}, "messages", "role"),
    (said(1, "Hi"), "messages", "role"),
    (said("", "Hi"), "messages", "role"),
    (said("r" * 257, "Hi"), "messages", "role is too long"),
    (said("refused", "Hi"), "messages", "template refuses"),
    (said("user", 5), "messages", "content"),
    (said("user", [5]), "messages", "content"),
    (said("user", [IMAGE]), "messages", "image_url.*only text"),
    (said("user", [{"type": "text"}]), "messages", "text"),
    ({"max_completion_tokens": 0}, "max_completion_tokens", "greater_than_equal"),
    ({"max_completion_tokens": 300}, "max_completion_tokens", "is too large.* 256 tokens"),
    ({"top_logprobs": 0}, "top_logprobs", "needs logprobs"),
    ({"logprobs": False, "top_logprobs": 2}, "top_logprobs", "needs logprobs"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs", "greater than max allowed: 20"),
    ({"logprobs": True, "top_logprobs": -1}, "top_logprobs", "greater than max allowed: 20"),
    (
        {"add_generation_prompt": True, "continue_final_message": True},
        "continue_final_message",
        "add_generation_prompt",
    ),
    ({"chat_template": "x"}, "chat_template", "templates from requests"),
    ({"tools": []}, "tools", "from 1 to"),
    ({"tools": "x"}, "tools", "list of objects"),
    ({"tools": [{"type": "function"}]}, "tools", "function with a name"),
    (function(name=""), "tools", "from 1 to 256 characters"),
    (function(name="f", parameters=1), "tools", "must be a JSON schema"),
    ({**NOW, "tool_choice": "any"}, "tool_choice", "must be"),
    ({**NOW, "tool_choice": {"type": "x"}}, "tool_choice", "must"),
    ({**NOW, "tool_choice": function(name="g")["tools"][0]}, "tool_choice", "no tool 'g'"),
    ({**NOW, **allowed("auto")}, "tool_choice", "needs allowed_tools"),
    ({**NOW, **allowed("none", "now")}, "tool_choice", "needs allowed_tools"),
    ({**NOW, "tool_choice": {"type": "allowed_tools"}}, "tool_choice", "needs allowed_tools"),
    ({**NOW, **allowed("auto", "other")}, "tool_choice", "there is no tool 'other'"),
    ({**NOW, **among(mode="auto", tools=["now"])}, "tool_choice", "must be"),
    ({"tools": [{"type": "web_search"}]}, "tools", r"tools\[0\] is of .*search': only .* function"),
    ({"tools": [{"type": "custom"}]}, "tools", r"tools\[0\].custom must be an object with a name"),
    (custom(name=5), "tools", r"tools\[0\].custom must be an object with a"),
    (custom(name=""), "tools", r"tools\[0\].function.name must have from 1"),
    (custom(name="f", description=5), "tools", "must be a string"),
    (custom(name="f", format=5), "tools", "format must be"),
    (custom(name="f", format={"type": "grammar"}), "tools", "format must"),
    ({"prediction": "text"}, "prediction", "prediction"),
    ({"prediction": {"type": "diff", "content": "x"}}, "prediction", "prediction"),
    ({"prediction": {"type": "content"}}, "prediction", "prediction"),
    ({"prediction": {"type": "content", "content": 5}}, "prediction", "prediction"),
    ({"prediction": {"type": "content", "content": [IMAGE]}}, "prediction", "prediction"),
    ({"tool_choice": "auto"}, "tool_choice", "needs tools"),
    ({"web_search_options": {}}, "web_search_options", "not implemented"),
    ({"audio": {"voice": "a"}}, "modalities", "not implemented"),
    ({"modalities": ["text", "audio"]}, "modalities", "not implemented"),
]


#: OpenAI's older form of tools, beside two functions that are right.
WITH_FUNCTIONS: Rows = [
    ({"functions": []}, "functions", "functions must have from 1"),
    ({"functions": "x"}, "functions", "list of objects"),
    ({"functions": [5]}, "functions", "list of objects"),
    ({"functions": [{}]}, "functions", r"functions\[0\] must have a function with a name"),
    ({"functions": [{"name": "f", "parameters": 5}]}, "functions", r"\[0\].parameters must be a J"),
    ({"function_call": "required"}, "function_call", 'must be "none", "auto" or'),
    ({"function_call": {"name": "other"}}, "function_call", "function_call: there is no"),
    ({"function_call": {"name": "my_tools"}}, "function_call", "no tool 'my_tools'"),
    ({"functions": None, "function_call": "auto"}, "function_call", "needs functions"),
    ({"tools": []}, "functions", "goes without tools"),
    ({"tool_choice": "auto"}, "functions", "goes without tool_choice"),
    (said("assistant", None, function_call="x"), "messages", r"\[0\].function_call must be an obj"),
]

GBNF = 'root ::= "yes" | "no"'
#: What an answer has to match, in the words of other servers.
FORMATS: Rows = [
    ({"structural_tag": {"triggers": []}}, "structural_tag", "use tools"),
    ({"guided_whitespace_pattern": " *"}, "guided_whitespace_pattern", "leave it out"),
    (structured(json={}, whitespace_pattern=" *"), "structured_outputs", "no"),
    ({"grammar": {"type": "json"}}, "grammar", "must be a string"),
    ({"guided_choice": "a"}, "guided_choice", "list of strings"),
    ({"json_schema": "{"}, "json_schema", "not the JSON text"),
    (wanted("json_object", schema="x"), "response_format", "an object"),
    (wanted("structural_tag"), "response_format", '"regex"'),
    ({"regex": "a", "ebnf": GBNF}, "regex", "ebnf and regex|regex and ebnf"),
    ({"regex": "a", **wanted("json_object")}, "regex", "response_format"),
]

INPUTS: list[Any] = [None, "", [], ["x"], 5, [{"role": 5, "content": "x"}], [{"type": "image"}]]
INPUTS += [[{"role": "user", "content": 5}], [{"type": "function_call"}]]
INPUTS += [[{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]]
NOW_OF_RESPONSES: Body = {"tools": [{"type": "function", "name": "now"}]}
OF_RESPONSES: Rows = [
    *(({"input": given}, "input", "") for given in INPUTS),
    ({"background": True}, "background", ""),
    ({"conversation": "c"}, "conversation", ""),
    ({"tools": [{"type": "web_search"}]}, "tools", ""),
    ({"tools": "x"}, "tools", ""),
    ({**NOW_OF_RESPONSES, "tool_choice": {"type": "function", "name": "x"}}, "tool_choice", ""),
    ({"text": "x"}, "text", ""),
    ({"text": {"format": {"type": "yaml"}}}, "text.format", ""),
    ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "text.format", ""),
    ({"max_output_tokens": 0}, "max_output_tokens", ""),
    ({"metadata": {str(i): "" for i in range(17)}}, "metadata", ""),
    ({"metadata": {"k" * 65: ""}}, f"metadata.{'k' * 65}.[key]", ""),
    ({"metadata": {"k": "v" * 513}}, "metadata.k", ""),
    ({"metadata": {"k": {"nested": {}}}}, "metadata.k", ""),
    ({"metadata": {"k": 5}}, "metadata.k", ""),
]

NOW_OF_MESSAGES: Body = {"tools": [{"name": "now", "input_schema": {"type": "object"}}]}
#: Anthropic's errors have no field: the message names it.
OF_MESSAGES: Rows = [
    ({"max_tokens": None}, "max_tokens", ""),
    ({"messages": []}, "messages", ""),
    (said("system", "x"), "messages", r"messages\[0\]"),
    (said("user", [{"type": "image"}]), "messages", "image"),
    (said("user", [{"type": "tool_result"}]), "messages", "tool_use_id"),
    ({"tools": [{"type": "web_search_20250305", "name": "w"}]}, "tools", "web_search"),
    ({**NOW_OF_MESSAGES, "tool_choice": {"type": "some"}}, "tool_choice", ""),
    ({**NOW_OF_MESSAGES, "tool_choice": {"type": "tool", "name": "x"}}, "tool", "no tool"),
    ({"system": 3}, "system", ""),
    ({"output_config": {"format": {"type": "json_schema"}}}, "output_config.format", ""),
]

OF_EMBEDDINGS: Rows = [
    ({"input": ""}, "input", "empty"),
    ({"input": None}, "input", "empty"),
    ({"input": ["a", 5]}, "input", "not mixed"),
    ({"input": [1, 99999]}, "input", "out of vocabulary"),
    ({"input": {"a": 1}}, "input", "string"),
    ({"input": "x" * 300}, "input", "context length"),
    ({"dimensions": 0}, "dimensions", "at least 1"),
    ({"dimensions": 5}, "dimensions", "from 1 to 4"),
    ({"encoding_format": "int8"}, "encoding_format", ""),
    ({"pooling": "max"}, "pooling", ""),
]

FUNCTIONS = [{"name": "get_weather", "parameters": {"type": "object"}}, {"name": "now"}]
#: Routes, what a body has beside the valid one's, and what is refused there.
TABLES: list[tuple[list[str], Body, Rows]] = [
    ([COMPLETIONS, CHAT], {}, COMPLETIONS_AND_CHAT),
    ([COMPLETIONS], {}, COMPLETIONS_ALONE),
    ([CHAT], {}, CHAT_ALONE),
    ([CHAT], {"functions": FUNCTIONS}, WITH_FUNCTIONS),
    ([COMPLETIONS, CHAT, RESPONSES, MESSAGES], {}, FORMATS),
    ([RESPONSES], {}, OF_RESPONSES),
    ([MESSAGES], {}, OF_MESSAGES),
    ([EMBEDDINGS], {}, OF_EMBEDDINGS),
]


REFUSED = [
    pytest.param(path, {**VALID[path], **base, **change}, param, told, id=f"{path} {change!r:.60}")
    for paths, base, rows in TABLES
    for path in paths
    for change, param, told in rows
]


@pytest.mark.parametrize(("path", "body", "param", "told"), REFUSED)
def test_refused_by_name(shared: Running, path: str, body: Body, param: str, told: str) -> None:
    error = shared.error(path, body)
    if path in ANTHROPIC_PATHS:
        assert error["type"] == "invalid_request_error"
        assert param in error["message"]
    else:
        assert (error["type"], error["param"]) == ("BadRequestError", param)
    assert re.search(told, error["message"]), error["message"]
