"""Tokenizers read from their files against those that transformers loads: the same, or none."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, decoders, pre_tokenizers, processors
from tokenizers import Tokenizer as Backend
from transformers import AutoTokenizer, Qwen2Tokenizer

from tests.text.kinds import KINDS, SPECIAL
from vmserve.errors import ConfigurationError
from vmserve.models.hub import resolve_model
from vmserve.text.tokenizer import Tokenizer, _eos_ids, load_tokenizer
from vmserve.text.tokenizer_files import FileTokenizer, read_tokenizer
from vmserve.text.tokenizer_transformers import _class_name, load_from_transformers

TEXTS = [
    "the quick fox",
    " naïve <|turn|> €🙂\n\n",
    "",
    "</s>",
    "two words é <think>",
    "a  b , c .",
]
PLAIN = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>",
         "pad_token": "</s>"}  # fmt: skip


def backend_of(kind: str) -> Backend:
    return Backend.from_str(KINDS[kind]().to_json())


@pytest.fixture
def write(tmp_path: Path) -> Callable[..., Path]:
    """Write the files of a tokenizer, byte-level and plain unless others are given."""

    def write(
        config: dict[str, Any] = PLAIN, model: Any = "llama", backend: Backend | None = None
    ) -> Path:
        backend = backend or backend_of("byte_level")
        backend.save(str(tmp_path / "tokenizer.json"))
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
        model = {"model_type": model} if isinstance(model, str) else model
        (tmp_path / "config.json").write_text(json.dumps(model))
        return tmp_path

    return write


Write = Callable[..., Path]


def reference(directory: Path) -> Tokenizer:
    hf = AutoTokenizer.from_pretrained(str(directory), local_files_only=True)
    return Tokenizer(hf, _eos_ids(directory))


def meaning(tokenizer: Tokenizer) -> Any:
    """A tokenizer as JSON, without what says the same in two ways."""

    def plain(fields: dict[str, Any]) -> dict[str, Any]:
        fields.pop("trim_offsets", None)  # of offsets in a text only
        return {k: "" if v is None and k.endswith(("_prefix", "_suffix")) else v
                for k, v in fields.items()}  # fmt: skip

    parts: dict[str, Any] = json.loads(tokenizer.to_json(), object_hook=plain)
    if (parts["decoder"] or {}).get("type") == "ByteLevel":
        parts["decoder"] = "ByteLevel"  # what else it says is for encoding
    return parts


def assert_same(directory: Path) -> None:
    """It is read from its files, and is in nothing different from what transformers loads."""
    assert isinstance(read_tokenizer(directory), FileTokenizer)
    ours, theirs = load_tokenizer(directory), reference(directory)
    assert meaning(ours) == meaning(theirs)
    assert ours.special_ids == theirs.special_ids
    assert (ours.eos_ids, ours.bos_id) == (theirs.eos_ids, theirs.bos_id)
    assert (ours.vocab_size, ours._markers) == (theirs.vocab_size, theirs._markers)
    assert ours.chat_template_text == theirs.chat_template_text
    for text in TEXTS:
        for special in (True, False):
            ids = ours.encode(text, special)
            assert ids == theirs.encode(text, special)
            assert ids == theirs.hf.encode(text, add_special_tokens=special)
            assert ours.decode(ids, special) == theirs.decode(ids, special)
    assert type(ours.hf) is type(theirs.hf)
    assert ours.hf.special_tokens_map == theirs.hf.special_tokens_map


@pytest.mark.parametrize("model_type", ["llama", "mistral", "qwen3", "opt", "gpt2"])
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "embedded"])
def test_general_classes(kind: str, model_type: str, write: Write) -> None:
    assert_same(write(PLAIN, model_type, backend_of(kind)))


def test_the_embedded_tokenizer() -> None:
    assert_same(resolve_model(None))


@pytest.mark.parametrize("kind", ["byte_level", "word_piece"])
def test_as_transformers_saves_it(kind: str, tmp_path: Path) -> None:
    KINDS[kind]().hf.save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    assert_same(tmp_path)


def test_a_post_processor_decides_about_bos(write: Write) -> None:
    backend = backend_of("byte_level")
    backend.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", pair="<s> $A $B", special_tokens=[("<s>", 0), ("</s>", 1)]
    )
    path = write({**PLAIN, "add_bos_token": False, "add_eos_token": False}, backend=backend)
    assert_same(path)
    ids = load_tokenizer(path).encode("the")
    assert (ids[0], ids[-1]) == (0, 1)


def added(content: str, **flags: bool) -> dict[str, Any]:
    plain = {"lstrip": False, "normalized": False, "rstrip": False, "single_word": False}
    return {"content": content, **plain, "special": True, **flags}


DECODER = {"added_tokens_decoder": {str(i): added(token) for i, token in enumerate(SPECIAL)}}


@pytest.mark.parametrize(
    "changes",
    [
        {"tokenizer_class": "TokenizersBackend"},
        {"unk_token": "<|turn|>", "model_max_length": 512, "clean_up_tokenization_spaces": True},
        {"pad_token": None, "additional_special_tokens": ["<|turn|>", "<|end|>"]},
        {"extra_special_tokens": ["<|turn|>"], "padding_side": "left"},
        {"bos_token": {"__type": "AddedToken", **added("<s>")}},
        DECODER,
        {"chat_template": "{{ messages[0].content }}"},
        {"chat_template": [{"name": "default", "template": "a"}, {"name": "rag", "template": "b"}]},
        {"legacy": False, "add_bos_token": True, "use_default_system_prompt": False},
    ],
)
def test_what_tokenizer_config_may_say(changes: dict[str, Any], write: Write) -> None:
    assert_same(write({**PLAIN, **changes}))


def test_a_template_in_a_file_wins(write: Write) -> None:
    path = write({**PLAIN, "chat_template": "in the configuration"})
    (path / "chat_template.jinja").write_text("{{ messages[0]['content'] }}é")
    assert_same(path)
    tokenizer = load_tokenizer(path)
    assert tokenizer.chat_template_text == "{{ messages[0]['content'] }}é"
    text, _ = tokenizer.apply_chat_template([{"role": "user", "content": "the quick"}])
    assert text == "the quické"


def test_old_lists_of_tokens_do_not_count_beside_a_new_one(write: Write) -> None:
    path = write({**PLAIN, **DECODER})
    (path / "special_tokens_map.json").write_text('{"eos_token": "<|end|>"}')
    assert_same(path)


@pytest.mark.parametrize(
    ("changes", "model"),
    [
        ({"tokenizer_class": "LlamaTokenizerFast"}, "llama"),
        ({"tokenizer_class": "GPT2Tokenizer"}, "llama"),
        ({"tokenizer_class": None}, "llama"),
        ({"tokenizer_class": "OurOwn", "auto_map": {"AutoTokenizer": ["o.O", None]}}, "llama"),
        ({"eos_token": "<|new|>"}, "llama"),
        ({"eos_token": 1}, "llama"),
        ({"additional_special_tokens": ["<|new|>"]}, "llama"),
        ({"extra_special_tokens": {"image_token": "<|turn|>"}}, "llama"),
        ({"image_token": "<|turn|>"}, "llama"),
        ({"split_special_tokens": True}, "llama"),
        ({"add_prefix_space": True}, "llama"),
        ({"added_tokens_decoder": {"0": added("<s>", lstrip=True)}}, "llama"),
        ({"added_tokens_decoder": {"9": added("<|new|>")}}, "llama"),
        ({"added_tokens_decoder": {"0": {"odd": 1}}}, "llama"),
        ({"chat_template": 7}, "llama"),
        ({"fix_mistral_regex": True}, "llama"),
        ({}, "qwen2"),
        ({}, "phi3"),
        ({}, {"a": 1}),
    ],
)
def test_what_is_left_to_transformers(changes: dict[str, Any], model: Any, write: Write) -> None:
    assert read_tokenizer(write({**PLAIN, **changes}, model)) is None


def test_files_that_are_missing_or_change_it(write: Write) -> None:
    for name in ("tokenizer.json", "tokenizer_config.json", "config.json"):
        path = write()
        (path / name).unlink()
        assert read_tokenizer(path) is None, name
    for name in ("special_tokens_map.json", "added_tokens.json", "tekken.json"):
        path = write()
        (path / name).write_text("{}")
        assert read_tokenizer(path) is None, name
        (path / name).unlink()


@pytest.mark.slow
def test_padding_and_large_mistral_vocabularies(write: Write) -> None:
    backend = backend_of("byte_level")
    backend.enable_padding(pad_id=1, pad_token="</s>")
    assert read_tokenizer(write(backend=backend)) is None
    backend.no_padding()
    backend.add_tokens([AddedToken(f"word{number}") for number in range(100_001)])
    assert read_tokenizer(write(PLAIN, "mistral", backend)) is None
    assert read_tokenizer(write(backend=backend)) is not None


@pytest.mark.parametrize("model_type", ["llama", "mistral", "qwen2", "qwen3", "opt", "gpt2", "phi"])
@pytest.mark.parametrize(
    "tokenizer_class",
    [None, "PreTrainedTokenizerFast", "TokenizersBackend", "LlamaTokenizerFast", "LlamaTokenizer",
     "GPT2Tokenizer", "GPT2TokenizerFast", "Qwen2Tokenizer", "Qwen2TokenizerFast"],
)  # fmt: skip
def test_the_class_that_transformers_chooses(
    model_type: str, tokenizer_class: str | None, write: Write
) -> None:
    config = {**PLAIN, "tokenizer_class": tokenizer_class}
    if tokenizer_class is None:
        del config["tokenizer_class"]
    path = write(config, model_type)
    (path / "special_tokens_map.json").write_text("{}")
    ours = load_from_transformers(path)
    theirs = AutoTokenizer.from_pretrained(str(path), local_files_only=True)
    assert type(ours) is type(theirs)
    assert ours.backend_tokenizer.to_str() == theirs.backend_tokenizer.to_str()
    assert ours.special_tokens_map == theirs.special_tokens_map


def test_what_only_transformers_finds_out(write: Write) -> None:
    own = {**PLAIN, "auto_map": {"AutoTokenizer": ["own.OurOwn", None]}}
    assert _class_name(write(own, "qwen2")) is None
    assert _class_name(write(PLAIN, {"model_type": "opt", "tokenizer_class": "A"})) is None
    assert _class_name(write(PLAIN, "opt")) == "PreTrainedTokenizerFast"


def test_a_damaged_tokenizer(write: Write) -> None:
    path = write()
    (path / "tokenizer.json").write_text('{"model": {"type": "BPE"')
    with pytest.raises(ConfigurationError, match=r"tokenizer\.json is damaged \(.*\): fetch"):
        load_tokenizer(path)


# -- classes that build the pipeline anew --------------------------------------------------

GPT2 = {"tokenizer_class": "GPT2Tokenizer", "bos_token": "<s>", "eos_token": "</s>",
        "unk_token": "</s>"}  # fmt: skip
QWEN2 = {"tokenizer_class": "Qwen2Tokenizer", "bos_token": None, "eos_token": "</s>",
         "pad_token": "<s>", "unk_token": None, "add_prefix_space": False,
         "split_special_tokens": False}  # fmt: skip


def qwen2_backend() -> Backend:
    """The pipeline of Qwen's tokenizers, as transformers builds it."""
    backend = backend_of("byte_level")
    built = Qwen2Tokenizer().backend_tokenizer
    for part in ("normalizer", "pre_tokenizer", "decoder"):
        setattr(backend, part, getattr(built, part))
    return backend


