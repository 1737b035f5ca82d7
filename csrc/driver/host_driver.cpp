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

// What is left to the rest of the machine when the pool grows.
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

void check_disjoint(std::vector<FrameRun> runs) {
  std::sort(runs.begin(), runs.end(),
            [](const FrameRun& a, const FrameRun& b) { return a.first < b.first; });
  for (std::size_t i = 1; i < runs.size(); ++i) {
    if (runs[i].first < runs[i - 1].first + runs[i - 1].count) {
      throw MisuseError("frame " + std::to_string(runs[i].first) + " is twice in the batch");
    }
  }
}

}  // namespace

HostDriver::HostDriver(HostOptions options)
    : options_(std::move(options)),
      granularity_(static_cast<std::size_t>(::sysconf(_SC_PAGESIZE))),
      pid_(::getpid()) {
  if (options_.frame_bytes == 0 || options_.frame_bytes % granularity_ != 0) {
    throw MisuseError("frame_bytes is " + std::to_string(options_.frame_bytes) +
                      ": it must be a positive multiple of the granularity, " +
                      std::to_string(granularity_));
  }
  if (options_.num_frames <= 0) {
    throw MisuseError("num_frames is " + std::to_string(options_.num_frames) +
                      ": it must be positive");
  }
  const std::int64_t max_map_count =
      options_.max_map_count > 0 ? options_.max_map_count : options_.limits.max_map_count();
  max_mappings_ = static_cast<std::int64_t>(static_cast<double>(max_map_count) * kMapCountShare);
  fd_ = FileDescriptor(::memfd_create("vmserve-kv", MFD_CLOEXEC));
  if (fd_.get() < 0) {
    refuse("memfd_create", errno, "making the memory file",
           "raise the limit of open files (ulimit -n)");
  }
  std::uint64_t file_bytes = 0;
  const bool overflow =
      __builtin_mul_overflow(static_cast<std::uint64_t>(options_.num_frames),
                             static_cast<std::uint64_t>(options_.frame_bytes), &file_bytes);
  if (overflow || ::ftruncate(fd_.get(), static_cast<off_t>(file_bytes)) != 0) {
    refuse("ftruncate", overflow ? EFBIG : errno,
           "sizing the memory file to " + with_commas(options_.num_frames) + " frames of " +
               human_bytes(options_.frame_bytes),
           "lower the most that the KV cache may ever take");
  }
  created_ = PageSet(options_.num_frames);
  map_counts_ = LazyArray<std::uint32_t>(options_.num_frames);
}

HostDriver::~HostDriver() {
  // In a fork this frees the child's own addresses and descriptor: harmless to the parent.
  for (const auto& [addr, reservation] : reservations_) {
    ::munmap(pointer(addr), reservation.segments.bytes());
  }
  for (const auto& [addr, bytes] : host_memory_) ::munmap(pointer(addr), bytes);
}

void HostDriver::check_process() const {
  if (::getpid() == pid_) return;
  throw MisuseError("this KV memory belongs to process " + std::to_string(pid_) +
                    " and was used in its fork " + std::to_string(::getpid()) +
                    ": start worker processes with the spawn method");
}

void HostDriver::check_memory(std::uint64_t bytes) const {
  const AvailableMemory available = options_.limits.available_memory();
  if (available.bytes >= kSpareBytes && bytes <= available.bytes - kSpareBytes) return;
  throw OutOfMemoryError(
      "growing the KV cache by " + human_bytes(bytes) + " would leave less than " +
      human_bytes(kSpareBytes) + " to the rest of the system: " + human_bytes(available.bytes) +
      " are available (" + available.source + "); lower --kv-cache-memory or free memory");
}

void HostDriver::check_map_count(std::int64_t growth, std::size_t completed) const {
  if (growth <= 0 || num_mappings_ + growth <= max_mappings_) return;
  throw DriverError(
      "mmap", ENOMEM,
      "the KV cache holds " + with_commas(num_mappings_) + " memory mappings, needs " +
          with_commas(growth) + " more and may hold " + with_commas(max_mappings_) +
          " (80 % of vm.max_map_count): use larger pages (--kv-page-size), lower "
          "--kv-cache-memory, or raise the limit with sysctl -w vm.max_map_count=262144",
      completed);
}

