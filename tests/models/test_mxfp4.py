"""Experts in MXFP4 against the expansion of ``transformers``."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from tests.models.checkpoints import gpt_oss, save, transformers_logits
from tests.models.schedule import LENGTHS, random_prompts, run_schedule, worst_difference
from tests.models.test_native import run_native
from vmserve import _core
from vmserve.attention.cpu import ISA_VARIABLE
from vmserve.errors import ConfigurationError
from vmserve.models import load_model


def write(directory: Path) -> tuple[Path, Path]:
    """A checkpoint with random codes and scales, and its expansion."""
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


@pytest.mark.parametrize("isa", _core.cpu_isas())
def test_logits_are_those_of_the_expansion(
    isa: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(ISA_VARIABLE, isa)
    quantized, plain = write(tmp_path)
    prompts = random_prompts(LENGTHS)
    expected = transformers_logits(plain, prompts, torch.float32)
    model = load_model(quantized, torch.float32, native=True)
    # Rows are rounded to 16 bits, weights not again.
    assert worst_difference(run_native(model, prompts), expected) < 1e-3


def test_torch_has_them_in_the_type_that_it_computes_in(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    quantized, plain = write(tmp_path)
    prompts = random_prompts(LENGTHS)
    expected = transformers_logits(plain, prompts, torch.float32)
    with caplog.at_level("INFO"):
        model = load_model(quantized, torch.float32)
    assert "no kernels for MXFP4" in caplog.text
    assert worst_difference(run_schedule(model, prompts), expected) < 1e-5
    narrow = run_schedule(load_model(quantized, torch.bfloat16), prompts)
    same = run_schedule(load_model(plain, torch.bfloat16), prompts)
    assert all(torch.equal(*each) for each in zip(narrow, same, strict=True))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda tensors, name: tensors.pop(f"{name}_scales"), "but lacks .*_scales"),
        (
            lambda tensors, name: tensors.update({f"{name}_scales": tensors[f"{name}_scales"][1:]}),
            r"implies 5 matrices of 192 by 64 in groups of 32",
        ),
        (
            lambda tensors, name: tensors[f"{name}_scales"].fill_(255),
            "scales that are not a number",
        ),
    ],
)
def test_bad_tensors(change, said: str, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    quantized, _ = write(tmp_path)
    tensors = load_file(quantized / "model.safetensors")
    change(tensors, "model.layers.1.mlp.experts.gate_up_proj")
    save_file(tensors, quantized / "model.safetensors", {"format": "pt"})
    with pytest.raises(ConfigurationError, match=said):
        load_model(quantized, torch.float32, native=True)
