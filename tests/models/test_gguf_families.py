"""Families with experts, latents or states as GGUF files: the logits of the same checkpoint."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import gguf
import pytest
import torch

from tests.models.checkpoints import (
    YARN_ROPE,
    deepseek_v2,
    deepseek_v3,
    gpt_oss,
    qwen2_moe,
    qwen3_next,
    save,
)
from tests.models.gguf_checkpoints import convert
from tests.models.gguf_files import write
from tests.models.schedule import LENGTHS, random_prompts, worst_difference
from tests.models.test_native import run_native
from vmserve.models import load_model
from vmserve.models.gguf.config import describe
from vmserve.models.gguf.reader import open_gguf

#: Sizes of whole blocks, so that matrices can be quantized.
_BLOCKS = {"hidden_size": 64, "intermediate_size": 96, "moe_intermediate_size": 64}
_LATENT = {
    **_BLOCKS,
    "kv_lora_rank": 32,
    "q_lora_rank": 32,
    "qk_nope_head_dim": 32,
    "v_head_dim": 32,
    "rope_parameters": {**YARN_ROPE, "mscale": 0.7, "mscale_all_dim": 0.7},
}
_DELTA = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "head_dim": 32,
    "linear_value_head_dim": 16,
    "num_hidden_layers": 4,
    "layer_types": [*["linear_attention"] * 3, "full_attention"],
}
_FAMILIES = {
    "qwen2-moe": qwen2_moe(**_BLOCKS),
    "gpt-oss": gpt_oss(
        hidden_size=64,
        intermediate_size=96,
        swiglu_limit=7.0,
        rope_parameters={**YARN_ROPE, "truncate": False},
    ),
    "deepseek-v2": deepseek_v2(**_LATENT),
    "deepseek-v2-lite": deepseek_v2(
        **{**_LATENT, "q_lora_rank": None}, n_group=1, topk_group=1, topk_method="greedy"
    ),
    "deepseek-v3": deepseek_v3(**_LATENT),
    "qwen3-next": qwen3_next(**_DELTA, num_experts=6, moe_intermediate_size=64),
    "qwen3.5": qwen3_next("qwen3_5_text", **_DELTA),
    "qwen3.5-moe": qwen3_next(
        "qwen3_5_moe_text", **_DELTA, num_experts=6, moe_intermediate_size=64
    ),
}


def _logits(path: Path) -> list[torch.Tensor]:
    return run_native(load_model(path, torch.float32, native=True), random_prompts(LENGTHS))


@pytest.mark.parametrize("name", _FAMILIES)
def test_same_logits(tmp_path: Path, name: str) -> None:
    directory = save(_FAMILIES[name], tmp_path / "checkpoint")
    network = convert(directory, tmp_path / "x.gguf", lambda writer: None)
    found = describe(open_gguf(tmp_path / "x.gguf")).network
    sizes = [
        (each.experts, each.latent, each.delta and replace(each.delta, tiled=False))
        for each in (found, network)
    ]
    assert sizes[0] == sizes[1]
    assert worst_difference(_logits(tmp_path / "x.gguf"), _logits(directory)) < 2e-5


@pytest.mark.parametrize(
    ("name", "matrices"),
    [("deepseek-v3", "Q8_0"), ("deepseek-v2-lite", "Q4_0"), ("qwen3.5", "Q8_0"),
     ("gpt-oss", "MXFP4")],
)  # fmt: skip
def test_quantized_matrices_are_what_the_file_says(
    tmp_path: Path, name: str, matrices: str
) -> None:
    directory = save(_FAMILIES[name], tmp_path / "checkpoint")
    convert(directory, tmp_path / "x.gguf", lambda writer: None, matrices)
    _write_exact(tmp_path / "x.gguf", tmp_path / "exact.gguf")
    found, exact = (_logits(tmp_path / f"{each}.gguf") for each in ("x", "exact"))
    assert worst_difference(found, exact) < 2e-3


def _write_exact(path: Path, to: Path) -> None:
    """The same file with all matrices in float32."""
    read = gguf.GGUFReader(path)
    tensors = {
        tensor.name: (
            "F32",
            gguf.quants.dequantize(tensor.data, tensor.tensor_type).reshape(
                tensor.shape.tolist()[::-1]
            ),
        )
        for tensor in read.tensors
    }

    def metadata(writer: gguf.GGUFWriter) -> None:
        for field in read.fields.values():
            if field.name.startswith("GGUF.") or field.name == "general.architecture":
                continue
            kind, *of = field.types
            writer.add_key_value(field.name, field.contents(), kind, of[0] if of else None)

    architecture = read.fields["general.architecture"].contents()
    write(to, architecture, tensors, metadata)
