"""Text to token ids and back.

A thin layer over the tokenizer that ``transformers`` would load, never with remote code. It
returns what transformers returns, with one exception: special tokens that a chat message spells
stay text. ``transformers`` is imported only for tokenizers that are more than their files (see
:mod:`vmserve.text.tokenizer_files`).
"""

from __future__ import annotations

import hashlib
import json
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from copy import deepcopy
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from vmserve.errors import ConfigurationError, InvalidRequestError, PromptTooLongError
from vmserve.models.gguf.reader import GgufModel, is_gguf, open_gguf
from vmserve.text.detokenizer import IncrementalDetokenizer, TokenTable
from vmserve.text.infill import infill_prompt
from vmserve.text.light_tokenizer import LightTokenizer
from vmserve.text.tokenizer_files import read_tokenizer
from vmserve.text.tokenizer_gguf import read_gguf_tokenizer
from vmserve.text.tokenizer_transformers import load_from_transformers

if TYPE_CHECKING:
    from vmserve.text.chat_environment import ChatTemplates
    from vmserve.text.chat_template import RenderedChat

__all__ = ["Tokenizer", "load_tokenizer"]

#: Longest text, in characters or tokens, that is encoded or decoded under the interpreter's lock.
#: The library releases the lock in its calls for batches only.
_MOST_WITH_LOCK: Final = 1024
#: Characters per allowed token in the first beginning of a text that is tried for its length.
_CHARS_PER_TOKEN: Final = 8
#: Tokens that a cut text may have above those of the whole text.
_CUT_TOKENS: Final = 64
#: Characters per allowed token that a chat template may write.
_MOST_CHARS_PER_TOKEN: Final = 128


def load_tokenizer(source: str | Path | GgufModel) -> Tokenizer:
    """Load the tokenizer of a model directory in Hugging Face layout, or of a GGUF file.

    Raises :class:`~vmserve.errors.ConfigurationError`.
    """
    if not isinstance(source, GgufModel) and is_gguf(Path(source)):
        source = open_gguf(Path(source))
    if isinstance(source, GgufModel):
        in_file = read_gguf_tokenizer(source.metadata)
        source.metadata.drop_metadata_pages()
        return Tokenizer(in_file, in_file.eos_ids)
    directory = Path(source)
    hf = read_tokenizer(directory) or load_from_transformers(directory)
    return Tokenizer(hf, eos_ids=_eos_ids(directory))


def _eos_ids(directory: Path) -> list[int]:
    """End-of-text ids named in generation_config.json, else in config.json."""
    for name in ("generation_config.json", "config.json"):
        file = directory / name
        if file.is_file():
            found = json.loads(file.read_text(encoding="utf-8")).get("eos_token_id")
            if found is not None:
                return [found] if isinstance(found, int) else list(found)
    return []


