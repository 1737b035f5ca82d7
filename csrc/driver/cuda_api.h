// The part of the CUDA driver API that CudaDriver calls: types, constants and a table of functions,
// which is filled when a library is loaded.
//
// Declared here from the API's documented binary interface, so that one build runs on machines with
// and without an NVIDIA driver and needs no CUDA toolkit. Nothing is linked.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

namespace vmserve::cuda {

using Device = int;
using Context = void*;
using Stream = void*;  // null: the legacy default stream
using Event = void*;
using DevicePointer = std::uint64_t;
using Handle = std::uint64_t;  // a physical allocation

// CUresult; names as in the API without CUDA_ERROR_.
enum Result : int {
  kSuccess = 0,
  kInvalidValue = 1,
  kOutOfMemory = 2,
  kNotInitialized = 3,
  kDeinitialized = 4,
  kDeviceUnavailable = 46,
  kNoDevice = 100,
  kInvalidDevice = 101,
  kInvalidContext = 201,
  kEccUncorrectable = 214,
  kNvlinkUncorrectable = 220,
  kContained = 226,
  kInvalidHandle = 400,
  kIllegalState = 401,
  kNotReady = 600,
  kIllegalAddress = 700,
  kLaunchTimeout = 702,
  kContextIsDestroyed = 709,
  kAssert = 710,
  kHardwareStackError = 714,
  kIllegalInstruction = 715,
  kMisalignedAddress = 716,
  kInvalidAddressSpace = 717,
  kInvalidPc = 718,
  kLaunchFailed = 719,
  kTensorMemoryLeak = 721,
  kNotPermitted = 800,
  kNotSupported = 801,
  kMpsRpcFailure = 806,
  kMpsClientTerminated = 810,
  kExternalDevice = 911,
  kUnknown = 999,
};

constexpr int kLocationDevice = 1;    // CU_MEM_LOCATION_TYPE_DEVICE
constexpr int kAllocationPinned = 1;  // CU_MEM_ALLOCATION_TYPE_PINNED
constexpr int kAccessRead = 1;        // CU_MEM_ACCESS_FLAGS_PROT_READ
constexpr int kAccessReadWrite = 3;   // CU_MEM_ACCESS_FLAGS_PROT_READWRITE
constexpr int kGranularityMinimum = 0;
constexpr int kGranularityRecommended = 1;
constexpr int kAttributeVirtualMemory = 102;  // ..._VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED
constexpr unsigned kEventDisableTiming = 2;
constexpr unsigned kStreamNonBlocking = 1;
constexpr unsigned kHostAllocPortable = 1;

struct Location {
  int type = kLocationDevice;
  int id = 0;
};

struct AllocationProperties {  // CUmemAllocationProp
  int type = kAllocationPinned;
  int requested_handle_types = 0;
  Location location;
  void* win32_handle_meta_data = nullptr;
  unsigned char compression_type = 0;
  unsigned char gpu_direct_rdma_capable = 0;
  unsigned short usage = 0;
  unsigned char reserved[4] = {};
};
static_assert(sizeof(AllocationProperties) == 32 &&
                  offsetof(AllocationProperties, win32_handle_meta_data) == 16,
              "the layout of CUmemAllocationProp");

struct AccessDescriptor {  // CUmemAccessDesc
  Location location;
  int flags = kAccessReadWrite;
};
static_assert(sizeof(AccessDescriptor) == 12, "the layout of CUmemAccessDesc");

// Each member is named after the exported function that Api::load() looks up.
struct Api {
  // Throws DriverError if the library or a function is missing. A library stays loaded, because the
  // driver's own threads may outlive this object.
  static std::shared_ptr<const Api> load(const std::string& library);

  std::string library;

  Result (*init)(unsigned flags);
  Result (*get_error_name)(Result error, const char** name);
  Result (*device_get)(Device* device, int ordinal);
  Result (*device_get_attribute)(int* value, int attribute, Device device);
  Result (*primary_context_retain)(Context* context, Device device);
  Result (*primary_context_release)(Device device);
  Result (*context_set_current)(Context context);

  Result (*granularity)(std::size_t* bytes, const AllocationProperties* properties, int option);
  Result (*memory_info)(std::size_t* free, std::size_t* total);
  Result (*address_reserve)(DevicePointer* addr, std::size_t bytes, std::size_t alignment,
                            DevicePointer hint, unsigned long long flags);
  Result (*address_free)(DevicePointer addr, std::size_t bytes);
  Result (*create)(Handle* handle, std::size_t bytes, const AllocationProperties* properties,
                   unsigned long long flags);
  Result (*release)(Handle handle);
  Result (*map)(DevicePointer addr, std::size_t bytes, std::size_t offset, Handle handle,
                unsigned long long flags);
  Result (*unmap)(DevicePointer addr, std::size_t bytes);
  Result (*set_access)(DevicePointer addr, std::size_t bytes, const AccessDescriptor* descriptors,
                       std::size_t count);
  Result (*host_alloc)(void** addr, std::size_t bytes, unsigned flags);
  Result (*host_free)(void* addr);

  Result (*memset_async)(DevicePointer addr, unsigned char value, std::size_t bytes, Stream stream);
  Result (*memcpy_async)(DevicePointer dst, DevicePointer src, std::size_t bytes, Stream stream);
  Result (*stream_create)(Stream* stream, unsigned flags);
  Result (*stream_destroy)(Stream stream);
  Result (*stream_synchronize)(Stream stream);
  Result (*stream_wait_event)(Stream stream, Event event, unsigned flags);
  Result (*event_create)(Event* event, unsigned flags);
  Result (*event_record)(Event event, Stream stream);
  Result (*event_query)(Event event);
  Result (*event_destroy)(Event event);

  // "CUDA_ERROR_OUT_OF_MEMORY (2)".
  std::string name(Result result) const;
};

// Whether the device or its context is lost after this result.
bool is_sticky(Result result);

}  // namespace vmserve::cuda
