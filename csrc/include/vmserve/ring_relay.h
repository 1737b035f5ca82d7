// A ring whose two sides are on different hosts: each has a ring of its own, and calls and answers
// go between them as bytes.
//
// On rank 0's host, a RelayedRing takes the calls of the RemoteDriver. On the rank's host, a
// RelayEnd passes them to the RankLoop of the other ring. Both hosts have the same build.
#pragma once

#include <atomic>
#include <cstdint>
#include <optional>
#include <string>

#include "vmserve/ring.h"

namespace vmserve {

// On rank 0's host, in place of a rank's loop. One thread calls take() and answer().
class RelayedRing {
 public:
  explicit RelayedRing(int ring_fd);
  ~RelayedRing() { end("the relay was dropped"); }
  RelayedRing(const RelayedRing&) = delete;
  RelayedRing& operator=(const RelayedRing&) = delete;

  // Lets rank 0 begin, with a driver as RelayEnd::terms() has it. Throws MisuseError if these are
  // another build's or another memory's, or the ring has a rank already.
  void serve(const std::string& terms);
  // The next call; none once rank 0 has closed its driver or is gone, or after end().
  std::optional<std::string> take();
  // Throws MisuseError if it is no answer.
  void answer(const std::string& bytes);
  // Rank 0's calls fail from now on, with this reason.
  void end(const std::string& reason);

 private:
  Ring ring_;
  Peer owner_;
  pid_t pid_;
  std::uint32_t turn_ = 0;
  std::atomic<bool> ended_{false};
};

// On the rank's host, next to a RankLoop over the same ring.
class RelayEnd {
 public:
  explicit RelayEnd(int ring_fd) : ring_(ring_fd) {}
  ~RelayEnd();
  RelayEnd(const RelayEnd&) = delete;
  RelayEnd& operator=(const RelayEnd&) = delete;

  // Describes the loop's driver. Throws MisuseError if the ring has no loop.
  std::string terms() const;
  // The loop's answer. Throws MisuseError if it is no call, or the loop has ended.
  std::string execute(const std::string& call);

 private:
  Ring ring_;
};

}  // namespace vmserve
