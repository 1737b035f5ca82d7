"""Models that the decoder does not know: served exactly, or refused at start with the reason."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, PreTrainedConfig

from tests.models.checkpoints import CONTEXT, FOREIGN, VOCAB, save, transformers_logits
from tests.models.schedule import (
    LENGTHS,
    mean_square,
    random_prompts,
    run_schedule,
    view_for,
    worst_difference,
)
from vmserve.attention import BACKENDS, check_backend, create_backend
from vmserve.attention.base import LayerAttention, RaggedBatch
from vmserve.errors import ConfigurationError, UnsupportedError
from vmserve.models import LoadedModel, ModelConfig, load_model
from vmserve.models.foreign import ForeignConfig, inspection, rehearsal
from vmserve.numbers.dtypes import DType

#: What there is to serve a model with; softcaps need a backend that has them.
BACKEND = {name: "cpu" if name == "vaultgemma" else "sdpa" for name in FOREIGN}
SERVABLE = [name for name in FOREIGN if BACKEND[name] in BACKENDS]


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """``written(name)``: the checkpoint of one of ``FOREIGN``."""
    directories: dict[str, Path] = {}

    def get(name: str) -> Path:
        if name not in directories:
            directories[name] = save(FOREIGN[name], tmp_path_factory.mktemp(name))
        return directories[name]

    return get


@pytest.mark.parametrize("name", SERVABLE)
def test_float32(name: str, written: Callable[[str], Path]) -> None:
    prompts = random_prompts(LENGTHS)
    expected = transformers_logits(written(name), prompts, torch.float32)
    model = load_model(written(name), torch.float32)
    assert worst_difference(run_schedule(model, prompts, BACKEND[name]), expected) < 1e-5


@pytest.mark.parametrize("name", [name for name in SERVABLE if name != "olmoe"])
def test_bfloat16(name: str, written: Callable[[str], Path]) -> None:
    prompts = random_prompts(LENGTHS)
    exact = transformers_logits(written(name), prompts, torch.bfloat16, compute_float32=True)
    expected = transformers_logits(written(name), prompts, torch.bfloat16)
    model = load_model(written(name), torch.bfloat16)
    actual = run_schedule(model, prompts, BACKEND[name])
    # VaultGemma has no attention but "eager" in transformers, which rounds every score.
    if BACKEND[name] != "cpu":
        assert worst_difference(actual, expected) < (2**-3 if "vaultgemma" in name else 2**-5)
    assert mean_square(actual, exact) < 1.25 * mean_square(expected, exact)


def test_a_softcap_is_refused_when_backend_and_model_meet(written: Callable[[str], Path]) -> None:
    config = ModelConfig.from_directory(written("vaultgemma"))
    assert [layer.softcap for layer in config.attention] == [50.0] * 3
    with pytest.raises(UnsupportedError, match=r"3 layers .* scores at 50, which the sdpa backend"):
        check_backend(create_backend("sdpa"), config.attention)
    check_backend(create_backend("sdpa"), [LayerAttention(0, 0.5, window=3)])


def test_what_attention_is_asked_for(written: Callable[[str], Path]) -> None:
    config = ModelConfig.from_directory(written("vaultgemma-no-cap"))
    scale = 20**-0.5
    assert config.attention == (
        LayerAttention(0, scale, window=7),
        LayerAttention(1, scale),
        LayerAttention(2, scale, window=7),
    )
    assert (config.kv_heads, config.head_dim, config.vocab_size) == (2, 12, VOCAB)
    assert config.max_position_embeddings == CONTEXT
    assert (config.eos_token_ids, config.bos_token_id) == ((1,), 0)
    assert config.dtype is DType.FLOAT32
    # Tied embeddings count once.
    stored = load_file(written("vaultgemma-no-cap") / "model.safetensors")
    assert config.num_weights == sum(tensor.numel() for tensor in stored.values())
    granite = ModelConfig.from_directory(written("granite"))
    assert {layer.scale for layer in granite.attention} == {0.3}


def test_parameters_are_counted_in_their_type(written: Callable[[str], Path]) -> None:
    seen: list[tuple[str, int, int]] = []
    model = load_model(
        written("olmo2"),
        torch.bfloat16,
        progress=lambda phase, done, total: seen.append((phase, done, total)),
    )
    assert model.parameter_bytes == 2 * model.config.num_weights
    assert seen == [("loading weights", model.parameter_bytes, model.parameter_bytes)]


def test_only_the_rows_asked_for(written: Callable[[str], Path]) -> None:
    model = load_model(written("phi"), torch.float32)
    batch = RaggedBatch.build([2, 0], [0, 0], [9, 6])
    tokens = torch.tensor(random_prompts([15])[0])
    results = []
    for rows in (None, torch.tensor([14, 8, 8]), torch.tensor([], dtype=torch.int64)):
        call = create_backend("sdpa").bind(view_for(model, 9), batch)
        results.append(model.network.forward(tokens, torch.from_numpy(batch.positions), call, rows))
    assert results[2].shape == (0, VOCAB)
    assert results[0].dtype == torch.float32
    torch.testing.assert_close(results[1], results[0][[14, 8, 8]], rtol=1e-5, atol=1e-5)


# -- what is refused ----------------------------------------------------------------------

SMALL: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": CONTEXT,
    "eos_token_id": 1,
    "pad_token_id": None,
}


@pytest.mark.parametrize(
    ("model_type", "architecture", "changes", "reason"),
    [
        ("mamba", "MambaForCausalLM", {"max_position_embeddings": 64},
         r"its 3 layers call attention 0 times: each must once"),
        ("recurrent_gemma", "RecurrentGemmaForCausalLM", {},
         r"its 3 layers call attention 1 times"),
        ("gemma4_text", "Gemma4ForCausalLM", {"num_hidden_layers": 6},
         r"its layers differ in their heads \(4 / \d heads of 256, 4 / \d heads of 512\)"),
        ("llama4_text", "Llama4ForCausalLM", {},
         r"the mask of layer 0 is not causal attention with at most a window"),
        ("nemotron", "NemotronForCausalLM", {"num_key_value_heads": 2},
         r"NemotronAttention does not receive the keyword arguments of the model's forward"),
        ("bloom", "BloomForCausalLM", {},
         r"does not run through the attention interface \(TypeError: "),  # ALiBi
        ("falcon", "FalconForCausalLM", {}, r"does not run through the attention interface"),
        ("gpt_neox", "GPTNeoXForCausalLM",
         {"rope_parameters": {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 6,
                              "long_factor": [2.0] * 6, "original_max_position_embeddings": 64}},
         r"its rotary embedding \(longrope\) depends on the longest sequence of a batch"),
        ("gpt_neox", "GPTNeoXForCausalLM", {"rope_parameters": {"rope_type": "dynamic",
         "rope_theta": 1e4, "factor": 2.0}}, r"rotary embedding \(dynamic\) depends on"),
        ("gpt_neox", "GPTNeoXForCausalLM", {"is_encoder_decoder": True}, r"it has an encoder"),
        ("gpt_neox", "GPTNeoXForCausalLM", {"is_causal": False},
         r"attention in layer 0 is not causal"),
        ("mpt", "MptForCausalLM", {}, r"its max_position_embeddings is None: how long may"),
    ],
)  # fmt: skip
def test_refused_by_what_it_asks_for(
    model_type: str, architecture: str, changes: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    raw = {**SMALL, "architectures": [architecture], "model_type": model_type, **changes}
    if model_type == "mpt":
        del raw["max_position_embeddings"]
    (tmp_path / "config.json").write_text(json.dumps(raw))
    with pytest.raises(UnsupportedError, match=f"{architecture} cannot be served: .*") as caught:
        ModelConfig.from_directory(tmp_path)
    assert caught.match(reason)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("rule", "window", "accepted"),
    [
        (lambda q, k: k <= q, None, True),
        (lambda q, k: (k <= q) & (k > q - 9), 9, True),
        (lambda q, k: (k <= q) & (k > q - 9), None, False),
        (lambda q, k: (k <= q) & (k > q - 9), 8, False),
        (lambda q, k: (k <= q) & (k > q - 9), 10, False),
        (lambda q, k: k < q, None, False),
        (lambda q, k: k <= q + 1, None, False),
        (lambda q, k: k >= 0, None, False),
        (lambda q, k: (k <= q) & (k // 9 == q // 9), 9, False),  # chunks
        (lambda q, k: (k <= q) | (k < 5), None, False),  # a prefix that all see
        (lambda q, k: (k <= q) & ((k > q - 9) | (k < 4)), 9, False),  # a window and sinks
    ],
)
def test_masks(
    rule: Callable[[torch.Tensor, torch.Tensor], torch.Tensor], window: int | None, accepted: bool
) -> None:
    mask = inspection.MaskRule(lambda _b, _h, q, k: rule(q, k), window)
    if accepted:
        assert inspection._window(3, mask, 5000) == window
    else:
        with pytest.raises(UnsupportedError, match=r"the mask of layer 3 is not causal attention"):
            inspection._window(3, mask, 5000)


def test_a_window_as_long_as_the_context_is_none() -> None:
    mask = inspection.MaskRule(lambda _b, _h, q, k: (k <= q) & (k > q - 64), 64)
    assert inspection._window(0, mask, 64) is None
    assert inspection._window(0, mask, 65) == 64


def rehearse_with(
    model: LoadedModel, reference: torch.nn.Module, change: Callable[..., torch.Tensor]
) -> None:
    network = model.config.network
    assert isinstance(network, ForeignConfig)

    def forward(tokens: torch.Tensor, positions: torch.Tensor, call: Any) -> torch.Tensor:
        return change(model.network.forward, tokens, positions, call)

    rehearsal.rehearse(network, reference, forward, "vmserve")  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_rehearsal_notices(dtype: torch.dtype, written: Callable[[str], Path]) -> None:
    model = load_model(written("gpt-neox"), dtype)
    reference: PreTrainedConfig = model.network._model  # type: ignore[union-attr, assignment]
    seen: list[torch.Tensor] = []

    def as_it_is(forward: Any, tokens: Any, positions: Any, call: Any) -> torch.Tensor:
        seen.append(positions)
        return forward(tokens, positions, call)  # type: ignore[no-any-return]

    def positions_of_the_batch(forward: Any, tokens: Any, positions: Any, call: Any) -> Any:
        return forward(tokens, torch.arange(len(tokens)), call)

    def scores_too_small(forward: Any, tokens: Any, positions: Any, call: Any) -> Any:
        def attend(spec: Any, q: Any, k: Any, v: Any) -> Any:
            return call(spec, q * 0.5, k, v)

        return forward(tokens, positions, attend)

    def rows_mixed(forward: Any, tokens: Any, positions: Any, call: Any) -> Any:
        def attend(spec: Any, q: Any, k: Any, v: Any) -> Any:
            return call(spec, q, k, v + 0.5 * v.roll(1, 0))

        return forward(tokens, positions, attend)

    def not_a_number(forward: Any, tokens: Any, positions: Any, call: Any) -> Any:
        return forward(tokens, positions, call).fill_(float("nan"))

    rehearse_with(model, reference, as_it_is)  # type: ignore[arg-type]
    assert [len(positions) for positions in seen] == [7, 9, 7, 4]
    for wrong in (positions_of_the_batch, scores_too_small, rows_mixed, not_a_number):
        with pytest.raises(UnsupportedError, match=r"rows of logits differ by up to"):
            rehearse_with(model, reference, wrong)  # type: ignore[arg-type]


# -- files --------------------------------------------------------------------------------


@pytest.fixture
def damaged(written: Callable[[str], Path], tmp_path: Path) -> Path:
    return Path(shutil.copytree(written("phi"), tmp_path / "model"))


def rewrite(directory: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    tensors = {name: t.clone() for name, t in load_file(directory / "model.safetensors").items()}
    change(tensors)
    save_file(tensors, directory / "model.safetensors", {"format": "pt"})


def refused(directory: Path, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message) as caught:
        load_model(directory, torch.float32)
    assert "\n" not in str(caught.value)


def test_missing_tensors(damaged: Path) -> None:
    rewrite(damaged, lambda tensors: tensors.pop("model.layers.1.mlp.fc1.weight"))
    refused(damaged, r"lacks 1 tensors that config\.json implies: model\.layers\.1\.mlp\.fc1\.wei")


def test_surplus_tensors(damaged: Path) -> None:
    rewrite(damaged, lambda t: t.update({"model.layers.3.mlp.fc1.weight": torch.zeros(1)}))
    refused(damaged, r"has 1 tensors that config\.json does not imply: model\.layers\.3\.mlp\.fc1")


def test_wrong_shape(damaged: Path) -> None:
    rewrite(damaged, lambda t: t.update({"model.layers.1.mlp.fc1.weight": torch.zeros(3, 4)}))
    refused(damaged, r"transformers cannot load the weights of PhiForCausalLM \(RuntimeError: ")


def test_truncated_file(damaged: Path) -> None:
    path = damaged / "model.safetensors"
    path.write_bytes(path.read_bytes()[:5000])
    refused(damaged, r"model\.safetensors \(5,000 bytes\) is truncated or damaged")


def test_pickled_weights_and_own_code_are_not_read(damaged: Path) -> None:
    config = json.loads((damaged / "config.json").read_text())
    config["auto_map"] = {"AutoModelForCausalLM": "evil.Evil", "AutoConfig": "evil.EvilConfig"}
    (damaged / "config.json").write_text(json.dumps(config))
    (damaged / "evil.py").write_text("raise SystemExit('code of a model ran')")
    assert load_model(damaged, torch.float32).config.kv_heads == 2
    (damaged / "model.safetensors").unlink()
    (damaged / "pytorch_model.bin").write_bytes(b"")
    refused(damaged, r"\*\.bin files, which are never read")


def test_after_the_rehearsal_it_has_our_attention(written: Callable[[str], Path]) -> None:
    model = load_model(written("olmo2"), torch.float32)
    assert model.network._model.config._attn_implementation == "vmserve"  # type: ignore[union-attr]
    reference = AutoModelForCausalLM.from_pretrained(written("olmo2"), dtype=torch.float32)
    assert reference.config._attn_implementation != "vmserve"
