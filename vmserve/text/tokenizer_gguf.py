"""Build the tokenizer of a GGUF file with the ``tokenizers`` library.

The file has the vocabulary, the kinds of tokens, merges or scores, and the chat template. It does
not have the patterns that split a text into words: only a name for them (``tokenizer.ggml.pre``). A
wrong pattern fails silently, with other tokens than the model was trained with, so names that are
not in the table here are refused.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from tokenizers import (
    AddedToken,
    Regex,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
)
from tokenizers import Tokenizer as Backend

from vmserve.errors import ConfigurationError, UnsupportedError
from vmserve.models.gguf.reader import GgufFile, shown
from vmserve.text.light_tokenizer import LightTokenizer

__all__ = ["GgufTokenizer", "read_gguf_tokenizer"]

_PREFIX = "tokenizer.ggml."
#: Numbers of tokenizer.ggml.token_type that mean something here.
_UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED = 2, 3, 4, 5
_NAMED = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}


@dataclass(frozen=True)
class _Words:
    """How a text is split into words: by each pattern in turn, what it does not match too."""

    patterns: tuple[str, ...]
    nfc: bool = False
    #: Whether a word in the vocabulary is one token, whatever the merges would make of it.
    ignore_merges: bool = False
    #: Whether BOS is added, where the file does not say so itself.
    add_bos: bool = False


_CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SPACES = r"|\s*[\r\n]+|\s+(?!\S)|\s+"
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_LLAMA3 = (
    _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*" + _SPACES
)
_QWEN2 = _LLAMA3.replace("{1,3}", "")
_QWEN35 = _QWEN2.replace(r"?\p{L}+", r"?[\p{L}\p{M}]+").replace(r"[^\s\p{L}", r"[^\s\p{L}\p{M}")
_SEED_CODER = _QWEN2.replace(r"[^\s\p{L}\p{N}]+[\r\n]*", r"[^\s\p{L}\p{N}\r\n]+")
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_TEKKEN = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*"
) + _SPACES
#: Pattern in which contractions belong to their words.
_GPT4O = (
    _TEKKEN.replace(f"{_LOWER}+", f"{_LOWER}+{_CONTRACTIONS}?")
    .replace(f"{_LOWER}*", f"{_LOWER}*{_CONTRACTIONS}?")
    .replace(r"\p{N}|", r"\p{N}{1,3}|")
)
_DEEPSEEK_V3 = (
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"""
    r"| ?[\p{P}\p{S}]+[\r\n]*"
) + _SPACES
_LIKE_LLAMA3 = _Words((_LLAMA3,), ignore_merges=True, add_bos=True)
_DIGIT_BY_DIGIT = _Words((r"\p{N}", _GPT2))
#: Words by tokenizer.ggml.pre. "default" is missing: its writer did not know the model's.
_WORDS: Mapping[str, _Words] = {
    "deepseek-coder": _Words(
        (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[一-龥ࠀ-一가-\ud7ff]+", r"\p{N}")
    ),
    "deepseek-r1-qwen": _Words((_QWEN2,)),
    "deepseek-v3": _Words((r"\p{N}{1,3}", "[一-龥\u3040-ゟ゠-ヿ]+", _DEEPSEEK_V3)),
    "falcon3": _LIKE_LLAMA3,
    "gpt-2": _Words((_GPT2,)),
    "gpt-4o": _Words((_GPT4O,)),
    "llama-bpe": _LIKE_LLAMA3,
    "llama-v3": _LIKE_LLAMA3,
    "llama3": _LIKE_LLAMA3,
    "llama4": _Words((_GPT4O,)),
    "qwen2": _Words((_QWEN2,), nfc=True),
    "qwen35": _Words((_QWEN35,), nfc=True),
    "refact": _DIGIT_BY_DIGIT,
    "seed-coder": _Words((_SEED_CODER,)),
    "smollm": _DIGIT_BY_DIGIT,
    "smaug-bpe": _Words((_LLAMA3,)),
    "starcoder": _DIGIT_BY_DIGIT,
    "tekken": _Words((_TEKKEN,), ignore_merges=True, add_bos=True),
}
#: Characters of the longest piece of sentencepiece's: each is cut everywhere. 16 is usual.
_LONGEST_PIECE = 256
#: Sentencepiece's sign for a space.
_SPACE = "▁"


@dataclass(frozen=True)
class GgufTokenizer(LightTokenizer):
    """The tokenizer of a GGUF file."""

    eos_ids: tuple[int, ...]

    @cached_property
    def complete(self) -> Any:
        """The same as a tokenizer of ``transformers``, which is imported now."""
        from transformers import PreTrainedTokenizerFast  # noqa: PLC0415 - slow

        return PreTrainedTokenizerFast(
            tokenizer_object=deepcopy(self.backend_tokenizer),
            clean_up_tokenization_spaces=False,
            chat_template=self.chat_template,
            **self.named,
        )


def read_gguf_tokenizer(file: GgufFile) -> GgufTokenizer:
    """Build the tokenizer that a file's metadata describe.

    Raises :class:`~vmserve.errors.UnsupportedError` for kinds of tokenizers and patterns that are
    not known, by their names; :class:`~vmserve.errors.ConfigurationError` for damaged files.
    """
    kind = file.string(_PREFIX + "model")
    if kind not in ("gpt2", "llama"):
        raise UnsupportedError(
            f"{file.path.name}: {_PREFIX}model {shown(kind)} is not supported; supported: gpt2 "
            "(byte-level BPE), llama (sentencepiece BPE)"
        )
    vocabulary = _Vocabulary(file, defaults=kind == "llama")
    try:
        backend = _byte_level(vocabulary) if kind == "gpt2" else _sentencepiece(vocabulary)
        backend.add_tokens(vocabulary.added())
        backend.add_special_tokens(vocabulary.special())
    except Exception as error:  # the library's errors have no type of their own
        if type(error) is not Exception:
            raise
        # It quotes tokens, which can have control characters.
        reason = "".join(char if char.isprintable() else " " for char in str(error))[:200]
        raise ConfigurationError(
            f"{file.path.name}: the tokenizer is damaged ({reason}): fetch the model again"
        ) from error
    ids = vocabulary.ids
    eos = [ids["eos"], vocabulary.optional_id("eot_token_id")]
    return GgufTokenizer(
        backend,
        {f"{name}_token": vocabulary.tokens[i] for name, i in ids.items() if i is not None},
        _chat_template(file),
        tuple(dict.fromkeys(each for each in eos if each is not None)),
    )


class _Vocabulary:
    """Tokens and their kinds, checked. ``defaults``: sentencepiece's ids where none are named."""

    def __init__(self, file: GgufFile, *, defaults: bool) -> None:
        self.file = file
        self.tokens = file.strings(_PREFIX + "tokens")
        self.kinds = self._numbers("token_type", "iu")
        usual = {"bos": 1, "eos": 2, "unk": 0} if defaults else {}
        self.ids = {
            name: self.optional_id(f"{key}_token_id", usual.get(name))
            for name, key in _NAMED.items()
        }
        while self.tokens and self.kinds[len(self.tokens) - 1] == _UNUSED:
            self.tokens.pop()  # rows of the embedding that no text leads to
        self.by_text = {token: token_id for token_id, token in enumerate(self.tokens)}
        if len(self.by_text) != len(self.tokens):
            twice = next(t for i, t in enumerate(self.tokens) if self.by_text[t] != i)
            raise ConfigurationError(
                f"{file.path.name}: {_PREFIX}tokens has {shown(twice)} twice: fetch the model again"
            )
        for name, token_id in self.ids.items():
            if token_id is not None and token_id >= len(self.tokens):
                raise ConfigurationError(
                    f"{file.path.name}: the {name} token {token_id:,} is one of the unused: fetch "
                    "the model again"
                )

    def _numbers(self, name: str, kinds: str) -> list[Any]:
        found = self.file.numbers(_PREFIX + name)
        if len(found) != len(self.tokens) or found.dtype.kind not in kinds:
            raise ConfigurationError(
                f"{self.file.path.name}: {_PREFIX}{name} has {len(found):,} numbers of type "
                f"{found.dtype} for {len(self.tokens):,} tokens: fetch the model again"
            )
        return list(found.tolist())

    def scores(self) -> list[float]:
        found = self.file.numbers(_PREFIX + "scores")
        if len(found) < len(self.tokens) or found.dtype.kind != "f" or (found != found).any():
            raise ConfigurationError(
                f"{self.file.path.name}: {_PREFIX}scores has {len(found):,} numbers of type "
                f"{found.dtype} for {len(self.tokens):,} tokens, or not-a-numbers: fetch the model "
                "again"
            )
        return [float(score) for score in found]

    def optional_id(self, name: str, default: int | None = None) -> int | None:
        if default is None and _PREFIX + name not in self.file:
            return None
        token_id = self.file.integer(_PREFIX + name, default)
        if not 0 <= token_id < len(self.kinds):
            raise ConfigurationError(
                f"{self.file.path.name}: {_PREFIX}{name} is {token_id:,}, but there are "
                f"{len(self.kinds):,} tokens: fetch the model again"
            )
        return token_id

    def special(self) -> list[AddedToken]:
        named = set(self.ids.values())
        return [
            AddedToken(token, special=True, normalized=False)
            for token_id, token in enumerate(self.tokens)
            if self.kinds[token_id] in (_CONTROL, _UNKNOWN) or token_id in named
        ]

    def added(self) -> list[AddedToken]:
        """Tokens that are found in a text before it is split, and are text themselves."""
        return [
            AddedToken(token, special=False, normalized=False)
            for token_id, token in enumerate(self.tokens)
            if self.kinds[token_id] == _USER_DEFINED
        ]

    def ends(self, *, add_bos: bool) -> Any:
        """What is put around a text."""
        first: list[str] = []
        last: list[str] = []
        tokens: list[dict[str, Any]] = []
        for name, at, default in (("bos", first, add_bos), ("eos", last, False)):
            if not self.file.flag(f"{_PREFIX}add_{name}_token", default):
                continue
            token_id = self.ids[name]
            if token_id is None:
                raise ConfigurationError(
                    f"{self.file.path.name}: {_PREFIX}add_{name}_token is true, but there is no "
                    f"{name} token: fetch the model again"
                )
            at.append(f"{name}:0")
            tokens.append({"id": name, "ids": [token_id], "tokens": [self.tokens[token_id]]})
        # The template of a pair is required, and never used.
        return processors.TemplateProcessing(
            single=[*first, "$A:0", *last], pair=["$A:0", "$B:1"], special_tokens=tokens
        )


def _byte_level(vocabulary: _Vocabulary) -> Backend:
    file = vocabulary.file
    if _PREFIX + "pre" not in file:
        raise ConfigurationError(
            f"{file.path.name} does not say how its texts are split ({_PREFIX}pre is missing): "
            "convert the model again with a current converter"
        )
    name = file.string(_PREFIX + "pre")
    words = _WORDS.get(name)
    if words is None:
        raise UnsupportedError(
            f"{file.path.name}: pre-tokenizer {shown(name)} ({_PREFIX}pre) is not known; known: "
            f"{', '.join(_WORDS)}"
        )
    merges = [_merge(file, merge) for merge in file.strings(_PREFIX + "merges")]
    model = models.BPE(vocab=vocabulary.by_text, merges=merges, ignore_merges=words.ignore_merges)
    backend = Backend(model)
    if words.nfc:
        backend.normalizer = normalizers.NFC()
    splits = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in words.patterns]
    as_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.pre_tokenizer = pre_tokenizers.Sequence([*splits, as_bytes])
    backend.decoder = decoders.ByteLevel()
    backend.post_processor = vocabulary.ends(add_bos=words.add_bos)
    return backend


