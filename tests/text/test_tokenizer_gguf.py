"""Tokenizers of GGUF files against the same ones of ``transformers``."""

from __future__ import annotations

import json
import os
import random
from collections.abc import Callable
from functools import cache, partial
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import gguf
import pytest
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, trainers
from tokenizers import Tokenizer as Backend
from transformers import PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import generate_merges

from tests.helpers import smollm2_file
from tests.models.gguf_files import add_byte_level, add_sentencepiece, byte_vocabulary, write
from vmserve.errors import ConfigurationError, UnsupportedError
from vmserve.models.hub import resolve_model
from vmserve.text.tokenizer import Tokenizer, load_tokenizer

_ROOT = Path(__file__).parents[2]
#: Names llama.cpp's directory "models".
_VOCABULARIES = "VMSERVE_TEST_GGUF_VOCABULARIES"


_HARD = (
    "", " ", "  two", "trailing  ", "\n\n\n\t x", "a\r\nb", "don't I'LL we'Ve 's", "hello world",
    "0 12 345 6789 1234567 ½² ١٢٣ Ⅷ", "e\u0301 A\u030a ﬁ", "naïve café, 5 €, Привет мир",
    "日本語のテキスト、漢字", "🙂🙂 👩‍👩‍👧 emoji", "</s><s>x<think>y</think>",
)  # fmt: skip


@cache
def _texts() -> list[str]:
    """Mixed texts: prose, code, scripts, numbers, spaces, random characters."""
    rng = random.Random(1)
    files = [
        *sorted((_ROOT / "docs").glob("*.md"))[:6],
        *sorted((_ROOT / "vmserve").glob("*.py"))[:6],
    ]
    drawn = [
        [rng.choice((rng.randrange(32, 127), rng.randrange(0xA0, 0x2FFF), 32, 10, 48))
         for _ in range(rng.randrange(1, 40))]
        for _ in range(200)
    ]  # fmt: skip
    return [
        *_HARD,
        *(path.read_text() for path in files),
        *("".join(map(chr, each)) for each in drawn),
    ]


def _same(ours: Tokenizer, theirs: Tokenizer) -> None:
    for text in _texts():
        ids = ours.encode(text)
        assert ids == theirs.encode(text), text[:200]
        assert ours.decode(ids) == theirs.decode(ids)
        shown = ours.decode(ids, skip_special_tokens=False)
        assert shown == theirs.decode(ids, skip_special_tokens=False)
    assert ours.special_ids == theirs.special_ids
    assert (ours.bos_id, ours.eos_ids) == (theirs.bos_id, theirs.eos_ids)


def _with(path: Path, add: Callable[[gguf.GGUFWriter], None]) -> Tokenizer:
    return load_tokenizer(write(path / "x.gguf", "llama", {}, add))


def _written(
    path: Path, backend: Backend, pre: str, special: list[str], *, add_bos: bool = False, **ids: int
) -> Tokenizer:
    """A byte-level tokenizer by a GGUF file."""
    state = json.loads(backend.to_str())["model"]
    tokens = [backend.id_to_token(number) for number in range(backend.get_vocab_size())]

    def add(writer: gguf.GGUFWriter) -> None:
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre(pre)
        writer.add_token_list(tokens)
        writer.add_token_types([3 if token in special else 1 for token in tokens])
        writer.add_token_merges([" ".join(merge) for merge in state["merges"]])
        if add_bos:
            writer.add_add_bos_token(True)
        for name, number in ids.items():
            getattr(writer, f"add_{name}_token_id")(number)

    return _with(path, add)


def _fast(backend: Backend, **special: str) -> Tokenizer:
    return Tokenizer(PreTrainedTokenizerFast(
        tokenizer_object=backend, clean_up_tokenization_spaces=False, **special
    ))  # fmt: skip


