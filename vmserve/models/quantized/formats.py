"""What config.json says about how its checkpoint is quantized."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from vmserve.errors import UnsupportedError
from vmserve.models.quantized.awq import read_awq
from vmserve.models.quantized.compressed_tensors import read_compressed_tensors
from vmserve.models.quantized.gptq import read_gptq
from vmserve.models.quantized.layout import Layout

__all__ = ["QuantizedFormat", "describe_quantization"]


@dataclass(frozen=True)
class QuantizedFormat:
    name: str
    #: Layouts in which its matrices may be stored.
    layouts: tuple[Layout, ...]
    #: Whether torch has its matrices in the type of the computation.
    expands: bool = False

    @property
    def kind(self) -> str:
        """Name what a user has of it, in the plural."""
        return f"{self.name} checkpoints"


def describe_quantization(raw: Mapping[str, Any]) -> QuantizedFormat | None:
    """Read a config.json; None: its weights are plain.

    Raises :class:`~vmserve.errors.UnsupportedError` with the name of what is missing.
    """
    quantization = raw.get("quantization_config") or raw.get("compression_config")
    if not quantization:
        return None
    method = quantization.get("quant_method") if isinstance(quantization, dict) else quantization
    if method == "gptq":
        return QuantizedFormat("GPTQ", (read_gptq(quantization),))
    if method == "awq":
        return QuantizedFormat("AWQ", (read_awq(quantization),))
    if method == "compressed-tensors":
        return QuantizedFormat("compressed-tensors", read_compressed_tensors(quantization))
    if method == "mxfp4":
        return QuantizedFormat("MXFP4", (), expands=True)
    raise UnsupportedError(
        f"config.json: quantization_config has the quant_method {method!r}: not supported; "
        "supported: gptq, awq, compressed-tensors, mxfp4. Use the float32, bfloat16 or float16 "
        "weights, with --quantization int8 if they are too large"
    )
