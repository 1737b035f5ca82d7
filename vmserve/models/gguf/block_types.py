"""Element types of GGUF tensors: how many elements a block has, and how many bytes."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["BLOCK_TYPES", "BlockType", "type_name"]


@dataclass(frozen=True)
class BlockType:
    """A row is a whole number of blocks; plain numbers are blocks of one element."""

    name: str
    num_elements: int
    num_bytes: int


#: Block types that can be read, by their number in the file.
BLOCK_TYPES = {
    0: BlockType("F32", 1, 4),
    1: BlockType("F16", 1, 2),
    2: BlockType("Q4_0", 32, 18),
    3: BlockType("Q4_1", 32, 20),
    6: BlockType("Q5_0", 32, 22),
    7: BlockType("Q5_1", 32, 24),
    8: BlockType("Q8_0", 32, 34),
    12: BlockType("Q4_K", 256, 144),
    13: BlockType("Q5_K", 256, 176),
    14: BlockType("Q6_K", 256, 210),
    30: BlockType("BF16", 1, 2),
    39: BlockType("MXFP4", 32, 17),
}
#: Names of the other block types, for errors.
_OTHERS = {
    9: "Q8_1", 10: "Q2_K", 11: "Q3_K", 15: "Q8_K", 16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS",
    19: "IQ1_S", 20: "IQ4_NL", 21: "IQ3_S", 22: "IQ2_S", 23: "IQ4_XS", 24: "I8", 25: "I16",
    26: "I32", 27: "I64", 28: "F64", 29: "IQ1_M", 34: "TQ1_0", 35: "TQ2_0",
    40: "NVFP4", 41: "Q1_0",
}  # fmt: skip


def type_name(number: int) -> str:
    """Return the name of a type, or its number for an unknown one."""
    if number in BLOCK_TYPES:
        return BLOCK_TYPES[number].name
    return _OTHERS.get(number, f"number {number}")
