"""Prompts as users write them, turned into token ids."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from vmserve.errors import InvalidRequestError
from vmserve.tokenizer import Tokenizer

__all__ = ["Prompt", "PromptLike", "encode_prompt", "split_prompts"]

#: A string, token ids, ``{"prompt": str}`` or ``{"prompt_token_ids": [int, ...]}``.
PromptLike: TypeAlias = str | Sequence[int] | Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Prompt:
    """``text`` is None for a prompt that was given as token ids."""

    text: str | None
    token_ids: list[int]


def split_prompts(prompts: PromptLike | Sequence[PromptLike]) -> list[PromptLike]:
    """One prompt or several, as a list. A list of integers is one prompt."""
    if isinstance(prompts, str | Mapping):
        return [prompts]
    items: list[Any] = list(prompts)
    if not items:
        raise InvalidRequestError("prompts is empty: give at least one prompt", "prompt")
    if all(_is_id(item) for item in items):
        return [items]
    return items


def encode_prompt(prompt: PromptLike, tokenizer: Tokenizer) -> Prompt:
    """Raises :class:`InvalidRequestError` for what is not a prompt, or is empty."""
    if isinstance(prompt, Mapping):
        return _encode_mapping(prompt, tokenizer)
    if isinstance(prompt, str):
        if not prompt:
            raise InvalidRequestError("The decoder prompt cannot be empty", "prompt")
        return Prompt(prompt, tokenizer.encode(prompt))
    other: Any = prompt  # callers without a type checker pass anything
    token_ids: list[Any] = list(other) if isinstance(other, Sequence) else [None]
    if not all(_is_id(item) for item in token_ids):
        raise InvalidRequestError(
            f"a prompt is a string or a list of token ids, not {type(prompt).__name__}", "prompt"
        )
    if not token_ids:
        raise InvalidRequestError("The decoder prompt cannot be empty", "prompt")
    return Prompt(None, token_ids)


def _encode_mapping(prompt: Mapping[str, Any], tokenizer: Tokenizer) -> Prompt:
    given = sorted(set(prompt) & {"prompt", "prompt_token_ids"})
    unknown = sorted(set(prompt) - {"prompt", "prompt_token_ids"})
    if unknown or not given:
        raise InvalidRequestError(
            "a prompt mapping has 'prompt' or 'prompt_token_ids', "
            f"not {', '.join(map(repr, unknown)) or 'nothing'}",
            "prompt",
        )
    if "prompt_token_ids" not in prompt:
        return encode_prompt(str(prompt["prompt"]), tokenizer)
    encoded = encode_prompt(prompt["prompt_token_ids"], tokenizer)
    return Prompt(prompt.get("prompt"), encoded.token_ids)


def _is_id(item: object) -> bool:
    return isinstance(item, int) and not isinstance(item, bool)