def _merge(file: GgufFile, merge: str) -> tuple[str, str]:
    # The first of the two may begin with a space, in no vocabulary that is byte-level.
    middle = merge.find(" ", 1)
    if middle < 0 or middle + 1 == len(merge):
        raise ConfigurationError(
            f"{file.path.name}: {_PREFIX}merges has {shown(merge)}, not two tokens: fetch the "
            "model again"
        )
    return merge[:middle], merge[middle + 1 :]


def _sentencepiece(vocabulary: _Vocabulary) -> Backend:
    longest = max(vocabulary.tokens, key=len, default="")
    if len(longest) > _LONGEST_PIECE:
        raise ConfigurationError(
            f"{vocabulary.file.path.name}: {_PREFIX}tokens has {shown(longest)} of "
            f"{len(longest):,} characters; {_LONGEST_PIECE} is the limit of this kind of tokenizer"
        )
    unknown = vocabulary.ids["unk"]
    assert unknown is not None, "has a default"
    model = models.BPE(
        vocab=vocabulary.by_text,
        merges=list(_merges_by_score(vocabulary.by_text, vocabulary.scores())),
        unk_token=vocabulary.tokens[unknown],
        fuse_unk=True,
        byte_fallback=True,
    )
    backend = Backend(model)
    prefix = vocabulary.file.flag(_PREFIX + "add_space_prefix", True)
    before = [normalizers.Prepend(_SPACE)] if prefix else []
    backend.normalizer = normalizers.Sequence([*before, normalizers.Replace(" ", _SPACE)])
    after = [decoders.Strip(" ", 1, 0)] if prefix else []
    backend.decoder = decoders.Sequence(
        [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), *after]
    )
    backend.post_processor = vocabulary.ends(add_bos=True)
    return backend


