"""Checkpoints in the formats of GPTQ, AWQ and compressed-tensors, one number at a time; and of
experts in MXFP4."""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from tests.models.checkpoints import gpt_oss, save

__all__ = ["SCHEMES", "Scheme", "convert", "write_mxfp4"]

#: AWQ puts the outputs 0, 2, 4, 6, 1, 3, 5 and 7 of eight into a word, from the lowest bits on.
_AWQ_OUTPUTS = (0, 2, 4, 6, 1, 3, 5, 7)


@dataclass(frozen=True)
class Scheme:
    method: str
    bits: int = 4
    #: 0: one group a row.
    group: int = 32
    symmetric: bool = True
    dtype: torch.dtype = torch.float16
    version: str = ""

    @property
    def config(self) -> dict[str, Any]:
        if self.method == "gptq":
            return {"quant_method": "gptq", "bits": self.bits, "group_size": self.group or -1,
                    "sym": self.symmetric, "desc_act": False,
                    "checkpoint_format": self.version or "gptq"}  # fmt: skip
        if self.method == "awq":
            return {"quant_method": "awq", "bits": self.bits, "group_size": self.group,
                    "zero_point": True, "version": "gemm"}  # fmt: skip
        weights = {"num_bits": self.bits, "type": "int", "symmetric": self.symmetric,
                   "strategy": "group" if self.group else "channel",
                   "group_size": self.group or None, "dynamic": False}  # fmt: skip
        activations = None
        if self.method == "int-quantized":
            activations = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "token",
                           "dynamic": True}  # fmt: skip
        scheme = {"targets": ["Linear"], "weights": weights, "input_activations": activations}
        return {"quant_method": "compressed-tensors", "format": self.method,
                "quantization_status": "compressed", "ignore": ["lm_head"],
                "config_groups": {"group_0": scheme}}  # fmt: skip


SCHEMES = {
    "gptq": Scheme("gptq", group=64),
    "gptq-asymmetric": Scheme("gptq", symmetric=False),
    "gptq-v2": Scheme("gptq", symmetric=False, version="gptq_v2"),
    "gptq-row": Scheme("gptq", group=0),
    "gptq-8": Scheme("gptq", 8, 64, symmetric=False),
    "awq": Scheme("awq", group=64, symmetric=False),
    "awq-bfloat16": Scheme("awq", symmetric=False, dtype=torch.bfloat16),
    "w4a16": Scheme("pack-quantized", dtype=torch.bfloat16),
    "w4a16-asymmetric": Scheme("pack-quantized", group=64, symmetric=False, dtype=torch.bfloat16),
    "w4a16-float32": Scheme("pack-quantized", symmetric=False, dtype=torch.float32),
    "w8a16": Scheme("pack-quantized", 8, 64),
    "w8a16-row": Scheme("pack-quantized", 8, 0, symmetric=False),
    "w8a8": Scheme("int-quantized", 8, 0, dtype=torch.bfloat16),
    "w8a8-asymmetric": Scheme("int-quantized", 8, 0, symmetric=False),
}


