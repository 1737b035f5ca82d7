"""Checkpoints in Hugging Face's layout as GGUF files of float32."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from safetensors.torch import load_file

from tests.models.checkpoints import FAMILIES
from tests.models.gguf_files import write
from vmserve.models.config import ModelConfig
from vmserve.models.decoder_config import DecoderConfig
from vmserve.models.hub import resolve_model
from vmserve.models.rope import RopeConfig
from vmserve.text.tokenizer import load_tokenizer

__all__ = ["add_embedded_tokenizer", "convert"]

_Array = np.ndarray[Any, Any]

_NAMES = {
    "model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output",
    "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.qkv_proj": "attn_qkv", "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm",
    "self_attn.q_a_proj": "attn_q_a", "self_attn.q_a_layernorm": "attn_q_a_norm",
    "self_attn.q_b_proj": "attn_q_b", "self_attn.kv_a_proj_with_mqa": "attn_kv_a_mqa",
    "self_attn.kv_a_layernorm": "attn_kv_a_norm",
    "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
    "mlp.gate_up_proj": "ffn_up", "mlp.gate": "ffn_gate_inp", "mlp.router": "ffn_gate_inp",
    "block_sparse_moe.gate": "ffn_gate_inp", "mlp.shared_expert_gate": "ffn_gate_inp_shexp",
    "linear_attn.in_proj_qkv": "attn_qkv", "linear_attn.in_proj_z": "attn_gate",
    "linear_attn.in_proj_ba": "ssm_ba", "linear_attn.in_proj_b": "ssm_beta",
    "linear_attn.in_proj_a": "ssm_alpha", "linear_attn.conv1d": "ssm_conv1d",
    "linear_attn.norm": "ssm_norm", "linear_attn.out_proj": "ssm_out",
}  # fmt: skip
_NAMES |= {
    f"mlp.{shared}.{kind}_proj": f"ffn_{kind}_shexp"
    for shared in ("shared_expert", "shared_experts")
    for kind in ("gate", "up", "down")
}
#: Those with a norm behind attention that is in front of the MLP.
_LATER_NAMES = {**_NAMES, "post_attention_layernorm": "post_attention_norm"}
_GEMMA_NAMES = {
    **_LATER_NAMES,
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
_EXPERTS = {
    "gate_proj": "ffn_gate_exps", "up_proj": "ffn_up_exps", "down_proj": "ffn_down_exps",
    "w1": "ffn_gate_exps", "w3": "ffn_up_exps", "w2": "ffn_down_exps",
}  # fmt: skip
_ARCHITECTURES = {family.model_type: family.gguf for family in FAMILIES.values()}
#: Tensors that files of any type have in float32.
_PLAIN = ("ffn_gate_inp", "ssm_conv1d", ".bias", "norm")


def _stored_name(names: dict[str, str], name: str) -> str:
    module, _, kind = name.rpartition(".")
    if module.startswith("model.layers."):
        layer, _, module = module.removeprefix("model.layers.").partition(".")
        if ".experts." in module:
            return f"blk.{layer}.{_EXPERTS[module.rpartition('.')[2]]}.{kind}"
        return f"blk.{layer}.{names[module]}.{kind}"
    return f"{names[module]}.{kind}"


def _interleaved(weight: _Array, heads: int) -> _Array:
    """Rows of each head: first of the first half, first of the second half, second of the ..."""
    halves = weight.reshape(heads, 2, -1, *weight.shape[1:])
    return halves.swapaxes(1, 2).reshape(weight.shape)


def _changed(network: DecoderConfig, name: str, array: _Array) -> dict[str, _Array] | None:
    """Tensors that files have in another form, by their names there; None: they have this one."""
    if not name.startswith("model.layers."):
        return None
    layer, _, module = name.removeprefix("model.layers.").partition(".")
    before = f"blk.{layer}."
    latent, delta = network.latent, network.delta
    if module == "self_attn.sinks":
        return {f"{before}attn_sinks.weight": array}
    if module == "mlp.gate.e_score_correction_bias":
        return {f"{before}exp_probs_b.bias": array}
    if module == "self_attn.kv_b_proj.weight" and latent is not None:
        by_head = array.reshape(network.q_heads, latent.plain + latent.value, latent.rank)
        return {
            f"{before}attn_k_b.weight": by_head[:, : latent.plain].swapaxes(1, 2),
            f"{before}attn_v_b.weight": by_head[:, latent.plain :],
        }
    if module.startswith(("mlp.experts.gate_up_proj", "mlp.experts.down_proj")):
        kind = "bias" if module.endswith("bias") else "weight"
        rows = array if kind == "bias" else array.swapaxes(1, 2)  # [experts, out, ...]
        if "down_proj" in module:
            return {f"{before}ffn_down_exps.{kind}": rows}
        return {
            f"{before}ffn_gate_exps.{kind}": rows[:, 0::2],
            f"{before}ffn_up_exps.{kind}": rows[:, 1::2],
        }
    if delta is None or not module.startswith("linear_attn."):
        return None
    shared = delta.value_heads // delta.key_heads
    if module == "linear_attn.in_proj_qkvz.weight":
        parts = [delta.key_dim, 2 * delta.key_dim, 2 * delta.key_dim + shared * delta.value_dim]
        by_head = array.reshape(delta.key_heads, -1, array.shape[1])
        q, k, v, z = (each.reshape(-1, array.shape[1]) for each in np.split(by_head, parts, axis=1))
        return {
            f"{before}attn_qkv.weight": np.concatenate((q, k, v)),
            f"{before}attn_gate.weight": z,
        }
    if not network.names.delta_fused:
        # Value heads of all key heads by their number within one.
        def order(size: int) -> _Array:
            heads = np.arange(delta.value_heads * size).reshape(delta.key_heads, shared, size)
            return heads.swapaxes(0, 1).reshape(-1)

        rows = {"in_proj_z.weight": delta.value_dim, "in_proj_b.weight": 1, "in_proj_a.weight": 1,
                "A_log": 1, "dt_bias": 1}  # fmt: skip
        what = module.removeprefix("linear_attn.")
        if what in rows:
            array = array[order(rows[what])]
        elif what == "out_proj.weight":
            array = array[:, order(delta.value_dim)]
        elif what in ("in_proj_qkv.weight", "conv1d.weight"):
            keys = 2 * delta.key_size
            array = np.concatenate((array[:keys], array[keys:][order(delta.value_dim)]))
    if module == "linear_attn.A_log":
        return {f"{before}ssm_a": -np.exp(array)}
    if module == "linear_attn.dt_bias":
        return {f"{before}ssm_dt.bias": array}
    if module == "linear_attn.conv1d.weight":
        return {f"{before}ssm_conv1d.weight": array[:, 0]}
    stored = _stored_name(_NAMES, name)
    return {stored: array}


def convert(
    directory: Path,
    path: Path,
    add: Callable[[gguf.GGUFWriter], None],
    matrices: str = "F32",
    of_experts: str | None = None,
) -> DecoderConfig:
    """Write a checkpoint as a GGUF file; returns its description. ``matrices``: their type;
    ``of_experts``: of those of experts, if that is another."""
    of_experts = of_experts or matrices
    network = ModelConfig.from_directory(directory).network
    assert isinstance(network, DecoderConfig)
    model_type = json.loads((directory / "config.json").read_text())["model_type"]
    architecture = _ARCHITECTURES[model_type]
    names = _GEMMA_NAMES if architecture.startswith("gemma") else _NAMES
    if architecture in ("gpt-oss", "qwen3next", "qwen35", "qwen35moe"):
        names = _LATER_NAMES
    adds_offset = network.norm.offset != 0
    tensors: dict[str, tuple[str, Any]] = {}
    experts: dict[str, list[_Array]] = {}
    for name, tensor in _in_order(load_file(directory / "model.safetensors")):
        if network.tied_embeddings and name == "lm_head.weight":
            continue
        array = tensor.to(torch.float32).numpy()
        for module, heads in ((".q_proj", network.q_heads), (".k_proj", network.kv_heads)):
            if architecture == "llama" and module in name:
                array = _interleaved(array, heads)
        changed = _changed(network, name, array)
        if changed is None and ".experts." in name:
            experts.setdefault(_stored_name(names, name), []).append(array)
            continue
        if changed is None:
            if adds_offset and "norm" in name:
                array = array + np.float32(1)
            changed = {_stored_name(names, name): array}
        for stored_name, each in changed.items():
            is_plain = each.ndim == 1 or any(word in stored_name for word in _PLAIN)
            kind = "F32" if is_plain else of_experts if "_exps." in stored_name else matrices
            stored = gguf.quants.quantize(
                np.ascontiguousarray(each), gguf.GGMLQuantizationType[kind]
            )
            tensors[stored_name] = kind, np.ascontiguousarray(stored)
    for name, arrays in experts.items():
        stored = gguf.quants.quantize(np.stack(arrays), gguf.GGMLQuantizationType[of_experts])
        tensors[name] = of_experts, stored

    def metadata(writer: gguf.GGUFWriter) -> None:
        for name, value in _said(network, architecture).items():
            getattr(writer, f"add_{name}")(value)
        if architecture == "gemma3":
            pattern = 1 + [layer.window for layer in network.layers].index(None)
            writer.add_uint32("gemma3.attention.sliding_window_pattern", pattern)
        add(writer)

    rope: Any = network.positions
    if rope.rope_type == "longrope":
        for kind in ("long", "short"):
            factors = np.array(rope.parameters[f"{kind}_factor"], np.float32)
            tensors[f"rope_factors_{kind}.weight"] = "F32", factors
    if rope.rope_type == "llama3":
        tensors["rope_freqs.weight"] = "F32", _llama3_factors(rope)
    write(path, architecture, tensors, metadata)
    return network


def _said(network: Any, architecture: str) -> dict[str, Any]:
    """Metadata, by the names of the writer's methods without "add_"."""
    rope, experts, latent, delta = (
        network.positions, network.experts, network.latent, network.delta
    )  # fmt: skip
    windows = {layer.window for layer in network.layers} - {None}
    scaling, gates = gguf.RopeScalingType, gguf.ExpertGatingFuncType
    said = {
        "block_count": network.num_layers, "embedding_length": network.hidden_size,
        "feed_forward_length": network.mlp_size, "head_count": network.q_heads,
        "head_count_kv": network.kv_heads, "context_length": network.max_position_embeddings,
        "layer_norm_rms_eps": network.norm.eps, "rope_freq_base": rope.parameters["rope_theta"],
        "key_length": network.head_dim, "value_length": network.head_dim,
        "sliding_window": max(windows, default=None),
        "final_logit_softcapping": network.logits_softcap,
        "attn_logit_softcapping": network.layers[0].softcap,
        "bos_token_id": 0, "eos_token_id": 1,
    }  # fmt: skip
    if rope.rope_type in ("linear", "yarn"):
        said["rope_scaling_type"] = scaling[rope.rope_type.upper()]
        said["rope_scaling_factor"] = rope.parameters["factor"]
    if rope.rope_type == "longrope":
        said["rope_scaling_attn_factors"] = rope.parameters["attention_factor"]
    if rope.rope_type in ("yarn", "longrope"):
        said["rope_scaling_orig_ctx_len"] = rope.parameters["original_max_position_embeddings"]
    if architecture == "phi3" or delta is not None or latent is not None:
        said["rope_dimension_count"] = rope.rotary_dim if latent is None else latent.rotated
    if experts is not None:
        said |= {
            "expert_count": experts.count, "expert_used_count": experts.chosen,
            "expert_feed_forward_length": experts.size,
        }  # fmt: skip
        if architecture in ("qwen2moe", "qwen3next", "qwen35moe"):
            said["expert_shared_feed_forward_length"] = experts.shared_size
    if latent is not None:
        said |= {
            "key_length": latent.rank + latent.rotated, "value_length": latent.rank,
            "key_length_mla": latent.query_dim, "value_length_mla": latent.value,
            "kv_lora_rank": latent.rank, "q_lora_rank": latent.q_rank or None,
            "leading_dense_block_count": min(experts.layers),
            "expert_shared_count": experts.shared_size // experts.size,
            "expert_weights_scale": experts.scale, "expert_weights_norm": experts.normalised,
            "expert_group_count": experts.groups,
            "expert_group_used_count": experts.chosen_groups,
            "expert_gating_func": gates.SIGMOID if experts.sigmoid else gates.SOFTMAX,
        }  # fmt: skip
        if "mscale_all_dim" in rope.parameters:
            said["rope_scaling_yarn_log_mul"] = 0.1 * rope.parameters["mscale_all_dim"]
    if delta is not None:
        said |= {
            "ssm_conv_kernel": delta.taps, "ssm_state_size": delta.key_dim,
            "ssm_group_count": delta.key_heads, "ssm_time_step_rank": delta.value_heads,
            "ssm_inner_size": delta.value_size, "full_attention_interval": 4,
        }  # fmt: skip
        if architecture.startswith("qwen35"):
            said["rope_dimension_sections"] = [11, 11, 10, 0]
    return {name: value for name, value in said.items() if value is not None}


