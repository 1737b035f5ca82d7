"""The same beams, order and scores as ``generate(num_beams=width)`` of ``transformers``."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import pytest

from tests.decoding.conftest import Embedded
from tests.decoding.reference import (
    Case,
    TableModel,
    assert_same,
    check_hypotheses,
    our_beams,
    transformers_beams,
)
from tests.lives.pairs import covering_rows

AXES: dict[str, list[Any]] = {
    "width": [1, 2, 4, 8],
    "length_penalty": [0.0, 1.0, 2.0, -1.0],
    "early_stopping": [False, True, "never"],
}
ROWS = [tuple(row.values()) for row in covering_rows(AXES, lambda row: True, 0)]
PAIRS = pytest.mark.parametrize(("width", "length_penalty", "early_stopping"), ROWS)


@PAIRS
def test_random_tables(width: int, length_penalty: float, early_stopping: Any) -> None:
    """Small vocabularies, one to three likely tokens of which end an answer (or none)."""
    draw = random.Random(f"{width} {length_penalty} {early_stopping}")
    ends: Counter[str] = Counter()
    for seed in range(6):
        num_eos = (1, 2, 3, 0, 1, 2)[seed]
        vocab_size = draw.randint(width + 4, 40)
        eos = tuple(draw.sample(range(vocab_size - 1), num_eos))
        max_tokens = draw.choice((1, 2, 5, 16))
        min_tokens = draw.choice((0, 0, min(3, max_tokens)))
        case = Case(width, max_tokens, length_penalty, early_stopping, eos, min_tokens)
        model = TableModel(vocab_size, draw.getrandbits(32), eos)
        prompt = [draw.randrange(vocab_size) for _ in range(draw.randint(2, 5))]
        ours = our_beams(model.logits, prompt, case)
        check_hypotheses(ours, case)
        assert_same(ours, transformers_beams(model, prompt, case, use_cache=False))
        ends.update("length" if h.eos_token_id is None else "eos" for h in ours)
    assert min(ends["eos"], ends["length"]) > 0


#: What ends an answer: words that stories are full of, so that it happens often and early.
EOS_WORDS = ((".",), (",", " the", "."), (" and",))


@PAIRS
def test_the_embedded_model(
    embedded: Embedded, width: int, length_penalty: float, early_stopping: Any
) -> None:
    draw = random.Random(f"{width} {length_penalty} {early_stopping}")
    words = draw.choice(EOS_WORDS)
    eos = tuple(embedded.tokenizer.encode(w, add_special_tokens=False)[0] for w in words)
    prompt = embedded.prompt(draw.choice(["Once upon a time", "Tom said", "The owl was"]))
    case = Case(width, draw.choice((3, 12)), length_penalty, early_stopping, eos)
    ours = our_beams(embedded.logits, prompt, case)
    check_hypotheses(ours, case)
    assert_same(ours, transformers_beams(embedded.model, prompt, case))


def test_many_tokens(embedded: Embedded) -> None:
    """Without an end: sums of 40 log-probabilities, and the order of what is left of them."""
    case = Case(4, 40, early_stopping="never")
    prompt = embedded.prompt("One day a small fox")
    ours = our_beams(embedded.logits, prompt, case)
    check_hypotheses(ours, case)
    assert all(len(h.token_ids) == 40 for h in ours)
    assert_same(ours, transformers_beams(embedded.model, prompt, case))
