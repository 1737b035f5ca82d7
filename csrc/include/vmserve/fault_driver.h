// A driver that refuses chosen calls, for tests: every run of a batch counts as one call, so a
// batch can fail in its middle. What it does not refuse goes to the driver behind it.
//
// With `late_copies` it has a copy stream (see Capabilities) which does nothing by itself: what
// copy_out() was given is copied by run_copies(), or before something that waits for it.
#pragma once

#include <deque>
#include <limits>
#include <memory>

#include "vmserve/driver.h"

namespace vmserve {

class FaultInjectingDriver final : public PageDriver {
 public:
  explicit FaultInjectingDriver(std::shared_ptr<PageDriver> inner, bool late_copies = false)
      : inner_(std::move(inner)), late_copies_(late_copies) {}

  // The call-th call from now on fails (1 is the next one) with `code`: once, or that call and
  // every later one. `sticky`: the error says that the device is lost.
  void arm(std::int64_t call, bool forever, int code, bool sticky = false);
  void disarm() { fail_at_ = 0; }
  // Calls since construction or the last arm().
  std::int64_t num_calls() const { return num_calls_; }
  // Does up to `count` of the runs that wait, the oldest first; how many there were.
  std::int64_t run_copies(std::int64_t count);

  Capabilities capabilities() const override;
  std::size_t granularity() const override { return inner_->granularity(); }
  std::size_t frame_bytes() const override { return inner_->frame_bytes(); }
  std::int64_t num_frames() const override { return inner_->num_frames(); }

  Address reserve(std::size_t bytes, Backing backing) override;
  void free_reservation(Address addr) override { inner_->free_reservation(addr); }
  void create(const std::vector<FrameRun>& runs) override;
  void destroy(const std::vector<FrameRun>& runs) override;
  void map(const std::vector<MapRun>& runs) override;
  void unmap(const std::vector<AddressRun>& runs) override;
  void set_access(const std::vector<AccessRun>& runs) override;
  void zero(const std::vector<AddressRun>& runs) override;
  void copy(const std::vector<CopyRun>& runs) override;
  void copy_out(const std::vector<CopyRun>& runs) override;
  void copy_in(const std::vector<CopyRun>& runs) override;
  Mark copy_mark() override;
  bool copy_reached(Mark mark) override;
  void fence() override;
  Mark mark() override;
  bool reached(Mark mark) override { return inner_->reached(mark); }
  Address alloc_host(std::size_t bytes) override;
  void free_host(Address addr) override;
  Mapping query(Address addr) const override { return inner_->query(addr); }
  DriverStats stats() const override { return inner_->stats(); }
  std::int64_t mapping_room() const override { return inner_->mapping_room(); }

 private:
  void count_call(const char* name, std::size_t completed);
  template <typename Run>
  void one_by_one(const char* name, const std::vector<Run>& runs,
                  void (PageDriver::*call)(const std::vector<Run>&));

  std::shared_ptr<PageDriver> inner_;
  bool late_copies_;
  std::deque<CopyRun> late_;
  Mark num_copied_ = 0;  // runs of copy_out() that were done late; a mark counts those before it
  std::int64_t num_calls_ = 0;
  std::int64_t fail_at_ = 0;
  bool forever_ = false;
  int code_ = 0;
  bool sticky_ = false;
};

}  // namespace vmserve
