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
from gguf.quants import quantize
from gguf_layout import as_float32, gguf_name, neighbours, read_tensors

TYPES = {
    "bf16": gguf.GGMLQuantizationType.BF16,
    "f16": gguf.GGMLQuantizationType.F16,
    "q8_0": gguf.GGMLQuantizationType.Q8_0,
}
FILE_TYPES = {
    "bf16": gguf.LlamaFileType.MOSTLY_BF16,
    "f16": gguf.LlamaFileType.MOSTLY_F16,
    "q8_0": gguf.LlamaFileType.MOSTLY_Q8_0,
}


def encoded(bits: np.ndarray, kind: str) -> np.ndarray:
    """A matrix in the file's type; bfloat16 and q8_0 as bytes."""
    if kind == "bf16":
        return np.ascontiguousarray(bits).view(np.uint8)
    if kind == "f16":
        return as_float32(bits).astype(np.float16)
    return quantize(as_float32(bits), TYPES[kind])


def write(model: Path, target: Path, kind: str) -> None:
    config = json.loads((model / "config.json").read_text(encoding="utf-8"))
    writer = gguf.GGUFWriter(str(target), "llama")
    write_shape(writer, config, kind)
    write_vocabulary(writer, model, config)
    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    for name, bits in read_tensors(model / "model.safetensors").items():
        new = gguf_name(name)
        role = new.split(".")[-2]
        if role in heads:
            bits = neighbours(bits, heads[role])
        if bits.ndim == 1:
            writer.add_tensor(new, as_float32(bits))
        else:
            data = encoded(bits, kind)
            is_raw = data.dtype == np.uint8
            writer.add_tensor(new, data, raw_dtype=TYPES[kind] if is_raw else None)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def write_shape(writer: Any, config: dict[str, Any], kind: str) -> None:
    writer.add_name("random llama")
    writer.add_file_type(FILE_TYPES[kind])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_rope_dimension_count(config["head_dim"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])


def write_vocabulary(writer: Any, model: Path, config: dict[str, Any]) -> None:
    """The tokenizer's words by id, with a space before each, as llama.cpp's own vocabularies."""
    content = json.loads((model / "tokenizer.json").read_text(encoding="utf-8"))
    ids = content["model"]["vocab"]
    special = {each["content"] for each in content["added_tokens"]}
    words = [""] * config["vocab_size"]
    for word, token_id in ids.items():
        words[token_id] = word
    kinds = [
        gguf.TokenType.UNKNOWN
        if word == "<unk>"
        else gguf.TokenType.CONTROL
        if word in special
        else gguf.TokenType.NORMAL
        for word in words
    ]
    writer.add_tokenizer_model("llama")
    writer.add_token_list([word if word in special else f"\u2581{word}" for word in words])
    writer.add_token_scores([-float(token_id) for token_id in range(len(words))])
    writer.add_token_types(kinds)
    writer.add_bos_token_id(config["bos_token_id"])
    writer.add_eos_token_id(config["eos_token_id"])
    writer.add_pad_token_id(config["pad_token_id"])
    writer.add_unk_token_id(ids["<unk>"])
    writer.add_add_bos_token(False)


if __name__ == "__main__":
    write(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3])
