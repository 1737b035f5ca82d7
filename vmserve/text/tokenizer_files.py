"""Read a tokenizer's files with the ``tokenizers`` library alone.

``transformers`` takes seconds to import and adds nothing to most tokenizers: it loads their
tokenizer.json. Where it would do more (rebuild the tokenizer, add a token, change how it works),
nothing is read here and ``transformers`` is used. So the result is always the same.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, models, normalizers, pre_tokenizers, processors
from tokenizers import Tokenizer as Backend

from vmserve.errors import ConfigurationError
from vmserve.system.files import read_json
from vmserve.text.light_tokenizer import LightTokenizer
from vmserve.text.tokenizer_transformers import chosen_class, load_from_transformers

__all__ = ["FileTokenizer", "read_tokenizer"]

#: Model types whose tokenizer.json transformers uses unchanged, if the class is a general one.
_MODEL_TYPES = frozenset(("gpt2", "llama", "mistral", "opt", "qwen3"))
_CLASSES = frozenset(("PreTrainedTokenizerFast", "TokenizersBackend"))
#: Vocabulary above which transformers may give Mistral tokenizers another pre-tokenizer.
_PATCHED_VOCABULARY = 100_000

_NAMED = (
    "bos_token",
    "eos_token",
    "unk_token",
    "sep_token",
    "pad_token",
    "cls_token",
    "mask_token",
)
#: Keys of tokenizer_config.json that do not change ids and texts, or that are read below. The
#: switches for BOS and EOS change nothing: the post-processor of tokenizer.json decides.
_UNDERSTOOD = frozenset(
    (*_NAMED, "add_bos_token", "add_eos_token", "added_tokens_decoder", "additional_special_tokens",
     "backend", "chat_template", "clean_up_tokenization_spaces", "errors", "extra_special_tokens",
     "is_local", "legacy", "local_files_only", "model_input_names", "model_max_length",
     "name_or_path", "padding_side", "sp_model_kwargs", "spaces_between_special_tokens",
     "tokenizer_class", "truncation_side", "use_default_system_prompt")
)  # fmt: skip
#: Keys that change nothing while they are off.
_SWITCHES = frozenset(("add_prefix_space", "split_special_tokens"))
#: Files and folders which transformers would read too.
_OTHERS = ("additional_chat_templates", "tekken.json")
_LEGACY = ("added_tokens.json", "special_tokens_map.json")


@dataclass(frozen=True)
class _Pipeline:
    """What a class of transformers builds around the vocabulary, ignoring the rest of the file."""

    #: Special tokens that the class assumes if tokenizer_config.json does not name them.
    tokens: Mapping[str, str]
    normalizer: Callable[[], Any] | None
    pre_tokenizer: Callable[[], Any]
    #: Whether the class adds its special tokens once more, without flags.
    adds_again: bool = False


_END = "<|endoftext|>"
_QWEN_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_PIPELINES: Mapping[str, _Pipeline] = {
    "GPT2Tokenizer": _Pipeline(
        {"unk_token": _END, "bos_token": _END, "eos_token": _END},
        None,
        lambda: pre_tokenizers.ByteLevel(add_prefix_space=False),
    ),
    "Qwen2Tokenizer": _Pipeline(
        {"unk_token": _END, "eos_token": _END, "pad_token": _END},
        normalizers.NFC,
        lambda: pre_tokenizers.Sequence(
            [
                pre_tokenizers.Split(Regex(_QWEN_WORDS), "isolated"),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        ),
        adds_again=True,
    ),
}


@dataclass(frozen=True)
class FileTokenizer(LightTokenizer):
    """The tokenizer of a directory with a tokenizer.json."""

    directory: Path

    @cached_property
    def complete(self) -> Any:
        """The tokenizer as ``transformers`` loads it, which is imported now."""
        return load_from_transformers(self.directory)


def read_tokenizer(directory: Path) -> FileTokenizer | None:
    """Read the tokenizer of a directory; None if ``transformers`` has to load it.

    Raises :class:`~vmserve.errors.ConfigurationError` for a damaged tokenizer.json.
    """
    try:
        config = read_json(directory / "tokenizer_config.json")
        model = read_json(directory / "config.json")
    except ConfigurationError:
        return None
    class_name = _class_name(model, config)
    if class_name is None or not _is_plain(directory, config):
        return None
    pipeline = _PIPELINES.get(class_name)
    given = {name: config[name] for name in _NAMED if name in config}
    if pipeline is not None:
        given = {**pipeline.tokens, **given}
    named = {name: _content(token) for name, token in given.items() if token is not None}
    extra = config.get("extra_special_tokens") or config.get("additional_special_tokens") or []
    if not isinstance(extra, list):
        return None
    template = _chat_template(directory, config)
    if isinstance(template, list):
        return None
    backend = _load_backend(directory / "tokenizer.json")
    special = {*named.values(), *map(_content, extra)}
    known = {str(token.content) for token in backend.get_added_tokens_decoder().values()}
    if not known.issuperset(special):
        return None  # transformers would add them
    if pipeline is not None and not _would_be_built(backend, pipeline, config, special):
        return None
    if not _same_added_tokens(backend, config) or backend.padding is not None:
        return None
    if model["model_type"] == "mistral" and backend.get_vocab_size() > _PATCHED_VOCABULARY:
        return None
    if backend.post_processor is None:
        # Put nothing around a text. The template of a pair is required, and never used.
        backend.post_processor = processors.TemplateProcessing(
            single="$A:0", pair="$A:0 $B:1", special_tokens=[]
        )
    return FileTokenizer(backend, named, template, directory)


def _class_name(model: Mapping[str, Any], config: Mapping[str, Any]) -> str | None:
    if config.get("tokenizer_class") in _CLASSES and model.get("model_type") in _MODEL_TYPES:
        return "PreTrainedTokenizerFast"
    name = chosen_class(model, config)
    return name if name in _PIPELINES else None


def _is_plain(directory: Path, config: Mapping[str, Any]) -> bool:
    if not (directory / "tokenizer.json").is_file():
        return False
    used = {name for name, value in config.items() if value or name not in _SWITCHES}
    if not used <= _UNDERSTOOD:
        return False
    others = _OTHERS if "added_tokens_decoder" in config else _OTHERS + _LEGACY
    return not any((directory / name).exists() for name in others)


def _load_backend(path: Path) -> Backend:
    try:
        return Backend.from_file(str(path))
    except Exception as error:  # the library's errors have no type of their own
        if type(error) is not Exception:
            raise
        raise ConfigurationError(
            f"{path.name} is damaged ({error}): fetch the model again"
        ) from error


def _content(token: object) -> str:
    """The text of a token that is given as a string or an object; "" for anything else."""
    if isinstance(token, dict):
        token = token.get("content")
    return token if isinstance(token, str) else ""


def _same_added_tokens(backend: Backend, config: Mapping[str, Any]) -> bool:
    """Whether all added tokens that tokenizer_config.json lists are the tokenizer's."""
    listed = config.get("added_tokens_decoder", {})
    if not isinstance(listed, dict):
        return False
    known = {repr(token) for token in backend.get_added_tokens_decoder().values()}
    try:
        return all(repr(AddedToken(**token)) in known for token in listed.values())
    except TypeError:
        return False


