"""``vmserve quantize``: what it writes, and what it refuses."""

from __future__ import annotations

import errno
import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from tests.models.checkpoints import Saved, llama, opt, save
from tests.models.gguf_files import add_llama, llama_tensors, write
from tests.models.schedule import every_row, random_prompts, worst_difference
from tests.models.test_quantized import find
from vmserve import LLM, SamplingParams, _core
from vmserve.errors import ConfigurationError
from vmserve.models import load_model, resolve_model
from vmserve.models.config import ModelConfig
from vmserve.models.grouped import Grouped
from vmserve.models.native import load_native
from vmserve.models.quantize import GROUP, quantize
from vmserve.models.stored_weight import as_plain
from vmserve.numbers.dtypes import DType
from vmserve.numbers.host_arrays import as_float32


def _model(tmp_path: Path, dtype: torch.dtype = torch.bfloat16, **changes: Any) -> Path:
    sizes = {"hidden_size": 64, "intermediate_size": 96, **changes}
    directory = save(llama(**sizes), tmp_path / "wide")
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=dtype)
    model.save_pretrained(tmp_path / "model", max_shard_size="40KB")
    return tmp_path / "model"


def _tensors(directory: Path) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    for path in directory.glob("*.safetensors"):
        found |= load_file(path)
    return found


