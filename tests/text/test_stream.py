"""The output of one sequence: what is released with which token."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.text.kinds import byte_fallback, byte_level, metaspace
from vmserve.sampling import SampledToken, SamplingParams
from vmserve.text.stop import StopStrings, StopWatcher
from vmserve.text.stream import ChoiceStream
from vmserve.types import Logprob


def ids_of(tokenizer, *names):
    return [tokenizer.hf.convert_tokens_to_ids(name) for name in names]


def letters(text):
    """One token per byte of ``text``."""
    tokenizer = byte_level()
    names = tokenizer.hf.backend_tokenizer.pre_tokenizer.pre_tokenize_str(text)
    return ids_of(tokenizer, *"".join(name for name, _ in names))


def sampled(token_id, logprob=-0.5, others=()):
    top = {token_id: (logprob, 1)} | {i: (-3.0, n) for n, i in enumerate(others, start=2)}
    return SampledToken(token_id, logprob, top)


def stream(tokenizer=None, **kwargs):
    return ChoiceStream(tokenizer or byte_level(), SamplingParams(**kwargs))


def deltas(choice, ids, **kwargs):
    """(text, number of tokens) of what each token releases; the stop string."""
    found, stop = [], None
    for token_id in ids:
        stop = choice.push(sampled(token_id), **kwargs)
        delta = choice.take_delta()
        found.append((delta.text, len(delta.token_ids)))
        if stop is not None:
            break
    return found, stop


def rest(choice):
    choice.finish()
    delta = choice.take_delta()
    return delta.text, len(delta.token_ids)


A_AND_HALF = letters("a€")[:-1]
[THE] = byte_level().encode("the", add_special_tokens=False)
END, EOS = ids_of(byte_level(), "<|end|>", "</s>")


@pytest.mark.parametrize(
    ("options", "ids", "released", "stop", "at_the_end"),
    [
        pytest.param({}, letters("abc"), [("a", 1), ("b", 1), ("c", 1)], None, ("", 0),
                     id="tokens come with their text"),
        pytest.param({}, letters("é€x"),
                     [("", 0), ("é", 2), ("", 0), ("", 0), ("€", 3), ("x", 1)], None, ("", 0),
                     id="tokens of one character go together"),
        pytest.param({}, A_AND_HALF, [("a", 1), ("", 0), ("", 0)], None, ("\ufffd", 2),
                     id="a character that stays incomplete is flushed"),
        pytest.param({}, [END, *letters("a"), END, END, *letters("b"), END],
                     [("", 0), ("a", 2), ("", 0), ("", 0), ("b", 3), ("", 0)], None, ("", 1),
                     id="tokens without text wait for the next one"),
        pytest.param({"skip_special_tokens": False}, [END, *letters("a")],
                     [("<|end|>", 1), ("a", 1)], None, ("", 0), id="special tokens are shown"),
        pytest.param({"stop": ["bcd"]}, letters("abcxabcde"),
                     [("a", 1), ("", 0), ("", 0), ("bcx", 3), ("a", 1), ("", 0), ("", 0), ("", 3)],
                     "bcd", ("", 0), id="a stop string holds whole tokens back"),
        pytest.param({"stop": "es"}, [THE, *letters("x")], [("", 0), ("thex", 2)], None, ("", 0),
                     id="a token waits if only its end may belong to a stop string"),
        pytest.param({"stop": "es"}, [THE, *letters("s")], [("", 0), ("th", 2)], "es", ("", 0),
                     id="and is cut where it does"),
        pytest.param({"stop": "es", "include_stop_str_in_output": True}, [THE, *letters("s")],
                     [("", 0), ("thes", 2)], "es", ("", 0), id="or shown where stops are"),
        pytest.param({"stop": "t"}, [*letters("a"), THE], [("a", 1), ("", 1)], "t", ("", 0),
                     id="text after the stop string in the same token is cut"),
        pytest.param({"stop": "t", "include_stop_str_in_output": True}, [*letters("a"), THE],
                     [("a", 1), ("t", 1)], "t", ("", 0), id="after the one that is shown too"),
        pytest.param({"stop": "bcd"}, letters("abc"), [("a", 1), ("", 0), ("", 0)], None,
                     ("bc", 2), id="what a stop string held is released at the end"),
    ],
)  # fmt: skip
def test_what_is_released_with_which_token(options, ids, released, stop, at_the_end):
    choice = stream(**options)
    assert deltas(choice, ids) == (released, stop)
    assert rest(choice) == at_the_end
    assert rest(choice) == ("", 0)
    assert choice.text == "".join(text for text, _ in [*released, at_the_end])
    assert choice.token_ids == ids[: len(released)]
    assert choice.logprobs is None


def test_a_stop_string_that_ends_inside_a_token_with_half_a_character():
    """The token that completes the stop string may also begin a character."""
    tokenizer = byte_fallback()
    ids = ids_of(tokenizer, "a", "<0x0A>", "<0xE2>")
    choice = stream(tokenizer, stop="\n")
    assert deltas(choice, ids) == ([("a", 1), ("", 1)], "\n")


def test_tokens_that_must_not_stop():
    choice = stream(stop="bc", min_tokens=3)
    assert deltas(choice, letters("abc"), may_stop=False)[0] == [("a", 1), ("b", 1), ("c", 1)]
    assert deltas(choice, letters("xbc")) == ([("x", 1), ("", 0), ("", 2)], "bc")
    # What went out already is no part of a stop string.
    choice = stream(stop="bc")
    assert deltas(choice, letters("ab"), may_stop=False)[0] == [("a", 1), ("b", 1)]
    assert deltas(choice, letters("cd")) == ([("c", 1), ("d", 1)], None)
    choice = stream(stop="bc")
    assert deltas(choice, letters("b")) == ([("", 0)], None)
    assert deltas(choice, letters("x"), may_stop=False)[0] == [("bx", 2)]
    assert deltas(choice, letters("c")) == ([("c", 1)], None)


def decoded(choice):
    """The strings of the tokens that were chosen."""
    return [next(iter(top.values())).decoded_token for top in choice.logprobs]


def test_a_stop_token_belongs_to_the_ids_only():
    choice = stream(logprobs=0)
    a, b = letters("ab")
    choice.push(sampled(a))
    choice.take_delta()
    assert choice.push(sampled(b), hidden=True) is None
    assert rest(choice) == ("", 1)
    assert (choice.text, choice.token_ids) == ("a", [a, b])
    # Its string is told all the same.
    assert choice.logprobs[1] == {b: Logprob(-0.5, 1, "b")}


def test_a_stop_token_is_shown_where_stops_are_included():
    choice = stream(include_stop_str_in_output=True, stop="ab")
    a, b = letters("ab")
    choice.push(sampled(a))
    assert choice.push(sampled(b), hidden=True) is None
    choice.finish()
    assert choice.text == "ab"


def test_a_stop_token_after_half_a_character():
    choice = stream(logprobs=0)
    choice.push(sampled(letters("é")[0]))
    choice.push(sampled(EOS), hidden=True)
    assert rest(choice) == ("\ufffd", 2)
    assert decoded(choice) == ["\ufffd", "</s>"]
    choice = stream(logprobs=0)
    deltas(choice, A_AND_HALF)
    choice.finish()
    assert decoded(choice) == ["a", "", "\ufffd"]


def test_log_probabilities():
    half, [the] = letters("é")[0], byte_level().encode(" the", add_special_tokens=False)
    choice = stream(logprobs=2)
    choice.push(sampled(the, -0.25, others=[half, END]))
    choice.push(sampled(END, -1.0))
    choice.finish()
    first, second = choice.logprobs
    assert list(first.items()) == [
        (the, Logprob(-0.25, 1, " the")),
        (half, Logprob(-3.0, 2, "\ufffd")),
        (END, Logprob(-3.0, 3, "<|end|>")),
    ]
    assert second == {END: Logprob(-1.0, 1, "<|end|>")}


@pytest.mark.parametrize("kind", [byte_level, metaspace, byte_fallback])
def test_the_strings_of_tokens_join_to_the_text(kind):
    tokenizer = kind()
    text = "the quick, é€🙂 the"
    choice = stream(tokenizer, logprobs=0)
    for token_id in tokenizer.encode(text, add_special_tokens=False):
        choice.push(sampled(token_id))
    choice.finish()
    assert "".join(decoded(choice)) == choice.text


def test_without_detokenizing():
    choice = stream(detokenize=False, logprobs=1, stop_token_ids=[7])
    choice.push(sampled(5, others=[6]))
    delta = choice.take_delta()
    assert (delta.text, delta.token_ids) == ("", [5])
    assert delta.logprobs == [{5: Logprob(-0.5, 1, None), 6: Logprob(-3.0, 2, None)}]
    choice.push(sampled(7), hidden=True)
    choice.finish()
    assert choice.token_ids == [5, 7]
    assert choice.whole().text == ""


def test_nothing_follows_a_stop_string():
    choice = stream(stop="a")
    assert choice.push(sampled(letters("a")[0])) == "a"
    with pytest.raises(ValueError, match="has ended"):
        choice.push(sampled(letters("b")[0]))


@given(st.data())
@settings(max_examples=200, deadline=None)
def test_deltas_join_to_the_whole(data):
    """And tell with each text its tokens, no text twice, no empty news before the end."""
    tokenizer = byte_level()
    alphabet = st.sampled_from([*letters("ab€"), *ids_of(tokenizer, "<|end|>", "</s>")])
    ids = data.draw(st.lists(alphabet, max_size=30))
    stops = data.draw(st.lists(st.text(alphabet="ab€", min_size=1, max_size=4), max_size=2))
    choice = stream(stop=stops, logprobs=0)
    parts = []
    stop = None
    for token_id in ids:
        stop = choice.push(sampled(token_id))
        parts.append(choice.take_delta())
        assert bool(parts[-1].text) == bool(parts[-1].token_ids) or stop is not None
        if stop is not None:
            break
    choice.finish()
    parts.append(choice.take_delta())
    pushed = ids[: len(parts) - 1]
    assert choice.token_ids == pushed == [i for part in parts for i in part.token_ids]
    assert choice.text == "".join(part.text for part in parts)
    assert len(choice.logprobs) == len(pushed)
    whole = tokenizer.decode(pushed)
    assert choice.text == (whole if stop is None else whole[: whole.index(stop)])
    assert all(part.logprobs is not None for part in parts)


@settings(deadline=None)
@given(
    st.sampled_from([byte_level, byte_fallback, metaspace]),
    st.lists(st.integers(min_value=0, max_value=40), max_size=30),
    st.lists(st.text(alphabet="abeo \u00e9\ufffd", min_size=1, max_size=3), min_size=1, max_size=3),
    st.integers(min_value=0, max_value=6),
)
def test_the_engine_s_watcher_finds_the_stop_string_that_ends_the_text(kind, ids, stops, least):
    tokenizer = kind()
    params = SamplingParams(stop=stops, max_tokens=100)
    stream = ChoiceStream(tokenizer, params)
    watcher = StopWatcher(tokenizer.table, params, StopStrings(params.stop))
    for place, token_id in enumerate(ids):
        may_stop = place >= least
        found = watcher.push(token_id, may_stop)
        assert found == stream.push(SampledToken(token_id, 0.0), may_stop=may_stop)
        if found is not None:
            break


def watcher_of(*stops):
    return StopWatcher(byte_level().table, SamplingParams(stop=stops), StopStrings(stops))


def test_the_engine_s_watcher_sees_a_string_over_several_tokens():
    watcher = watcher_of("ab", "bc")
    assert [watcher.push(token_id, True) for token_id in letters("xab")] == [None, None, "ab"]
    watcher = watcher_of("ab", "bc")
    forced = [watcher.push(token_id, place > 2) for place, token_id in enumerate(letters("xabcb"))]
    assert forced == [None] * 5  # the b of "bc" came too early