def _merges_by_score(
    vocabulary: Mapping[str, int], scores: Sequence[float]
) -> Iterator[tuple[str, str]]:
    """Every pair of pieces that makes a third, the one with the highest score first.

    Where scores are equal: longer first halves first, as ``transformers`` orders them.
    """
    found: list[tuple[float, int, int, str, str]] = []
    for piece, token_id in vocabulary.items():
        pairs = [
            (piece[:cut], piece[cut:])
            for cut in range(1, len(piece))
            if piece[:cut] in vocabulary and piece[cut:] in vocabulary
        ]
        pairs.sort(key=lambda pair: (vocabulary[pair[0]], vocabulary[pair[1]]))
        found.extend(
            (scores[token_id], len(first), len(second), first, second) for first, second in pairs
        )
    found.sort(key=lambda each: each[:3], reverse=True)
    for *_, first, second in found:
        yield first, second


def _chat_template(file: GgufFile) -> str | dict[str, str] | None:
    """The template, or several by name: the one without a name is "default"."""
    key = "tokenizer.chat_template"
    templates = {"default": file.string(key)} if key in file else {}
    if "tokenizer.chat_templates" in file:
        for name in file.strings("tokenizer.chat_templates"):
            templates[name] = file.string(f"{key}.{name}")
    if set(templates) <= {"default"}:
        return templates.get("default")
    return templates
