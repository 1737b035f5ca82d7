"""A Llama checkpoint in bfloat16 as GGUF: ``python to_gguf.py MODEL_DIR OUT.gguf bf16|f16|q8_0``.

Needs numpy and the gguf package. bfloat16 weights keep every bit; norms are in float32, as
llama.cpp wants them.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf.quants import dequantize, quantize
from gguf.utility import SafetensorsLocal

Kind = gguf.GGMLQuantizationType


def write(model: Path, target: Path, kind: str) -> None:
    config = json.loads((model / "config.json").read_text(encoding="utf-8"))
    writer = gguf.GGUFWriter(str(target), "llama")
    writer.add_name("random llama")
    writer.add_file_type(gguf.LlamaFileType[f"MOSTLY_{kind.upper()}"])
    for what, value in {
        "vocab_size": config["vocab_size"],
        "context_length": config["max_position_embeddings"],
        "embedding_length": config["hidden_size"],
        "block_count": config["num_hidden_layers"],
        "feed_forward_length": config["intermediate_size"],
        "head_count": config["num_attention_heads"],
        "head_count_kv": config["num_key_value_heads"],
        "rope_dimension_count": config["head_dim"],
        "key_length": config["head_dim"],
        "value_length": config["head_dim"],
        "rope_freq_base": config["rope_theta"],
        "layer_norm_rms_eps": config["rms_norm_eps"],
    }.items():
        getattr(writer, f"add_{what}")(value)
    write_vocabulary(writer, model, config)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config["num_hidden_layers"])
    heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}
    for name, tensor in SafetensorsLocal(model / "model.safetensors").tensors.items():
        if tensor.dtype != "BF16":
            raise ValueError(f"{name} is {tensor.dtype}, not BF16")
        values = dequantize(tensor.mmap_bytes(), Kind.BF16).reshape(tensor.shape)
        role = name.split(".")[-2]
        if role in heads:
            values = neighbours(values, heads[role])
        stored = Kind.F32 if values.ndim == 1 else Kind[kind.upper()]
        new = names.get_name(name, try_suffixes=(".weight",))
        writer.add_tensor(new, quantize(values, stored), raw_dtype=stored)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def neighbours(weight: np.ndarray, num_heads: int) -> np.ndarray:
    """Rows of each head from (first half, second half) to pairs: llama.cpp's rotary embedding turns
    neighbours where Hugging Face's turns halves.
    """
    halves = weight.reshape(num_heads, 2, -1, weight.shape[1])
    return np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(weight.shape)


def write_vocabulary(writer: Any, model: Path, config: dict[str, Any]) -> None:
    """The tokenizer's words by id, with a space before each, as llama.cpp's own vocabularies."""
    content = json.loads((model / "tokenizer.json").read_text(encoding="utf-8"))
    ids = content["model"]["vocab"]
    special = {each["content"] for each in content["added_tokens"]}
    words = sorted(ids, key=ids.__getitem__)
    types = dict.fromkeys(special, gguf.TokenType.CONTROL) | {"<unk>": gguf.TokenType.UNKNOWN}
    writer.add_tokenizer_model("llama")
    writer.add_token_list([word if word in special else f"\u2581{word}" for word in words])
    writer.add_token_scores([-float(token_id) for token_id in range(len(words))])
    writer.add_token_types([types.get(word, gguf.TokenType.NORMAL) for word in words])
    writer.add_bos_token_id(config["bos_token_id"])
    writer.add_eos_token_id(config["eos_token_id"])
    writer.add_pad_token_id(config["pad_token_id"])
    writer.add_unk_token_id(ids["<unk>"])
    writer.add_add_bos_token(False)


if __name__ == "__main__":
    write(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3])
