// A few persistent worker threads for kernels.
#pragma once

#include <sys/types.h>

#include <cstdint>
#include <memory>
#include <mutex>

namespace vmserve {

// Runs items of work on the caller's thread and num_threads - 1 others, which sleep in between.
// Who executes an item is left to chance; nothing else is. In a child after fork(), which has no
// workers, the caller does everything.
class ThreadPool {
 public:
  using Work = void (*)(void* context, std::int64_t item, int worker);

  // While one lives, workers look for the next run for a while before they sleep: for calls that
  // follow each other within microseconds. Made by the one thread that runs; the pool outlives it.
  class Awake {
   public:
    explicit Awake(ThreadPool& pool);
    ~Awake();
    Awake(const Awake&) = delete;
    Awake& operator=(const Awake&) = delete;

   private:
    ThreadPool& pool_;
  };

  // Pre: num_threads in 1 .. kMaxThreads. Throws OutOfMemoryError when the system has no more.
  explicit ThreadPool(int num_threads);
  ~ThreadPool();
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  static constexpr int kMaxThreads = 1024;

  int num_threads() const { return num_threads_; }
  // Whether workers wait without sleeping, so that little work is worth sharing.
  bool is_awake() const;

  // work(context, i, w) for all i in [0, num_items), each once; w in [0, num_threads) is no two
  // threads' at a time. Items begin in order. Post: all are done. `work` must not throw, nor call
  // run. Calls from several threads take turns.
  void run(std::int64_t num_items, int max_threads, Work work, void* context);

 private:
  struct Shared;

  static void serve(Shared& shared, int index);
  void stop();

  int num_threads_;
  pid_t pid_;
  std::mutex turn_;  // one run at a time
  // What the workers use. A child after fork() leaves it be: it can neither join its parent's
  // threads nor destroy what they wait on.
  std::unique_ptr<Shared> shared_;
};

}  // namespace vmserve
