"""How a Llama checkpoint's tensors are read, and named and laid out in GGUF, in both directions.

The rows of the query and key projections are put into the order of llama.cpp's rotary embedding,
which turns neighbours where Hugging Face's turns halves.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

#: In a checkpoint that was a GGUF file: which weights that has, as ``--peers`` names them.
WEIGHTS_FILE = "gguf_weights.txt"
NAMES = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}
LAYER_NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def read_tensors(path: Path) -> dict[str, np.ndarray]:
    """Every tensor of a safetensors file in bfloat16, as ``uint16`` of the same shape."""
    content = np.memmap(path, dtype=np.uint8, mode="r")
    size = int(content[:8].view("<u8")[0])
    header = json.loads(content[8 : 8 + size].tobytes())
    header.pop("__metadata__", None)
    tensors = {}
    for name, told in header.items():
        if told["dtype"] != "BF16":
            raise ValueError(f"{name} is {told['dtype']}, not BF16")
        first, last = (8 + size + offset for offset in told["data_offsets"])
        tensors[name] = content[first:last].view("<u2").reshape(told["shape"])
    return tensors


def as_float32(bits: np.ndarray) -> np.ndarray:
    """bfloat16 is the upper half of float32."""
    return (bits.astype(np.uint32) << 16).view(np.float32)


def gguf_name(name: str) -> str:
    """llama.cpp's name of a Hugging Face tensor."""
    if name in NAMES:
        return NAMES[name]
    layer, _, rest = name.removeprefix("model.layers.").partition(".")
    return f"blk.{layer}.{LAYER_NAMES[rest.removesuffix('.weight')]}.weight"


def checkpoint_name(name: str) -> str:
    """Hugging Face's name of a llama.cpp tensor."""
    for theirs, ours in NAMES.items():
        if ours == name:
            return theirs
    _, layer, rest = name.removesuffix(".weight").split(".")
    [module] = (theirs for theirs, ours in LAYER_NAMES.items() if ours == rest)
    return f"model.layers.{layer}.{module}.weight"


def neighbours(weight: np.ndarray, num_heads: int) -> np.ndarray:
    """Rows of each head from (first half, second half) to pairs: ``[rows, columns]``."""
    rows, columns = weight.shape
    halves = weight.reshape(num_heads, 2, rows // num_heads // 2, columns)
    return np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(rows, columns)


def halves(weight: np.ndarray, num_heads: int) -> np.ndarray:
    """The inverse of :func:`neighbours`."""
    rows, columns = weight.shape
    pairs = weight.reshape(num_heads, rows // num_heads // 2, 2, columns)
    return np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(rows, columns)
