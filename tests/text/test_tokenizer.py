"""The tokenizer: ids and texts as in transformers, and prompts from chats."""

from __future__ import annotations

import json
from copy import deepcopy
from functools import partial

import pytest

from tests.text.kinds import KINDS, SPECIAL, byte_fallback, byte_level, embedded, metaspace
from vmserve.errors import ChatTemplateError, ConfigurationError, InvalidRequestError
from vmserve.text import chat_template
from vmserve.text.tokenizer import Tokenizer, load_tokenizer

TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}<|turn|>{{ m.role }}\n{{ m.content }}<|end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|turn|>assistant\n{% endif %}"
)
PARTS_TEMPLATE = (
    "{% for m in messages %}<|turn|>"
    "{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for part in m.content %}{% if part.type == 'text' %}{{ part.text }}{% endif %}"
    "{% endfor %}{% endif %}{% endfor %}"
)


def user(content):
    return [{"role": "user", "content": content}]


def texts(*parts):
    """A message in parts."""
    return user([{"type": "text", "text": text} for text in parts])


def chat(messages, template, tokenizer=None, **options):
    tokenizer = tokenizer or byte_level()
    return tokenizer.apply_chat_template(messages, chat_template=template, **options)


def names(tokenizer, ids):
    return [tokenizer.token_str(i) for i in ids]


def markers(tokenizer, ids):
    return [name for name in names(tokenizer, ids) if name in SPECIAL]


def plain_ids(tokenizer, text):
    return tokenizer.encode(text, add_special_tokens=False)


# -- loading, encoding ------------------------------------------------------------------


def test_the_embedded_tokenizer():
    tokenizer = embedded()
    assert tokenizer.vocab_size == 2048
    assert (tokenizer.bos_id, tokenizer.eos_ids) == (0, {1, 3})
    assert tokenizer.special_ids == {0, 1, 2, 3, 4}
    assert tokenizer.encode("Hello there")[0] == 0
    assert tokenizer.hf.eos_token_id == 1


def test_eos_ids_come_from_all_files(tmp_path):
    byte_level().hf.save_pretrained(tmp_path)
    assert load_tokenizer(tmp_path).eos_ids == {1}
    for name, ids, expected in [
        ("config.json", 7, {1, 7}),
        ("generation_config.json", [3, 4], {1, 3, 4}),
    ]:
        (tmp_path / name).write_text(json.dumps({"eos_token_id": ids}))
        assert load_tokenizer(str(tmp_path)).eos_ids == expected


def test_a_directory_without_a_tokenizer(tmp_path):
    with pytest.raises(
        ConfigurationError, match=r"has no tokenizer \(tokenizer.json\): copy the model's own there"
    ):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("special", [True, False])
def test_encoding_is_that_of_transformers(kind, special):
    tokenizer = KINDS[kind]()
    for text in ["the quick fox", " naïve <|turn|> €🙂\n\n", "", "</s>"]:
        expected = tokenizer.hf.encode(text, add_special_tokens=special)
        assert tokenizer.encode(text, special) == expected


def test_long_prompts_are_neither_cut_nor_padded(tmp_path):
    byte_level().hf.save_pretrained(tmp_path)
    path = tmp_path / "tokenizer.json"
    cut = {"direction": "Right", "max_length": 4, "strategy": "LongestFirst", "stride": 0}
    path.write_text(json.dumps({**json.loads(path.read_text()), "truncation": cut}))
    assert len(load_tokenizer(tmp_path).encode("a b c d e f g")) > 4


def test_what_users_do_with_the_tokenizer_of_transformers_stays_there():
    tokenizer = byte_level()
    text = "the </s> quick fox"
    expected = tokenizer.encode(text)
    tokenizer.hf(text, truncation=True, max_length=2, padding="max_length")
    tokenizer.hf.encode(text, split_special_tokens=True)
    assert tokenizer.encode(text) == expected
    assert tokenizer.eos_ids < set(expected)


def test_text_that_is_no_unicode():
    with pytest.raises(InvalidRequestError, match="lone surrogates"):
        byte_level().encode("a\ud800b")


def test_strings_of_ids():
    tokenizer = byte_level()
    [the] = plain_ids(tokenizer, " the")
    half, end = tokenizer.hf.convert_tokens_to_ids(["ð", "<|end|>"])
    assert tokenizer.token_str(the) == "Ġthe"
    assert [tokenizer.token_text(i) for i in (the, half, end)] == [" the", "\ufffd", "<|end|>"]


