#include "vmserve/remote_driver.h"

#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <type_traits>

#include "vmserve/errors.h"

namespace vmserve {
namespace {

[[noreturn]] void rethrow(const RingAnswer& answer, std::size_t done) {
  const std::size_t completed = done + answer.completed;
  switch (answer.outcome) {
    case RingOutcome::kMisuse:
      throw MisuseError(answer.text, completed);
    case RingOutcome::kOutOfMemory:
      throw OutOfMemoryError(answer.text, completed);
    default:
      throw DriverError(answer.call, answer.code, answer.text, completed, answer.sticky != 0);
  }
}

}  // namespace

RemoteDriver::RemoteDriver(int ring_fd, pid_t rank, Patience patience)
    : ring_(ring_fd), rank_(rank), patience_(patience), pid_(::getpid()) {
  const auto until = Ring::Clock::now() + patience_.attach;
  const bool is_there = Ring::wait(
      ring_->answered, 0, [&] { return !rank_.is_alive() || Ring::Clock::now() >= until; });
  if (!is_there) {
    fail(rank_.is_alive()
             ? "it made no memory within " + std::to_string(patience_.attach.count() / 1000) + " s"
             : "its process has ended before it made its memory");
  }
  rank_ = Peer(ring_->rank_pid);
}

RemoteDriver::~RemoteDriver() {
  // In a fork the ring is still the parent's.
  if (::getpid() != pid_ || !failure_.empty()) return;
  ring_->request = RingRequest{RingCall::kClose, 0, 0, 0};
  Ring::raise(ring_->asked);
}

void RemoteDriver::fail(const std::string& why) const {
  failure_ = "a rank (process " + std::to_string(rank_.pid()) + ") is lost: " + why;
  throw DriverError("rank", ECONNRESET, failure_, 0, /*sticky=*/true);
}

void RemoteDriver::check_usable() const {
  if (::getpid() != pid_) {
    throw MisuseError("this KV memory belongs to process " + std::to_string(pid_) +
                      " and was used in its fork " + std::to_string(::getpid()) +
                      ": start worker processes with the spawn method");
  }
  if (failure_.empty()) return;
  throw DriverError("rank", ECONNRESET, failure_, 0, /*sticky=*/true);
}

const RingAnswer& RemoteDriver::call(RingRequest request, std::size_t done) const {
  check_usable();
  const std::uint32_t turn = ring_->answered.turn.load();
  ring_->request = request;
  Ring::raise(ring_->asked);
  const auto until = Ring::Clock::now() + patience_.answer;
  std::string why;
  const auto gives_up = [&] {
    if (!rank_.is_alive()) {
      why = "its process has ended";
    } else if (ring_->phase.load() == RingPhase::kEnded) {
      why = ring_->ending[0] == '\0' ? "it has given its memory up" : ring_->ending;
    } else if (Ring::Clock::now() >= until) {
      why = "it lives but does not answer";
    }
    return !why.empty();
  };
  if (!Ring::wait(ring_->answered, turn, gives_up)) fail(why);
  if (ring_->answer.outcome != RingOutcome::kDone) rethrow(ring_->answer, done);
  return ring_->answer;
}

template <typename Run>
void RemoteDriver::batch(RingCall kind, const std::vector<Run>& runs) {
  static_assert(std::is_trivially_copyable_v<Run>);
  constexpr std::size_t kMost = RingState::kRunBytes / sizeof(Run);
  check_usable();
  std::size_t done = 0;
  do {
    const std::size_t count = std::min(kMost, runs.size() - done);
    if (count != 0) std::memcpy(ring_->runs, runs.data() + done, count * sizeof(Run));
    call({kind, 0, 0, count}, done);
    done += count;
  } while (done < runs.size());
}

Address RemoteDriver::reserve(std::size_t bytes, Backing backing) {
  return call({RingCall::kReserve, static_cast<std::uint32_t>(backing), bytes, 0}).value;
}

void RemoteDriver::free_reservation(Address addr) {
  call({RingCall::kFreeReservation, 0, addr, 0});
}

void RemoteDriver::create(const std::vector<FrameRun>& runs) {
  try {
    batch(RingCall::kCreate, runs);
  } catch (Error& error) {
    // All or nothing: the parts of the batch before the one that failed are created.
    const std::vector<FrameRun> made(runs.begin(),
                                     runs.begin() + static_cast<std::ptrdiff_t>(error.completed));
    error.completed = 0;
    if (made.empty()) throw;
    try {
      batch(RingCall::kDestroy, made);
    } catch (const Error&) {
      fail(error.what());
    }
    throw;
  }
}

void RemoteDriver::destroy(const std::vector<FrameRun>& runs) {
  batch(RingCall::kDestroy, runs);
}

void RemoteDriver::map(const std::vector<MapRun>& runs) {
  batch(RingCall::kMap, runs);
}

void RemoteDriver::unmap(const std::vector<AddressRun>& runs) {
  batch(RingCall::kUnmap, runs);
}

void RemoteDriver::set_access(const std::vector<AccessRun>& runs) {
  batch(RingCall::kSetAccess, runs);
}

void RemoteDriver::zero(const std::vector<AddressRun>& runs) {
  batch(RingCall::kZero, runs);
}

void RemoteDriver::copy(const std::vector<CopyRun>& runs) {
  batch(RingCall::kCopy, runs);
}

void RemoteDriver::copy_out(const std::vector<CopyRun>& runs) {
  batch(RingCall::kCopyOut, runs);
}

void RemoteDriver::copy_in(const std::vector<CopyRun>& runs) {
  batch(RingCall::kCopyIn, runs);
}

Mark RemoteDriver::copy_mark() {
  if (!ring_->capabilities.copy_stream) return mark();
  return call({RingCall::kCopyMark, 0, 0, 0}).value;
}

bool RemoteDriver::copy_reached(Mark mark) {
  if (!ring_->capabilities.copy_stream) return reached(mark);
  return call({RingCall::kCopyReached, 0, mark, 0}).value != 0;
}

void RemoteDriver::fence() {
  call({RingCall::kFence, 0, 0, 0});
}

Mark RemoteDriver::mark() {
  // Work that is done when its call returns needs no question to the rank.
  if (!ring_->capabilities.asynchronous) return ++last_mark_;
  return call({RingCall::kMark, 0, 0, 0}).value;
}

bool RemoteDriver::reached(Mark mark) {
  if (!ring_->capabilities.asynchronous) return mark <= last_mark_;
  return call({RingCall::kReached, 0, mark, 0}).value != 0;
}

Address RemoteDriver::alloc_host(std::size_t bytes) {
  return call({RingCall::kAllocHost, 0, bytes, 0}).value;
}

void RemoteDriver::free_host(Address addr) {
  call({RingCall::kFreeHost, 0, addr, 0});
}

Mapping RemoteDriver::query(Address addr) const {
  return call({RingCall::kQuery, 0, addr, 0}).mapping;
}

DriverStats RemoteDriver::stats() const {
  return call({RingCall::kStats, 0, 0, 0}).stats;
}

}  // namespace vmserve
