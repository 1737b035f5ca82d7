"""Prompts for what stands between two texts, in each model's own tokens."""

from __future__ import annotations

import pytest

from vmserve.errors import InvalidRequestError
from vmserve.text.infill import infill_prompt


def encode(text: str, add_special_tokens: bool) -> list[int]:
    return ([0] if add_special_tokens else []) + [ord(char) for char in text]


def test_the_tokens_that_the_model_was_trained_with() -> None:
    for names, expected in (
        ("<|fim_prefix|> <|fim_suffix|> <|fim_middle|>", [0, 900, 97, 901, 98, 902]),
        ("▁<PRE> ▁<SUF> ▁<MID>", [0, 900, 97, 901, 98, 902]),
        ("[PREFIX] [SUFFIX]", [0, 901, 98, 900, 97]),
    ):
        ids = {name: 900 + place for place, name in enumerate(names.split())}
        assert infill_prompt("a", "b", encode, ids.get) == expected
        assert infill_prompt("", "", encode, ids.get) == [t for t in expected if t not in (97, 98)]
    with pytest.raises(InvalidRequestError, match="no tokens for filling in"):
        infill_prompt("a", "b", encode, {"<fim_prefix>": 5}.get)
