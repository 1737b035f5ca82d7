"""A Llama's GGUF file as a checkpoint in float32: ``python from_gguf.py FILE.gguf OUT_DIR``.

Each weight is what the file says, dequantized by the gguf package. Needs that and transformers,
which reads the shape and the tokenizer.
"""

from __future__ import annotations

import sys
from pathlib import Path

import gguf
import transformers
from gguf.quants import dequantize
from gguf_layout import WEIGHTS_FILE, checkpoint_name, halves
from safetensors.numpy import save_file


def write(source: Path, target: Path) -> None:
    reader = gguf.GGUFReader(source)
    fields = {name: field.contents() for name, field in reader.fields.items()}
    if fields["general.architecture"] != "llama":
        architecture = fields["general.architecture"]
        raise ValueError(f"{source.name} is {architecture}: only llama is converted here")
    kind = gguf.LlamaFileType(fields["general.file_type"]).name
    config = transformers.AutoConfig.from_pretrained(source.parent, gguf_file=source.name)
    config.architectures = ["LlamaForCausalLM"]
    heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}
    tensors = {}
    for tensor in reader.tensors:
        if tensor.name == "rope_freqs.weight":
            raise ValueError(f"{source.name} scales rotary frequencies: not converted here")
        values = dequantize(tensor.data, tensor.tensor_type)
        role = tensor.name.split(".")[-2]
        if role in heads:
            values = halves(values, heads[role])
        tensors[checkpoint_name(tensor.name)] = values
    target.mkdir()
    save_file(tensors, target / "model.safetensors", {"format": "pt"})
    config.save_pretrained(target)
    tokenizer = transformers.AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name)
    tokenizer.save_pretrained(target)
    weights = kind.removeprefix("MOSTLY_").lower()
    (target / WEIGHTS_FILE).write_text(weights, encoding="utf-8")


if __name__ == "__main__":
    write(Path(sys.argv[1]), Path(sys.argv[2]))
