"""Beam search against models written out in full, and its laws at the edges."""

from __future__ import annotations

import gc
import itertools
import math
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.decoding.reference import Case, check_hypotheses, check_step
from vmserve.decoding import BeamSearch, BeamStep, Hypothesis
from vmserve.decoding import beam as beam_module

#: Tokens so far -> log-probability of every next token.
Table = Callable[[tuple[int, ...]], list[float]]
#: Tokens, sum, score.
Scored = tuple[tuple[int, ...], float, float]


def advance(search: BeamSearch, *rows: Mapping[int, float]) -> BeamStep:
    """One step with the candidates of each beam, token id -> log-probability."""
    ordered = [sorted(row.items(), key=lambda item: (-item[1], item[0])) for row in rows]
    ids = np.array([[token for token, _ in row] for row in ordered], dtype=np.int64)
    logprobs = np.array([[value for _, value in row] for row in ordered], dtype=np.float32)
    return search.advance(ids, logprobs)


def run(table: Table, case: Case) -> tuple[list[Hypothesis], list[Scored]]:
    """Our result, and everything that was ever reported as finished."""
    search = case.new_search()
    beams: list[tuple[int, ...]] = [()]
    totals = [0.0]
    finished: list[Scored] = []
    while not search.done:
        rows = [dict(enumerate(table(beam))) for beam in beams]
        step = advance(search, *rows)
        check_step(step, beams, totals, search)
        for c in step.finished:
            tokens = (*beams[c.parent], c.token_id)
            finished.append((tokens, c.total, c.total / len(tokens) ** case.length_penalty))
        beams = [(*beams[c.parent], c.token_id) for c in step.running]
        totals = [c.total for c in step.running]
    return search.best(), finished


def written_out(table: Table, case: Case) -> list[Scored]:
    """The definition in plain lists: rank every continuation, keep, finish, stop."""
    eos = set(case.eos_token_ids)
    running: list[tuple[tuple[int, ...], float]] = [((), 0.0)]
    finished: list[Scored] = []
    for length in range(1, case.max_tokens + 1):
        continuations = [
            ((*tokens, token), total + logprob)
            for tokens, total in running
            for token, logprob in enumerate(table(tokens))
            if not (token in eos and length <= case.min_tokens)
        ]
        continuations.sort(key=lambda c: -c[1])  # stable: by beam, then by token
        ranked = continuations[: (1 + max(1, len(eos))) * case.width]
        last = length == case.max_tokens
        for tokens, total in ranked[: case.width]:
            if last or tokens[-1] in eos:
                finished.append((tokens, total, total / length**case.length_penalty))
        finished.sort(key=lambda f: -f[2])
        finished = finished[: case.width]
        running = [c for c in ranked if c[0][-1] not in eos][: case.width]
        if not running:
            break
        if len(finished) == case.width:
            if case.early_stopping is True or case.width == 1:
                break
            never = case.early_stopping == "never" and case.length_penalty > 0
            credited = case.max_tokens if never else length
            if running[0][1] / credited**case.length_penalty <= finished[-1][2]:
                break
    return finished


@st.composite
def problems(draw: st.DrawFn, logprobs: st.SearchStrategy[float]) -> tuple[Table, Case]:
    vocab_size = draw(st.integers(1, 6))
    row = st.lists(logprobs, min_size=vocab_size, max_size=vocab_size)
    by_last_token = [draw(row) for _ in range(vocab_size + 1)]
    max_tokens = draw(st.integers(1, 6))
    case = Case(
        width=draw(st.integers(1, 7)),
        max_tokens=max_tokens,
        length_penalty=draw(st.sampled_from([0.0, 1.0, 2.0, -1.0, 0.5])),
        early_stopping=draw(st.sampled_from([False, True, "never"])),
        eos_token_ids=tuple(draw(st.sets(st.integers(0, vocab_size - 1), max_size=3))),
        min_tokens=draw(st.integers(0, max_tokens)),
    )
    return lambda tokens: by_last_token[tokens[-1] if tokens else -1], case