@pytest.mark.parametrize(
    ("config", "model_type"),
    [(GPT2, "gpt2"), (GPT2, "opt"), (GPT2, "llama"), (GPT2, "qwen3"), (QWEN2, "qwen2"),
     (QWEN2, "qwen3"), (QWEN2, "llama"), ({**QWEN2, "tokenizer_class": "Any"}, "qwen2")],
)  # fmt: skip
def test_files_that_say_what_the_class_builds(
    config: dict[str, Any], model_type: str, write: Write
) -> None:
    backend = backend_of("byte_level") if config is GPT2 else qwen2_backend()
    assert_same(write(config, model_type, backend))


def test_special_tokens_that_a_class_assumes(write: Write) -> None:
    backend = backend_of("byte_level")
    config: dict[str, Any] = {"model_max_length": 1024}
    assert read_tokenizer(write(config, "gpt2", backend)) is None
    backend.add_special_tokens(["<|endoftext|>"])
    path = write(config, "gpt2", backend)
    assert_same(path)
    assert load_tokenizer(path).eos_ids == {backend.token_to_id("<|endoftext|>")}
    backend = qwen2_backend()
    backend.add_special_tokens(["<|endoftext|>"])
    backend.post_processor = processors.ByteLevel(trim_offsets=False)
    decoder = {
        str(token_id): added(token.content, normalized=token.normalized, special=token.special)
        for token_id, token in backend.get_added_tokens_decoder().items()
    }
    config = {"tokenizer_class": "Qwen2Tokenizer", "added_tokens_decoder": decoder}
    assert_same(write(config, "qwen3", backend))
    del decoder["0"]
    assert read_tokenizer(write(config, "qwen3", backend)) is None


def test_files_that_say_something_else(write: Write) -> None:
    digits, dropout, fuse = (backend_of("byte_level") for _ in range(3))
    digits.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), digits.pre_tokenizer]
    )
    dropout.model.dropout = 0.5
    fuse.decoder = decoders.Fuse()
    new = qwen2_backend()
    new.add_tokens([AddedToken("<new>", lstrip=True, special=True)])
    for backend, config, model_type in [
        (qwen2_backend(), GPT2, "gpt2"),
        (backend_of("byte_level"), QWEN2, "qwen2"),
        (backend_of("metaspace"), GPT2, "gpt2"),
        (digits, GPT2, "llama"),
        (dropout, GPT2, "gpt2"),
        (fuse, GPT2, "gpt2"),
        (new, {**QWEN2, "eos_token": "<new>"}, "qwen3"),
        (new, {**QWEN2, "eos_token": "<think>"}, "qwen3"),
        (new, {**QWEN2, "add_prefix_space": True}, "qwen3"),
        (new, {**QWEN2, "split_special_tokens": True}, "qwen3"),
    ]:
        assert read_tokenizer(write(config, model_type, backend)) is None, (config, model_type)
