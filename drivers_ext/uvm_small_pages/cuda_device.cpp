// The real device: ioctls on the nvidia-uvm module; everything else through libcuda.so.1.
//
// NOTE: has never run on a GPU. Written from the headers of CUDA's driver API and the public
// sources of the module; README.md lists what to check first.
#include <dirent.h>
#include <dlfcn.h>
#include <fcntl.h>
#include <sys/ioctl.h>
#include <unistd.h>

#include <cerrno>
#include <climits>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "uvm_device.h"
#include "vmserve_frame_table.h"

namespace {

using vmserve_plugin::Failure;
using vmserve_plugin::guarded;

// Types of the driver API that are used here.
using CuResult = int;
using CuDevice = int;
using CuContext = void*;
using CuStream = void*;
using CuEvent = void*;
using CuPointer = unsigned long long;

constexpr CuResult kSuccess = 0;
constexpr CuResult kOutOfMemory = 2;
constexpr CuResult kNotReady = 600;
constexpr unsigned kAttachGlobal = 1;
constexpr unsigned kEventDisableTiming = 2;

// Errors after which the context or the device is lost.
bool is_sticky(CuResult result) {
  constexpr CuResult kLost[] = {4, 214, 220, 700, 702, 709, 710, 714, 715, 716, 717, 718, 719, 999};
  for (const CuResult lost : kLost) {
    if (result == lost) return true;
  }
  return false;
}

struct Cuda {
  void* library = nullptr;
  CuResult (*init)(unsigned) = nullptr;
  CuResult (*error_name)(CuResult, const char**) = nullptr;
  CuResult (*device_get)(CuDevice*, int) = nullptr;
  CuResult (*device_uuid)(uvm::Uuid*, CuDevice) = nullptr;
  CuResult (*retain)(CuContext*, CuDevice) = nullptr;
  CuResult (*release)(CuDevice) = nullptr;
  CuResult (*push)(CuContext) = nullptr;
  CuResult (*pop)(CuContext*) = nullptr;
  CuResult (*alloc_managed)(CuPointer*, std::size_t, unsigned) = nullptr;
  CuResult (*free)(CuPointer) = nullptr;
  CuResult (*memset)(CuPointer, unsigned char, std::size_t, CuStream) = nullptr;
  CuResult (*memcpy)(CuPointer, CuPointer, std::size_t, CuStream) = nullptr;
  CuResult (*synchronize)(CuStream) = nullptr;
  CuResult (*event_create)(CuEvent*, unsigned) = nullptr;
  CuResult (*event_record)(CuEvent, CuStream) = nullptr;
  CuResult (*event_query)(CuEvent) = nullptr;
  CuResult (*event_destroy)(CuEvent) = nullptr;
  CuResult (*host_alloc)(void**, std::size_t, unsigned) = nullptr;
  CuResult (*host_free)(void*) = nullptr;

  template <typename Function>
  void load(Function& function, const char* name) {
    function = reinterpret_cast<Function>(::dlsym(library, name));
    if (function == nullptr) {
      throw Failure{VMSERVE_REFUSED, std::string("libcuda.so.1 lacks ") + name, name, ENOSYS};
    }
  }

  Cuda() {
    library = ::dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
    if (library == nullptr) {
      throw Failure{VMSERVE_REFUSED, "libcuda.so.1 cannot be loaded: install the NVIDIA driver",
                    "dlopen", ENOENT};
    }
    load(init, "cuInit");
    load(error_name, "cuGetErrorName");
    load(device_get, "cuDeviceGet");
    load(device_uuid, "cuDeviceGetUuid");
    load(retain, "cuDevicePrimaryCtxRetain");
    load(release, "cuDevicePrimaryCtxRelease_v2");
    load(push, "cuCtxPushCurrent_v2");
    load(pop, "cuCtxPopCurrent_v2");
    load(alloc_managed, "cuMemAllocManaged");
    load(free, "cuMemFree_v2");
    load(memset, "cuMemsetD8Async");
    load(memcpy, "cuMemcpyAsync");
    load(synchronize, "cuStreamSynchronize");
    load(event_create, "cuEventCreate");
    load(event_record, "cuEventRecord");
    load(event_query, "cuEventQuery");
    load(event_destroy, "cuEventDestroy_v2");
    load(host_alloc, "cuMemHostAlloc");
    load(host_free, "cuMemFreeHost");
  }

