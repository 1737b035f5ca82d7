"""A tokenizer's files, read with the ``tokenizers`` library alone.

``transformers`` takes seconds to import, and adds nothing to most tokenizers: what it loads is
their tokenizer.json. A reading is the same as its own, or it is none: wherever ``transformers``
would build the tokenizer anew, add a token to it or change how it works, the files are left to it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, processors
from tokenizers import Tokenizer as Backend

from vmserve.errors import ConfigurationError
from vmserve.json_files import read_json
from vmserve.tokenizer_transformers import load_from_transformers

__all__ = ["FileTokenizer", "read_tokenizer"]

#: Model types for which transformers takes tokenizer.json as it is, if the class is a general one.
_MODEL_TYPES = frozenset(("gpt2", "llama", "mistral", "opt", "qwen3"))
_CLASSES = frozenset(("PreTrainedTokenizerFast", "TokenizersBackend"))
#: Mistral tokenizers of this size and more may get another pre-tokenizer.
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
#: Keys of tokenizer_config.json that say nothing about ids and texts, or that are read below. The
#: BOS and EOS switches do not count beside a tokenizer.json, whose post-processor decides.
_UNDERSTOOD = frozenset(
    (*_NAMED, "add_bos_token", "add_eos_token", "added_tokens_decoder", "additional_special_tokens",
     "backend", "chat_template", "clean_up_tokenization_spaces", "errors", "extra_special_tokens",
     "is_local", "legacy", "local_files_only", "model_input_names", "model_max_length",
     "name_or_path", "padding_side", "sp_model_kwargs", "spaces_between_special_tokens",
     "tokenizer_class", "truncation_side", "use_default_system_prompt")
)  # fmt: skip
#: Files and folders that would be read too.
_OTHERS = ("additional_chat_templates", "tekken.json")
_LEGACY = ("added_tokens.json", "special_tokens_map.json")


@dataclass(frozen=True)
class FileTokenizer:
    """In place of a tokenizer of ``transformers``, as far as none of its methods is needed."""

    directory: Path
    backend_tokenizer: Backend
    named: Mapping[str, str]
    #: One template, or several by name.
    chat_template: str | dict[str, str] | None

    def __len__(self) -> int:
        return int(self.backend_tokenizer.get_vocab_size(with_added_tokens=True))

    def _id(self, name: str) -> int | None:
        token = self.named.get(name)
        return None if token is None else self.backend_tokenizer.token_to_id(token)

    @property
    def bos_token_id(self) -> int | None:
        return self._id("bos_token")

    @property
    def eos_token_id(self) -> int | None:
        return self._id("eos_token")

    @property
    def unk_token_id(self) -> int | None:
        return self._id("unk_token")

    @property
    def pad_token_id(self) -> int | None:
        return self._id("pad_token")

    @cached_property
    def complete(self) -> Any:
        """The same as a tokenizer of ``transformers``, which is imported for it."""
        return load_from_transformers(self.directory)


def read_tokenizer(directory: Path) -> FileTokenizer | None:
    """The tokenizer of a directory; None if it is better read by ``transformers``.

    Raises :class:`~vmserve.errors.ConfigurationError` for a damaged tokenizer.json.
    """
    try:
        config = read_json(directory / "tokenizer_config.json")
        model = read_json(directory / "config.json")
    except ConfigurationError:
        return None
    if not _is_plain(directory, config, model):
        return None
    named = {name: _content(config[name]) for name in _NAMED if config.get(name) is not None}
    extra = config.get("extra_special_tokens") or config.get("additional_special_tokens") or []
    if not isinstance(extra, list):
        return None
    template = _chat_template(directory, config)
    if isinstance(template, list):
        return None
    backend = _load_backend(directory / "tokenizer.json")
    known = {str(token.content) for token in backend.get_added_tokens_decoder().values()}
    if not known.issuperset([*named.values(), *map(_content, extra)]):
        return None  # they would be added, or are none
    if not _same_added_tokens(backend, config) or backend.padding is not None:
        return None
    if model["model_type"] == "mistral" and backend.get_vocab_size() > _PATCHED_VOCABULARY:
        return None
    if backend.post_processor is None:
        # Nothing is put around a text; of a pair (which nobody gives us) the second is marked.
        backend.post_processor = processors.TemplateProcessing(
            single="$A:0", pair="$A:0 $B:1", special_tokens=[]
        )
    return FileTokenizer(directory, backend, named, template)


def _is_plain(directory: Path, config: Mapping[str, Any], model: Mapping[str, Any]) -> bool:
    if not (directory / "tokenizer.json").is_file():
        return False
    if model.get("model_type") not in _MODEL_TYPES or "model_name" in model:
        return False
    if config.get("tokenizer_class") not in _CLASSES or not _UNDERSTOOD.issuperset(config):
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
    """Of a token that is written as text or as an object; "" for anything else, which is none."""
    if isinstance(token, dict):
        token = token.get("content")
    return token if isinstance(token, str) else ""


def _same_added_tokens(backend: Backend, config: Mapping[str, Any]) -> bool:
    """Whether tokenizer_config.json, where it lists added tokens, lists those of the tokenizer."""
    listed = config.get("added_tokens_decoder", {})
    if not isinstance(listed, dict):
        return False
    known = {repr(token) for token in backend.get_added_tokens_decoder().values()}
    try:
        return all(repr(AddedToken(**token)) in known for token in listed.values())
    except TypeError:
        return False


def _chat_template(directory: Path, config: Mapping[str, Any]) -> Any:
    """A text, several by name, or None; a list for what is no template."""
    file = directory / "chat_template.jinja"
    if file.is_file():
        return file.read_text(encoding="utf-8")
    template = config.get("chat_template")
    if isinstance(template, list):
        try:
            return {each["name"]: each["template"] for each in template}
        except (KeyError, TypeError):
            return []
    return template if isinstance(template, str | None) else []
