// A thread that executes jobs in the order in which they were submitted, and callers that help it.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <mutex>
#include <set>
#include <thread>

namespace vmserve {

enum class WorkerMode : std::uint8_t {
  kInline,  // submit() executes the job
  kManual,  // jobs wait for run() or wait(): for tests
  kThread,
  kIdleThread,  // a thread that runs while nothing else wants the processor
};

class Worker {
 public:
  explicit Worker(WorkerMode mode);
  ~Worker() { stop(); }
  Worker(const Worker&) = delete;
  Worker& operator=(const Worker&) = delete;

  // Jobs must not throw. Returns a number for wait().
  std::uint64_t submit(std::function<void()> job);
  // Post: the job is executed, and all before it. Executes on this thread jobs that have not begun,
  // so that the caller does not wait for a thread that gets no processor time.
  void wait(std::uint64_t id);
  // Executes up to `max_jobs` on this thread; returns their number.
  std::int64_t run(std::int64_t max_jobs);
  // Post: no job runs; later ones are dropped, as are those that had not begun.
  void stop();
  std::uint64_t last_id();

 private:
  void loop();
  bool run_one(std::uint64_t up_to);

  const WorkerMode mode_;
  std::mutex mutex_;
  std::condition_variable wake_, finished_;
  std::deque<std::pair<std::uint64_t, std::function<void()>>> queue_;
  std::set<std::uint64_t> running_;
  std::uint64_t last_id_ = 0;
  bool stopping_ = false;
  std::thread thread_;
};

}  // namespace vmserve
