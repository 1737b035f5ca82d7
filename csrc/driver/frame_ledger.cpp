#include "vmserve/frame_ledger.h"

#include <unistd.h>

#include <algorithm>
#include <iterator>
#include <string>

#include "vmserve/errors.h"

namespace vmserve {
namespace {

std::int64_t checked_count(std::int64_t num_frames) {
  if (num_frames > 0) return num_frames;
  throw MisuseError("num_frames is " + std::to_string(num_frames) + ": it must be positive");
}

}  // namespace

FrameLedger::FrameLedger(std::size_t frame_bytes, std::int64_t num_frames)
    : frame_bytes_(frame_bytes),
      num_frames_(checked_count(num_frames)),
      pid_(::getpid()),
      created_(num_frames),
      map_counts_(num_frames) {}

bool FrameLedger::in_own_process() const {
  return ::getpid() == pid_;
}

void FrameLedger::check_process() const {
  if (in_own_process()) return;
  throw MisuseError("this KV memory belongs to process " + std::to_string(pid_) +
                    " and was used in its fork " + std::to_string(::getpid()) +
                    ": start worker processes with the spawn method");
}

void FrameLedger::check_reservable(std::size_t bytes) const {
  if (bytes != 0 && bytes % frame_bytes_ == 0) return;
  throw MisuseError("cannot reserve " + std::to_string(bytes) +
                    " bytes: a reservation is a positive multiple of the frame, " +
                    std::to_string(frame_bytes_));
}

void FrameLedger::check_frames(const FrameRun& run, bool exist, std::size_t completed) const {
  if (run.first < 0 || run.count <= 0 || run.first > num_frames_ - run.count) {
    throw MisuseError("frames " + std::to_string(run.first) + " + " + std::to_string(run.count) +
                          " are outside 0 .. " + std::to_string(num_frames_),
                      completed);
  }
  const FrameId wrong = exist ? created_.lowest_absent(run.first) : created_.lowest(run.first);
  if (wrong >= 0 && wrong < run.first + run.count) {
    throw MisuseError(
        "frame " + std::to_string(wrong) + (exist ? " does not exist" : " exists already"),
        completed);
  }
}

void FrameLedger::check_creatable(const std::vector<FrameRun>& runs) const {
  for (const FrameRun& run : runs) check_frames(run, /*exist=*/false, 0);
  std::vector<FrameRun> sorted = runs;
  std::sort(sorted.begin(), sorted.end(),
            [](const FrameRun& a, const FrameRun& b) { return a.first < b.first; });
  for (std::size_t i = 1; i < sorted.size(); ++i) {
    if (sorted[i].first >= sorted[i - 1].first + sorted[i - 1].count) continue;
    throw MisuseError("frame " + std::to_string(sorted[i].first) + " is named twice");
  }
}

void FrameLedger::check_destroyable(const FrameRun& run, std::size_t completed) const {
  check_frames(run, /*exist=*/true, completed);
  for (FrameId id = run.first; id < run.first + run.count; ++id) {
    if (map_counts_[id] != 0) {
      throw MisuseError("frame " + std::to_string(id) + " is still mapped", completed);
    }
  }
}

const FrameLedger::Reservation* FrameLedger::find(Address addr) const {
  auto it = reservations_.upper_bound(addr);
  if (it == reservations_.begin()) return nullptr;
  --it;
  return addr < it->second.segments.end() ? &it->second : nullptr;
}

FrameLedger::Reservation& FrameLedger::reservation_of(Address addr, std::size_t bytes,
                                                      bool whole_frames, std::size_t completed) {
  auto* found = const_cast<Reservation*>(find(addr));
  if (found == nullptr || bytes == 0 || !found->segments.contains(addr, bytes)) {
    throw MisuseError(
        "the range of " + std::to_string(bytes) + " bytes is not inside one reservation",
        completed);
  }
  const std::size_t offset = addr - found->segments.base();
  if (whole_frames && (offset % frame_bytes_ != 0 || bytes % frame_bytes_ != 0)) {
    throw MisuseError("the range (offset " + std::to_string(offset) + ", " + std::to_string(bytes) +
                          " bytes) is not whole frames of " + std::to_string(frame_bytes_) +
                          " bytes",
                      completed);
  }
  return *found;
}

FrameLedger::Reservation& FrameLedger::check_mappable(const MapRun& run, std::size_t completed) {
  check_frames(run.frames, /*exist=*/true, completed);
  if (run.access == Access::kNone) throw MisuseError("cannot map without access", completed);
  const std::size_t bytes = static_cast<std::size_t>(run.frames.count) * frame_bytes_;
  Reservation& reservation = reservation_of(run.addr, bytes, true, completed);
  if (!reservation.segments.all_unmapped(run.addr, bytes)) {
    throw MisuseError("something is mapped there already", completed);
  }
  return reservation;
}

FrameLedger::Reservation& FrameLedger::check_unmappable(const AddressRun& run,
                                                        std::size_t completed) {
  Reservation& reservation = reservation_of(run.addr, run.bytes, true, completed);
  if (!reservation.segments.all_mapped(run.addr, run.bytes)) {
    throw MisuseError("not everything in the range is mapped", completed);
  }
  return reservation;
}

FrameLedger::Reservation& FrameLedger::check_accessible(const AccessRun& run,
                                                        std::size_t completed) {
  Reservation& reservation = reservation_of(run.addr, run.bytes, true, completed);
  if (run.access == Access::kNone) throw MisuseError("unmap what nobody may use", completed);
  if (!reservation.segments.all_mapped(run.addr, run.bytes)) {
    throw MisuseError("not everything in the range is mapped", completed);
  }
  return reservation;
}

void FrameLedger::check_zeroable(const AddressRun& run, std::size_t completed) {
  const SegmentMap& segments = reservation_of(run.addr, run.bytes, false, completed).segments;
  if (segments.all_writable(run.addr, run.bytes)) return;
  throw MisuseError("cannot zero what is not mapped writable", completed);
}

void FrameLedger::check_copy_end(Address addr, std::size_t bytes, bool write,
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

void FrameLedger::check_copyable(const CopyRun& run, std::size_t completed) {
  check_copy_end(run.dst, run.bytes, /*write=*/true, completed);
  check_copy_end(run.src, run.bytes, /*write=*/false, completed);
  if (run.dst < run.src + run.bytes && run.src < run.dst + run.bytes) {
    throw MisuseError("cannot copy between ranges that overlap", completed);
  }
}

FrameLedger::Reservation& FrameLedger::reservation_at(Address addr) {
  const auto it = reservations_.find(addr);
  if (it == reservations_.end()) throw MisuseError("no reservation starts at this address");
  return it->second;
}

std::size_t FrameLedger::host_bytes_at(Address addr) const {
  const auto it = host_memory_.find(addr);
  if (it == host_memory_.end()) throw MisuseError("no host memory starts at this address");
  return it->second;
}

void FrameLedger::note_created(const FrameRun& run) {
  for (FrameId id = run.first; id < run.first + run.count; ++id) created_.insert(id);
}

void FrameLedger::note_destroyed(const FrameRun& run) {
  for (FrameId id = run.first; id < run.first + run.count; ++id) created_.erase(id);
}

void FrameLedger::note_reserved(Address addr, std::size_t bytes, Backing backing) {
  reservations_.emplace(addr, Reservation{SegmentMap(addr, bytes, frame_bytes_), backing});
  ++num_segments_;
}

void FrameLedger::note_freed(Address addr) {
  const auto it = reservations_.find(addr);
  const SegmentMap& segments = it->second.segments;
  count_mapped(segments, addr, segments.bytes(), -1);
  num_segments_ -= segments.count();
  reservations_.erase(it);
}

void FrameLedger::note_mapped(Reservation& reservation, const MapRun& run) {
  SegmentMap& segments = reservation.segments;
  const std::size_t bytes = static_cast<std::size_t>(run.frames.count) * frame_bytes_;
  const std::int64_t before = segments.count();
  segments.assign(run.addr, bytes, Mapping{run.frames.first, run.access});
  num_segments_ += segments.count() - before;
  count_mapped(segments, run.addr, bytes, 1);
}

void FrameLedger::note_unmapped(Reservation& reservation, const AddressRun& run) {
  SegmentMap& segments = reservation.segments;
  count_mapped(segments, run.addr, run.bytes, -1);
  const std::int64_t before = segments.count();
  segments.assign(run.addr, run.bytes, Mapping{});
  num_segments_ += segments.count() - before;
}

void FrameLedger::note_access(Reservation& reservation, const AccessRun& run) {
  SegmentMap& segments = reservation.segments;
  const std::int64_t before = segments.count();
  segments.set_access(run.addr, run.bytes, run.access);
  num_segments_ += segments.count() - before;
}

void FrameLedger::count_mapped(const SegmentMap& segments, Address addr, std::size_t bytes,
                               int change) {
  segments.for_each(addr, bytes, [&](Address, std::size_t part, Mapping first) {
    if (first.frame == kNoFrame) return;
    const auto count = static_cast<std::int64_t>(part / frame_bytes_);
    for (FrameId id = first.frame; id < first.frame + count; ++id) {
      map_counts_[id] += static_cast<std::uint32_t>(change);
    }
    mapped_frames_ += change * count;
  });
}

Mapping FrameLedger::query(Address addr) const {
  const Reservation* reservation = find(addr);
  if (reservation == nullptr) throw MisuseError("the address is in no reservation");
  return reservation->segments.at(addr);
}

}  // namespace vmserve
