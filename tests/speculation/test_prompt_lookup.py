"""Drafts from a request's own tokens, against a search that compares everything."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from vmserve import _core
from vmserve.sampling import SamplingParams
from vmserve.scheduler.sequence import Request, Sequence
from vmserve.speculation.policy import EVIDENCE, PRICED, DraftPolicy
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


def searching(most_visited: int, longest: int, most_drafted: int) -> _core.PromptDrafter:
    """One that drafts whatever it finds."""
    return _core.PromptDrafter(
        replace(
            EVIDENCE,
            least_rate=0.0,
            most_drafted=most_drafted,
            most_visited=most_visited,
            longest=longest,
        )
    )


def draft_of(drafter: _core.PromptDrafter, number: int, tokens: list[int]) -> list[int]:
    [draft] = drafter.propose([number], [tokens], 0) or [[]]
    return draft


@pytest.mark.parametrize("longest", [2, 3, 5, 1000])
@pytest.mark.parametrize("vocab", [1, 2, 3, 8])
def test_matches_are_the_longest_and_newest(longest: int, vocab: int) -> None:
    rng = random.Random(longest * 100 + vocab)
    drafter = searching(1 << 30, longest, 6)
    for number in range(30):
        before = [rng.randrange(vocab) for _ in range(rng.choice([0, 5]))]
        drafter.open(number, before, 0, most_tokens=1000)
        tokens = [rng.randrange(vocab)]  # an answer's first token may follow its prediction
        for _ in range(40):
            tokens += [rng.randrange(vocab) for _ in range(rng.randrange(1, 4))]
            text = [*before, -1, *tokens] if before else tokens
            expected, place = longest_match(text, longest)
            found = draft_of(drafter, number, tokens)
            assert found == (continued(text, place, 6) if expected else [])


def test_a_search_visits_few_places_of_a_common_pair() -> None:
    drafter = searching(3, 32, 1)
    old = [9, 8, 1, 2, 7]
    drafts = []
    for num_newer in range(1, 5):
        drafter.open(num_newer, [], 1, most_tokens=1000)
        drafts += draft_of(drafter, num_newer, old + [1, 2, 5] * num_newer + [9, 8, 1, 2])
    assert drafts == [7, 7, 5, 5]  # the old place is the second to fifth that is looked at


def test_memory_is_linear() -> None:
    rng = random.Random(1)
    drafter = searching(256, 32, 7)
    drafter.open(1, [], 1, most_tokens=80_000)
    draft_of(drafter, 1, [rng.randrange(50_000) for _ in range(70_000)])
    assert drafter.num_bytes < 32 * 70_000
    drafter.close(1)
    assert (len(drafter), drafter.num_bytes) == (0, 0)


def sequence(prompt: list[int], output: list[int], prediction: list[int] = []) -> Sequence:  # noqa: B006
    params = SamplingParams(max_tokens=64, prediction=prediction)
    request = Request("r", prompt, params, 64, 0, 0, RequestMetrics(0.0))
    return Sequence(request, 0, prompt + output, len(prompt))


def drafts(drafter: PromptLookup, *sequences: Sequence) -> list[list[int]]:
    return list(drafter.propose(sequences, 0) or [[] for _ in sequences])


def test_each_sequence_has_its_own_text() -> None:
    drafter = PromptLookup(EVIDENCE)
    said, other = sequence([1, 2, 3, 4, 5], [1, 2, 3]), sequence([6, 7], [1, 2, 3])
    assert drafts(drafter, said, other) == [[4, 5, 1, 2, 3, 4, 5], []]
    drafter.forget(said)
    drafter.forget(said)
    assert drafts(drafter, said) == [[4, 5, 1, 2, 3, 4, 5]]  # it begins anew


def test_a_draft_ends_with_the_answer() -> None:
    drafter = PromptLookup(EVIDENCE)
    ending = sequence([1, 2, 3] * 40, [1] * 61)  # the answer may have 64 tokens
    assert drafts(drafter, ending) == [[1, 1]]


@pytest.mark.parametrize("policy", [EVIDENCE, PRICED])
def test_a_request_can_do_without(policy: DraftPolicy) -> None:
    drafter = PromptLookup(policy)
    wants, without = sequence([1, 2, 3], [1, 2, 3]), sequence([1, 2, 3], [1, 2, 3])
    object.__setattr__(without.request.params, "speculative", False)
    drafter.propose([wants, without], 0)
    drafter.learn(1.0, 0.0)  # the price of a step without drafts
    wanted, refused = drafts(drafter, wants, without)
    assert wanted
    assert not refused


def test_an_answer_begins_as_its_prediction() -> None:
    drafter = PromptLookup(EVIDENCE)
    as_predicted = sequence([1, 2], [5], prediction=[5, 6, 7, 8])
    another = sequence([1, 2], [6], prediction=[5, 6, 7, 8])
    assert drafts(drafter, as_predicted, another) == [[6, 7, 8], []]
    another.tokens += [7]
    assert drafts(drafter, another) == [[8]]  # behind its end nothing follows


def test_two_tokens_are_drafted_from_until_that_fails() -> None:
    drafter = PromptLookup(EVIDENCE)
    text = sequence([2, 3, 4, 5], [6, 2, 3])
    assert drafts(drafter, text)[0][:2] == [4, 5]
    for _ in range(10):
        drafter.accepted(text, 1, 0)
    assert drafts(drafter, text) == [[]]
    text.tokens += [4]  # now they are three
    assert drafts(drafter, text)[0][0] == 5