def _would_be_built(
    backend: Backend, pipeline: _Pipeline, config: Mapping[str, Any], special: set[str]
) -> bool:
    """Whether the class would build exactly what the file has."""
    model = backend.model
    if not isinstance(model, models.BPE):
        return False
    odd = (model.dropout, model.unk_token, model.fuse_unk, model.byte_fallback, model.ignore_merges,
           model.continuing_subword_prefix, model.end_of_word_suffix)  # fmt: skip
    normalizer = None if pipeline.normalizer is None else pipeline.normalizer()
    return (
        not any(odd)
        and _state(backend.normalizer) == _state(normalizer)
        and _state(backend.pre_tokenizer) == _state(pipeline.pre_tokenizer())
        and (_state(backend.decoder) or {}).get("type") == "ByteLevel"
        and _would_be_added(backend, pipeline, config, special)
    )


def _would_be_added(
    backend: Backend, pipeline: _Pipeline, config: Mapping[str, Any], special: set[str]
) -> bool:
    """Whether adding the file's tokens one by one to the vocabulary would give the same ids."""
    added = backend.get_added_tokens_decoder()
    for token in added.values():
        plain = AddedToken(token.content, special=True)
        if token.content in special and not token.special:
            return False
        if token.content in special and pipeline.adds_again and repr(token) != repr(plain):
            return False
    listed = config.get("added_tokens_decoder", added)
    if {str(token_id) for token_id in listed} != {str(token_id) for token_id in added}:
        return False
    ids = {token_id: backend.model.token_to_id(token.content) for token_id, token in added.items()}
    new = sorted(token_id for token_id, in_model in ids.items() if in_model is None)
    first = backend.get_vocab_size(with_added_tokens=False)
    return new == list(range(first, first + len(new))) and all(
        in_model in (None, token_id) for token_id, in_model in ids.items()
    )


def _state(part: Any) -> Any:
    """A part of a pipeline as JSON, without the switch that only changes tokens' offsets."""

    def trimmed(fields: dict[str, Any]) -> dict[str, Any]:
        return {name: value for name, value in fields.items() if name != "trim_offsets"}

    return None if part is None else json.loads(part.__getstate__(), object_hook=trimmed)


def _chat_template(directory: Path, config: Mapping[str, Any]) -> Any:
    """The template as a text, several by name, or None; an empty list for an invalid value."""
    file = directory / "chat_template.jinja"
    if file.is_file():
        try:
            return file.read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            raise ConfigurationError(
                f"{file.name} is not UTF-8 text (byte {error.start}): fetch the model again"
            ) from error
    template = config.get("chat_template")
    if isinstance(template, list):
        try:
            return {each["name"]: each["template"] for each in template}
        except (KeyError, TypeError):
            return []
    return template if isinstance(template, str | None) else []
