#include "rank_group.h"

#include <linux/futex.h>
#include <sched.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <climits>
#include <cstdio>
#include <cstring>
#include <string>

#include "vmserve/errors.h"

namespace vmserve {
namespace {

// Ranks with cores of their own meet within some 100 microseconds of each other, and a sleeper
// takes as long to wake. A spinning rank yields now and then, because the rank that it waits for
// may need the core.
constexpr std::chrono::microseconds kSpin{500};
constexpr int kPauses = 300;
// How often a rank that sleeps looks whether the others are alive: at first, and in a long sleep.
constexpr long kLookNanoseconds = 50'000'000, kLongestLook = 400'000'000;
// A rank hangs if others wait for it and it uses no processor for so long. A sleeping rank may wait
// for a disk.
constexpr std::chrono::milliseconds kStoppedLong{700}, kAsleepLong{10'000};
// Outputs of the widest panel.
constexpr std::int64_t kUnit = 32;
constexpr std::size_t kHeaderBytes = 4096;

void relax() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#endif
}

// Not FUTEX_PRIVATE_FLAG: the word is shared between processes.
long futex(std::atomic<std::uint32_t>& word, int operation, std::uint32_t value,
           const timespec* timeout) {
  return syscall(SYS_futex, &word, operation, value, timeout, nullptr, 0);
}

struct Process {
  char state = 'X';         // as in /proc: 'X' has ended, '?' is not known
  std::uint64_t ticks = 0;  // processor time
};

Process look_at(pid_t pid) {
  if (kill(pid, 0) != 0 && errno == ESRCH) return {};
  const std::string name = "/proc/" + std::to_string(pid) + "/stat";
  std::FILE* const file = std::fopen(name.c_str(), "re");
  if (file == nullptr) return {errno == ENOENT ? 'X' : '?'};
  char line[512] = {};
  const std::size_t length = std::fread(line, 1, sizeof line - 1, file);
  std::fclose(file);
  if (length == 0) return {};
  const char* const behind = std::strrchr(line, ')');  // a name may have any characters
  Process found{'?'};
  unsigned long long user = 0, system = 0;
  constexpr const char* kFields = ") %c %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %llu %llu";
  if (behind != nullptr) std::sscanf(behind, kFields, &found.state, &user, &system);
  found.ticks = user + system;
  return found;
}

// A zombie is dead too.
bool is_dead(pid_t pid) {
  const char state = look_at(pid).state;
  return state == 'X' || state == 'Z';
}

// A flag in Header::lost: the rank hangs.
constexpr std::uint32_t kHangs = 1U << 16;

}  // namespace

// Zeros are the initial state.
struct RankGroup::Header {
  alignas(64) std::atomic<std::uint32_t> arrived;
  alignas(64) std::atomic<std::uint32_t> generation;
  alignas(64) std::atomic<std::uint32_t> sleepers;
  std::atomic<std::uint32_t> lost;  // rank + 1, perhaps with kHangs; 0: none
  std::atomic<std::int32_t> size;
  std::atomic<std::int32_t> pids[kMaxRanks];
  std::atomic<std::uint32_t> waits[kMaxRanks];  // how often each rank has come to wait
  std::atomic<std::uint64_t> step_bytes[2];
};

struct RankGroup::Stalls {
  using Clock = std::chrono::steady_clock;
  std::uint64_t ticks[kMaxRanks] = {};
  Clock::time_point since[kMaxRanks] = {};
};

RankGroup::RankGroup(int descriptor, int rank, int size, std::size_t board_bytes)
    : rank_(rank),
      size_(size),
      board_bytes_((board_bytes + kHeaderBytes - 1) / kHeaderBytes * kHeaderBytes) {
  static_assert(sizeof(Header) <= kHeaderBytes);
  static_assert(std::atomic<std::uint32_t>::is_always_lock_free);
  if (size < 1 || size > kMaxRanks || rank < 0 || rank >= size) {
    throw MisuseError("rank " + std::to_string(rank) + " of " + std::to_string(size) +
                      ": a group has 1 to " + std::to_string(kMaxRanks) + " ranks");
  }
  struct stat found{};
  const std::size_t least = 2 * (kHeaderBytes + board_bytes_);
  if (fstat(descriptor, &found) != 0 || found.st_size < static_cast<off_t>(least)) {
    throw MisuseError("the memory of a group of ranks is no file of at least " +
                      std::to_string(least >> 10) + " KiB");
  }
  mapped_ = static_cast<std::size_t>(found.st_size);
  void* const at =
      mmap(nullptr, mapped_, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, descriptor, 0);
  if (at == MAP_FAILED) {
    throw OutOfMemoryError(std::string("the memory of a group of ranks cannot be mapped: ") +
                           std::strerror(errno));
  }
  header_ = static_cast<Header*>(at);
  std::int32_t known = 0, nobody = 0;
  const bool fits = header_->size.compare_exchange_strong(known, size) || known == size;
  if (!fits || !header_->pids[rank].compare_exchange_strong(nobody, getpid())) {
    munmap(at, mapped_);
    throw MisuseError("rank " + std::to_string(rank) + " of " + std::to_string(size) +
                      (fits ? " is taken" : ": the group has " + std::to_string(known)));
  }
}

RankGroup::~RankGroup() {
  // A child after fork() has no part in the group.
  if (header_->pids[rank_].load() == getpid()) fail();
  munmap(header_, mapped_);
}

char* RankGroup::data() const {
  return board(2);
}

std::size_t RankGroup::bytes() const {
  return mapped_ - kHeaderBytes - 2 * board_bytes_;
}

// Two halves follow the header, then the memory of rows.
char* RankGroup::board(std::uint32_t half) const {
  return reinterpret_cast<char*>(header_) + kHeaderBytes + half * board_bytes_;
}

Slice RankGroup::slice(std::int64_t count, int rank, int size) {
  const std::int64_t unit = count >= kUnit * size ? kUnit : 1;
  const auto border = [&](std::int64_t index) {
    return index == size ? count : count * index / size / unit * unit;
  };
  return {border(rank), border(rank + 1) - border(rank)};
}

void RankGroup::mark_lost(std::uint32_t lost) {
  std::uint32_t nobody = 0;
  header_->lost.compare_exchange_strong(nobody, lost);
  futex(header_->generation, FUTEX_WAKE, INT_MAX, nullptr);
}

void RankGroup::lose(int rank) {
  mark_lost(static_cast<std::uint32_t>(rank) + 1);
}

void RankGroup::report() const {
  const std::uint32_t lost = header_->lost.load();
  throw DriverError("futex", EOWNERDEAD,
                    "rank " + std::to_string(lost % kHangs - 1) + " of " + std::to_string(size_) +
                        (lost >= kHangs ? " hangs" : " has ended") + ", and the group ends with it",
                    0, true);
}

void RankGroup::find_dead() {
  for (int rank = 0; rank < size_; ++rank) {
    const pid_t pid = header_->pids[rank].load();
    if (pid != 0 && pid != getpid() && is_dead(pid)) lose(rank);
  }
}

void RankGroup::find_hung(Stalls& stalls) {
  const auto now = Stalls::Clock::now();
  for (int rank = 1; rank < size_; ++rank) {
    const pid_t pid = header_->pids[rank].load();
    if (pid == 0 || pid == getpid()) continue;
    if (header_->waits[rank].load() == header_->waits[rank_].load()) continue;  // it waits, too
    const Process process = look_at(pid);
    const bool is_stopped = process.state == 'T' || process.state == 't';
    const bool is_idle = is_stopped || process.state == 'S';
    if (!is_idle || process.ticks != stalls.ticks[rank] || stalls.since[rank] == decltype(now){}) {
      stalls.ticks[rank] = process.ticks;
      stalls.since[rank] = now;
    } else if (now - stalls.since[rank] >= (is_stopped ? kStoppedLong : kAsleepLong)) {
      mark_lost((static_cast<std::uint32_t>(rank) + 1) | kHangs);
    }
  }
}

void RankGroup::wait() {
  Header& shared = *header_;
  if (shared.lost.load() != 0) report();
  const std::uint32_t mine = shared.generation.load();
  shared.waits[rank_].fetch_add(1);
  if (shared.arrived.fetch_add(1) + 1 == static_cast<std::uint32_t>(size_)) {
    shared.arrived.store(0);
    shared.generation.store(mine + 1);
    if (shared.sleepers.load() != 0) futex(shared.generation, FUTEX_WAKE, INT_MAX, nullptr);
    return;
  }
  const auto passed = [&] { return shared.generation.load() != mine; };
  const auto until = std::chrono::steady_clock::now() + kSpin;
  do {
    for (int i = 0; i < kPauses; ++i) {
      if (passed()) return;
      relax();
    }
    sched_yield();
  } while (std::chrono::steady_clock::now() < until);
  shared.sleepers.fetch_add(1);
  timespec look{0, kLookNanoseconds};
  Stalls stalls;
  while (!passed() && shared.lost.load() == 0) {
    // A rank that fails meanwhile is noticed after the timeout.
    if (futex(shared.generation, FUTEX_WAIT, mine, &look) == 0 || errno != ETIMEDOUT) continue;
    find_dead();
    if (rank_ == 0) find_hung(stalls);
    look.tv_nsec = std::min(look.tv_nsec * 3 / 2, kLongestLook);
  }
  shared.sleepers.fetch_sub(1);
  if (!passed()) report();
}

// Ranks read one half while rank 0 writes the other. Rank 0 writes to a half again only after all
// ranks have come to the next meeting.
void RankGroup::publish(std::string_view step) {
  if (step.size() > board_bytes_) {
    throw MisuseError("a step of " + std::to_string(step.size()) +
                      " bytes is more than the board's " + std::to_string(board_bytes_));
  }
  const std::uint32_t half = num_published_++ % 2;
  std::memcpy(board(half), step.data(), step.size());
  header_->step_bytes[half].store(step.size());
  wait();
}

std::string_view RankGroup::receive() {
  const std::uint32_t half = num_published_++ % 2;
  wait();
  return {board(half), static_cast<std::size_t>(header_->step_bytes[half].load())};
}

}  // namespace vmserve
