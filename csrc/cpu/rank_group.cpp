#include "rank_group.h"

#include <linux/futex.h>
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

// Ranks meet within microseconds of each other if each has cores of its own; if not, whoever spins
// keeps another from running.
constexpr std::chrono::microseconds kSpin{50};
// How often a rank that sleeps looks whether the others are alive.
constexpr long kLookNanoseconds = 50'000'000;
// Outputs of the widest panel.
constexpr std::int64_t kUnit = 32;
constexpr std::size_t kHeaderBytes = 4096;

void relax() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#endif
}

// Between processes: not private to one.
long futex(std::atomic<std::uint32_t>& word, int operation, std::uint32_t value,
           const timespec* timeout) {
  return syscall(SYS_futex, &word, operation, value, timeout, nullptr, 0);
}

// A process that nobody has waited for yet is dead too.
bool is_dead(pid_t pid) {
  if (kill(pid, 0) != 0 && errno == ESRCH) return true;
  const std::string name = "/proc/" + std::to_string(pid) + "/stat";
  std::FILE* const file = std::fopen(name.c_str(), "re");
  if (file == nullptr) return errno == ENOENT;
  char line[512] = {};
  const std::size_t length = std::fread(line, 1, sizeof line - 1, file);
  std::fclose(file);
  if (length == 0) return true;
  const char* const state = std::strrchr(line, ')');  // a name may have any characters
  return state != nullptr && (state[2] == 'Z' || state[2] == 'X');
}

}  // namespace

// Zeros are its first state.
struct RankGroup::Header {
  alignas(64) std::atomic<std::uint32_t> arrived;
  alignas(64) std::atomic<std::uint32_t> generation;
  alignas(64) std::atomic<std::uint32_t> sleepers;
  std::atomic<std::uint32_t> lost;  // a rank, counted from 1
  std::atomic<std::int32_t> size;
  std::atomic<std::int32_t> pids[kMaxRanks];
};

RankGroup::RankGroup(int descriptor, int rank, int size) : rank_(rank), size_(size) {
  static_assert(sizeof(Header) <= kHeaderBytes);
  static_assert(std::atomic<std::uint32_t>::is_always_lock_free);
  if (size < 1 || size > kMaxRanks || rank < 0 || rank >= size) {
    throw MisuseError("rank " + std::to_string(rank) + " of " + std::to_string(size) +
                      ": a group has 1 to " + std::to_string(kMaxRanks) + " ranks");
  }
  struct stat found{};
  if (fstat(descriptor, &found) != 0 || found.st_size < static_cast<off_t>(2 * kHeaderBytes)) {
    throw MisuseError("the memory of a group of ranks is no file of at least 8 KiB");
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
  return reinterpret_cast<char*>(header_) + kHeaderBytes;
}

std::size_t RankGroup::bytes() const {
  return mapped_ - kHeaderBytes;
}

Slice RankGroup::slice(std::int64_t count, int rank, int size) {
  const std::int64_t unit = count >= kUnit * size ? kUnit : 1;
  const auto border = [&](std::int64_t index) {
    return index == size ? count : count * index / size / unit * unit;
  };
  return {border(rank), border(rank + 1) - border(rank)};
}

void RankGroup::fail() {
  std::uint32_t nobody = 0;
  header_->lost.compare_exchange_strong(nobody, static_cast<std::uint32_t>(rank_) + 1);
  futex(header_->generation, FUTEX_WAKE, INT_MAX, nullptr);
}

void RankGroup::report() const {
  throw DriverError("futex", EOWNERDEAD,
                    "rank " + std::to_string(header_->lost.load() - 1) + " of " +
                        std::to_string(size_) + " has ended, and the group with it",
                    0, true);
}

void RankGroup::find_dead() {
  for (int rank = 0; rank < size_; ++rank) {
    const pid_t pid = header_->pids[rank].load();
    if (pid == 0 || pid == getpid() || !is_dead(pid)) continue;
    std::uint32_t nobody = 0;
    header_->lost.compare_exchange_strong(nobody, static_cast<std::uint32_t>(rank) + 1);
    futex(header_->generation, FUTEX_WAKE, INT_MAX, nullptr);
  }
}

void RankGroup::wait() {
  Header& shared = *header_;
  if (shared.lost.load() != 0) report();
  const std::uint32_t mine = shared.generation.load();
  if (shared.arrived.fetch_add(1) + 1 == static_cast<std::uint32_t>(size_)) {
    shared.arrived.store(0);
    shared.generation.store(mine + 1);
    if (shared.sleepers.load() != 0) futex(shared.generation, FUTEX_WAKE, INT_MAX, nullptr);
    return;
  }
  const auto passed = [&] { return shared.generation.load() != mine; };
  const auto until = std::chrono::steady_clock::now() + kSpin;
  do {
    for (int i = 0; i < 32; ++i) {
      if (passed()) return;
      relax();
    }
  } while (std::chrono::steady_clock::now() < until);
  shared.sleepers.fetch_add(1);
  const timespec look{0, kLookNanoseconds};
  while (!passed() && shared.lost.load() == 0) {
    // A rank that fails in between is seen when the time is over.
    if (futex(shared.generation, FUTEX_WAIT, mine, &look) != 0 && errno == ETIMEDOUT) find_dead();
  }
  shared.sleepers.fetch_sub(1);
  if (!passed()) report();
}

}  // namespace vmserve
