// Counts memory mappings of all KV caches of a process, because Linux limits them per process
// (vm.max_map_count). Thread-safe.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>

#include "vmserve/system_limits.h"

namespace vmserve {

class MapAccount {
 public:
  // NOTE: at vm.max_map_count even munmap, mprotect and malloc fail. So new mappings stop at the
  // first share; calls that split mappings (unmap, set_access) stop at the second; the rest is left
  // to the process.
  static constexpr double kMapShare = 0.8;
  static constexpr double kCutShare = 0.9;

  explicit MapAccount(std::int64_t max_map_count);
  // The account shared by all drivers with these limits.
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
