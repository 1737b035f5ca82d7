"""Weights of a GGUF file as the native decoder takes those of other checkpoints."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vmserve.dtypes import DType
from vmserve.errors import UnsupportedError
from vmserve.models.decoder_config import DecoderConfig
from vmserve.models.gguf.config import GgufWeight, find_weights
from vmserve.models.gguf.reader import open_gguf
from vmserve.models.safetensors_file import StoredTensor

__all__ = ["PlainWeight", "find_plain_weights"]

#: Numpy has no bfloat16: its bits.
_PLAIN = {
    "F32": (DType.FLOAT32, np.float32),
    "F16": (DType.FLOAT16, np.float16),
    "BF16": (DType.BFLOAT16, np.uint16),
}


@dataclass(frozen=True)
class PlainWeight:
    """Replaces the file of one tensor of float32, float16 or bfloat16."""

    weight: GgufWeight

    def view(self, stored: StoredTensor) -> NDArray[Any]:
        """The tensor over the file's pages; a copy where its rows are permuted."""
        _, element = _PLAIN[self.weight.tensor.type.name]
        return self.weight.raw().view(element).reshape(stored.shape)

    def drop_pages(self, start: int, num_bytes: int) -> None:
        self.weight.file.drop_pages(self.weight.tensor)


def find_plain_weights(
    path: Path, config: DecoderConfig
) -> dict[str, tuple[PlainWeight, StoredTensor]]:
    """As :func:`vmserve.models.loader.find_tensors`, and raises as it does.

    Raises :class:`~vmserve.errors.UnsupportedError` for quantized tensors too, which no kernel
    multiplies by yet.
    """
    found = {}
    for name, weight in find_weights(open_gguf(path), config).items():
        tensor = weight.tensor
        if tensor.type.name not in _PLAIN:
            raise UnsupportedError(
                f"{weight.file.path.name}: tensor {tensor.name} has type {tensor.type.name}: this "
                f"version reads it, and has no kernel for it; it runs {', '.join(_PLAIN)}"
            )
        dtype, _ = _PLAIN[tensor.type.name]
        found[name] = PlainWeight(weight), StoredTensor(dtype, tensor.shape, tensor.start)
    return found
