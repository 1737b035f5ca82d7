"""The decoder in C++ against ``transformers``, and against itself."""

from __future__ import annotations

import os
from collections.abc import Callable
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedConfig

from tests.models.checkpoints import (
    CONTEXT,
    NATIVE,
    VOCAB,
    Saved,
    change_tensors,
    llama,
    save,
)
from tests.models.schedule import (
    PROMPTS,
    SLOTS,
    compute,
    every_row,
    mean_square,
    parts_of,
    random_prompts,
    run_schedule,
    transformers_logits,
    view_for,
    worst_difference,
)
from vmserve import _core
from vmserve.attention import create_backend
from vmserve.attention.base import RaggedBatch
from vmserve.attention.cpu import ISA_VARIABLE, CpuBackend, tensor_tuple
from vmserve.errors import UnsupportedError
from vmserve.models import LoadedModel, load_model
from vmserve.models.native import MIN_POSITIONS, NativeDecoder
from vmserve.models.rotary_embedding import RotaryEmbedding

#: Those that multiply pairs of bfloat16 where the model computes in bfloat16.
WITH_PAIRS = {"avx512_bf16", "generic16"}
#: Those that multiply four int8 at a time.
WITH_BYTES = {"avx512_bf16", "avx512_vnni", "generic16"}
QUANTIZATIONS = ["none", "int8", "int8-dynamic"]
DTYPES = [torch.float32, torch.bfloat16]
#: Elements of a row of integers that share a scale, and steps from zero to the largest of them.
GROUP_OF_INT16, STEPS_OF_INT16 = 512, 32767
GROUP_OF_INT8, STEPS_OF_INT8 = 128, 127


def load(path: Path, dtype: torch.dtype = torch.float32, quantization: str = "none") -> LoadedModel:
    model = load_model(path, dtype, native=True, quantization=quantization)
    assert isinstance(model.network, NativeDecoder)
    return model


def resaved(
    path: Path,
    to: Path,
    dtype: torch.dtype = torch.float32,
    change: Callable[[Any], object] = lambda model: None,
) -> Path:
    """The checkpoint with other weights, or in another type."""
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    with torch.no_grad():
        change(model)
    model.to(dtype).save_pretrained(to)
    return to


@pytest.mark.parametrize("name", NATIVE)
def test_logits_are_those_of_transformers(name: str, isa: str, checkpoint: Saved) -> None:
    # torch's own sums depend on the processor: with delta layers the two are 1.001e-5 apart on one
    # without AVX-512.
    bound = 1.2e-5 if name == "qwen3-next" else 1e-5
    found = run_schedule(load(checkpoint(name)))
    assert worst_difference(found, transformers_logits(checkpoint(name))) < bound