def scored(hypotheses: list[Hypothesis]) -> list[Scored]:
    return [(tuple(h.token_ids), h.cumulative_logprob, h.score) for h in hypotheses]


@settings(max_examples=300, deadline=None)
@given(problems(st.integers(-4, -1).map(float)))
def test_as_written_out_with_many_ties(problem: tuple[Table, Case]) -> None:
    """Small whole numbers, so that sums are exact and often equal: the order of ties, too."""
    table, case = problem
    ours, _ = run(table, case)
    check_hypotheses(ours, case)
    assert scored(ours) == written_out(table, case)


@settings(max_examples=200, deadline=None)
@given(problems(st.integers(-512, 0).map(lambda x: x / 64)))
def test_as_written_out_and_nothing_lost(problem: tuple[Table, Case]) -> None:
    table, case = problem
    ours, finished = run(table, case)
    check_hypotheses(ours, case)
    assert scored(ours) == written_out(table, case)
    best = sorted(finished, key=lambda f: -f[2])[: case.width]  # stable: first come first
    assert scored(ours) == best


@settings(max_examples=60, deadline=None)
@given(
    st.integers(1, 3),
    st.integers(1, 4),
    st.sampled_from([0.0, 1.0, 2.0, -1.0]),
    st.sampled_from([False, True, "never"]),
    st.integers(0, 2),
    st.integers(0, 2**32 - 1),
)
def test_wide_enough_it_is_exhaustive(
    vocab_size: int, max_tokens: int, length_penalty: float, early: Any, num_eos: int, seed: int
) -> None:
    random = np.random.default_rng(seed)
    eos = tuple(range(min(num_eos, vocab_size)))

    @cache
    def table(_: tuple[int, ...]) -> list[float]:
        row: list[float] = random.normal(-2, 1, vocab_size).astype(np.float32).tolist()
        return row

    case = Case(vocab_size**max_tokens + 1, max_tokens, length_penalty, early, eos)
    ours, _ = run(table, case)
    expected: list[Scored] = []
    for length in range(1, max_tokens + 1):
        for tokens in itertools.product(range(vocab_size), repeat=length):
            ended = [token in eos for token in tokens]
            if any(ended[:-1]) or not (ended[-1] or length == max_tokens):
                continue
            total = 0.0
            for place, token in enumerate(tokens):
                total += table(tokens[:place])[token]
            expected.append((tokens, total, total / length**length_penalty))
    assert scored(ours) == sorted(expected, key=lambda f: -f[2])


# -- steps, by hand -----------------------------------------------------------------------


def test_a_search_by_hand() -> None:
    """Every number of a short search: width 2, token 9 ends an answer."""
    search = BeamSearch(2, 3, eos_token_ids=[9])
    assert (search.num_beams, search.num_candidates, search.best()) == (1, 3, [])

    step = advance(search, {4: -0.5, 5: -1.0, 9: -2.0})
    # The end is third of three: not among the best two, so it is dropped.
    assert [(c.parent, c.token_id, c.total) for c in step.running] == [(0, 4, -0.5), (0, 5, -1.0)]
    assert (step.finished, step.done, search.length) == ((), False, 1)

    step = advance(search, {4: -4.0, 5: -4.5, 9: -0.25}, {4: -0.5, 5: -1.5, 9: -3.0})
    [ended] = step.finished
    assert (ended.parent, ended.token_id, ended.logprob, ended.total) == (0, 9, -0.25, -0.75)
    assert [(c.parent, c.token_id, c.total) for c in step.running] == [(1, 4, -1.5), (1, 5, -2.5)]
    assert [search.token_ids(i) for i in range(2)] == [[5, 4], [5, 5]]
    assert not step.done

    step = advance(search, {4: -1.5, 5: -9.0, 9: -8.0}, {4: -9.0, 5: -0.25, 9: -9.0})
    # All of the last ranking ends; the better one replaces nothing, the worse finds no place.
    assert [(c.parent, c.token_id, c.total) for c in step.finished] == [(1, 5, -2.75)]
    assert (step.running, step.done, search.num_beams) == ((), True, 0)
    assert search.best() == [
        Hypothesis([4, 9], [-0.5, -0.25], -0.75, -0.375, 9),
        Hypothesis([5, 5, 5], [-1.0, -1.5, -0.25], -2.75, pytest.approx(-2.75 / 3), None),
    ]
    with pytest.raises(ValueError, match="this beam search was done after 3 tokens"):
        advance(search, {4: -1.0})


