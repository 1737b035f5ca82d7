"""Measuring: workloads with published shapes, a paired A/B timer, machine facts."""

from vmserve_bench.lab.machine import machine_info
from vmserve_bench.lab.rounds import ManyResult, PairedResult, compare, compare_many
from vmserve_bench.workloads.shapes import (
    WORKLOADS,
    RequestShape,
    get_workload,
    prompt_token_ids,
    prompts,
)

__all__ = [
    "WORKLOADS",
    "ManyResult",
    "PairedResult",
    "RequestShape",
    "compare",
    "compare_many",
    "get_workload",
    "machine_info",
    "prompt_token_ids",
    "prompts",
]
