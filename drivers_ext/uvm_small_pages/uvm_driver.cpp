// The plugin: small GPU pages (64, 128 or 256 KiB) through a modified nvidia-uvm module.
//
// Options: device=ORDINAL (0), module=PATH (/dev/nvidia-uvm), ioctl_library=PATH (a device that
// replaces the real one, for tests). README.md says what the module does not check, and why this
// driver must not serve more than one tenant.
#include <dlfcn.h>

#include <cstdlib>
#include <memory>
#include <mutex>

#include "uvm_memory.h"

using uvm::Memory;
using vmserve_plugin::each_run;
using vmserve_plugin::Failure;
using vmserve_plugin::guarded;
using vmserve_plugin::misuse;

namespace {

constexpr std::uint64_t kPageSizes[] = {64 << 10, 128 << 10, 256 << 10};

struct Options {
  std::string module = "/dev/nvidia-uvm";
  std::string ioctl_library;
  std::int32_t ordinal = 0;
};

// The module stores a handle by its offset divided by the requested size, so handles of two sizes
// overwrite each other. A process uses one size at a time.
class SizeInUse {
 public:
  explicit SizeInUse(std::uint64_t bytes) {
    const std::lock_guard<std::mutex> lock(mutex());
    auto& [size, users] = in_use();
    if (users > 0 && size != bytes) {
      misuse("another driver of this process has frames of " + std::to_string(size) +
             " bytes: the module keeps only one size apart");
    }
    size = bytes;
    ++users;
  }
  ~SizeInUse() {
    const std::lock_guard<std::mutex> lock(mutex());
    --in_use().second;
  }
  SizeInUse(const SizeInUse&) = delete;
  SizeInUse& operator=(const SizeInUse&) = delete;

 private:
  static std::mutex& mutex() {
    static std::mutex the_mutex;
    return the_mutex;
  }
  static std::pair<std::uint64_t, int>& in_use() {
    static std::pair<std::uint64_t, int> size_and_users;
    return size_and_users;
  }
};

// The real device, or the table of a library that is loaded as long as this object lives.
class DeviceLibrary {
 public:
  explicit DeviceLibrary(const std::string& path) {
    if (path.empty()) {
      table_ = uvm::cuda_device();
      return;
    }
    handle_ = ::dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
    if (handle_ == nullptr) misuse("cannot load ioctl_library " + path + ": " + ::dlerror());
    using Entry = const uvm::DeviceTable* (*)();
    const auto entry = reinterpret_cast<Entry>(::dlsym(handle_, VMSERVE_UVM_DEVICE));
    if (entry == nullptr || entry()->struct_size != sizeof(uvm::DeviceTable)) {
      ::dlclose(handle_);
      misuse("ioctl_library " + path + " exports no " VMSERVE_UVM_DEVICE " of this version");
    }
    table_ = entry();
  }
  ~DeviceLibrary() {
    if (handle_ != nullptr) ::dlclose(handle_);
  }
  DeviceLibrary(const DeviceLibrary&) = delete;
  DeviceLibrary& operator=(const DeviceLibrary&) = delete;

  const uvm::DeviceTable& table() const { return *table_; }

 private:
  void* handle_ = nullptr;
  const uvm::DeviceTable* table_ = nullptr;
};

class OpenDevice {
 public:
  OpenDevice(const uvm::DeviceTable& table, const Options& options) : table_(table) {
    uvm::probe(table, options.module);
    vmserve_error error{};
    error.struct_size = sizeof(error);
    const std::int32_t status =
        table.open(options.module.c_str(), options.ordinal, &device_, &gpu_, &error);
    if (status != VMSERVE_OK) throw Failure{status, error.message, error.call, error.code};
  }
  ~OpenDevice() { table_.close(device_); }
  OpenDevice(const OpenDevice&) = delete;
  OpenDevice& operator=(const OpenDevice&) = delete;

  uvm::Device* get() const { return device_; }
  const uvm::Uuid& gpu() const { return gpu_; }

 private:
  const uvm::DeviceTable& table_;
  uvm::Device* device_ = nullptr;
  uvm::Uuid gpu_{};
};

Options parse(const vmserve_driver_config& config) {
  Options options;
  for (std::uint64_t i = 0; i < config.num_options; ++i) {
    const std::string key = config.options[i].key;
    const char* value = config.options[i].value;
    if (key == "module") {
      options.module = value;
    } else if (key == "ioctl_library") {
      options.ioctl_library = value;
    } else if (key == "device") {
      char* end = nullptr;
      options.ordinal = static_cast<std::int32_t>(std::strtol(value, &end, 10));
      if (end == value || *end != '\0' || options.ordinal < 0) {
        misuse(std::string("device is '") + value + "': it must be the number of a GPU");
      }
    } else {
      misuse("unknown option " + key + ": there are device, module and ioctl_library");
    }
  }
  return options;
}

void check_sizes(const vmserve_driver_config& config) {
  for (const std::uint64_t size : kPageSizes) {
    if (config.frame_bytes == size && config.num_frames > 0) return;
  }
  misuse(std::to_string(config.num_frames) + " frames of " + std::to_string(config.frame_bytes) +
         " bytes: the modified module has pages of 65536, 131072 and 262144 bytes");
}

}  // namespace

