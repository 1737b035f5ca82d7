"""Models that the decoder does not know: what of them is described, or refused at start with the
reason. ``test_parity`` has their logits, ``test_loader`` their files."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from tests.models.checkpoints import _SMALL, CONTEXT, VOCAB, Saved
from vmserve.attention import check_backend, create_backend
from vmserve.attention.base import LayerAttention
from vmserve.errors import ConfigurationError, UnsupportedError
from vmserve.models import ModelConfig, load_model
from vmserve.models.foreign import inspection, rehearsal
from vmserve.numbers.dtypes import DType


def test_a_softcap_is_refused_when_backend_and_model_meet(checkpoint: Saved) -> None:
    config = ModelConfig.from_directory(checkpoint("vaultgemma"))
    assert [layer.softcap for layer in config.attention] == [50.0] * 3
    with pytest.raises(UnsupportedError, match=r"3 layers .* scores at 50, which the sdpa backend"):
        check_backend(create_backend("sdpa"), config.attention)
    check_backend(create_backend("sdpa"), [LayerAttention(0, 0.5, window=3)])


def test_what_attention_is_asked_for(checkpoint: Saved) -> None:
    path = checkpoint("vaultgemma-no-cap")
    config = ModelConfig.from_directory(path)
    windows = (7, None, 7)
    assert config.attention == tuple(
        LayerAttention(layer, 20**-0.5, window=window) for layer, window in enumerate(windows)
    )
    assert (config.kv_heads, config.head_dim, config.vocab_size) == (2, 12, VOCAB)
    assert config.max_position_embeddings == CONTEXT
    assert (config.eos_token_ids, config.bos_token_id) == ((1,), 0)
    assert config.dtype is DType.FLOAT32
    # Tied embeddings count once.
    stored = load_file(path / "model.safetensors")
    assert config.num_weights == sum(tensor.numel() for tensor in stored.values())
    granite = ModelConfig.from_directory(checkpoint("granite"))
    assert {layer.scale for layer in granite.attention} == {0.3}


def test_parameters_are_counted_in_their_type(checkpoint: Saved) -> None:
    seen: list[tuple[str, int, int]] = []
    path = checkpoint("olmo2")
    model = load_model(path, torch.bfloat16, progress=lambda *told: seen.append(told))
    assert model.parameter_bytes == 2 * model.config.num_weights
    assert seen == [("loading weights", model.parameter_bytes, model.parameter_bytes)]


# -- what is refused ----------------------------------------------------------------------

#: Without the names that only some of the models know.
SMALL = {**_SMALL, "pad_token_id": None}
del SMALL["num_key_value_heads"], SMALL["bos_token_id"]


def rope(rope_type: str, **parameters: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": rope_type, "rope_theta": 1e4, **parameters}}


LONG = {"short_factor": [1.0] * 6, "long_factor": [2.0] * 6}


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
         rope("longrope", **LONG, original_max_position_embeddings=64),
         r"its rotary embedding \(longrope\) depends on the longest sequence of a batch"),
        ("gpt_neox", "GPTNeoXForCausalLM", rope("dynamic", factor=2.0),
         r"rotary embedding \(dynamic\) depends on"),
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
    assert [inspection._window(0, mask, context) for context in (64, 65)] == [None, 64]


#: What a wrong attention does to queries and values.
WRONG = {
    "scores too small": lambda q, v: (q * 0.5, v),
    "rows mixed": lambda q, v: (q, v + 0.5 * v.roll(1, 0)),
    "not a number": lambda q, v: (q, v * float("nan")),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_rehearsal_notices(dtype: torch.dtype, checkpoint: Saved) -> None:
    model: Any = load_model(checkpoint("gpt-neox"), dtype)
    forward, seen = model.network.forward, []

    def rehearse(changed: Any) -> None:
        rehearsal.rehearse(model.config.network, model.network._model, changed, "vmserve")

    def as_it_is(tokens: Any, positions: Any, call: Any) -> Any:
        seen.append(len(positions))
        return forward(tokens, positions, call)

    def positions_of_the_batch(tokens: Any, _: Any, call: Any) -> Any:
        return forward(tokens, torch.arange(len(tokens)), call)

    def wrong(change: Any) -> Any:
        def with_attention(tokens: Any, positions: Any, call: Any) -> Any:
            def attend(spec: Any, q: Any, k: Any, v: Any) -> Any:
                q, v = change(q, v)
                return call(spec, q, k, v)

            return forward(tokens, positions, attend)

        return with_attention

    rehearse(as_it_is)
    assert seen == [7, 9, 7, 4]
    for each in (positions_of_the_batch, *map(wrong, WRONG.values())):
        with pytest.raises(UnsupportedError, match=r"rows of logits differ by up to"):
            rehearse(each)


def test_pickled_weights_and_own_code_are_not_read(copied: Saved) -> None:
    damaged = copied("phi")
    config = json.loads((damaged / "config.json").read_text())
    config["auto_map"] = {"AutoModelForCausalLM": "evil.Evil", "AutoConfig": "evil.EvilConfig"}
    (damaged / "config.json").write_text(json.dumps(config))
    (damaged / "evil.py").write_text("raise SystemExit('code of a model ran')")
    assert load_model(damaged, torch.float32).config.kv_heads == 2
    (damaged / "model.safetensors").unlink()
    (damaged / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(ConfigurationError, match=r"\*\.bin files, which are never read"):
        load_model(damaged, torch.float32)


def test_after_the_rehearsal_it_has_our_attention(checkpoint: Saved) -> None:
    path = checkpoint("olmo2")
    network: Any = load_model(path, torch.float32).network
    assert network._model.config._attn_implementation == "vmserve"
    reference = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    assert reference.config._attn_implementation != "vmserve"
