"""Writes a random Llama checkpoint, the same for the same seed; prints its directory.

    python checkpoint.py CACHE_DIR 125m|smoke|8m|1b SEED

Speed does not depend on the values of weights, so a benchmark needs no trained model. The
values are still scaled so that activations and logits stay near unit variance at any depth
(linear layers 1/sqrt(fan in), those that write into the residual stream further divided by
sqrt(2 x layers), as in GPT-2): greedy decoding then has clear winners in most positions.
"""

from __future__ import annotations

import json
import math
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from models import BOS_ID, EOS_ID, PAD_ID, config_of, directory_name
from safetensors.torch import save_file
from tokenizers import Tokenizer, models, pre_tokenizers


def ensure_checkpoint(cache_dir: Path, name: str, seed: int) -> Path:
    """The checkpoint's directory under ``cache_dir``, written now if it is not there yet."""
    final = cache_dir / directory_name(name, seed)
    if final.is_dir():
        return final
    cache_dir.mkdir(parents=True, exist_ok=True)
    config = config_of(name)
    # Renamed last, so that an interrupted run leaves nothing that looks complete.
    with tempfile.TemporaryDirectory(dir=cache_dir, prefix="partial-") as scratch:
        partial = Path(scratch, "model")
        partial.mkdir()
        save_file(random_weights(config, seed), partial / "model.safetensors", {"format": "pt"})
        write_json(partial / "config.json", config)
        ids = {key: config[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id")}
        write_json(partial / "generation_config.json", ids)
        write_tokenizer(partial, config["vocab_size"])
        partial.rename(final)
    return final


def random_weights(config: dict[str, Any], seed: int) -> dict[str, torch.Tensor]:
    """All tensors of the model in bfloat16, under their Hugging Face names."""
    generator = torch.Generator().manual_seed(seed)

    def normal(rows: int, columns: int, std: float) -> torch.Tensor:
        return (torch.randn(rows, columns, generator=generator) * std).to(torch.bfloat16)

    hidden, mlp, vocabulary = (
        config[f"{each}_size"] for each in ("hidden", "intermediate", "vocab")
    )
    kv = config["num_key_value_heads"] * config["head_dim"]
    layers = config["num_hidden_layers"]
    into_residual = 1.0 / math.sqrt(2 * layers)
    matrices = {
        "self_attn.q_proj": (hidden, hidden, 1.0),
        "self_attn.k_proj": (kv, hidden, 1.0),
        "self_attn.v_proj": (kv, hidden, 1.0),
        "self_attn.o_proj": (hidden, hidden, into_residual),
        "mlp.gate_proj": (mlp, hidden, 1.0),
        "mlp.up_proj": (mlp, hidden, 1.0),
        "mlp.down_proj": (hidden, mlp, into_residual),
    }
    weights = {"model.embed_tokens.weight": normal(vocabulary, hidden, 1.0)}
    norms = ["model.norm.weight"]
    for layer in range(layers):
        prefix = f"model.layers.{layer}."
        norms += [f"{prefix}{each}_layernorm.weight" for each in ("input", "post_attention")]
        for name, (rows, columns, scale) in matrices.items():
            std = scale / math.sqrt(columns)
            weights[f"{prefix}{name}.weight"] = normal(rows, columns, std)
    weights["lm_head.weight"] = normal(vocabulary, hidden, 1.0 / math.sqrt(hidden))
    return weights | {name: torch.ones(hidden, dtype=torch.bfloat16) for name in norms}


def write_tokenizer(directory: Path, vocab_size: int) -> None:
    """A tokenizer of one made-up word per id: engines that insist on one can load it."""
    special = {"<pad>": PAD_ID, "<s>": BOS_ID, "</s>": EOS_ID, "<unk>": 3}
    words = {f"w{token_id}": token_id for token_id in range(len(special), vocab_size)}
    tokenizer = Tokenizer(models.WordLevel(special | words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens(list(special))
    tokenizer.save(str(directory / "tokenizer.json"))
    names = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>", "unk_token": "<unk>"}
    told = {"tokenizer_class": "PreTrainedTokenizerFast", **names}
    write_json(directory / "tokenizer_config.json", told)


def write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    print(ensure_checkpoint(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])))
