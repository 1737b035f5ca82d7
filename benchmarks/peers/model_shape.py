"""The dimensions of the benchmark's models, apart from what it takes to write them."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace

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
        name = (
            f"llama-h{self.hidden_size}-l{self.num_layers}-q{self.num_heads}"
            f"-kv{self.num_kv_heads}-m{self.mlp_size}-v{self.vocab_size}"
        )
        context = self.max_position_embeddings
        return name if context == 2048 else f"{name}-c{context}"


#: 124.7 million parameters.
LLAMA_125M = LlamaShape()
SMOKE = LlamaShape(
    hidden_size=64, num_layers=2, num_heads=4, num_kv_heads=2, mlp_size=128, vocab_size=512
)
#: 8.3 million parameters.
LLAMA_8M = LlamaShape(
    hidden_size=288,
    num_layers=6,
    num_heads=6,
    num_kv_heads=6,
    mlp_size=768,
    vocab_size=4096,
    max_position_embeddings=4096,
)
#: 1.1 billion parameters.
LLAMA_1B = LlamaShape(
    hidden_size=2048,
    num_layers=16,
    num_heads=32,
    num_kv_heads=8,
    mlp_size=8192,
    max_position_embeddings=4096,
)
#: The same weights as ``125m``, with room for a prompt of 2,048 tokens and its answer.
LLAMA_125M_LONG = replace(LLAMA_125M, max_position_embeddings=4096)
SHAPES = {
    "125m": LLAMA_125M,
    "125m-long": LLAMA_125M_LONG,
    "1b": LLAMA_1B,
    "8m": LLAMA_8M,
    "smoke": SMOKE,
}


def describe(shape: LlamaShape, seed: int) -> dict[str, object]:
    """The checkpoint as it is named in results."""
    return {**asdict(shape), "seed": seed, "weights_dtype": "bfloat16"}
