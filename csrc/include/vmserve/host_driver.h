// Physical pages on any Linux host: one memfd, mapped with mmap(MAP_FIXED | MAP_SHARED).
//
// Real demand paging, real aliasing (one offset of the file at several addresses) and real traps
// (what is not mapped is PROT_NONE).
#pragma once

#include "vmserve/driver.h"
#include "vmserve/file_descriptor.h"
#include "vmserve/frame_ledger.h"
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
  void fence() override { ledger_.check_process(); }
  Mark mark() override { return ++last_mark_; }
  bool reached(Mark mark) override { return mark <= last_mark_; }
  Address alloc_host(std::size_t bytes) override;
  void free_host(Address addr) override;
  Mapping query(Address addr) const override { return ledger_.query(addr); }
  DriverStats stats() const override;

 private:
  void check_memory(std::uint64_t bytes) const;
  void check_map_count(std::int64_t growth, std::size_t completed) const;
  // 0, or the errno of the refusal.
  int fallocate_frames(const FrameRun& run, int mode);
  void map_one(const MapRun& run, std::size_t completed);
  void unmap_one(const AddressRun& run, std::size_t completed);
  void set_access_one(const AccessRun& run, std::size_t completed);

  std::size_t granularity_;
  HostOptions options_;
  FileDescriptor fd_;
  FrameLedger ledger_;
  std::int64_t max_mappings_;
  Mark last_mark_ = 0;
};

}  // namespace vmserve
