"""MXFP4 as gpt-oss has it: experts in numbers of 4 bits (e2m1) with a power of two per group."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from vmserve.errors import ConfigurationError
from vmserve.models.grouped import Factors, Grouped
from vmserve.models.safetensors_file import SafetensorsFile, StoredIntegers
from vmserve.models.stored_weight import Plain, Table

__all__ = ["BLOCKS", "SCALES", "Mxfp4Weight"]

BLOCKS, SCALES = "_blocks", "_scales"
_GROUP = 32
#: Twice the number of each code: whole.
_DOUBLED = np.array([0, 1, 2, 3, 4, 6, 8, 12], np.int8)
_CODES = np.concatenate((_DOUBLED, -_DOUBLED)).view(np.uint8)
#: Of a scale of 1.
_BIAS = 127
_NO_NUMBER = 255


@dataclass(frozen=True)
class Mxfp4Weight:
    """Matrices ``[out, in]`` in ``blocks`` ``[matrices, out, groups, 16]``, a code in each half of
    a byte, and ``scales`` ``[matrices, out, groups]``, exponents."""

    name: str
    file: SafetensorsFile
    blocks: StoredIntegers
    scales: StoredIntegers

    def check(self, shape: tuple[int, ...]) -> None:
        """``shape``: ``[matrices, in, out]``. Raises
        :class:`~vmserve.errors.ConfigurationError` for another."""
        matrices, inputs, outputs = shape
        groups = (matrices, outputs, inputs // _GROUP)
        if (
            inputs % _GROUP
            or (self.blocks.shape, self.scales.shape) != ((*groups, _GROUP // 2), groups)
            or {self.blocks.element, self.scales.element} != {np.dtype("u1")}
        ):
            raise ConfigurationError(
                f"{self.file.path.name}: tensor {self.name}{BLOCKS} has shape "
                f"{list(self.blocks.shape)} and {self.name}{SCALES} {list(self.scales.shape)}, but "
                f"config.json implies {matrices:,} matrices of {outputs:,} by {inputs:,} in groups "
                f"of {_GROUP}: the files do not belong together, fetch the model again"
            )

    @property
    def num_bytes(self) -> int:
        return self.blocks.num_bytes + self.scales.num_bytes

    def matrix(self, index: int) -> Grouped:
        scales = self.file.view(self.scales)[index]
        if (scales == _NO_NUMBER).any():
            raise ConfigurationError(
                f"{self.file.path.name}: tensor {self.name}{SCALES} has scales that are not a "
                "number: fetch the model again"
            )
        packed = self.file.view(self.blocks)[index]
        codes = np.stack((_CODES[packed & 15], _CODES[packed >> 4]), axis=-1)
        halved = np.ldexp(np.float32(1), scales.astype(np.int32) - _BIAS - 1)
        return Grouped(8, _GROUP, codes.reshape(len(packed), -1), Factors(halved))

    def read(self) -> Plain | Grouped:
        raise AssertionError("it is several matrices")

    def table(self) -> Table | None:
        return None

    def rows(self, ids: NDArray[np.int64]) -> NDArray[np.float32]:
        raise AssertionError("it is no embedding")

    def drop_pages(self) -> None:
        for stored in (self.blocks, self.scales):
            self.file.drop_pages(stored.start, stored.num_bytes)
