"""What a decoder is built of: one frozen description that all families are translated to."""

from __future__ import annotations

from dataclasses import dataclass

from vmserve.attention.base import LayerAttention
from vmserve.errors import ConfigurationError, UnsupportedError
from vmserve.models.rope import RopeConfig

__all__ = [
    "ACTIVATION_NAMES",
    "DecoderConfig",
    "DeltaConfig",
    "ExpertsConfig",
    "LatentConfig",
    "LearnedPositionsConfig",
    "NormConfig",
    "TensorNames",
]

#: Names in :data:`vmserve.models.blocks.ACTIVATIONS`.
ACTIVATION_NAMES = ("gelu", "gelu_new", "gelu_pytorch_tanh", "relu", "silu", "swish", "tanh")
#: Vectors of the hidden size that live at once in a layer: residual, normed input, the
#: attention's and the MLP's output, and what the allocator has not reused yet.
_HIDDEN_COPIES = 8
#: Most taps of a convolution that the kernels take.
_MAX_TAPS = 8


@dataclass(frozen=True, kw_only=True)
class TensorNames:
    """Where a family's checkpoints keep what: names of modules, without ``.weight``.

    All but ``head`` are below ``base``, which checkpoints of the bare model leave out.
    """

    base: str
    head: str = "lm_head"
    embedding: str
    positions: str = ""
    project_in: str = ""
    project_out: str = ""
    final_norm: str
    #: Module of a layer, with "{}" for its number; the names that follow are below it.
    layer: str
    attention_norm: str
    #: Modules of q, k and v; or one that has them side by side.
    qkv: tuple[str, ...]
    qk_norms: tuple[str, ...] = ()
    output: str
    #: Norm of what attention adds to the residual.
    attention_out_norm: str = ""
    mlp_norm: str
    #: Modules of up and down; or gate, up and down; or, with ``gate_up``, gate above up in one, and
    #: down.
    mlp: tuple[str, ...]
    gate_up: bool = False
    #: Module of gated delta layers; and whether q, k, v and z are one matrix by key head, and b and
    #: a another.
    delta: str = ""
    delta_fused: bool = False
    #: Tensor below ``delta`` with minus the exponentials of A_log, which stands in its place; "":
    #: A_log.
    delta_rate: str = ""
    #: Module of attention over latents.
    latent: str = ""
    #: Whether keys and values are products of two tensors ``[heads, out, in]``, that of keys
    #: transposed.
    latent_split: bool = False
    #: Tensor of attention's sinks; the whole name.
    sinks: str = ""
    #: Modules of layers with experts. The second has "{}" for an expert's number, or names gate_up
    #: and down of all experts, each a tensor of [experts, in, out].
    router: str = ""
    #: Tensor of the correction; the whole name.
    router_correction: str = ""
    experts: tuple[str, ...] = ()
    #: Modules of gate, up and down of the shared expert, and the module whose product weighs it.
    shared_expert: tuple[str, ...] = ()
    shared_gate: str = ""
    #: Norm of what the MLP adds to the residual.
    mlp_out_norm: str = ""
    #: Whether matrices of the layers are stored as ``[in, out]``.
    transposed: bool = False
    #: Pattern for tensors which some writers add, and which are no weights.
    constants: str = r"(?!)"

    @property
    def embedding_weight(self) -> str:
        """The embedding's tensor."""
        return f"{self.base}{self.embedding}.weight"


@dataclass(frozen=True)
class NormConfig:
    """``rms``: RMSNorm, else LayerNorm with a bias; ``affine``: with weights at all.

    ``offset``: added to stored weights in float32; products with them are then rounded once.
    """

    rms: bool
    eps: float
    affine: bool = True
    offset: float = 0.0


@dataclass(frozen=True)
class LearnedPositionsConfig:
    """A table of vectors whose first ``offset`` rows belong to no position."""

    offset: int = 0


@dataclass(frozen=True, kw_only=True)
class DeltaConfig:
    """Layers with a gated delta rule in place of attention (Yang et al. 2024).

    Their state has one size however long a sequence is. Value head ``h`` has the key head
    ``h // (value_heads / key_heads)``, or ``h % key_heads`` if they are ``tiled``.
    """

    layers: frozenset[int]
    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    #: Rows that the convolution over q, k and v sees, including the token's own.
    taps: int
    tiled: bool = False

    def __post_init__(self) -> None:
        for name in ("key_heads", "value_heads", "key_dim", "value_dim"):
            if getattr(self, name) < 1:
                raise ConfigurationError(
                    f"config.json: linear attention: {name} is {getattr(self, name)}; it must be "
                    "1 or more"
                )
        if self.value_heads % self.key_heads:
            raise ConfigurationError(
                f"config.json: {self.value_heads} value heads of linear attention cannot share "
                f"{self.key_heads} key heads evenly"
            )
        if not 2 <= self.taps <= _MAX_TAPS:
            raise UnsupportedError(
                f"linear_conv_kernel_dim={self.taps} is not supported: it must be 2 to {_MAX_TAPS}"
            )

    @property
    def key_size(self) -> int:
        return self.key_heads * self.key_dim

    @property
    def value_size(self) -> int:
        return self.value_heads * self.value_dim

    @property
    def channels(self) -> int:
        """Channels of the convolution: q, k and v of all heads."""
        return 2 * self.key_size + self.value_size

    @property
    def state_floats(self) -> int:
        """Numbers of float32 that a sequence keeps in a layer."""
        return (self.taps - 1) * self.channels + self.value_size * self.key_dim


