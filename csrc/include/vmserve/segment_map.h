// A model of one reservation as the kernel sees it: maximal runs of equal mappings.
//
// The kernel merges adjacent mappings of adjacent file offsets with equal protection, and splits
// them if a part changes. This model does the same. So the number of mappings is exact
// (vm.max_map_count is a hard limit), and every precondition of the driver can be checked.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>

#include "vmserve/driver.h"

namespace vmserve {

class SegmentMap {
 public:
  // Begins with one unmapped segment. `frame_bytes` converts addresses to frames.
  SegmentMap(Address base, std::size_t bytes, std::size_t frame_bytes);

  Address base() const { return base_; }
  std::size_t bytes() const { return bytes_; }
  Address end() const { return base_ + bytes_; }
  std::int64_t count() const { return static_cast<std::int64_t>(segments_.size()); }

  bool contains(Address addr, std::size_t bytes) const {
    return addr >= base_ && bytes <= bytes_ && addr - base_ <= bytes_ - bytes;
  }

  // Pre (of all below): the range is not empty and inside the reservation.
  Mapping at(Address addr) const;
  bool all_mapped(Address addr, std::size_t bytes) const;
  bool all_unmapped(Address addr, std::size_t bytes) const;
  bool all_writable(Address addr, std::size_t bytes) const;

  // The change of count() by assign() with the same arguments.
  std::int64_t growth(Address addr, std::size_t bytes, Mapping first) const;
  // Maps `first` and the frames after it to the range, or unmaps it if first.frame == kNoFrame.
  void assign(Address addr, std::size_t bytes, Mapping first);
  // Pre: all_mapped.
  void set_access(Address addr, std::size_t bytes, Access access);

  // Calls visit(address, bytes, first mapping) for the part of each segment inside the range.
  template <typename Visit>
  void for_each(Address addr, std::size_t bytes, Visit visit) const {
    const Address stop = addr + bytes;
    for (auto it = segment_of(addr); it != segments_.end() && it->first < stop; ++it) {
      const Address from = it->first < addr ? addr : it->first;
      const Address seg_end = it->first + it->second.bytes;
      const Address to = seg_end < stop ? seg_end : stop;
      visit(from, to - from, offset(it->second.first, from - it->first));
    }
  }

 private:
  struct Segment {
    std::size_t bytes;
    Mapping first;
  };
  using Segments = std::map<Address, Segment>;

  Segments::const_iterator segment_of(Address addr) const;
  Mapping offset(Mapping first, std::size_t bytes) const;
  bool joins(const Segment& left, const Mapping& right) const;
  void split(Address addr);
  Segments::iterator merge_left(Segments::iterator it);

  Address base_;
  std::size_t bytes_;
  std::size_t frame_bytes_;
  Segments segments_;  // by address; without gaps or neighbours that could merge
};

}  // namespace vmserve
