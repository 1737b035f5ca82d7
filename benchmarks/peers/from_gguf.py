"""A Llama's GGUF file as a checkpoint in float32: ``python from_gguf.py FILE.gguf OUT_DIR``.

Each weight is what the file says, dequantized by the gguf package. Needs that and transformers,
which reads the shape and the tokenizer.
"""

from __future__ import annotations

import sys
from pathlib import Path

import gguf
import numpy as np
import torch
import transformers
from gguf.quants import dequantize
from models import WEIGHTS_FILE
from safetensors.numpy import save_file


def write(source: Path, target: Path) -> None:
    reader = gguf.GGUFReader(source)
    architecture = reader.fields["general.architecture"].contents()
    if architecture != "llama":
        raise ValueError(f"{source.name} is {architecture}: only llama is converted here")
    kind = gguf.LlamaFileType(reader.fields["general.file_type"].contents()).name
    config = transformers.AutoConfig.from_pretrained(source.parent, gguf_file=source.name)
    config.architectures = ["LlamaForCausalLM"]
    with torch.device("meta"):
        wanted = transformers.AutoModelForCausalLM.from_config(config).state_dict()
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config.num_hidden_layers)
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    stored = {tensor.name: tensor for tensor in reader.tensors}
    tensors = {}
    for name in wanted:
        tensor = stored.pop(names.get_name(name, try_suffixes=(".weight",)), None)
        if tensor is None:  # the output layer that is the embedding too
            continue
        values = dequantize(tensor.data, tensor.tensor_type)
        role = name.split(".")[-2]
        tensors[name] = halves(values, heads[role]) if role in heads else values
    if stored:  # such as scaled rotary frequencies
        raise ValueError(f"{source.name} has {', '.join(stored)}: not converted here")
    target.mkdir()
    save_file(tensors, target / "model.safetensors", {"format": "pt"})
    config.save_pretrained(target)
    tokenizer = transformers.AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name)
    tokenizer.save_pretrained(target)
    weights = kind.removeprefix("MOSTLY_").lower()
    (target / WEIGHTS_FILE).write_text(weights, encoding="utf-8")


def halves(weight: np.ndarray, num_heads: int) -> np.ndarray:
    """Rows of each head from the pairs of llama.cpp's rotary embedding to two halves."""
    pairs = weight.reshape(num_heads, -1, 2, weight.shape[1])
    return np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(weight.shape)


if __name__ == "__main__":
    write(Path(sys.argv[1]), Path(sys.argv[2]))
