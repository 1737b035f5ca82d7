// How a run is shared: one atomic word has the number of the run, whether workers may join it, and
// how many have joined. A worker joins by incrementing the count while the run is open. The caller
// closes the run when no item is left and waits for the workers that joined; a late worker finds
// it closed. A lock is taken only if a thread sleeps.
#include "thread_pool.h"

#include <sched.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <string>
#include <system_error>
#include <thread>
#include <vector>

#include "vmserve/errors.h"

namespace vmserve {
namespace {

// How often a thread looks at the state before it sleeps. A short spin avoids a wake-up without
// delaying other threads' work. While the pool is kept awake, the spin covers the time between two
// runs, and yields every kSpins in case the core has other work.
constexpr int kSpins = 300, kAwakeSpins = 6000;

constexpr std::uint64_t kJoined = (std::uint64_t{1} << 24) - 1;
constexpr std::uint64_t kOpen = std::uint64_t{1} << 24;
constexpr std::uint64_t kCallerSleeps = std::uint64_t{1} << 25;
constexpr int kNumberShift = 32;

inline void pause() {
#if defined(__x86_64__) || defined(__i386__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// Spins until `done` is true, kSpins times, or kAwakeSpins while `awake`. Returns whether it was.
template <class Condition>
bool spin(const std::atomic<bool>& awake, const Condition& done) {
  for (int i = 1; i <= (awake.load(std::memory_order_relaxed) ? kAwakeSpins : kSpins); ++i) {
    if (done()) return true;
    if (i % kSpins == 0) {
      sched_yield();
    } else {
      pause();
    }
  }
  return done();
}

struct Job {
  ThreadPool::Work work = nullptr;
  void* context = nullptr;
  std::int64_t num_items = 0;
  int num_helpers = 0;  // workers 0 .. num_helpers - 1 may join
  ReadAhead ahead;
};

void take_items(const Job& job, std::atomic<std::int64_t>& next, int worker) {
  for (;;) {
    const std::int64_t item = next.fetch_add(1, std::memory_order_relaxed);
    if (item >= job.num_items) return;
    job.work(job.context, item, worker);
  }
}

// Bytes to prefetch. At least as many as memory delivers within its latency; at most as many as
// stay in a core's own cache next to the rows.
constexpr std::int64_t kLeastAhead = 4 << 10, kMostAhead = 192 << 10;
constexpr std::int64_t kLine = 64, kLinesAtOnce = 8;

// Prefetches the stretch of a worker until `done` is true.
template <class Condition>
void prefetch(const ReadAhead& ahead, int worker, int num_threads, const Condition& done) {
  const std::int64_t first = ahead.num_items * worker / num_threads;
  const std::int64_t end = ahead.num_items * (worker + 1) / num_threads;
  const std::int64_t bytes = std::min(kMostAhead, (end - first) * ahead.item_bytes);
  const char* const from = ahead.data + first * ahead.item_bytes;
  for (std::int64_t at = 0; at < bytes && (at < kLeastAhead || !done());
       at += kLinesAtOnce * kLine) {
    for (std::int64_t line = 0; line < kLinesAtOnce; ++line) {
      __builtin_prefetch(from + at + line * kLine);
    }
  }
}

}  // namespace

struct ThreadPool::Shared {
  // Run number << 32 | kCallerSleeps | kOpen | number of workers that joined.
  std::atomic<std::uint64_t> state = 0;
  std::atomic<std::int64_t> next = 0;  // the next item
  Job job;                             // written while no worker is in a run
  std::atomic<bool> awake = false;
  std::atomic<int> num_sleeping = 0;  // written under the mutex
  std::mutex mutex;
  std::condition_variable wake, idle;
  bool stopping = false;  // guarded by the mutex
  int num_threads = 1;
  std::vector<std::thread> workers;

  std::uint32_t number() const {
    return static_cast<std::uint32_t>(state.load(std::memory_order_acquire) >> kNumberShift);
  }

  // Whether no worker is in a run.
  bool is_empty() const { return (state.load(std::memory_order_acquire) & kJoined) == 0; }

  void begin(const Job& next_job) {
    const std::uint64_t number = (state.load(std::memory_order_relaxed) >> kNumberShift) + 1;
    job = next_job;
    next.store(0, std::memory_order_relaxed);
    // Sequentially consistent with num_sleeping: either this thread sees the sleeper, or the
    // sleeper sees the new number.
    state.store(number << kNumberShift | kOpen, std::memory_order_seq_cst);
    wake_sleepers();
  }

  void wake_sleepers() {
    if (num_sleeping.load(std::memory_order_seq_cst) == 0) return;
    // A worker that checked under the mutex and saw no run is waiting once this lock is taken.
    {
      const std::lock_guard lock(mutex);
    }
    wake.notify_all();
  }

