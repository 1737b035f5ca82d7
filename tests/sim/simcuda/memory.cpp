// Physical allocations, reservations and mappings.
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <iterator>

#include "sim.h"

namespace simcuda {
namespace {

using namespace vmserve::cuda;

void* pointer(DevicePointer addr) {
  return reinterpret_cast<void*>(addr);
}

int protection(int access) {
  if (access == kAccessReadWrite) return PROT_READ | PROT_WRITE;
  return access == kAccessRead ? PROT_READ : PROT_NONE;
}

// Physical memory and host memory hold what another process left there, never zero.
void fill_with_garbage(void* p, std::uint64_t bytes, std::mt19937_64& random) {
  auto* const words = static_cast<std::uint64_t*>(p);
  for (std::uint64_t i = 0; i < bytes / 8; ++i) words[i] = random() | 0x0101010101010101;
}

}  // namespace

Simulator& Simulator::instance() {
  static Simulator simulator;
  return simulator;
}

void Simulator::clear() {
  for (const auto& [addr, span] : reservations_) ::munmap(pointer(addr), span.bytes);
  for (const auto& [addr, span] : host_blocks_) ::munmap(pointer(addr), span.bytes);
  if (fd_ >= 0) ::close(fd_);
  fd_ = -1;
  reservations_.clear();
  host_blocks_.clear();
  allocations_.clear();
  mappings_.clear();
  free_ranges_.clear();
  allocated_bytes = 0;
  streams.clear();
  events.clear();
  violations.clear();
  num_calls.clear();
  sticky = kSuccess;
  context_references = 0;
  fail_at = calls_since_plan = num_failed = 0;
}

void Simulator::configure(const Config& wanted) {
  clear();
  config = wanted;
  costs_ns.clear();
  random.seed(config.seed);
  ++generation;
  streams[kDefaultStream];
  fd_ = ::memfd_create("simcuda", MFD_CLOEXEC);
  if (fd_ < 0 || ::ftruncate(fd_, static_cast<off_t>(config.total_bytes)) != 0) {
    violate("the simulator has no memory file");
  }
  free_ranges_[0] = config.total_bytes;
}

Result Simulator::reserve(DevicePointer* addr, std::size_t bytes, std::size_t alignment) {
  const std::uint64_t align = std::max<std::uint64_t>(alignment, config.granularity);
  if (bytes == 0 || bytes % config.granularity != 0 || (align & (align - 1)) != 0) {
    return kInvalidValue;
  }
  std::uint64_t padded = 0;
  const auto host_page = static_cast<std::uint64_t>(::sysconf(_SC_PAGESIZE));
  if (__builtin_add_overflow(bytes, align - std::min(align, host_page), &padded)) {
    return kOutOfMemory;
  }
  void* p = ::mmap(nullptr, padded, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (p == MAP_FAILED) return kOutOfMemory;
  const auto start = reinterpret_cast<DevicePointer>(p);
  const DevicePointer aligned = (start + align - 1) / align * align;
  if (aligned > start) ::munmap(p, aligned - start);
  if (aligned + bytes < start + padded) {
    ::munmap(pointer(aligned + bytes), start + padded - aligned - bytes);
  }
  reservations_[aligned] = {bytes, next_id++};
  *addr = aligned;
  return kSuccess;
}

Result Simulator::free_reservation(DevicePointer addr, std::size_t bytes) {
  const auto it = reservations_.find(addr);
  if (it == reservations_.end() || it->second.bytes != bytes) return kInvalidValue;
  const auto mapped = mappings_.lower_bound(addr);
  if (mapped != mappings_.end() && mapped->first < addr + bytes) return kInvalidValue;
  ::munmap(pointer(addr), bytes);
  reservations_.erase(it);
  return kSuccess;
}

Result Simulator::create(Handle* handle, std::size_t bytes,
                         const AllocationProperties& properties) {
  if (bytes == 0 || bytes % config.granularity != 0) return kInvalidValue;
  if (properties.type != kAllocationPinned || properties.location.type != kLocationDevice ||
      properties.requested_handle_types != 0 || properties.win32_handle_meta_data != nullptr) {
    return kInvalidValue;
  }
  if (properties.location.id < 0 ||
      properties.location.id >= static_cast<int>(config.num_devices)) {
    return kInvalidDevice;
  }
  const auto range = std::find_if(free_ranges_.begin(), free_ranges_.end(),
                                  [&](const auto& candidate) { return candidate.second >= bytes; });
  if (range == free_ranges_.end()) return kOutOfMemory;
  const std::uint64_t offset = range->first;
  const std::uint64_t left = range->second - bytes;
  free_ranges_.erase(range);
  if (left > 0) free_ranges_[offset + bytes] = left;
  void* p =
      ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd_, static_cast<off_t>(offset));
  if (p != MAP_FAILED) {
    fill_with_garbage(p, bytes, random);
    ::munmap(p, bytes);
  }
  allocated_bytes += bytes;
  *handle = next_id++;
  allocations_[*handle] = {offset, bytes, 1, 0};
  return kSuccess;
}

void Simulator::destroy_if_unused(Handle handle) {
  const auto it = allocations_.find(handle);
  if (it->second.references > 0 || it->second.num_mappings > 0) return;
  std::uint64_t offset = it->second.offset;
  std::uint64_t bytes = it->second.bytes;
  allocated_bytes -= bytes;
  allocations_.erase(it);
  auto next = free_ranges_.lower_bound(offset);
  if (next != free_ranges_.end() && next->first == offset + bytes) {
    bytes += next->second;
    next = free_ranges_.erase(next);
  }
  if (next != free_ranges_.begin()) {
    const auto previous = std::prev(next);
    if (previous->first + previous->second == offset) {
      previous->second += bytes;
      return;
    }
  }
  free_ranges_[offset] = bytes;
}

Result Simulator::release(Handle handle) {
  const auto it = allocations_.find(handle);
  if (it == allocations_.end() || it->second.references == 0) return kInvalidValue;
  --it->second.references;
  destroy_if_unused(handle);
  return kSuccess;
}

bool Simulator::reserved(DevicePointer addr, std::uint64_t bytes) const {
  auto it = reservations_.upper_bound(addr);
  if (it == reservations_.begin()) return false;
  --it;
  return bytes <= it->second.bytes && addr - it->first <= it->second.bytes - bytes;
}

const Mapped* Simulator::mapping_at(DevicePointer addr, DevicePointer* start) const {
  auto it = mappings_.upper_bound(addr);
  if (it == mappings_.begin()) return nullptr;
  --it;
  if (addr >= it->first + it->second.bytes) return nullptr;
  *start = it->first;
  return &it->second;
}

bool Simulator::whole_mappings(DevicePointer addr, std::uint64_t bytes) const {
  const DevicePointer stop = addr + bytes;
  while (addr < stop) {
    const auto it = mappings_.find(addr);
    if (it == mappings_.end()) return false;
    addr += it->second.bytes;
  }
  return addr == stop && bytes > 0;
}

Result Simulator::map(DevicePointer addr, std::size_t bytes, std::size_t offset, Handle handle) {
  const auto it = allocations_.find(handle);
  if (it == allocations_.end() || it->second.references == 0) return kInvalidValue;
  if (offset != 0 || bytes != it->second.bytes || addr % config.granularity != 0) {
    return kInvalidValue;
  }
  if (!reserved(addr, bytes)) return kInvalidValue;
  DevicePointer start = 0;
  if (mapping_at(addr, &start) != nullptr) return kInvalidValue;
  const auto next = mappings_.lower_bound(addr);
  if (next != mappings_.end() && next->first < addr + bytes) return kInvalidValue;
  if (::mmap(pointer(addr), bytes, PROT_NONE, MAP_SHARED | MAP_FIXED, fd_,
             static_cast<off_t>(it->second.offset)) == MAP_FAILED) {
    return kOutOfMemory;
  }
  mappings_[addr] = {bytes, handle, 0, next_id++};
  ++it->second.num_mappings;
  return kSuccess;
}

void Simulator::drop_mapping(DevicePointer addr) {
  const auto it = mappings_.find(addr);
  const Handle handle = it->second.allocation;
  mappings_.erase(it);
  --allocations_.at(handle).num_mappings;
  destroy_if_unused(handle);
}

// NOTE: like the real call it does not wait for queued work that uses the range.
Result Simulator::unmap(DevicePointer addr, std::size_t bytes) {
  if (!reserved(addr, bytes) || !whole_mappings(addr, bytes)) return kInvalidValue;
  if (::mmap(pointer(addr), bytes, PROT_NONE,
             MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0) == MAP_FAILED) {
    return kOutOfMemory;
  }
  for (auto it = mappings_.find(addr); it != mappings_.end() && it->first < addr + bytes;) {
    const DevicePointer start = it->first;
    ++it;
    drop_mapping(start);
  }
  return kSuccess;
}

Result Simulator::set_access(DevicePointer addr, std::size_t bytes,
                             const AccessDescriptor& descriptor) {
  const int flags = descriptor.flags;
  if (descriptor.location.type != kLocationDevice || descriptor.location.id < 0 ||
      descriptor.location.id >= static_cast<int>(config.num_devices)) {
    return kInvalidDevice;
  }
  if (flags != 0 && flags != kAccessRead && flags != kAccessReadWrite) return kInvalidValue;
  if (flags == kAccessRead && config.read_only == 0) return kNotSupported;
  if (!reserved(addr, bytes) || !whole_mappings(addr, bytes)) return kInvalidValue;
  if (::mprotect(pointer(addr), bytes, protection(flags)) != 0) return kOutOfMemory;
  for (auto it = mappings_.find(addr); it != mappings_.end() && it->first < addr + bytes; ++it) {
    it->second.access = flags;
  }
  return kSuccess;
}

void Simulator::set_first_access(DevicePointer addr, const AccessDescriptor& descriptor) {
  const auto it = mappings_.find(addr);
  if (it != mappings_.end()) set_access(addr, it->second.bytes, descriptor);
}

Result Simulator::host_alloc(void** addr, std::size_t bytes) {
  if (bytes == 0) return kInvalidValue;
  void* p = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (p == MAP_FAILED) return kOutOfMemory;
  fill_with_garbage(p, bytes, random);
  host_blocks_[reinterpret_cast<DevicePointer>(p)] = {bytes, next_id++};
  *addr = p;
  return kSuccess;
}

Result Simulator::host_free(void* addr) {
  const auto it = host_blocks_.find(reinterpret_cast<DevicePointer>(addr));
  if (it == host_blocks_.end()) return kInvalidValue;
  ::munmap(addr, it->second.bytes);
  host_blocks_.erase(it);
  return kSuccess;
}

int Simulator::access_at(DevicePointer addr) const {
  DevicePointer start = 0;
  const Mapped* mapped = mapping_at(addr, &start);
  return mapped == nullptr ? -1 : mapped->access;
}

Touch Simulator::touch(DevicePointer addr, std::uint64_t bytes, Use use) const {
  Touch touch{addr, bytes, use, {}};
  const auto host = host_blocks_.upper_bound(addr);
  if (host != host_blocks_.begin()) {
    const auto& [start, span] = *std::prev(host);
    if (addr - start <= span.bytes && bytes <= span.bytes - (addr - start)) {
      touch.ids.push_back(span.id);
      return touch;
    }
  }
  for (DevicePointer at = addr; at < addr + bytes;) {
    DevicePointer start = 0;
    const Mapped* mapped = mapping_at(at, &start);
    if (mapped == nullptr) {
      touch.ids.clear();
      return touch;
    }
    touch.ids.push_back(mapped->id);
    at = start + mapped->bytes;
  }
  return touch;
}

std::string Simulator::denial(const Touch& queued) const {
  const Touch now = touch(queued.addr, queued.bytes, queued.use);
  if (now.ids.empty()) return "nothing is mapped there";
  if (now.ids != queued.ids) return "other memory is mapped there than when it was queued";
  for (DevicePointer at = queued.addr; at < queued.addr + queued.bytes;) {
    DevicePointer start = 0;
    const Mapped* mapped = mapping_at(at, &start);
    if (mapped == nullptr) return "";  // host memory
    if (mapped->access == 0) return "no access was given";
    if (queued.use == Use::kWrite && mapped->access != kAccessReadWrite) return "it is read-only";
    at = start + mapped->bytes;
  }
  return "";
}

Counts Simulator::counts() const {
  Counts counts{};
  counts.allocations = allocations_.size();
  counts.allocated_bytes = allocated_bytes;
  for (const auto& [handle, allocation] : allocations_) {
    counts.handles += allocation.references > 0 ? 1 : 0;
  }
  counts.mappings = mappings_.size();
  counts.reservations = reservations_.size();
  counts.host_blocks = host_blocks_.size();
  counts.streams = static_cast<std::uint64_t>(std::count_if(
      streams.begin(), streams.end(),
      [](const auto& entry) { return entry.first != kDefaultStream && !entry.second.destroyed; }));
  counts.events = events.size();
  counts.contexts = static_cast<std::uint64_t>(context_references);
  counts.pending_work = pending_work();
  return counts;
}

}  // namespace simcuda
