"""Section ``device``: what the machine is, and its memory rates as ceilings for the rest."""

from __future__ import annotations

import torch
from torch import Tensor
from vmserve_bench.lab.machine import package_versions
from vmserve_bench.lab.statistics import percentile

from vmserve.errors import VmserveError

from .common import Context, gigabytes_per_second
from .machine import HostMachine, mapped
from .scale import Scale

PACKAGES = ("torch", "cuda-bindings", "flash-attn", "nvidia-cuda-nvrtc")


def measure_rates(
    context: Context, machine: HostMachine, source: Tensor, target: Tensor, **fields: object
) -> None:
    """Median GB/s of a copy (bytes read plus written) and of a sum over float32."""

    def median_s(call: object) -> float:
        machine.elapsed_ms(call)
        return percentile([machine.elapsed_ms(call) for _ in range(9)], 50) / 1e3

    numbers = source.view(torch.float32)
    context.emit(
        "rate",
        copy_gbs=gigabytes_per_second(2 * source.numel(), median_s(lambda: target.copy_(source))),
        read_gbs=gigabytes_per_second(source.numel(), median_s(numbers.sum)),
        **fields,
    )


def run(context: Context, machine: HostMachine, scale: Scale) -> None:
    """Measure; see the module's docstring. Pages are mapped in random order."""
    context.emit("device", **machine.properties(), versions=package_versions(PACKAGES))
    plain = torch.zeros(2, scale.copy_bytes, dtype=torch.uint8, device=machine.device)
    measure_rates(context, machine, plain[0], plain[1], memory="plain", page_bytes=0)
    del plain
    machine.empty_cache()
    for page in scale.attention_pages:
        count = max(1, scale.copy_bytes // page)
        with (
            context.attempt(f"rates over {page}-byte pages", VmserveError),
            mapped(machine, page, count, 1) as source,
            mapped(machine, page, count, 2) as target,
        ):
            source.driver.zero([(source.address, source.num_bytes)])
            tensors = source.tensor(), target.tensor()
            measure_rates(context, machine, *tensors, memory="vmm", page_bytes=page)
