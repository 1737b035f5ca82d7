"""The element types of weights and of the KV cache, by name: what says so needs no torch."""

from __future__ import annotations

from enum import StrEnum

from vmserve.errors import ConfigurationError

__all__ = ["DType"]


class DType(StrEnum):
    """Its string is the name, as in config.json and as torch has it."""

    FLOAT8_E4M3FN = "float8_e4m3fn"
    FLOAT8_E5M2 = "float8_e5m2"
    BFLOAT16 = "bfloat16"
    FLOAT16 = "float16"
    FLOAT32 = "float32"
    FLOAT64 = "float64"

    @property
    def itemsize(self) -> int:
        """Bytes of one element."""
        return _ITEMSIZE[self]

    @classmethod
    def of(cls, dtype: object) -> DType:
        """Return the dtype of a name or a ``torch.dtype``.

        Raises :class:`~vmserve.errors.ConfigurationError` for any other type.
        """
        name = str(dtype).removeprefix("torch.")
        try:
            return cls(name)
        except ValueError:
            raise ConfigurationError(f"dtype {name!r} is not one of {', '.join(cls)}") from None


_ITEMSIZE = {
    DType.FLOAT8_E4M3FN: 1,
    DType.FLOAT8_E5M2: 1,
    DType.BFLOAT16: 2,
    DType.FLOAT16: 2,
    DType.FLOAT32: 4,
    DType.FLOAT64: 8,
}
