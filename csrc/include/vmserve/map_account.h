// Memory mappings that the KV caches of one process hold, all of them together.
//
// Linux counts mappings per process (vm.max_map_count), so caches beside each other share one
// account. Thread-safe.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>

#include "vmserve/system_limits.h"

namespace vmserve {

class MapAccount {
 public:
  // NOTE: at vm.max_map_count even munmap, mprotect and malloc fail. So new mappings stop at the
  // first share, what cuts mappings in two (unmapping, changes of access) at the second, and the
  // rest is left to the process.
  static constexpr double kMapShare = 0.8;
  static constexpr double kCutShare = 0.9;

  explicit MapAccount(std::int64_t max_map_count);
  // The one that all drivers with these limits share.
  static std::shared_ptr<MapAccount> shared(const SystemLimits& limits);

  std::int64_t held() const { return held_.load(std::memory_order_relaxed); }
  std::int64_t most() const { return most_; }
  std::int64_t most_with_cuts() const { return most_with_cuts_; }
  void add(std::int64_t change) { held_.fetch_add(change, std::memory_order_relaxed); }

 private:
  std::int64_t most_;
  std::int64_t most_with_cuts_;
  std::atomic<std::int64_t> held_{0};
};

}  // namespace vmserve