def test_embedded_model(tmp_path: Path) -> None:
    directory = resolve_model(None)
    theirs = load_tokenizer(directory)
    backend = Backend.from_file(str(directory / "tokenizer.json"))
    special = [theirs.token_str(number) for number in sorted(theirs.special_ids)]
    eos, eot = sorted(theirs.eos_ids)
    assert theirs.bos_id is not None
    named = {"bos": theirs.bos_id, "eos": eos, "eot": eot}
    # It splits numbers into digits, and its texts begin with BOS.
    _same(_written(tmp_path, backend, "smollm", special, add_bos=True, **named), theirs)


#: Of models whose files have no pattern but parts of the library.
_PARTS: dict[str, list[Any]] = {
    "gpt-2": [pre_tokenizers.ByteLevel(add_prefix_space=False)],
    "smollm": [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(False)],
}
_PARTS |= {"refact": _PARTS["smollm"], "starcoder": _PARTS["smollm"]}
#: Those that begin with BOS where their file does not say, and keep words of the vocabulary whole.
_WHOLE_WORDS = ("falcon3", "llama-bpe", "llama-v3", "llama3", "tekken")
_OF_TRANSFORMERS = (
    *_WHOLE_WORDS, "deepseek-r1-qwen", "gpt-4o", "llama4", "qwen2", "qwen35", "smaug-bpe"
)  # fmt: skip


def _published(pre: str) -> list[Any]:
    if pre in _PARTS:
        return _PARTS[pre]
    gguf_names = pytest.importorskip("transformers.integrations.gguf.gguf_tokenizer_mapping")
    pattern = Regex(gguf_names.GGUF_PRE_TOKENIZER_SPLITS[pre])
    as_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return [pre_tokenizers.Split(pattern, "isolated"), as_bytes]