class Tokenizer:
    """Encodes and decodes text, and renders chats. Safe to call from several threads.

    ``hf``: a transformers tokenizer backed by the ``tokenizers`` library, or one from files.
    ``eos_ids``: ids that end a text in addition to the tokenizer's own.

    Raises :class:`~vmserve.errors.ConfigurationError` for other tokenizers.
    """

    def __init__(self, hf: Any, eos_ids: Iterable[int] = ()) -> None:
        backend = getattr(hf, "backend_tokenizer", None)
        if backend is None or not hasattr(backend, "id_to_token"):
            raise ConfigurationError(
                f"{type(hf).__name__} is not backed by the tokenizers library: "
                "convert the model's tokenizer to a tokenizer.json"
            )
        backend.no_truncation()
        backend.no_padding()
        self._hf = hf
        self._backend = backend
        special = {
            token_id: str(token.content)
            for token_id, token in backend.get_added_tokens_decoder().items()
            if token.special
        }
        self.special_ids = frozenset(special)
        self._special_tokens = special
        own_eos = [] if hf.eos_token_id is None else [hf.eos_token_id]
        self.eos_ids = frozenset([*own_eos, *eos_ids])
        self.bos_id: int | None = hf.bos_token_id
        self.vocab_size: int = len(hf)
        self.table = TokenTable(backend, self.special_ids)
        self._markers = self.special_ids.difference(self._unknown_ids())
        self._strings: dict[int, str] = {}

    def _unknown_ids(self) -> list[int]:
        """The id of unknown text, which is not a marker although it may count as special.

        Byte-level tokenizers know all text, and many name their end token as the unknown one.
        """
        hf = self._hf
        if self.table.is_byte_level or hf.unk_token_id is None:
            return []
        others = (hf.bos_token_id, hf.eos_token_id, hf.pad_token_id)
        return [] if hf.unk_token_id in others else [hf.unk_token_id]

    @cached_property
    def hf(self) -> Any:
        """A copy of the transformers tokenizer for users: calls of it change its state."""
        return deepcopy(self._complete)

    @property
    def _complete(self) -> Any:
        return self._hf.complete if isinstance(self._hf, LightTokenizer) else self._hf

    @cached_property
    def _chat_templates(self) -> ChatTemplates:
        from vmserve.text.chat_environment import ChatTemplates  # noqa: PLC0415 - not all chat

        hf = self._hf
        named = hf.named if isinstance(hf, LightTokenizer) else hf.special_tokens_map
        return ChatTemplates(hf.chat_template, named)

    def prepare_chat(self) -> None:
        """Import now what the first chat needs. Nothing happens for a model without a template."""
        if self._hf.chat_template:
            _ = self._chat_templates

    def difference(self, other: Tokenizer) -> str | None:
        """What another tokenizer gives another meaning; None if both have the same tokens."""
        mine, its = (each._backend.get_vocab(with_added_tokens=True) for each in (self, other))
        if mine == its:
            return None
        if len(mine) != len(its):
            return f"it has {len(its):,} tokens, not {len(mine):,}"
        ids = sorted(set(mine.values()) | set(its.values()))
        changed = next(each for each in ids if self.token_str(each) != other.token_str(each))
        return f"token {changed} is {other.token_str(changed)!r}, not {self.token_str(changed)!r}"

    def to_json(self) -> str:
        """The tokenizer of the ``tokenizers`` library, as its own JSON."""
        return str(self._backend.to_str())

    @cached_property
    def fingerprint(self) -> str:
        """Tells tokenizers apart, as :meth:`to_json` does."""
        return hashlib.sha256(self.to_json().encode()).hexdigest()

    # -- text to ids --------------------------------------------------------------------

    def encode(
        self, text: str, add_special_tokens: bool = True, max_tokens: int | None = None
    ) -> list[int]:
        """Encode a text as transformers does: special tokens spelled in it become special tokens.

        Raises :class:`~vmserve.errors.InvalidRequestError` for a value that is not a text, and for
        a text that begins with more than ``max_tokens`` tokens, without encoding the rest.
        """
        return list(self._encode(text, add_special_tokens, max_tokens).ids)

    def _encode(self, text: str, add_special_tokens: bool, max_tokens: int | None = None) -> Any:
        given: Any = text  # callers without a type checker pass anything
        if not isinstance(given, str):
            raise InvalidRequestError(f"a text is a str, not {type(given).__name__}", "prompt")
        if max_tokens is not None:
            self._refuse_longer(text, max_tokens)
        return self._encoding(text, add_special_tokens)

    def _refuse_longer(self, text: str, max_tokens: int) -> None:
        """Encode beginnings of ``text``, each four times as long, until one has too many tokens."""
        num_chars = _CHARS_PER_TOKEN * max_tokens
        while num_chars < len(text):
            num_tokens = len(self._encoding(text[:num_chars], add_special_tokens=False).ids)
            # A cut beginning can have more tokens than it has within the whole text.
            if num_tokens > max_tokens + _CUT_TOKENS:
                raise PromptTooLongError(
                    f"This model's maximum context length is {max_tokens} tokens, but the first "
                    f"{num_chars} of the prompt's {len(text)} characters have {num_tokens}. "
                    "Shorten it, or set truncate_prompt_tokens",
                    "prompt",
                )
            num_chars *= 4

    def _encoding(self, text: str, add_special_tokens: bool) -> Any:
        if len(text) > _MOST_WITH_LOCK:
            return self._encodings([text], add_special_tokens)[0]
        try:
            return self._backend.encode(text, add_special_tokens=add_special_tokens)
        except TypeError:
            raise _no_unicode("prompt") from None

    def _encodings(self, texts: list[str], add_special_tokens: bool, param: str = "prompt") -> Any:
        """All at once, without the interpreter's lock. ``param``: where they come from."""
        try:
            return self._backend.encode_batch(texts, add_special_tokens=add_special_tokens)
        except TypeError:
            raise _no_unicode(param) from None

    def encode_plain(self, text: str) -> list[int]:
        """Encode ``text`` as the middle of a longer text, without special or added tokens."""
        ids = self._plain_inside(text)
        if self._markers.isdisjoint(ids):
            return ids
        # The vocabulary has the whole spelling as one piece: encode its characters one by one.
        parts = [token_id for char in text for token_id in self._plain_inside(char)]
        return [token_id for token_id in parts if token_id not in self._markers]

    def _plain_inside(self, text: str) -> list[int]:
        # After a line end no tokenizer adds the space that some put before a text.
        line_end, both = self._plain("\n"), self._plain("\n" + text)
        if both[: len(line_end)] == line_end:
            return both[len(line_end) :]
        return self._plain(text)

    def _plain(self, text: str) -> list[int]:
        backend = self._backend
        if backend.normalizer is not None:
            text = backend.normalizer.normalize_str(text)
        words = [text]
        if backend.pre_tokenizer is not None:
            words = [word for word, _ in backend.pre_tokenizer.pre_tokenize_str(text)]
        return [token.id for word in words for token in backend.model.tokenize(word)]

    def encode_infill(self, prefix: str, suffix: str, max_tokens: int | None = None) -> list[int]:
        """Encode a prompt for the text between two others.

        See :func:`vmserve.text.infill.infill_prompt`. ``max_tokens``: limit of each text, as in
        :meth:`encode`.
        """

        def encode(text: str, add_special_tokens: bool) -> list[int]:
            return self.encode(text, add_special_tokens, max_tokens)

        return infill_prompt(prefix, suffix, encode, self._backend.token_to_id)

    def encode_bad_words(self, words: Iterable[str]) -> tuple[tuple[int, ...], ...]:
        """Encode each word as it is at the start of a text, after a space, and inside a word."""
        bare = [word.lstrip(" ") or word for word in words]
        alone = self._encodings(bare, False, "bad_words")
        spaced = self._encodings([" " + word for word in bare], False, "bad_words")
        found: dict[tuple[int, ...], None] = {}
        for word, first, second in zip(bare, alone, spaced, strict=True):
            for ids in (first.ids, second.ids, self.encode_plain(word)):
                if ids:
                    found[tuple(ids)] = None
        return tuple(found)

    # -- chats --------------------------------------------------------------------------

    @property
    def chat_template_text(self) -> str:
        """The model's chat templates, joined by line ends; empty if it has none."""
        template = self._hf.chat_template
        return "\n".join(template.values()) if isinstance(template, dict) else template or ""

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool | None = None,
        continue_final_message: bool = False,
        chat_template: str | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        add_special_tokens: bool = False,
        max_tokens: int | None = None,
    ) -> tuple[str, list[int]]:
        """Render a conversation; returns the prompt's text and ids.

        The ids are those of the whole text, except that a special token that a message spells
        is encoded as text. ``add_generation_prompt`` None: True unless the final message is
        continued. ``add_special_tokens``: add what the tokenizer puts around a text, but never a
        second BOS. ``max_tokens``: stop rendering and encoding a longer prompt early.

        Raises :class:`~vmserve.errors.InvalidRequestError` for messages that the template
        refuses, for a prompt that is too long, and for a model without a template.
        """
        if add_generation_prompt is None:
            add_generation_prompt = not continue_final_message
        if add_generation_prompt and continue_final_message:
            raise InvalidRequestError(
                "add_generation_prompt and continue_final_message exclude each other: "
                "set only one of them",
                "continue_final_message",
            )
        from vmserve.text.chat_template import render_chat  # noqa: PLC0415 - not all models chat

        rendered = render_chat(
            self._chat_templates,
            messages,
            special_tokens=self._special_tokens.values(),
            tools=tools,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            chat_template=chat_template,
            template_kwargs=chat_template_kwargs,
            max_chars=None if max_tokens is None else _MOST_CHARS_PER_TOKEN * max_tokens,
        )
        ids = self._encode_chat(rendered, add_special_tokens, max_tokens)
        if add_special_tokens and len(ids) > 1 and ids[0] == ids[1] == self.bos_id:
            del ids[0]
        return rendered.text, ids

    def _encode_chat(
        self, rendered: RenderedChat, add_special_tokens: bool, max_tokens: int | None
    ) -> list[int]:
        encoding = self._encode(rendered.text, add_special_tokens, max_tokens)
        ids: list[int] = list(encoding.ids)
        if not rendered.marks:
            return ids
        # Offsets are asked for one by one: they are few, and the whole list takes long.
        marked = [place for place, token_id in enumerate(ids) if token_id in self._markers]
        parts, begin = [], 0
        for place in marked:
            start, end = encoding.token_to_chars(place) or (0, 0)
            if _any_between(rendered.marks, start, end):
                parts += [ids[begin:place], self.encode_plain(rendered.text[start:end])]
                begin = place + 1
        return list(chain(*parts, ids[begin:]))

    # -- ids to text --------------------------------------------------------------------

    def decode(self, ids: Iterable[int], skip_special_tokens: bool = True) -> str:
        """Decode ids. Incomplete characters become U+FFFD, unknown ids become nothing.

        The result is that of transformers without cleaning up spaces, with one exception: if byte
        tokens form invalid UTF-8, complete characters before them are kept, so that text that
        was streamed stays right.
        """
        known = [token_id for token_id in ids if 0 <= token_id < 2**32]
        text: str
        if len(known) > _MOST_WITH_LOCK:
            [text] = self._backend.decode_batch([known], skip_special_tokens=skip_special_tokens)
        else:
            text = self._backend.decode(known, skip_special_tokens=skip_special_tokens)
        if "\ufffd" in text and self.table.has_byte_tokens:
            detokenizer = IncrementalDetokenizer(self.table, skip_special_tokens)
            return "".join(map(detokenizer.push, known)) + detokenizer.flush()
        return text

    def forget(self) -> None:
        """Empty the caches of texts, which fill again. Any thread may call it."""
        self._strings.clear()
        self.table.forget()

    def token_str(self, token_id: int) -> str:
        """The vocabulary's string of an id (``Ġthe``); empty for an unknown id."""
        return (self._backend.id_to_token(token_id) or "") if token_id >= 0 else ""

    def token_text(self, token_id: int) -> str:
        """Decode one id by itself, with special tokens spelled out."""
        text = self._strings.get(token_id)
        if text is None:
            text = self._strings[token_id] = self.decode([token_id], skip_special_tokens=False)
        return text


def _no_unicode(param: str) -> InvalidRequestError:
    """The error for lone surrogates, which JSON can carry and UTF-8 cannot."""
    what = "the prompt" if param == "prompt" else param
    return InvalidRequestError(f"{what} is not valid Unicode text: it has lone surrogates", param)


def _any_between(marks: Sequence[int], start: int, end: int) -> bool:
    place = bisect_left(marks, start)
    return place < len(marks) and marks[place] < end
