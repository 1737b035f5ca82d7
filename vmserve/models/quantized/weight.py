"""Find quantized matrices in the files of a checkpoint."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vmserve.errors import ConfigurationError, UnsupportedError
from vmserve.models.decoder_config import DecoderConfig
from vmserve.models.grouped import Grouped
from vmserve.models.loader import choose_tensors, listed, weight_files
from vmserve.models.plan import DecoderPlan, Tensor, canonical_name
from vmserve.models.quantized import mxfp4
from vmserve.models.quantized.formats import QuantizedFormat
from vmserve.models.quantized.layout import Layout, Sizes
from vmserve.models.safetensors_file import SafetensorsFile, StoredIntegers, StoredTensor
from vmserve.models.stored_weight import SafetensorsWeight, StoredWeight, Table
from vmserve.numbers.dtypes import DType
from vmserve.numbers.host_arrays import as_float32

__all__ = ["QuantizedWeight", "find_quantized"]

_Stored = dict[str, tuple[SafetensorsFile, StoredTensor | StoredIntegers]]


@dataclass(frozen=True)
class QuantizedWeight:
    """A matrix that is stored in several tensors."""

    module: str
    layout: Layout
    sizes: Sizes
    parts: Mapping[str, tuple[SafetensorsFile, StoredTensor | StoredIntegers]]

    @property
    def num_bytes(self) -> int:
        return sum(stored.num_bytes for _, stored in self.parts.values())

    def read(self) -> Grouped:
        arrays = {part: _read(*place) for part, place in self.parts.items()}
        name = self.layout.names.order
        order = arrays.get(name or "")
        if order is not None and (order != np.arange(len(order)) // self.sizes.group).any():
            raise UnsupportedError(
                f"tensor {self.module}.{name} has inputs in another order than their groups "
                "(desc_act, actorder group): not supported; quantize the model without"
            )
        return self.layout.grouped(self.sizes, arrays)

    def matrix(self, index: int) -> Grouped:
        raise AssertionError("its matrices are found one by one")

    def table(self) -> Table | None:
        return None

    def rows(self, ids: NDArray[np.int64]) -> NDArray[np.float32]:
        raise AssertionError("find_quantized() refuses embeddings")

    def drop_pages(self) -> None:
        for file, stored in self.parts.values():
            file.drop_pages(stored.start, stored.num_bytes)


def _read(file: SafetensorsFile, stored: StoredTensor | StoredIntegers) -> NDArray[Any]:
    array = file.view(stored)
    if isinstance(stored, StoredIntegers) or stored.dtype is DType.FLOAT16:
        return array
    return as_float32(array, stored.dtype)


def find_quantized(
    directory: Path, config: DecoderConfig, quantized: QuantizedFormat
) -> dict[str, StoredWeight]:
    """Find the decoder's tensors; those that have parts of a layout are quantized.

    Raises as :func:`vmserve.models.loader.find_tensors` does.
    """
    plan = DecoderPlan.of(config)
    shapes = dict(plan.tensors())
    stored: _Stored = {}
    for path in weight_files(directory):
        file = SafetensorsFile(path, quantized=True)
        places: dict[str, StoredTensor | StoredIntegers] = {**file.tensors, **file.integers}
        for name, place in places.items():
            stored[canonical_name(config, shapes, name)] = file, place
    found: dict[str, StoredWeight] = {}
    for name in (name for name, shape in shapes.items() if len(shape) == 2):
        module = name.removesuffix(".weight")
        for layout in quantized.layouts:
            _, codes = stored.get(f"{module}.{layout.names.codes}", (None, None))
            if isinstance(codes, StoredIntegers):
                found[name] = _take(stored, shapes, module, layout)
                break
    _take_stacked(stored, plan.stacked, found)
    embedding = plan.embedding.name
    if embedding in found:
        raise UnsupportedError(f"{embedding} is quantized: an embedding must be plain")
    left = {name: place for name, (_, place) in stored.items()}
    if integers := [n for n, place in left.items() if isinstance(place, StoredIntegers)]:
        raise ConfigurationError(
            f"the checkpoint has {len(integers)} tensors of integers that belong to no matrix of "
            f"{quantized.name}: {listed(sorted(integers))}; config.json and the weights do not "
            "belong together"
        )
    plain = {
        name: (file, place)
        for name, (file, place) in stored.items()
        if isinstance(place, StoredTensor)
    }
    others = choose_tensors(
        plain,
        {name: shape for name, shape in shapes.items() if name not in found},
        config,
    )
    found |= {name: SafetensorsWeight(*place) for name, place in others.items()}
    return {name: found[name] for name in shapes}


def _take_stacked(
    stored: _Stored, stacked: Iterable[Tensor], found: dict[str, StoredWeight]
) -> None:
    """Take tensors of all experts in MXFP4 out of ``stored``."""
    for name, shape in stacked:
        if name + mxfp4.BLOCKS not in stored:
            continue
        file, blocks = stored.pop(name + mxfp4.BLOCKS)
        _, scales = stored.pop(name + mxfp4.SCALES, (None, None))
        if not isinstance(blocks, StoredIntegers) or not isinstance(scales, StoredIntegers):
            raise ConfigurationError(
                f"the checkpoint has {name}{mxfp4.BLOCKS}, but lacks {name}{mxfp4.SCALES}, or one "
                "of them is not of bytes: fetch the model again"
            )
        weight = mxfp4.Mxfp4Weight(name, file, blocks, scales)
        weight.check(shape)
        found[name] = weight


def _take(
    stored: _Stored, all_shapes: Mapping[str, tuple[int, ...]], module: str, layout: Layout
) -> QuantizedWeight:
    """Take the parts of a module, and what is ignored of it, out of ``stored``."""
    names = layout.names
    wanted = (names.codes, names.scale, names.zero, names.order)
    parts = {
        part: stored.pop(f"{module}.{part}")
        for part in wanted
        if part is not None and f"{module}.{part}" in stored
    }
    for part in names.ignored:
        stored.pop(f"{module}.{part}", None)
    bias = f"{module}.bias"
    if bias in stored and bias not in all_shapes and not _read(*stored[bias]).any():
        del stored[bias]  # some writers give each module one
    if missing := [part for part in names.needed if part not in parts]:
        raise ConfigurationError(
            f"the checkpoint has {module}.{names.codes}, but lacks {', '.join(missing)} of that "
            "module: fetch the model again"
        )
    for part, (file, place) in parts.items():
        element = place.element if isinstance(place, StoredIntegers) else None
        if element != (None if part == names.scale else names.element):
            raise ConfigurationError(
                f"{file.path.name}: tensor {module}.{part} has another element type than the "
                "format's: fetch the model again"
            )
    rows, columns = all_shapes[f"{module}.weight"]
    shapes = {part: place.shape for part, (_, place) in parts.items()}
    sizes = layout.sizes(rows, columns, shapes)
    if reason := sizes.refusal():
        raise UnsupportedError(f"tensor {module}.{names.codes}: {reason}")
    expected = layout.shapes(sizes, shapes)
    for part, (file, place) in parts.items():
        if place.shape != expected[part]:
            raise ConfigurationError(
                f"{file.path.name}: tensor {module}.{part} has shape {list(place.shape)}, but "
                f"config.json implies {list(expected[part])}: the files do not belong together, "
                "fetch the model again"
            )
    return QuantizedWeight(module, layout, sizes, parts)
