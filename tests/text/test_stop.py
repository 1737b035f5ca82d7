"""Stop strings: the same result however the text is cut into pieces."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vmserve.text.stop import StopChecker, StopStrings


def run(stops, pieces, include=False):
    """Everything released, and the stop string found, for a text in pieces."""
    checker = StopChecker(StopStrings(stops), include)
    released = []
    for piece in pieces:
        text, stop = checker.push(piece)
        released.append(text)
        if stop is not None:
            return released, stop
    return [*released, checker.flush()], None


def expected(stops, text, include):
    """The definition: the earliest end; of equal ends the longest string."""
    for end in range(1, len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            stop = max(found, key=len)
            return text[: end if include else end - len(stop)], stop
    return text, None


@pytest.mark.parametrize(
    ("stops", "pieces", "released", "stop"),
    [
        (["END"], ["one ", "two E", "N", "D three"], ["one ", "two ", "", ""], "END"),
        # Text that turns out harmless is released, and nothing is held without a reason.
        (["END"], ["E", "N", "X", "E"], ["", "", "ENX", "", "E"], None),
        (["aab"], ["a", "a", "a", "a", "b"], ["", "", "a", "a", ""], "aab"),
        (["abab", "bb"], ["a", "b", "a", "c"], ["", "", "", "abac", ""], None),
        (["\n\n"], ["abc", "d\n", "e"], ["abc", "d", "\ne", ""], None),
        # The string that is complete first wins; of those complete together the longest.
        (["abcd", "bc"], ["abcd"], ["a"], "bc"),
        (["abcd", "bc"], ["a", "b", "c", "d"], ["", "", "a"], "bc"),
        (["c", "abc", "bc"], ["xabc"], ["x"], "abc"),
    ],
)
def test_what_is_released_with_which_piece(stops, pieces, released, stop):
    assert run(stops, pieces) == (released, stop)
    if stop is not None:
        *before, last = released
        assert run(stops, pieces, include=True) == ([*before, last + stop], stop)


def test_misuse():
    with pytest.raises(ValueError, match="must not be empty"):
        StopStrings(["a", ""])
    checker = StopChecker(StopStrings(["a"]))
    assert checker.push("a") == ("", "a")
    assert checker.stopped
    with pytest.raises(ValueError, match="has ended"):
        checker.push("b")


def test_hard_strings_take_linear_time():
    """A quadratic search would take hours for these."""
    stop = "a" * 4095 + "b"
    checker = StopChecker(StopStrings([stop, *("a" * n + "c" for n in range(4000, 4015))]))
    assert checker.push("a" * 20_000) == ("a" * (20_000 - 4095), None)
    assert checker.num_held == 4095
    assert checker.push("b") == ("", stop)


def test_of_strings_only_what_was_met_is_prepared():
    """What a client sends costs nothing by itself, for however many choices."""
    stops = StopStrings(["ab" * 2000 + str(i) for i in range(10)])
    checkers = [StopChecker(stops) for _ in range(128)]
    assert [len(each) for each in stops._failures] == [1] * 10
    for checker in checkers:
        assert checker.push("xababac")[0] == "xababac"
    assert [len(each) for each in stops._failures] == [5] * 10


letters = st.text(alphabet="ab", min_size=1, max_size=5)


@given(st.lists(letters, min_size=1, max_size=4), st.text(alphabet="abc", max_size=30), st.data())
@settings(deadline=None)
def test_any_cut_into_pieces_gives_the_same(stops, text, data):
    include = data.draw(st.booleans())
    cuts = sorted(data.draw(st.sets(st.integers(0, len(text)), max_size=8)) | {0, len(text)})
    pieces = [text[a:b] for a, b in pairwise(cuts)]
    released, stop = run(stops, pieces, include)
    assert ("".join(released), stop) == expected(stops, text, include)


@given(st.lists(letters, min_size=1, max_size=4), st.text(alphabet="abc", max_size=30))
@settings(deadline=None)
def test_what_is_held_back_is_exactly_what_a_stop_string_may_begin_with(stops, text):
    checker = StopChecker(StopStrings(stops))
    for place, char in enumerate(text, start=1):
        _, stop = checker.push(char)
        if stop is not None:
            break
        longest = max(
            n
            for n in range(place + 1)
            if n == 0 or any(len(s) > n and s.startswith(text[place - n : place]) for s in stops)
        )
        assert checker.num_held == longest
        assert longest < max(map(len, stops))
