"""The element types of weights and of the KV cache, by name: what says so needs no torch."""

from __future__ import annotations

from enum import StrEnum

from vmserve.errors import ConfigurationError

__all__ = ["DType", "row_bytes"]


class DType(StrEnum):
    """Its string is the name, as in config.json and as torch has it."""

    FLOAT8_E4M3FN = "float8_e4m3fn"
    FLOAT8_E5M2 = "float8_e5m2"
    BFLOAT16 = "bfloat16"
    FLOAT16 = "float16"
    FLOAT32 = "float32"
    FLOAT64 = "float64"
    #: Of a KV cache alone, whose rows have a scale (:func:`row_bytes`).
    INT8 = "int8"

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
    DType.INT8: 1,
}
_SCALE_BYTES = 4


def row_bytes(head_dim: int, dtype: DType) -> int:
    """Bytes of K or V of one token and head in a KV cache; of int8 with its float32 scale."""
    return head_dim * dtype.itemsize + (_SCALE_BYTES if dtype is DType.INT8 else 0)