void HostDriver::check_frames(const FrameRun& run, bool exist, std::size_t completed) const {
  if (run.first < 0 || run.count <= 0 || run.first > num_frames() - run.count) {
    throw MisuseError("frames " + std::to_string(run.first) + " + " + std::to_string(run.count) +
                          " are outside 0 .. " + std::to_string(num_frames()),
                      completed);
  }
  const FrameId wrong = exist ? created_.lowest_absent(run.first) : created_.lowest(run.first);
  if (wrong >= 0 && wrong < run.first + run.count) {
    throw MisuseError(
        "frame " + std::to_string(wrong) + (exist ? " does not exist" : " exists already"),
        completed);
  }
}

const HostDriver::Reservation* HostDriver::find(Address addr) const {
  auto it = reservations_.upper_bound(addr);
  if (it == reservations_.begin()) return nullptr;
  --it;
  return addr < it->second.segments.end() ? &it->second : nullptr;
}

HostDriver::Reservation& HostDriver::reservation_of(Address addr, std::size_t bytes,
                                                    bool whole_frames, std::size_t completed) {
  auto* found = const_cast<Reservation*>(find(addr));
  if (found == nullptr || bytes == 0 || !found->segments.contains(addr, bytes)) {
    throw MisuseError(
        "the range of " + std::to_string(bytes) + " bytes is not inside one reservation",
        completed);
  }
  const std::size_t offset = addr - found->segments.base();
  if (whole_frames && (offset % frame_bytes() != 0 || bytes % frame_bytes() != 0)) {
    throw MisuseError("the range (offset " + std::to_string(offset) + ", " + std::to_string(bytes) +
                          " bytes) is not whole frames of " + std::to_string(frame_bytes()) +
                          " bytes",
                      completed);
  }
  return *found;
}

Address HostDriver::reserve(std::size_t bytes, Backing backing) {
  check_process();
  if (bytes == 0 || bytes % frame_bytes() != 0) {
    throw MisuseError("cannot reserve " + std::to_string(bytes) +
                      " bytes: a reservation is a positive multiple of the frame, " +
                      std::to_string(frame_bytes()));
  }
  check_map_count(1, 0);
  void* p = ::mmap(nullptr, bytes, protection(backing), MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE,
                   -1, 0);
  if (p == MAP_FAILED) {
    refuse("mmap", errno, "reserving " + human_bytes(bytes) + " of address space",
           "lower max_num_seqs or max_model_len, or raise the limit of virtual memory (ulimit -v)");
  }
  const auto addr = reinterpret_cast<Address>(p);
  reservations_.emplace(addr, Reservation{SegmentMap(addr, bytes, frame_bytes()), backing});
  ++num_mappings_;
  return addr;
}

