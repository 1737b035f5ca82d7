#include "vmserve/host_driver.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <iterator>
#include <string>

#include "vmserve/errors.h"
#include "vmserve/text.h"

namespace vmserve {
namespace {

// Memory left to other processes when the pool grows.
constexpr std::uint64_t kSpareBytes = std::uint64_t{64} << 20;

int protection(Access access) {
  switch (access) {
    case Access::kNone:
      return PROT_NONE;
    case Access::kRead:
      return PROT_READ;
    case Access::kReadWrite:
      return PROT_READ | PROT_WRITE;
  }
  return PROT_NONE;
}

int protection(Backing backing) {
  return backing == Backing::kTrap ? PROT_NONE : PROT_READ;
}

[[noreturn]] void refuse(const char* call, int code, const std::string& doing,
                         const std::string& remedy, std::size_t completed = 0) {
  throw DriverError(
      call, code,
      std::string(call) + " failed while " + doing + ": " + errno_text(code) + "; " + remedy,
      completed);
}

void* pointer(Address addr) {
  return reinterpret_cast<void*>(addr);
}

HostOptions checked(HostOptions options, std::size_t granularity) {
  if (options.frame_bytes == 0 || options.frame_bytes % granularity != 0) {
    throw MisuseError("frame_bytes is " + std::to_string(options.frame_bytes) +
                      ": it must be a positive multiple of the granularity, " +
                      std::to_string(granularity));
  }
  if (options.num_frames <= 0) {
    throw MisuseError("num_frames is " + std::to_string(options.num_frames) +
                      ": it must be positive");
  }
  return options;
}

FileDescriptor memory_file(const HostOptions& options) {
  FileDescriptor fd(::memfd_create("vmserve-kv", MFD_CLOEXEC));
  if (fd.get() < 0) {
    refuse("memfd_create", errno, "making the memory file",
           "raise the limit of open files (ulimit -n)");
  }
  std::uint64_t file_bytes = 0;
  const bool overflow =
      __builtin_mul_overflow(static_cast<std::uint64_t>(options.num_frames),
                             static_cast<std::uint64_t>(options.frame_bytes), &file_bytes);
  if (overflow || ::ftruncate(fd.get(), static_cast<off_t>(file_bytes)) != 0) {
    refuse("ftruncate", overflow ? EFBIG : errno,
           "sizing the memory file to " + with_commas(options.num_frames) + " frames of " +
               human_bytes(options.frame_bytes),
           "lower the most that the KV cache may ever take");
  }
  return fd;
}

}  // namespace

HostDriver::HostDriver(HostOptions options)
    : granularity_(static_cast<std::size_t>(::sysconf(_SC_PAGESIZE))),
      options_(checked(std::move(options), granularity_)),
      fd_(memory_file(options_)),
      ledger_(options_.frame_bytes, options_.num_frames),
      account_(options_.max_map_count > 0 ? std::make_shared<MapAccount>(options_.max_map_count)
                                          : MapAccount::shared(options_.limits)) {}

HostDriver::~HostDriver() {
  // In a forked child this frees only the child's addresses and descriptor.
  for (const auto& [addr, reservation] : ledger_.reservations()) {
    ::munmap(pointer(addr), reservation.segments.bytes());
  }
  for (const auto& [addr, bytes] : ledger_.host_memory()) ::munmap(pointer(addr), bytes);
  account_->add(-num_accounted_);
}

void HostDriver::check_memory(std::uint64_t bytes, const char* doing, const char* option) const {
  const AvailableMemory available = options_.limits.available_memory();
  if (available.bytes >= kSpareBytes && bytes <= available.bytes - kSpareBytes) return;
  throw OutOfMemoryError(
      doing + (" by " + human_bytes(bytes)) + " would leave less than " + human_bytes(kSpareBytes) +
      " to the rest of the system: " + human_bytes(available.bytes) + " are available (" +
      available.source + "); lower " + option + " or free memory");
}

void HostDriver::check_map_count(std::int64_t growth, std::int64_t most,
                                 std::size_t completed) const {
  const std::int64_t held = account_->held();
  if (growth <= 0 || held + growth <= most) return;
  throw DriverError(
      "mmap", ENOMEM,
      "the KV caches of this process hold " + with_commas(held) + " memory mappings, need " +
          with_commas(growth) + " more and may hold " + with_commas(most) +
          " (of vm.max_map_count): use larger pages (--kv-page-size), lower "
          "--kv-cache-memory, or raise the limit with sysctl -w vm.max_map_count=262144",
      completed);
}

void HostDriver::settle_account() {
  account_->add(ledger_.num_segments() - num_accounted_);
  num_accounted_ = ledger_.num_segments();
}

Address HostDriver::reserve(std::size_t bytes, Backing backing) {
  ledger_.check_process();
  ledger_.check_reservable(bytes);
  check_map_count(1, account_->most(), 0);
  void* p = ::mmap(nullptr, bytes, protection(backing), MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE,
                   -1, 0);
  if (p == MAP_FAILED) {
    refuse("mmap", errno, "reserving " + human_bytes(bytes) + " of address space",
           "lower max_num_seqs or max_model_len, or raise the limit of virtual memory (ulimit -v)");
  }
  const auto addr = reinterpret_cast<Address>(p);
  ledger_.note_reserved(addr, bytes, backing);
  settle_account();
  return addr;
}

void HostDriver::free_reservation(Address addr) {
  ledger_.check_process();
  const SegmentMap& segments = ledger_.reservation_at(addr).segments;
  if (::munmap(pointer(addr), segments.bytes()) != 0) {
    refuse("munmap", errno, "freeing " + human_bytes(segments.bytes()) + " of address space",
           "raise vm.max_map_count");
  }
  ledger_.note_freed(addr);
  settle_account();
}

int HostDriver::fallocate_frames(const FrameRun& run, int mode) {
  const auto frame = static_cast<std::int64_t>(frame_bytes());
  int result = 0;
  do {
    result =
        ::fallocate(fd_.get(), mode | FALLOC_FL_KEEP_SIZE, run.first * frame, run.count * frame);
  } while (result != 0 && errno == EINTR);
  return result == 0 ? 0 : errno;
}

void HostDriver::create(const std::vector<FrameRun>& runs) {
  ledger_.check_process();
  std::uint64_t frames = 0;
  ledger_.check_creatable(runs);
  for (const FrameRun& run : runs) {
    frames += static_cast<std::uint64_t>(run.count);
  }
  check_memory(frames * frame_bytes(), "growing the KV cache", "--kv-cache-memory");
  for (std::size_t i = 0; i < runs.size(); ++i) {
    // Allocates now: a refusal is an error here; at the first touch it would kill the process.
    const int code = fallocate_frames(runs[i], 0);
    if (code == 0) continue;
    for (std::size_t done = 0; done <= i; ++done) {
      fallocate_frames(runs[done], FALLOC_FL_PUNCH_HOLE);
    }
    if (code == ENOMEM || code == ENOSPC) {
      throw OutOfMemoryError("the system has no " + human_bytes(frames * frame_bytes()) +
                             " for the KV cache to grow by (" + errno_text(code) +
                             "): lower --kv-cache-memory or free memory");
    }
    refuse("fallocate", code, "taking " + human_bytes(frames * frame_bytes()),
           "lower --kv-cache-memory");
  }
  for (const FrameRun& run : runs) ledger_.note_created(run);
}

void HostDriver::destroy(const std::vector<FrameRun>& runs) {
  ledger_.check_process();
  for (std::size_t i = 0; i < runs.size(); ++i) {
    // To read a punched page would allocate it again without this driver's knowledge, so frames
    // must not be mapped.
    ledger_.check_destroyable(runs[i], i);
    const int code = fallocate_frames(runs[i], FALLOC_FL_PUNCH_HOLE);
    if (code != 0) {
      refuse(
          "fallocate", code,
          "giving back " + with_commas(runs[i].count) + " frames of " + human_bytes(frame_bytes()),
          "the memory stays with the KV cache", i);
    }
    ledger_.note_destroyed(runs[i]);
  }
}

void HostDriver::map_one(const MapRun& run, std::size_t completed) {
  FrameLedger::Reservation& reservation = ledger_.check_mappable(run, completed);
  const std::size_t bytes = static_cast<std::size_t>(run.frames.count) * frame_bytes();
  const Mapping first{run.frames.first, run.access};
  check_map_count(reservation.segments.growth(run.addr, bytes, first), account_->most(), completed);
  const int flags = MAP_SHARED | MAP_FIXED | (run.prefault ? MAP_POPULATE : 0);
  const auto offset = static_cast<off_t>(run.frames.first * static_cast<FrameId>(frame_bytes()));
  if (::mmap(pointer(run.addr), bytes, protection(run.access), flags, fd_.get(), offset) ==
      MAP_FAILED) {
    refuse("mmap", errno, "mapping " + human_bytes(bytes), "raise vm.max_map_count", completed);
  }
  ledger_.note_mapped(reservation, run);
  settle_account();
}

void HostDriver::map(const std::vector<MapRun>& runs) {
  ledger_.check_process();
  for (std::size_t i = 0; i < runs.size(); ++i) map_one(runs[i], i);
}

void HostDriver::unmap_one(const AddressRun& run, std::size_t completed) {
  FrameLedger::Reservation& reservation = ledger_.check_unmappable(run, completed);
  // Mapping PROT_NONE over the range, instead of munmap, keeps the addresses reserved. The limit
  // applies only if the hole splits a run in two.
  check_map_count(reservation.segments.growth(run.addr, run.bytes, Mapping{}),
                  account_->most_with_cuts(), completed);
  if (::mmap(pointer(run.addr), run.bytes, protection(reservation.backing),
             MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0) == MAP_FAILED) {
    refuse("mmap", errno, "unmapping " + human_bytes(run.bytes), "raise vm.max_map_count",
           completed);
  }
  ledger_.note_unmapped(reservation, run);
  settle_account();
}

void HostDriver::unmap(const std::vector<AddressRun>& runs) {
  ledger_.check_process();
  for (std::size_t i = 0; i < runs.size(); ++i) unmap_one(runs[i], i);
}

void HostDriver::set_access_one(const AccessRun& run, std::size_t completed) {
  FrameLedger::Reservation& reservation = ledger_.check_accessible(run, completed);
  // At most one split at each end.
  check_map_count(2, account_->most_with_cuts(), completed);
  if (::mprotect(pointer(run.addr), run.bytes, protection(run.access)) != 0) {
    refuse("mprotect", errno, "changing the access of " + human_bytes(run.bytes),
           "raise vm.max_map_count", completed);
  }
  ledger_.note_access(reservation, run);
  settle_account();
}

void HostDriver::set_access(const std::vector<AccessRun>& runs) {
  ledger_.check_process();
  for (std::size_t i = 0; i < runs.size(); ++i) set_access_one(runs[i], i);
}

void HostDriver::zero(const std::vector<AddressRun>& runs) {
  ledger_.check_process();
  for (std::size_t i = 0; i < runs.size(); ++i) {
    ledger_.check_zeroable(runs[i], i);
    std::memset(pointer(runs[i].addr), 0, runs[i].bytes);
  }
}

void HostDriver::copy(const std::vector<CopyRun>& runs) {
  ledger_.check_process();
  for (std::size_t i = 0; i < runs.size(); ++i) {
    ledger_.check_copyable(runs[i], i);
    std::memcpy(pointer(runs[i].dst), pointer(runs[i].src), runs[i].bytes);
  }
}

Address HostDriver::alloc_host(std::size_t bytes) {
  ledger_.check_process();
  if (bytes == 0) throw MisuseError("cannot allocate 0 bytes of host memory");
  check_memory(bytes, "growing the swap space", "--swap-space");
  // Allocates now, like frames: the next check of the limits sees it, and no copy hits the limit of
  // a control group, which would kill the process.
  void* p = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE,
                   MAP_PRIVATE | MAP_ANONYMOUS | MAP_POPULATE, -1, 0);
  if (p == MAP_FAILED) {
    throw OutOfMemoryError("the system has no " + human_bytes(bytes) + " to swap to (" +
                           errno_text(errno) + "): lower --swap-space");
  }
  const auto addr = reinterpret_cast<Address>(p);
  ledger_.note_host_memory(addr, bytes);
  return addr;
}

void HostDriver::free_host(Address addr) {
  ledger_.check_process();
  ::munmap(pointer(addr), ledger_.host_bytes_at(addr));
  ledger_.note_host_memory_freed(addr);
}

DriverStats HostDriver::stats() const {
  struct stat file{};
  if (::fstat(fd_.get(), &file) != 0) {
    refuse("fstat", errno, "counting the memory file's blocks", "this is a defect: report it");
  }
  DriverStats stats;
  stats.created_frames = ledger_.created_frames();
  stats.mapped_frames = ledger_.mapped_frames();
  stats.num_mappings = ledger_.num_segments();
  stats.max_mappings = account_->most();
  stats.allocated_bytes = static_cast<std::int64_t>(file.st_blocks) * 512;
  return stats;
}

}  // namespace vmserve
