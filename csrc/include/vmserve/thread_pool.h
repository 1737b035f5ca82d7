// A few persistent worker threads for kernels.
#pragma once

#include <sys/types.h>

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <thread>
#include <vector>

namespace vmserve {

// Runs items of work on the caller's thread and num_threads - 1 others, which sleep in between.
// Who executes an item is left to chance; nothing else is. In a child after fork(), which has no
// workers, the caller does everything.
class ThreadPool {
 public:
  using Work = void (*)(void* context, std::int64_t item, int worker);

  // Pre: num_threads in 1 .. kMaxThreads.
  explicit ThreadPool(int num_threads);
  ~ThreadPool();
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  static constexpr int kMaxThreads = 1024;

  int num_threads() const { return static_cast<int>(workers_.size()) + 1; }

  // work(context, i, w) for all i in [0, num_items), each once; w in [0, num_threads) is no two
  // threads' at a time. Items begin in order. Post: all are done. `work` must not throw, nor call
  // run. Calls from several threads take turns.
  void run(std::int64_t num_items, int max_threads, Work work, void* context);

 private:
  struct Job {
    Work work = nullptr;
    void* context = nullptr;
    std::int64_t num_items = 0;
    int num_helpers = 0;  // workers 0 .. num_helpers - 1 take part
  };

  void serve(int index);
  void take_items(const Job& job, int worker);
  bool spin_for_job(std::uint64_t seen) const;

  std::mutex turn_;  // one run at a time
  std::mutex mutex_;
  std::condition_variable wake_, idle_;
  Job job_;                                // mutex_
  bool open_ = false;                      // mutex_: workers may join the job
  int joined_ = 0;                         // mutex_
  bool stopping_ = false;                  // mutex_
  std::atomic<std::uint64_t> number_ = 0;  // of the job; written under mutex_
  std::atomic<std::int64_t> next_ = 0;
  pid_t pid_;
  std::vector<std::thread> workers_;
};

}  // namespace vmserve
