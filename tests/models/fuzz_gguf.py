"""Damaged GGUF files: each has to be read, and its weights packed, or be refused in one line by an
error of ours."""

from __future__ import annotations

import random
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGUFWriter

from tests.models.gguf_files import (
    TYPES,
    add_byte_level,
    add_llama,
    add_sentencepiece,
    llama_tensors,
    random_blocks,
    write,
)
from vmserve.errors import ConfigurationError, UnsupportedError
from vmserve.models.config import ModelConfig
from vmserve.models.gguf.dequantize import dequantize
from vmserve.models.gguf.reader import open_gguf
from vmserve.models.native import load_native, refusal
from vmserve.numbers.dtypes import DType
from vmserve.text.tokenizer import load_tokenizer

#: Numbers that lengths, counts and offsets are replaced by.
_TELLING = [
    *(value + step for power in (0, 5, 7, 8, 15, 16, 31, 32, 62, 63, 64)
      for value in [1 << power] for step in (-1, 0, 1) if 0 <= value + step < 1 << 64),
    3, 9, 12, 0xDEADBEEF,
]  # fmt: skip
_LONGEST_LINE = 700


_WIDE = {"layers": 1, "hidden": 256, "mlp": 256, "heads": 4, "kv_heads": 1}
_WIDE_TYPES = {
    "attn_q": ("Q4_K", 256), "attn_k": ("Q5_K", 64), "attn_v": ("Q6_K", 64),
    "attn_output": ("Q5_0", 256), "ffn_gate": ("Q4_0", 256), "ffn_up": ("BF16", 256),
    "ffn_down": ("Q4_1", 256),
}  # fmt: skip


def _wide_tensors(rng: np.random.Generator) -> dict[str, Any]:
    matrices = {f"blk.0.{name}.weight": kind for name, kind in _WIDE_TYPES.items()}
    matrices |= {"token_embd.weight": ("Q4_K", 280), "output.weight": ("Q6_K", 280)}
    ones = "F32", np.ones(256, np.float32)
    norms = ("output_norm", "blk.0.attn_norm", "blk.0.ffn_norm")
    return {
        **{name: (kind, random_blocks(kind, n, 256, rng)) for name, (kind, n) in matrices.items()},
        **{f"{name}.weight": ones for name in norms},
    }


def originals(directory: Path) -> list[bytes]:
    """Small models, one of mixed types, and a file with a tensor of every type."""
    rng = np.random.default_rng(5)
    files = []
    for index, kind in enumerate(("F32", "Q4_1", "all", "K")):
        path = directory / f"original{index}.gguf"
        add_tokenizer = add_sentencepiece if kind == "Q4_1" else add_byte_level

        def metadata(writer: GGUFWriter, add: Any = add_tokenizer) -> None:
            add_llama(writer, **(_WIDE if kind == "K" else {}))  # noqa: B023 - called in the loop
            add(writer)

        if kind == "all":
            tensors = {name: (name, random_blocks(name, 2, 256, rng)) for name in TYPES}
            write(path, "llama", tensors)
        elif kind == "K":
            write(path, "llama", _wide_tensors(rng), metadata)
        else:
            # As many rows as either vocabulary has tokens, or more.
            write(path, "llama", llama_tensors(rng, kind, vocab=280), metadata)
        files.append(path.read_bytes())
    return files


def damaged(original: bytes, rng: random.Random) -> bytes:
    """One to four changes, most of them in what is before the tensors' data."""
    data = bytearray(original)
    # Weights are seldom places for interesting faults: infinities, and what is no number.
    header = len(data) if rng.random() < 0.05 else min(len(data), 12_000)
    for _ in range(rng.choice((1, 1, 1, 2, 4))):
        place = rng.randrange(min(header, max(1, len(data))))
        match rng.randrange(7):
            case 0:
                data[place : place + 1] = bytes([rng.randrange(256)])
            case 1:
                data[place : place + 1] = bytes([data[place] ^ 1 << rng.randrange(8)])
            case 2:
                number = rng.choice(_TELLING)
                data[place : place + 8] = struct.pack("<Q", number)
            case 3:
                data[place : place + 4] = struct.pack("<I", rng.choice(_TELLING) & 0xFFFFFFFF)
            case 4:
                del data[place : place + rng.randrange(1, 64)]
            case 5:
                other = rng.randrange(header)
                data[place:place] = data[other : other + rng.randrange(1, 64)]
            case _:
                del data[rng.randrange(len(data)) :]
        if not data:
            break
    return bytes(data)


def _load(path: Path) -> None:
    """Every weight packed, and the ends of the embedding."""
    config = ModelConfig.from_directory(path)
    if (reason := refusal(config.network, DType.FLOAT32)) is not None:
        raise UnsupportedError(reason)
    decoder = load_native(path, config, DType.FLOAT32, 64)
    decoder._rows(np.array([0, config.vocab_size - 1]))


def _dequantize(path: Path) -> None:
    for file, tensor in open_gguf(path).tensors.values():
        dequantize(tensor.type, file.raw(tensor))


def read_all(path: Path) -> str:
    """Everything that is ever read of a file; returns the error's text, or "" if there is none."""
    said = []
    for use in (_dequantize, _load, load_tokenizer):
        try:
            use(path)
        except ConfigurationError as error:
            said.append(str(error))
    return said[0] if said else ""


def fuzz(num_files: int, seed: int, directory: Path) -> Iterator[str]:
    """What is said of each damaged file; raises for what must not happen."""
    rng = random.Random(seed)
    sources = originals(directory)
    path = directory / "damaged.gguf"
    for number in range(num_files):
        data = damaged(rng.choice(sources), rng)
        path.write_bytes(data)
        try:
            said = read_all(path)
            assert said.isprintable(), said
            assert len(said) <= _LONGEST_LINE, said
        except BaseException:
            print(f"file {number} of seed {seed} is not read as it should be")
            raise
        yield said
