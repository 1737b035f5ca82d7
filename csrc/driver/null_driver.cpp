#include "vmserve/null_driver.h"

#include <iterator>
#include <limits>
#include <string>

#include "vmserve/errors.h"

namespace vmserve {
namespace {

std::size_t checked_frame(std::size_t frame_bytes, std::size_t granularity) {
  if (frame_bytes != 0 && frame_bytes % granularity == 0) return frame_bytes;
  throw MisuseError("frame_bytes is " + std::to_string(frame_bytes) +
                    ": it must be a positive multiple of the granularity, " +
                    std::to_string(granularity));
}

}  // namespace

NullDriver::NullDriver(std::size_t frame_bytes, std::int64_t num_frames)
    : frame_bytes_(checked_frame(frame_bytes, kGranularity)), ledger_(frame_bytes, num_frames) {}

Address NullDriver::take_addresses(std::size_t bytes) {
  const Address addr = next_;
  // Leaves a gap after each reservation, so that an address just past its end is in none.
  const std::size_t taken = (bytes / kGranularity + 2) * kGranularity;
  if (bytes > std::numeric_limits<Address>::max() - addr - 2 * kGranularity) {
    throw OutOfMemoryError("64 bits of addresses do not hold " + std::to_string(bytes) +
                           " bytes more");
  }
  next_ += taken;
  return addr;
}

Address NullDriver::reserve(std::size_t bytes, Backing backing) {
  ledger_.check_process();
  ledger_.check_reservable(bytes);
  const Address addr = take_addresses(bytes);
  ledger_.note_reserved(addr, bytes, backing);
  return addr;
}

void NullDriver::free_reservation(Address addr) {
  ledger_.check_process();
  ledger_.reservation_at(addr);
  ledger_.note_freed(addr);
}

void NullDriver::create(const std::vector<FrameRun>& runs) {
  ledger_.check_process();
  ledger_.check_creatable(runs);
  for (const FrameRun& run : runs) ledger_.note_created(run);
}

void NullDriver::destroy(const std::vector<FrameRun>& runs) {
  ledger_.check_process();
  for (std::size_t i = 0; i < runs.size(); ++i) {
    ledger_.check_destroyable(runs[i], i);
    ledger_.note_destroyed(runs[i]);
  }
}

void NullDriver::map(const std::vector<MapRun>& runs) {
  ledger_.check_process();
  for (std::size_t i = 0; i < runs.size(); ++i) {
    ledger_.note_mapped(ledger_.check_mappable(runs[i], i), runs[i]);
  }
}

void NullDriver::unmap(const std::vector<AddressRun>& runs) {
  ledger_.check_process();
  for (std::size_t i = 0; i < runs.size(); ++i) {
    ledger_.note_unmapped(ledger_.check_unmappable(runs[i], i), runs[i]);
  }
}

void NullDriver::set_access(const std::vector<AccessRun>& runs) {
  ledger_.check_process();
  for (std::size_t i = 0; i < runs.size(); ++i) {
    ledger_.note_access(ledger_.check_accessible(runs[i], i), runs[i]);
  }
}

void NullDriver::zero(const std::vector<AddressRun>& runs) {
  ledger_.check_process();
  for (std::size_t i = 0; i < runs.size(); ++i) {
    ledger_.check_zeroable(runs[i], i);
    work_.zeroed_bytes += static_cast<std::int64_t>(runs[i].bytes);
  }
}

bool NullDriver::is_host_memory(Address addr) const {
  const auto after = ledger_.host_memory().upper_bound(addr);
  if (after == ledger_.host_memory().begin()) return false;
  const auto& [start, bytes] = *std::prev(after);
  return addr - start < bytes;
}

void NullDriver::copy(const std::vector<CopyRun>& runs) {
  ledger_.check_process();
  for (std::size_t i = 0; i < runs.size(); ++i) {
    ledger_.check_copyable(runs[i], i);
    const bool swaps = is_host_memory(runs[i].dst) || is_host_memory(runs[i].src);
    (swaps ? work_.swapped_bytes : work_.copied_bytes) += static_cast<std::int64_t>(runs[i].bytes);
  }
}

Address NullDriver::alloc_host(std::size_t bytes) {
  ledger_.check_process();
  if (bytes == 0) throw MisuseError("cannot allocate 0 bytes of host memory");
  const Address addr = take_addresses(bytes);
  ledger_.note_host_memory(addr, bytes);
  return addr;
}

void NullDriver::free_host(Address addr) {
  ledger_.check_process();
  ledger_.host_bytes_at(addr);
  ledger_.note_host_memory_freed(addr);
}

DriverStats NullDriver::stats() const {
  DriverStats stats;
  stats.created_frames = ledger_.created_frames();
  stats.mapped_frames = ledger_.mapped_frames();
  stats.num_mappings = ledger_.num_segments();
  stats.max_mappings = std::numeric_limits<std::int64_t>::max();
  stats.allocated_bytes = stats.created_frames * static_cast<std::int64_t>(frame_bytes_);
  return stats;
}

}  // namespace vmserve
