"""The dimensions of the benchmark's models, apart from what it takes to write them."""

from __future__ import annotations

from dataclasses import asdict, dataclass

BOS_ID, EOS_ID, PAD_ID = 1, 2, 0
SPECIAL_IDS = (PAD_ID, BOS_ID, EOS_ID)


@dataclass(frozen=True, slots=True)
class LlamaShape:
    """Dimensions of a Llama model with untied embeddings."""

    hidden_size: int = 768
    num_layers: int = 12
    num_heads: int = 12
    num_kv_heads: int = 4
    mlp_size: int = 2048
    vocab_size: int = 32_000
    max_position_embeddings: int = 2048

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_heads

    @property
    def name(self) -> str:
        return (
            f"llama-h{self.hidden_size}-l{self.num_layers}-q{self.num_heads}"
            f"-kv{self.num_kv_heads}-m{self.mlp_size}-v{self.vocab_size}"
        )


#: 124.7 million parameters.
LLAMA_125M = LlamaShape()
SMOKE = LlamaShape(
    hidden_size=64, num_layers=2, num_heads=4, num_kv_heads=2, mlp_size=128, vocab_size=512
)
SHAPES = {"125m": LLAMA_125M, "smoke": SMOKE}


def describe(shape: LlamaShape, seed: int) -> dict[str, object]:
    """The checkpoint as it is named in results."""
    return {**asdict(shape), "seed": seed, "weights_dtype": "bfloat16"}
