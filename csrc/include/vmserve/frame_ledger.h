// A driver's record of its own calls: which frames exist, and what is mapped where.
//
// With it, every precondition of `PageDriver` is checked before a system call, with the same error
// texts in all drivers, and statistics are exact. It makes no system calls: a driver checks here,
// makes the call, and records its effect here.
#pragma once

#include <sys/types.h>

#include <map>
#include <vector>

#include "vmserve/driver.h"
#include "vmserve/lazy_array.h"
#include "vmserve/page_set.h"
#include "vmserve/segment_map.h"

namespace vmserve {

class FrameLedger {
 public:
  struct Reservation {
    SegmentMap segments;
    Backing backing;
  };

  // Pre: frame_bytes > 0. Throws MisuseError unless num_frames > 0.
  FrameLedger(std::size_t frame_bytes, std::int64_t num_frames);

  std::int64_t num_frames() const { return num_frames_; }
  std::int64_t created_frames() const { return created_.size(); }
  std::int64_t mapped_frames() const { return mapped_frames_; }
  // Runs of equal mappings and the gaps between them, which is what Linux counts.
  std::int64_t num_segments() const { return num_segments_; }
  const std::map<Address, Reservation>& reservations() const { return reservations_; }
  const std::map<Address, std::size_t>& host_memory() const { return host_memory_; }
  const PageSet& created() const { return created_; }

  // Checks throw the MisuseError of `PageDriver` with `completed`.
  void check_process() const;
  bool in_own_process() const;
  void check_reservable(std::size_t bytes) const;
  void check_frames(const FrameRun& run, bool exist, std::size_t completed) const;
  // The frames do not exist, and none occurs twice.
  void check_creatable(const std::vector<FrameRun>& runs) const;
  // The frames exist and are not mapped.
  void check_destroyable(const FrameRun& run, std::size_t completed) const;
  // Returns the reservation of the range, for the note that follows.
  Reservation& check_mappable(const MapRun& run, std::size_t completed);
  Reservation& check_unmappable(const AddressRun& run, std::size_t completed);
  Reservation& check_accessible(const AccessRun& run, std::size_t completed);
  void check_zeroable(const AddressRun& run, std::size_t completed);
  void check_copyable(const CopyRun& run, std::size_t completed);

  // The reservation or host memory that starts at `addr`. Throws MisuseError if there is none.
  Reservation& reservation_at(Address addr);
  std::size_t host_bytes_at(Address addr) const;

  // Record what was done. Pre: the check passed.
  void note_created(const FrameRun& run);
  void note_destroyed(const FrameRun& run);
  void note_reserved(Address addr, std::size_t bytes, Backing backing);
  void note_freed(Address addr);
  void note_mapped(Reservation& reservation, const MapRun& run);
  void note_unmapped(Reservation& reservation, const AddressRun& run);
  void note_access(Reservation& reservation, const AccessRun& run);
  void note_host_memory(Address addr, std::size_t bytes) { host_memory_.emplace(addr, bytes); }
  void note_host_memory_freed(Address addr) { host_memory_.erase(addr); }

  Mapping query(Address addr) const;

 private:
  const Reservation* find(Address addr) const;
  Reservation& reservation_of(Address addr, std::size_t bytes, bool whole_frames,
                              std::size_t completed);
  void check_copy_end(Address addr, std::size_t bytes, bool write, std::size_t completed);
  void count_mapped(const SegmentMap& segments, Address addr, std::size_t bytes, int change);

  std::size_t frame_bytes_;
  std::int64_t num_frames_;
  pid_t pid_;
  std::map<Address, Reservation> reservations_;
  std::map<Address, std::size_t> host_memory_;
  PageSet created_;
  LazyArray<std::uint32_t> map_counts_;  // aliases of each frame
  std::int64_t mapped_frames_ = 0;
  std::int64_t num_segments_ = 0;
};

}  // namespace vmserve
