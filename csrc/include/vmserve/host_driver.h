// Pages on any Linux host: one memfd, mapped with mmap(MAP_FIXED | MAP_SHARED). Demand paging,
// aliasing (one offset of the file at several addresses) and traps (unmapped addresses are
// PROT_NONE) are real.
#pragma once

#include <memory>

#include "vmserve/driver.h"
#include "vmserve/file_descriptor.h"
#include "vmserve/frame_ledger.h"
#include "vmserve/map_account.h"
#include "vmserve/system_limits.h"

namespace vmserve {

struct HostOptions {
  std::size_t frame_bytes = 0;
  std::int64_t num_frames = 0;
  // 0: vm.max_map_count, shared by all drivers of the process.
  std::int64_t max_map_count = 0;
  SystemLimits limits;
};

class HostDriver final : public PageDriver {
 public:
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
  std::int64_t mapping_room() const override { return account_->most() - account_->held(); }

 private:
  void check_memory(std::uint64_t bytes, const char* doing, const char* option) const;
  void check_map_count(std::int64_t growth, std::int64_t most, std::size_t completed) const;
  // Updates the account from the ledger.
  void settle_account();
  // Returns 0 or the errno.
  int fallocate_frames(const FrameRun& run, int mode);
  void map_one(const MapRun& run, std::size_t completed);
  void unmap_one(const AddressRun& run, std::size_t completed);
  void set_access_one(const AccessRun& run, std::size_t completed);

  std::size_t granularity_;
  HostOptions options_;
  FileDescriptor fd_;
  FrameLedger ledger_;
  std::shared_ptr<MapAccount> account_;
  std::int64_t num_accounted_ = 0;
  Mark last_mark_ = 0;
};

}  // namespace vmserve
