"""Prompts for the text between two others, for models that have tokens for it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, NamedTuple

from vmserve.errors import InvalidRequestError

__all__ = ["infill_prompt"]


class _Markers(NamedTuple):
    """Tokens before the prefix, before the suffix, and before the answer."""

    prefix: str
    suffix: str
    middle: str = ""
    suffix_first: bool = False


_KNOWN: Final = (
    _Markers("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),  # Qwen, Granite
    _Markers("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),  # StarCoder
    _Markers("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),
    _Markers("▁<PRE>", "▁<SUF>", "▁<MID>"),  # Code Llama
    _Markers("[PREFIX]", "[SUFFIX]", suffix_first=True),  # Codestral
)


def infill_prompt(
    prefix: str,
    suffix: str,
    encode: Callable[[str, bool], list[int]],
    token_id: Callable[[str], int | None],
) -> list[int]:
    """Make the token ids of a prompt for the text between ``prefix`` and ``suffix``.

    ``encode(text, add_special_tokens)``: ids of a text. ``token_id(text)``: id of a token, or None.

    Raises :class:`~vmserve.errors.InvalidRequestError` for a model without such tokens.
    """
    for markers in _KNOWN:
        ids = {name: token_id(name) for name in markers[:3] if name}
        if all(found is not None for found in ids.values()):
            break
    else:
        raise InvalidRequestError(
            "suffix: this model has no tokens for filling in (such as <|fim_prefix|>): put all "
            "text before the completion in prompt",
            "suffix",
        )

    def part(name: str, text: str = "") -> list[int]:
        found = ids.get(name)
        return [*([] if found is None else [found]), *(encode(text, False) if text else [])]

    before, after = part(markers.prefix, prefix), part(markers.suffix, suffix)
    texts = after + before if markers.suffix_first else before + after
    return encode("", True) + texts + part(markers.middle)
