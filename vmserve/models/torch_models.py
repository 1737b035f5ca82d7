"""Load models that torch computes."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import torch

from vmserve.models.collective import Collective
from vmserve.models.config import ModelConfig
from vmserve.models.decoder import Decoder
from vmserve.models.decoder_config import DecoderConfig
from vmserve.models.gguf.reader import GgufModel
from vmserve.models.loader import Progress
from vmserve.models.tensor_loader import load_decoder
from vmserve.numbers.dtypes import DType
from vmserve.numbers.torch_dtypes import as_torch

if TYPE_CHECKING:
    from vmserve.models.foreign import ForeignModel

__all__ = ["load_torch"]


def load_torch(
    directory: Path,
    config: ModelConfig,
    dtype: DType,
    device: str,
    max_len: int,
    progress: Progress | None,
    ranks: Collective | None = None,
) -> tuple[Decoder | ForeignModel, int]:
    """The model and the bytes of its weights; see :func:`vmserve.models.load_model`."""
    where, kind = torch.device(device), as_torch(dtype)
    if isinstance(config.network, DecoderConfig):
        quantized = config.native_only
        assert not isinstance(quantized, GgufModel), "load_model() refuses these"
        return load_decoder(
            directory, config.network, kind, where, max_len, progress, quantized, ranks
        )
    assert ranks is None, "rules refuse ranks of what transformers computes"
    # Only now: transformers takes seconds to import.
    from vmserve.models.foreign import load_foreign  # noqa: PLC0415

    return load_foreign(directory, config.network, kind, where, progress)
