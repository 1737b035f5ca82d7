"""What each route answers, for ``/openapi.json``. Replies may have more fields than these."""

from __future__ import annotations

from typing import Any, Final, NamedTuple

__all__ = ["REPLIES", "REPLY_SCHEMAS", "Reply"]

Schema = dict[str, Any]

_INT: Final[Schema] = {"type": "integer"}
_TEXT: Final[Schema] = {"type": "string"}
_NUMBER: Final[Schema] = {"type": "number"}
_SECONDS: Final[Schema] = {"type": ["number", "null"], "description": "Seconds."}


def _list(items: Schema) -> Schema:
    return {"type": "array", "items": items}


def _or_null(schema: Schema) -> Schema:
    return {"anyOf": [schema, {"type": "null"}]}


def _object(**properties: Schema) -> Schema:
    """All of these are always there."""
    return {"type": "object", "required": list(properties), "properties": properties}


def _ref(name: str) -> Schema:
    return {"$ref": f"#/components/schemas/{name}"}


_FINISH: Final[Schema] = {"type": ["string", "null"], "description": "Why it ended: stop, length."}
_STOP: Final[Schema] = {"type": ["string", "integer", "null"]}
_CHOICE: Final = {"index": _INT, "finish_reason": _FINISH, "stop_reason": _STOP}
_IDS: Final = _or_null(_list(_INT))
_MESSAGE: Final = {
    **_object(role=_TEXT, content={"type": ["string", "null"]}),
    "description": "The answer; with tools also `tool_calls`.",
}

_DRAFTS: Final = {
    **_object(accepted_prediction_tokens=_INT, rejected_prediction_tokens=_INT),
    "description": "Where tokens of the answer were drafted, or the request has a `prediction`.",
}

_FINGERPRINT: Final[Schema] = {
    "type": ["string", "null"],
    "description": "Changes with the weights, the version and settings that can change bits.",
}
_USAGE: Final = _object(
    prompt_tokens=_INT,
    completion_tokens=_INT,
    total_tokens=_INT,
    prompt_tokens_details=_object(cached_tokens=_INT),
)

REPLY_SCHEMAS: Final[dict[str, Schema]] = {
    "Usage": {
        **_USAGE,
        "properties": {**_USAGE["properties"], "completion_tokens_details": _DRAFTS},
    },
    "Completion": _object(
        id=_TEXT,
        object={"const": "text_completion"},
        created=_INT,
        model=_TEXT,
        system_fingerprint=_FINGERPRINT,
        choices=_list(
            _object(
                **_CHOICE,
                text=_TEXT,
                logprobs={"type": ["object", "null"]},
                token_ids=_IDS,
                prompt_token_ids=_IDS,
            )
        ),
        usage=_ref("Usage"),
    ),
    "ChatCompletion": _object(
        id=_TEXT,
        object={"const": "chat.completion"},
        created=_INT,
        model=_TEXT,
        system_fingerprint=_FINGERPRINT,
        choices=_list(_object(**_CHOICE, message=_MESSAGE, logprobs={"type": ["object", "null"]})),
        usage=_ref("Usage"),
    ),
    "Response": _object(
        id=_TEXT,
        object={"const": "response"},
        created_at=_INT,
        status=_TEXT,
        model=_TEXT,
        output=_list({"type": "object"}),
    ),
    "Message": _object(
        id=_TEXT,
        type={"const": "message"},
        role={"const": "assistant"},
        model=_TEXT,
        content=_list({"type": "object"}),
        stop_reason={"type": ["string", "null"]},
        stop_sequence={"type": ["string", "null"]},
        usage={"type": "object", "additionalProperties": _INT},
    ),
    "DeletedResponse": _object(id=_TEXT, object={"const": "response"}, deleted={"const": True}),
    "Model": _object(
        id=_TEXT,
        object={"const": "model"},
        created=_INT,
        owned_by=_TEXT,
        root={"type": ["string", "null"]},
        max_model_len=_or_null(_INT),
    ),
    "LivePool": _object(
        num_pages=_INT,
        pages_per_cell=_INT,
        uses={**_list(_TEXT), "description": "What the low four bits of a code say."},
        cells={
            **_TEXT,
            "description": (
                "A character per cell: its code, counted from '0'. 16: shared, 32: in a slot."
            ),
        },
        counts={"type": "object", "additionalProperties": _INT, "description": "Pages by use."},
        num_shared=_INT,
        num_mapped=_INT,
        slots={
            **_list({"type": "array", "items": _INT, "minItems": 2, "maxItems": 2}),
            "description": "For each slot the pages that it shows, and those in use.",
        },
    ),
    "LiveRequest": _object(
        request_id=_TEXT,
        state=_TEXT,
        regime=_TEXT,
        reason=_TEXT,
        costs={"type": "object", "additionalProperties": _NUMBER, "description": "Seconds."},
        slots=_list(_INT),
        num_prompt_tokens=_INT,
        num_cached_tokens=_INT,
        num_output_tokens=_INT,
        max_tokens=_INT,
        age_seconds=_NUMBER,
        ttft_seconds=_SECONDS,
        itl_seconds=_SECONDS,
    ),
}
_FIGURES: Final[Schema] = {"type": "object", "additionalProperties": _NUMBER}
_MODEL_ROW: Final = _object(
    name=_TEXT,
    state={"enum": ["asleep", "waking", "ready", "failed", "leaving"]},
    failure=_TEXT,
    num_requests=_INT,
    num_active=_INT,
    num_waiting=_INT,
    num_wakes=_INT,
    waited_seconds=_NUMBER,
    idle_seconds=_NUMBER,
)


