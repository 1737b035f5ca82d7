"""Requests as clients send them: types and bounds. What fields mean together is checked later.

Types are strict (``"16"``, ``16.0`` and ``true`` are no integers); fields that are not
declared here are ignored, as are their values.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, WithJsonSchema
from pydantic_core import PydanticCustomError

from vmserve.server.limits import SIZES, bounded, sized

__all__ = [
    "AddModelRequest",
    "ChatCompletionRequest",
    "CompletionRequest",
    "ConstrainedRequest",
    "CountMessageTokensRequest",
    "DetokenizeRequest",
    "EmbeddingRequest",
    "GenerationRequest",
    "KVMemoryRequest",
    "MessagesRequest",
    "ModelRequest",
    "ModelTermsRequest",
    "RequestModel",
    "ResponsesRequest",
    "TokenizeRequest",
]


def _one_or_many(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


_TEXT_OR_TEXTS: dict[str, Any] = {
    "anyOf": [
        {"type": "string", "minLength": 1},
        {
            "type": "array",
            "items": {"type": "string", "minLength": 1},
            "maxItems": SIZES["stop"][1],
        },
        {"type": "null"},
    ]
}
_PROMPT: dict[str, Any] = {
    "description": "A text, token ids, or a list of either.",
    "anyOf": [
        {"type": "string", "minLength": 1},
        {"type": "array", "minItems": 1, "items": {"type": "string", "minLength": 1}},
        {"type": "array", "minItems": 1, "items": {"type": "integer", "minimum": 0}},
        {
            "type": "array",
            "minItems": 1,
            "items": {"type": "array", "minItems": 1, "items": {"type": "integer", "minimum": 0}},
        },
    ],
}
_TEXT_PARTS: dict[str, Any] = {
    "type": "array",
    "items": {
        "type": "object",
        "required": ["type", "text"],
        "properties": {"type": {"const": "text"}, "text": {"type": "string"}},
    },
}
_MESSAGES: dict[str, Any] = {
    "type": "array",
    "minItems": 1,
    "items": {
        "type": "object",
        "required": ["role"],
        "properties": {
            "role": {"type": "string", "minLength": 1},
            "content": {
                "anyOf": [
                    {"type": "string"},
                    _TEXT_PARTS,
                    {"type": "null"},
                ]
            },
            "name": {"type": "string"},
        },
    },
}
_PREDICTION: dict[str, Any] = {
    "description": "What the answer may say. It changes how fast the answer comes, and no token.",
    "anyOf": [
        {
            "type": "object",
            "required": ["type", "content"],
            "properties": {
                "type": {"const": "content"},
                "content": {"anyOf": [{"type": "string"}, _TEXT_PARTS]},
            },
        },
        {"type": "null"},
    ],
}
_INPUT: dict[str, Any] = {
    "description": "A text, or messages, calls of functions and their outputs.",
    "anyOf": [
        {"type": "string", "minLength": 1},
        {"type": "array", "minItems": 1, "items": {"type": "object"}},
    ],
}


def _printable(value: Any) -> Any:
    if isinstance(value, str) and not value.isprintable():
        raise PydanticCustomError("printable", "Input should have printable characters only")
    return value


Ids = list[Annotated[int, bounded("token_id")]]
StopStrings = Annotated[
    list[Annotated[str, sized("stop.item")]] | None,
    sized("stop"),
    BeforeValidator(_one_or_many),
    WithJsonSchema(_TEXT_OR_TEXTS),
]
Metadata = Annotated[
    dict[Annotated[str, sized("metadata.key")], Annotated[str, sized("metadata.value")]] | None,
    sized("metadata"),
]
#: Field that is checked by hand, for clearer errors than those of a union; None where absent.
Anything = Annotated[Any, WithJsonSchema({})]
#: Field that is understood, but not served: the schema has it so that the refusal is no surprise.
NotServed = Annotated[Any, WithJsonSchema({"type": "null"})]


class RequestModel(BaseModel):
    model_config = ConfigDict(extra="ignore", strict=True, protected_namespaces=(), frozen=True)


class ConstrainedRequest(RequestModel):
    """What an answer has to match: vmserve's word for it, OpenAI's, and those of other servers.

    None of them may be ignored: the answer would be another one.
    """

    response_format: Anything = None
    structured_outputs: Anything = None
    # vLLM's, before it had structured_outputs
    guided_json: Anything = None
    guided_regex: Anything = None
    guided_choice: Anything = None
    guided_grammar: Anything = None
    guided_whitespace_pattern: Anything = None
    # llama.cpp's and SGLang's
    grammar: Anything = None
    json_schema: Anything = None
    regex: Anything = None
    ebnf: Anything = None
    structural_tag: Anything = None
    # TabbyAPI's, and NIM's, which has vLLM's within
    regex_pattern: Anything = None
    grammar_string: Anything = None
    nvext: Anything = None


class GenerationRequest(ConstrainedRequest):
    """Fields that both generation routes have."""

    model: Annotated[str | None, sized("model")] = None
    stream: bool | None = None
    stream_options: Annotated[dict[str, Any] | None, sized("stream_options")] = None

    n: Annotated[int | None, bounded("n")] = None
    max_tokens: Annotated[int | None, bounded("max_tokens")] = None
    min_tokens: Annotated[int | None, bounded("min_tokens")] = None
    temperature: Annotated[float | None, bounded("temperature")] = None
    top_p: Annotated[float | None, bounded("top_p")] = None
    top_k: Annotated[int | None, bounded("top_k")] = None
    min_p: Annotated[float | None, bounded("min_p")] = None
    presence_penalty: Annotated[float | None, bounded("presence_penalty")] = None
    frequency_penalty: Annotated[float | None, bounded("frequency_penalty")] = None
    repetition_penalty: Annotated[float | None, bounded("repetition_penalty")] = None
    seed: Annotated[int | None, bounded("seed")] = None
    stop: StopStrings = None
    stop_token_ids: Annotated[Ids | None, sized("stop_token_ids")] = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    logit_bias: Annotated[dict[str, Any] | None, sized("logit_bias")] = None
    allowed_token_ids: Annotated[Ids | None, sized("allowed_token_ids")] = None
    bad_words: Annotated[
        list[Annotated[str, sized("bad_words.item")]] | None, sized("bad_words")
    ] = None
    prompt_logprobs: Annotated[int | None, bounded("prompt_logprobs")] = None
    logprob_token_ids: Annotated[Ids | None, sized("logprob_token_ids")] = None
    truncate_prompt_tokens: Annotated[int | None, bounded("truncate_prompt_tokens")] = None
    truncation_side: Literal["left", "right"] | None = None
    priority: Annotated[int | None, bounded("priority")] = None
    request_id: Annotated[str | None, sized("request_id"), BeforeValidator(_printable)] = None
    cache_salt: Annotated[str | None, sized("cache_salt")] = None
    #: Seconds in which the request must end.
    request_timeout: Annotated[float | None, bounded("request_timeout")] = None
    #: Tenant whose share the request counts against, where the server has no keys to distinguish
    #: tenants.
    user: Annotated[str | None, sized("user")] = None
    echo: bool | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None

    #: OpenAI's prediction for chats: ``{"type": "content", "content": text or parts}``.
    prediction: Annotated[Any, WithJsonSchema(_PREDICTION)] = None
    speculative: bool | None = None

    use_beam_search: bool | None = None
    length_penalty: Annotated[float | None, bounded("length_penalty")] = None
    early_stopping: bool | Literal["never"] | None = None
    prompt_embeds: NotServed = None


class CompletionRequest(GenerationRequest):
    """The body of ``POST /v1/completions``."""

    prompt: Annotated[Any, WithJsonSchema(_PROMPT)] = None
    add_special_tokens: bool | None = None
    best_of: Annotated[int | None, bounded("best_of")] = None
    logprobs: Annotated[int | None, bounded("logprobs")] = None
    suffix: Annotated[str | None, sized("suffix")] = None


class ChatCompletionRequest(GenerationRequest):
    """The body of ``POST /v1/chat/completions``."""

    messages: Annotated[Any, WithJsonSchema(_MESSAGES)] = None
    max_completion_tokens: Annotated[int | None, bounded("max_completion_tokens")] = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int | None, bounded("top_logprobs")] = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    add_special_tokens: bool | None = None
    chat_template_kwargs: Annotated[dict[str, Any] | None, sized("chat_template_kwargs")] = None
    tools: Anything = None
    tool_choice: Anything = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: Annotated[str | None, sized("reasoning_effort")] = None

    # What tools were called before.
    functions: Anything = None
    function_call: Anything = None

    chat_template: NotServed = None
    audio: NotServed = None
    web_search_options: NotServed = None
    modalities: Anything = None

    @property
    def template_variables(self) -> dict[str, Any] | None:
        """``chat_template_kwargs``, and the effort under the names that templates have for it."""
        if self.reasoning_effort is None:
            return self.chat_template_kwargs
        effort: dict[str, Any] = {"reasoning_effort": self.reasoning_effort}
        if self.reasoning_effort == "none":
            effort["enable_thinking"] = False
        return effort | (self.chat_template_kwargs or {})


class ResponsesRequest(ConstrainedRequest):
    """The body of ``POST /v1/responses``."""

    model: Annotated[str | None, sized("model")] = None
    input: Annotated[Any, WithJsonSchema(_INPUT)] = None
    instructions: Annotated[str | None, sized("instructions")] = None
    previous_response_id: Annotated[str | None, sized("previous_response_id")] = None
    store: bool | None = None
    stream: bool | None = None
    max_output_tokens: Annotated[int | None, bounded("max_output_tokens")] = None
    metadata: Metadata = None
    text: Anything = None
    tools: Anything = None
    tool_choice: Anything = None
    parallel_tool_calls: bool | None = None
    truncation: Literal["auto", "disabled"] | None = None
    background: bool | None = None
    conversation: NotServed = None
    reasoning: Anything = None

    temperature: Annotated[float | None, bounded("temperature")] = None
    top_p: Annotated[float | None, bounded("top_p")] = None
    top_k: Annotated[int | None, bounded("top_k")] = None
    min_p: Annotated[float | None, bounded("min_p")] = None
    repetition_penalty: Annotated[float | None, bounded("repetition_penalty")] = None
    presence_penalty: Annotated[float | None, bounded("presence_penalty")] = None
    frequency_penalty: Annotated[float | None, bounded("frequency_penalty")] = None
    seed: Annotated[int | None, bounded("seed")] = None
    ignore_eos: bool | None = None
    min_tokens: Annotated[int | None, bounded("min_tokens")] = None
    priority: Annotated[int | None, bounded("priority")] = None
    cache_salt: Annotated[str | None, sized("cache_salt")] = None
    request_timeout: Annotated[float | None, bounded("request_timeout")] = None
    user: Annotated[str | None, sized("user")] = None
    chat_template_kwargs: Annotated[dict[str, Any] | None, sized("chat_template_kwargs")] = None


_CLAUDE_MESSAGES: dict[str, Any] = {
    "type": "array",
    "minItems": 1,
    "items": {
        "type": "object",
        "required": ["role", "content"],
        "properties": {
            "role": {"enum": ["user", "assistant"]},
            "content": {
                "anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "object"}}]
            },
        },
    },
}


class CountMessageTokensRequest(RequestModel):
    """The body of ``POST /v1/messages/count_tokens``, in Anthropic's shape."""

    model: Annotated[str | None, sized("model")] = None
    messages: Annotated[Any, WithJsonSchema(_CLAUDE_MESSAGES)] = None
    system: Anything = None
    tools: Anything = None
    tool_choice: Anything = None
    thinking: Annotated[dict[str, Any] | None, sized("thinking")] = None


