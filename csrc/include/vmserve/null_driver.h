// A driver that only counts pages: for simulations of pools larger than any machine at hand.
//
// Checks the contract with the same error texts as every driver, but makes no system calls. Its
// addresses are invalid (a touch is a fault), frames have no content, and zero and copy are checked
// and counted only. It never refuses a valid call.
#pragma once

#include "vmserve/driver.h"
#include "vmserve/frame_ledger.h"

namespace vmserve {

class NullDriver final : public PageDriver {
 public:
  // Bytes that a real driver would have moved; only grows.
  struct Work {
    std::int64_t zeroed_bytes = 0;
    std::int64_t copied_bytes = 0;   // within the device
    std::int64_t swapped_bytes = 0;  // to and from host memory
  };

  NullDriver(std::size_t frame_bytes, std::int64_t num_frames);

  std::size_t granularity() const override { return kGranularity; }
  std::size_t frame_bytes() const override { return frame_bytes_; }
  std::int64_t num_frames() const override { return ledger_.num_frames(); }

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

  Work work() const { return work_; }

 private:
  static constexpr std::size_t kGranularity = 4096;
  // Above all addresses that Linux gives to a process (47 bits, unless it asks for more).
  static constexpr Address kNowhere = Address{1} << 48;

  Address take_addresses(std::size_t bytes);
  bool is_host_memory(Address addr) const;

  std::size_t frame_bytes_;
  FrameLedger ledger_;
  Address next_ = kNowhere;
  Mark last_mark_ = 0;
  Work work_;
};

}  // namespace vmserve
