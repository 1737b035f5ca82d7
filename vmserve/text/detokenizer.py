"""Token ids to text, one token at a time, never half a character.

There are two kinds of tokenizers. A byte-level tokenizer gives bytes for each token, which an
incremental UTF-8 decoder joins. With the others a token's text depends on its neighbours: the first
word of a text has no leading space, "##" joins words, byte tokens form characters. There a short
window of tokens is decoded, and the text is what the new tokens add to it.
"""

from __future__ import annotations

import codecs
import json
import re
from typing import Any, Protocol

__all__ = ["DetokenizerStrategy", "IncrementalDetokenizer", "TokenTable"]

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_UNKNOWN_CHARACTER = "\ufffd".encode()


class TokenTable:
    """Caches what single tokens of a ``tokenizers`` tokenizer decode to."""

    def __init__(self, backend: Any, special_ids: frozenset[int]) -> None:
        self.backend = backend
        self.special_ids = special_ids
        kinds = _decoder_kinds(backend)
        self.is_byte_level = kinds == ["ByteLevel"]
        self.has_byte_tokens = "ByteFallback" in kinds
        self._pieces: dict[int, str | bytes] = {}
        self._bytes: dict[int, int | None] = {}

    def forget(self) -> None:
        """Empty the caches. Any thread may call it."""
        self._pieces.clear()
        self._bytes.clear()

    def piece(self, token_id: int) -> str | bytes:
        """The text of a byte-level token, or its bytes if they are not valid UTF-8."""
        found = self._pieces.get(token_id)
        if found is None:
            data = _byte_level(self.backend.id_to_token(token_id) or "")
            try:
                found = data.decode()
            except UnicodeDecodeError:
                found = data
            self._pieces[token_id] = found
        return found

    def byte_value(self, token_id: int) -> int | None:
        """The byte of a byte token (``<0x0A>``), None for other tokens."""
        try:
            return self._bytes[token_id]
        except KeyError:
            match = _BYTE_TOKEN.fullmatch(self.backend.id_to_token(token_id) or "")
            value = int(match[1], 16) if match and self.has_byte_tokens else None
            self._bytes[token_id] = value
            return value

    def is_known(self, token_id: int) -> bool:
        return self.backend.id_to_token(token_id) is not None

    def unknown_character(self) -> list[int]:
        """The byte tokens of U+FFFD."""
        return [self.backend.token_to_id(f"<0x{byte:02X}>") for byte in _UNKNOWN_CHARACTER]

    def decode(self, token_ids: list[int]) -> str:
        return str(self.backend.decode(token_ids, skip_special_tokens=False))


def _decoder_kinds(backend: Any) -> list[str]:
    if backend.decoder is None:
        return []
    decoder = json.loads(backend.decoder.__getstate__())
    return [part["type"] for part in decoder.get("decoders", [decoder])]


def _byte_alphabet() -> dict[str, int]:
    """Character -> byte of byte-level BPE (Radford et al., GPT-2, 2019).

    Printable bytes stand for themselves, the others are the characters from U+0100 on.
    """
    printing = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = sorted(set(range(0x100)).difference(printing))
    alphabet = {chr(byte): byte for byte in printing}
    return alphabet | {chr(0x100 + place): byte for place, byte in enumerate(others)}


_ALPHABET = _byte_alphabet()


def _byte_level(token: str) -> bytes:
    try:
        return bytes([_ALPHABET[char] for char in token])
    except KeyError:  # an added token, whose string is its text
        return token.encode()


class DetokenizerStrategy(Protocol):
    @property
    def pending(self) -> bool: ...

    def push(self, token_id: int) -> str: ...

    def flush(self) -> str: ...


class IncrementalDetokenizer:
    """Decodes tokens one by one; the texts join to ``Tokenizer.decode`` of all ids.

    ``table``: the tokenizer's.
    """

    def __init__(self, table: TokenTable, skip_special_tokens: bool = True) -> None:
        skipped = table.special_ids if skip_special_tokens else frozenset()
        #: The implementation, for callers that cannot afford a call in between.
        self.strategy: DetokenizerStrategy = (
            _ByteLevel(table, skipped) if table.is_byte_level else _Windowed(table, skipped)
        )
        #: ``push(token_id)`` returns the new text, "" while a character is incomplete.
        self.push = self.strategy.push
        #: ``flush()`` ends the text: incomplete bytes become U+FFFD. Nothing can be pushed then.
        self.flush = self.strategy.flush

    @property
    def pending(self) -> bool:
        """Whether the last token ended inside a character."""
        return self.strategy.pending


class _ByteLevel:
    def __init__(self, table: TokenTable, skipped: frozenset[int]) -> None:
        self._table = table
        self._skipped = skipped
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self.pending = False

    def push(self, token_id: int) -> str:
        if token_id in self._skipped:
            return ""
        piece = self._table.piece(token_id)
        if isinstance(piece, str):
            if not self.pending:
                return piece
            piece = piece.encode()
        text = self._decoder.decode(piece)
        self.pending = bool(self._decoder.getstate()[0])
        return text

    def flush(self) -> str:
        self.pending = False
        return self._decoder.decode(b"", final=True)


class _Windowed:
    """Decodes new tokens together with the last ones that gave text.

    Byte tokens wait until they form a character. Each byte that cannot become part of one is
    U+FFFD. In the window the tokens of U+FFFD replace such bytes: the decoder would refuse them
    together with valid ones.
    """

    def __init__(self, table: TokenTable, skipped: frozenset[int]) -> None:
        self._table = table
        self._skipped = skipped
        self._window: list[int] = []
        self._window_text = ""
        self._bytes = bytearray()
        self._byte_ids: list[int] = []

    @property
    def pending(self) -> bool:
        return bool(self._bytes)

    def push(self, token_id: int) -> str:
        if token_id in self._skipped or not self._table.is_known(token_id):
            return ""
        value = self._table.byte_value(token_id)
        if value is None:
            broken = self.flush() if self._bytes else ""
            return broken + self._advance([token_id])
        return self._push_byte(token_id, value)

    def flush(self) -> str:
        return self._drop_bytes(len(self._bytes))

    def _push_byte(self, token_id: int, value: int) -> str:
        self._bytes.append(value)
        self._byte_ids.append(token_id)
        text = ""
        while self._bytes:
            try:
                self._bytes.decode()
            except UnicodeDecodeError as error:
                if error.reason == "unexpected end of data":
                    break
                text += self._drop_bytes(error.end)
            else:
                ids, self._byte_ids = self._byte_ids, []
                self._bytes.clear()
                text += self._advance(ids)
        return text

    def _drop_bytes(self, num: int) -> str:
        del self._bytes[:num]
        del self._byte_ids[:num]
        return "".join(self._advance(self._table.unknown_character()) for _ in range(num))

    def _advance(self, ids: list[int]) -> str:
        text = self._table.decode(self._window + ids)
        new = text[len(self._window_text) :]
        if new:
            self._window = ids
            self._window_text = self._table.decode(ids)
        else:
            self._window = self._window + ids
            self._window_text = text
        return new