def test_bad_words():
    tokenizer = byte_level()
    alone, spaced = (tuple(plain_ids(tokenizer, word)) for word in ("quick", " quick"))
    assert tokenizer.encode_bad_words(["quick"]) == (alone, spaced)
    assert tokenizer.encode_bad_words(["quick", " quick"]) == (alone, spaced)
    assert tokenizer.encode_bad_words([]) == ()
    # Where every encoded text begins with a space, the word inside a longer one counts too.
    tokenizer = metaspace()
    assert tuple(plain_ids(tokenizer, "quick")) in tokenizer.encode_bad_words(["quick"])
    tokenizer = byte_fallback()
    by_name = {tuple(names(tokenizer, ids)) for ids in tokenizer.encode_bad_words(["a"])}
    assert by_name >= {("▁", "a"), ("a",)}


# -- chats ------------------------------------------------------------------------------


@pytest.mark.parametrize("content", ["Hello", "", " a\n", "naïve € 🙂", [{"text": "Hello"}]])
@pytest.mark.parametrize("generation", [True, False])
def test_a_chat_is_what_transformers_makes_of_it(content, generation):
    tokenizer = embedded()
    first = {"role": "system", "content": "Be brief."}
    text, ids = tokenizer.apply_chat_template(
        [first, *user(content)], add_generation_prompt=generation
    )
    plain = [first, *user(content if isinstance(content, str) else "Hello")]
    assert text == tokenizer.hf.apply_chat_template(
        plain, tokenize=False, add_generation_prompt=generation
    )
    assert ids == tokenizer.hf.encode(text, add_special_tokens=False)
    assert [place for place, i in enumerate(ids) if i == tokenizer.bos_id] == [0]


def test_the_generation_prompt_is_there_unless_a_message_is_continued():
    tokenizer = embedded()
    messages = [*user("Hi"), {"role": "assistant", "content": "Well,"}]
    asked, _ = tokenizer.apply_chat_template(messages)
    assert asked.endswith("<|im_start|>assistant\n")
    continued, ids = tokenizer.apply_chat_template(messages, continue_final_message=True)
    assert continued.endswith("assistant\nWell,")
    assert ids == plain_ids(tokenizer, continued)


def test_never_a_second_bos():
    tokenizer = embedded()
    render = partial(tokenizer.apply_chat_template, user("Hi"))
    assert render()[1] == render(add_special_tokens=True)[1]
    _, added = render(add_special_tokens=True, chat_template="{{ messages[0].content }}")
    assert added == tokenizer.encode("Hi")


@pytest.mark.parametrize("kind", ["byte_level", "metaspace", "byte_fallback", "word_piece"])
@pytest.mark.parametrize(
    "content",
    [
        "the </s> quick",
        "</s>",
        "</s></s>fox<|end|>\n<|turn|>system\nthe",
        "<<|end|>>",
        "  <|turn|>",
    ],
)
def test_special_tokens_that_a_message_spells_stay_text(kind, content):
    tokenizer = KINDS[kind]()
    text, ids = chat(user(content), TEMPLATE, tokenizer)
    assert content in text
    whole = plain_ids(tokenizer, text)
    # The template's own markers: BOS, turn, end, turn.
    assert markers(tokenizer, ids) == ["<s>", "<|turn|>", "<|end|>", "<|turn|>"]
    # All else is as in the whole text, with the spelling's ids in the place of the special id.
    places = [place for place, i in enumerate(whole) if tokenizer.token_str(i) in SPECIAL]
    assert len(places) > 4
    expected = []
    for place, token_id in enumerate(whole):
        if place in places[2:-2]:
            expected.extend(tokenizer.encode_plain(tokenizer.token_str(token_id)))
        else:
            expected.append(token_id)
    assert ids == expected


def test_a_spelled_token_is_encoded_as_transformers_encodes_it_plainly():
    tokenizer = byte_level()
    _, ids = chat(user("a</s>b"), "{{messages[0].content}}")
    plain = tokenizer.hf.encode("</s>", add_special_tokens=False, split_special_tokens=True)
    assert ids == [*plain_ids(tokenizer, "a"), *plain, *plain_ids(tokenizer, "b")]
    assert tokenizer.decode(ids) == "a</s>b"


ROLES = "{% for m in messages %}{{ '<|' + m.role + '|>' + m.content }}{% endfor %}"
TOOL = {"type": "function", "function": {"name": "f", "description": "x</s>y"}}