def test_equal_sums_go_by_beam_then_by_token() -> None:
    search = BeamSearch(3, 8)
    first = advance(search, {7: -1.0, 3: -1.0, 5: -1.0, 2: -1.0})
    assert [c.token_id for c in first.running] == [2, 3, 5]
    row = {6: -2.0, 1: -2.0, 8: -1.0}
    second = advance(search, row, row, row)
    assert [(c.parent, c.token_id) for c in second.running] == [(0, 8), (1, 8), (2, 8)]
    third = advance(search, {1: -3.0, 6: -2.0}, {0: -2.0, 4: -2.0}, {0: -2.0, 9: -3.0})
    assert [(c.parent, c.token_id) for c in third.running] == [(0, 6), (1, 0), (1, 4)]


def test_impossible_candidates_are_passed_over() -> None:
    inf = math.inf
    search = BeamSearch(3, 4)
    step = advance(search, {0: -inf, 1: -1.0, 2: -inf})
    assert [c.token_id for c in step.running] == [1]
    step = advance(search, {0: -inf, 1: -inf, 2: -inf})
    assert (step.running, step.done, search.best()) == ((), True, [])


@pytest.mark.parametrize("length_penalty", [100.0, -100.0])
def test_penalties_that_leave_the_range_of_numbers(length_penalty: float) -> None:
    """5000 ** 100 is no float64: the search goes on to its end all the same."""
    search = BeamSearch(2, 5000, length_penalty=length_penalty, early_stopping="never")
    row = {0: -0.5, 1: -1.0}
    while not search.done:
        advance(search, *[row] * search.num_beams)
    best = search.best()
    assert [h.cumulative_logprob for h in best] == [-2500.0, -2500.5]
    assert [h.score for h in best] == ([0.0, 0.0] if length_penalty > 0 else [-math.inf] * 2)


def test_a_step_costs_no_copies_and_dead_branches_are_freed() -> None:
    """What is held is the beams' own history, not that of all that ever ran."""

    def num_links() -> int:
        return sum(type(x) is beam_module._Link for x in gc.get_objects())

    before = num_links()
    search = BeamSearch(4, 10_000)
    rows = [{0: -0.5, 1: -0.75, 2: -1.0, 3: -1.25}]
    for _ in range(3000):
        advance(search, *(rows * search.num_beams))
    held = {id(link) for i in range(4) for link in beam_module._chain(search._links[i])}
    assert num_links() - before == len(held) <= 4 * 3000
    assert len(search.token_ids(3)) == 3000
    del search  # a chain of thousands is freed without running out of stack
    assert num_links() == before


# -- misuse -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"width": 0}, r"width \(0\) and max_tokens \(4\) must be at least 1"),
        ({"max_tokens": 0}, r"width \(2\) and max_tokens \(0\) must be at least 1"),
        ({"early_stopping": "often"}, 'early_stopping must be True, False or "never", not often'),
        ({"early_stopping": 1}, 'early_stopping must be True, False or "never", not 1'),
    ],
)
def test_arguments_are_checked(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        BeamSearch(**{"width": 2, "max_tokens": 4, **arguments})


@pytest.mark.parametrize("shapes", [((2, 3), (2, 3)), ((3,), (3,)), ((1, 3), (1, 2))])
def test_shapes_are_checked(shapes: tuple[tuple[int, ...], tuple[int, ...]]) -> None:
    search = BeamSearch(2, 4, eos_token_ids=[0])
    ids, logprobs = np.zeros(shapes[0], np.int64), np.zeros(shapes[1], np.float32)
    with pytest.raises(ValueError, match=r"expected two arrays of \(1, 3\)"):
        search.advance(ids, logprobs)
    assert search.length == 0
