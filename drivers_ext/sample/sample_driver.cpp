// A page driver in one file: memory is a memfd, a mapping is mmap(MAP_FIXED) of a part of it.
//
// It does the same as vmserve's host driver, to show how short a driver can be
// (drivers_ext/README.md says how to build it). FrameTable checks the preconditions. What remains
// is one system call in each function, in this order: check, call, record.
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

#include "vmserve_frame_table.h"

using vmserve_plugin::each_run;
using vmserve_plugin::Failure;
using vmserve_plugin::FrameTable;
using vmserve_plugin::guarded;
using vmserve_plugin::misuse;

// The context is opaque in the ABI: a plugin defines it as it likes.
struct vmserve_driver_context {
  int fd;
  FrameTable frames;
  std::map<std::uint64_t, std::uint32_t> backings;  // of each reservation
  vmserve_plugin::HostRanges host;
};

namespace {

// Linux limits a process to 65,530 mappings by default, and fails even to unmap at the limit.
constexpr std::int64_t kMaxMappings = 52424;

[[noreturn]] void refused(const char* call) {
  const int code = errno;
  const std::int32_t status =
      code == ENOMEM || code == ENOSPC ? VMSERVE_OUT_OF_MEMORY : VMSERVE_REFUSED;
  throw Failure{status, std::string(call) + " failed: " + std::strerror(code), call, code};
}

void* pointer(std::uint64_t address) {
  return reinterpret_cast<void*>(static_cast<std::uintptr_t>(address));
}

int protection(std::uint32_t access) {
  return access == VMSERVE_READ ? PROT_READ : PROT_READ | PROT_WRITE;
}

// Maps anonymous memory without content: anywhere, or over `at`.
void* map_nothing(void* at, std::uint64_t bytes, std::uint32_t backing) {
  const int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | (at == nullptr ? 0 : MAP_FIXED);
  const int access = backing == VMSERVE_BACKING_ZEROS ? PROT_READ : PROT_NONE;
  void* p = ::mmap(at, bytes, access, flags, -1, 0);
  if (p == MAP_FAILED) refused("mmap");
  return p;
}

// An upper bound: each mapped frame adds at most one mapping and one gap.
std::int64_t num_mappings(const FrameTable& frames) {
  return frames.num_reservations() + 2 * frames.mapped_frames();
}

// Reads the only option, host_memory=on|off. Refuses unknown options.
bool wants_host_memory(const vmserve_driver_config& config) {
  bool wanted = true;
  for (std::uint64_t i = 0; i < config.num_options; ++i) {
    const std::string key = config.options[i].key;
    const std::string value = config.options[i].value;
    if (key != "host_memory") misuse("unknown option " + key + ": there is host_memory");
    if (value != "on" && value != "off") misuse("host_memory is '" + value + "': say on or off");
    wanted = value == "on";
  }
  return wanted;
}

std::int32_t open_driver(const vmserve_driver_config* config, vmserve_driver_context** context,
                         vmserve_driver_info* info, vmserve_error* error) {
  return guarded(error, [&] {
    const bool host_memory = wants_host_memory(*config);
    const auto page = static_cast<std::uint64_t>(::sysconf(_SC_PAGESIZE));
    if (config->frame_bytes == 0 || config->frame_bytes % page != 0 || config->num_frames <= 0) {
      misuse("frames must be a positive number of positive multiples of " + std::to_string(page) +
             " bytes");
    }
    FrameTable frames(config->frame_bytes, config->num_frames);
    const int fd = ::memfd_create("vmserve-sample", MFD_CLOEXEC);
    if (fd < 0) refused("memfd_create");
    const auto bytes = static_cast<off_t>(config->frame_bytes) * config->num_frames;
    if (::ftruncate(fd, bytes) != 0) {
      ::close(fd);
      refused("ftruncate");
    }
    *context = new vmserve_driver_context{fd, std::move(frames), {}, {}};
    info->capabilities = VMSERVE_CAN_UNMAP | VMSERVE_CAN_READ_ONLY | VMSERVE_CAN_ZEROS_BACKING |
                         (host_memory ? VMSERVE_CAN_HOST_MEMORY : 0);
    info->granularity = page;
    info->frame_bytes = config->frame_bytes;
    info->num_frames = config->num_frames;
  });
}

void close_driver(vmserve_driver_context* c) {
  for (const auto& [address, bytes] : c->frames.reservations()) ::munmap(pointer(address), bytes);
  for (const auto& [address, bytes] : c->host.all()) ::munmap(pointer(address), bytes);
  ::close(c->fd);
  delete c;
}

std::int32_t reserve(vmserve_driver_context* c, std::uint64_t bytes, std::uint32_t backing,
                     std::uint64_t* address, vmserve_error* error) {
  return guarded(error, [&] {
    c->frames.check_reserve(bytes);
    *address = reinterpret_cast<std::uintptr_t>(map_nothing(nullptr, bytes, backing));
    c->frames.add_reservation(*address, bytes);
    c->backings[*address] = backing;
  });
}

std::int32_t free_reservation(vmserve_driver_context* c, std::uint64_t address,
                              vmserve_error* error) {
  return guarded(error, [&] {
    if (::munmap(pointer(address), c->frames.reservation_bytes(address)) != 0) refused("munmap");
    c->frames.remove_reservation(address);
    c->backings.erase(address);
  });
}

int allocate(vmserve_driver_context* c, const vmserve_frame_run& run, int mode) {
  const auto frame = static_cast<off_t>(c->frames.frame_bytes());
  return ::fallocate(c->fd, mode, run.first * frame, run.count * frame);
}

constexpr int kPunch = FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE;

// All or nothing: on failure, frames created so far are released; holes read as zero again.
std::int32_t create(vmserve_driver_context* c, const vmserve_frame_run* runs, std::uint64_t count,
                    vmserve_error* error) {
  return guarded(error, [&] {
    c->frames.check_create(runs, count);
    for (std::uint64_t i = 0; i < count; ++i) {
      if (allocate(c, runs[i], 0) == 0) continue;
      const int code = errno;
      for (std::uint64_t done = 0; done <= i; ++done) allocate(c, runs[done], kPunch);
      errno = code;
      refused("fallocate");
    }
    for (std::uint64_t i = 0; i < count; ++i) c->frames.set_exists(runs[i], true);
  });
}

std::int32_t destroy(vmserve_driver_context* c, const vmserve_frame_run* runs, std::uint64_t count,
                     vmserve_error* error) {
  return each_run(count, error, [&](std::uint64_t i) {
    c->frames.check_destroy(runs[i]);
    if (allocate(c, runs[i], kPunch) != 0) refused("fallocate");
    c->frames.set_exists(runs[i], false);
  });
}

std::int32_t map(vmserve_driver_context* c, const vmserve_map_run* runs, std::uint64_t count,
                 vmserve_error* error) {
  return each_run(count, error, [&](std::uint64_t i) {
    const vmserve_map_run& run = runs[i];
    c->frames.check_map(run);
    if (num_mappings(c->frames) + 2 * run.count > kMaxMappings) {
      throw Failure{VMSERVE_REFUSED, "more than 52,424 memory mappings: use larger pages", "mmap",
                    ENOMEM};
    }
    const std::uint64_t frame = c->frames.frame_bytes();
    const std::uint64_t bytes = static_cast<std::uint64_t>(run.count) * frame;
    const auto offset = static_cast<off_t>(static_cast<std::uint64_t>(run.first) * frame);
    const int flags = MAP_SHARED | MAP_FIXED | (run.prefault != 0 ? MAP_POPULATE : 0);
    if (::mmap(pointer(run.address), bytes, protection(run.access), flags, c->fd, offset) ==
        MAP_FAILED) {
      refused("mmap");
    }
    c->frames.mapped(run);
  });
}

std::int32_t unmap(vmserve_driver_context* c, const vmserve_address_run* runs, std::uint64_t count,
                   vmserve_error* error) {
  return each_run(count, error, [&](std::uint64_t i) {
    const auto [address, bytes] = runs[i];
    c->frames.check_mapped(address, bytes);
    const std::uint64_t start = c->frames.check_range(address, bytes, true);
    // Mapping nothing over the range, instead of munmap, keeps the addresses reserved.
    map_nothing(pointer(address), bytes, c->backings.at(start));
    c->frames.unmapped(address, bytes);
  });
}

std::int32_t set_access(vmserve_driver_context* c, const vmserve_access_run* runs,
                        std::uint64_t count, vmserve_error* error) {
  return each_run(count, error, [&](std::uint64_t i) {
    c->frames.check_set_access(runs[i]);
    if (::mprotect(pointer(runs[i].address), runs[i].bytes, protection(runs[i].access)) != 0) {
      refused("mprotect");
    }
    c->frames.set_access(runs[i]);
  });
}

std::int32_t zero(vmserve_driver_context* c, const vmserve_address_run* runs, std::uint64_t count,
                  vmserve_error* error) {
  return each_run(count, error, [&](std::uint64_t i) {
    c->frames.check_usable(runs[i].address, runs[i].bytes, /*writable=*/true);
    std::memset(pointer(runs[i].address), 0, runs[i].bytes);
  });
}

std::int32_t copy(vmserve_driver_context* c, const vmserve_copy_run* runs, std::uint64_t count,
                  vmserve_error* error) {
  return each_run(count, error, [&](std::uint64_t i) {
    const auto [dst, src, bytes] = runs[i];
    if (!c->host.contains(dst, bytes)) c->frames.check_usable(dst, bytes, /*writable=*/true);
    if (!c->host.contains(src, bytes)) c->frames.check_usable(src, bytes, /*writable=*/false);
    std::memcpy(pointer(dst), pointer(src), bytes);
  });
}

std::int32_t alloc_host(vmserve_driver_context* c, std::uint64_t bytes, std::uint64_t* address,
                        vmserve_error* error) {
  return guarded(error, [&] {
    if (bytes == 0) misuse("cannot allocate 0 bytes of host memory");
    void* p = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (p == MAP_FAILED) refused("mmap");
    *address = reinterpret_cast<std::uintptr_t>(p);
    c->host.add(*address, bytes);
  });
}

std::int32_t free_host(vmserve_driver_context* c, std::uint64_t address, vmserve_error* error) {
  return guarded(error, [&] {
    ::munmap(pointer(address), c->host.bytes(address));
    c->host.remove(address);
  });
}

std::int32_t query(vmserve_driver_context* c, std::uint64_t address, vmserve_mapping* mapping,
                   vmserve_error* error) {
  return guarded(error, [&] { *mapping = c->frames.query(address); });
}

std::int32_t stats(vmserve_driver_context* c, vmserve_driver_stats* stats, vmserve_error* error) {
  return guarded(error, [&] {
    struct stat file{};
    if (::fstat(c->fd, &file) != 0) refused("fstat");
    stats->created_frames = c->frames.created_frames();
    stats->mapped_frames = c->frames.mapped_frames();
    stats->num_mappings = num_mappings(c->frames);
    stats->max_mappings = kMaxMappings;
    stats->allocated_bytes = static_cast<std::int64_t>(file.st_blocks) * 512;
  });
}

}  // namespace

// All work is done when a call returns, so fence, mark and reached are left to vmserve.
const vmserve_driver* vmserve_driver_entry(std::uint32_t) {
  static const vmserve_driver table = {
      VMSERVE_DRIVER_ABI_VERSION,
      sizeof(vmserve_driver),
      "sample 1.0",
      open_driver,
      close_driver,
      reserve,
      free_reservation,
      create,
      destroy,
      map,
      unmap,
      set_access,
      zero,
      copy,
      /*fence=*/nullptr,
      /*mark=*/nullptr,
      /*reached=*/nullptr,
      alloc_host,
      free_host,
      query,
      stats,
  };
  return &table;
}