  void check(CuResult result, const char* call) const {
    if (result == kSuccess) return;
    const char* name = nullptr;
    if (error_name(result, &name) != kSuccess || name == nullptr) name = "unknown error";
    const std::int32_t status = result == kOutOfMemory ? VMSERVE_OUT_OF_MEMORY
                                : is_sticky(result)    ? VMSERVE_STICKY
                                                       : VMSERVE_REFUSED;
    throw Failure{status, std::string(call) + " failed: " + name, call, result};
  }
};

}  // namespace

namespace uvm {

struct Device {
  Cuda cuda;
  CuDevice ordinal = 0;
  CuContext context = nullptr;
  int fd = -1;  // owned by CUDA: not closed here
  std::deque<std::pair<std::uint64_t, CuEvent>> events;
  std::uint64_t last_mark = 0;
};

}  // namespace uvm

namespace {

using uvm::Device;

// Makes the context current in each call, because calls may come from any thread.
class Current {
 public:
  explicit Current(Device* device) : cuda_(device->cuda) {
    cuda_.check(cuda_.push(device->context), "cuCtxPushCurrent");
  }
  ~Current() {
    CuContext popped = nullptr;
    cuda_.pop(&popped);
  }
  Current(const Current&) = delete;
  Current& operator=(const Current&) = delete;

