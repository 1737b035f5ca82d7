// A set of small integers as a bitmap: ordered, no allocation after construction, fast search for
// the next member or non-member.
#pragma once

#include <cstdint>

#include "vmserve/lazy_array.h"

namespace vmserve {

class PageSet {
 public:
  PageSet() = default;
  // Empty, for members 0 <= id < capacity.
  explicit PageSet(std::int64_t capacity);

  std::int64_t capacity() const { return capacity_; }
  std::int64_t size() const { return size_; }
  bool contains(std::int64_t id) const {
    return id >= 0 && id < capacity_ && (words_[id / 64] >> (id % 64) & 1) != 0;
  }

  // Pre: 0 <= id < capacity, not a member / a member.
  void insert(std::int64_t id) noexcept;
  void erase(std::int64_t id) noexcept;

  // The lowest member >= from, the lowest non-member >= from (< capacity), and the highest member
  // <= from; -1 if there is none.
  std::int64_t lowest(std::int64_t from = 0) const noexcept;
  std::int64_t lowest_absent(std::int64_t from = 0) const noexcept;
  std::int64_t highest(std::int64_t from) const noexcept;

 private:
  LazyArray<std::uint64_t> words_;
  std::int64_t capacity_ = 0;
  std::int64_t size_ = 0;
  // No word before first_word_ has a member; every word before first_absent_word_ is full.
  mutable std::int64_t first_word_ = 0;
  mutable std::int64_t first_absent_word_ = 0;
};

}  // namespace vmserve