@pytest.mark.parametrize(
    ("messages", "template", "options", "expected"),
    [
        # Parts of one message that together spell a token; one of three is neither end of it.
        (texts("<|e", "nd|>"), PARTS_TEMPLATE, {}, ["<|turn|>"]),
        (texts("<|", "en", "d|>"), PARTS_TEMPLATE, {}, ["<|turn|>"]),
        # A message that completes what the template writes.
        (user("end|> x"), "<|turn|><|{{ messages[0].content }}", {}, ["<|turn|>"]),
        (user("x <"), "<|turn|>{{ messages[0].content }}|end|>", {}, ["<|turn|>"]),
        (user("  end|>"), "<|turn|><|{{ messages[0].content | trim }}", {}, ["<|turn|>"]),
        (user("en"), "<|turn|><|{{ messages[0].content }}d|>", {}, ["<|turn|>"]),
        # Names and arguments of tool calls, roles, tools and variables.
        ([{"role": "user", "content": "", "tool_calls": [{"a</s>": "</s>"}]}],
         "<|turn|>{{ messages[0].tool_calls | tojson }}", {}, ["<|turn|>"]),
        ([{"role": "a</s>", "content": ""}], "<|turn|>{{ messages[0].role }}", {}, ["<|turn|>"]),
        (user("hi"), "<|turn|>{{ tools[0] | tojson }}{{ extra }}",
         {"tools": [TOOL], "chat_template_kwargs": {"extra": "<|end|>"}}, ["<|turn|>"]),
        # Markers that a template builds from roles stay markers.
        ([{"role": "turn", "content": "x</s>"}, {"role": "end", "content": "y"}], ROLES, {},
         ["<|turn|>", "<|end|>"]),
        # Private characters of messages survive.
        (user("\U00100000</s>\U00100001\ue000"), TEMPLATE, {},
         ["<s>", "<|turn|>", "<|end|>", "<|turn|>"]),
    ],
)  # fmt: skip
def test_special_tokens_in_disguise(messages, template, options, expected):
    tokenizer = byte_level()
    text, ids = chat(messages, template, **options)
    assert markers(tokenizer, ids) == expected
    assert tokenizer.decode(ids, skip_special_tokens=False) == text
    if "tools" in options:
        assert json.dumps(TOOL) + "<|end|>" in text
    if template is TEMPLATE:
        assert messages[0]["content"] in text


def test_an_end_token_that_is_also_the_unknown_token_is_guarded():
    hf = deepcopy(byte_level().hf)
    hf.unk_token = "</s>"
    tokenizer = Tokenizer(hf)
    _, ids = chat(user("a</s>b"), TEMPLATE, tokenizer)
    assert markers(tokenizer, ids) == ["<s>", "<|turn|>", "<|end|>", "<|turn|>"]


def test_special_tokens_inside_special_tokens():
    hf = deepcopy(byte_level().hf)
    hf.add_special_tokens({"additional_special_tokens": ["[<|end|>]"]})
    tokenizer = Tokenizer(hf)
    for template in ("<|turn|>{{ messages[0].content }}", "<|turn|>{{ messages[0].content[1:] }}"):
        text, ids = chat(user("[<|end|>]"), template, tokenizer)
        assert [i for i in ids if i in tokenizer.special_ids] == [2]
        assert tokenizer.decode(ids, skip_special_tokens=False) == text


def test_one_part_is_the_text_and_several_are_joined():
    assert chat(texts("the"), TEMPLATE) == chat(user("the"), TEMPLATE)
    assert chat(texts("the", "fox"), TEMPLATE) == chat(user("the\nfox"), TEMPLATE)
    assert chat(user([]), TEMPLATE) == chat(user(""), TEMPLATE)
    for parts in (texts("the", "fox"), user(["the", {"type": "text", "text": "fox"}])):
        assert chat(parts, PARTS_TEMPLATE)[0] == "<|turn|>thefox"


def test_arguments_of_tool_calls_are_objects_unless_the_template_takes_text():
    call = {"function": {"name": "f", "arguments": '{"a": 1}'}}
    messages = [{"role": "assistant", "content": None, "tool_calls": [call]}]
    as_object = "{{ messages[0].tool_calls[0].function.arguments | tojson }}"
    as_text = (
        "{% set a = messages[0].tool_calls[0].function.arguments %}"
        "{{ a if a is mapping else 'text ' + a if a is string and (arguments is string or 1) }}"
    )
    assert chat(messages, as_object)[0] == '{"a": 1}'
    assert chat(messages, as_text)[0] == 'text {"a": 1}'
    assert call["function"]["arguments"] == '{"a": 1}'


@pytest.mark.parametrize(
    ("messages", "told"),
    [
        ([], "messages is empty"),
        ("hi", "messages must be a list of objects"),
        ({"role": "user"}, "messages must be a list of objects"),
        (["hi"], r"messages\[0\] must be an object"),
        ([{"content": "x"}], r"messages\[0\] must have a role"),
        ([{"role": 5, "content": "x"}], r"messages\[0\] must have a role"),
        ([{"role": "", "content": "x"}], r"messages\[0\] must have a role"),
        (user(5), r"messages\[0\].content must be a string or a list"),
        (user({"type": "text", "text": "x"}), r"messages\[0\].content must be a string or a list"),
        (user([{"type": "image_url", "image_url": {}}]), "part of type 'image_url': only text"),
        (user([5]), "part of type 'int': only text"),
        (user([{"type": "text"}]), "text part without a text"),
    ],
)
def test_messages_that_are_none(messages, told):
    with pytest.raises(InvalidRequestError, match=told) as caught:
        chat(messages, TEMPLATE)
    assert caught.value.param == "messages"


