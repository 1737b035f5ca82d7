#include "vmserve/thread_pool.h"

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

// Layers follow each other within microseconds where the model is small: a short wait without
// sleeping saves a wake-up, and is over before it takes time from anybody's next operation.
constexpr int kSpins = 300;

inline void pause() {
#if defined(__x86_64__) || defined(__i386__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

struct Job {
  ThreadPool::Work work = nullptr;
  void* context = nullptr;
  std::int64_t num_items = 0;
  int num_helpers = 0;  // workers 0 .. num_helpers - 1 take part
};

void take_items(const Job& job, std::atomic<std::int64_t>& next, int worker) {
  for (;;) {
    const std::int64_t item = next.fetch_add(1, std::memory_order_relaxed);
    if (item >= job.num_items) return;
    job.work(job.context, item, worker);
  }
}

}  // namespace

struct ThreadPool::Shared {
  std::mutex mutex;
  std::condition_variable wake, idle;
  Job job;                                // mutex
  bool open = false;                      // mutex: workers may join the job
  std::atomic<int> joined = 0;            // grows under the mutex
  bool stopping = false;                  // mutex
  std::atomic<std::uint64_t> number = 0;  // of the job; written under the mutex
  std::atomic<std::int64_t> next = 0;     // item
  std::vector<std::thread> workers;
};

ThreadPool::ThreadPool(int num_threads)
    : num_threads_(num_threads), pid_(getpid()), shared_(std::make_unique<Shared>()) {
  if (num_threads < 1 || num_threads > kMaxThreads) {
    throw MisuseError("a pool of " + std::to_string(num_threads) + " threads: use 1 to " +
                      std::to_string(kMaxThreads));
  }
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

void ThreadPool::run(std::int64_t num_items, int max_threads, Work work, void* context) {
  const std::lock_guard turn(turn_);
  const auto useful = std::min<std::int64_t>({num_items, max_threads, num_threads_});
  const Job job{work, context, num_items, static_cast<int>(useful) - 1};
  if (job.num_helpers <= 0 || getpid() != pid_) {
    for (std::int64_t item = 0; item < num_items; ++item) work(context, item, 0);
    return;
  }
  Shared& shared = *shared_;
  {
    const std::lock_guard lock(shared.mutex);
    shared.job = job;
    shared.open = true;
    shared.next.store(0, std::memory_order_relaxed);
    shared.number.fetch_add(1, std::memory_order_release);
  }
  shared.wake.notify_all();
  take_items(job, shared.next, 0);
  // A worker that has not woken up by now is not waited for.
  {
    const std::lock_guard lock(shared.mutex);
    shared.open = false;
  }
  for (int i = 0; i < kSpins && shared.joined.load(std::memory_order_acquire) != 0; ++i) pause();
  if (shared.joined.load(std::memory_order_acquire) == 0) return;
  std::unique_lock lock(shared.mutex);
  shared.idle.wait(lock, [&] { return shared.joined.load() == 0; });
}

void ThreadPool::serve(Shared& shared, int index) {
  std::uint64_t seen = 0;
  for (;;) {
    for (int i = 0; i < kSpins && shared.number.load(std::memory_order_acquire) == seen; ++i) {
      pause();
    }
    std::unique_lock lock(shared.mutex);
    shared.wake.wait(lock, [&] { return shared.stopping || shared.number.load() != seen; });
    if (shared.stopping) return;
    seen = shared.number.load();
    if (!shared.open || index >= shared.job.num_helpers) continue;
    const Job job = shared.job;
    shared.joined.fetch_add(1, std::memory_order_relaxed);
    lock.unlock();
    take_items(job, shared.next, index + 1);
    // Who waits may be gone once this is 0, and may be asleep: the notice is under the mutex, for
    // the wait to begin before it or to see the 0.
    if (shared.joined.fetch_sub(1, std::memory_order_acq_rel) == 1) {
      lock.lock();
      shared.idle.notify_one();
    }
  }
}

}  // namespace vmserve
