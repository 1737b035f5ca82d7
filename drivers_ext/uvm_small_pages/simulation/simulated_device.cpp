// Simulates the modified nvidia-uvm module and libcuda, for tests.
//
// Physical memory is a memfd, filled with garbage when it is allocated. A managed allocation is a
// range of PROT_NONE. Work is queued and executed at a fence, or step by step when marks are
// polled. What would crash the real module or corrupt memory is counted as an oops. The exported
// simulated_* functions choose the module, refuse calls and read the counters.
#include <sys/mman.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <set>

#include "../uvm_device.h"

namespace {

enum Module { kModified, kStock, kBuiltInTests, kBroken };

struct Refusal {
  std::int64_t call = 0;  // counted down; refuses at 0
  std::int32_t code = 0;
  std::uint32_t status = 0;
};

// Settings and counters of tests, for all devices of the process.
struct Controls {
  int module = kModified;
  std::uint64_t capacity = 8 << 20;
  std::map<std::uint32_t, Refusal> refusals;  // by ioctl
  std::map<std::int64_t, int> work_refusals;  // by kind of work: calls until failure
  std::int64_t live_handles = 0;
  std::int64_t oopses = 0;
  std::int64_t num_ioctls = 0;
};

Controls controls;

void oops(const char* what) {
  ++controls.oopses;
  std::fprintf(stderr, "simulated oops: %s\n", what);
}

constexpr std::uint64_t kPhysicalBase = std::uint64_t{1} << 32;

void* pointer(std::uint64_t address) {
  return reinterpret_cast<void*>(static_cast<std::uintptr_t>(address));
}

bool is_gpu(const uvm::Uuid& uuid) {
  return uuid.bytes[0] == 'G' && uuid.bytes[15] == '0';
}

}  // namespace

namespace uvm {

struct Device {
  int fd = -1;
  std::uint64_t capacity = 0;
  std::map<std::uint64_t, std::uint64_t> handles;  // physical address and size
  std::map<std::uint64_t, std::uint64_t> ranges;   // managed allocations: address and bytes
  std::map<std::uint64_t, std::uint64_t> entries;  // page table: address and handle
  std::map<std::uint64_t, std::uint64_t> sizes;    // of the entries
  std::map<std::uint64_t, std::uint64_t> host;
  std::deque<std::function<void()>> work;
  std::uint64_t num_given = 0;
  std::uint64_t num_done = 0;
};

}  // namespace uvm

