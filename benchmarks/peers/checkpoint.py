"""Writes a random Llama checkpoint, the same for the same seed; prints its directory.

    python checkpoint.py CACHE_DIR 125m|smoke SEED

Speed does not depend on the values of weights, so a benchmark needs no trained model. The
values are still scaled so that activations and logits stay near unit variance at any depth
(linear layers 1/sqrt(fan in), those that write into the residual stream further divided by
sqrt(2 x layers), as in GPT-2): greedy decoding then has clear winners in most positions.
"""

from __future__ import annotations

import json
import math
import shutil
import sys
import tempfile
from pathlib import Path

import torch
from model_shape import BOS_ID, EOS_ID, PAD_ID, SHAPES, LlamaShape
from safetensors.torch import save_file
from tokenizers import Tokenizer, models, pre_tokenizers


def ensure_checkpoint(cache_dir: Path, shape: LlamaShape, seed: int) -> Path:
    """The checkpoint's directory under ``cache_dir``, written now if it is not there yet."""
    final = cache_dir / f"{shape.name}-seed{seed}"
    if final.is_dir():
        return final
    cache_dir.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(dir=cache_dir, prefix="partial-"))
    try:
        save_file(random_weights(shape, seed), partial / "model.safetensors", {"format": "pt"})
        write_json(partial / "config.json", llama_config(shape))
        write_json(
            partial / "generation_config.json",
            {"bos_token_id": BOS_ID, "eos_token_id": EOS_ID, "pad_token_id": PAD_ID},
        )
        write_tokenizer(partial, shape.vocab_size)
        # Renamed last, so that an interrupted run leaves nothing that looks complete.
        partial.replace(final)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return final


def random_weights(shape: LlamaShape, seed: int) -> dict[str, torch.Tensor]:
    """All tensors of the model in bfloat16, under their Hugging Face names."""
    generator = torch.Generator().manual_seed(seed)

    def normal(rows: int, columns: int, std: float) -> torch.Tensor:
        return (torch.randn(rows, columns, generator=generator) * std).to(torch.bfloat16)

    def linear(rows: int, columns: int, scale: float = 1.0) -> torch.Tensor:
        return normal(rows, columns, scale / math.sqrt(columns))

    hidden, head_dim = shape.hidden_size, shape.head_dim
    ones = torch.ones(hidden, dtype=torch.bfloat16)
    into_residual = 1.0 / math.sqrt(2 * shape.num_layers)
    weights = {"model.embed_tokens.weight": normal(shape.vocab_size, hidden, 1.0)}
    for layer in range(shape.num_layers):
        prefix = f"model.layers.{layer}."
        weights |= {
            prefix + "input_layernorm.weight": ones.clone(),
            prefix + "self_attn.q_proj.weight": linear(shape.num_heads * head_dim, hidden),
            prefix + "self_attn.k_proj.weight": linear(shape.num_kv_heads * head_dim, hidden),
            prefix + "self_attn.v_proj.weight": linear(shape.num_kv_heads * head_dim, hidden),
            prefix + "self_attn.o_proj.weight": linear(
                hidden, shape.num_heads * head_dim, into_residual
            ),
            prefix + "post_attention_layernorm.weight": ones.clone(),
            prefix + "mlp.gate_proj.weight": linear(shape.mlp_size, hidden),
            prefix + "mlp.up_proj.weight": linear(shape.mlp_size, hidden),
            prefix + "mlp.down_proj.weight": linear(hidden, shape.mlp_size, into_residual),
        }
    weights["model.norm.weight"] = ones.clone()
    weights["lm_head.weight"] = linear(shape.vocab_size, hidden)
    return weights


def llama_config(shape: LlamaShape) -> dict[str, object]:
    """The model's config.json."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "attention_bias": False,
        "bos_token_id": BOS_ID,
        "eos_token_id": EOS_ID,
        "pad_token_id": PAD_ID,
        "head_dim": shape.head_dim,
        "hidden_act": "silu",
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.mlp_size,
        "max_position_embeddings": shape.max_position_embeddings,
        "mlp_bias": False,
        "num_attention_heads": shape.num_heads,
        "num_hidden_layers": shape.num_layers,
        "num_key_value_heads": shape.num_kv_heads,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "vocab_size": shape.vocab_size,
    }


def write_tokenizer(directory: Path, vocab_size: int) -> None:
    """A tokenizer of one made-up word per id: engines that insist on one can load it."""
    special = {"<pad>": PAD_ID, "<s>": BOS_ID, "</s>": EOS_ID, "<unk>": 3}
    words = {f"w{token_id}": token_id for token_id in range(len(special), vocab_size)}
    tokenizer = Tokenizer(models.WordLevel(special | words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens(list(special))
    tokenizer.save(str(directory / "tokenizer.json"))
    write_json(
        directory / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": "<s>",
            "eos_token": "</s>",
            "pad_token": "<pad>",
            "unk_token": "<unk>",
        },
    )


def write_json(path: Path, content: dict[str, object]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    print(ensure_checkpoint(Path(sys.argv[1]), SHAPES[sys.argv[2]], int(sys.argv[3])))
