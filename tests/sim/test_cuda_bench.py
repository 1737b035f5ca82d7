"""The driver sections of ``vmserve bench alloc`` on the CUDA driver, over the simulated library."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from vmserve_bench.alloc import bandwidth, calls

if TYPE_CHECKING:
    from collections.abc import Callable

    from vmserve import _core

PAGE = 2 << 20


@pytest.fixture(autouse=True)
def _on_the_simulator(
    monkeypatch: pytest.MonkeyPatch, sim_cuda_driver: Callable[..., _core.CudaDriver]
) -> None:
    def make(kind: str, frame_bytes: int, num_frames: int) -> Any:
        assert kind == "cuda"
        return sim_cuda_driver(frame_bytes, num_frames)

    monkeypatch.setattr(calls, "make_driver", make)
    monkeypatch.setattr(bandwidth, "make_driver", make)


def test_a_round_of_calls() -> None:
    rig = calls.CallRig("cuda", PAGE, 3)
    for _ in range(2):
        rig.round()
    assert {len(samples) for samples in rig.samples.values()} == {2}
    rig.close()


def test_a_round_of_allocation() -> None:
    rig = bandwidth.BandwidthRig("cuda", 2 * PAGE, 3)
    for _ in range(2):
        rig.round()
    assert all(rig.gb_per_s(way) > 0 for way in bandwidth.WAYS)
    rig.close()


def test_pages_are_whole_granules() -> None:
    assert all(size % PAGE == 0 for size in (*calls.CUDA_PAGE_SIZES, *bandwidth.CUDA_PAGE_SIZES))
