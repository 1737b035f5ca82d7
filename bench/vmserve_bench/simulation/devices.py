"""Device profiles by arithmetic: a model's work over a device's published speeds.

Nothing here was measured by us. Each number has its source next to it, or the word "assumed":
assumed are the shares of peaks that kernels reach, chosen once for all compared systems.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from vmserve.memory.layout import CUDA_GRANULARITY, KVLayout, plan_layout
from vmserve.scheduler.profile import DeviceProfile, KernelCosts

__all__ = [
    "A100_40GB",
    "LLAMA_8B",
    "LLAMA_8B_A100",
    "OPT_13B",
    "OPT_13B_A100",
    "Accelerator",
    "Decoder",
    "Device",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Accelerator:
    name: str
    #: Published peaks per second.
    memory_bytes_per_second: float
    flops: float
    host_bytes_per_second: float
    #: Shares of the peaks that kernels reach.
    weights_share: float
    attention_share: float
    gemm_share: float
    prefill_attention_share: float
    copy_share: float
    #: Time of a decode kernel with a block table, as a multiple of the time without one.
    paged_factor: float
    #: Seconds of a launch, and of mapping a granule.
    launch: float
    map_granule: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Decoder:
    name: str
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    num_parameters: float
    itemsize: int
    kernels_per_layer: int

    @property
    def hidden(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def token_kv_bytes(self) -> int:
        """Bytes of K and V."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * self.itemsize


#: Bandwidth and FLOP/s: NVIDIA's A100 data sheet (SXM4, 40 GB; float16 tensor cores without
#: sparsity). To the host: PCIe 4.0 x16 is 32 GB/s a direction. Price of the paged kernel:
#: PagedAttention, section 7.1, 20 to 26 % over FasterTransformer's. Mapping 2 MiB and giving
#: access: kvcached's table for the A100, 1.45 + 36 microseconds. Shares, launches: assumed.
A100_40GB = Accelerator(
    name="A100 40GB",
    memory_bytes_per_second=1555e9,
    flops=312e12,
    host_bytes_per_second=32e9,
    weights_share=0.8,
    attention_share=0.6,
    gemm_share=0.5,
    prefill_attention_share=0.3,
    copy_share=0.75,
    paged_factor=1.23,
    launch=5e-6,
    map_granule=37.5e-6,
)

#: Shape: Zhang et al., "OPT: Open Pre-trained Transformer Language Models". Parameters: 40 x 12 x
#: 5,120^2 in the layers and 52,322 x 5,120 in the embeddings. Kernels per layer: assumed.
OPT_13B = Decoder(
    name="OPT-13B",
    num_layers=40,
    num_heads=40,
    num_kv_heads=40,
    head_dim=128,
    num_parameters=12.85e9,
    itemsize=2,
    kernels_per_layer=10,
)

#: Shape and parameters: Grattafiori et al., "The Llama 3 Herd of Models". Kernels: assumed.
LLAMA_8B = Decoder(
    name="Llama-3.1-8B",
    num_layers=32,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    num_parameters=8.03e9,
    itemsize=2,
    kernels_per_layer=10,
)


@dataclass(frozen=True, slots=True)
class Device:
    """A model on an accelerator, and the memory for its KV cache."""

    name: str
    layout: KVLayout
    kv_bytes: int
    profile: DeviceProfile

    @property
    def kv_tokens(self) -> int:
        return self.kv_bytes // (self.layout.total_page_bytes // self.layout.page_tokens)


def derive_profile(model: Decoder, device: Accelerator, page_bytes: int) -> DeviceProfile:
    """Compute a profile. ``page_bytes``: of one page over all layers."""
    weight_bytes = model.num_parameters * model.itemsize
    read = model.token_kv_bytes / (device.memory_bytes_per_second * device.attention_share)
    # Two products of head_dim multiply-adds for each pair, head and layer.
    pair_flops = 4 * model.hidden * model.num_layers
    pair = pair_flops / (device.flops * device.prefill_attention_share)
    launches = model.num_layers * device.launch
    map_page = device.map_granule * page_bytes / CUDA_GRANULARITY

    def kernels(factor: float) -> KernelCosts:
        return KernelCosts(call=launches, sequence=0.0, read=read * factor, pair=pair)

    return DeviceProfile(
        name=f"{model.name} on {device.name}, derived",
        virtual=kernels(1.0),
        paged=kernels(device.paged_factor),
        step=launches * (model.kernels_per_layer - 1),
        weights=weight_bytes / (device.memory_bytes_per_second * device.weights_share),
        token=2 * model.num_parameters / (device.flops * device.gemm_share),
        map_page=map_page,
        map_page_hidden=0.0,
        copy_bytes_per_second=device.memory_bytes_per_second * device.copy_share / 2,
        swap_bytes_per_second=device.host_bytes_per_second * device.copy_share,
    )


def opt_13b(*, block_tokens: int = 16, page_tokens: int = 64, kv_bytes: int = 12 << 30) -> Device:
    """The paper's smallest set-up: 12 GiB of KV cache, 15,728 tokens (its table 1: 15.7K slots).

    Pages of 64 tokens of all layers fill 25 granules of 2 MiB exactly.
    """
    granularity = 4096 if page_tokens % 64 else CUDA_GRANULARITY
    return _on_a100(OPT_13B, granularity, page_tokens, block_tokens, kv_bytes)


def _on_a100(
    model: Decoder, granularity: int, page_tokens: int, block_tokens: int, kv_bytes: int
) -> Device:
    layout = plan_layout(
        model.num_layers,
        model.num_kv_heads,
        model.head_dim,
        "float16",
        granularity,
        layers_per_group=model.num_layers,
        page_tokens=page_tokens,
        block_tokens=block_tokens,
    )
    profile = derive_profile(model, A100_40GB, layout.total_page_bytes)
    return Device(profile.name, layout, kv_bytes, profile)


OPT_13B_A100 = opt_13b()

#: 16 GiB of KV cache and 16 GB of weights: 131,072 tokens in pages of 64, four granules each.
LLAMA_8B_A100 = _on_a100(LLAMA_8B, CUDA_GRANULARITY, 64, 16, 16 << 30)


def described(device: Device) -> dict[str, Any]:
    """Every number of the latency model, to be written with results."""
    return {
        "simulated": True,
        "device": device.name,
        "accelerator": {name: getattr(A100_40GB, name) for name in A100_40GB.__slots__},
        "model": {name: getattr(OPT_13B, name) for name in OPT_13B.__slots__},
        "kv_bytes": device.kv_bytes,
        "kv_tokens": device.kv_tokens,
        "page_tokens": device.layout.page_tokens,
        "block_tokens": device.layout.block_tokens,
    }