def _change(source: Path, name: str, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """A tensor in whichever file has it."""
    for path in source.glob("*.safetensors"):
        tensors = load_file(path)
        if name in tensors:
            tensors[name] = change(tensors[name])
            save_file(tensors, path, metadata={"format": "pt"})


def _error_of_nearest(weights: NDArray[np.float64], bits: int) -> NDArray[np.float64]:
    """Squared error of each group where the largest weight gets the highest code."""
    grouped = weights.reshape(-1, GROUP)
    scale = np.abs(grouped).max(axis=1, keepdims=True) / ((1 << bits - 1) - 1)
    error: NDArray[np.float64] = ((np.rint(grouped / scale) * scale - grouped) ** 2).sum(axis=1)
    return error


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("tied", [False, True])
def test_weights(tmp_path: Path, dtype: torch.dtype, bits: int, tied: bool) -> None:
    source, output = _model(tmp_path, dtype, tie_word_embeddings=tied), tmp_path / "out"
    assert len(list(source.glob("*.safetensors"))) > 1
    assert quantize(source, output, bits) == []
    written, ours = _tensors(output), find(output)
    for name, tensor in _tensors(source).items():
        if ".layers." not in name or tensor.ndim == 1:
            assert torch.equal(written[name], tensor), name
            continue
        found, weights = ours[name].read(), tensor.to(torch.float64).numpy()
        assert isinstance(found, Grouped)
        error = ((found.expand(np.float64) - weights).reshape(-1, GROUP) ** 2).sum(axis=1)
        nearest = _error_of_nearest(weights, bits)
        # The scale itself is rounded, which can cost a group of 8 bits more than it gains.
        assert error.sum() < (0.8 if bits == 4 else 1.1) * nearest.sum()
        if bits == 4:
            assert (error < 1.05 * nearest).all()
        linear = _core.CpuLinear(found.packable())
        assert linear.weight_bytes * 8 / weights.size == bits + 0.5
        scale = written[f"{name.removesuffix('.weight')}.weight_scale"]
        assert scale.dtype == (torch.float16 if dtype is torch.float32 else dtype)


@pytest.mark.parametrize("bits", [4, 8])
def test_small_and_absent_weights(tmp_path: Path, bits: int) -> None:
    """Groups of zeros, and of numbers at float16's lower end, whose scales have few bits there."""
    source, output = _model(tmp_path), tmp_path / "out"
    name = "model.layers.0.self_attn.q_proj.weight"
    weights = torch.zeros(64, 64, dtype=torch.bfloat16)
    weights[:, :32] = torch.linspace(-1e-5, 1e-5, 32)
    _change(source, name, lambda _: weights)
    quantize(source, output, bits)
    found = find(output)[name].read()
    assert isinstance(found, Grouped)
    exact = found.expand(np.float64)
    assert (exact[:, 32:] == 0).all()
    assert np.abs(exact - weights.to(torch.float64).numpy()).max() < 3e-6
    assert _core.CpuLinear(found.packable()).weight_bytes * 8 / exact.size == bits + 0.5


def test_transformers_reads_it(tmp_path: Path) -> None:
    pytest.importorskip("compressed_tensors")
    source, output = _model(tmp_path, torch.float32), tmp_path / "out"
    quantize(source, output, 4)
    model = AutoModelForCausalLM.from_pretrained(output, dtype=torch.float32)
    with torch.inference_mode():
        model(torch.tensor([[1, 2]]))
    theirs = model.state_dict()
    for name, weight in find(output).items():
        found = weight.read()
        if isinstance(found, Grouped):
            np.testing.assert_array_equal(found.expand(), theirs[name].numpy(), err_msg=name)


@pytest.mark.parametrize("name", ["phi3", "gemma3"])
@pytest.mark.parametrize("bits", [4, 8])
def test_families_compute_with_the_rounded_weights(
    checkpoint: Saved, tmp_path: Path, name: str, bits: int
) -> None:
    """Matrices of 80 inputs stay plain."""
    source, output = checkpoint(name), tmp_path / "out"
    assert quantize(source, output, bits)
    exact = tmp_path / "exact"
    shutil.copytree(source, exact)
    weights = {name: as_float32(*as_plain(each.read())) for name, each in find(output).items()}
    copies = {name: torch.from_numpy(array.copy()) for name, array in weights.items()}
    save_file(copies, exact / "model.safetensors", {"format": "pt"})
    [prompt] = random_prompts([40])
    models = [load_model(each, torch.float32, native=True) for each in (output, exact, source)]
    found, expected, unrounded = ([every_row(model, prompt)] for model in models)
    of_rows = worst_difference(found, expected)  # rounded to int16
    assert of_rows < 1e-3
    assert worst_difference(unrounded, expected) > 10 * of_rows


def test_inputs_that_groups_do_not_divide(tmp_path: Path) -> None:
    """They stay as they are, and readers are told."""
    source, output = _model(tmp_path, intermediate_size=80), tmp_path / "out"
    kept = quantize(source, output, 4)
    assert kept == [f"model.layers.{layer}.mlp.down_proj" for layer in range(3)]
    config = json.loads((output / "config.json").read_text())
    assert config["quantization_config"]["ignore"] == ["lm_head", *kept]
    load_native(output, ModelConfig.from_directory(output), DType.FLOAT32, 64)
    narrow = save(llama(num_attention_heads=6, num_key_value_heads=2), tmp_path / "narrow")
    with pytest.raises(ConfigurationError, match="no matrix has inputs in groups of 32"):
        quantize(narrow, tmp_path / "none", 4)


def test_files_of_a_model(tmp_path: Path) -> None:
    source = Path(shutil.copytree(resolve_model(None), tmp_path / "model"))
    (source / "LICENSE").write_text("free")
    (source / "pytorch_model.bin").write_text("old")
    (tmp_path / "out").mkdir()  # an empty one is no hindrance
    seen: list[tuple[int, int]] = []
    quantize(source, tmp_path / "out", 4, lambda phase, done, total: seen.append((done, total)))
    assert {path.name for path in (tmp_path / "out").iterdir()} == {
        *(path.name for path in source.glob("*.json")),
        *("chat_template.jinja", "LICENSE", "model.safetensors"),
    }
    assert seen == sorted(seen)
    assert seen[-1][0] == seen[-1][1] == sum(t.nbytes for t in _tensors(source).values())
    before, after = (
        json.loads((each / "config.json").read_text()) for each in (source, tmp_path / "out")
    )
    assert after.pop("quantization_config")["quant_method"] == "compressed-tensors"
    assert before == after


def test_the_embedded_model_still_answers(tmp_path: Path) -> None:
    quantize(resolve_model(None), tmp_path / "q8", 8)
    params = SamplingParams(max_tokens=12, temperature=0.0)
    texts = []
    for model in (None, str(tmp_path / "q8")):
        with LLM(model=model) as llm:
            texts.append(llm.generate(["The capital of France is"], params)[0].outputs[0].text)
    assert texts[0] == texts[1]


def test_memory_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vmserve.models.quantize._CHUNK_WEIGHTS", 4096)
    monkeypatch.setattr("vmserve.models.quantize.num_threads", lambda: 1)
    quantize(resolve_model(None), tmp_path / "first", 4)  # imports what it needs
    tracemalloc.start()
    quantize(resolve_model(None), tmp_path / "out", 4)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 1 << 20 < 4 * 2048 * 256  # less than the embedding, the largest tensor


def test_refusals_leave_nothing_behind(tmp_path: Path) -> None:
    source, output = _model(tmp_path), tmp_path / "results" / "out"
    output.mkdir(parents=True)
    (output / "mine").write_text("precious")
    done, spoiled = tmp_path / "done", Path(shutil.copytree(source, tmp_path / "spoiled"))
    quantize(source, done, 4)
    _change(spoiled, "model.layers.2.mlp.up_proj.weight", lambda tensor: tensor.fill_(math.nan))
    gguf = write(tmp_path / "x.gguf", "llama", llama_tensors(np.random.default_rng(0)), add_llama)
    for model, to, told in [
        (source, output, "out exists and is not empty: give --output"),
        (done, output.parent / "new", r"is quantized already \(compressed-tensors chec"),
        (
            save(opt(hidden_size=64), tmp_path / "opt"),
            output.parent / "new",
            "can be quantized: it has RMSNorm",
        ),
        (gguf, output.parent / "new", r"x.gguf is a GGUF file: give a safetensors"),
        (spoiled, output.parent / "new", r"layers.2.mlp.up_proj.weight has weights that ar"),
    ]:
        with pytest.raises(ConfigurationError, match=told):
            quantize(model, to, 4)
    assert (output / "mine").read_text() == "precious"
    assert [path.name for path in output.parent.iterdir()] == ["out"]


def test_a_full_disk_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    source = _model(tmp_path)
    monkeypatch.setattr("vmserve.models.quantize.os.pwrite", full)
    with pytest.raises(OSError, match=r"No space left on device: '.*new'") as raised:
        quantize(source, tmp_path / "results" / "new", 4)
    assert raised.value.filename == str(tmp_path / "results" / "new")
    assert list((tmp_path / "results").iterdir()) == []


#: The command, which stops where it has begun to write.
STUCK = """
import signal, sys
from vmserve import __main__
from vmserve.models import quantize

def write(path, *rest):
    path.write_bytes(b"half")
    print("writing", flush=True)
    while True:
        signal.pause()

quantize._write = write
signal.signal(signal.SIGINT, signal.default_int_handler)  # whatever the tests were started with
__main__._INTERRUPT = signal.default_int_handler
__main__.main()
"""


def test_a_run_that_is_ended_leaves_nothing_and_a_killed_one_until_the_next(tmp_path: Path) -> None:
    output = tmp_path / "out"
    command = ["quantize", "embedded", "--to", "q8", "--output", str(output)]

    def begin() -> subprocess.Popen[str]:
        run = subprocess.Popen(
            [sys.executable, "-c", STUCK, *command], stdout=subprocess.PIPE, text=True
        )
        assert run.stdout is not None
        assert run.stdout.readline() == "writing\n"
        return run

    for number, status in ((signal.SIGTERM, 143), (signal.SIGINT, 130), (signal.SIGKILL, -9)):
        with begin() as run:
            run.send_signal(number)
            assert run.wait(60) == status
        assert bool(list(tmp_path.iterdir())) == (number is signal.SIGKILL)
    with begin() as run:
        with pytest.raises(ConfigurationError, match="out: another run writes it"):
            quantize(resolve_model(None), output, 8)
        [left] = tmp_path.iterdir()
        run.kill()
    (tmp_path / "elsewhere").mkdir()
    (left / "link").symlink_to(tmp_path / "elsewhere")
    quantize(resolve_model(None), output, 8)
    assert sorted(tmp_path.iterdir()) == [tmp_path / "elsewhere", output]
    assert (output / "model.safetensors").stat().st_size > len(b"half")
    umask = os.umask(0)
    os.umask(umask)
    assert output.stat().st_mode & 0o777 == 0o777 & ~umask


def test_command(tmp_path: Path) -> None:
    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "vmserve", "quantize", *arguments]
        return subprocess.run(command, capture_output=True, text=True, timeout=120)

    output = str(tmp_path / "out")
    done = run("embedded", "--to", "q4", "--output", output)
    assert (done.returncode, done.stdout) == (0, f"{output}\n")
    assert re.fullmatch(
        rf"6\.5\d* MiB are 3\.2\d* MiB: vmserve serve --model {re.escape(output)}\n", done.stderr
    )
    again = run("embedded", "--to", "q4", "--output", output)
    assert again.returncode == 2
    assert again.stderr.startswith(f"vmserve: {output} exists and is not empty")
    assert again.stderr.count("\n") == 1
