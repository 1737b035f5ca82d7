"""The ``prompt`` field of completions: one or several, as text or as token ids."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from vmserve.errors import InvalidRequestError
from vmserve.server.limits import SIZES
from vmserve.server.models.served import ServedModel
from vmserve.server.net.aside_process import MOST_CHARS_IN_THREAD, AsideProcesses

__all__ = ["check_vocabulary", "encode_prompt", "split_prompts"]

Prompt = str | list[int]


def split_prompts(value: Any, name: str = "prompt") -> list[Prompt]:
    """Return the prompts of the field ``name`` in order.

    Raises :class:`InvalidRequestError` for what is empty, has entries of other types, or
    token ids that are no integers. That ids are in the vocabulary is not checked here.
    """
    if value is None or value == "" or value == []:
        raise _empty(name)
    if isinstance(value, str):
        return [value]
    if not isinstance(value, list):
        raise _wrong(name, "a string, a list of token ids, or a list of either")
    if _are_ids(value):
        return [value]
    most = SIZES["prompt"][1]
    if len(value) > most:
        raise InvalidRequestError(f"{name}: {len(value)} prompts, at most {most} are taken", name)
    return [_one(name, item) for item in value]


def _one(name: str, item: Any) -> Prompt:
    if item == "" or item == []:
        raise _empty(name)
    if isinstance(item, str):
        return item
    if isinstance(item, list) and _are_ids(item):
        return item
    raise _wrong(name, "strings and lists of integer token ids, not mixed in one list")


def encode_prompt(
    processes: AsideProcesses,
    served: ServedModel,
    prompt: Prompt,
    name: str,
    *,
    add_special_tokens: bool,
    max_tokens: int | None,
) -> tuple[str | None, list[int]]:
    """A prompt's text, where it came as one, and its token ids.

    Raises :class:`InvalidRequestError` for ids that the model does not have, and for a text that
    is refused early since it begins with more than ``max_tokens``.
    """
    if isinstance(prompt, str):
        tokenizer = served.engine.tokenizer
        if max_tokens is None and len(prompt) > MOST_CHARS_IN_THREAD:
            return prompt, processes.tokenize(tokenizer, prompt, add_special_tokens).id_list()
        return prompt, tokenizer.encode(prompt, add_special_tokens, max_tokens)
    check_vocabulary(name, prompt, served.engine.model_config.vocab_size)
    return None, prompt


def check_vocabulary(name: str, token_ids: Sequence[int], vocab_size: int) -> None:
    """Raises :class:`InvalidRequestError` for ids that the model does not have."""
    if not token_ids or (min(token_ids) >= 0 and max(token_ids) < vocab_size):
        return
    for token_id in token_ids:
        if not 0 <= token_id < vocab_size:
            raise InvalidRequestError(
                f"{name}: token id {token_id} is out of vocabulary: the model has ids 0 to "
                f"{vocab_size - 1}",
                name,
            )


def _are_ids(items: list[Any]) -> bool:
    """Return whether all are integers and none is a boolean, without a loop in Python."""
    return set(map(type, items)) == {int}


def _empty(name: str) -> InvalidRequestError:
    if name != "prompt":
        return InvalidRequestError(f"{name} must not be empty", name)
    return InvalidRequestError(
        "Either prompt or prompt_embeds must be provided and non-empty.", "prompt"
    )


def _wrong(name: str, expected: str) -> InvalidRequestError:
    return InvalidRequestError(f"{name} must be {expected}", name)
