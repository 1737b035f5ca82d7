"""Answers of ``transformers``, in float32, to compare ours with."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from vmserve import models  # noqa: F401  first: it sets how torch's threads wait

import torch  # isort: skip

from tests.models.checkpoints import reference_model

__all__ = ["beams_of", "generated"]


def beams_of(directory: Path, prompt: list[int], num_tokens: int, width: int) -> list[list[int]]:
    """The ``width`` best answers of so many tokens, best first."""
    model = reference_model(directory, torch.float32)
    tokens = torch.tensor([prompt])
    output: Any = model.generate(
        tokens,
        attention_mask=torch.ones_like(tokens),
        max_new_tokens=num_tokens,
        do_sample=False,
        num_beams=width,
        num_return_sequences=width,
        eos_token_id=None,
        pad_token_id=0,
    )
    return [row[len(prompt) :].tolist() for row in output]


def generated(directory: Path, prompt: list[int], num_tokens: int) -> list[int]:
    """The likeliest tokens, as many as asked for."""
    return beams_of(directory, prompt, num_tokens, 1)[0]