@dataclass(frozen=True)
class _Codes:
    """Weights ``(code - zero) * scale``, unsigned; zeros and scales ``[outputs, groups]``."""

    codes: NDArray[np.int64]
    zeros: NDArray[np.int64]
    scales: torch.Tensor

    def weights(self) -> NDArray[np.float64]:
        scales = self.scales.to(torch.float64).tolist()
        group = self.codes.shape[1] // self.scales.shape[1]
        rows = zip(self.codes.tolist(), self.zeros.tolist(), scales, strict=True)
        return np.array(
            [
                [(code - zero[j // group]) * scale[j // group] for j, code in enumerate(codes)]
                for codes, zero, scale in rows
            ]
        )


def _rounded(weights: NDArray[np.float64], scheme: Scheme) -> _Codes:
    outputs, inputs = weights.shape
    grouped = weights.reshape(outputs, -1, scheme.group or inputs)
    most, middle = (1 << scheme.bits) - 1, 1 << scheme.bits - 1
    if scheme.symmetric:
        scales = np.abs(grouped).max(axis=2) / (middle - 0.5)
        zeros = np.full(scales.shape, middle)
    else:
        low = np.minimum(grouped.min(axis=2), 0)
        scales = (np.maximum(grouped.max(axis=2), 0) - low) / most
        zeros = np.clip(np.rint(-low / scales), 0, most).astype(np.int64)
        zeros[0, 0], zeros[-1, -1] = 0, most
    codes = np.clip(np.rint(grouped / scales[:, :, None]) + zeros[:, :, None], 0, most)
    kept = torch.from_numpy(scales).to(scheme.dtype)
    return _Codes(codes.reshape(outputs, inputs).astype(np.int64), zeros, kept)


def _packed(values: NDArray[np.int64], bits: int) -> torch.Tensor:
    """Along the last axis, from the lowest bits on."""
    per_word = 32 // bits
    words = [[0] * -(-values.shape[1] // per_word) for _ in values]
    for row, codes in zip(words, values.tolist(), strict=True):
        for j, code in enumerate(codes):
            row[j // per_word] |= code << j % per_word * bits
    return torch.from_numpy(np.array(words, np.uint32).view(np.int32))


def _by_awq(values: NDArray[np.int64]) -> NDArray[np.int64]:
    """Columns in the order that words have them."""
    order = [first + output for first in range(0, values.shape[1], 8) for output in _AWQ_OUTPUTS]
    return values[:, order]


def _tensors(found: _Codes, scheme: Scheme) -> dict[str, torch.Tensor]:
    codes, zeros, bits = found.codes, found.zeros, scheme.bits
    middle = 1 << bits - 1
    outputs, inputs = codes.shape
    if scheme.method == "gptq":
        offset = 0 if scheme.version == "gptq_v2" else 1
        group = inputs // zeros.shape[1]
        return {
            "qweight": _packed(codes, bits).T,
            "qzeros": _packed(zeros.T - offset & (1 << bits) - 1, bits),
            "scales": found.scales.T,
            "g_idx": torch.tensor([column // group for column in range(inputs)], dtype=torch.int32),
            "bias": torch.zeros(outputs, dtype=scheme.dtype),
        }
    if scheme.method == "awq":
        return {
            "qweight": _packed(_by_awq(codes.T), bits),
            "qzeros": _packed(_by_awq(zeros.T), bits),
            "scales": found.scales.T,
        }
    if scheme.method == "pack-quantized":
        parts = {
            "weight_packed": _packed(codes, bits),
            "weight_scale": found.scales,
            "weight_shape": torch.tensor([outputs, inputs]),
        }
        if not scheme.symmetric:
            parts["weight_zero_point"] = _packed(zeros.T, bits).T
        return parts
    parts = {
        "weight": torch.from_numpy((codes - middle).astype(np.int8)),
        "weight_scale": found.scales,
    }
    if not scheme.symmetric:
        parts["weight_zero_point"] = torch.from_numpy((zeros - middle).astype(np.int8))
    return parts


def convert(
    directory: Path, quantized: Path, dequantized: Path, scheme: Scheme
) -> dict[str, NDArray[np.float64]]:
    """Write a model's matrices in the layers by ``scheme``, and as their float32 numbers.

    Returns the exact ones.
    """
    stored = load_file(directory / "model.safetensors")
    packed: dict[str, torch.Tensor] = {}
    plain: dict[str, torch.Tensor] = {}
    exact = {}
    for name, tensor in stored.items():
        packed[name] = plain[name] = tensor
        if ".layers." in name and tensor.ndim == 2:
            found = _rounded(tensor.to(torch.float64).numpy(), scheme)
            exact[name] = found.weights()
            plain[name] = torch.from_numpy(exact[name]).to(torch.float32)
            module = name.removesuffix(".weight")
            del packed[name]
            for part, values in _tensors(found, scheme).items():
                packed.setdefault(f"{module}.{part}", values.contiguous())
    for target, tensors, changes in (
        (quantized, packed, {"quantization_config": scheme.config}),
        (dequantized, plain, {}),
    ):
        shutil.copytree(directory, target)
        save_file(tensors, target / "model.safetensors")
        config = json.loads((target / "config.json").read_text())
        (target / "config.json").write_text(json.dumps({**config, **changes}))
    return exact


def write_mxfp4(directory: Path) -> tuple[Path, Path]:
    """A checkpoint of experts with random codes and scales, and its expansion."""
    save(gpt_oss(hidden_size=64, intermediate_size=96), directory / "plain")
    (directory / "quantized").mkdir()
    plain = load_file(directory / "plain" / "model.safetensors")
    quantized = dict(plain)
    generator = torch.Generator().manual_seed(1)
    for name in [name for name in plain if name.endswith(("gate_up_proj", "down_proj"))]:
        experts, inputs, outputs = plain[name].shape
        groups = (experts, outputs, inputs // 32)
        blocks = torch.randint(256, (*groups, 16), generator=generator, dtype=torch.uint8)
        scales = torch.randint(120, 127, groups, generator=generator, dtype=torch.uint8)
        plain[name] = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32).contiguous()
        del quantized[name]
        quantized |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
    save_file(plain, directory / "plain" / "model.safetensors", {"format": "pt"})
    save_file(quantized, directory / "quantized" / "model.safetensors", {"format": "pt"})
    raw = json.loads((directory / "plain" / "config.json").read_text())
    raw["quantization_config"] = {
        "quant_method": "mxfp4",
        "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"],
    }
    (directory / "quantized" / "config.json").write_text(json.dumps(raw))
    return directory / "quantized", directory / "plain"
