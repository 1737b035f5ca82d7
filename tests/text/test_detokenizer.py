"""Incremental detokenizing gives the same text as decoding everything at once."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.text.kinds import KINDS, byte_fallback, byte_level, metaspace, word_piece
from vmserve.text.detokenizer import IncrementalDetokenizer

TEXTS = [
    "the quick brown fox",
    "naïve café, 5 €, 日本語 🙂🙂, Привет",
    "  two  spaces,\n\nlines and 👩‍👩‍👧 joined",
    "",
]


def ids_of(tokenizer, *names):
    return [tokenizer.hf.convert_tokens_to_ids(name) for name in names]


def joined(tokenizer, ids, skip=True):
    detokenizer = IncrementalDetokenizer(tokenizer.table, skip)
    return "".join(map(detokenizer.push, ids)) + detokenizer.flush()


@pytest.mark.parametrize("kind", KINDS)
@given(data=st.data())
@settings(max_examples=150, deadline=None)
def test_any_ids_give_the_text_of_decoding_them(kind, data):
    tokenizer = KINDS[kind]()
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size + 1), max_size=30))
    skip = data.draw(st.booleans())
    assert joined(tokenizer, ids, skip) == tokenizer.decode(ids, skip)


@pytest.mark.parametrize("kind", KINDS)
@given(data=st.data())
@settings(max_examples=100, deadline=None)
def test_decoding_is_that_of_transformers(kind, data):
    """Except for bytes that are no UTF-8 in tokenizers with byte tokens (see below)."""
    tokenizer = KINDS[kind]()
    ids = tokenizer.encode(data.draw(st.text(max_size=20)), add_special_tokens=False)
    if kind != "byte_fallback":
        ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size - 1), max_size=20))
    special = data.draw(st.lists(st.sampled_from(sorted(tokenizer.special_ids)), max_size=3))
    for place, token_id in enumerate(special):  # not inside a character
        ids.insert(0 if kind == "byte_fallback" else place * 2, token_id)
    skip = data.draw(st.booleans())
    expected = tokenizer.hf.decode(ids, skip_special_tokens=skip)
    assert tokenizer.decode(ids, skip) == expected
    assert joined(tokenizer, ids, skip) == expected


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("text", TEXTS)
def test_no_piece_holds_half_a_character(kind, text):
    tokenizer = KINDS[kind]()
    detokenizer = IncrementalDetokenizer(tokenizer.table)
    ids = tokenizer.encode(text, add_special_tokens=False)
    pieces = [detokenizer.push(token_id) for token_id in ids]
    assert detokenizer.flush() == ""
    assert "\ufffd" not in "".join(pieces)
    assert "".join(pieces) == tokenizer.decode(ids)


def test_a_character_of_several_tokens_comes_with_its_last_token():
    tokenizer = byte_level()
    ids = ids_of(tokenizer, "ð", "Ł", "Ļ", "Ĥ", "a")
    detokenizer = IncrementalDetokenizer(tokenizer.table)
    found = [(detokenizer.push(token_id), detokenizer.pending) for token_id in ids]
    assert found == [("", True), ("", True), ("", True), ("🙂", False), ("a", False)]


def test_bytes_that_are_no_characters_become_replacement_characters():
    tokenizer = byte_level()
    *euro, letter = ids_of(tokenizer, "â", "Ĥ", "¬", "a")
    assert joined(tokenizer, euro) == "€"
    assert joined(tokenizer, euro[:2]) == "\ufffd"
    assert joined(tokenizer, [*euro[:2], letter]) == "\ufffda"
    assert joined(tokenizer, [euro[2], euro[0], *euro]) == "\ufffd\ufffd€"


def test_special_tokens_are_skipped_or_written_out():
    tokenizer = byte_level()
    ids = tokenizer.encode("<|turn|>fox<|end|> two words é<think>", add_special_tokens=False)
    assert joined(tokenizer, ids, True) == "fox two words é<think>"
    assert joined(tokenizer, ids, False) == "<|turn|>fox<|end|> two words é<think>"


def test_only_the_first_leading_space_goes():
    tokenizer = metaspace()
    ids = tokenizer.encode("the quick fox", add_special_tokens=False)
    detokenizer = IncrementalDetokenizer(tokenizer.table)
    pieces = list(map(detokenizer.push, ids))
    assert "".join(pieces) == "the quick fox"
    assert not pieces[0].startswith(" ")
    [end] = ids_of(tokenizer, "</s>")
    assert joined(tokenizer, [end, end, *ids, end, *ids]) == "the quick fox the quick fox"


def test_word_pieces_join():
    tokenizer = word_piece()
    ids = tokenizer.encode("the string stops", add_special_tokens=False)
    assert joined(tokenizer, ids) == "the string stops"


def test_byte_tokens_are_told_as_soon_as_a_character_is_complete():
    tokenizer = byte_fallback()
    names = ["<0x0A>", "<0xE2>", "<0x82>", "<0xAC>", "▁the", "<0xE2>", "<0x0A>", "a", "<0xE2>"]
    detokenizer = IncrementalDetokenizer(tokenizer.table)
    pieces = [detokenizer.push(token_id) for token_id in ids_of(tokenizer, *names)]
    assert pieces == ["\n", "", "", "€", " the", "", "\ufffd\n", "a", ""]
    assert detokenizer.pending
    assert detokenizer.flush() == "\ufffd"
    assert not detokenizer.pending


def test_byte_tokens_keep_characters_that_broken_bytes_follow():
    """The tokenizers library turns the whole run of byte tokens into U+FFFD."""
    tokenizer = byte_fallback()
    ids = ids_of(tokenizer, "<0x0A>", "<0xFF>", "a")
    assert tokenizer.decode(ids) == joined(tokenizer, ids) == "\n\ufffda"
    assert tokenizer.hf.decode(ids) == "\ufffd\ufffda"
    assert tokenizer.decode(ids[1:]) == tokenizer.hf.decode(ids[1:]) == "\ufffda"


def test_unknown_ids_have_no_text():
    for kind in KINDS.values():
        tokenizer = kind()
        assert joined(tokenizer, [10**6, 2**31]) == ""
        assert tokenizer.decode([-1, 10**6, 2**40]) == ""
        assert tokenizer.token_str(10**6) == tokenizer.token_str(-1) == ""
        assert tokenizer.token_text(10**6) == ""
