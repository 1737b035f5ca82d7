"""Where a GGUF file has the tensors of our decoder."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vmserve.attention.cpu import CPU_DTYPES
from vmserve.errors import ConfigurationError, UnsupportedError
from vmserve.models.decoder_config import DecoderConfig
from vmserve.models.gguf.architectures import (
    ARCHITECTURES,
    ENDS,
    EXPERTS,
    ROUTER,
    SHARED_EXPERT,
    SHARED_GATE,
    Architecture,
)
from vmserve.models.gguf.dequantize import dequantize
from vmserve.models.gguf.metadata import LONG_FACTORS, PLAIN, ROPE_FACTORS
from vmserve.models.gguf.reader import GgufFile, GgufModel, GgufTensor, shown
from vmserve.models.gguf.repack import is_quantized, repack
from vmserve.models.grouped import Grouped
from vmserve.models.plan import DecoderPlan, DeltaPlan, ExpertsPlan, LayerPlan
from vmserve.models.stored_weight import Plain, Table
from vmserve.numbers.dtypes import DType

__all__ = ["GgufWeight", "find_weights"]

_Rows = slice | NDArray[np.int64]
#: Tensors which are no weights, but part of the configuration.
_NO_WEIGHTS = frozenset((ROPE_FACTORS, *LONG_FACTORS))
_NAMED_IN_ERRORS = 4


@dataclass(frozen=True)
class GgufWeight:
    """Where a weight of the decoder is."""

    file: GgufFile
    tensor: GgufTensor
    #: Shape in the decoder.
    shape: tuple[int, ...]
    #: Rows of the tensor that the weight has, in order; None: all as they are.
    rows_of_tensor: _Rows | None = None

    @property
    def num_bytes(self) -> int:
        return self.tensor.num_bytes * math.prod(self.shape) // self.tensor.num_elements

    def read(self) -> Plain | Grouped:
        raw, block_type = self._raw(), self.tensor.type
        if is_quantized(block_type):
            grouped = repack(block_type, raw)
            for factors in (grouped.scale, grouped.minimum):
                if factors is not None:
                    self._refuse_infinite(factors.coarse)
            return grouped
        dtype, element = PLAIN[block_type.name]
        found = raw.view(element).reshape(self.shape)
        if found.ndim == 1 and dtype is not DType.BFLOAT16:
            self._refuse_infinite(found)
        return found, dtype

    def _refuse_infinite(self, numbers: NDArray[Any]) -> None:
        """Numbers of which one spoils a row or more; those of plain matrices are not looked at."""
        num_wrong = numbers.size - np.count_nonzero(np.isfinite(numbers))
        if num_wrong:
            raise ConfigurationError(
                f"{self.file.path.name}: tensor {shown(self.tensor.name)} has {num_wrong:,} scales "
                "or numbers that are infinite or not a number: fetch the model again"
            )

    def matrix(self, index: int) -> Plain | Grouped:
        raise AssertionError("its matrices are found one by one")

    def table(self) -> Table | None:
        assert self.rows_of_tensor is None, "an embedding has all rows"
        dtype, _ = PLAIN.get(self.tensor.type.name, (None, None))
        return (self.file.rows(self.tensor), dtype) if dtype in CPU_DTYPES else None

    def rows(self, ids: NDArray[np.int64]) -> NDArray[np.float32]:
        assert self.rows_of_tensor is None, "an embedding has all rows"
        return dequantize(self.tensor.type, self.file.rows(self.tensor).read(ids))

    def drop_pages(self) -> None:
        self.file.drop_pages(self.tensor)

    def _raw(self) -> NDArray[np.uint8]:
        """Its rows, ``[rows, bytes of a row]``; a vector is one row."""
        raw = self.file.raw(self.tensor)
        if self.rows_of_tensor is None:
            return raw
        if len(self.tensor.shape) > 1:
            return np.ascontiguousarray(raw[self.rows_of_tensor])
        elements = raw.reshape(-1, self.tensor.type.num_bytes)
        return np.ascontiguousarray(elements[self.rows_of_tensor]).reshape(1, -1)


def find_weights(model: GgufModel, config: DecoderConfig) -> dict[str, GgufWeight]:
    """Where exactly the decoder's tensors lie, by its own names.

    Raises :class:`~vmserve.errors.ConfigurationError` for tensors that are missing, surplus or of
    the wrong shape, and names them as the file does.
    """
    kind = model.metadata.string("general.architecture")
    architecture = ARCHITECTURES[kind]
    plan = DecoderPlan.of(config)
    shapes = dict(plan.tensors())
    places = {
        name: place for name, place in _places(config, architecture, plan, shapes) if name in shapes
    }
    wanted = {place.stored for place in places.values()}
    missing = sorted(stored for stored in wanted if stored not in model.tensors)
    if missing:
        raise ConfigurationError(
            f"{model.path.name} lacks {len(missing):,} tensors that its metadata imply: "
            f"{_listed(missing)}; fetch the model again"
        )
    # Layers of multi-token prediction follow the others: they draft, and change no token.
    extra = model.metadata.integer(f"{kind}.nextn_predict_layers", 0)
    drafting = range(config.num_layers, config.num_layers + extra)
    surplus = sorted(
        name
        for name in model.tensors.keys() - wanted - _NO_WEIGHTS
        if not _is_ignorable(name, drafting)
    )
    if surplus:
        raise UnsupportedError(
            f"{model.path.name} has {len(surplus):,} tensors that its architecture does not have "
            f"here: {_listed(surplus)}"
        )
    found = {}
    for name, shape in shapes.items():
        place = places[name]
        file, tensor = model.tensors[place.stored]
        implied = place.shape or shape
        if _without_ones(tensor.shape) != _without_ones(implied):
            raise ConfigurationError(
                f"{file.path.name}: tensor {place.stored} has shape {list(tensor.shape)}, but the "
                f"metadata imply {list(implied)}: fetch the model again"
            )
        if len(tensor.shape) == 1 and tensor.type.num_elements > 1:
            raise UnsupportedError(
                f"{file.path.name}: tensor {place.stored} is a vector of type {tensor.type.name}: "
                "not supported, vectors are F32, F16 or BF16"
            )
        found[name] = GgufWeight(file, tensor, shape, place.rows)
    return found


@dataclass(frozen=True)
class _Place:
    stored: str
    #: Shape of the tensor; None: that of the weight.
    shape: tuple[int, ...] | None = None
    rows: _Rows | None = None


def _places(
    config: DecoderConfig,
    architecture: Architecture,
    plan: DecoderPlan,
    shapes: Mapping[str, tuple[int, ...]],
) -> Iterator[tuple[str, _Place]]:
    """Places by our names; more than those of ``shapes``."""
    for theirs, ours in ENDS.items():
        yield f"model.{ours}.weight", _Place(f"{theirs}.weight")
    yield "lm_head.weight", _Place("output.weight")
    heads = {"attn_q": config.q_heads, "attn_k": config.kv_heads} if architecture.permuted else {}
    for layer in plan.layers:
        ours_before, theirs_before = f"model.layers.{layer.number}.", f"blk.{layer.number}."
        for theirs, ours in architecture.layer.items():
            for kind in ("weight", "bias"):
                name = f"{ours_before}{ours}.{kind}"
                rows = None
                if theirs in heads and name in shapes:
                    rows = _halves_first(shapes[name][0], heads[theirs])
                yield name, _Place(f"{theirs_before}{theirs}.{kind}", rows=rows)
        for theirs, ours in architecture.whole.items():
            yield f"{ours_before}{ours}", _Place(theirs_before + theirs)
        if isinstance(layer.mlp, ExpertsPlan):
            yield from _expert_places(layer, layer.mlp)
        if isinstance(layer.mixer, DeltaPlan) and not architecture.tiled:
            # Both gates in one tensor, by key head.
            values = layer.mixer.gates[0].outputs
            assert config.delta is not None, "the layer has one"
            rows_of_both = np.arange(2 * values).reshape(config.delta.key_heads, 2, -1)
            for index, gate in enumerate(layer.mixer.gates):
                yield (
                    gate.weight,
                    _Place(
                        f"{theirs_before}ssm_ba.weight",
                        (2 * values, gate.inputs),
                        rows_of_both[:, index].reshape(-1),
                    ),
                )


def _expert_places(layer: LayerPlan, plan: ExpertsPlan) -> Iterator[tuple[str, _Place]]:
    before, count = f"blk.{layer.number}.", len(plan.experts)
    matrices = [(plan.router, ROUTER), (plan.shared_gate, SHARED_GATE)]
    if plan.shared is not None:
        matrices += zip((*plan.shared.ups, plan.shared.down), SHARED_EXPERT, strict=True)
    for matrix, theirs in matrices:
        for name, _ in () if matrix is None else matrix.tensors():
            yield name, _Place(f"{before}{theirs}.{name.rpartition('.')[2]}")
    for part, mlp in enumerate(plan.experts):
        for matrix, theirs in zip((*mlp.ups, mlp.down), EXPERTS, strict=True):
            for name, shape in matrix.tensors():
                rows = math.prod(shape[:-1])
                stored = f"{before}{theirs}.{name.rpartition('.')[2]}"
                own = slice(part * rows, (part + 1) * rows)
                yield name, _Place(stored, (count, *shape), own)


def _halves_first(rows: int, heads: int) -> NDArray[np.int64]:
    """Undo the order of q's and k's rows in files of llama: (head, pair, half) to (head, half,
    pair)."""
    return np.arange(rows).reshape(heads, -1, 2).swapaxes(1, 2).reshape(-1)


def _without_ones(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Writers leave dimensions of 1 out, or do not."""
    return tuple(size for size in shape if size != 1)


def _is_ignorable(name: str, drafting: range) -> bool:
    """Constants; a copy of what is there in two parts; layers of ``drafting``."""
    kind, _, rest = name.partition(".")
    layer, _, module = rest.partition(".")
    if kind != "blk" or not layer.isdecimal():
        return False
    return int(layer) in drafting or module in ("attn_rot_embd.weight", "attn_kv_b.weight")


def _listed(names: list[str]) -> str:
    more = len(names) - _NAMED_IN_ERRORS
    return ", ".join(map(shown, names[:_NAMED_IN_ERRORS])) + (
        f" and {more} more" if more > 0 else ""
    )
