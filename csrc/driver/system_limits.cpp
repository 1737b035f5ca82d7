#include "vmserve/system_limits.h"

#include <fstream>
#include <limits>
#include <optional>
#include <sstream>

namespace vmserve {
namespace {

constexpr std::uint64_t kUnlimited = std::numeric_limits<std::uint64_t>::max();
constexpr std::int64_t kDefaultMaxMapCount = 65530;

// The number in a file; none for "max", a missing file or anything else.
std::optional<std::uint64_t> read_number(const std::string& path) {
  std::ifstream file(path);
  std::uint64_t value = 0;
  if (file >> value) return value;
  return std::nullopt;
}

// The number after `key` in a file of "key value" lines ("MemAvailable: 123 kB").
std::optional<std::uint64_t> read_field(const std::string& path, const std::string& key) {
  std::ifstream file(path);
  std::string line;
  while (std::getline(file, line)) {
    std::istringstream fields(line);
    std::string name;
    std::uint64_t value = 0;
    if (fields >> name >> value && name == key) return value;
  }
  return std::nullopt;
}

struct CgroupFiles {
  const char* limit;
  const char* usage;
  const char* inactive_key;  // in memory.stat: page cache that the kernel drops first
};

constexpr CgroupFiles kV1 = {"memory.limit_in_bytes", "memory.usage_in_bytes",
                             "total_inactive_file"};
constexpr CgroupFiles kV2 = {"memory.max", "memory.current", "inactive_file"};

std::optional<AvailableMemory> left_in(const std::string& directory, const CgroupFiles& files) {
  const std::string limit_path = directory + "/" + files.limit;
  const auto limit = read_number(limit_path);
  const auto usage = read_number(directory + "/" + files.usage);
  if (!limit || !usage) return std::nullopt;
  const auto cache = read_field(directory + "/memory.stat", files.inactive_key).value_or(0);
  const std::uint64_t used = *usage > cache ? *usage - cache : 0;
  return AvailableMemory{*limit > used ? *limit - used : 0, limit_path};
}

// Lowers `best` to what the cgroup `path` and its ancestors leave. A path from outside of a
// container may not exist inside, so the root of the mount is always checked.
void tighten(AvailableMemory& best, const std::string& mount, std::string path,
             const CgroupFiles& files) {
  while (true) {
    const auto left = left_in(mount + path, files);
    if (left && left->bytes < best.bytes) best = *left;
    if (path.empty()) return;
    path.resize(path.find_last_of('/'));
  }
}

}  // namespace

std::int64_t SystemLimits::max_map_count() const {
  const auto value = read_number(root_ + "/proc/sys/vm/max_map_count");
  return value ? static_cast<std::int64_t>(*value) : kDefaultMaxMapCount;
}

AvailableMemory SystemLimits::available_memory() const {
  AvailableMemory best{kUnlimited, "no limit"};
  if (const auto kib = read_field(root_ + "/proc/meminfo", "MemAvailable:")) {
    best = {*kib * 1024, "MemAvailable"};
  }
  // Lines are "hierarchy:controllers:path"; v2 is "0::path".
  std::ifstream file(root_ + "/proc/self/cgroup");
  std::string line;
  while (std::getline(file, line)) {
    const auto first = line.find(':');
    const auto second = line.find(':', first == std::string::npos ? first : first + 1);
    if (second == std::string::npos) continue;
    const std::string controllers = "," + line.substr(first + 1, second - first - 1) + ",";
    std::string path = line.substr(second + 1);
    if (path.empty() || path.front() != '/' || path == "/") path.clear();
    if (controllers.find(",memory,") != std::string::npos) {
      tighten(best, root_ + "/sys/fs/cgroup/memory", path, kV1);
    } else if (controllers == ",,") {
      tighten(best, root_ + "/sys/fs/cgroup", path, kV2);
    }
  }
  return best;
}

}  // namespace vmserve
