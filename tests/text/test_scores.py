"""Log-probabilities of prompts in columns are the mappings that they are made of."""

from __future__ import annotations

import math

import msgspec
import pytest

from vmserve.text.scores import Columns, PromptScores
from vmserve.types import Logprob

TOPS = [{5: (-0.5, 1), 7: (-1.25, 2)}, {9: (-math.inf, 30)}, {1: (-0.1, 1), 2: (-3.0, 3)}]


def text(token_id: int) -> str:
    return f"<{token_id}>"


def scores() -> PromptScores:
    made = PromptScores(text)
    made.extend(TOPS[:1])
    made.extend(TOPS[1:])
    return made


EXPECTED = [
    None,
    *({i: Logprob(value, rank, text(i)) for i, (value, rank) in top.items()} for top in TOPS),
]


def test_it_is_a_sequence_of_mappings() -> None:
    made = scores()
    assert len(made) == 4
    assert list(made) == EXPECTED
    assert made == EXPECTED
    assert made != EXPECTED[:-1]
    assert made != [None, *EXPECTED[2:], EXPECTED[1]]
    assert made[1] == EXPECTED[1]
    assert list(made[1] or {}) == [5, 7]
    assert made[-1] == EXPECTED[-1]
    assert made[1:3] == EXPECTED[1:3]
    assert repr(made) == repr(EXPECTED)
    with pytest.raises(IndexError):
        made[4]


def test_it_goes_through_a_socket() -> None:
    sent = msgspec.msgpack.encode(scores().pack())
    packed = msgspec.msgpack.decode(sent, type=Columns)
    assert PromptScores.unpack(packed, text) == EXPECTED
    bare = PromptScores.unpack(packed, None)
    assert bare[3] == {1: Logprob(-0.1, 1), 2: Logprob(-3.0, 3)}
    assert PromptScores.unpack(PromptScores(text).pack(), text) == [None]