@pytest.mark.parametrize("name", ["llama", "llama-odd", "qwen3", "mixtral-all"])
def test_a_bfloat16_checkpoint_loses_nothing_in_a_float32_cache(
    name: str, checkpoint: Saved, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = resaved(checkpoint(name), tmp_path, torch.bfloat16)
    expected = transformers_logits(path, torch.bfloat16, compute_float32=True)
    rounds_all = mean_square(transformers_logits(path, torch.bfloat16), expected)
    errors: dict[bool, float] = {}
    for isa in _core.cpu_isas():
        monkeypatch.setenv(ISA_VARIABLE, isa)
        assert worst_difference(run_schedule(load(path)), expected) < 1e-5
        # A bfloat16 cache rounds keys, values and what was attended; with pairs also what enters
        # a linear layer. Nothing else is rounded.
        narrow = load(path, torch.bfloat16)
        pairs = isa in WITH_PAIRS
        assert narrow.network.row_type == ("bfloat16" if pairs else "float32")
        error = mean_square(run_schedule(narrow), expected)
        assert 0 < error < rounds_all
        errors.setdefault(pairs, error)
        assert error == pytest.approx(errors[pairs], rel=0.3)
    assert errors[False] < errors[True]


def in_steps(weight: torch.Tensor) -> torch.Tensor:
    """The nearest of 255 steps for each output."""
    step = weight.abs().amax(-1, keepdim=True) / 127
    return (weight * (1 / step)).round() * step


def _quantize_weights(model: torch.nn.Module) -> None:
    for module in model.modules():
        weights = [module.weight] if isinstance(module, torch.nn.Linear) else []
        if type(module).__name__.endswith("Experts"):
            weights = [module.gate_up_proj, module.down_proj]
        for weight in weights:
            weight.copy_(in_steps(weight))


def _logits_of_quantized_rows(directory: Path, nudge: float) -> list[torch.Tensor]:
    """What enters a linear layer goes to the nearest of 255 steps for each row and group.

    ``nudge``: added before, in steps.
    """

    def quantize_rows(_: torch.nn.Module, inputs: tuple[torch.Tensor]) -> tuple[torch.Tensor]:
        groups = []
        for group in inputs[0].split(GROUP_OF_INT8, dim=-1):
            step = group.abs().amax(-1, keepdim=True) / STEPS_OF_INT8
            groups.append((group / step + nudge).round() * step)
        return (torch.cat(groups, dim=-1),)

    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    with torch.no_grad():
        _quantize_weights(model)
        for module in model.modules():
            if isinstance(module, torch.nn.Linear):
                module.register_forward_pre_hook(quantize_rows)
        return [model(torch.tensor([prompt])).logits[0] for prompt in PROMPTS]


@pytest.mark.parametrize("name", ["llama-odd", "mixtral"])
def test_int8_is_the_nearest_of_255_steps_for_each_output(
    name: str, checkpoint: Saved, tmp_path: Path
) -> None:
    path = checkpoint(name)
    expected = transformers_logits(resaved(path, tmp_path, change=_quantize_weights))
    exact, int8 = load(path), load(path, quantization="int8")
    actual = run_schedule(int8)
    # What 16 bits for rows do is little beside what 8 bits for weights do.
    of_rows = worst_difference(actual, expected)
    of_weights = worst_difference(actual, run_schedule(exact))
    assert of_rows < 1e-3
    assert of_weights > 50 * of_rows
    # The embedding stays as it is, and so do routers: three of eight outputs, each in one panel of
    # the processor's width.
    width = 32 if any(isa.startswith("avx512") for isa in _core.cpu_isas()) else 16
    router = 3 * width * 64 * 4 if name == "mixtral" else 0
    plain = VOCAB * NATIVE[name].hidden_size * 4 + router
    assert (exact.parameter_bytes - plain) == 4 * (int8.parameter_bytes - plain)


@pytest.mark.parametrize("name", ["llama", "llama-odd", "qwen3"])
def test_int8_dynamic_rounds_rows_as_well_and_nothing_else(
    name: str, isa: str, checkpoint: Saved, caplog: pytest.LogCaptureFixture
) -> None:
    exact, int8, dynamic = (load(checkpoint(name), quantization=each) for each in QUANTIZATIONS)
    of_16_bits, actual = run_schedule(int8), run_schedule(dynamic)
    assert int8.network.row_type == "int16"
    assert dynamic.parameter_bytes == int8.parameter_bytes
    if isa not in WITH_BYTES:
        assert dynamic.network.row_type == "int16"
        assert "no AVX512_VNNI: quantization int8-dynamic is as int8" in caplog.text
        assert all(torch.equal(a, b) for a, b in zip(actual, of_16_bits, strict=True))
        return
    assert dynamic.network.row_type == "int8"
    assert not caplog.records
    # An element may lie so near the middle of two steps that the last bit of 127 steps in float32
    # decides, and all later tokens of the prompt tell. One of these references has it as we do.
    references = [_logits_of_quantized_rows(checkpoint(name), each) for each in (0, 1e-5, -1e-5)]
    of_rows = mean_square(actual, of_16_bits)
    for ours, *theirs in zip(actual, *references, strict=True):
        assert min(mean_square([ours], [each]) for each in theirs) < 1e-8 * of_rows
    assert 0 < of_rows < 2 * mean_square(of_16_bits, run_schedule(exact))


def _with_no_layers(config: PreTrainedConfig, directory: Path, dtype: torch.dtype) -> Path:
    """Layers add nothing: logits are the head's product with the normalised embeddings."""

    def change(model: Any) -> None:
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
        # One large element: only its own group of the depth may be rounded more coarsely.
        model.model.embed_tokens.weight[:, 3] *= 300
        model.model.embed_tokens.weight[5] = 0

    return resaved(save(config, directory), directory, dtype, change)


#: Less than a chunk; a chunk or two, in part; whole groups, and a part of one.
@pytest.mark.parametrize("depth", [6, 14, 1030])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("quantization", QUANTIZATIONS)
def test_a_product_is_within_its_bound_of_float64(
    quantization: str, dtype: torch.dtype, isa: str, depth: int, tmp_path: Path
) -> None:
    config = llama(hidden_size=depth, num_hidden_layers=1, num_attention_heads=2, head_dim=16)
    directory = _with_no_layers(config, tmp_path, dtype)
    prompt = [2, 5, *range(7, 17)]
    actual = every_row(load(directory, dtype, quantization), prompt)
    stored = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    weights = stored.lm_head.weight.detach()
    if quantization != "none":
        weights = in_steps(weights)
    weights = weights.double()
    rows = stored.model.embed_tokens.weight.detach().double()[prompt]
    factors = (rows.square().mean(-1, keepdim=True) + config.rms_norm_eps).rsqrt()
    rows = rows * factors * stored.model.norm.weight.detach().double()
    expected = rows @ weights.T
    # Products and sums in float32: each of `depth` additions rounds, and so do the norm and scales.
    bound = (depth + 16) * 2.0**-24 * (rows.abs() @ weights.abs().T)
    if quantization != "none":
        # And each element is within half a step of the row's group.
        size, steps = GROUP_OF_INT16, STEPS_OF_INT16
        if quantization == "int8-dynamic" and isa in WITH_BYTES:
            size, steps = GROUP_OF_INT8, STEPS_OF_INT8
        bound = (16 + depth // size) * 2.0**-24 * (rows.abs() @ weights.abs().T)
        for first in range(0, depth, size):
            group = rows[:, first : first + size].abs()
            half = group.amax(-1, keepdim=True) / steps / 2
            bound += half * weights[:, first : first + size].abs().sum(1)
    elif dtype == torch.bfloat16 and isa in WITH_PAIRS:
        bound += 2.0**-8 * (rows.abs() @ weights.abs().T)
    assert bool(((actual.double() - expected).abs() <= bound).all())
    assert bool((actual[1] == 0).all())


@pytest.mark.parametrize("name", ["llama", "gemma3-odd"])
@pytest.mark.parametrize("quantization", QUANTIZATIONS)
def test_what_is_no_number_stays_none(
    quantization: str, name: str, checkpoint: Saved, tmp_path: Path
) -> None:
    def change(model: Any) -> None:
        model.model.embed_tokens.weight[9, 5] = float("nan")
        model.model.embed_tokens.weight[8, 5] = float("inf")

    native = load(resaved(checkpoint(name), tmp_path, change=change), quantization=quantization)
    for broken in (8, 9):
        logits = every_row(native, [2, 3], [broken])
        assert bool(logits[:2].isfinite().all())
        assert bool(logits[2].isnan().all())


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float16])
def test_rows_of_the_embedding_stay_in_their_file(dtype: torch.dtype, tmp_path: Path) -> None:
    """Nothing of it is mapped beside the packed head, and a file that is cut ends no process."""
    _with_no_layers(llama(hidden_size=64, tie_word_embeddings=True), tmp_path, dtype)
    path = tmp_path / "model.safetensors"
    model = load(tmp_path)
    every_row(model, [3, 50, 7])
    assert _resident_bytes(path) == 0
    os.truncate(path, 0)
    with pytest.raises((RuntimeError, OSError), match="the model's file"):
        every_row(model, [3])