@dataclass(frozen=True, kw_only=True)
class LatentConfig:
    """Attention over latents, one of a token for all heads (DeepSeek-V2, 2024, section 2.1).

    Keys and values are products of the latent; the rotated part of keys is one for all heads, too.
    """

    #: Rank of the queries' latent; 0: queries are products of the hidden state.
    q_rank: int
    rank: int
    #: Elements of a head's key that are not rotated, and those that are.
    plain: int
    rotated: int
    #: Elements of a head's value.
    value: int
    #: Whether checkpoints have the components that are rotated together side by side.
    interleaved: bool
    #: Epsilon of the norms of latents, whatever config.json says of the others.
    norm_eps: float = 1e-6

    def __post_init__(self) -> None:
        for name in ("rank", "plain", "rotated", "value"):
            if getattr(self, name) < 1:
                raise ConfigurationError(
                    f"config.json: latent attention: {name} is {getattr(self, name)}; it must be 1 "
                    "or more"
                )
        if self.q_rank < 0:
            raise ConfigurationError(f"config.json: q_lora_rank is {self.q_rank}")

    @property
    def query_dim(self) -> int:
        return self.plain + self.rotated


@dataclass(frozen=True, kw_only=True)
class ExpertsConfig:
    """Gated MLPs of which a router chooses some for each token.

    It takes those of the largest scores and weighs their results by these: by the softmax of its
    products, or their sigmoid.
    """

    count: int
    chosen: int
    #: Elements between up and down of one expert.
    size: int
    #: Whether the weights of the chosen experts add up to 1, not those of all.
    normalised: bool
    #: Layers that have experts; the others have one MLP.
    layers: frozenset[int]
    #: Whether the router's and the experts' products have biases.
    bias: bool = False
    #: alpha and limit of a clamped gate; None: the decoder's activation.
    clamp: tuple[float, float] | None = None
    sigmoid: bool = False
    #: Whether numbers are added to the scores by which experts are chosen, not to those that weigh
    #: them.
    correction: bool = False
    #: Groups of experts. Only experts of the best groups are chosen: those whose ``group_best``
    #: largest scores have the largest sum.
    groups: int = 1
    chosen_groups: int = 1
    group_best: int = 1
    #: Factor of the experts' weights.
    scale: float = 1.0
    #: Elements between up and down of one more expert, which computes every token; 0: none.
    shared_size: int = 0
    #: Whether the shared expert's result is weighed by the sigmoid of a product.
    shared_gate: bool = False

    def __post_init__(self) -> None:
        for name in ("count", "chosen", "size"):
            if getattr(self, name) < 1:
                raise ConfigurationError(
                    f"config.json: experts: {name} is {getattr(self, name)}; it must be 1 or more"
                )
        if self.chosen > self.count:
            raise ConfigurationError(
                f"config.json: num_experts_per_tok is {self.chosen:,}, but there are "
                f"{self.count:,} experts"
            )
        if self.shared_size < 0:
            raise ConfigurationError(
                f"config.json: the shared expert has a size of {self.shared_size}"
            )
        if self.groups < 1 or self.count % self.groups:
            raise ConfigurationError(
                f"config.json: {self.count:,} experts are no {self.groups:,} equal groups"
            )
        size = self.count // self.groups
        if not 1 <= self.chosen_groups <= self.groups or self.chosen > self.chosen_groups * size:
            raise ConfigurationError(
                f"config.json: topk_group is {self.chosen_groups:,}, but {self.chosen:,} experts "
                f"are chosen in {self.groups:,} groups of {size:,}"
            )
        if self.group_best > size:
            raise ConfigurationError(
                f"config.json: groups of {size:,} experts are compared by their "
                f"{self.group_best:,} best"
            )


