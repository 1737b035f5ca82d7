#include "vmserve/segment_map.h"

#include <iterator>

namespace vmserve {

SegmentMap::SegmentMap(Address base, std::size_t bytes, std::size_t frame_bytes)
    : base_(base), bytes_(bytes), frame_bytes_(frame_bytes) {
  segments_.emplace(base, Segment{bytes, Mapping{}});
}

SegmentMap::Segments::const_iterator SegmentMap::segment_of(Address addr) const {
  return std::prev(segments_.upper_bound(addr));
}

Mapping SegmentMap::offset(Mapping first, std::size_t bytes) const {
  if (first.frame != kNoFrame) first.frame += static_cast<FrameId>(bytes / frame_bytes_);
  return first;
}

bool SegmentMap::joins(const Segment& left, const Mapping& right) const {
  const Mapping next = offset(left.first, left.bytes);
  return next.frame == right.frame && next.access == right.access;
}

Mapping SegmentMap::at(Address addr) const {
  const auto it = segment_of(addr);
  return offset(it->second.first, addr - it->first);
}

bool SegmentMap::all_mapped(Address addr, std::size_t bytes) const {
  bool all = true;
  for_each(addr, bytes, [&](Address, std::size_t, Mapping m) { all = all && m.frame != kNoFrame; });
  return all;
}

bool SegmentMap::all_unmapped(Address addr, std::size_t bytes) const {
  bool all = true;
  for_each(addr, bytes, [&](Address, std::size_t, Mapping m) { all = all && m.frame == kNoFrame; });
  return all;
}

bool SegmentMap::all_writable(Address addr, std::size_t bytes) const {
  bool all = true;
  for_each(addr, bytes,
           [&](Address, std::size_t, Mapping m) { all = all && m.access == Access::kReadWrite; });
  return all;
}

std::int64_t SegmentMap::growth(Address addr, std::size_t bytes, Mapping first) const {
  const Address stop = addr + bytes;
  const auto left = segment_of(addr);
  const auto right = segment_of(stop - 1);
  std::int64_t replaced = std::distance(left, right) + 1;
  std::int64_t added = 1;
  // On either side there is a part of a segment that is cut, or a whole neighbour; either may merge
  // with the new segment.
  if (left->first < addr) {
    const Segment kept{addr - left->first, left->second.first};
    added += joins(kept, first) ? 0 : 1;
  } else if (left != segments_.begin() && joins(std::prev(left)->second, first)) {
    added -= 1;
  }
  const Segment assigned{bytes, first};
  if (right->first + right->second.bytes > stop) {
    added += joins(assigned, offset(right->second.first, stop - right->first)) ? 0 : 1;
  } else if (const auto next = std::next(right);
             next != segments_.end() && joins(assigned, next->second.first)) {
    added -= 1;
  }
  return added - replaced;
}

void SegmentMap::split(Address addr) {
  if (addr == end()) return;
  const auto it = segments_.lower_bound(addr);
  if (it != segments_.end() && it->first == addr) return;
  const auto left = std::prev(it);
  const std::size_t kept = addr - left->first;
  segments_.emplace_hint(it, addr,
                         Segment{left->second.bytes - kept, offset(left->second.first, kept)});
  left->second.bytes = kept;
}

SegmentMap::Segments::iterator SegmentMap::merge_left(Segments::iterator it) {
  if (it == segments_.end() || it == segments_.begin()) return it;
  const auto left = std::prev(it);
  if (!joins(left->second, it->second.first)) return it;
  left->second.bytes += it->second.bytes;
  segments_.erase(it);
  return left;
}

void SegmentMap::assign(Address addr, std::size_t bytes, Mapping first) {
  split(addr);
  split(addr + bytes);
  auto it = segments_.find(addr);
  it->second = Segment{bytes, first};
  for (auto next = std::next(it); next != segments_.end() && next->first < addr + bytes;) {
    next = segments_.erase(next);
  }
  it = merge_left(it);
  merge_left(std::next(it));
}

void SegmentMap::set_access(Address addr, std::size_t bytes, Access access) {
  split(addr);
  split(addr + bytes);
  auto it = segments_.find(addr);
  while (it != segments_.end() && it->first < addr + bytes) {
    it->second.first.access = access;
    it = std::next(merge_left(it));
  }
  merge_left(it);
}

}  // namespace vmserve
