// A driver for tests that refuses chosen calls. Each run of a batch counts as a call, so a batch
// can fail halfway. Other calls go to the wrapped driver.
//
// With `late_copies` it has a copy stream (see Capabilities) that is idle by itself. Runs of
// copy_out() are copied by run_copies(), or before an operation that waits for them. With
// `late_marks` marks are reached by reach_marks() or fence() alone, as those of a busy device.
#pragma once

#include <deque>
#include <limits>
#include <map>
#include <memory>
#include <mutex>
#include <string>

#include "vmserve/driver.h"

namespace vmserve {

class FaultInjectingDriver final : public PageDriver {
 public:
  explicit FaultInjectingDriver(std::shared_ptr<PageDriver> inner, bool late_copies = false,
                                bool late_marks = false)
      : inner_(std::move(inner)), late_copies_(late_copies), late_marks_(late_marks) {}

  // These four may be called in parallel to another thread's call of the driver.
  // Makes the call-th call from now on (1 is the next) fail with `code`: once, or that call and all
  // later ones. `sticky`: the error says that the device is lost.
  void arm(std::int64_t call, bool forever, int code, bool sticky = false);
  void disarm();
  // Number of calls since construction or the last arm().
  std::int64_t num_calls() const;
  // Refused calls since construction, by name.
  std::map<std::string, std::int64_t> num_refused() const;
  // Copies up to `count` waiting runs, oldest first; returns how many.
  std::int64_t run_copies(std::int64_t count);
  // Reaches up to `count` marks that are not reached, oldest first.
  void reach_marks(std::int64_t count);

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
  bool reached(Mark mark) override;
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
  bool late_marks_;
  Mark num_marks_ = 0;  // late ones, of which the first `num_reached_` are reached
  Mark num_reached_ = 0;
  std::deque<CopyRun> late_;
  Mark num_copied_ = 0;  // late runs of copy_out() that are done; a mark counts those before it
  mutable std::mutex mutex_;  // guards what follows
  std::int64_t num_calls_ = 0;
  std::map<std::string, std::int64_t> num_refused_;
  std::int64_t fail_at_ = 0;
  bool forever_ = false;
  int code_ = 0;
  bool sticky_ = false;
};

}  // namespace vmserve
