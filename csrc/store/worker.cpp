#include "vmserve/worker.h"

#include <sched.h>

#include <limits>
#include <utility>

namespace vmserve {

Worker::Worker(WorkerMode mode) : mode_(mode) {
  if (mode_ >= WorkerMode::kThread) thread_ = std::thread([this] { loop(); });
}

std::uint64_t Worker::submit(std::function<void()> job) {
  std::uint64_t id = 0;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    id = ++last_id_;
    if (stopping_) return id;
    queue_.emplace_back(id, std::move(job));
  }
  if (mode_ == WorkerMode::kInline) run_one(id);
  wake_.notify_one();
  return id;
}

bool Worker::run_one(std::uint64_t up_to) {
  std::pair<std::uint64_t, std::function<void()>> job;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (queue_.empty() || queue_.front().first > up_to || stopping_) return false;
    job = std::move(queue_.front());
    queue_.pop_front();
    running_.insert(job.first);
  }
  job.second();
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    running_.erase(job.first);
  }
  finished_.notify_all();
  return true;
}

void Worker::wait(std::uint64_t id) {
  while (run_one(id)) {
  }
  std::unique_lock<std::mutex> lock(mutex_);
  finished_.wait(lock, [&] {
    return (running_.empty() || *running_.begin() > id) &&
           (stopping_ || queue_.empty() || queue_.front().first > id);
  });
}

std::int64_t Worker::run(std::int64_t max_jobs) {
  std::int64_t count = 0;
  while (count < max_jobs && run_one(std::numeric_limits<std::uint64_t>::max())) ++count;
  return count;
}

void Worker::loop() {
  if (mode_ == WorkerMode::kIdleThread) {
    // Needs no privilege; a refusal changes nothing.
    const sched_param no_priority{};
    ::sched_setscheduler(0, SCHED_IDLE, &no_priority);
  }
  for (;;) {
    {
      std::unique_lock<std::mutex> lock(mutex_);
      wake_.wait(lock, [this] { return stopping_ || !queue_.empty(); });
      if (stopping_) return;
    }
    run_one(std::numeric_limits<std::uint64_t>::max());
  }
}

void Worker::stop() {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    stopping_ = true;
    queue_.clear();
  }
  wake_.notify_all();
  finished_.notify_all();
  if (thread_.joinable()) thread_.join();
  std::unique_lock<std::mutex> lock(mutex_);
  finished_.wait(lock, [this] { return running_.empty(); });
}

std::uint64_t Worker::last_id() {
  const std::lock_guard<std::mutex> lock(mutex_);
  return last_id_;
}

}  // namespace vmserve
