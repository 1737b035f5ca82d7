// What the host allows: the mappings a process may hold and the memory that can still be taken.
#pragma once

#include <cstdint>
#include <string>

namespace vmserve {

struct AvailableMemory {
  std::uint64_t bytes;  // what can be taken without swapping or meeting a limit
  std::string source;   // which limit decided: "MemAvailable" or the cgroup's file
};

// Reads /proc and /sys below `root` ("" on a real system, a directory of small files in tests).
class SystemLimits {
 public:
  explicit SystemLimits(std::string root = "") : root_(std::move(root)) {}

  const std::string& root() const { return root_; }

  // vm.max_map_count; the kernel's default of 65,530 where it cannot be read.
  std::int64_t max_map_count() const;

  // The least of MemAvailable and what every cgroup (v1 or v2) around the process leaves.
  // Page cache that the kernel would drop counts as available. No limit readable: 2^64 - 1.
  AvailableMemory available_memory() const;

 private:
  std::string root_;
};

}  // namespace vmserve
