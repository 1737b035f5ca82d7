"""MXFP4 as gpt-oss has it: experts in numbers of 4 bits (e2m1) with a power of two per group."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from vmserve.errors import ConfigurationError
from vmserve.models.e2m1 import DOUBLED, NO_NUMBER, half_powers
from vmserve.models.grouped import Factors, Grouped
from vmserve.models.safetensors_file import SafetensorsFile, StoredIntegers
from vmserve.models.stored_weight import Plain, Table

__all__ = ["BLOCKS", "SCALES", "Mxfp4Weight"]

BLOCKS, SCALES = "_blocks", "_scales"
_GROUP = 32


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
        if (scales == NO_NUMBER).any():
            raise ConfigurationError(
                f"{self.file.path.name}: tensor {self.name}{SCALES} has scales that are not a "
                "number: fetch the model again"
            )
        packed = self.file.view(self.blocks)[index]
        codes = np.stack((DOUBLED[packed & 15], DOUBLED[packed >> 4]), axis=-1)
        return Grouped(8, _GROUP, codes.reshape(len(packed), -1), Factors(half_powers(scales)))

    def read(self) -> Plain | Grouped:
        raise AssertionError("it is several matrices")

    def table(self) -> Table | None:
        return None

    def rows(self, ids: NDArray[np.int64]) -> NDArray[np.float32]:
        raise AssertionError("it is no embedding")

    def drop_pages(self) -> None:
        for stored in (self.blocks, self.scales):
            self.file.drop_pages(stored.start, stored.num_bytes)