def _resident_bytes(path: Path) -> int:
    """Bytes of a file in this process's memory."""
    total, counted = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        first, _, rest = line.partition(" ")
        if not first.endswith(":"):
            counted = rest.endswith(str(path))
        elif counted and first == "Rss:":
            total += int(rest.split()[0]) * 1024
    return total


def test_rotations_are_made_as_positions_come(checkpoint: Saved) -> None:
    model = load(checkpoint("llama"))
    core = model.network._core
    assert core.num_positions == 0
    every_row(model, [1, 2, 3])
    assert core.num_positions == MIN_POSITIONS
    few = RotaryEmbedding(model.config.network.positions, CONTEXT, torch.device("cpu"))
    short, wide = (few.at(torch.arange(2), dtype) for dtype in DTYPES)
    core.set_rotations([(tensor_tuple(short.cos), tensor_tuple(short.signed_sin))])
    call = CpuBackend().bind(view_for(model), RaggedBatch.build([0], [0], [3]))
    with pytest.raises(ValueError, match="position 2 has no rotation: there are 2"):
        core.forward([1, 2, 3], [call.batch], [2])
    with pytest.raises(ValueError, match="in the KV cache's dtype"):
        core.set_rotations([(tensor_tuple(wide.cos), tensor_tuple(wide.signed_sin))])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["qwen3-next", "qwen3.5"])
def test_bits_do_not_depend_on_how_a_prompt_is_cut(
    name: str, dtype: torch.dtype, isa: str, checkpoint: Saved
) -> None:
    model = load(checkpoint(name), dtype)
    for tokens, expected in zip(PROMPTS, run_schedule(model), strict=True):
        whole = compute(model.network, view_for(model, len(tokens)), [tokens], slots=[SLOTS[0]])
        assert torch.equal(whole, expected)


