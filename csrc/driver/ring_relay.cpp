#include "vmserve/ring_relay.h"

#include <unistd.h>

#include <algorithm>
#include <cstring>

#include "vmserve/errors.h"

namespace vmserve {
namespace {

struct Terms {
  std::uint64_t magic;
  std::uint64_t state_bytes;
  std::uint64_t frame_bytes;
  std::int64_t num_frames;
  std::uint64_t granularity;
  std::int64_t mapping_room;
  Capabilities capabilities;
};

struct AnswerHead {
  std::int64_t mapping_room;
  RingAnswer answer;  // sent without the rest of its text
};

constexpr std::size_t kTextAt = offsetof(AnswerHead, answer) + offsetof(RingAnswer, text);

std::size_t run_bytes(RingCall call) {
  switch (call) {
    case RingCall::kCreate:
    case RingCall::kDestroy:
      return sizeof(FrameRun);
    case RingCall::kMap:
      return sizeof(MapRun);
    case RingCall::kUnmap:
    case RingCall::kZero:
      return sizeof(AddressRun);
    case RingCall::kSetAccess:
      return sizeof(AccessRun);
    case RingCall::kCopy:
    case RingCall::kCopyOut:
    case RingCall::kCopyIn:
      return sizeof(CopyRun);
    default:
      return 0;
  }
}

}  // namespace

RelayedRing::RelayedRing(int ring_fd)
    : ring_(ring_fd), owner_(ring_->owner_pid), pid_(::getpid()) {}

void RelayedRing::serve(const std::string& bytes) {
  Terms terms{};
  if (bytes.size() != sizeof(terms)) throw MisuseError("what came is no rank's memory");
  std::memcpy(&terms, bytes.data(), sizeof(terms));
  if (terms.magic != RingState::kMagic || terms.state_bytes != sizeof(RingState)) {
    throw MisuseError("the rank's host has another build of vmserve: install the same on both");
  }
  if (terms.frame_bytes != ring_->frame_bytes || terms.num_frames != ring_->num_frames) {
    throw MisuseError("rank 0 wants " + std::to_string(ring_->num_frames) + " frames of " +
                      std::to_string(ring_->frame_bytes) + " bytes, the rank has " +
                      std::to_string(terms.num_frames) + " of " +
                      std::to_string(terms.frame_bytes));
  }
  RingPhase offered = RingPhase::kOffered;
  if (!ring_->phase.compare_exchange_strong(offered, RingPhase::kServing)) {
    throw MisuseError("the ring has a rank already");
  }
  ring_->granularity = terms.granularity;
  ring_->capabilities = terms.capabilities;
  ring_->mapping_room = terms.mapping_room;
  ring_->rank_pid = ::getpid();
  Ring::raise(ring_->answered);
}

std::optional<std::string> RelayedRing::take() {
  const auto gives_up = [&] { return ended_.load() || !owner_.is_alive(); };
  if (!Ring::wait(ring_->asked, turn_, gives_up)) return std::nullopt;
  ++turn_;
  const RingRequest request = ring_->request;
  if (request.call == RingCall::kClose) return std::nullopt;
  const std::size_t num_bytes =
      std::min<std::size_t>(request.num_runs * run_bytes(request.call), RingState::kRunBytes);
  std::string call(reinterpret_cast<const char*>(&request), sizeof(request));
  call.append(reinterpret_cast<const char*>(ring_->runs), num_bytes);
  return call;
}

void RelayedRing::answer(const std::string& bytes) {
  if (bytes.size() < kTextAt || bytes.size() >= sizeof(AnswerHead)) {
    throw MisuseError("what came is no rank's answer");
  }
  AnswerHead head{};
  std::memcpy(&head, bytes.data(), bytes.size());
  head.answer.call[sizeof(head.answer.call) - 1] = '\0';
  ring_->answer = head.answer;
  ring_->mapping_room = head.mapping_room;
  Ring::raise(ring_->answered);
}

void RelayedRing::end(const std::string& reason) {
  if (::getpid() != pid_ || ended_.exchange(true)) return;  // a fork's ring is the parent's
  const std::size_t length = std::min(reason.size(), sizeof(ring_->ending) - 1);
  std::memcpy(ring_->ending, reason.data(), length);
  ring_->ending[length] = '\0';
  ring_->phase.store(RingPhase::kEnded);
  Ring::wake(ring_->answered);
  Ring::wake(ring_->asked);
}

RelayEnd::~RelayEnd() {
  ring_->request = RingRequest{RingCall::kClose, 0, 0, 0};
  Ring::raise(ring_->asked);
}

std::string RelayEnd::terms() const {
  if (ring_->phase.load() != RingPhase::kServing) throw MisuseError("the ring has no rank");
  Terms terms{};
  terms.magic = RingState::kMagic;
  terms.state_bytes = sizeof(RingState);
  terms.frame_bytes = ring_->frame_bytes;
  terms.num_frames = ring_->num_frames;
  terms.granularity = ring_->granularity;
  terms.mapping_room = ring_->mapping_room.load();
  terms.capabilities = ring_->capabilities;
  return {reinterpret_cast<const char*>(&terms), sizeof(terms)};
}

std::string RelayEnd::execute(const std::string& call) {
  RingRequest request{};
  if (call.size() < sizeof(request)) throw MisuseError("what came is no call of rank 0");
  std::memcpy(&request, call.data(), sizeof(request));
  const std::size_t num_bytes = call.size() - sizeof(request);
  const std::size_t each = run_bytes(request.call);
  if (request.call >= RingCall::kClose || num_bytes > RingState::kRunBytes ||
      (each == 0 ? num_bytes != 0
                 : num_bytes % each != 0 || num_bytes / each != request.num_runs)) {
    throw MisuseError("what came is no call of rank 0");
  }
  const std::uint32_t turn = ring_->answered.turn.load();
  std::memcpy(ring_->runs, call.data() + sizeof(request), num_bytes);
  ring_->request = request;
  Ring::raise(ring_->asked);
  const auto gives_up = [&] { return ring_->phase.load() == RingPhase::kEnded; };
  if (!Ring::wait(ring_->answered, turn, gives_up)) throw MisuseError("the rank's loop has ended");
  AnswerHead head{};
  head.mapping_room = ring_->mapping_room.load();
  head.answer = ring_->answer;
  const std::size_t text = ::strnlen(head.answer.text, sizeof(head.answer.text) - 1);
  return {reinterpret_cast<const char*>(&head), kTextAt + text};
}

}  // namespace vmserve