@pytest.mark.parametrize("pre", [*_PARTS, *_OF_TRANSFORMERS])
@pytest.mark.slow
def test_published_pipelines(tmp_path: Path, pre: str) -> None:
    backend = Backend(models.BPE(ignore_merges=pre in _WHOLE_WORDS))
    if pre in ("qwen2", "qwen35"):
        backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = pre_tokenizers.Sequence(_published(pre))
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=700,
        special_tokens=["<s>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(_texts()[:30], trainer)
    named = {"eos": 1, "bos": 0} if pre in _WHOLE_WORDS else {"eos": 1}
    ours = _written(tmp_path, backend, pre, ["<s>", "</s>"], **named)
    if pre in _WHOLE_WORDS:
        assert ours.encode("x")[0] == 0
        backend.post_processor = ours._backend.post_processor
    own = {f"{name}_token": backend.id_to_token(number) for name, number in named.items()}
    _same(ours, _fast(backend, **own))


@pytest.mark.parametrize(
    ("pre", "words"),
    [
        ("deepseek-coder", ["x", ",", *" 12", ";", "\n", "\n", " ", " ", "日本", "y"]),
        ("deepseek-v3", ["x", ",", " ", "12", ";\n\n", "  ", "日本", "y"]),
        ("seed-coder", ["x", ",", *" 12", ";", "\n\n", " ", " 日本y"]),
    ],
)
def test_words_by_hand(tmp_path: Path, pre: str, words: list[str]) -> None:
    ours = _with(tmp_path, lambda writer: add_byte_level(writer, pre))
    split = ours._backend.pre_tokenizer.pre_tokenize_str("".join(words))
    ends = list(accumulate(map(len, words)))
    assert [place for _, place in split] == list(pairwise([0, *ends]))


@pytest.mark.skipif(_VOCABULARIES not in os.environ, reason=f"needs {_VOCABULARIES}")
def test_vocabularies_of_llama_cpp() -> None:
    """Real vocabularies (``ggml-vocab-*.gguf``), with texts and the ids of the models' own
    tokenizers beside them."""
    compared = []
    for path in sorted(Path(os.environ[_VOCABULARIES]).glob("ggml-vocab-*.gguf")):
        expected = path.with_name(path.name + ".out")
        try:
            ours = load_tokenizer(path)
        except (UnsupportedError, ConfigurationError):
            continue
        if not expected.exists() or "qwen35" in path.name:  # whose ids are not normalized
            continue
        texts = path.with_name(path.name + ".inp").read_bytes().decode()
        for text, ids in zip(
            texts.split("\n__ggml_vocab_test__\n"), expected.read_text().split("\n"), strict=False
        ):
            assert ours.encode(text, add_special_tokens=False) == [*map(int, ids.split())], text
        compared.append(path.stem)
    assert len(compared) >= 7


def _add_pieces(
    writer: gguf.GGUFWriter, tokens: list[str], scores: list[float], kinds: list[int]
) -> None:
    writer.add_tokenizer_model("llama")
    writer.add_token_list(tokens)
    writer.add_token_scores(scores)
    writer.add_token_types(kinds)


def test_sentencepiece(tmp_path: Path) -> None:
    """As ``transformers`` converts such a vocabulary of Llama 2."""
    trained = Backend(models.BPE(unk_token="<unk>"))
    trained.pre_tokenizer = pre_tokenizers.Metaspace()
    trainer = trainers.BpeTrainer(vocab_size=500, show_progress=False)
    trained.train_from_iterator([text for text in _texts() if text.isascii()], trainer)
    pieces = [trained.id_to_token(number) for number in range(trained.get_vocab_size())]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *pieces]
    scores = [0.0] * 259 + [-float(index // 2) for index in range(len(pieces))]

    kinds = [2, 3, 3, *[6] * 256, *[1] * len(pieces)]
    add = partial(_add_pieces, tokens=tokens, scores=scores, kinds=kinds)
    vocabulary = {token: number for number, token in enumerate(tokens)}
    merges = generate_merges(vocabulary, dict(zip(tokens, scores, strict=True)))
    backend = Backend(
        models.BPE(vocabulary, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    )
    backend.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(),
         decoders.Strip(" ", 1, 0)]
    )  # fmt: skip
    special = ("<unk>", "<s>", "</s>")
    backend.add_special_tokens([AddedToken(each, normalized=False) for each in special])
    ours = _with(tmp_path, add)
    assert ours.encode("hello")[0] == 1
    theirs = _fast(backend, bos_token="<s>", eos_token="</s>", unk_token="<unk>")
    theirs._backend.post_processor = ours._backend.post_processor
    _same(ours, theirs)


def test_tokens_by_hand(tmp_path: Path) -> None:
    ours = _with(tmp_path, add_byte_level)
    tokens, *_ = byte_vocabulary()
    assert ours.encode("<s>hello 123<think>") == [
        0, tokens.index("hello"), tokens.index("Ġ"), *map(tokens.index, "123"), 2
    ]  # fmt: skip
    assert ours.special_ids == {0, 1}
    assert (ours.bos_id, ours.eos_ids) == (0, {1})
    assert ours.vocab_size == len(tokens) - 2  # without those that pad
    assert ours.decode([len(tokens) - 1]) == ""
    assert ours.decode(ours.encode("é</s>")) == "é"


def test_chats(tmp_path: Path) -> None:
    ours = _with(tmp_path, add_byte_level)
    text, ids = ours.apply_chat_template([{"role": "user", "content": "hello<s>"}])
    assert text == "<s>hello<s>"
    assert ids[0] == 0
    assert ids.count(0) == 1  # the message's own is text
    assert ours.hf.chat_template == ours.chat_template_text


def test_named_templates(tmp_path: Path) -> None:
    def add(writer: gguf.GGUFWriter) -> None:
        add_byte_level(writer)
        writer.add_string("tokenizer.chat_template.tool_use", "tools")
        writer.add_array("tokenizer.chat_templates", ["tool_use"])

    ours = _with(tmp_path, add)
    assert ours.chat_template_text.endswith("\ntools")
    text, _ = ours.apply_chat_template([{"role": "user", "content": "hello"}])
    assert text == "<s>hello"


@pytest.mark.parametrize(
    ("add", "said"),
    [
        (partial(add_byte_level, pre="default"), r"'default' .* is not known; kn.*llama-bpe"),
        (partial(add_byte_level, pre="no\nname"), r"pre-tokenizer '.*' .* is not known; kn"),
        (lambda writer: writer.add_tokenizer_model("bert"),
         "model 'bert' is not supported; supported: gpt2"),
    ],
)  # fmt: skip
def test_unknown_kinds_are_refused_by_name(tmp_path: Path, add: Any, said: str) -> None:
    with pytest.raises(UnsupportedError, match=said):
        _with(tmp_path, add)


_BYTES = byte_vocabulary()


def _parts(writer: gguf.GGUFWriter, **changes: Any) -> None:
    parts = dict(zip(("tokens", "merges", "kinds"), _BYTES, strict=True)) | changes
    writer.add_tokenizer_model("gpt2")
    if parts.get("pre", "gpt-2"):
        writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(parts["tokens"])
    writer.add_token_types(parts["kinds"])
    writer.add_token_merges(parts["merges"])
    writer.add_eos_token_id(parts.get("eos", 1))
    writer.add_add_bos_token(parts.get("add_bos", False))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"pre": ""}, r"does not say how its texts are split \(tokenizer.ggml.pre is missing\)"),
        ({"kinds": [1]}, "token_type has 1 numbers of type .* for 269 tokens"),
        ({"kinds": [0.5] * 269}, "token_type has 269 numbers of type float32 for 269 tokens"),
        ({"tokens": ["a", *_BYTES[0][1:]]}, "tokens has 'a' twice"),
        ({"merges": ["hello"]}, "merges has 'hello', not two tokens"),
        ({"merges": ["h "]}, "merges has 'h ', not two tokens"),
        ({"merges": ["h xyz"]}, r"the tokenizer is damaged \(.*xyz"),
        ({"merges": ["h \x07"]}, r"the tokenizer is damaged \(.*` ` out of vocabulary"),
        ({"eos": 269}, "eos_token_id is 269, but there are 269 tokens"),
        ({"eos": 268}, "the eos token 268 is one of the unused"),
        ({"add_bos": True}, "add_bos_token is true, but there is no bos token"),
    ],
)
def test_damaged(tmp_path: Path, changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigurationError, match=said) as raised:
        _with(tmp_path, lambda writer: _parts(writer, **changes))
    assert str(raised.value).startswith("x.gguf")
    assert str(raised.value).isprintable()