void HostDriver::free_reservation(Address addr) {
  check_process();
  const auto it = reservations_.find(addr);
  if (it == reservations_.end()) throw MisuseError("no reservation starts at this address");
  const SegmentMap& segments = it->second.segments;
  if (::munmap(pointer(addr), segments.bytes()) != 0) {
    refuse("munmap", errno, "freeing " + human_bytes(segments.bytes()) + " of address space",
           "raise vm.max_map_count");
  }
  count_mapped(segments, addr, segments.bytes(), -1);
  num_mappings_ -= segments.count();
  reservations_.erase(it);
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
  check_process();
  std::uint64_t frames = 0;
  for (const FrameRun& run : runs) {
    check_frames(run, /*exist=*/false, 0);
    frames += static_cast<std::uint64_t>(run.count);
  }
  check_disjoint(runs);
  check_memory(frames * frame_bytes());
  for (std::size_t i = 0; i < runs.size(); ++i) {
    // Taken now and not at first touch: a refusal is an error here, a dead process there.
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
  for (const FrameRun& run : runs) {
    for (FrameId id = run.first; id < run.first + run.count; ++id) created_.insert(id);
  }
}

void HostDriver::destroy(const std::vector<FrameRun>& runs) {
  check_process();
  for (std::size_t i = 0; i < runs.size(); ++i) {
    check_frames(runs[i], /*exist=*/true, i);
    const FrameId stop = runs[i].first + runs[i].count;
    for (FrameId id = runs[i].first; id < stop; ++id) {
      // Reading a punched page takes memory for it again, behind the account's back.
      if (map_counts_[id] != 0) {
        throw MisuseError("frame " + std::to_string(id) + " is still mapped", i);
      }
    }
    const int code = fallocate_frames(runs[i], FALLOC_FL_PUNCH_HOLE);
    if (code != 0) {
      refuse(
          "fallocate", code,
          "giving back " + with_commas(runs[i].count) + " frames of " + human_bytes(frame_bytes()),
          "the memory stays with the KV cache", i);
    }
    for (FrameId id = runs[i].first; id < stop; ++id) created_.erase(id);
  }
}

void HostDriver::count_mapped(const SegmentMap& segments, Address addr, std::size_t bytes,
                              int change) {
  segments.for_each(addr, bytes, [&](Address, std::size_t part, Mapping first) {
    if (first.frame == kNoFrame) return;
    const auto count = static_cast<std::int64_t>(part / frame_bytes());
    for (FrameId id = first.frame; id < first.frame + count; ++id) {
      map_counts_[id] += static_cast<std::uint32_t>(change);
    }
    mapped_frames_ += change * count;
  });
}

void HostDriver::map_one(const MapRun& run, std::size_t completed) {
  check_frames(run.frames, /*exist=*/true, completed);
  if (run.access == Access::kNone) throw MisuseError("cannot map without access", completed);
  const std::size_t bytes = static_cast<std::size_t>(run.frames.count) * frame_bytes();
  SegmentMap& segments = reservation_of(run.addr, bytes, true, completed).segments;
  if (!segments.all_unmapped(run.addr, bytes)) {
    throw MisuseError("something is mapped there already", completed);
  }
  const Mapping first{run.frames.first, run.access};
  const std::int64_t growth = segments.growth(run.addr, bytes, first);
  check_map_count(growth, completed);
  const int flags = MAP_SHARED | MAP_FIXED | (run.prefault ? MAP_POPULATE : 0);
  const auto offset = static_cast<off_t>(run.frames.first * static_cast<FrameId>(frame_bytes()));
  if (::mmap(pointer(run.addr), bytes, protection(run.access), flags, fd_.get(), offset) ==
      MAP_FAILED) {
    refuse("mmap", errno, "mapping " + human_bytes(bytes), "raise vm.max_map_count", completed);
  }
  segments.assign(run.addr, bytes, first);
  num_mappings_ += growth;
  count_mapped(segments, run.addr, bytes, 1);
}

void HostDriver::map(const std::vector<MapRun>& runs) {
  check_process();
  for (std::size_t i = 0; i < runs.size(); ++i) map_one(runs[i], i);
}

void HostDriver::unmap_one(const AddressRun& run, std::size_t completed) {
  Reservation& reservation = reservation_of(run.addr, run.bytes, true, completed);
  SegmentMap& segments = reservation.segments;
  if (!segments.all_mapped(run.addr, run.bytes)) {
    throw MisuseError("not everything in the range is mapped", completed);
  }
  // Mapping nothing over it, in place of munmap, keeps the addresses reserved. The limit is
  // only met where a hole splits a run in two.
  const std::int64_t growth = segments.growth(run.addr, run.bytes, Mapping{});
  check_map_count(growth, completed);
  if (::mmap(pointer(run.addr), run.bytes, protection(reservation.backing),
             MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0) == MAP_FAILED) {
    refuse("mmap", errno, "unmapping " + human_bytes(run.bytes), "raise vm.max_map_count",
           completed);
  }
  count_mapped(segments, run.addr, run.bytes, -1);
  segments.assign(run.addr, run.bytes, Mapping{});
  num_mappings_ += growth;
}

void HostDriver::unmap(const std::vector<AddressRun>& runs) {
  check_process();
  for (std::size_t i = 0; i < runs.size(); ++i) unmap_one(runs[i], i);
}

void HostDriver::set_access_one(const AccessRun& run, std::size_t completed) {
  SegmentMap& segments = reservation_of(run.addr, run.bytes, true, completed).segments;
  if (run.access == Access::kNone) throw MisuseError("unmap what nobody may use", completed);
  if (!segments.all_mapped(run.addr, run.bytes)) {
    throw MisuseError("not everything in the range is mapped", completed);
  }
  check_map_count(2, completed);  // at most: one cut at either end
  if (::mprotect(pointer(run.addr), run.bytes, protection(run.access)) != 0) {
    refuse("mprotect", errno, "changing the access of " + human_bytes(run.bytes),
           "raise vm.max_map_count", completed);
  }
  const std::int64_t before = segments.count();
  segments.set_access(run.addr, run.bytes, run.access);
  num_mappings_ += segments.count() - before;
}

void HostDriver::set_access(const std::vector<AccessRun>& runs) {
  check_process();
  for (std::size_t i = 0; i < runs.size(); ++i) set_access_one(runs[i], i);
}

void HostDriver::zero(const std::vector<AddressRun>& runs) {
  check_process();
  for (std::size_t i = 0; i < runs.size(); ++i) {
    const SegmentMap& segments = reservation_of(runs[i].addr, runs[i].bytes, false, i).segments;
    if (!segments.all_writable(runs[i].addr, runs[i].bytes)) {
      throw MisuseError("cannot zero what is not mapped writable", i);
    }
    std::memset(pointer(runs[i].addr), 0, runs[i].bytes);
  }
}

void HostDriver::check_copyable(Address addr, std::size_t bytes, bool write,
                                std::size_t completed) {
  const auto host = host_memory_.upper_bound(addr);
  if (host != host_memory_.begin()) {
    const auto& [start, size] = *std::prev(host);
    if (addr < start + size && bytes <= start + size - addr) return;
  }
  const SegmentMap& segments = reservation_of(addr, bytes, false, completed).segments;
  if (write ? !segments.all_writable(addr, bytes) : !segments.all_mapped(addr, bytes)) {
    throw MisuseError("cannot copy between what is not mapped", completed);
  }
}

void HostDriver::copy(const std::vector<CopyRun>& runs) {
  check_process();
  for (std::size_t i = 0; i < runs.size(); ++i) {
    check_copyable(runs[i].dst, runs[i].bytes, /*write=*/true, i);
    check_copyable(runs[i].src, runs[i].bytes, /*write=*/false, i);
    std::memcpy(pointer(runs[i].dst), pointer(runs[i].src), runs[i].bytes);
  }
}

Address HostDriver::alloc_host(std::size_t bytes) {
  check_process();
  if (bytes == 0) throw MisuseError("cannot allocate 0 bytes of host memory");
  check_memory(bytes);
  void* p = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (p == MAP_FAILED) {
    throw OutOfMemoryError("the system has no " + human_bytes(bytes) + " to swap to (" +
                           errno_text(errno) + "): lower --swap-space");
  }
  const auto addr = reinterpret_cast<Address>(p);
  host_memory_.emplace(addr, bytes);
  return addr;
}

void HostDriver::free_host(Address addr) {
  check_process();
  const auto it = host_memory_.find(addr);
  if (it == host_memory_.end()) throw MisuseError("no host memory starts at this address");
  ::munmap(pointer(addr), it->second);
  host_memory_.erase(it);
}

Mapping HostDriver::query(Address addr) const {
  const Reservation* reservation = find(addr);
  if (reservation == nullptr) throw MisuseError("the address is in no reservation");
  return reservation->segments.at(addr);
}

DriverStats HostDriver::stats() const {
  struct stat file{};
  if (::fstat(fd_.get(), &file) != 0) {
    refuse("fstat", errno, "counting the memory file's blocks", "this is a defect: report it");
  }
  DriverStats stats;
  stats.created_frames = created_.size();
  stats.mapped_frames = mapped_frames_;
  stats.num_mappings = num_mappings_;
  stats.max_mappings = max_mappings_;
  stats.allocated_bytes = static_cast<std::int64_t>(file.st_blocks) * 512;
  return stats;
}

}  // namespace vmserve
