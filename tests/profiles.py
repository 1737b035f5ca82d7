"""A device profile on which decisions do not depend on the machine that runs the tests."""

from __future__ import annotations

from pathlib import Path

from vmserve.scheduler.profile import DeviceProfile, KernelCosts

__all__ = ["steady_profile", "write_profile"]


def steady_profile(*, call: float = 0.0, **changes: float) -> DeviceProfile:
    """Reading pages is dearer than reading slots by half, and copies are very slow: what forks is
    better paged, and what does not better virtual. ``call``: of either kernel family in a step."""
    costs: dict[str, float] = {
        "step": 1e-3,
        "weights": 1e-3,
        "token": 1e-5,
        "map_page": 1e-5,
        "map_page_hidden": 0.0,
        "copy_bytes_per_second": 1e6,
        "swap_bytes_per_second": 1e9,
        **changes,
    }
    return DeviceProfile(
        name="steady",
        virtual=KernelCosts(call=call, sequence=0.0, read=1e-6, pair=1e-8),
        paged=KernelCosts(call=call, sequence=0.0, read=1.5e-6, pair=1e-8),
        **costs,
    )


def write_profile(directory: Path, *, call: float = 0.0) -> str:
    path = directory / "profile.json"
    path.write_text(steady_profile(call=call).to_json(), encoding="utf-8")
    return str(path)
