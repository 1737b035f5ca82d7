"""The driver sections of ``vmserve bench alloc`` on the CUDA driver, over the simulated library."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from vmserve_bench.alloc import bandwidth, calls, section

if TYPE_CHECKING:
    from collections.abc import Callable

    from vmserve import _core

PAGE = 2 << 20


@pytest.mark.parametrize(("work", "names"), [(calls.live, 9), (bandwidth.make_usable, 3)])
def test_rounds(
    work: Callable[[section.Rig], None],
    names: int,
    monkeypatch: pytest.MonkeyPatch,
    sim_cuda_driver: Callable[..., _core.CudaDriver],
) -> None:
    def make(kind: str, frame_bytes: int, num_frames: int) -> Any:
        assert kind == "cuda"
        return sim_cuda_driver(frame_bytes, num_frames)

    monkeypatch.setattr(section, "make_driver", make)
    rig = section.Rig("cuda", 2 * PAGE, 3)
    for _ in range(2):
        work(rig)
    assert [len(samples) for samples in rig.times.values()] == [2] * names


def test_pages_are_whole_granules() -> None:
    sizes = (*calls.PAGE_SIZES["cuda"], *bandwidth.PAGE_SIZES["cuda"])
    assert all(size % PAGE == 0 for size in sizes)
