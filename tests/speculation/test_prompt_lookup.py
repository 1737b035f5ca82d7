"""Drafts from a request's own tokens, against a search that compares everything."""

from __future__ import annotations

import random

import pytest

from vmserve import _core
from vmserve.sampling import SamplingParams
from vmserve.scheduler.sequence import Request, Sequence
from vmserve.speculation.policy import EvidencePolicy
from vmserve.speculation.prompt_lookup import PromptLookup
from vmserve.types import RequestMetrics


def longest_match(text: list[int], longest: int) -> tuple[int, int]:
    """Length and next position of the longest earlier occurrence of the end, the newest of them."""
    best, end = (0, 0), len(text)
    for place in range(end - 1, 0, -1):
        length = 0
        while (
            length < min(place, longest) and text[end - 1 - length] == text[place - 1 - length] >= 0
        ):
            length += 1
        if length >= 2 and length > best[0]:
            best = (length, place)
    return best


def continued(text: list[int], place: int, limit: int) -> list[int]:
    text, begin = list(text), len(text)
    for i in range(limit):
        if text[place + i] < 0:
            break
        text.append(text[place + i])
    return text[begin:]


@pytest.mark.parametrize("longest", [2, 3, 5, 1000])
@pytest.mark.parametrize("vocab", [1, 2, 3, 8])
def test_matches_are_the_longest_and_newest(longest: int, vocab: int) -> None:
    rng = random.Random(longest * 100 + vocab)
    lookups = _core.PromptLookups(1 << 30, longest)
    for number in range(30):
        before = [rng.randrange(vocab) for _ in range(rng.choice([0, 5]))]
        lookups.open(number, before)
        tokens: list[int] = []
        for _ in range(40):
            tokens += [rng.randrange(vocab) for _ in range(rng.randrange(1, 4))]
            limit = rng.randrange(6)
            (length,), (draft,) = lookups.propose([number], [tokens], [limit])
            text = [*before, -1, *tokens] if before else tokens
            expected, place = longest_match(text, longest)
            assert length == expected
            assert draft == (continued(text, place, limit) if expected else [])


def test_a_search_visits_few_places_of_a_common_pair() -> None:
    lookups = _core.PromptLookups(3, 32)
    lookups.open(1, [])
    old = [9, 8, 1, 2, 7]
    lengths = []
    for num_newer in range(1, 5):
        tokens = old + [1, 2, 5] * num_newer + [9, 8, 1, 2]
        lookups.open(1 + num_newer, [])
        lengths.append(lookups.propose([1 + num_newer], [tokens], [1])[0][0])
    assert lengths == [4, 4, 2, 2]  # the old place is the second to fifth that is looked at


def test_memory_is_linear() -> None:
    rng = random.Random(1)
    lookups = _core.PromptLookups(256, 32)
    lookups.open(1, [])
    lookups.propose([1], [[rng.randrange(50_000) for _ in range(70_000)]], [7])
    assert lookups.num_bytes < 32 * 70_000
    lookups.close(1)
    assert (len(lookups), lookups.num_bytes) == (0, 0)


def sequence(prompt: list[int], output: list[int], prediction: list[int] = []) -> Sequence:  # noqa: B006
    params = SamplingParams(max_tokens=64, prediction=prediction)
    request = Request("r", prompt, params, 64, 0, 0, RequestMetrics(0.0))
    return Sequence(request, 0, prompt + output, len(prompt))


def test_each_sequence_has_its_own_text() -> None:
    drafter = PromptLookup(EvidencePolicy())
    said, other = sequence([1, 2, 3, 4, 5], [1, 2, 3]), sequence([6, 7], [1, 2, 3])
    assert drafter.propose([said, other, said], [2, 2, 0]) == [[4, 5], [], []]
    drafter.forget(said)
    drafter.forget(said)
    assert drafter.propose([said], [1]) == [[4]]  # it begins anew


def test_an_answer_begins_as_its_prediction() -> None:
    drafter = PromptLookup(EvidencePolicy())
    as_predicted = sequence([1, 2], [5], prediction=[5, 6, 7, 8])
    another = sequence([1, 2], [6], prediction=[5, 6, 7, 8])
    assert drafter.propose([as_predicted, another], [2, 2]) == [[6, 7], []]
    another.tokens += [7]
    assert drafter.propose([another], [5]) == [[8]]  # behind its end nothing follows


def test_two_tokens_are_drafted_from_until_that_fails() -> None:
    drafter = PromptLookup(EvidencePolicy())
    text = sequence([2, 3, 4, 5], [6, 2, 3])
    for _ in range(10):
        drafter.propose([text], [1])
        drafter.accepted(text, 1, 0)
    assert drafter.propose([text], [1]) == [[]]
    text.tokens += [4]  # now they are three
    assert drafter.propose([text], [1]) == [[5]]
