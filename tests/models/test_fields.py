"""Our reading of config.json against that of transformers: the same, or none."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import CONFIG_MAPPING

from tests.models.checkpoints import NATIVE, VARIANTS
from vmserve.errors import ConfigurationError
from vmserve.models.families import FAMILIES, Family
from vmserve.models.transformers_config import parse
from vmserve.numbers.dtypes import DType

BY_TYPE = {family.model_type: family for family in FAMILIES.values()}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 1024,
}


def assert_same(family: Family, raw: dict[str, Any]) -> bool:
    """Whether we read it; then all that we have is what transformers has."""
    ours = family.read(copy.deepcopy(raw))
    if ours is None:
        return False
    theirs = parse(family.model_type, copy.deepcopy(raw))
    for name, value in vars(ours).items():
        expected = getattr(theirs, name, None)
        if name == "head_dim" and expected is None:  # computed later, where it is not given
            if family.model_type.startswith("deepseek"):
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
    family = BY_TYPE[model_type]
    assert assert_same(family, {"model_type": model_type})
    theirs = CONFIG_MAPPING[model_type]()
    for name, (_, default) in family.schema.fields.items():
        if default is not None:
            expected = getattr(theirs, name, getattr(theirs, f"_{name}", None))
            unkept = ("full_attention_interval", "sliding_window")
            assert default == expected or name in unkept, name


@pytest.mark.parametrize("variant", [*VARIANTS, "deepseek-v2-lite", "deepseek-v3"])
def test_configurations_as_transformers_writes_them(variant: str) -> None:
    config = {**NATIVE, **VARIANTS}[variant]
    read = assert_same(BY_TYPE[config.model_type], config.to_diff_dict())
    assert read or variant == "llama-longrope"
    assert assert_same(BY_TYPE[config.model_type], config.to_dict()) == read


@pytest.mark.parametrize(
    "rope",
    [
        {},
        {"rope_theta": 1_000_000},
        {"rope_theta": 5e5, "rope_scaling": None},
        {"rope_scaling": {"type": "linear", "factor": 4.0}},
        {"rope_scaling": {"type": "dynamic", "factor": 2}, "rope_theta": 1e6},
        {"rope_scaling": LLAMA3, "rope_theta": 500000.0},
        {"rope_parameters": {**LLAMA3, "rope_theta": 500000.0}},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}},
        {"rope_parameters": {"rope_type": "default"}, "rope_theta": 2e6},
        {"rope_parameters": {"rope_theta": 3e6}, "rope_scaling": {"type": "linear", "factor": 2.0}},
        {"rope_parameters": None, "rope_scaling": {}},
        {"rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 2048}},
        {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}},
        {"rope_parameters": {"rope_type": "yarn", "type": "linear", "factor": 2.0, "beta_fast": 16,
                             "beta_slow": 2, "attention_factor": 1.5, "rope_theta": 1e4}},
    ],
)  # fmt: skip
@pytest.mark.parametrize("model_type", ["llama", "mistral", "qwen2", "qwen3"])
def test_both_spellings_of_rope(model_type: str, rope: dict[str, Any]) -> None:
    raw = {"model_type": model_type, "max_position_embeddings": 8192, **rope}
    assert assert_same(BY_TYPE[model_type], raw)


LONG = {"short_factor": [1.0] * 36, "long_factor": [2] * 36}


@pytest.mark.parametrize(
    ("rope", "read"),
    [
        ({"rope_theta": 250000.0, "rope_scaling": None, "partial_rotary_factor": 1.0}, True),
        ({"rope_scaling": {"type": "longrope", **LONG}, "partial_rotary_factor": 0.75}, True),
        ({"rope_scaling": {"type": "longrope", **LONG}}, False),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, False),
        (
            {
                "rope_parameters": {"rope_type": "longrope", "partial_rotary_factor": 0.75,
                                    "factor": 2.0, "attention_factor": 1.5, **LONG},
                "original_max_position_embeddings": 2048,
            },
            True,
        ),
        (
            {
                "rope_parameters": {"rope_type": "longrope", "partial_rotary_factor": 0.75,
                                    "original_max_position_embeddings": 4, **LONG},
                "original_max_position_embeddings": 8192,
            },
            False,
        ),
    ],
)  # fmt: skip
def test_rope_of_phi3(rope: dict[str, Any], read: bool) -> None:
    raw = {"model_type": "phi3", "pad_token_id": 0, **rope}
    family = BY_TYPE["phi3"]
    assert (assert_same(family, raw) if read else family.read(raw) is not None) == read


LINEAR = {"rope_type": "linear", "factor": 8.0}


@pytest.mark.parametrize(
    ("rope", "read"),
    [
        ({"rope_theta": 1e6, "rope_local_base_freq": 10000, "rope_scaling": None}, True),
        ({"rope_scaling": LINEAR, "sliding_window_pattern": 2}, True),
        ({"rope_scaling": LINEAR, "rope_local_base_freq": 5e3}, True),
        ({"rope_parameters": None}, True),
        ({"rope_parameters": {"full_attention": LINEAR, "sliding_attention": {}}}, True),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, False),
        ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, False),
        ({"rope_parameters": {"rope_type": "linear", "factor": 8.0}}, False),
        ({"rope_theta": None}, False),
        ({"sliding_window_pattern": 0}, False),
    ],
)
def test_rope_of_gemma3(rope: dict[str, Any], read: bool) -> None:
    raw = {"model_type": "gemma3_text", **rope}
    family = BY_TYPE["gemma3_text"]
    assert (assert_same(family, raw) if read else family.read(raw) is not None) == read


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_theta": None},
        {"rope_theta": "high"},
        {"rope_theta": True},
        {"rope_scaling": "linear"},
        {"rope_scaling": {"type": "mrope", "mrope_section": [1, 2]}},
        {"rope_scaling": {"type": ["linear"], "factor": 2.0}},
        {"rope_scaling": {"type": "linear"}},
        {"rope_scaling": {"type": "linear", "factor": 0.5}},
        {"rope_scaling": {"type": "linear", "factor": 2.0, "odd": 1}},
        {"rope_scaling": {"type": "yarn", "factor": 3.0, "original_max_position_embeddings": 2048}},
        {"rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 0}},
        {"rope_scaling": {**LLAMA3, "original_max_position_embeddings": 8192}},
        {"rope_scaling": {**LLAMA3, "high_freq_factor": 1.0}},
        {"rope_scaling": {**LLAMA3, "low_freq_factor": None}},
        {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}},
        {"partial_rotary_factor": 1.0},
        {"original_max_position_embeddings": 4096},
        {"rope_parameters": {"full_attention": {"rope_type": "default"}}},
    ],
)
def test_rope_that_is_left_to_transformers(rope: dict[str, Any]) -> None:
    raw = {"model_type": "llama", "max_position_embeddings": 8192, **rope}
    assert BY_TYPE["llama"].read(raw) is None


@pytest.mark.parametrize(
    ("model_type", "changes"),
    [
        ("llama", {"hidden_size": "many"}),
        ("llama", {"hidden_size": 16.0}),
        ("llama", {"hidden_size": True}),
        ("llama", {"hidden_size": None}),
        ("llama", {"hidden_size": 100}),  # no multiple of 32 heads
        ("llama", {"num_attention_heads": 0}),
        ("llama", {"head_dim": 5}),
        ("llama", {"attention_bias": 1}),
        ("llama", {"rms_norm_eps": 1}),
        ("llama", {"hidden_act": None}),
        ("llama", {"eos_token_id": [1, "2"]}),
        ("llama", {"eos_token_id": [1, 32000]}),
        ("llama", {"bos_token_id": -1}),
        ("llama", {"dtype": "float99"}),
        ("llama", {"torch_dtype": 16}),
        ("llama", {"layer_types": ["full_attention"] * 32}),
        ("llama", {"text_config": {}}),
        ("llama", {"per_layer_config": {}}),
        ("mistral", {"num_attention_heads": 0}),
        ("qwen2", {"layer_types": ["full_attention"]}),
        ("qwen2", {"layer_types": ["chunked_attention"] * 32}),
        ("qwen2", {"layer_types": ["attention"] * 32}),
        ("qwen2", {"layer_types": "full_attention"}),
        ("qwen3", {"head_dim": None}),
        ("gpt2", {"hidden_size": 768}),
        ("opt", {"word_embed_proj_dim": "512"}),
    ],
)
def test_what_is_left_to_transformers(model_type: str, changes: dict[str, Any]) -> None:
    assert BY_TYPE[model_type].read({"model_type": model_type, **changes}) is None


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
    raw = {"model_type": "llama", **changes}
    assert assert_same(BY_TYPE["llama"], raw)
    found = BY_TYPE["llama"].read(raw)
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
    family = BY_TYPE[model_type]
    names = data.draw(st.lists(st.sampled_from(sorted(family.schema.fields)), unique=True))
    raw: dict[str, Any] = {"model_type": model_type}
    for name in names:
        kind, _ = family.schema.fields[name]
        raw[name] = data.draw(_VALUES[kind])
    if data.draw(st.integers(0, 4)) == 0 and names:
        raw[data.draw(st.sampled_from(names))] = data.draw(_ODD)
    assert_same(family, raw)