  // Closes the run. Post: no worker is in it.
  void end() {
    if ((state.fetch_and(~kOpen, std::memory_order_acq_rel) & kJoined) == 0) return;
    if (spin(awake, [this] { return is_empty(); })) return;
    std::unique_lock lock(mutex);
    state.fetch_or(kCallerSleeps, std::memory_order_acq_rel);
    idle.wait(lock, [this] { return is_empty(); });
  }

  // Joins run `number`; false if it is closed.
  bool join(std::uint32_t number) {
    std::uint64_t seen = state.load(std::memory_order_acquire);
    while (seen >> kNumberShift == number && (seen & kOpen) != 0) {
      if (state.compare_exchange_weak(seen, seen + 1, std::memory_order_acq_rel,
                                      std::memory_order_acquire)) {
        return true;
      }
    }
    return false;
  }

  void leave() {
    const std::uint64_t before = state.fetch_sub(1, std::memory_order_acq_rel);
    if ((before & kJoined) == 1 && (before & kCallerSleeps) != 0) {
      {
        const std::lock_guard lock(mutex);
      }
      idle.notify_one();
    }
  }

  // Sleeps until a run after `seen` begins; false if the pool ends.
  bool sleep(std::uint32_t seen) {
    std::unique_lock lock(mutex);
    num_sleeping.fetch_add(1, std::memory_order_seq_cst);
    const auto is_called = [&] {
      return stopping ||
             state.load(std::memory_order_seq_cst) >> kNumberShift != std::uint64_t{seen};
    };
    wake.wait(lock, is_called);
    num_sleeping.fetch_sub(1, std::memory_order_seq_cst);
    return !stopping;
  }
};

ThreadPool::ThreadPool(int num_threads)
    : num_threads_(num_threads), pid_(getpid()), shared_(std::make_unique<Shared>()) {
  if (num_threads < 1 || num_threads > kMaxThreads) {
    throw MisuseError("a pool of " + std::to_string(num_threads) + " threads: use 1 to " +
                      std::to_string(kMaxThreads));
  }
  shared_->num_threads = num_threads;
  shared_->workers.reserve(static_cast<std::size_t>(num_threads - 1));
  try {
    for (int i = 0; i < num_threads - 1; ++i) {
      shared_->workers.emplace_back([shared = shared_.get(), i] { serve(*shared, i); });
    }
  } catch (const std::system_error& error) {
    const std::size_t started = shared_->workers.size();
    stop();
    throw OutOfMemoryError("the system gives " + std::to_string(started) + " of " +
                           std::to_string(num_threads - 1) + " worker threads (" + error.what() +
                           "): use fewer threads");
  }
}

ThreadPool::~ThreadPool() {
  if (getpid() == pid_) {
    stop();
  } else {
    static_cast<void>(shared_.release());
  }
}

void ThreadPool::stop() {
  {
    const std::lock_guard lock(shared_->mutex);
    shared_->stopping = true;
  }
  shared_->wake.notify_all();
  for (std::thread& worker : shared_->workers) worker.join();
}

bool ThreadPool::is_awake() const {
  return shared_->awake.load(std::memory_order_relaxed);
}

void ThreadPool::run(std::int64_t num_items, int max_threads, Work work, void* context,
                     const ReadAhead& ahead) {
  const std::lock_guard turn(turn_);
  const auto useful = std::min<std::int64_t>({num_items, max_threads, num_threads_});
  const Job job{work, context, num_items, static_cast<int>(useful) - 1, ahead};
  if (job.num_helpers <= 0 || getpid() != pid_) {
    for (std::int64_t item = 0; item < num_items; ++item) work(context, item, 0);
    prefetch(ahead, 0, num_threads_, [] { return true; });
    return;
  }
  shared_->begin(job);
  take_items(job, shared_->next, 0);
  prefetch(ahead, 0, num_threads_, [this] { return shared_->is_empty(); });
  shared_->end();
}

void ThreadPool::serve(Shared& shared, int index) {
  std::uint32_t seen = 0;
  const auto is_called = [&] { return shared.number() != seen; };
  for (;;) {
    if (!spin(shared.awake, is_called) && !shared.sleep(seen)) return;
    seen = shared.number();
    if (!shared.join(seen)) continue;
    if (index < shared.job.num_helpers) take_items(shared.job, shared.next, index + 1);
    const ReadAhead ahead = shared.job.ahead;
    shared.leave();
    if (ahead.data == nullptr || !shared.awake.load(std::memory_order_relaxed)) continue;
    prefetch(ahead, index + 1, shared.num_threads, is_called);
  }
}

ThreadPool::Awake::Awake(ThreadPool& pool) : pool_(pool) {
  if (pool.num_threads_ == 1 || getpid() != pool.pid_) return;
  pool.shared_->awake.store(true, std::memory_order_relaxed);
  // A run without items wakes the workers before the first real one.
  const std::lock_guard turn(pool.turn_);
  pool.shared_->begin(Job{});
  pool.shared_->end();
}

ThreadPool::Awake::~Awake() {
  pool_.shared_->awake.store(false, std::memory_order_relaxed);
}

}  // namespace vmserve