def last_rows(model: LoadedModel, lengths: list[int], threads: int) -> torch.Tensor:
    """Of prompts that are computed at once."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        ends = [end - 1 for end in accumulate(lengths)]
        return every_row(model, *random_prompts(lengths), rows=ends)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("name", ["llama-odd", "qwen3-moe"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("quantization", QUANTIZATIONS)
def test_a_row_has_the_same_bits_in_every_batch(
    name: str, quantization: str, dtype: torch.dtype, isa: str, checkpoint: Saved, tmp_path: Path
) -> None:
    model = load(resaved(checkpoint(name), tmp_path, dtype), dtype, quantization)
    [alone] = last_rows(model, [17], threads=1)
    # One row, a few, and so many that weights are widened once for all of them.
    for others in ([1], [3, 2], [5, 40, 1, 30]):
        for threads in (1, 3):
            assert torch.equal(last_rows(model, [17, *others], threads)[0], alone)
    [tokens] = random_prompts([40])
    every = every_row(model, tokens)
    for count in range(1, 40):
        assert torch.equal(every_row(model, tokens[:count]), every[:count]), count


def test_rows_can_be_asked_for_in_any_order_and_not_at_all(checkpoint: Saved) -> None:
    model = load(checkpoint("llama"))
    prompts = range(4), range(4, 9)
    every = every_row(model, *prompts)
    assert torch.equal(every_row(model, *prompts, rows=[8, 0, 3]), every[[8, 0, 3]])
    assert every_row(model, *prompts, rows=[]).shape == (0, VOCAB)


def test_what_cannot_be_computed_is_refused(checkpoint: Saved) -> None:
    model = load(checkpoint("llama"))
    for tokens, row, told in [
        ([1, VOCAB], 1, rf"token id {VOCAB} is outside 0 \.\. {VOCAB - 1}"),
        ([-1, 1], 1, "token id -1 is outside"),
        ([1, 1], 2, "row 2 of 2 has no logits"),
    ]:
        with pytest.raises(ValueError, match=told):
            every_row(model, tokens, rows=[row])
    batch = RaggedBatch.build([0], [0], [2])
    stock, own = (
        each.bind(view_for(model), batch) for each in (create_backend("sdpa"), CpuBackend())
    )
    with pytest.raises(ValueError, match="3 token ids for batches of 2 tokens"):
        model.network.forward([1, 1, 1], [0, 0, 0], parts_of(own), None)
    with pytest.raises(UnsupportedError, match="cpu backend alone"):
        model.network.forward([1, 1], [0, 0], parts_of(stock), None)


def test_only_chosen_experts_are_read_and_each_once_a_step(checkpoint: Saved) -> None:
    model = load(checkpoint("qwen3-moe"))
    network = model.network
    layers, count, chosen = 2, 9, 4  # one of three layers has an MLP
    last_rows(model, [1], threads=1)
    assert (network.expert_reads, network.expert_rows) == (layers * chosen, layers * chosen)
    last_rows(model, [40, 30], threads=2)
    # The last layer computes only the rows whose logits are wanted.
    assert network.expert_rows - layers * chosen == 72 * chosen
    assert network.expert_reads - layers * chosen <= count + 2 * chosen
    idle = (count - chosen) * 3 * 64 * 48 * 4
    assert network.packed_bytes - network.row_bytes == layers * idle


def test_of_equal_experts_the_first_are_chosen(checkpoint: Saved, tmp_path: Path) -> None:
    """A router of zeros says nothing: those that are never chosen may be anything."""

    def change(model: Any, last: float) -> None:
        for layer in model.model.layers:
            layer.mlp.gate.weight.zero_()
            layer.mlp.experts.down_proj[2:] = last

    found = []
    for last in (1.0, 2.0):
        resaved(
            checkpoint("mixtral"), tmp_path, change=lambda model, last=last: change(model, last)
        )
        found.append(every_row(load(tmp_path), [5, 6, 7]))
    assert torch.equal(*found)


def test_layers_that_only_draft_are_left_out(copied: Saved) -> None:
    def add(tensors: dict[str, torch.Tensor]) -> None:
        last = {name: tensor for name, tensor in tensors.items() if ".layers.2." in name}
        for name, tensor in last.items():
            tensors[name.replace("layers.2.", "layers.3.")] = tensor.clone()

    load(change_tensors(copied("deepseek-v3"), add))
