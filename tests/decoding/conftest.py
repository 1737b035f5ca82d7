"""The embedded model, in ``transformers``."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from vmserve.models import resolve_model  # first: it sets how torch's threads wait

import torch  # isort: skip
from torch import Tensor  # isort: skip
from transformers import AutoModelForCausalLM, AutoTokenizer  # isort: skip

__all__ = ["embedded"]


class Embedded:
    """The embedded model, which computes the logits of a sequence once."""

    def __init__(self) -> None:
        path = resolve_model(None)
        self.model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
        self.tokenizer = AutoTokenizer.from_pretrained(path)
        self._known: dict[tuple[int, ...], Tensor] = {}

    def prompt(self, text: str) -> list[int]:
        return [self.tokenizer.bos_token_id, *self.tokenizer.encode(text, add_special_tokens=False)]

    @torch.inference_mode()
    def logits(self, sequences: Sequence[Sequence[int]]) -> Tensor:
        keys = [tuple(sequence) for sequence in sequences]
        new = [key for key in keys if key not in self._known]
        if new:
            rows = self.model(torch.tensor(new), logits_to_keep=1).logits[:, -1]
            self._known.update(zip(new, rows, strict=True))
        return torch.stack([self._known[key] for key in keys])


@pytest.fixture(scope="module")
def embedded() -> Embedded:
    return Embedded()
