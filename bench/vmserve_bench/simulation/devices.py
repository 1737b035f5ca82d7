"""Device profiles by arithmetic: a model's work over a device's published speeds.

Nothing here was measured by us. Each number has its source next to it, or the word "assumed":
assumed are the shares of peaks that kernels reach, chosen once for all compared systems.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from vmserve.memory.layout import CUDA_GRANULARITY, KVLayout, plan_layout
from vmserve.scheduler.profile import DeviceProfile, KernelCosts

__all__ = ["LLAMA_8B_A100", "OPT_13B", "OPT_13B_A100", "SECONDS_PER_COPY", "Device", "opt_13b"]


@dataclass(frozen=True, slots=True)
class Accelerator:
    """The A100. Rates are a second's; the shares of peaks that kernels reach are assumed."""

    name: str = "A100 40GB"
    #: NVIDIA's data sheet (SXM4, 40 GB; float16 tensor cores without sparsity).
    memory_bytes_per_second: float = 1555e9
    flops: float = 312e12
    #: PCIe 4.0 x16, a direction.
    host_bytes_per_second: float = 32e9
    weights_share: float = 0.8
    attention_share: float = 0.6
    gemm_share: float = 0.5
    prefill_attention_share: float = 0.3
    copy_share: float = 0.75
    #: Time of a decode kernel with a block table over that without one: PagedAttention, section
    #: 7.1, 20 to 26 % over FasterTransformer's.
    paged_factor: float = 1.23
    #: Seconds of a launch: assumed.
    launch: float = 5e-6
    #: Seconds of mapping 2 MiB and giving access: kvcached's table for the A100, 1.45 + 36 us.
    map_granule: float = 37.5e-6


_A100 = Accelerator()


@dataclass(frozen=True, slots=True, kw_only=True)
class Decoder:
    name: str
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    num_parameters: float
    itemsize: int = 2
    #: Assumed.
    kernels_per_layer: int = 10

    @property
    def token_kv_bytes(self) -> int:
        """Bytes of K and V."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * self.itemsize


#: Shape: Zhang et al., "OPT: Open Pre-trained Transformer Language Models". Parameters: 40 x 12 x
#: 5,120^2 in the layers and 52,322 x 5,120 in the embeddings.
OPT_13B = Decoder(
    name="OPT-13B",
    num_layers=40,
    num_heads=40,
    num_kv_heads=40,
    head_dim=128,
    num_parameters=12.85e9,
)
#: Shape and parameters: Grattafiori et al., "The Llama 3 Herd of Models".
_LLAMA_8B = Decoder(
    name="Llama-3.1-8B",
    num_layers=32,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    num_parameters=8.03e9,
)

#: Calls that copy a block to the host where each layer's K and V lie apart, as in PagedAttention's
#: system, and seconds of each besides its bytes, which are assumed: a copy's launch.
COPIES_PER_BLOCK = 2 * OPT_13B.num_layers
SECONDS_PER_COPY = 3e-6


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


def _profile(model: Decoder, device: Accelerator, page_bytes: int) -> DeviceProfile:
    """``page_bytes``: of one page over all layers."""
    read = model.token_kv_bytes / (device.memory_bytes_per_second * device.attention_share)
    # Two products of head_dim multiply-adds for each pair, head and layer.
    pair_flops = 4 * model.num_heads * model.head_dim * model.num_layers
    pair = pair_flops / (device.flops * device.prefill_attention_share)
    launches = model.num_layers * device.launch
    weight_bytes = model.num_parameters * model.itemsize

    def kernels(factor: float) -> KernelCosts:
        return KernelCosts(call=launches, sequence=0.0, read=read * factor, pair=pair)

    return DeviceProfile(
        name=f"{model.name} on {device.name}, derived",
        virtual=kernels(1.0),
        paged=kernels(device.paged_factor),
        step=launches * (model.kernels_per_layer - 1),
        weights=weight_bytes / (device.memory_bytes_per_second * device.weights_share),
        token=2 * model.num_parameters / (device.flops * device.gemm_share),
        map_page=device.map_granule * page_bytes / CUDA_GRANULARITY,
        map_page_hidden=0.0,
        copy_bytes_per_second=device.memory_bytes_per_second * device.copy_share / 2,
        swap_bytes_per_second=device.host_bytes_per_second * device.copy_share,
    )


def _on_a100(model: Decoder, kv_bytes: int, page_tokens: int, block_tokens: int) -> Device:
    layout = plan_layout(
        model.num_layers,
        model.num_kv_heads,
        model.head_dim,
        "float16",
        4096 if page_tokens % 64 else CUDA_GRANULARITY,
        layers_per_group=model.num_layers,
        page_tokens=page_tokens,
        block_tokens=block_tokens,
    )
    profile = _profile(model, _A100, layout.total_page_bytes)
    return Device(profile.name, layout, kv_bytes, profile)


def opt_13b(*, block_tokens: int = 16, page_tokens: int = 64) -> Device:
    """The paper's smallest set-up: 12 GiB of KV cache, 15,728 tokens (its table 1: 15.7K slots).

    Pages of 64 tokens of all layers fill 25 granules of 2 MiB exactly.
    """
    return _on_a100(OPT_13B, 12 << 30, page_tokens, block_tokens)


OPT_13B_A100 = opt_13b()
#: 16 GiB of KV cache and 16 GB of weights: 131,072 tokens in pages of 64, four granules each.
LLAMA_8B_A100 = _on_a100(_LLAMA_8B, 16 << 30, 64, 16)


def described(device: Device) -> dict[str, Any]:
    """Every number of the latency model, to be written with results."""
    return {
        "simulated": True,
        "device": device.name,
        "accelerator": asdict(_A100),
        "model": asdict(OPT_13B),
        "kv_bytes": device.kv_bytes,
        "kv_tokens": device.kv_tokens,
        "page_tokens": device.layout.page_tokens,
        "block_tokens": device.layout.block_tokens,
    }
