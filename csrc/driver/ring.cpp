#include "vmserve/ring.h"

#include <fcntl.h>
#include <linux/futex.h>
#include <poll.h>
#include <sched.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <new>
#include <string>

#include "vmserve/errors.h"
#include "vmserve/text.h"

namespace vmserve {
namespace {

static_assert(std::atomic<std::uint32_t>::is_always_lock_free);
static_assert(std::atomic<std::int64_t>::is_always_lock_free);

// Some 50 microseconds: more than a call takes, far less than a step.
constexpr int kSpins = 2000;

[[noreturn]] void refuse(const char* call, const char* doing) {
  const int code = errno;
  throw DriverError(call, code,
                    std::string(call) + " failed while " + doing + ": " + errno_text(code));
}

void relax() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield" ::: "memory");
#endif
}

// Spinning only helps if the peer can run meanwhile.
int num_spins() {
  cpu_set_t cpus;
  CPU_ZERO(&cpus);
  return ::sched_getaffinity(0, sizeof(cpus), &cpus) == 0 && CPU_COUNT(&cpus) == 1 ? 0 : kSpins;
}

// Not FUTEX_PRIVATE_FLAG: the word is shared between processes.
void futex_wait(std::atomic<std::uint32_t>& word, std::uint32_t value,
                std::chrono::milliseconds most) {
  const timespec timeout{0, static_cast<long>(most.count()) * 1'000'000};
  ::syscall(SYS_futex, &word, FUTEX_WAIT, value, &timeout, nullptr, 0);
}

}  // namespace

Peer::Peer(pid_t pid) : pid_(pid) {
#ifdef SYS_pidfd_open
  if (pid > 0 && pid != ::getpid()) {
    fd_ = FileDescriptor(static_cast<int>(::syscall(SYS_pidfd_open, pid, 0)));
  }
#endif
}

bool Peer::is_alive() const {
  if (pid_ <= 0 || pid_ == ::getpid()) return true;
  if (fd_.get() < 0) return ::kill(pid_, 0) == 0 || errno != ESRCH;
  pollfd ended{fd_.get(), POLLIN, 0};
  return ::poll(&ended, 1, 0) <= 0;
}

FileDescriptor Ring::make(std::size_t frame_bytes, std::int64_t num_frames) {
  FileDescriptor fd(::memfd_create("vmserve-ring", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  if (fd.get() < 0) refuse("memfd_create", "making what two ranks share");
  if (::ftruncate(fd.get(), sizeof(RingState)) != 0) refuse("ftruncate", "sizing what ranks share");
  // A file that shrank under the peer would end it with SIGBUS.
  ::fcntl(fd.get(), F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL);
  void* p = ::mmap(nullptr, sizeof(RingState), PROT_READ | PROT_WRITE, MAP_SHARED, fd.get(), 0);
  if (p == MAP_FAILED) refuse("mmap", "mapping what two ranks share");
  auto* state =
      new (p) RingState;  // the file's zeros are the counters' and the phase's first value
  state->state_bytes = sizeof(RingState);
  state->frame_bytes = frame_bytes;
  state->num_frames = num_frames;
  state->owner_pid = ::getpid();
  state->magic = RingState::kMagic;
  ::munmap(p, sizeof(RingState));
  return fd;
}

Ring::Ring(int fd) {
  struct stat file{};
  if (::fstat(fd, &file) != 0 || file.st_size != static_cast<off_t>(sizeof(RingState))) {
    throw MisuseError("descriptor " + std::to_string(fd) + " is no ring of this build");
  }
  void* p = ::mmap(nullptr, sizeof(RingState), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  if (p == MAP_FAILED) refuse("mmap", "mapping what two ranks share");
  state_ = static_cast<RingState*>(p);
  if (state_->magic == RingState::kMagic && state_->state_bytes == sizeof(RingState)) return;
  ::munmap(p, sizeof(RingState));
  throw MisuseError("descriptor " + std::to_string(fd) + " is no ring of this build");
}

Ring::~Ring() {
  ::munmap(state_, sizeof(RingState));
}

void Ring::wake(RingSignal& signal) {
  ::syscall(SYS_futex, &signal.turn, FUTEX_WAKE, 1, nullptr, nullptr, 0);
}

void Ring::raise(RingSignal& signal) {
  signal.turn.fetch_add(1);
  if (signal.sleepers.load() != 0) wake(signal);
}

bool Ring::wait(RingSignal& signal, std::uint32_t turn, const std::function<bool()>& gives_up) {
  for (int left = num_spins(); left > 0; --left) {
    if (signal.turn.load(std::memory_order_acquire) != turn) return true;
    relax();
  }
  bool is_past = false;
  signal.sleepers.fetch_add(1);
  while (!(is_past = signal.turn.load() != turn) && !gives_up()) {
    futex_wait(signal.turn, turn, kLook);
  }
  signal.sleepers.fetch_sub(1);
  return is_past;
}

}  // namespace vmserve