@dataclass(frozen=True, kw_only=True)
class DecoderConfig:
    """Sizes are in elements, positions in tokens.

    Raises :class:`~vmserve.errors.ConfigurationError` for sizes that contradict each other.
    """

    names: TensorNames
    vocab_size: int
    hidden_size: int
    #: Width of the embedding, below ``hidden_size`` where a projection joins the two (OPT-350m).
    embedding_size: int
    mlp_size: int
    q_heads: int
    kv_heads: int
    head_dim: int
    max_position_embeddings: int
    layers: tuple[LayerAttention, ...]
    #: Layers that have a delta rule instead of attention.
    delta: DeltaConfig | None = None
    #: Latents of attention. A row of the KV cache then is the keys' rotated part, then the latent,
    #: which is the value.
    latent: LatentConfig | None = None
    #: Whether attention is multiplied by the sigmoid of gates, which alternate with the queries by
    #: head.
    output_gate: bool = False
    positions: RopeConfig | LearnedPositionsConfig
    #: Rotary positions of ``local_layers``, where theirs differ.
    local_positions: RopeConfig | None = None
    local_layers: tuple[int, ...] = ()
    norm: NormConfig
    #: Whether norms stand before attention and MLP (pre-norm), not after the residual (post-norm).
    norm_first: bool = True
    final_norm: bool = True
    activation: str
    qkv_bias: bool
    output_bias: bool
    mlp_bias: bool
    experts: ExpertsConfig | None = None
    #: Scale of the queries before they are rounded; ``layers`` then have a scale of 1.
    query_scale: float | None = None
    tied_embeddings: bool
    #: Factor of the embedding's rows, rounded to the type of the computation.
    embedding_scale: float | None = None
    #: Bound of the logits, which become ``softcap * tanh(logit / softcap)``.
    logits_softcap: float | None = None

    def __post_init__(self) -> None:
        for name in ("vocab_size", "hidden_size", "embedding_size", "mlp_size", "q_heads",
                     "kv_heads", "head_dim", "max_position_embeddings"):  # fmt: skip
            value = getattr(self, name)
            if value < 1:
                raise ConfigurationError(f"config.json: {name} is {value}; it must be 1 or more")
        if not self.layers:
            raise ConfigurationError("config.json: num_layers is 0; it must be 1 or more")
        if self.q_heads % self.kv_heads:
            raise ConfigurationError(
                f"config.json: {self.q_heads} query heads cannot share "
                f"{self.kv_heads} key-value heads evenly"
            )
        for rope in self.ropes:
            rotary_dim = rope.rotary_dim
            if rotary_dim % 2 or not 0 < rotary_dim <= self.head_dim:
                raise ConfigurationError(
                    f"config.json: {rotary_dim} components of a head_dim of {self.head_dim} are "
                    "rotated; rotary embedding needs an even number of 2 or more"
                )
        for layer in self.layers:
            if layer.window is not None and layer.window < 1:
                raise ConfigurationError(
                    f"config.json: sliding_window is {layer.window}; it must be 1 or more"
                )
        if self.activation not in ACTIVATION_NAMES:
            raise UnsupportedError(
                f"activation {self.activation!r} is not supported; "
                f"supported: {', '.join(ACTIVATION_NAMES)}"
            )

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    def has_delta(self, layer: int) -> bool:
        return self.delta is not None and layer in self.delta.layers

    @property
    def attention_layers(self) -> tuple[LayerAttention, ...]:
        """Layers with keys and values."""
        return tuple(each for each in self.layers if not self.has_delta(each.layer))

    @property
    def ropes(self) -> tuple[RopeConfig, ...]:
        """The rotary positions of all layers; :meth:`rope_of` is an index."""
        both = (self.positions, self.local_positions)
        return tuple(each for each in both if isinstance(each, RopeConfig))

    def rope_of(self, layer: int) -> int:
        return int(layer in self.local_layers)

    @property
    def gated(self) -> bool:
        return self.names.gate_up or len(self.names.mlp) == 3

    @property
    def qkv_sizes(self) -> tuple[int, int, int]:
        """Outputs of the projections of q, k and v."""
        kv_size = self.kv_heads * self.head_dim
        return self.q_heads * self.head_dim, kv_size, kv_size

    @property
    def activation_width(self) -> int:
        """An upper bound on the elements that live at once, per token of a step."""
        heads = 2 * (self.q_heads + 2 * self.kv_heads) * self.head_dim
        if self.latent is not None:
            heads += 2 * self.q_heads * (self.latent.query_dim + self.latent.value)
        if self.output_gate:
            heads += 3 * self.q_heads * self.head_dim
        if self.delta is not None:
            heads = max(heads, 2 * self.delta.channels + 3 * self.delta.value_size)
        mlp = 3 * self.mlp_size
        if self.experts is not None:
            mlp = max(mlp, self.experts.chosen * (3 * self.experts.size + 2 * self.hidden_size))
            mlp += 3 * self.experts.shared_size
        return _HIDDEN_COPIES * self.hidden_size + heads + mlp

    def has_experts(self, layer: int) -> bool:
        return self.experts is not None and layer in self.experts.layers

    def mlp_size_of(self, layer: int) -> int:
        """What lies between up and down of a layer's MLP, or of an expert."""
        if self.experts is None or not self.has_experts(layer):
            return self.mlp_size
        return self.experts.size
