"""Turn prompts as users write them into token ids."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias, cast

from vmserve.errors import InvalidRequestError
from vmserve.sampling.params import GenerationParams, SamplingParams, with_checked
from vmserve.text.tokenizer import Tokenizer

__all__ = ["Prompt", "PromptLike", "encode_params", "encode_prompt", "split_prompts"]


@dataclass(frozen=True, slots=True)
class Prompt:
    """``text`` is None for a prompt that was given as token ids."""

    text: str | None
    token_ids: list[int]


#: A string, token ids, ``{"prompt": str}``, ``{"prompt_token_ids": [int, ...]}`` or a
#: :class:`Prompt`.
PromptLike: TypeAlias = str | Sequence[int] | Mapping[str, Any] | Prompt


def split_prompts(prompts: PromptLike | Sequence[PromptLike]) -> list[PromptLike]:
    """List the prompts of an argument. A list of integers is one prompt."""
    if isinstance(prompts, str | Mapping | Prompt):
        return [prompts]
    given: Any = prompts  # callers without a type checker pass anything
    if not isinstance(given, Iterable) or isinstance(given, bytes | bytearray):
        raise InvalidRequestError(
            f"prompts: a prompt or a list of prompts, not {type(given).__name__}", "prompt"
        )
    items: list[Any] = list(given)
    if not items:
        raise InvalidRequestError("prompts is empty: give at least one prompt", "prompt")
    if all(_is_id(item) for item in items):
        return [items]
    return items


def encode_prompt(prompt: PromptLike, tokenizer: Tokenizer) -> Prompt:
    """Encode one prompt. Raises :class:`InvalidRequestError` if it is empty or not a prompt."""
    if isinstance(prompt, Prompt):
        return prompt
    if isinstance(prompt, Mapping):
        return _encode_mapping(prompt, tokenizer)
    if isinstance(prompt, str):
        if not prompt:
            raise InvalidRequestError("The decoder prompt cannot be empty", "prompt")
        return Prompt(prompt, tokenizer.encode(prompt))
    other: Any = prompt  # callers without a type checker pass anything
    is_list = isinstance(other, Sequence) and not isinstance(other, bytes | bytearray)
    token_ids: list[Any] = list(other) if is_list else [None]
    if not all(_is_id(item) for item in token_ids):
        wrong = next(item for item in token_ids if not _is_id(item)) if is_list else other
        remedy = ": give its .tolist()" if hasattr(other, "tolist") else ""
        raise InvalidRequestError(
            "a prompt is a string or a list of token ids (int), "
            f"not {'one of ' if is_list else ''}{type(wrong).__name__}{remedy}",
            "prompt",
        )
    if not token_ids:
        raise InvalidRequestError("The decoder prompt cannot be empty", "prompt")
    return Prompt(None, token_ids)


class _Encodes(Protocol):
    """The part of a :class:`Tokenizer` that parameters need."""

    def encode(self, text: str, /, add_special_tokens: bool = True) -> list[int]: ...

    def encode_bad_words(self, words: Sequence[str], /) -> tuple[tuple[int, ...], ...]: ...


def encode_params(params: GenerationParams, tokenizer: _Encodes) -> GenerationParams:
    """The same with token ids in place of texts: the engine's loop encodes nothing."""
    if not isinstance(params, SamplingParams):
        return params
    if isinstance(params.prediction, str):
        predicted = tokenizer.encode(params.prediction, add_special_tokens=False)
        params = with_checked(params, prediction=tuple(predicted))
    words = params.bad_words
    if words and isinstance(words[0], str):
        encoded = tokenizer.encode_bad_words(cast("Sequence[str]", words))
        params = with_checked(params, bad_words=encoded)
    return params


def _encode_mapping(prompt: Mapping[str, Any], tokenizer: Tokenizer) -> Prompt:
    given = sorted(set(prompt) & {"prompt", "prompt_token_ids"})
    unknown = sorted(set(prompt) - {"prompt", "prompt_token_ids"})
    if unknown or not given:
        raise InvalidRequestError(
            "a prompt mapping has 'prompt' or 'prompt_token_ids', "
            f"not {', '.join(map(repr, unknown)) or 'nothing'}",
            "prompt",
        )
    text = prompt.get("prompt")
    if not isinstance(text, str) and (text is not None or "prompt_token_ids" not in prompt):
        raise InvalidRequestError(
            f"'prompt' of a prompt mapping is a string, not {type(text).__name__}", "prompt"
        )
    if "prompt_token_ids" not in prompt:
        return encode_prompt(str(text), tokenizer)
    return Prompt(text, encode_prompt(prompt["prompt_token_ids"], tokenizer).token_ids)


def _is_id(item: object) -> bool:
    return isinstance(item, int) and not isinstance(item, bool)
