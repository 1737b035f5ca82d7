// One limit for the pages of several kinds of layers, in bytes.
//
// If a kind is short of pages, it takes an idle one of another kind. That page is evicted, its
// memory returned, and the first kind commits as many bytes. Nothing is copied. The page that was
// used least recently goes first, whatever its kind.
#pragma once

#include <cstdint>
#include <vector>

#include "vmserve/memory/kind.h"

namespace vmserve {

class Budget {
 public:
  explicit Budget(const Kinds& kinds) : kinds_(kinds) {}

  void set_limit(std::int64_t bytes) { limit_bytes_ = bytes; }
  std::int64_t limit_bytes() const { return limit_bytes_; }
  // Bytes of the limit that no kind has committed; negative above a lowered limit.
  std::int64_t uncommitted_bytes() const;
  std::int64_t free_bytes() const;
  std::int64_t reclaimable_bytes() const;  // of free and idle pages
  // Bytes that a plan can have; negative above a lowered limit.
  std::int64_t available_bytes() const { return uncommitted_bytes() + reclaimable_bytes(); }

  // Allows the kind to commit `bytes` more, or to have as much less if that is negative.
  void allow(Kind& kind, std::int64_t bytes) const;
  // The same of what is left beside what later kinds lack, of which each needs `needed` free pages.
  void allow_beside(std::size_t number, const std::vector<std::int64_t>& needed) const;
  // Allows each kind what none has committed.
  void share() const;
  // Allows each kind all that remains if the others keep only what sequences use.
  void allow_all() const;

  // Evicts and returns pages of others until each kind can have `needed` free pages: throws
  // OutOfMemoryError if that is impossible.
  void gather(const std::vector<std::int64_t>& needed);
  // Evicts idle pages, oldest first, until `bytes` are free, if there are as many.
  void evict_until_free(std::int64_t bytes);
  // Returns at least `bytes`, if there are as many, of the free pages that kinds do not need.
  // Returns the number of bytes.
  std::int64_t return_free(std::int64_t bytes, const std::vector<std::int64_t>& needed);
  // Returns free and idle pages above a lowered limit to the system.
  void give_back_excess();
  // The same without throwing: what a driver refuses is tried again later. NOTE: earlier plans are
  // stale afterwards.
  void try_give_back_excess();

 private:
  bool evict_oldest();

  const Kinds& kinds_;
  std::int64_t limit_bytes_ = 0;
};

}  // namespace vmserve
