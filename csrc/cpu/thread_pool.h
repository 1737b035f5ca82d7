// Persistent worker threads for kernels.
#pragma once

#include <sys/types.h>

#include <cstdint>
#include <memory>
#include <mutex>

namespace vmserve {

// Memory that a pool's next run reads; waiting threads prefetch it into their cores' caches. Worker
// w prefetches from item num_items * w / num_threads on. Addresses need not be valid.
struct ReadAhead {
  const char* data = nullptr;  // null: nothing
  std::int64_t item_bytes = 0, num_items = 0;
};

// Runs items of work on the calling thread and num_threads - 1 workers, which sleep between runs.
// Any thread may execute any item. In a child after fork(), which has no workers, the caller
// executes all items.
class ThreadPool {
 public:
  using Work = void (*)(void* context, std::int64_t item, int worker);

  // While one is alive, workers spin for a while before they sleep: for runs that follow each other
  // within microseconds. Made by the thread that calls run; the pool must outlive it.
  class Awake {
   public:
    explicit Awake(ThreadPool& pool);
    ~Awake();
    Awake(const Awake&) = delete;
    Awake& operator=(const Awake&) = delete;

   private:
    ThreadPool& pool_;
  };

  // Pre: num_threads in 1 .. kMaxThreads. Throws OutOfMemoryError if a thread cannot be started.
  explicit ThreadPool(int num_threads);
  ~ThreadPool();
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  static constexpr int kMaxThreads = 1024;

  int num_threads() const { return num_threads_; }
  // Whether workers spin instead of sleeping, so that small runs are worth sharing.
  bool is_awake() const;

  // Calls work(context, i, w) once for each i in [0, num_items). w in [0, num_threads) identifies
  // the thread. Items begin in order. Post: all are done. `work` must not throw or call run.
  // Concurrent calls wait for one another. Threads that wait prefetch `ahead`: the caller until all
  // are done, workers that are kept awake until the next run.
  void run(std::int64_t num_items, int max_threads, Work work, void* context,
           const ReadAhead& ahead = {});

 private:
  struct Shared;

  static void serve(Shared& shared, int index);
  void stop();

  int num_threads_;
  pid_t pid_;
  std::mutex turn_;  // one run at a time
  // State that workers use. A child after fork() never frees it: it can neither join its parent's
  // threads nor destroy what they wait on.
  std::unique_ptr<Shared> shared_;
};

}  // namespace vmserve