namespace {

using uvm::Device;

std::int32_t fail(vmserve_error* error, std::int32_t status, std::int32_t code,
                  const char* message) {
  error->code = code;
  std::snprintf(error->call, sizeof(error->call), "simulated");
  std::snprintf(error->message, sizeof(error->message), "%s", message);
  return status;
}

// Whether to fail this call of the kind; kinds as in simulated_refuse_work.
bool refused(int kind) {
  const auto it = controls.work_refusals.find(kind);
  if (it == controls.work_refusals.end() || --it->second > 0) return false;
  controls.work_refusals.erase(it);
  return true;
}

std::uint32_t get_handle(Device* device, uvm::GetHandle& request) {
  if (!is_gpu(request.gpu)) return oops("get handle for a GPU that is not there"), uvm::kOk;
  std::uint64_t at = kPhysicalBase;
  for (const auto& [handle, size] : device->handles) {
    if (handle >= at + request.size) break;
    at = (handle + size + request.size - 1) / request.size * request.size;
  }
  if (at + request.size > kPhysicalBase + device->capacity) return uvm::kNoMemory;
  const auto offset = static_cast<off_t>(at - kPhysicalBase);
  void* p = ::mmap(nullptr, request.size, PROT_READ | PROT_WRITE, MAP_SHARED, device->fd, offset);
  std::memset(p, 0xEE, request.size);
  ::munmap(p, request.size);
  device->handles[at] = request.size;
  ++controls.live_handles;
  request.handle = at;
  return uvm::kOk;
}

std::uint32_t map_handle(Device* device, const uvm::MapHandle& request) {
  const auto handle = device->handles.find(request.handle);
  if (handle == device->handles.end() || handle->second != request.size) {
    return oops("map of a handle that is not there"), uvm::kOk;
  }
  const auto next = device->ranges.upper_bound(request.address);
  if (!is_gpu(request.gpu) || next == device->ranges.begin()) {
    return oops("map outside of a managed allocation"), uvm::kOk;
  }
  const auto& [start, bytes] = *std::prev(next);
  if (request.address + request.size > start + bytes || request.address % request.size != 0) {
    return oops("map beyond a managed allocation"), uvm::kOk;
  }
  ::mmap(pointer(request.address), request.size, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED,
         device->fd, static_cast<off_t>(request.handle - kPhysicalBase));
  device->entries[request.address] = request.handle;
  device->sizes[request.address] = request.size;
  return uvm::kOk;
}

std::uint32_t free_handle(Device* device, const uvm::FreeHandle& request) {
  const auto handle = device->handles.find(request.handle);
  if (handle == device->handles.end() || handle->second != request.size || !is_gpu(request.gpu)) {
    return oops("free of a handle that is not there"), uvm::kOk;
  }
  for (const auto& [address, shown] : device->entries) {
    if (shown == request.handle) oops("free of a handle that an address still shows");
  }
  device->handles.erase(handle);
  --controls.live_handles;
  return uvm::kOk;
}

std::uint32_t clean_up(Device* device, const uvm::CleanUpRange& request) {
  const auto range = device->ranges.find(request.address);
  if (range == device->ranges.end() || range->second != request.size || !is_gpu(request.gpu)) {
    return oops("clean-up of what is no whole managed allocation"), uvm::kOk;
  }
  ::mmap(pointer(range->first), range->second, PROT_NONE,
         MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
  const auto first = device->entries.lower_bound(range->first);
  device->entries.erase(first, device->entries.lower_bound(range->first + range->second));
  return uvm::kOk;
}

template <typename Parameters>
std::int32_t route(std::uint32_t number, void* parameters,
                   std::uint32_t (*function)(Device*, Parameters&), Device* device) {
  auto* request = static_cast<Parameters*>(parameters);
  ++controls.num_ioctls;
  const auto refusal = controls.refusals.find(number);
  if (refusal != controls.refusals.end() && --refusal->second.call == 0) {
    const auto [call, code, status] = refusal->second;
    controls.refusals.erase(refusal);
    if (code == 0) request->status = status;
    return code;
  }
  // Like the module: without an address space it only sets the status.
  request->status = device == nullptr ? uvm::kIllegalAction : function(device, *request);
  return 0;
}

std::int32_t modified(Device* device, std::uint32_t number, void* parameters) {
  switch (number) {
    case uvm::kGetHandle:
      return route<uvm::GetHandle>(number, parameters, get_handle, device);
    case uvm::kMapHandle:
      return route<uvm::MapHandle>(
          number, parameters, [](Device* d, uvm::MapHandle& r) { return map_handle(d, r); },
          device);
    case uvm::kFreeHandle:
      return route<uvm::FreeHandle>(
          number, parameters, [](Device* d, uvm::FreeHandle& r) { return free_handle(d, r); },
          device);
    case uvm::kCleanUpRange:
      return route<uvm::CleanUpRange>(
          number, parameters, [](Device* d, uvm::CleanUpRange& r) { return clean_up(d, r); },
          device);
    default:
      return ENOSYS;
  }
}

// NVIDIA's module: numbers from 200 on are its tests, if enabled, with other parameters.
std::int32_t built_in_tests(std::uint32_t number, void* parameters) {
  const std::size_t status_at = number == uvm::kGetHandle ? 24 : 0;
  const std::uint32_t status = uvm::kIllegalAction;
  std::memcpy(static_cast<char*>(parameters) + status_at, &status, sizeof(status));
  return 0;
}

std::int32_t probe(const char* module_path, std::uint32_t number, void* parameters) {
  if (std::strcmp(module_path, "/dev/nvidia-uvm") != 0) return ENOENT;
  switch (controls.module) {
    case kStock:
      return ENOSYS;
    case kBuiltInTests:
      return built_in_tests(number, parameters);
    default:
      return modified(nullptr, number, parameters);
  }
}

std::int32_t open_device(const char*, std::int32_t ordinal, Device** device, uvm::Uuid* gpu,
                         vmserve_error* error) {
  if (ordinal != 0) return fail(error, VMSERVE_MISUSE, 0, "there is one GPU, number 0");
  if (controls.module == kBroken) return fail(error, VMSERVE_REFUSED, 999, "no CUDA here");
  auto* opened = new Device;
  opened->capacity = controls.capacity;
  opened->fd = ::memfd_create("simulated-gpu", MFD_CLOEXEC);
  if (opened->fd < 0 || ::ftruncate(opened->fd, static_cast<off_t>(opened->capacity)) != 0) {
    delete opened;
    return fail(error, VMSERVE_REFUSED, errno, "no memory file");
  }
  std::memset(gpu, 0, sizeof(*gpu));
  gpu->bytes[0] = 'G';
  gpu->bytes[15] = '0';
  *device = opened;
  return VMSERVE_OK;
}

void run_next(Device* device) {
  device->work.front()();
  device->work.pop_front();
  ++device->num_done;
}

void run_all(Device* device) {
  while (!device->work.empty()) run_next(device);
}

void close_device(Device* device) {
  run_all(device);
  if (!device->entries.empty()) oops("closed with addresses that show memory");
  for (const auto& [address, bytes] : device->ranges) ::munmap(pointer(address), bytes);
  for (const auto& [address, bytes] : device->host) ::munmap(pointer(address), bytes);
  controls.live_handles -= static_cast<std::int64_t>(device->handles.size());
  if (!device->handles.empty()) oops("closed with handles");
  ::close(device->fd);
  delete device;
}

std::int32_t device_ioctl(Device* device, std::uint32_t number, void* parameters) {
  return modified(device, number, parameters);
}

std::int32_t reserve(Device* device, std::uint64_t bytes, std::uint64_t* address,
                     vmserve_error* error) {
  if (refused(1)) return fail(error, VMSERVE_REFUSED, 2, "no addresses");
  const std::uint64_t block = uvm::kBlockBytes;
  void* p =
      ::mmap(nullptr, bytes + block, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (p == MAP_FAILED) return fail(error, VMSERVE_REFUSED, errno, "no addresses");
  const auto start = static_cast<std::uint64_t>(reinterpret_cast<std::uintptr_t>(p));
  const std::uint64_t aligned = (start + block - 1) / block * block;
  if (aligned != start) ::munmap(p, aligned - start);
  if (start + block != aligned) ::munmap(pointer(aligned + bytes), start + block - aligned);
  device->ranges[aligned] = bytes;
  *address = aligned;
  return VMSERVE_OK;
}

std::int32_t free_reservation(Device* device, std::uint64_t address, vmserve_error* error) {
  if (refused(2)) return fail(error, VMSERVE_REFUSED, 2, "cannot free");
  const auto range = device->ranges.find(address);
  if (range == device->ranges.end()) return oops("free of no allocation"), VMSERVE_OK;
  run_all(device);
  const auto entry = device->entries.lower_bound(address);
  if (entry != device->entries.end() && entry->first < address + range->second) {
    oops("free of a managed allocation that was not cleaned up");
  }
  ::munmap(pointer(address), range->second);
  device->ranges.erase(range);
  return VMSERVE_OK;
}

std::int32_t give(Device* device, std::function<void()> work) {
  device->work.push_back(std::move(work));
  ++device->num_given;
  return VMSERVE_OK;
}

std::int32_t zero(Device* device, std::uint64_t address, std::uint64_t bytes,
                  vmserve_error* error) {
  if (refused(3)) return fail(error, VMSERVE_REFUSED, 1, "cannot zero");
  if (refused(4)) return fail(error, VMSERVE_STICKY, 700, "illegal address");
  return give(device, [=] { std::memset(pointer(address), 0, bytes); });
}

std::int32_t copy(Device* device, std::uint64_t dst, std::uint64_t src, std::uint64_t bytes,
                  vmserve_error* error) {
  if (refused(5)) return fail(error, VMSERVE_STICKY, 700, "illegal address");
  return give(device, [=] { std::memcpy(pointer(dst), pointer(src), bytes); });
}

std::int32_t fence(Device* device, vmserve_error* error) {
  if (refused(6)) return fail(error, VMSERVE_STICKY, 700, "illegal address");
  run_all(device);
  return VMSERVE_OK;
}

std::int32_t mark(Device* device, std::uint64_t* mark, vmserve_error*) {
  *mark = device->num_given;
  return VMSERVE_OK;
}

std::int32_t reached(Device* device, std::uint64_t mark, std::uint32_t* reached, vmserve_error*) {
  // Work progresses as marks are polled.
  if (device->num_given % 3 == 0 && !device->work.empty()) run_next(device);
  *reached = mark <= device->num_done ? 1 : 0;
  return VMSERVE_OK;
}

std::int32_t alloc_host(Device* device, std::uint64_t bytes, std::uint64_t* address,
                        vmserve_error* error) {
  if (refused(7)) return fail(error, VMSERVE_OUT_OF_MEMORY, 2, "no page-locked memory");
  void* p = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (p == MAP_FAILED) return fail(error, VMSERVE_OUT_OF_MEMORY, errno, "no host memory");
  *address = reinterpret_cast<std::uintptr_t>(p);
  device->host[*address] = bytes;
  return VMSERVE_OK;
}

std::int32_t free_host(Device* device, std::uint64_t address, vmserve_error*) {
  ::munmap(pointer(address), device->host[address]);
  device->host.erase(address);
  return VMSERVE_OK;
}

}  // namespace

const uvm::DeviceTable* vmserve_uvm_device() {
  static const uvm::DeviceTable table = {
      sizeof(uvm::DeviceTable),
      probe,
      open_device,
      close_device,
      device_ioctl,
      reserve,
      free_reservation,
      zero,
      copy,
      fence,
      mark,
      reached,
      alloc_host,
      free_host,
  };
  return &table;
}

extern "C" {

// 0: modified, 1: stock, 2: stock with built-in tests, 3: modified, but without CUDA.
VMSERVE_EXPORT void simulated_module(int module) {
  controls.module = module;
}

VMSERVE_EXPORT void simulated_capacity(std::int64_t bytes) {
  controls.capacity = static_cast<std::uint64_t>(bytes);
}

// Makes the call-th ioctl `number` from now on fail with the errno or, if that is 0, with the
// status.
VMSERVE_EXPORT void simulated_refuse(int number, std::int64_t call, int code, int status) {
  controls.refusals[static_cast<std::uint32_t>(number)] = {call, code,
                                                           static_cast<std::uint32_t>(status)};
}

// Makes the call-th call of a kind fail. 1: reserve, 2: free, 3: zero, 4: zero, sticky, 5: copy,
// 6: fence, 7: alloc_host.
VMSERVE_EXPORT void simulated_refuse_work(int kind, int call) {
  controls.work_refusals[kind] = call;
}

// Resets everything except open devices and counters.
VMSERVE_EXPORT void simulated_reset() {
  controls.module = kModified;
  controls.capacity = 8 << 20;
  controls.refusals.clear();
  controls.work_refusals.clear();
}

VMSERVE_EXPORT std::int64_t simulated_oopses() {
  return controls.oopses;
}

VMSERVE_EXPORT std::int64_t simulated_live_handles() {
  return controls.live_handles;
}

VMSERVE_EXPORT std::int64_t simulated_ioctls() {
  return controls.num_ioctls;
}
}
