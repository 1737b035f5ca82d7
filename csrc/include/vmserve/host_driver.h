// Physical pages on any Linux host: one memfd, mapped with mmap(MAP_FIXED | MAP_SHARED).
//
// Real demand paging, real aliasing (one offset of the file at several addresses) and real traps
// (what is not mapped is PROT_NONE).
#pragma once

#include <sys/types.h>

#include <map>

#include "vmserve/driver.h"
#include "vmserve/file_descriptor.h"
#include "vmserve/lazy_array.h"
#include "vmserve/page_set.h"
#include "vmserve/segment_map.h"
#include "vmserve/system_limits.h"

namespace vmserve {

struct HostOptions {
  std::size_t frame_bytes = 0;
  std::int64_t num_frames = 0;
  // 0: read vm.max_map_count.
  std::int64_t max_map_count = 0;
  SystemLimits limits;
};

class HostDriver final : public PageDriver {
 public:
  // NOTE: at vm.max_map_count even munmap, mprotect and malloc fail, so that undoing would too.
  // A fifth of it is left to the rest of the process and to undoing.
  static constexpr double kMapCountShare = 0.8;

  explicit HostDriver(HostOptions options);
  ~HostDriver() override;
  HostDriver(const HostDriver&) = delete;
  HostDriver& operator=(const HostDriver&) = delete;

  std::size_t granularity() const override { return granularity_; }
  std::size_t frame_bytes() const override { return options_.frame_bytes; }
  std::int64_t num_frames() const override { return options_.num_frames; }

  Address reserve(std::size_t bytes, Backing backing) override;
  void free_reservation(Address addr) override;
  void create(const std::vector<FrameRun>& runs) override;
  void destroy(const std::vector<FrameRun>& runs) override;
  void map(const std::vector<MapRun>& runs) override;
  void unmap(const std::vector<AddressRun>& runs) override;
  void set_access(const std::vector<AccessRun>& runs) override;
  void zero(const std::vector<AddressRun>& runs) override;
  void copy(const std::vector<CopyRun>& runs) override;
  void fence() override { check_process(); }
  Mark mark() override { return ++last_mark_; }
  bool reached(Mark mark) override { return mark <= last_mark_; }
  Address alloc_host(std::size_t bytes) override;
  void free_host(Address addr) override;
  Mapping query(Address addr) const override;
  DriverStats stats() const override;

 private:
  struct Reservation {
    SegmentMap segments;
    Backing backing;
  };

  void check_process() const;
  void check_memory(std::uint64_t bytes) const;
  void check_map_count(std::int64_t growth, std::size_t completed) const;
  void check_frames(const FrameRun& run, bool exist, std::size_t completed) const;
  // The reservation around [addr, addr + bytes), which must be whole frames if `whole_frames`.
  Reservation& reservation_of(Address addr, std::size_t bytes, bool whole_frames,
                              std::size_t completed);
  const Reservation* find(Address addr) const;
  // Throws unless [addr, addr + bytes) is mapped (writable if `write`) or lies in host memory.
  void check_copyable(Address addr, std::size_t bytes, bool write, std::size_t completed);
  // 0, or the errno of the refusal.
  int fallocate_frames(const FrameRun& run, int mode);
  void map_one(const MapRun& run, std::size_t completed);
  void unmap_one(const AddressRun& run, std::size_t completed);
  void set_access_one(const AccessRun& run, std::size_t completed);
  void count_mapped(const SegmentMap& segments, Address addr, std::size_t bytes, int change);

  HostOptions options_;
  std::size_t granularity_;
  std::int64_t max_mappings_;
  pid_t pid_;
  FileDescriptor fd_;
  std::map<Address, Reservation> reservations_;
  std::map<Address, std::size_t> host_memory_;
  PageSet created_;
  LazyArray<std::uint32_t> map_counts_;  // aliases per frame
  std::int64_t mapped_frames_ = 0;
  std::int64_t num_mappings_ = 0;
  Mark last_mark_ = 0;
};

}  // namespace vmserve