class MessagesRequest(CountMessageTokensRequest, ConstrainedRequest):
    """The body of ``POST /v1/messages``, in Anthropic's shape."""

    max_tokens: Annotated[int, bounded("max_output_tokens")]
    stream: bool | None = None
    stop_sequences: Annotated[list[Annotated[str, sized("stop.item")]] | None, sized("stop")] = None
    temperature: Annotated[float | None, bounded("temperature")] = None
    top_p: Annotated[float | None, bounded("top_p")] = None
    top_k: Annotated[int | None, bounded("top_k")] = None
    metadata: Annotated[dict[str, Any] | None, sized("metadata")] = None
    output_config: Annotated[dict[str, Any] | None, sized("output_config")] = None
    #: Former name of output_config.format.
    output_format: Anything = None


class EmbeddingRequest(RequestModel):
    """The body of ``POST /v1/embeddings``."""

    model: Annotated[str | None, sized("model")] = None
    input: Annotated[Any, WithJsonSchema(_PROMPT)] = None
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Annotated[int | None, bounded("dimensions")] = None
    pooling: Literal["auto", "last", "mean"] | None = None
    user: Annotated[str | None, sized("user")] = None
    add_special_tokens: bool | None = None
    truncate_prompt_tokens: Annotated[int | None, bounded("truncate_prompt_tokens")] = None
    truncation_side: Literal["left", "right"] | None = None
    priority: Annotated[int | None, bounded("priority")] = None
    cache_salt: Annotated[str | None, sized("cache_salt")] = None
    request_timeout: Annotated[float | None, bounded("request_timeout")] = None


