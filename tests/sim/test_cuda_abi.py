"""Our declarations of the CUDA driver API against NVIDIA's own Python bindings.

The bindings drive the simulated library through their own structures and argument orders, so
that a mistake which the driver and the simulator share would show.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from cuda.bindings import driver as nvidia

from tests.helpers import run_python
from tests.sim.simcuda import ABI

HEADER = (ABI / "cuda_api.h").read_text()
attribute = nvidia.CUdevice_attribute
granularity = nvidia.CUmemAllocationGranularity_flags


def snake(name: str) -> str:
    return re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name).upper()


def test_error_numbers_are_the_apis() -> None:
    body = HEADER.split("enum Result : int {")[1].split("}")[0]
    declared = {name: int(value) for name, value in re.findall(r"k(\w+) = (\d+)", body)}
    assert declared.pop("Success") == 0
    assert len(declared) > 25
    for name, value in declared.items():
        assert getattr(nvidia.CUresult, f"CUDA_ERROR_{snake(name)}") == value, name


FLAGS = {
    "kLocationDevice": nvidia.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE,
    "kAllocationPinned": nvidia.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED,
    "kAccessRead": nvidia.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READ,
    "kAccessReadWrite": nvidia.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE,
    "kGranularityMinimum": granularity.CU_MEM_ALLOC_GRANULARITY_MINIMUM,
    "kGranularityRecommended": granularity.CU_MEM_ALLOC_GRANULARITY_RECOMMENDED,
    "kAttributeVirtualMemory": attribute.CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED,
    "kEventDisableTiming": nvidia.CUevent_flags.CU_EVENT_DISABLE_TIMING,
    "kStreamNonBlocking": nvidia.CUstream_flags.CU_STREAM_NON_BLOCKING,
    "kHostAllocPortable": nvidia.CU_MEMHOSTALLOC_PORTABLE,
}


@pytest.mark.parametrize("name", FLAGS)
def test_flags_are_the_apis(name: str) -> None:
    found = re.search(rf"\b{name} = (\d+);", HEADER)
    assert found is not None
    assert int(found[1]) == int(FLAGS[name])


CLIENT = """
import ctypes
from cuda.bindings import driver as cu
from tests.sim.simcuda import SimConfig, SimCuda

sim = SimCuda(SimConfig())


def check(result):
    assert int(result[0]) == 0, result
    return result[1] if len(result) == 2 else result[1:]


check(cu.cuInit(0))
device = check(cu.cuDeviceGet(0))
attribute = cu.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED
assert check(cu.cuDeviceGetAttribute(attribute, device)) == 1
check(cu.cuCtxSetCurrent(check(cu.cuDevicePrimaryCtxRetain(device))))
prop = cu.CUmemAllocationProp()
prop.type = cu.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
prop.location.type = cu.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
prop.location.id = 0
flag = cu.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_MINIMUM
assert check(cu.cuMemGetAllocationGranularity(prop, flag)) == 4096
handle = check(cu.cuMemCreate(8192, prop, 0))
assert check(cu.cuMemGetInfo()) == ((1 << 24) - 8192, 1 << 24)
address = check(cu.cuMemAddressReserve(16384, 0, 0, 0))
check(cu.cuMemMap(address, 8192, 0, handle, 0))
access = cu.CUmemAccessDesc()
access.location = prop.location
access.flags = cu.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READ
check(cu.cuMemSetAccess(address, 8192, [access], 1))
assert sim.access(int(address)) == 1
access.flags = cu.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
check(cu.cuMemSetAccess(address, 8192, [access], 1))
assert sim.access(int(address)) == 3
stream = check(cu.cuStreamCreate(int(cu.CUstream_flags.CU_STREAM_NON_BLOCKING)))
event = check(cu.cuEventCreate(int(cu.CUevent_flags.CU_EVENT_DISABLE_TIMING)))
check(cu.cuMemsetD8Async(address, 5, 100, stream))
check(cu.cuMemcpyAsync(int(address) + 200, int(address), 50, stream))
check(cu.cuEventRecord(event, stream))
assert cu.cuEventQuery(event)[0] == cu.CUresult.CUDA_ERROR_NOT_READY
assert cu.cuStreamQuery(stream)[0] == cu.CUresult.CUDA_ERROR_NOT_READY
check(cu.cuStreamSynchronize(stream))
check(cu.cuEventQuery(event))
check(cu.cuStreamWaitEvent(stream, event, 0))
check(cu.cuEventSynchronize(event))
check(cu.cuCtxSynchronize())
data = ctypes.string_at(int(address), 250)
assert data[:100] == bytes([5]) * 100 and data[200:] == bytes([5]) * 50 and 5 != data[100]
host = check(cu.cuMemHostAlloc(4096, cu.CU_MEMHOSTALLOC_PORTABLE))
check(cu.cuMemFreeHost(host))
check(cu.cuEventDestroy(event))
check(cu.cuStreamDestroy(stream))
check(cu.cuMemUnmap(address, 8192))
check(cu.cuMemRelease(handle))
check(cu.cuMemAddressFree(address, 16384))
check(cu.cuDevicePrimaryCtxRelease(device))
assert check(cu.cuGetErrorName(cu.CUresult.CUDA_ERROR_NOT_READY)) == b"CUDA_ERROR_NOT_READY"
assert not any(vars(sim.counts()).values()), sim.counts()
print("done")
"""


def test_nvidias_bindings_can_use_the_simulator(
    sim_library: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "libcuda.so.1").symlink_to(sim_library)
    monkeypatch.setenv("LD_LIBRARY_PATH", str(tmp_path))
    result = run_python(CLIENT)
    assert (result.stdout, result.returncode) == ("done\n", 0), result.stderr
