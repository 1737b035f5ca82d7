"""Section ``device``: what the machine is, and its memory rates as ceilings for the rest."""

from __future__ import annotations

import platform as host_platform
import time
from importlib import metadata

from .common import Context, gigabytes_per_second, median
from .driver import DriverError, VmmDriver
from .region import free_region, map_region, mapped
from .scale import Scale

PACKAGES = ("torch", "cuda-bindings", "flash-attn", "nvidia-cuda-nvrtc")


def package_versions() -> dict[str, str]:
    """Versions of the packages that matter here; absent ones are left out."""
    versions = {"python": host_platform.python_version()}
    for name in PACKAGES:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return versions


def copy_rate(driver: VmmDriver, target: int, source: int, nbytes: int, stream: int) -> float:
    """Median GB/s of a device-to-device copy, bytes read plus bytes written."""
    driver.copy(target, source, nbytes, stream)
    times = [
        driver.elapsed_ms(stream, lambda: driver.copy(target, source, nbytes, stream))
        for _ in range(9)
    ]
    return gigabytes_per_second(2 * nbytes, median(times) / 1e3)


def read_rate(driver: VmmDriver, address: int, nbytes: int, blocks: int, stream: int) -> float:
    """Median GB/s of the probe's reading kernel over a range."""
    out = driver.alloc(8)

    def read() -> None:
        driver.launch("read_range", blocks, 256, (address, nbytes // 16, out), stream)

    read()
    times = [driver.elapsed_ms(stream, read) for _ in range(9)]
    driver.free(out)
    return gigabytes_per_second(nbytes, median(times) / 1e3)


def measure_plain(context: Context, driver: VmmDriver, scale: Scale, blocks: int) -> None:
    """Rates over ordinary device memory."""
    stream = driver.new_stream()
    nbytes = scale.copy_bytes
    source, target = driver.alloc(nbytes), driver.alloc(nbytes)
    driver.memset(source, 1, nbytes, stream)
    copied = copy_rate(driver, target, source, nbytes, stream)
    driver.launch("fill_u32", blocks, 256, (source, nbytes // 4, 12345), stream)
    read = read_rate(driver, source, nbytes, blocks, stream)
    driver.free(source)
    driver.free(target)
    context.emit("rate", memory="plain", page_bytes=0, copy_gbs=copied, read_gbs=read)


def measure_pages(
    context: Context, driver: VmmDriver, scale: Scale, page_bytes: int, blocks: int
) -> None:
    """Rates over pages mapped in random order: what the page size costs a plain reader."""
    stream = driver.new_stream()
    count = max(1, scale.copy_bytes // page_bytes)
    with mapped(driver, page_bytes, count, 1) as source, mapped(driver, page_bytes, count, 2) as to:
        nbytes = source.mapped_bytes
        driver.launch("fill_u32", blocks, 256, (source.address, nbytes // 4, 12345), stream)
        copied = copy_rate(driver, to.address, source.address, nbytes, stream)
        read = read_rate(driver, source.address, nbytes, blocks, stream)
    context.emit("rate", memory="vmm", page_bytes=page_bytes, copy_gbs=copied, read_gbs=read)


def measure_bulk(context: Context, driver: VmmDriver, scale: Scale, page_bytes: int) -> None:
    """How long a whole pool takes: create and map every page, one ``set_access`` over all."""
    count = max(1, scale.copy_bytes // page_bytes)
    start = time.perf_counter()
    region = map_region(driver, page_bytes, count)
    seconds = time.perf_counter() - start
    free_region(driver, region)
    context.emit(
        "bulk_map",
        page_bytes=page_bytes,
        num_pages=count,
        seconds=seconds,
        gbs=gigabytes_per_second(count * page_bytes, seconds),
    )


def run(context: Context, driver: VmmDriver, scale: Scale) -> None:
    """Measure; see the module's docstring."""
    properties = driver.properties()
    context.emit("device", **properties, versions=package_versions())
    start = time.perf_counter()
    compiler = driver.load_kernels()
    context.emit("kernels", compiler=compiler, seconds=time.perf_counter() - start)
    blocks = 8 * int(properties["num_sms"])
    measure_plain(context, driver, scale, blocks)
    for page_bytes in scale.attention_pages:
        with context.attempt(f"rates over {page_bytes}-byte pages", DriverError):
            measure_pages(context, driver, scale, page_bytes, blocks)
            measure_bulk(context, driver, scale, page_bytes)