def _in_order(tensors: dict[str, torch.Tensor]) -> list[tuple[str, torch.Tensor]]:
    """Experts by their numbers."""
    return sorted(tensors.items(), key=lambda item: [*map(int, re.findall(r"\d+", item[0]))])


def add_embedded_tokenizer(writer: gguf.GGUFWriter) -> None:
    """The tokenizer and chat template of the embedded model."""
    directory = resolve_model(None)
    tokenizer = load_tokenizer(directory)
    model = json.loads(tokenizer.to_json())["model"]
    tokens = [tokenizer.token_str(number) for number in range(tokenizer.vocab_size)]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    kinds = [3 if number in tokenizer.special_ids else 1 for number in range(len(tokens))]
    writer.add_token_types(kinds)
    writer.add_token_merges([" ".join(merge) for merge in model["merges"]])
    writer.add_eot_token_id(max(tokenizer.eos_ids))
    writer.add_add_bos_token(True)
    writer.add_chat_template(tokenizer.chat_template_text)


def _llama3_factors(rope: RopeConfig) -> _Array:
    """What the periods are multiplied by, one dimension at a time."""
    parameters = rope.parameters
    context = parameters["original_max_position_embeddings"]
    low, high = (context / parameters[f"{name}_freq_factor"] for name in ("low", "high"))
    factors = []
    for dimension in range(rope.rotary_dim // 2):
        period = parameters["rope_theta"] ** (2 * dimension / rope.rotary_dim)
        wavelength = 2 * np.pi * period
        if wavelength < high:
            factors.append(1.0)
        elif wavelength > low:
            factors.append(parameters["factor"])
        else:
            smooth = (context / wavelength - parameters["low_freq_factor"]) / (
                parameters["high_freq_factor"] - parameters["low_freq_factor"]
            )
            factors.append(1 / ((1 - smooth) / parameters["factor"] + smooth))
    return np.array(factors, np.float32)
