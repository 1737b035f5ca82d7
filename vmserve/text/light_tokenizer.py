"""What stands in for a tokenizer of ``transformers``, which is slow to import."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tokenizers import Tokenizer as Backend

__all__ = ["LightTokenizer"]


@dataclass(frozen=True)
class LightTokenizer(ABC):
    """Replaces a tokenizer of ``transformers`` for those who need none of its methods."""

    backend_tokenizer: Backend
    #: Texts of the special tokens "bos_token", "eos_token", ... that are known.
    named: Mapping[str, str]
    #: One template, or several by name.
    chat_template: str | dict[str, str] | None

    def __len__(self) -> int:
        return int(self.backend_tokenizer.get_vocab_size(with_added_tokens=True))

    @property
    @abstractmethod
    def complete(self) -> Any:
        """The tokenizer as ``transformers`` has it, which is imported now."""

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
