"""Choose the type that a model computes in."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vmserve.errors import ConfigurationError
from vmserve.numbers.dtypes import DType

if TYPE_CHECKING:
    from vmserve.models.config import ModelConfig

__all__ = ["DTYPES", "asked_dtype"]

DTYPES = {
    "float32": DType.FLOAT32,
    "float": DType.FLOAT32,
    "bfloat16": DType.BFLOAT16,
    "float16": DType.FLOAT16,
    "half": DType.FLOAT16,
}


def asked_dtype(requested: str, config: ModelConfig) -> DType:
    """``requested``: "auto" (the checkpoint's own) or a name in ``DTYPES``.

    Raises :class:`~vmserve.errors.ConfigurationError` for an unknown name.
    """
    if requested != "auto" and requested not in DTYPES:
        raise ConfigurationError(f"dtype: {requested!r} is not one of auto, {', '.join(DTYPES)}")
    dtype = config.dtype if requested == "auto" else DTYPES[requested]
    if dtype not in DTYPES.values():
        raise ConfigurationError(
            f"config.json: dtype {dtype} cannot be computed in: give --dtype float32 or bfloat16"
        )
    return dtype
