"""Read the weights of a model directory for torch, each in memory once."""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping
from pathlib import Path

import torch

from vmserve.models.blocks import LayerKernels
from vmserve.models.collective import Collective
from vmserve.models.decoder import Decoder
from vmserve.models.decoder_config import DecoderConfig
from vmserve.models.loader import Progress, find_tensors
from vmserve.models.plan import DecoderPlan
from vmserve.models.quantized.formats import QuantizedFormat
from vmserve.models.quantized.mxfp4 import Mxfp4Weight
from vmserve.models.quantized.weight import find_quantized
from vmserve.models.safetensors_file import SafetensorsFile, StoredTensor
from vmserve.models.shard import Part, Shard, Together
from vmserve.models.stored_weight import SafetensorsWeight
from vmserve.models.weights import DecoderWeights, assemble
from vmserve.numbers.sizes import format_size
from vmserve.numbers.torch_dtypes import as_torch

__all__ = ["load_decoder", "load_tensors"]

logger = logging.getLogger(__name__)

#: Bytes converted at a time: this part of a tensor, at least a row, is in memory in both types.
_BLOCK_BYTES = 8 << 20


def load_tensors(
    stored: Mapping[str, tuple[SafetensorsFile, StoredTensor]],
    dtype: torch.dtype,
    device: torch.device,
    progress: Progress | None = None,
    exact: Collection[str] = (),
    parts: Mapping[str, Part] | None = None,
) -> dict[str, torch.Tensor]:
    """Read the tensors that :func:`vmserve.models.loader.find_tensors` found, in ``dtype``;
    those of ``exact`` in float32. ``parts``: read these of the tensors that it names.

    A tensor that is stored in ``dtype`` stays in its file, memory-mapped (on a CPU);
    another one is converted block by block, and the file's pages dropped after it.
    """
    total = sum(tensor.num_bytes for _, tensor in stored.values())
    done = 0
    tensors: dict[str, torch.Tensor] = {}
    for name, (file, tensor) in stored.items():
        kind = torch.float32 if name in exact else dtype
        tensors[name] = _load(
            file, tensor, kind, device, None if parts is None else parts.get(name)
        )
        done += tensor.num_bytes
        if progress is not None:
            progress("loading weights", done, total)
    return tensors


def _load(
    file: SafetensorsFile,
    stored: StoredTensor,
    dtype: torch.dtype,
    device: torch.device,
    part: Part | None,
) -> torch.Tensor:
    mapped = torch.from_numpy(file.view(stored)).view(as_torch(stored.dtype))
    pieces = [mapped] if part is None else part.of(mapped)
    aligned = stored.start % stored.dtype.itemsize == 0
    in_place = len(pieces) == 1 and pieces[0].is_contiguous()
    if device.type == "cpu" and mapped.dtype == dtype and aligned and in_place:
        file.load_pages(*_place(stored, pieces[0]))
        return pieces[0]
    axis = 0 if part is None else part.axis
    shape = list(stored.shape)
    shape[axis] = sum(piece.shape[axis] for piece in pieces)
    loaded = torch.empty(shape, dtype=dtype, device=device)
    targets = torch.split_with_sizes(loaded, [piece.shape[axis] for piece in pieces], axis)
    rows = max(1, _BLOCK_BYTES * stored.shape[0] // max(1, stored.num_bytes))
    for piece, target in zip(pieces, targets, strict=True):
        for source, place in zip(torch.split(piece, rows), torch.split(target, rows), strict=True):
            place.copy_(source)
            file.drop_pages(*_place(stored, source))
    return loaded


def _place(stored: StoredTensor, piece: torch.Tensor) -> tuple[int, int]:
    """The bytes of the file from a view's first element to its last: start and number."""
    if piece.numel() == 0:
        return stored.start, 0
    span = 1 + sum((n - 1) * step for n, step in zip(piece.shape, piece.stride(), strict=True))
    itemsize = stored.dtype.itemsize
    return stored.start + int(piece.storage_offset()) * itemsize, span * itemsize


def _expanded(
    weight: Mxfp4Weight,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    device: torch.device,
    part: Part | None,
) -> torch.Tensor:
    """``[matrices, in, out]``; bfloat16 holds the numbers exactly."""
    whole = torch.empty(shape, device="meta")
    count, inputs, outputs = (whole if part is None else part.of(whole)[0]).shape
    loaded = torch.empty(count, outputs, inputs, dtype=dtype, device=device).mT
    for index in range(count):
        matrix = torch.from_numpy(weight.matrix(index).expand()).mT[None]
        loaded[index].copy_((matrix if part is None else part.of(matrix)[0])[0])
    weight.drop_pages()
    return loaded


def load_decoder(
    directory: Path,
    config: DecoderConfig,
    dtype: torch.dtype,
    device: torch.device,
    max_len: int,
    progress: Progress | None,
    quantized: QuantizedFormat | None = None,
    ranks: Collective | None = None,
) -> tuple[Decoder, int]:
    """Load the decoder, or a rank's share of it; return it and the bytes of its weights.

    Raises as :func:`vmserve.models.loader.find_tensors` does.
    """
    shard = None if ranks is None else Shard(config, ranks.rank, ranks.size)
    parts = {} if shard is None else shard.parts
    packed: dict[str, Mxfp4Weight] = {}
    if quantized is None:
        found = find_tensors(directory, config)
    else:
        found = {}
        for name, weight in find_quantized(directory, config, quantized).items():
            if isinstance(weight, Mxfp4Weight):
                packed[name] = weight
            else:
                assert isinstance(weight, SafetensorsWeight), "torch refuses other formats"
                found[name] = weight.file, weight.stored
    plan = DecoderPlan.of(config)
    tensors = load_tensors(found, dtype, device, progress, plan.float32, parts)
    for name, shape in plan.stacked:
        if name in packed:
            tensors[name] = _expanded(packed[name], shape, dtype, device, parts.get(name))
    if packed:
        sizes = (
            sum(weight.num_bytes for weight in packed.values()),
            sum(tensors[name].nbytes for name in packed),
        )
        logger.info(
            "torch has no kernels for MXFP4: %s of experts take %s in %s",
            *map(format_size, sizes),
            str(dtype).removeprefix("torch."),
        )
    num_bytes = sum(tensor.nbytes for tensor in tensors.values())
    if ranks is None or shard is None:
        return Decoder(config, assemble_on(device, config, tensors), max_len), num_bytes
    for name in filter(shard.zeroed, tensors):
        tensors[name] = torch.zeros_like(tensors[name])
    weights = assemble_on(device, shard.config, tensors)
    return Decoder(shard.config, weights, max_len, Together(ranks, shard)), num_bytes


def assemble_on(
    device: torch.device, config: DecoderConfig, tensors: dict[str, torch.Tensor]
) -> DecoderWeights:
    """:func:`assemble`, with what makes launches fewer where they cost.

    On a CPU most tensors are in their files, where they should stay.
    """
    if device.type == "cpu":
        return assemble(config, tensors)
    kernels: LayerKernels | None = None
    if device.type == "cuda" and (config.norm.rms or config.gated):
        from vmserve.attention.cuda.layers import layer_kernels  # noqa: PLC0415

        dtype = tensors[config.names.embedding_weight].dtype
        kernels = layer_kernels(device, dtype, config.head_dim)
    return assemble(config, tensors, joined=True, kernels=kernels)