@pytest.mark.parametrize(
    ("piece", "score", "said"),
    [
        ("x", float("nan"), r"scores has 4 numbers of type float32 .* not-a-n"),
        ("x" * 1_000_000, 0.0, r"x…' of 1,000,000 characters; 256 is the limit"),
    ],
)
def test_damaged_pieces(tmp_path: Path, piece: str, score: float, said: str) -> None:
    tokens, scores = ["<unk>", "<s>", "</s>", piece], [0.0, 0.0, 0.0, score]
    with pytest.raises(ConfigurationError, match=said):
        _with(tmp_path, partial(_add_pieces, tokens=tokens, scores=scores, kinds=[2, 3, 3, 1]))


def test_small_sentencepiece(tmp_path: Path) -> None:
    ours = _with(tmp_path, add_sentencepiece)
    strings = [ours.token_str(number) for number in ours.encode("hello wé")]
    assert strings == ["<s>", "▁hello", "▁w", "<0xC3>", "<0xA9>"]
    assert ours.decode(ours.encode("hello wé")) == "hello wé"


def test_smollm2() -> None:
    ours = load_tokenizer(smollm2_file())
    backend = Backend.from_str(ours.to_json())
    backend.pre_tokenizer = pre_tokenizers.Sequence(_published("smollm"))
    _same(ours, _fast(backend, bos_token="<|im_start|>", eos_token="<|im_end|>"))
    text, _ = ours.apply_chat_template([{"role": "user", "content": "Hi"}])
    assert text.endswith("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")