class Reply(NamedTuple):
    """``schema``: of the body; None where it has none. ``streams``: with ``stream`` it comes as
    server-sent events."""

    summary: str
    tag: str
    schema: Schema | None
    media_type: str = "application/json"
    streams: bool = False


#: Replies by path. FastAPI describes further routes by itself.
REPLIES: Final[dict[str, Reply]] = {
    "/v1/completions": Reply("Complete a prompt", "generation", _ref("Completion"), streams=True),
    "/v1/chat/completions": Reply(
        "Answer a conversation", "generation", _ref("ChatCompletion"), streams=True
    ),
    "/invocations": Reply(
        "Either of the two, by what the body has",
        "generation",
        {"anyOf": [_ref("Completion"), _ref("ChatCompletion")]},
        streams=True,
    ),
    "/v1/responses": Reply("Answer, and keep it", "generation", _ref("Response"), streams=True),
    "/v1/responses/{response_id}": Reply(
        "An answer that was kept, or its end",
        "generation",
        {"anyOf": [_ref("Response"), _ref("DeletedResponse")]},
    ),
    "/v1/responses/input_tokens": Reply(
        "How long a response's prompt is",
        "tokens",
        _object(object={"const": "response.input_tokens"}, input_tokens=_INT),
    ),
    "/v1/messages": Reply(
        "Answer a conversation, in Anthropic's shape", "generation", _ref("Message"), streams=True
    ),
    "/v1/messages/count_tokens": Reply(
        "How long a message's prompt is", "tokens", _object(input_tokens=_INT)
    ),
    "/v1/embeddings": Reply(
        "Embeddings of texts",
        "generation",
        _object(
            object={"const": "list"},
            model=_TEXT,
            data=_list(
                _object(
                    object={"const": "embedding"},
                    index=_INT,
                    embedding={
                        "anyOf": [_list(_NUMBER), {**_TEXT, "description": "float32, base64"}]
                    },
                )
            ),
            usage=_object(prompt_tokens=_INT, total_tokens=_INT),
        ),
    ),
    "/tokenize": Reply(
        "Tokens of a prompt or a conversation",
        "tokens",
        _object(
            count=_INT, max_model_len=_INT, tokens=_list(_INT), token_strs=_or_null(_list(_TEXT))
        ),
    ),
    "/detokenize": Reply("The text of tokens", "tokens", _object(prompt=_TEXT)),
    "/tokenizer_info": Reply("The tokenizer's configuration", "tokens", {"type": "object"}),
    "/v1/models": Reply(
        "The names that requests may give",
        "server",
        _object(object={"const": "list"}, data=_list(_ref("Model"))),
    ),
    "/v1/models/{model}": Reply("One of them", "server", _ref("Model")),
    "/v1/kv": Reply("The engine's figures", "server", _FIGURES),
    "/v1/kv/memory": Reply(
        "Change how far the KV cache may grow", "admin", _object(kv_cache_memory=_INT)
    ),
    "/reset_prefix_cache": Reply("Forget every cached prefix", "admin", None),
    "/flush_cache": Reply("Forget every cached prefix", "admin", None),
    "/v1/models/add": Reply("Serve another model", "admin", _MODEL_ROW),
    "/v1/models/remove": Reply("Serve a model no longer", "admin", _MODEL_ROW),
    "/v1/models/change": Reply("Change a model's weight, floor or cap", "admin", _MODEL_ROW),
    "/v1/models/sleep": Reply("End a model's engine until it is needed", "admin", _MODEL_ROW),
    "/v1/models/wake": Reply("Start a model's engine", "admin", _MODEL_ROW),
    "/v1/kv/live": Reply(
        "The pool page by page, slots, queues and your requests",
        "server",
        _object(
            version=_TEXT,
            model=_TEXT,
            max_model_len=_INT,
            uptime_seconds=_NUMBER,
            age_seconds=_NUMBER,
            draining={"type": "boolean"},
            num_active=_INT,
            num_rejected=_INT,
            num_failed=_INT,
            latency={"type": "object", "additionalProperties": {"type": ["number", "null"]}},
            stats=_FIGURES,
            pool=_ref("LivePool"),
            requests=_list(_ref("LiveRequest")),
            num_requests=_INT,
            num_others=_INT,
        ),
    ),
    "/health": Reply("200 while the engine runs", "server", None),
    "/live": Reply("200 as long as the process answers", "server", None),
    "/ready": Reply("200 while the engine runs", "server", None),
    "/ping": Reply("200 while the engine runs", "server", None),
    "/version": Reply("The package's version", "server", _object(version=_TEXT)),
    "/load": Reply("Requests being served", "server", _object(server_load=_INT)),
    "/metrics": Reply("Prometheus' text format", "server", {"type": "string"}, "text/plain"),
}
