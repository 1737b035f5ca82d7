"""The decoder in C++ against ``transformers``, and against itself."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    PreTrainedConfig,
)

from tests.models.checkpoints import (
    CONTEXT,
    VOCAB,
    gpt2,
    llama,
    save,
    transformers_logits,
)
from tests.models.checkpoints import (
    NATIVE as VARIANTS,
)
from tests.models.schedule import (
    LENGTHS,
    SCHEDULE,
    SLOTS,
    mean_square,
    random_prompts,
    view_for,
    worst_difference,
)
from vmserve import _core
from vmserve.attention import PREFERRED, create_backend
from vmserve.attention.base import AttentionCall, RaggedBatch
from vmserve.attention.cpu import ISA_VARIABLE, CpuBackend, tensor_tuple
from vmserve.config import EngineConfig
from vmserve.engine.engine import LLMEngine
from vmserve.errors import ConfigurationError, UnsupportedError
from vmserve.models import LoadedModel, ModelConfig, choose_native, load_model, resolve_model
from vmserve.models.decoder import Decoder
from vmserve.models.native import MIN_POSITIONS, NativeDecoder, refusal
from vmserve.models.rotary_embedding import RotaryEmbedding
from vmserve.numbers.dtypes import DType

_SMALL: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": CONTEXT,
    "bos_token_id": 0,
    "eos_token_id": 1,
}


class _Parts:
    """What the runner hands a model: the calls of the parts of a batch."""

    class Part:
        def __init__(self, call: AttentionCall) -> None:
            self.call = call
            self.seconds = 0.0

    def __init__(self, *calls: AttentionCall) -> None:
        self.parts = [self.Part(call) for call in calls]


def _logits(
    model: LoadedModel, tokens: list[int], parts: _Parts, rows: list[int] | None = None
) -> torch.Tensor:
    network = model.network
    assert isinstance(network, NativeDecoder)
    wanted = None if rows is None else np.array(rows, dtype=np.int64)
    positions = np.zeros(len(tokens), dtype=np.int64)  # the batch has them
    attention: Any = parts
    return torch.from_numpy(network.forward(np.array(tokens), positions, attention, wanted))


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("native")
    return {name: save(config, root / name) for name, config in VARIANTS.items()}


def run_native(model: LoadedModel, prompts: list[list[int]]) -> list[torch.Tensor]:
    """As ``schedule.run_schedule`` does, with only the wanted rows of each step."""
    view = view_for(model, max(LENGTHS))
    backend = CpuBackend()
    done = [0] * len(prompts)
    rows: list[list[torch.Tensor]] = [[] for _ in prompts]
    for step in SCHEDULE:
        active = [i for i, count in enumerate(step) if count]
        batch = RaggedBatch.build(
            [SLOTS[i] for i in active], [done[i] for i in active], [step[i] for i in active]
        )
        tokens = [t for i in active for t in prompts[i][done[i] : done[i] + step[i]]]
        parts = _Parts(backend.bind(view, batch))
        logits = _logits(model, tokens, parts)
        assert parts.parts[0].seconds > 0
        for i, part in zip(active, torch.split(logits, [step[i] for i in active]), strict=True):
            rows[i].append(part)
            done[i] += step[i]
    return [torch.cat(parts) for parts in rows]


@pytest.mark.parametrize("isa", _core.cpu_isas())
@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_are_those_of_transformers(
    variant: str, isa: str, checkpoints: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(ISA_VARIABLE, isa)
    prompts = random_prompts(LENGTHS)
    expected = transformers_logits(checkpoints[variant], prompts, torch.float32)
    model = load_model(checkpoints[variant], torch.float32, native=True)
    assert isinstance(model.network, NativeDecoder)
    # torch's own sums depend on the processor: with delta layers the two are 1.001e-5 apart on one
    # without AVX-512.
    bound = 1.2e-5 if variant == "qwen3-next" else 1e-5
    assert worst_difference(run_native(model, prompts), expected) < bound


#: Those that multiply pairs of bfloat16 where the model computes in bfloat16.
WITH_PAIRS = {"avx512_bf16", "generic16"}
#: Those that multiply four int8 at a time.
WITH_BYTES = {"avx512_bf16", "avx512_vnni", "generic16"}
QUANTIZATIONS = ["none", "int8", "int8-dynamic"]
#: Elements of a row of integers that share a scale, and steps from zero to the largest of them.
GROUP_OF_INT16, STEPS_OF_INT16 = 512, 32767
GROUP_OF_INT8, STEPS_OF_INT8 = 128, 127


@pytest.mark.parametrize("variant", ["llama", "llama-odd", "qwen3", "mixtral-all"])
def test_a_bfloat16_checkpoint_loses_nothing_in_a_float32_cache(
    variant: str, checkpoints: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rounded = tmp_path / variant
    model = load_model(checkpoints[variant], torch.float32)
    assert isinstance(model.network, Decoder)
    AutoModelForCausalLM.from_pretrained(
        checkpoints[variant], dtype=torch.bfloat16
    ).save_pretrained(rounded)
    prompts = random_prompts(LENGTHS)
    expected = transformers_logits(rounded, prompts, torch.bfloat16, compute_float32=True)
    rounds_all = mean_square(transformers_logits(rounded, prompts, torch.bfloat16), expected)
    errors: dict[bool, float] = {}
    for isa in _core.cpu_isas():
        monkeypatch.setenv(ISA_VARIABLE, isa)
        native = load_model(rounded, torch.float32, native=True)
        assert worst_difference(run_native(native, prompts), expected) < 1e-5
        # A bfloat16 cache rounds keys, values and what was attended; with pairs also what enters
        # a linear layer. Nothing else is rounded.
        narrow = load_model(rounded, torch.bfloat16, native=True)
        pairs = isa in WITH_PAIRS
        assert isinstance(narrow.network, NativeDecoder)
        assert narrow.network.row_type == ("bfloat16" if pairs else "float32")
        error = mean_square(run_native(narrow, prompts), expected)
        assert 0 < error < rounds_all
        errors.setdefault(pairs, error)
        assert error == pytest.approx(errors[pairs], rel=0.3)
    assert errors[False] < errors[True]


def _quantize_weights(model: torch.nn.Module) -> None:
    """To the nearest of 255 steps for each output."""
    with torch.no_grad():
        for module in model.modules():
            weights = [module.weight] if isinstance(module, torch.nn.Linear) else []
            if type(module).__name__.endswith("Experts"):
                weights = [module.gate_up_proj, module.down_proj]
            for weight in weights:
                step = weight.abs().amax(-1, keepdim=True) / 127
                weight.copy_((weight * (1 / step)).round() * step)


def _logits_of_quantized_rows(
    directory: Path, prompts: list[list[int]], nudge: float
) -> list[torch.Tensor]:
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
    _quantize_weights(model)
    for module in model.modules():
        if isinstance(module, torch.nn.Linear):
            module.register_forward_pre_hook(quantize_rows)
    with torch.no_grad():
        return [model(torch.tensor([prompt])).logits[0] for prompt in prompts]


@pytest.mark.parametrize("variant", ["llama-odd", "mixtral"])
def test_int8_is_the_nearest_of_255_steps_for_each_output(
    variant: str, checkpoints: dict[str, Path], tmp_path: Path
) -> None:
    model = AutoModelForCausalLM.from_pretrained(checkpoints[variant], dtype=torch.float32)
    _quantize_weights(model)
    model.save_pretrained(tmp_path / "steps")
    prompts = random_prompts(LENGTHS)
    expected = transformers_logits(tmp_path / "steps", prompts, torch.float32)
    exact = load_model(checkpoints[variant], torch.float32, native=True)
    int8 = load_model(checkpoints[variant], torch.float32, native=True, quantization="int8")
    actual = run_native(int8, prompts)
    # What 16 bits for rows do is little beside what 8 bits for weights do.
    of_rows = worst_difference(actual, expected)
    of_weights = worst_difference(actual, run_native(exact, prompts))
    assert of_rows < 1e-3
    assert of_weights > 50 * of_rows
    # The embedding stays as it is, and so do routers.
    hidden = VARIANTS[variant].hidden_size
    # Three routers of eight outputs, each in one panel of the processor's width.
    width = 32 if any(isa.startswith("avx512") for isa in _core.cpu_isas()) else 16
    router = 3 * width * 64 * 4 if variant == "mixtral" else 0
    plain = VOCAB * hidden * 4 + router
    assert (exact.parameter_bytes - plain) == 4 * (int8.parameter_bytes - plain)


@pytest.mark.parametrize("isa", _core.cpu_isas())
@pytest.mark.parametrize("variant", ["llama", "llama-odd", "qwen3"])
def test_int8_dynamic_rounds_rows_as_well_and_nothing_else(
    variant: str,
    isa: str,
    checkpoints: dict[str, Path],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setenv(ISA_VARIABLE, isa)
    prompts = random_prompts(LENGTHS)
    int8 = load_model(checkpoints[variant], torch.float32, native=True, quantization="int8")
    dynamic = load_model(
        checkpoints[variant], torch.float32, native=True, quantization="int8-dynamic"
    )
    of_16_bits, actual = run_native(int8, prompts), run_native(dynamic, prompts)
    assert isinstance(int8.network, NativeDecoder)
    assert isinstance(dynamic.network, NativeDecoder)
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
    references = [
        _logits_of_quantized_rows(checkpoints[variant], prompts, nudge)
        for nudge in (0, 1e-5, -1e-5)
    ]
    of_rows = mean_square(actual, of_16_bits)
    for ours, *theirs in zip(actual, *references, strict=True):
        assert min(mean_square([ours], [each]) for each in theirs) < 1e-8 * of_rows
    exact = load_model(checkpoints[variant], torch.float32, native=True)
    assert 0 < of_rows < 2 * mean_square(of_16_bits, run_native(exact, prompts))


def _with_no_layers(config: PreTrainedConfig, directory: Path, dtype: torch.dtype) -> Path:
    """Layers add nothing: logits are the head's product with the normalised embeddings."""
    save(config, directory)
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
        # One large element: only its own group of the depth may be rounded more coarsely.
        model.model.embed_tokens.weight[:, 3] *= 300
        model.model.embed_tokens.weight[5] = 0
    model.to(dtype).save_pretrained(directory)
    return directory


