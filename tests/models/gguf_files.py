"""GGUF files for tests, written by the ``gguf`` package."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Kind
from numpy.typing import NDArray

#: Bytes where blocks of a type have float16 numbers.
_HALVES = {
    "Q4_0": (0,), "Q4_1": (0, 2), "Q5_0": (0,), "Q5_1": (0, 2), "Q8_0": (0,),
    "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,),
}  # fmt: skip
QUANTIZED = tuple(_HALVES)
TYPES = ("F32", "F16", "BF16", "MXFP4", *QUANTIZED)


def random_blocks(
    name: str, rows: int, columns: int, rng: np.random.Generator, factor: float | None = None
) -> NDArray[np.uint8]:
    """Random bytes ``[rows, bytes of a row]``: of all values that a type can have, but infinite
    numbers and not-a-numbers. ``factor``: of every quantized block instead."""
    elements, num_bytes = gguf.GGML_QUANT_SIZES[Kind[name]]
    raw = rng.integers(0, 256, (rows, columns // elements, num_bytes), dtype=np.uint8)
    if name in _HALVES:
        for first in _HALVES[name]:
            halves = _finite_halves(rng, raw.shape[:2])
            if factor is not None:
                halves = np.full(raw.shape[:2], factor, np.float16)
            raw[:, :, first : first + 2] = halves.view(np.uint8).reshape(*raw.shape[:2], 2)
    elif name == "MXFP4":
        raw[:, :, 0] %= 251  # the largest overflow, the last is no number
    elif name == "F16":
        raw = _finite_halves(rng, (rows, columns)).view(np.uint8)
    else:
        numbers = rng.standard_normal((rows, columns)).astype(np.float32)
        bits = numbers.view(np.uint32)
        raw = (
            (bits >> 16).astype(np.uint16).view(np.uint8) if name == "BF16" else bits.view(np.uint8)
        )
    return np.ascontiguousarray(raw).reshape(rows, -1)


def _finite_halves(rng: np.random.Generator, shape: tuple[int, ...]) -> NDArray[np.float16]:
    bits = rng.integers(0, 1 << 16, shape, dtype=np.uint16)
    # The highest bit of the exponent is off in infinities' stead; subnormal numbers stay.
    return np.where(bits & 0x7C00 == 0x7C00, bits & 0xBFFF, bits).astype(np.uint16).view(np.float16)


def write(
    path: Path,
    architecture: str,
    tensors: Mapping[str, tuple[str, NDArray[Any]]],
    metadata: Callable[[gguf.GGUFWriter], None] = lambda writer: None,
    **options: Any,
) -> Path:
    """``tensors``: name -> type, and numbers (F32) or the bytes of the rows (others)."""
    writer = gguf.GGUFWriter(path, architecture, **options)
    metadata(writer)
    for name, (kind, array) in tensors.items():
        raw = None if kind == "F32" and array.dtype == np.float32 else Kind[kind]
        writer.add_tensor(name, array, raw_dtype=raw)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def byte_vocabulary() -> tuple[list[str], list[str], list[int]]:
    """Tokens, merges and kinds of a small byte-level tokenizer; three special tokens are first."""
    printing = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = iter(range(0x100, 0x200))
    letters = [chr(byte) if byte in printing else chr(next(others)) for byte in range(256)]
    merges = ["h e", "l l", "he ll", "hell o", "Ġ w", "1 2", "12 3", "Ã ©"]
    special = ["<s>", "</s>", "<think>"]
    tokens = [*special, *letters, *(merge.replace(" ", "") for merge in merges), "[PAD0]", "[PAD1]"]
    kinds = [3, 3, 4, *[1] * (256 + len(merges)), 5, 5]
    return tokens, merges, kinds


def add_byte_level(writer: gguf.GGUFWriter, pre: str = "smollm") -> None:
    tokens, merges, kinds = byte_vocabulary()
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    writer.add_token_merges(merges)
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)
    writer.add_chat_template("{% for m in messages %}<s>{{ m.content }}{% endfor %}")


def add_sentencepiece(writer: gguf.GGUFWriter) -> None:
    pieces = ["▁", "h", "e", "l", "o", "w", "he", "ll", "hell", "hello", "▁hello", "▁w", "▁▁"]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *pieces]
    writer.add_tokenizer_model("llama")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(tokens)
    writer.add_token_scores([0.0] * 259 + [-float(index) for index in range(len(pieces))])
    writer.add_token_types([2, 3, 3, *[6] * 256, *[1] * len(pieces)])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)


def add_llama(writer: gguf.GGUFWriter, **changes: Any) -> None:
    """The metadata of a llama of two heads of 16, as :func:`llama_tensors` has tensors."""
    sizes = {"layers": 2, "hidden": 32, "mlp": 64, "heads": 2, "kv_heads": 1, "context": 64}
    sizes.update(changes)
    writer.add_block_count(sizes["layers"])
    writer.add_embedding_length(sizes["hidden"])
    writer.add_feed_forward_length(sizes["mlp"])
    writer.add_head_count(sizes["heads"])
    writer.add_head_count_kv(sizes["kv_heads"])
    writer.add_context_length(sizes["context"])
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10_000.0)


def llama_tensors(
    rng: np.random.Generator, matrices: str = "Q4_0", vocab: int | None = None
) -> dict[str, tuple[str, NDArray[Any]]]:
    vocab = len(byte_vocabulary()[0]) if vocab is None else vocab

    def matrix(rows: int, columns: int, kind: str = matrices) -> tuple[str, NDArray[Any]]:
        return kind, random_blocks(kind, rows, columns, rng)

    def vector(size: int) -> tuple[str, NDArray[Any]]:
        return "F32", rng.standard_normal(size).astype(np.float32)

    tensors = {"token_embd.weight": matrix(vocab, 32, "Q8_0"), "output_norm.weight": vector(32)}
    for layer in range(2):
        tensors |= {
            f"blk.{layer}.attn_norm.weight": vector(32),
            f"blk.{layer}.attn_q.weight": matrix(32, 32),
            f"blk.{layer}.attn_k.weight": matrix(16, 32),
            f"blk.{layer}.attn_v.weight": matrix(16, 32, "F16"),
            f"blk.{layer}.attn_output.weight": matrix(32, 32),
            f"blk.{layer}.ffn_norm.weight": vector(32),
            f"blk.{layer}.ffn_gate.weight": matrix(64, 32),
            f"blk.{layer}.ffn_up.weight": matrix(64, 32, "Q5_1"),
            f"blk.{layer}.ffn_down.weight": matrix(32, 64),
        }
    return tensors
