"""The element types of weights and of the KV cache, by name: what says so needs no torch."""

from __future__ import annotations

from enum import StrEnum

from vmserve.errors import ConfigurationError

__all__ = ["DType", "head_stride", "vector_bytes"]


class DType(StrEnum):
    """Its string is the name, as in config.json and as torch has it."""

    FLOAT8_E4M3FN = "float8_e4m3fn"
    FLOAT8_E5M2 = "float8_e5m2"
    BFLOAT16 = "bfloat16"
    FLOAT16 = "float16"
    FLOAT32 = "float32"
    FLOAT64 = "float64"
    #: Types of a KV cache only, whose rows have a scale (:func:`vector_bytes`): integers, and e4m3.
    INT8 = "int8"
    FP8 = "fp8"

    @property
    def itemsize(self) -> int:
        """Bytes of one element."""
        return _ITEMSIZE[self]

    @property
    def has_scales(self) -> bool:
        """Whether its elements are codes, which mean something with a scale alone."""
        return self in (DType.INT8, DType.FP8)

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
    DType.FP8: 1,
}
_SCALE_BYTES, _UNIT_BYTES = 4, 16


def head_stride(head_dim: int, dtype: DType) -> int:
    """Bytes from one head to the next, in K or V of a token; of int8 with its float32 scale."""
    return head_dim * dtype.itemsize + (_SCALE_BYTES if dtype is DType.INT8 else 0)


def vector_bytes(kv_heads: int, head_dim: int, dtype: DType) -> int:
    """Bytes of K or V of one token and layer in a KV cache.

    Of fp8 with the float32 scales of all heads, which follow the last one, and padding: kernels
    copy 16 bytes at a time.
    """
    heads = kv_heads * head_stride(head_dim, dtype)
    if dtype is not DType.FP8:
        return heads
    return -(-(heads + kv_heads * _SCALE_BYTES) // _UNIT_BYTES) * _UNIT_BYTES
