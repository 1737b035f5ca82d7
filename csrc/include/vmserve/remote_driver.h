// A driver in another process: rank 0 has the RemoteDriver, the rank a RankLoop, and both a ring.
//
// The loop executes each call on the rank's own driver, in a thread of its own, and answers with
// what the driver said. Addresses are the rank's: rank 0 must not touch them. Calls are as
// synchronous as the rank's driver.
#pragma once

#include <atomic>
#include <chrono>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "vmserve/driver.h"
#include "vmserve/ring.h"

namespace vmserve {

class RemoteDriver final : public PageDriver {
 public:
  struct Patience {
    std::chrono::milliseconds attach{60'000};
    // A rank that lives but does not answer for so long counts as dead.
    std::chrono::milliseconds answer{120'000};
  };

  // Waits until the rank's loop has attached. `rank`: its process, if known, whose end is noticed
  // meanwhile. Throws DriverError if it ends or takes too long.
  RemoteDriver(int ring_fd, pid_t rank, Patience patience);
  ~RemoteDriver() override;
  RemoteDriver(const RemoteDriver&) = delete;
  RemoteDriver& operator=(const RemoteDriver&) = delete;

  // Why the rank no longer answers; empty while it does. Later calls throw it as a sticky
  // DriverError.
  const std::string& failure() const { return failure_; }

  Capabilities capabilities() const override { return ring_->capabilities; }
  std::size_t granularity() const override { return ring_->granularity; }
  std::size_t frame_bytes() const override { return ring_->frame_bytes; }
  std::int64_t num_frames() const override { return ring_->num_frames; }

  Address reserve(std::size_t bytes, Backing backing) override;
  void free_reservation(Address addr) override;
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
  Mapping query(Address addr) const override;
  DriverStats stats() const override;
  // As of the last call.
  std::int64_t mapping_room() const override { return ring_->mapping_room.load(); }

 private:
  [[noreturn]] void fail(const std::string& why) const;
  void check_usable() const;
  // Throws the rank's error with `done` more completed runs.
  const RingAnswer& call(RingRequest request, std::size_t done = 0) const;
  template <typename Run>
  void batch(RingCall call, const std::vector<Run>& runs);

  Ring ring_;
  Peer rank_;
  Patience patience_;
  pid_t pid_;
  Mark last_mark_ = 0;
  mutable std::string failure_;
};

class RankLoop {
 public:
  // Throws MisuseError unless the driver has the ring's frames.
  RankLoop(int ring_fd, std::shared_ptr<PageDriver> driver);
  ~RankLoop() { close(); }
  RankLoop(const RankLoop&) = delete;
  RankLoop& operator=(const RankLoop&) = delete;

  bool is_running() const { return running_.load(); }
  // Why it ended; empty while it runs.
  std::string reason() const;
  // Ends the loop and gives the driver up. Rank 0's next call fails.
  void close();
  // The driver, for a user of memory in one of its reservations, which so shares ownership. Throws
  // MisuseError if the range is not in one, or the loop has ended.
  std::shared_ptr<PageDriver> owner_of(Address addr, std::size_t bytes) const;

 private:
  void run();
  void execute(const RingRequest& request);
  template <typename Run>
  std::vector<Run> runs(const RingRequest& request) const;

  Ring ring_;
  Peer owner_;
  std::shared_ptr<PageDriver> driver_;
  std::atomic<bool> running_{true};
  std::atomic<bool> stopping_{false};
  mutable std::mutex mutex_;  // guards driver_, its calls, and reason_
  std::string reason_;
  std::thread thread_;
};

}  // namespace vmserve
