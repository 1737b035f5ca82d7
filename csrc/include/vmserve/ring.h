// A memory file that rank 0 and one rank share, with one request and its answer at a time.
//
// The file is inherited or passed by descriptor; it has no name. Rank 0 makes it for frames of one
// size and number, and the rank's loop attaches. Waiting spins briefly and then sleeps (futex); a
// sleeper looks now and then whether its peer lives.
#pragma once

#include <sys/types.h>

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>

#include "vmserve/driver.h"
#include "vmserve/file_descriptor.h"

namespace vmserve {

enum class RingCall : std::uint32_t {
  kReserve,
  kFreeReservation,
  kCreate,
  kDestroy,
  kMap,
  kUnmap,
  kSetAccess,
  kZero,
  kCopy,
  kCopyOut,
  kCopyIn,
  kCopyMark,
  kCopyReached,
  kFence,
  kMark,
  kReached,
  kAllocHost,
  kFreeHost,
  kQuery,
  kStats,
  kClose,
};

struct RingRequest {
  RingCall call;
  std::uint32_t option;  // kReserve: the backing
  std::uint64_t value;   // an address, a mark, or a number of bytes
  std::uint64_t num_runs;
};

// How a call ended, in the words of errors.h.
enum class RingOutcome : std::uint32_t { kDone, kMisuse, kOutOfMemory, kRefused, kBroken };

struct RingAnswer {
  RingOutcome outcome;
  std::int32_t code;
  std::uint32_t sticky;
  std::uint64_t completed;
  std::uint64_t value;
  Mapping mapping;
  DriverStats stats;
  char call[64];
  char text[2048];
};

// A number that one side counts up and the other waits for.
struct alignas(64) RingSignal {
  std::atomic<std::uint32_t> turn;
  std::atomic<std::uint32_t> sleepers;
};

enum class RingPhase : std::uint32_t { kOffered, kServing, kEnded };

struct RingState {
  static constexpr std::uint64_t kMagic = 0x31676e6972736d76;  // "vmsring1"
  static constexpr std::size_t kRunBytes = std::size_t{256} << 10;

  std::uint64_t magic;
  std::uint64_t state_bytes;  // sizeof(RingState): both sides are the same build
  std::uint64_t frame_bytes;
  std::int64_t num_frames;
  pid_t owner_pid;
  pid_t rank_pid;
  std::atomic<RingPhase> phase;
  char ending[256];  // why it is kEnded; may be empty
  // Properties of the rank's driver, from kServing on.
  std::uint64_t granularity;
  Capabilities capabilities;
  std::atomic<std::int64_t> mapping_room;

  RingSignal asked;
  RingSignal answered;
  RingRequest request;
  RingAnswer answer;
  alignas(64) std::byte runs[kRunBytes];
};

// A process that may end, by its descriptor if the system has one.
class Peer {
 public:
  Peer() = default;
  explicit Peer(pid_t pid);

  pid_t pid() const { return pid_; }
  // Also true for no process (pid 0) and for this one.
  bool is_alive() const;

 private:
  pid_t pid_ = 0;
  FileDescriptor fd_;
};

// A mapping of the file.
class Ring {
 public:
  using Clock = std::chrono::steady_clock;

  // Makes a file for a rank's driver with these frames; closed on exec.
  static FileDescriptor make(std::size_t frame_bytes, std::int64_t num_frames);

  // Throws MisuseError if the file is no ring of this build. Does not keep the descriptor.
  explicit Ring(int fd);
  ~Ring();
  Ring(const Ring&) = delete;
  Ring& operator=(const Ring&) = delete;

  RingState* operator->() const { return state_; }

  // Counts the signal up and wakes the side that waits for it.
  static void raise(RingSignal& signal);
  // Wakes the side that waits for the signal, to ask `gives_up`.
  static void wake(RingSignal& signal);
  // Waits until the signal is past `turn`; returns whether it is. Gives up if `gives_up` is true,
  // which is asked after each sleep: after a wake, and every kLook.
  static bool wait(RingSignal& signal, std::uint32_t turn, const std::function<bool()>& gives_up);
  static constexpr std::chrono::milliseconds kLook{50};

 private:
  RingState* state_;
};

}  // namespace vmserve