#: Less than a chunk; a chunk or two, in part; whole groups, and a part of one.
@pytest.mark.parametrize("depth", [6, 14, 1030])
@pytest.mark.parametrize("isa", _core.cpu_isas())
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("quantization", QUANTIZATIONS)
def test_a_product_is_within_its_bound_of_float64(
    quantization: str,
    dtype: torch.dtype,
    isa: str,
    depth: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(ISA_VARIABLE, isa)
    sizes = {"hidden_size": depth, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = LlamaConfig(**{**_SMALL, **sizes}, head_dim=16)
    directory = _with_no_layers(config, tmp_path, dtype)
    model = load_model(directory, dtype, native=True, quantization=quantization)
    prompts = [[2, 5, *range(7, 17)]]
    (actual,) = every_row(model, prompts[0])
    stored = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    weights = stored.lm_head.weight.detach()
    if quantization != "none":
        step = weights.abs().amax(1, keepdim=True) / 127
        weights = (weights * (1 / step)).round() * step
    weights = weights.double()
    rows = stored.model.embed_tokens.weight.detach().double()[prompts[0]]
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


@pytest.mark.parametrize("variant", ["llama", "gemma3-odd"])
@pytest.mark.parametrize("quantization", QUANTIZATIONS)
def test_what_is_no_number_stays_none(quantization: str, variant: str, tmp_path: Path) -> None:
    save(VARIANTS[variant], tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    with torch.no_grad():
        model.model.embed_tokens.weight[9, 5] = float("nan")
        model.model.embed_tokens.weight[8, 5] = float("inf")
    model.save_pretrained(tmp_path)
    native = load_model(tmp_path, torch.float32, native=True, quantization=quantization)
    batch = RaggedBatch.build([0, 1], [0, 0], [2, 1])
    for broken in (8, 9):
        parts = _Parts(CpuBackend().bind(view_for(native, CONTEXT), batch))
        tokens = [2, 3, broken]
        logits = _logits(native, tokens, parts)
        assert bool(logits[:2].isfinite().all())
        assert bool(logits[2].isnan().all())


def every_row(model: LoadedModel, tokens: list[int]) -> list[torch.Tensor]:
    view = view_for(model, CONTEXT)
    batch = RaggedBatch.build([0], [0], [len(tokens)])
    parts = _Parts(CpuBackend().bind(view, batch))
    return [_logits(model, tokens, parts)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_rows_of_the_embedding_stay_in_their_file(dtype: torch.dtype, tmp_path: Path) -> None:
    """Nothing of it is mapped beside the packed head, and a file that is cut ends no process."""
    directory = _with_no_layers(LlamaConfig(**_SMALL, tie_word_embeddings=True), tmp_path, dtype)
    path = directory / "model.safetensors"
    model = load_model(directory, torch.float32, native=True)
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


def test_rotations_are_made_as_positions_come(checkpoints: dict[str, Path]) -> None:
    model = load_model(checkpoints["llama"], torch.float32, native=True)
    network = model.network
    assert isinstance(network, NativeDecoder)
    assert network._core.num_positions == 0
    every_row(model, [1, 2, 3])
    assert network._core.num_positions == MIN_POSITIONS
    few = RotaryEmbedding(model.config.network.positions, CONTEXT, torch.device("cpu"))
    short = few.at(torch.arange(2), torch.float32)
    network._core.set_rotations([(tensor_tuple(short.cos), tensor_tuple(short.signed_sin))])
    call = CpuBackend().bind(view_for(model, CONTEXT), RaggedBatch.build([0], [0], [3]))
    with pytest.raises(ValueError, match="position 2 has no rotation: there are 2"):
        network._core.forward([1, 2, 3], [call.batch], [2])
    wide = few.at(torch.arange(2), torch.bfloat16)
    with pytest.raises(ValueError, match="in the KV cache's dtype"):
        network._core.set_rotations([(tensor_tuple(wide.cos), tensor_tuple(wide.signed_sin))])


def _forward(model: LoadedModel, lengths: list[int], threads: int) -> list[torch.Tensor]:
    """The last rows' logits of prompts that are computed at once, in the order of the prompts."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        view = view_for(model, CONTEXT)
        batch = RaggedBatch.build(list(range(len(lengths))), [0] * len(lengths), lengths)
        tokens = [token for prompt in random_prompts(lengths)[: len(lengths)] for token in prompt]
        ends = np.cumsum(lengths) - 1
        return list(_logits(model, tokens, _Parts(CpuBackend().bind(view, batch)), ends.tolist()))
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("isa", _core.cpu_isas())
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("variant", ["qwen3-next", "qwen3.5"])
def test_bits_do_not_depend_on_how_a_prompt_is_cut(
    variant: str,
    dtype: torch.dtype,
    isa: str,
    checkpoints: dict[str, Path],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(ISA_VARIABLE, isa)
    model = load_model(checkpoints[variant], dtype, native=True)
    prompts = random_prompts(LENGTHS)
    cut = run_native(model, prompts)
    for tokens, expected in zip(prompts, cut, strict=True):
        view = view_for(model, len(tokens))
        batch = RaggedBatch.build([SLOTS[0]], [0], [len(tokens)])
        whole = _logits(model, tokens, _Parts(CpuBackend().bind(view, batch)))
        assert torch.equal(whole, expected)


@pytest.mark.parametrize("variant", ["llama-odd", "qwen3-moe"])
@pytest.mark.parametrize("isa", _core.cpu_isas())
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("quantization", QUANTIZATIONS)
def test_a_row_has_the_same_bits_in_every_batch(
    variant: str,
    quantization: str,
    dtype: torch.dtype,
    isa: str,
    checkpoints: dict[str, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(ISA_VARIABLE, isa)
    path = checkpoints[variant]
    if dtype == torch.bfloat16:
        AutoModelForCausalLM.from_pretrained(path, dtype=dtype).save_pretrained(tmp_path)
        path = tmp_path
    model = load_model(path, dtype, native=True, quantization=quantization)
    (alone,) = _forward(model, [17], threads=1)
    # One row, a few, and so many that weights are widened once for all of them.
    for others in ([1], [3, 2], [5, 40, 1, 30]):
        for threads in (1, 3):
            assert torch.equal(_forward(model, [17, *others], threads)[0], alone)


@pytest.mark.parametrize("variant", ["llama-odd", "qwen3-moe"])
@pytest.mark.parametrize("isa", _core.cpu_isas())
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("quantization", QUANTIZATIONS)
def test_a_row_has_the_same_bits_beside_any_number_of_rows(
    variant: str,
    quantization: str,
    dtype: torch.dtype,
    isa: str,
    checkpoints: dict[str, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(ISA_VARIABLE, isa)
    AutoModelForCausalLM.from_pretrained(checkpoints[variant], dtype=dtype).save_pretrained(
        tmp_path
    )
    model = load_model(tmp_path, dtype, native=True, quantization=quantization)
    (tokens,) = random_prompts([40])[:1]
    (every,) = every_row(model, tokens)
    for count in range(1, 40):
        (rows,) = every_row(model, tokens[:count])
        assert torch.equal(rows, every[:count]), count


def test_rows_can_be_asked_for_in_any_order_and_not_at_all(checkpoints: dict[str, Path]) -> None:
    model = load_model(checkpoints["llama"], torch.float32, native=True)
    view = view_for(model, CONTEXT)
    batch = RaggedBatch.build([0, 1], [0, 0], [4, 5])
    tokens = list(range(9))

    def logits(rows: list[int] | None) -> torch.Tensor:
        parts = _Parts(CpuBackend().bind(view, batch))
        return _logits(model, tokens, parts, rows)

    every = logits(None)
    assert torch.equal(logits([8, 0, 3]), every[[8, 0, 3]])
    assert logits([]).shape == (0, VOCAB)


def test_what_cannot_be_computed_is_refused(checkpoints: dict[str, Path]) -> None:
    model = load_model(checkpoints["llama"], torch.float32, native=True)
    view = view_for(model, CONTEXT)
    batch = RaggedBatch.build([0], [0], [2])

    def forward(tokens: list[int], rows: list[int]) -> None:
        parts = _Parts(CpuBackend().bind(view, batch))
        _logits(model, tokens, parts, rows)

    with pytest.raises(ValueError, match=rf"token id {VOCAB} is outside 0 \.\. {VOCAB - 1}"):
        forward([1, VOCAB], [1])
    with pytest.raises(ValueError, match="token id -1 is outside"):
        forward([-1, 1], [1])
    with pytest.raises(ValueError, match="row 2 of 2 has no logits"):
        forward([1, 1], [2])
    parts = _Parts(CpuBackend().bind(view, batch))
    with pytest.raises(ValueError, match="3 token ids for batches of 2 tokens"):
        _logits(model, [1, 1, 1], parts)
    stock = _Parts(create_backend("sdpa").bind(view, batch))
    with pytest.raises(UnsupportedError, match="cpu backend alone"):
        _logits(model, [1, 1], stock)


def test_refusals_name_what_is_missing(tmp_path: Path) -> None:
    def network(config: PreTrainedConfig) -> object:
        directory = tmp_path / f"{len(list(tmp_path.iterdir()))}"
        return ModelConfig.from_directory(save(config, directory)).network

    assert refusal(network(LlamaConfig(**_SMALL)), DType.FLOAT32) is None
    assert "float16" in (refusal(network(LlamaConfig(**_SMALL)), DType.FLOAT16) or "")
    assert "multiple of 8" in (refusal(network(llama()), DType.FLOAT32) or "")
    biased = LlamaConfig(**_SMALL, mlp_bias=True)
    assert "biases" in (refusal(network(biased), DType.FLOAT32) or "")
    assert "RMSNorm" in (refusal(network(gpt2(n_embd=64)), DType.FLOAT32) or "")
    odd = LlamaConfig(**_SMALL, hidden_act="gelu")
    assert "activation gelu" in (refusal(network(odd), DType.FLOAT32) or "")


def test_options_choose(checkpoints: dict[str, Path], tmp_path: Path) -> None:
    model = ModelConfig.from_directory(checkpoints["llama"])
    assert choose_native("auto", "none", "auto", model) == DType.FLOAT32
    assert choose_native("native", "int8", "bfloat16", model) == DType.BFLOAT16
    assert choose_native("torch", "none", "float32", model) is None
    assert choose_native("auto", "none", "float16", model) is None
    for quantization in ("int8", "int8-dynamic"):
        told = rf"{quantization} cannot .* needs --linear-backend native"
        with pytest.raises(ConfigurationError, match=told):
            choose_native("torch", quantization, "auto", model)
    other = ModelConfig.from_directory(save(gpt2(n_embd=64), tmp_path / "gpt2"))
    with pytest.raises(ConfigurationError, match="native cannot serve this model: it has RMSNorm"):
        choose_native("native", "none", "auto", other)
    assert choose_native("auto", "none", "auto", other) is None


def test_the_engine_runs_it_unless_other_kernels_are_asked_for() -> None:
    def network(**options: Any) -> object:
        return LLMEngine(EngineConfig(max_num_seqs=2, **options)).runner.model.network

    assert isinstance(network(), NativeDecoder)
    assert isinstance(network(attention_backend="sdpa"), Decoder)
    assert isinstance(network(linear_backend="torch"), Decoder)
    dynamic = network(quantization="int8-dynamic")
    assert isinstance(dynamic, NativeDecoder)
    assert dynamic.row_type == ("int8" if _core.cpu_isas()[0] in WITH_BYTES else "int16")
    unknown = "'int4' is not one of none, int8, int8-dynamic"
    with pytest.raises(ConfigurationError, match=f"quantization: {unknown}"):
        EngineConfig(quantization="int4")
    with pytest.raises(ValueError, match=f"quantization {unknown}"):
        load_model(resolve_model(EngineConfig().model), "float32", native=True, quantization="int4")


def test_other_kernels_chosen_for_attention_end_what_was_asked_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(PREFERRED, "cpu", ("sdpa", "reference"))
    for options in ({"linear_backend": "native"}, {"quantization": "int8"}):
        config = EngineConfig(max_num_seqs=2, **options)
        with pytest.raises(ConfigurationError, match="auto is reference and sdpa here: use --"):
            LLMEngine(config)
    assert isinstance(LLMEngine(EngineConfig(max_num_seqs=2)).runner.model.network, Decoder)


def test_only_chosen_experts_are_read_and_each_once_a_step(checkpoints: dict[str, Path]) -> None:
    model = load_model(checkpoints["qwen3-moe"], torch.float32, native=True)
    network = model.network
    assert isinstance(network, NativeDecoder)
    layers, count, chosen = 2, 9, 4  # one of three layers has an MLP
    _forward(model, [1], threads=1)
    assert (network.expert_reads, network.expert_rows) == (layers * chosen, layers * chosen)
    _forward(model, [40, 30], threads=2)
    # The last layer computes only the rows whose logits are wanted.
    assert network.expert_rows - layers * chosen == 72 * chosen
    assert network.expert_reads - layers * chosen <= count + 2 * chosen
    idle = (count - chosen) * 3 * 64 * 48 * 4
    assert network.packed_bytes - network.row_bytes == layers * idle


def test_of_equal_experts_the_first_are_chosen(tmp_path: Path) -> None:
    """A router of zeros says nothing: those that are never chosen may be anything."""
    save(VARIANTS["mixtral"], tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    found = []
    for last in (1.0, 2.0):
        with torch.no_grad():
            for layer in model.model.layers:
                layer.mlp.gate.weight.zero_()
                layer.mlp.experts.down_proj[2:] = last
        model.save_pretrained(tmp_path)
        found += every_row(load_model(tmp_path, torch.float32, native=True), [5, 6, 7])
    assert torch.equal(*found)


def test_layers_that_only_draft_are_left_out(tmp_path: Path) -> None:
    directory = save(VARIANTS["deepseek-v3"], tmp_path)
    path = directory / "model.safetensors"
    tensors = load_file(path)
    extra = {
        name.replace("layers.2.", "layers.3."): tensor.clone()
        for name, tensor in tensors.items()
        if ".layers.2." in name
    }
    save_file({**tensors, **extra}, path, {"format": "pt"})
    load_model(directory, torch.float32, native=True)
