// Optional, for plugins in C++17: the bookkeeping of a page driver.
//
// FrameTable records which frames exist and what is mapped where, and checks every precondition of
// vmserve_driver.h. So a plugin contains only the calls to its own memory system. guarded() and
// each_run() catch exceptions and count `completed`.
#pragma once

#include <cstdint>
#include <cstdio>
#include <exception>
#include <iterator>
#include <map>
#include <new>
#include <string>
#include <vector>

#include "vmserve_driver.h"

namespace vmserve_plugin {

// Thrown inside a plugin; converted to a status and a vmserve_error by guarded().
struct Failure {
  std::int32_t status;
  std::string message;
  std::string call = {};
  std::int32_t code = 0;
};

[[noreturn]] inline void misuse(const std::string& message) {
  throw Failure{VMSERVE_MISUSE, message};
}

inline std::int32_t report(vmserve_error* error, const Failure& failure, std::uint64_t completed) {
  error->code = failure.code;
  error->completed = completed;
  std::snprintf(error->call, sizeof(error->call), "%s", failure.call.c_str());
  std::snprintf(error->message, sizeof(error->message), "%s", failure.message.c_str());
  return failure.status;
}

// Calls body(i) for 0 <= i < count. If one throws, the runs before it count as completed.
template <typename Body>
std::int32_t each_run(std::uint64_t count, vmserve_error* error, Body body) noexcept {
  std::uint64_t i = 0;
  try {
    for (; i < count; ++i) body(i);
    return VMSERVE_OK;
  } catch (const Failure& failure) {
    return report(error, failure, i);
  } catch (const std::exception& exception) {
    return report(error, {VMSERVE_REFUSED, exception.what()}, i);
  }
}

template <typename Body>
std::int32_t guarded(vmserve_error* error, Body body) noexcept {
  return each_run(1, error, [&](std::uint64_t) { body(); });
}

class FrameTable {
 public:
  FrameTable(std::uint64_t frame_bytes, std::int64_t num_frames)
      : frame_bytes_(frame_bytes),
        exists_(static_cast<std::size_t>(num_frames), false),
        aliases_(static_cast<std::size_t>(num_frames), 0) {}

  std::uint64_t frame_bytes() const { return frame_bytes_; }
  std::int64_t num_frames() const { return static_cast<std::int64_t>(exists_.size()); }
  std::int64_t created_frames() const { return created_frames_; }
  std::int64_t mapped_frames() const { return static_cast<std::int64_t>(mappings_.size()); }
  std::int64_t num_reservations() const { return static_cast<std::int64_t>(reservations_.size()); }

  // Reservations: address and bytes.
  const std::map<std::uint64_t, std::uint64_t>& reservations() const { return reservations_; }

  void check_reserve(std::uint64_t bytes) const {
    if (bytes != 0 && bytes % frame_bytes_ == 0) return;
    misuse("cannot reserve " + std::to_string(bytes) +
           " bytes: a reservation is a positive multiple of the frame, " +
           std::to_string(frame_bytes_));
  }
  void add_reservation(std::uint64_t address, std::uint64_t bytes) {
    reservations_.emplace(address, bytes);
  }
  // Size of the reservation that starts at the address.
  std::uint64_t reservation_bytes(std::uint64_t address) const {
    const auto it = reservations_.find(address);
    if (it == reservations_.end()) misuse("no reservation starts at this address");
    return it->second;
  }
  // Removes a reservation with its mappings. Pre: it starts at the address.
  void remove_reservation(std::uint64_t address) {
    const auto it = reservations_.find(address);
    unmapped(address, it->second);
    reservations_.erase(it);
  }

  void check_frames(std::int64_t first, std::int64_t count, bool exist) const {
    if (first < 0 || count <= 0 || first > num_frames() - count) {
      misuse("frames " + std::to_string(first) + " + " + std::to_string(count) +
             " are outside 0 .. " + std::to_string(num_frames()));
    }
    for (std::int64_t id = first; id < first + count; ++id) {
      if (exists_[at(id)] == exist) continue;
      misuse("frame " + std::to_string(id) + (exist ? " does not exist" : " exists already"));
    }
  }
  void check_create(const vmserve_frame_run* runs, std::uint64_t count) const {
    std::map<std::int64_t, std::int64_t> ends;  // end of each run of the batch, by its first frame
    for (std::uint64_t i = 0; i < count; ++i) {
      const auto [first, num_frames] = runs[i];
      check_frames(first, num_frames, false);
      const auto next = ends.lower_bound(first);
      if ((next != ends.end() && next->first < first + num_frames) ||
          (next != ends.begin() && std::prev(next)->second > first)) {
        misuse("frames " + std::to_string(first) + " + " + std::to_string(num_frames) +
               " are partly twice in the batch");
      }
      ends.emplace(first, first + num_frames);
    }
  }
  void check_destroy(const vmserve_frame_run& run) const {
    check_frames(run.first, run.count, true);
    for (std::int64_t id = run.first; id < run.first + run.count; ++id) {
      if (aliases_[at(id)] != 0) misuse("frame " + std::to_string(id) + " is still mapped");
    }
  }
  // Pre: check_frames(..., !exist) passed.
  void set_exists(const vmserve_frame_run& run, bool exist) {
    for (std::int64_t id = run.first; id < run.first + run.count; ++id) exists_[at(id)] = exist;
    created_frames_ += exist ? run.count : -run.count;
  }

