"""Read the weights of a model directory for torch, each in memory once."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path

import torch

from vmserve.models.blocks import RmsNormKernel
from vmserve.models.decoder import Decoder
from vmserve.models.decoder_config import DecoderConfig
from vmserve.models.loader import Progress, find_tensors
from vmserve.models.quantized.formats import QuantizedFormat
from vmserve.models.quantized.mxfp4 import Mxfp4Weight
from vmserve.models.quantized.weight import find_quantized
from vmserve.models.safetensors_file import SafetensorsFile, StoredTensor
from vmserve.models.stored_weight import SafetensorsWeight
from vmserve.models.tensor_names import tensor_shapes, weight_name
from vmserve.models.weights import DecoderWeights, assemble
from vmserve.sizes import format_size
from vmserve.torch_dtypes import as_torch

__all__ = ["load_decoder", "load_tensors"]

logger = logging.getLogger(__name__)

#: Converted at a time: this much of a tensor is in memory in both types.
_BLOCK_BYTES = 8 << 20


def load_tensors(
    stored: Mapping[str, tuple[SafetensorsFile, StoredTensor]],
    dtype: torch.dtype,
    device: torch.device,
    progress: Progress | None = None,
    exact: tuple[str, ...] = (),
) -> dict[str, torch.Tensor]:
    """Read the tensors that :func:`vmserve.models.loader.find_tensors` found, in ``dtype``;
    those whose names end in one of ``exact`` in float32.

    A tensor that is stored in ``dtype`` stays in its file, memory-mapped (on a CPU);
    another one is converted block by block, and the file's pages dropped behind it.
    """
    total = sum(tensor.num_bytes for _, tensor in stored.values())
    done = 0
    tensors: dict[str, torch.Tensor] = {}
    for name, (file, tensor) in stored.items():
        kind = torch.float32 if name.endswith(exact) else dtype
        tensors[name] = _load(file, tensor, kind, device)
        done += tensor.num_bytes
        if progress is not None:
            progress("loading weights", done, total)
    return tensors


def _load(
    file: SafetensorsFile, stored: StoredTensor, dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    mapped = torch.from_numpy(file.view(stored)).view(as_torch(stored.dtype))
    aligned = stored.start % stored.dtype.itemsize == 0
    if device.type == "cpu" and mapped.dtype == dtype and aligned:
        file.load_pages(stored.start, stored.num_bytes)
        return mapped
    loaded = torch.empty(stored.shape, dtype=dtype, device=device)
    source, target = mapped.view(-1), loaded.view(-1)
    block = _BLOCK_BYTES // stored.dtype.itemsize
    for first in range(0, stored.num_elements, block):
        last = min(first + block, stored.num_elements)
        target[first:last].copy_(source[first:last])
        itemsize = stored.dtype.itemsize
        file.drop_pages(stored.start + first * itemsize, (last - first) * itemsize)
    return loaded


def _expanded(
    weight: Mxfp4Weight, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    """``[matrices, in, out]``; bfloat16 holds the numbers exactly."""
    count, inputs, outputs = shape
    loaded = torch.empty(count, outputs, inputs, dtype=dtype, device=device)
    for index in range(count):
        loaded[index].copy_(torch.from_numpy(weight.matrix(index).expand()))
    weight.drop_pages()
    return loaded.mT


def load_decoder(
    directory: Path,
    config: DecoderConfig,
    dtype: torch.dtype,
    device: torch.device,
    max_len: int,
    progress: Progress | None,
    quantized: QuantizedFormat | None = None,
) -> tuple[Decoder, int]:
    """Load the decoder; return it and the bytes of its weights.

    Raises as :func:`vmserve.models.loader.find_tensors` does.
    """
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
    exact = [config.names.router_correction] if config.names.router_correction else []
    if config.delta is not None:
        exact += ["A_log", "dt_bias"]
    tensors = load_tensors(found, dtype, device, progress, tuple(exact))
    for name, weight in packed.items():
        tensors[name] = _expanded(weight, tensor_shapes(config)[name], dtype, device)
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
    return Decoder(config, assemble_on(device, config, tensors), max_len), num_bytes


def assemble_on(
    device: torch.device, config: DecoderConfig, tensors: dict[str, torch.Tensor]
) -> DecoderWeights:
    """:func:`assemble`, with what makes launches fewer where they cost.

    On a CPU most tensors are in their files, where they should stay.
    """
    if device.type == "cpu":
        return assemble(config, tensors)
    kernel: RmsNormKernel | None = None
    if device.type == "cuda" and config.norm.rms:
        from vmserve.attention.cuda.norm import norm_kernel  # noqa: PLC0415

        dtype = tensors[weight_name(config.names, config.names.embedding)].dtype
        kernel = norm_kernel(device, dtype, config.head_dim)
    return assemble(config, tensors, joined=True, norm_kernel=kernel)