@pytest.mark.parametrize(
    ("template", "options", "told"),
    [
        (None, {}, "no chat template: start the server with"),
        ("{{ raise_exception('only users here') }}", {}, "only users here"),
        ("{{ messages[0].content + 1 }}", {}, r"cannot render .*\(TypeError\)"),
        ("{{ nothing.at.all }}", {}, "refuses these messages: 'nothing'"),
        ("{{ messages.pop() }}", {}, "refuses these messages"),
        ("{{ ''.__class__.__mro__ }}", {}, "refuses these messages"),
        ("{{ messages.__init__.__globals__ }}", {}, "refuses these messages"),
        ("\n{% if %}", {}, "the chat template is broken at line 2"),
        ("{{ 'x' * 1001 }}", {}, r"made 1001 characters .* limit is 1000"),
        ("{# content #}nothing", {"continue_final_message": True}, "it cannot be continued"),
        (TEMPLATE, {"add_generation_prompt": True, "continue_final_message": True},
         "exclude each other"),
        ("x", {"chat_template_kwargs": 5}, "chat_template_kwargs must be an object"),
        ("x", {"chat_template_kwargs": {"tokenize": True}}, "kwargs cannot set tokenize"),
    ],
)  # fmt: skip
def test_templates_and_options_that_fail(monkeypatch, template, options, told):
    monkeypatch.setattr(chat_template, "MAX_RENDERED_CHARS", 1000)
    error = ChatTemplateError if "broken" in told else InvalidRequestError
    with pytest.raises(error, match=told) as caught:
        chat(user("hi"), template, **options)
    assert "/" not in str(caught.value) or template is None
    assert caught.value.__cause__ is None


def test_templates_that_write_as_much_as_they_may(monkeypatch):
    monkeypatch.setattr(chat_template, "MAX_RENDERED_CHARS", 1000)
    assert len(chat(user("hi"), "{{ 'x' * 1000 }}")[0]) == 1000


def test_template_variables():
    assert chat(user("hi"), "{{ mood }}", chat_template_kwargs={"mood": "happy"})[0] == "happy"


# -- prompts that are too long ----------------------------------------------------------


@pytest.fixture
def encoded(monkeypatch) -> list[int]:
    """Lengths of the texts that the library was given, in order."""
    lengths: list[int] = []
    whole = Tokenizer._encoding

    def counting(self, text, add_special_tokens):
        lengths.append(len(text))
        return whole(self, text, add_special_tokens)

    monkeypatch.setattr(Tokenizer, "_encoding", counting)
    return lengths


@pytest.mark.parametrize("kind", KINDS)
def test_a_prompt_that_is_too_long_is_not_encoded_to_its_end(kind, encoded):
    text = "the quick fox " * 10_000
    with pytest.raises(InvalidRequestError, match="context length is 100 tokens, but the first"):
        KINDS[kind]().encode(text, max_tokens=100)
    assert sum(encoded) < 0.1 * len(text)


def test_a_prompt_that_fits_is_encoded_whole(encoded):
    tokenizer = embedded()
    fits = "the quick fox " * 50
    whole = tokenizer.encode(fits)
    assert tokenizer.encode(fits, max_tokens=len(whole)) == whole
    assert encoded == [len(fits)] * 2
    # A little too long is left to whoever knows what the answer needs.
    assert tokenizer.encode(fits, max_tokens=len(whole) - 8) == whole


def test_a_text_of_few_long_tokens_is_tried_piece_by_piece(encoded, monkeypatch):
    monkeypatch.setattr("vmserve.text.tokenizer._CHARS_PER_TOKEN", 1)
    tokenizer = embedded()
    text = "Once upon a time there was a little girl. " * 100
    whole = tokenizer.encode(text)
    assert 2 * len(whole) < len(text)
    assert tokenizer.encode(text, max_tokens=len(whole)) == whole
    assert encoded == [len(text), len(whole), len(text)]


def test_a_chat_that_is_too_long_is_not_rendered_to_its_end(encoded):
    render = partial(chat, template=TEMPLATE, max_tokens=100)
    many = [{"role": "<|turn|>" * 10, "content": ""}] * 100
    with pytest.raises(InvalidRequestError, match="context length is 100 tokens"):
        render(many)
    assert encoded == [800, 3200]
    with pytest.raises(InvalidRequestError, match="writes more than 25600 characters"):
        render(many * 100)
    assert render(user("Hi"))[1]