  void check_map(const vmserve_map_run& run) const {
    check_frames(run.first, run.count, true);
    check_access(run.access);
    const std::uint64_t bytes = static_cast<std::uint64_t>(run.count) * frame_bytes_;
    check_range(run.address, bytes, /*whole_frames=*/true);
    const auto next = mappings_.lower_bound(run.address);
    if (next != mappings_.end() && next->first < run.address + bytes) {
      misuse("something is mapped there already");
    }
  }
  // Pre: check_map passed. Strong: nothing changed if it throws.
  void mapped(const vmserve_map_run& run) {
    std::map<std::uint64_t, vmserve_mapping> added;
    for (std::int64_t i = 0; i < run.count; ++i) {
      const std::uint64_t address = run.address + static_cast<std::uint64_t>(i) * frame_bytes_;
      added.emplace(address, vmserve_mapping{run.first + i, run.access, 0});
    }
    for (std::int64_t i = 0; i < run.count; ++i) ++aliases_[at(run.first + i)];
    mappings_.merge(added);
  }

  // Throws unless the range is whole frames of one reservation and all mapped.
  void check_mapped(std::uint64_t address, std::uint64_t bytes) const {
    check_range(address, bytes, /*whole_frames=*/true);
    check_all_mapped(address, bytes, /*writable=*/false, "not everything in the range is mapped");
  }
  void check_set_access(const vmserve_access_run& run) const {
    check_access(run.access);
    check_mapped(run.address, run.bytes);
  }
  // Throws unless every byte of the range is mapped, and READ_WRITE if `writable`.
  void check_usable(std::uint64_t address, std::uint64_t bytes, bool writable) const {
    check_range(address, bytes, /*whole_frames=*/false);
    check_all_mapped(address, bytes, writable,
                     writable ? "the range is not mapped writable" : "the range is not mapped");
  }
  void unmapped(std::uint64_t address, std::uint64_t bytes) {
    auto it = mappings_.lower_bound(address);
    while (it != mappings_.end() && it->first < address + bytes) {
      --aliases_[at(it->second.frame)];
      it = mappings_.erase(it);
    }
  }
  void set_access(const vmserve_access_run& run) {
    auto it = mappings_.lower_bound(run.address);
    for (; it != mappings_.end() && it->first < run.address + run.bytes; ++it) {
      it->second.access = run.access;
    }
  }

  vmserve_mapping query(std::uint64_t address) const {
    const std::uint64_t start = check_range(address, 1, /*whole_frames=*/false);
    const auto it = mappings_.find(address - (address - start) % frame_bytes_);
    return it == mappings_.end() ? vmserve_mapping{VMSERVE_NO_FRAME, VMSERVE_ACCESS_NONE, 0}
                                 : it->second;
  }

  // Returns the start of the reservation that contains the range. Throws if there is none.
  std::uint64_t check_range(std::uint64_t address, std::uint64_t bytes, bool whole_frames) const {
    const auto next = reservations_.upper_bound(address);
    if (next != reservations_.begin()) {
      const auto& [start, size] = *std::prev(next);
      const std::uint64_t offset = address - start;
      if (bytes != 0 && offset < size && bytes <= size - offset) {
        if (!whole_frames || (offset % frame_bytes_ == 0 && bytes % frame_bytes_ == 0)) {
          return start;
        }
        misuse("the range (offset " + std::to_string(offset) + ", " + std::to_string(bytes) +
               " bytes) is not whole frames of " + std::to_string(frame_bytes_) + " bytes");
      }
    }
    misuse("the range of " + std::to_string(bytes) + " bytes is not inside one reservation");
  }

 private:
  static std::size_t at(std::int64_t id) { return static_cast<std::size_t>(id); }
  static void check_access(std::uint32_t access) {
    if (access == VMSERVE_READ || access == VMSERVE_READ_WRITE) return;
    misuse("access " + std::to_string(access) + " is neither read nor read-write");
  }
  void check_all_mapped(std::uint64_t address, std::uint64_t bytes, bool writable,
                        const char* message) const {
    const std::uint64_t start = std::prev(reservations_.upper_bound(address))->first;
    std::uint64_t expected = address - (address - start) % frame_bytes_;
    for (auto it = mappings_.find(expected); expected < address + bytes; ++it) {
      const bool found = it != mappings_.end() && it->first == expected;
      if (!found || (writable && it->second.access != VMSERVE_READ_WRITE)) misuse(message);
      expected += frame_bytes_;
    }
  }

  std::uint64_t frame_bytes_;
  std::vector<bool> exists_;
  std::vector<std::uint32_t> aliases_;  // mappings of each frame
  std::int64_t created_frames_ = 0;
  std::map<std::uint64_t, std::uint64_t> reservations_;
  std::map<std::uint64_t, vmserve_mapping> mappings_;  // by the address of the frame
};

// Ranges allocated by alloc_host().
class HostRanges {
 public:
  const std::map<std::uint64_t, std::uint64_t>& all() const { return ranges_; }
  void add(std::uint64_t address, std::uint64_t bytes) { ranges_.emplace(address, bytes); }
  // Size of the range that starts at the address.
  std::uint64_t bytes(std::uint64_t address) const {
    const auto it = ranges_.find(address);
    if (it == ranges_.end()) misuse("no host memory starts at this address");
    return it->second;
  }
  void remove(std::uint64_t address) { ranges_.erase(address); }
  bool contains(std::uint64_t address, std::uint64_t bytes) const {
    const auto next = ranges_.upper_bound(address);
    if (next == ranges_.begin()) return false;
    const auto& [start, size] = *std::prev(next);
    return address - start < size && bytes <= size - (address - start);
  }

 private:
  std::map<std::uint64_t, std::uint64_t> ranges_;
};

}  // namespace vmserve_plugin