class TokenizeRequest(RequestModel):
    """The body of ``POST /tokenize``: ``prompt`` or ``messages``."""

    model: Annotated[str | None, sized("model")] = None
    prompt: Annotated[str | None, Field(max_length=SIZES["prompt.text"][1])] = None
    messages: Annotated[Any, WithJsonSchema(_MESSAGES)] = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: Annotated[dict[str, Any] | None, sized("chat_template_kwargs")] = None
    tools: Anything = None
    chat_template: NotServed = None

    @property
    def template_variables(self) -> dict[str, Any] | None:
        return self.chat_template_kwargs


#: Bytes, or a text such as 4GiB.
Size = Annotated[int, bounded("kv_cache_memory")] | Annotated[str, sized("kv_cache_memory")]


class KVMemoryRequest(RequestModel):
    """The body of ``POST /v1/kv/memory``: bytes, or a text such as ``4GiB``."""

    kv_cache_memory: Size
    model: Annotated[str | None, sized("model")] = None


class ModelRequest(RequestModel):
    """The body of routes that put a model to sleep, wake or remove it."""

    model: Annotated[str, sized("model")]
    timeout: Annotated[float | None, bounded("request_timeout")] = None


class ModelTermsRequest(RequestModel):
    """The body of ``POST /v1/models/change``."""

    model: Annotated[str, sized("model")]
    weight: Annotated[float | None, bounded("weight")] = None
    kv_floor: Size | None = None
    kv_cap: Size | None = None


class AddModelRequest(ModelTermsRequest):
    """The body of ``POST /v1/models/add``: ``options`` as in a table of ``--models-config``."""

    name: Annotated[str | None, sized("model")] = None
    preload: bool | None = None
    options: Annotated[dict[str, Any] | None, sized("options")] = None


class DetokenizeRequest(RequestModel):
    """The body of ``POST /detokenize``."""

    model: Annotated[str | None, sized("model")] = None
    tokens: Annotated[Ids, sized("tokens")]