// Members are closed in the reverse order: memory, device, library.
struct vmserve_driver_context {
  vmserve_driver_context(const vmserve_driver_config& config, const Options& options)
      : size(config.frame_bytes),
        library(options.ioctl_library),
        device(library.table(), options),
        memory(library.table(), device.get(), device.gpu(), config.frame_bytes, config.num_frames) {
  }

  SizeInUse size;
  DeviceLibrary library;
  OpenDevice device;
  Memory memory;
};

namespace {

using Context = vmserve_driver_context;

std::int32_t open_driver(const vmserve_driver_config* config, Context** context,
                         vmserve_driver_info* info, vmserve_error* error) {
  return guarded(error, [&] {
    check_sizes(*config);
    *context = new Context(*config, parse(*config));
    // No unmap, no read-only entries, no zero page.
    info->capabilities = VMSERVE_CAN_HOST_MEMORY | VMSERVE_IS_ASYNCHRONOUS;
    info->granularity = kPageSizes[0];
    info->frame_bytes = config->frame_bytes;
    info->num_frames = config->num_frames;
  });
}

void close_driver(Context* c) {
  delete c;
}

std::int32_t reserve(Context* c, std::uint64_t bytes, std::uint32_t, std::uint64_t* address,
                     vmserve_error* error) {
  return guarded(error, [&] { *address = c->memory.reserve(bytes); });
}

std::int32_t free_reservation(Context* c, std::uint64_t address, vmserve_error* error) {
  return guarded(error, [&] { c->memory.free_reservation(address); });
}

std::int32_t create(Context* c, const vmserve_frame_run* runs, std::uint64_t count,
                    vmserve_error* error) {
  return guarded(error, [&] { c->memory.create(runs, count); });
}

// An ABI function that calls a member of Memory for each run.
template <typename Run, void (Memory::*Member)(const Run&)>
std::int32_t batch(Context* c, const Run* runs, std::uint64_t count, vmserve_error* error) {
  return each_run(count, error, [&](std::uint64_t i) { (c->memory.*Member)(runs[i]); });
}

std::int32_t fence(Context* c, vmserve_error* error) {
  return guarded(error, [&] { c->memory.fence(); });
}

std::int32_t mark(Context* c, std::uint64_t* result, vmserve_error* error) {
  return guarded(error, [&] { *result = c->memory.mark(); });
}

std::int32_t reached(Context* c, std::uint64_t mark, std::uint32_t* result, vmserve_error* error) {
  return guarded(error, [&] { *result = c->memory.reached(mark) ? 1 : 0; });
}

std::int32_t alloc_host(Context* c, std::uint64_t bytes, std::uint64_t* address,
                        vmserve_error* error) {
  return guarded(error, [&] { *address = c->memory.alloc_host(bytes); });
}

std::int32_t free_host(Context* c, std::uint64_t address, vmserve_error* error) {
  return guarded(error, [&] { c->memory.free_host(address); });
}

std::int32_t query(Context* c, std::uint64_t address, vmserve_mapping* mapping,
                   vmserve_error* error) {
  return guarded(error, [&] { *mapping = c->memory.frames().query(address); });
}

std::int32_t stats(Context* c, vmserve_driver_stats* stats, vmserve_error*) {
  stats->created_frames = c->memory.frames().created_frames();
  stats->mapped_frames = c->memory.frames().mapped_frames();
  stats->num_mappings = stats->mapped_frames;
  stats->max_mappings = INT64_MAX;
  stats->allocated_bytes = c->memory.allocated_bytes();
  return VMSERVE_OK;
}

}  // namespace

const vmserve_driver* vmserve_driver_entry(std::uint32_t) {
  static const vmserve_driver table = {
      VMSERVE_DRIVER_ABI_VERSION,
      sizeof(vmserve_driver),
      "uvm-small-pages 1.0",
      open_driver,
      close_driver,
      reserve,
      free_reservation,
      create,
      batch<vmserve_frame_run, &Memory::destroy>,
      batch<vmserve_map_run, &Memory::map>,
      /*unmap=*/nullptr,
      batch<vmserve_access_run, &Memory::set_access>,
      batch<vmserve_address_run, &Memory::zero>,
      batch<vmserve_copy_run, &Memory::copy>,
      fence,
      mark,
      reached,
      alloc_host,
      free_host,
      query,
      stats,
  };
  return &table;
}
