"""Every bound on what a request may hold, in one table.

A number, a string or a list without an entry here cannot be declared in a request
model (:func:`bounded`, :func:`sized` raise ``KeyError``).
"""

from __future__ import annotations

from typing import Any, Final

from pydantic import Field

from vmserve.options import Bounds
from vmserve.sampling.params import (
    INT64_MAX,
    LIMITS,
    MAX_BAD_WORD_CHARS,
    MAX_BAD_WORDS,
    MAX_LOGIT_BIAS_ENTRIES,
    MAX_STOP_CHARS,
    MAX_STOP_STRINGS,
)

__all__ = [
    "BODY_TIMEOUT_SECONDS",
    "HEAD_TIMEOUT_SECONDS",
    "MAX_BODY_BYTES",
    "MAX_CONTAINERS",
    "MAX_CONTEXTS",
    "MAX_DEPTH",
    "MAX_HEADER_BYTES",
    "MAX_HELD_BYTES",
    "MAX_HELD_BYTES_OF_ONE",
    "MAX_LOGPROBS_AT_ONCE",
    "MAX_LOGPROB_ENTRIES",
    "MAX_MESSAGE_BYTES",
    "MAX_REPEATED",
    "MAX_SEND_BYTES",
    "NUMBERS",
    "SIZES",
    "WRITE_STALL_SECONDS",
    "bounded",
    "sized",
]

MAX_BODY_BYTES: Final = 4 * 1024**2
#: Bytes of all bodies whose requests have not ended: those of one tenant, and of all together.
MAX_HELD_BYTES_OF_ONE: Final = 64 * 1024**2
MAX_HELD_BYTES: Final = 256 * 1024**2
#: Nesting of arrays and objects in a body.
MAX_DEPTH: Final = 64
#: Arrays and objects in a body.
MAX_CONTAINERS: Final = 65_536
#: Log-probabilities that one request may have: positions times tokens at each.
MAX_LOGPROB_ENTRIES: Final = 500_000
#: Log-probabilities of a request in one step, for several choices.
MAX_LOGPROBS_AT_ONCE: Final = 8192
#: Ids in lists of a request's parameters, and characters of its texts / 16, for all its prompts
#: together: each prompt takes them to the engine.
MAX_REPEATED: Final = 1_000_000
#: Length of a conversation that is read to truncate or count it, as a multiple of the context.
MAX_CONTEXTS: Final = 16
MAX_HEADER_BYTES: Final = 32 * 1024
#: Time in which a whole body has to arrive.
BODY_TIMEOUT_SECONDS: Final = 30.0
#: Time from its first byte in which the head of a request has to arrive.
HEAD_TIMEOUT_SECONDS: Final = 30.0
#: Time after which a connection is cut if its write buffer stays full.
WRITE_STALL_SECONDS: Final = 30.0
#: Buffer of the system for a connection whose client does not read; it grows no further.
MAX_SEND_BYTES: Final = 256 * 1024
#: Bytes of an error's message as JSON; with its envelope an error body stays under 2 KiB.
MAX_MESSAGE_BYTES: Final = 1600

_INT32 = 2**31 - 1

#: Ranges of fields that only HTTP requests have; those of sampling fields are in
#: :data:`vmserve.sampling.params.LIMITS`.
NUMBERS: Final[dict[str, Bounds]] = {
    **LIMITS,
    "dimensions": Bounds(1, _INT32, integer=True),
    "kv_cache_memory": Bounds(1, INT64_MAX, integer=True),
    "max_output_tokens": Bounds(1, INT64_MAX, integer=True),
    "max_completion_tokens": Bounds(1, INT64_MAX, integer=True),
    "priority": Bounds(-_INT32, _INT32, integer=True),
    "request_timeout": Bounds(0, 86_400, open_low=True),
    "token_id": Bounds(0, INT64_MAX, integer=True),
    "top_logprobs": Bounds(-1, INT64_MAX, integer=True),
    "truncate_prompt_tokens": Bounds(-1, INT64_MAX, integer=True),
    "weight": Bounds(0, 1_000_000, open_low=True),
}

#: Fewest and most characters of a string, entries of a list or keys of an object. Fields that may
#: fill a body are bounded by MAX_BODY_BYTES, and later by the context.
SIZES: Final[dict[str, tuple[int, int]]] = {
    "allowed_token_ids": (1, 300_000),
    "bad_words": (0, MAX_BAD_WORDS),
    "bad_words.item": (1, MAX_BAD_WORD_CHARS),
    "cache_salt": (1, 1024),
    "chat_template_kwargs": (0, 64),
    "instructions": (0, MAX_BODY_BYTES),
    "kv_cache_memory": (1, 32),
    "logit_bias": (0, MAX_LOGIT_BIAS_ENTRIES),
    "logprob_token_ids": (1, 1024),
    "messages": (1, 65_536),
    "metadata": (0, 16),
    "metadata.key": (0, 64),
    "metadata.value": (0, 512),
    "options": (0, 128),
    "output_config": (0, 16),
    "previous_response_id": (1, 256),
    "messages.role": (1, 256),
    "model": (0, 1024),
    "prompt": (1, 1024),
    "prompt.text": (1, MAX_BODY_BYTES),
    "prompt.token_ids": (1, MAX_BODY_BYTES),
    "reasoning_effort": (1, 64),
    "request_id": (1, 256),
    "stop": (0, MAX_STOP_STRINGS),
    "stop.item": (1, MAX_STOP_CHARS),
    "stop_token_ids": (0, 1024),
    "stream_options": (0, 64),
    "suffix": (0, MAX_BODY_BYTES),
    "thinking": (0, 16),
    "tokens": (0, MAX_BODY_BYTES),
    "tools": (1, 1024),
    "tools.name": (1, 256),
    "user": (0, 1024),
}


def bounded(name: str) -> Any:
    """Pydantic metadata: the number lies within ``NUMBERS[name]``."""
    bounds = NUMBERS[name]
    if bounds.open_low:
        return Field(gt=bounds.low, le=bounds.high)
    return Field(ge=bounds.low, le=bounds.high)


def sized(name: str) -> Any:
    """Pydantic metadata: length lies within ``SIZES[name]``."""
    least, most = SIZES[name]
    return Field(min_length=least, max_length=most)