 private:
  const Cuda& cuda_;
};

std::int32_t call_ioctl(int fd, std::uint32_t number, void* parameters) {
  int result = 0;
  do {
    result = ::ioctl(fd, number, parameters);
  } while (result < 0 && errno == EINTR);
  return result < 0 ? errno : 0;
}

std::int32_t probe(const char* module_path, std::uint32_t number, void* parameters) {
  const int fd = ::open(module_path, O_RDWR | O_CLOEXEC);
  if (fd < 0) return errno;
  const std::int32_t code = call_ioctl(fd, number, parameters);
  ::close(fd);
  return code;
}

// This process's descriptors of the file.
std::vector<int> descriptors_of(const std::string& path) {
  std::vector<int> found;
  DIR* directory = ::opendir("/proc/self/fd");
  if (directory == nullptr) return found;
  while (const dirent* entry = ::readdir(directory)) {
    char target[PATH_MAX];
    const std::string link = std::string("/proc/self/fd/") + entry->d_name;
    const ssize_t length = ::readlink(link.c_str(), target, sizeof(target));
    if (length > 0 && path == std::string(target, static_cast<std::size_t>(length))) {
      found.push_back(std::atoi(entry->d_name));
    }
  }
  ::closedir(directory);
  return found;
}

// CUDA opens the module more than once. The descriptor that holds the address space is the one that
// answers this harmless query.
int address_space_descriptor(const std::string& path) {
  std::vector<int> holding;
  for (const int fd : descriptors_of(path)) {
    uvm::PageableAccess question{0, ~uvm::kOk};
    const std::int32_t code = call_ioctl(fd, uvm::kPageableAccess, &question);
    if (code == 0 && question.status == uvm::kOk) holding.push_back(fd);
  }
  if (holding.size() == 1) return holding.front();
  throw Failure{VMSERVE_REFUSED,
                std::to_string(holding.size()) + " descriptors of " + path +
                    " hold a CUDA address space, one was expected",
                "open", EBADF};
}

std::int32_t open_device(const char* module_path, std::int32_t ordinal, Device** result,
                         uvm::Uuid* gpu, vmserve_error* error) {
  return guarded(error, [&] {
    auto device = std::make_unique<Device>();
    const Cuda& cuda = device->cuda;
    cuda.check(cuda.init(0), "cuInit");
    cuda.check(cuda.device_get(&device->ordinal, ordinal), "cuDeviceGet");
    cuda.check(cuda.device_uuid(gpu, device->ordinal), "cuDeviceGetUuid");
    cuda.check(cuda.retain(&device->context, device->ordinal), "cuDevicePrimaryCtxRetain");
    try {
      const Current current(device.get());
      // CUDA opens the module with the first managed allocation.
      CuPointer first = 0;
      cuda.check(cuda.alloc_managed(&first, uvm::kBlockBytes, kAttachGlobal), "cuMemAllocManaged");
      cuda.check(cuda.free(first), "cuMemFree");
      device->fd = address_space_descriptor(module_path);
    } catch (const Failure&) {
      cuda.release(device->ordinal);
      throw;
    }
    *result = device.release();
  });
}

void close_device(Device* device) {
  for (const auto& [mark, event] : device->events) device->cuda.event_destroy(event);
  device->cuda.release(device->ordinal);
  delete device;
}

std::int32_t device_ioctl(Device* device, std::uint32_t number, void* parameters) {
  return call_ioctl(device->fd, number, parameters);
}

template <typename Body>
std::int32_t on_device(Device* device, vmserve_error* error, Body body) {
  return guarded(error, [&] {
    const Current current(device);
    body(device->cuda);
  });
}

std::int32_t reserve(Device* device, std::uint64_t bytes, std::uint64_t* address,
                     vmserve_error* error) {
  return on_device(device, error, [&](const Cuda& cuda) {
    CuPointer pointer = 0;
    cuda.check(cuda.alloc_managed(&pointer, bytes, kAttachGlobal), "cuMemAllocManaged");
    *address = pointer;
  });
}

std::int32_t free_reservation(Device* device, std::uint64_t address, vmserve_error* error) {
  return on_device(device, error,
                   [&](const Cuda& cuda) { cuda.check(cuda.free(address), "cuMemFree"); });
}

// Stream 0 is the legacy default stream. It and all blocking streams of the context wait for each
// other, which is the order that zero and copy require.
std::int32_t zero(Device* device, std::uint64_t address, std::uint64_t bytes,
                  vmserve_error* error) {
  return on_device(device, error, [&](const Cuda& cuda) {
    cuda.check(cuda.memset(address, 0, bytes, nullptr), "cuMemsetD8Async");
  });
}

std::int32_t copy(Device* device, std::uint64_t dst, std::uint64_t src, std::uint64_t bytes,
                  vmserve_error* error) {
  return on_device(device, error, [&](const Cuda& cuda) {
    cuda.check(cuda.memcpy(dst, src, bytes, nullptr), "cuMemcpyAsync");
  });
}

std::int32_t fence(Device* device, vmserve_error* error) {
  return on_device(device, error, [&](const Cuda& cuda) {
    cuda.check(cuda.synchronize(nullptr), "cuStreamSynchronize");
  });
}

std::int32_t mark(Device* device, std::uint64_t* mark, vmserve_error* error) {
  return on_device(device, error, [&](const Cuda& cuda) {
    CuEvent event = nullptr;
    cuda.check(cuda.event_create(&event, kEventDisableTiming), "cuEventCreate");
    const CuResult recorded = cuda.event_record(event, nullptr);
    if (recorded != kSuccess) cuda.event_destroy(event);
    cuda.check(recorded, "cuEventRecord");
    device->events.emplace_back(++device->last_mark, event);
    *mark = device->last_mark;
  });
}

std::int32_t reached(Device* device, std::uint64_t mark, std::uint32_t* reached,
                     vmserve_error* error) {
  return on_device(device, error, [&](const Cuda& cuda) {
    auto& events = device->events;
    while (!events.empty() && events.front().first <= mark) {
      const CuResult result = cuda.event_query(events.front().second);
      if (result == kNotReady) break;
      cuda.check(result, "cuEventQuery");
      cuda.event_destroy(events.front().second);
      events.pop_front();
    }
    const bool waits = !events.empty() && events.front().first <= mark;
    *reached = mark <= device->last_mark && !waits ? 1 : 0;
  });
}

std::int32_t alloc_host(Device* device, std::uint64_t bytes, std::uint64_t* address,
                        vmserve_error* error) {
  return on_device(device, error, [&](const Cuda& cuda) {
    void* pointer = nullptr;
    cuda.check(cuda.host_alloc(&pointer, bytes, 0), "cuMemHostAlloc");
    *address = reinterpret_cast<std::uintptr_t>(pointer);
  });
}

std::int32_t free_host(Device* device, std::uint64_t address, vmserve_error* error) {
  return on_device(device, error, [&](const Cuda& cuda) {
    cuda.check(cuda.host_free(reinterpret_cast<void*>(address)), "cuMemFreeHost");
  });
}

}  // namespace

const uvm::DeviceTable* uvm::cuda_device() {
  static const DeviceTable table = {
      sizeof(DeviceTable), ::probe,     open_device, close_device, device_ioctl, ::reserve,
      ::free_reservation,  ::zero,      ::copy,      ::fence,      ::mark,       ::reached,
      ::alloc_host,        ::free_host,
  };
  return &table;
}
