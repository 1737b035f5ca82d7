#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <string>
#include <utility>

#include "vmserve/errors.h"
#include "vmserve/remote_driver.h"

namespace vmserve {
namespace {

template <std::size_t Size>
void put_text(char (&to)[Size], const std::string& text) {
  const std::size_t length = std::min(text.size(), Size - 1);
  std::memcpy(to, text.data(), length);
  to[length] = '\0';
}

RingAnswer answer_of(RingOutcome outcome, const Error& error) {
  RingAnswer answer{};
  answer.outcome = outcome;
  answer.completed = error.completed;
  put_text(answer.text, error.what());
  return answer;
}

}  // namespace

RankLoop::RankLoop(int ring_fd, std::shared_ptr<PageDriver> driver)
    : ring_(ring_fd), owner_(ring_->owner_pid), driver_(std::move(driver)) {
  if (driver_->frame_bytes() != ring_->frame_bytes || driver_->num_frames() != ring_->num_frames) {
    throw MisuseError("rank 0 wants " + std::to_string(ring_->num_frames) + " frames of " +
                      std::to_string(ring_->frame_bytes) + " bytes, the rank's driver has " +
                      std::to_string(driver_->num_frames()) + " of " +
                      std::to_string(driver_->frame_bytes()));
  }
  RingPhase offered = RingPhase::kOffered;
  if (!ring_->phase.compare_exchange_strong(offered, RingPhase::kServing)) {
    throw MisuseError("the ring has a rank already");
  }
  ring_->granularity = driver_->granularity();
  ring_->capabilities = driver_->capabilities();
  ring_->mapping_room = driver_->mapping_room();
  ring_->rank_pid = ::getpid();
  thread_ = std::thread([this] { run(); });
  Ring::raise(ring_->answered);  // rank 0 waits for turn 1
}

template <typename Run>
std::vector<Run> RankLoop::runs(const RingRequest& request) const {
  const std::size_t count =
      std::min<std::size_t>(request.num_runs, RingState::kRunBytes / sizeof(Run));
  std::vector<Run> runs(count);
  if (count != 0) std::memcpy(runs.data(), ring_->runs, count * sizeof(Run));
  return runs;
}

void RankLoop::execute(const RingRequest& request) {
  PageDriver& driver = *driver_;
  RingAnswer& answer = ring_->answer;
  answer.outcome = RingOutcome::kDone;
  switch (request.call) {
    case RingCall::kReserve:
      answer.value = driver.reserve(request.value, static_cast<Backing>(request.option));
      break;
    case RingCall::kFreeReservation:
      driver.free_reservation(request.value);
      break;
    case RingCall::kCreate:
      driver.create(runs<FrameRun>(request));
      break;
    case RingCall::kDestroy:
      driver.destroy(runs<FrameRun>(request));
      break;
    case RingCall::kMap:
      driver.map(runs<MapRun>(request));
      break;
    case RingCall::kUnmap:
      driver.unmap(runs<AddressRun>(request));
      break;
    case RingCall::kSetAccess:
      driver.set_access(runs<AccessRun>(request));
      break;
    case RingCall::kZero:
      driver.zero(runs<AddressRun>(request));
      break;
    case RingCall::kCopy:
      driver.copy(runs<CopyRun>(request));
      break;
    case RingCall::kCopyOut:
      driver.copy_out(runs<CopyRun>(request));
      break;
    case RingCall::kCopyIn:
      driver.copy_in(runs<CopyRun>(request));
      break;
    case RingCall::kCopyMark:
      answer.value = driver.copy_mark();
      break;
    case RingCall::kCopyReached:
      answer.value = driver.copy_reached(request.value) ? 1 : 0;
      break;
    case RingCall::kFence:
      driver.fence();
      break;
    case RingCall::kMark:
      answer.value = driver.mark();
      break;
    case RingCall::kReached:
      answer.value = driver.reached(request.value) ? 1 : 0;
      break;
    case RingCall::kAllocHost:
      answer.value = driver.alloc_host(request.value);
      break;
    case RingCall::kFreeHost:
      driver.free_host(request.value);
      break;
    case RingCall::kQuery:
      answer.mapping = driver.query(request.value);
      break;
    case RingCall::kStats:
      answer.stats = driver.stats();
      break;
    case RingCall::kClose:
      break;
  }
}

void RankLoop::run() {
  std::string reason = "closed";
  std::uint32_t turn = 0;
  for (;; ++turn) {
    const auto gives_up = [&] { return stopping_.load() || !owner_.is_alive(); };
    if (!Ring::wait(ring_->asked, turn, gives_up)) {
      if (!stopping_.load()) reason = "rank 0's process has ended";
      break;
    }
    const RingRequest request = ring_->request;
    if (request.call == RingCall::kClose) {
      reason = "rank 0 has closed the memory";
      break;
    }
    const std::lock_guard<std::mutex> lock(mutex_);
    try {
      execute(request);
    } catch (const DriverError& error) {
      RingAnswer answer = answer_of(RingOutcome::kRefused, error);
      answer.code = error.code;
      answer.sticky = error.sticky ? 1 : 0;
      put_text(answer.call, error.call);
      ring_->answer = answer;
    } catch (const OutOfMemoryError& error) {
      ring_->answer = answer_of(RingOutcome::kOutOfMemory, error);
    } catch (const Error& error) {
      ring_->answer = answer_of(RingOutcome::kMisuse, error);
    } catch (const std::exception& error) {
      // Not an error of the driver (bad_alloc): how far it got is unknown.
      RingAnswer answer = answer_of(RingOutcome::kBroken, Error(error.what()));
      answer.code = EIO;
      answer.sticky = 1;
      put_text(answer.call, "rank");
      ring_->answer = answer;
    }
    ring_->mapping_room.store(driver_->mapping_room());
    Ring::raise(ring_->answered);
  }
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    reason_ = std::move(reason);
    driver_ = nullptr;
  }
  running_.store(false);
  ring_->phase.store(RingPhase::kEnded);
  Ring::wake(ring_->answered);
}

std::string RankLoop::reason() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return reason_;
}

std::shared_ptr<PageDriver> RankLoop::owner_of(Address addr, std::size_t bytes) const {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (driver_ == nullptr) throw MisuseError("the rank has given its memory up: " + reason_);
  driver_->query(addr);
  if (bytes != 0) driver_->query(addr + bytes - 1);
  return driver_;
}

void RankLoop::close() {
  stopping_.store(true);
  Ring::wake(ring_->asked);
  if (thread_.joinable()) thread_.join();
}

}  // namespace vmserve
