#include "cuda_api.h"

#include <dlfcn.h>

#include <cerrno>

#include "vmserve/errors.h"

namespace vmserve::cuda {
namespace {

void* open_library(const std::string& library) {
  void* loaded = ::dlopen(library.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (loaded != nullptr) return loaded;
  const char* why = ::dlerror();
  throw DriverError("dlopen", ENOENT,
                    "the CUDA driver library " + library + " cannot be loaded (" +
                        (why == nullptr ? "no reason given" : why) +
                        "): install the NVIDIA driver, name its library, or run on the CPU");
}

template <typename Function>
void find(void* loaded, const Api& api, const char* symbol, Function& function) {
  function = reinterpret_cast<Function>(::dlsym(loaded, symbol));
  if (function != nullptr) return;
  throw DriverError("dlsym", ENOSYS,
                    "the CUDA driver library " + api.library + " has no function " + symbol +
                        ": update the NVIDIA driver (CUDA 11.0 or later)");
}

}  // namespace

std::shared_ptr<const Api> Api::load(const std::string& library) {
  void* const loaded = open_library(library);
  auto api = std::make_shared<Api>();
  api->library = library;
  const auto need = [&](const char* symbol, auto& function) {
    find(loaded, *api, symbol, function);
  };
  need("cuInit", api->init);
  need("cuGetErrorName", api->get_error_name);
  need("cuDeviceGet", api->device_get);
  need("cuDeviceGetAttribute", api->device_get_attribute);
  need("cuDevicePrimaryCtxRetain", api->primary_context_retain);
  need("cuDevicePrimaryCtxRelease_v2", api->primary_context_release);
  need("cuCtxSetCurrent", api->context_set_current);
  need("cuMemGetAllocationGranularity", api->granularity);
  need("cuMemGetInfo_v2", api->memory_info);
  need("cuMemAddressReserve", api->address_reserve);
  need("cuMemAddressFree", api->address_free);
  need("cuMemCreate", api->create);
  need("cuMemRelease", api->release);
  need("cuMemMap", api->map);
  need("cuMemUnmap", api->unmap);
  need("cuMemSetAccess", api->set_access);
  need("cuMemHostAlloc", api->host_alloc);
  need("cuMemFreeHost", api->host_free);
  need("cuMemsetD8Async", api->memset_async);
  need("cuMemcpyAsync", api->memcpy_async);
  need("cuStreamCreate", api->stream_create);
  need("cuStreamDestroy_v2", api->stream_destroy);
  need("cuStreamSynchronize", api->stream_synchronize);
  need("cuStreamWaitEvent", api->stream_wait_event);
  need("cuEventCreate", api->event_create);
  need("cuEventRecord", api->event_record);
  need("cuEventQuery", api->event_query);
  need("cuEventDestroy_v2", api->event_destroy);
  return api;
}

std::string Api::name(Result result) const {
  const char* text = nullptr;
  if (get_error_name(result, &text) != kSuccess || text == nullptr) text = "an unnamed CUDA error";
  return std::string(text) + " (" + std::to_string(static_cast<int>(result)) + ")";
}

bool is_sticky(Result result) {
  switch (result) {
    case kDeinitialized:
    case kDeviceUnavailable:
    case kEccUncorrectable:
    case kNvlinkUncorrectable:
    case kContained:
    case kIllegalAddress:
    case kLaunchTimeout:
    case kContextIsDestroyed:
    case kAssert:
    case kHardwareStackError:
    case kIllegalInstruction:
    case kMisalignedAddress:
    case kInvalidAddressSpace:
    case kInvalidPc:
    case kLaunchFailed:
    case kTensorMemoryLeak:
    case kMpsRpcFailure:
    case kMpsClientTerminated:
    case kExternalDevice:
    case kUnknown:
      return true;
    default:
      return false;
  }
}

}  // namespace vmserve::cuda
