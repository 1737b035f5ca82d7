// Limits of the host: mappings of a process, and memory that can still be allocated.
#pragma once

#include <cstdint>
#include <string>

namespace vmserve {

struct AvailableMemory {
  std::uint64_t bytes;  // that can be allocated without swapping or reaching a limit
  std::string source;   // the limit that applies: "MemAvailable" or a cgroup's file
};

// Reads /proc and /sys below `root`: "" on a real system, a directory of small files in tests.
class SystemLimits {
 public:
  explicit SystemLimits(std::string root = "") : root_(std::move(root)) {}

  const std::string& root() const { return root_; }

  // vm.max_map_count, or the kernel's default of 65,530 if it cannot be read.
  std::int64_t max_map_count() const;

  // The minimum of MemAvailable and what each cgroup (v1 or v2) of the process leaves, page cache
  // that the kernel would drop included. 2^64 - 1 if no limit can be read.
  AvailableMemory available_memory() const;

 private:
  std::string root_;
};

}  // namespace vmserve
