"""Our reading of config.json against that of transformers: the same, or none; and rotary
frequencies, bit for bit those of transformers."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import CONFIG_MAPPING, LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from tests.models.checkpoints import MODELS, TORCH
from vmserve.errors import ConfigurationError
from vmserve.models.families import FAMILIES, Family
from vmserve.models.rope import ROPE_TYPES, RopeConfig
from vmserve.models.rotary_embedding import RotaryEmbedding
from vmserve.models.transformers_config import parse
from vmserve.numbers.dtypes import DType

BY_TYPE = {family.model_type: family for family in FAMILIES.values()}


def assert_same(model_type: str, fields: dict[str, Any]) -> bool:
    """Whether we read it; then all that we have is what transformers has."""
    family, raw = BY_TYPE[model_type], {"model_type": model_type, **fields}
    ours = family.read(copy.deepcopy(raw))
    if ours is None:
        return False
    theirs = parse(model_type, copy.deepcopy(raw))
    for name, value in vars(ours).items():
        expected = getattr(theirs, name, None)
        if name == "head_dim" and expected is None:  # computed later, where it is not given
            if model_type.startswith("deepseek"):
                theirs.head_dim = value  # null: transformers would rotate as many as no model has
            continue
        if name == "dtype" and expected is not None:
            expected = DType.of(expected)
        assert value == expected, name
        assert type(value) is type(expected), name
    assert _description(family, ours) == _description(family, theirs)
    return True


def _description(family: Family, hf: Any) -> object:
    try:
        return family.describe(hf)
    except ConfigurationError as error:
        return str(error)


@pytest.mark.parametrize("model_type", BY_TYPE)
def test_defaults(model_type: str) -> None:
    assert assert_same(model_type, {})
    theirs = CONFIG_MAPPING[model_type]()
    for name, (_, default) in BY_TYPE[model_type].schema.fields.items():
        if default is not None:
            expected = getattr(theirs, name, getattr(theirs, f"_{name}", None))
            unkept = ("full_attention_interval", "sliding_window")
            assert default == expected or name in unkept, name


@pytest.mark.parametrize("name", [*TORCH, "deepseek-v2-lite", "deepseek-v3"])
def test_configurations_as_transformers_writes_them(name: str) -> None:
    config = MODELS[name].config
    for written in (config.to_diff_dict(), config.to_dict()):
        assert assert_same(config.model_type, written)


YARN = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 2048}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 1024}  # fmt: skip
LINEAR = {"rope_type": "linear", "factor": 8.0}
LONG = {"rope_type": "longrope", "short_factor": [1.0] * 36, "long_factor": [2] * 36}
THREE_QUARTERS = {"partial_rotary_factor": 0.75}


def scaling(parameters: Any, **changes: Any) -> dict[str, Any]:
    return {"rope_scaling": {**parameters, **changes}}


def parameters(parameters: Any, **changes: Any) -> dict[str, Any]:
    return {"rope_parameters": {**parameters, **changes}}


@pytest.mark.parametrize(
    "rope",
    [
        {},
        {"rope_theta": 1_000_000},
        {"rope_theta": 5e5, "rope_scaling": None},
        scaling({"type": "linear", "factor": 4.0}),
        {**scaling({"type": "dynamic", "factor": 2}), "rope_theta": 1e6},
        {**scaling(LLAMA3), "rope_theta": 500000.0},
        parameters(LLAMA3, rope_theta=500000.0),
        parameters({"rope_type": "default", "rope_theta": 1e6}),
        {**parameters({"rope_type": "default"}), "rope_theta": 2e6},
        {**parameters({"rope_theta": 3e6}), **scaling({"type": "linear", "factor": 2.0})},
        {"rope_parameters": None, "rope_scaling": {}},
        scaling(YARN),
        scaling({"rope_type": "yarn", "factor": 4.0}),
        parameters({"rope_type": "yarn", "type": "linear", "factor": 2.0, "beta_fast": 16,
                    "beta_slow": 2, "attention_factor": 1.5, "rope_theta": 1e4}),
    ],
)  # fmt: skip
@pytest.mark.parametrize("model_type", ["llama", "mistral", "qwen2", "qwen3"])
def test_both_spellings_of_rope(model_type: str, rope: dict[str, Any]) -> None:
    assert assert_same(model_type, {"max_position_embeddings": 8192, **rope})


@pytest.mark.parametrize(
    ("model_type", "rope"),
    [
        ("phi3", {"rope_theta": 25e4, "rope_scaling": None, "partial_rotary_factor": 1.0}),
        ("phi3", {**scaling({**LONG, "type": "longrope"}), **THREE_QUARTERS}),
        ("phi3", {**parameters(LONG, **THREE_QUARTERS, factor=2.0, attention_factor=1.5),
                  "original_max_position_embeddings": 2048}),
        ("gemma3_text", {"rope_theta": 1e6, "rope_local_base_freq": 10000, "rope_scaling": None}),
        ("gemma3_text", {**scaling(LINEAR), "sliding_window_pattern": 2}),
        ("gemma3_text", {**scaling(LINEAR), "rope_local_base_freq": 5e3}),
        ("gemma3_text", {"rope_parameters": None}),
        ("gemma3_text", parameters({"full_attention": LINEAR, "sliding_attention": {}})),
    ],
)  # fmt: skip
def test_rope_of_some_families(model_type: str, rope: dict[str, Any]) -> None:
    assert assert_same(model_type, {"pad_token_id": 0, **rope})


#: Values of fields that are left to transformers, and so are errors.
LEFT: dict[str, dict[str, list[Any]]] = {
    "llama": {
        "hidden_size": ["many", 16.0, True, None, 100],  # which is no multiple of 32 heads
        "num_attention_heads": [0], "head_dim": [5], "attention_bias": [1], "rms_norm_eps": [1],
        "hidden_act": [None], "eos_token_id": [[1, "2"], [1, 32000]], "bos_token_id": [-1],
        "dtype": ["float99"], "torch_dtype": [16], "layer_types": [["full_attention"] * 32],
        "text_config": [{}], "per_layer_config": [{}],
    },
    "mistral": {"num_attention_heads": [0]},
    "qwen2": {
        "layer_types": [["full_attention"], ["chunked_attention"] * 32, ["attention"] * 32,
                        "full_attention"],
    },
    "qwen3": {"head_dim": [None]},
    "gpt2": {"hidden_size": [768]},
    "opt": {"word_embed_proj_dim": ["512"]},
    "gemma3_text": {"rope_theta": [None], "sliding_window_pattern": [0]},
}  # fmt: skip


def _llama(**changes: Any) -> tuple[str, dict[str, Any]]:
    return "llama", {"max_position_embeddings": 8192, **changes}


@pytest.mark.parametrize(
    ("model_type", "changes"),
    [
        *(_llama(rope_theta=theta) for theta in (None, "high", True)),
        _llama(rope_scaling="linear"),
        _llama(**scaling({"type": "mrope", "mrope_section": [1, 2]})),
        _llama(**scaling({"type": ["linear"], "factor": 2.0})),
        _llama(**scaling({"type": "linear"})),
        _llama(**scaling({"type": "linear", "factor": 0.5})),
        _llama(**scaling({"type": "linear", "factor": 2.0, "odd": 1})),
        _llama(**scaling(YARN, factor=3.0)),
        _llama(**scaling(YARN, original_max_position_embeddings=0)),
        _llama(**scaling(LLAMA3, original_max_position_embeddings=8192)),
        _llama(**scaling(LLAMA3, high_freq_factor=1.0)),
        _llama(**scaling(LLAMA3, low_freq_factor=None)),
        _llama(**parameters({"rope_type": "default", "partial_rotary_factor": 0.5})),
        _llama(partial_rotary_factor=1.0),
        _llama(original_max_position_embeddings=4096),
        _llama(**parameters({"full_attention": {"rope_type": "default"}})),
        ("phi3", scaling(LONG)),
        ("phi3", scaling({"type": "linear", "factor": 2.0})),
        ("phi3", {**parameters(LONG, **THREE_QUARTERS, original_max_position_embeddings=4),
                  "original_max_position_embeddings": 8192}),
        ("gemma3_text", scaling({"type": "linear", "factor": 2.0})),
        ("gemma3_text", parameters({"full_attention": {"rope_type": "default"}})),
        ("gemma3_text", parameters(LINEAR)),
        *((model_type, {name: value}) for model_type, fields in LEFT.items()
          for name, values in fields.items() for value in values),
    ],
)  # fmt: skip
def test_what_is_left_to_transformers(model_type: str, changes: dict[str, Any]) -> None:
    raw = {"model_type": model_type, **changes}
    if model_type == "phi3":
        raw["pad_token_id"] = 0
    assert BY_TYPE[model_type].read(raw) is None


@pytest.mark.parametrize(
    ("changes", "dtype"),
    [
        ({}, None),
        ({"dtype": None, "torch_dtype": None}, None),
        ({"torch_dtype": "bfloat16"}, DType.BFLOAT16),
        ({"dtype": "float16"}, DType.FLOAT16),
        ({"dtype": "float32", "torch_dtype": "float16"}, DType.FLOAT32),
        ({"dtype": None, "torch_dtype": "float16"}, DType.FLOAT16),
    ],
)
def test_dtype(changes: dict[str, Any], dtype: DType | None) -> None:
    assert assert_same("llama", changes)
    found = BY_TYPE["llama"].read({"model_type": "llama", **changes})
    assert found is not None
    assert found.dtype == dtype


_VALUES = {
    "int": st.sampled_from([1, 2, 4, 6, 8, 12, 64, 60_000, 0, -1]),
    "int?": st.sampled_from([None, 1, 2, 3, 4, 7, 64]),
    "float": st.sampled_from([1e-5, 1e-6, 0.5]),
    "float?": st.sampled_from([None, 30.0]),
    "bool?": st.sampled_from([None, False, True]),
    "number?": st.sampled_from([None, 1, 0.5, 0.3, 0.0, 2]),
    "bool": st.booleans(),
    "str": st.sampled_from(["silu", "relu", "gelu", "gelu_new"]),
    "str?": st.sampled_from([None, "greedy", "group_limited_greedy", "noaux_tc", "sigmoid"]),
    "ints?": st.sampled_from([None, [], [0], [1, 3], [-1]]),
    "ids": st.sampled_from([None, 0, 3, [1, 2], []]),
    "layer_types": st.sampled_from(
        [None, ["full_attention"] * 2, ["sliding_attention", "full_attention"]]
    ),
}
_ODD = st.sampled_from([None, "x", 1.5, True, [], {}, 3])


@given(data=st.data())
@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
def test_any_fields(data: st.DataObject) -> None:
    model_type = data.draw(st.sampled_from(sorted(BY_TYPE)))
    fields = BY_TYPE[model_type].schema.fields
    names = data.draw(st.lists(st.sampled_from(sorted(fields)), unique=True))
    raw = {name: data.draw(_VALUES[fields[name][0]]) for name in names}
    if data.draw(st.integers(0, 4)) == 0 and names:
        raw[data.draw(st.sampled_from(names))] = data.draw(_ODD)
    assert_same(model_type, raw)


# -- frequencies --------------------------------------------------------------------------


def yarn(**changes: Any) -> dict[str, Any]:
    return {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024, **changes}


def longrope(head_dim: int, **changes: Any) -> tuple[int, dict[str, Any]]:
    short, long = ([first + step * i for i in range(head_dim // 2)]
                   for first, step in ((1.0, 0.1), (1.5, 0.7)))  # fmt: skip
    return head_dim, {"rope_type": "longrope", "original_max_position_embeddings": 1024,
                      "short_factor": short, "long_factor": long, **changes}  # fmt: skip


CASES: list[tuple[int, dict[str, Any]]] = [
    (64, {"rope_type": "linear", "factor": 4.0}),
    (12, {"rope_type": "linear", "factor": 3}),
    (64, {**LLAMA3, "original_max_position_embeddings": 2048}),
    (128, {**LLAMA3, "factor": 32.0, "original_max_position_embeddings": 1000}),
    (64, yarn()),
    (128, yarn(attention_factor=1.25)),
    (128, yarn(beta_fast=16, beta_slow=2, truncate=False)),
    (96, yarn(factor=None)),
    (64, yarn(factor=0.5)),
    (64, yarn(mscale=1.0, mscale_all_dim=0.8)),
    (4, yarn(beta_fast=1, beta_slow=1)),
    longrope(64),
    longrope(64, factor=2.0),
    longrope(96, attention_factor=1.19),
    longrope(64, factor=1.0),
]


@pytest.mark.parametrize("max_len", [1024, 1025, 4096])
@pytest.mark.parametrize("theta", [10000.0, 500000])
@pytest.mark.parametrize(("head_dim", "rope"), CASES)
def test_frequencies(head_dim: int, rope: dict[str, Any], theta: float, max_len: int) -> None:
    rope = {**rope, "rope_theta": theta}
    ours = RotaryEmbedding(
        RopeConfig(rope["rope_type"], rope, head_dim, 4096), max_len, torch.device("cpu")
    )
    sizes = {"hidden_size": head_dim, "num_attention_heads": 1, "max_position_embeddings": 4096}
    config = LlamaConfig(**sizes, rope_parameters=dict(rope))
    expected, factor = ROPE_INIT_FUNCTIONS[rope["rope_type"]](config, seq_len=max_len)
    assert torch.equal(ours._frequencies, expected)
    assert ours._frequencies.dtype == torch.float32
    assert ours._scaling == factor


def test_every_type_is_compared() -> None:
    compared = {rope["rope_type"] for _, rope in CASES}
    # "dynamic" is "default" within the model's context; what that is, test_parity shows.
    assert set(ROPE_TYPES) - compared == {"default", "dynamic"}
    plain = RopeConfig("default", {"rope_theta": 10000.0}, 8, 64)
    expected = [10000.0 ** (-i / 8) for i in (0, 2, 4, 6)]
    found = RotaryEmbedding(plain, 64, torch.device("cpu"))._frequencies
    assert torch.allclose(found, torch.tensor(expected), rtol=1e-6, atol=0)
