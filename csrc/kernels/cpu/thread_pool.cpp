#include "vmserve/thread_pool.h"

#include <unistd.h>

#include <algorithm>
#include <string>

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

}  // namespace

ThreadPool::ThreadPool(int num_threads) : pid_(getpid()) {
  if (num_threads < 1 || num_threads > kMaxThreads) {
    throw MisuseError("a pool of " + std::to_string(num_threads) + " threads: use 1 to " +
                      std::to_string(kMaxThreads));
  }
  workers_.reserve(static_cast<std::size_t>(num_threads - 1));
  for (int i = 0; i < num_threads - 1; ++i) workers_.emplace_back([this, i] { serve(i); });
}

ThreadPool::~ThreadPool() {
  if (getpid() != pid_) {
    // The threads did not come along: there is nobody to join.
    for (std::thread& worker : workers_) worker.detach();
    return;
  }
  {
    const std::lock_guard lock(mutex_);
    stopping_ = true;
  }
  wake_.notify_all();
  for (std::thread& worker : workers_) worker.join();
}

void ThreadPool::run(std::int64_t num_items, int max_threads, Work work, void* context) {
  const std::lock_guard turn(turn_);
  const auto useful = std::min<std::int64_t>({num_items, max_threads, num_threads()});
  const Job job{work, context, num_items, static_cast<int>(useful) - 1};
  next_.store(0, std::memory_order_relaxed);
  if (job.num_helpers <= 0 || getpid() != pid_) {
    take_items(job, 0);
    return;
  }
  {
    const std::lock_guard lock(mutex_);
    job_ = job;
    open_ = true;
    number_.fetch_add(1, std::memory_order_release);
  }
  wake_.notify_all();
  take_items(job, 0);
  // A worker that has not woken up by now is not waited for.
  std::unique_lock lock(mutex_);
  open_ = false;
  idle_.wait(lock, [this] { return joined_ == 0; });
}

void ThreadPool::take_items(const Job& job, int worker) {
  for (;;) {
    const std::int64_t item = next_.fetch_add(1, std::memory_order_relaxed);
    if (item >= job.num_items) return;
    job.work(job.context, item, worker);
  }
}

bool ThreadPool::spin_for_job(std::uint64_t seen) const {
  for (int i = 0; i < kSpins; ++i) {
    if (number_.load(std::memory_order_acquire) != seen) return true;
    pause();
  }
  return false;
}

void ThreadPool::serve(int index) {
  std::uint64_t seen = 0;
  for (;;) {
    spin_for_job(seen);
    std::unique_lock lock(mutex_);
    wake_.wait(lock, [&] { return stopping_ || number_.load() != seen; });
    if (stopping_) return;
    seen = number_.load();
    if (!open_ || index >= job_.num_helpers) continue;
    const Job job = job_;
    ++joined_;
    lock.unlock();
    take_items(job, index + 1);
    lock.lock();
    if (--joined_ == 0) idle_.notify_one();
  }
}

}  // namespace vmserve
