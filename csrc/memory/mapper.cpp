#include "vmserve/mapper.h"

#include <sched.h>

#include <ctime>
#include <limits>

#include "vmserve/errors.h"

namespace vmserve {
namespace {

double thread_cpu_seconds() {
  timespec now{};
  ::clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
  return static_cast<double>(now.tv_sec) + static_cast<double>(now.tv_nsec) * 1e-9;
}

constexpr std::uint64_t kAll = std::numeric_limits<std::uint64_t>::max();

}  // namespace

Mapper::Mapper(std::shared_ptr<PageDriver> driver, MapperMode mode)
    : driver_(std::move(driver)), mode_(mode) {
  if (mode_ == MapperMode::kThread) thread_ = std::thread([this] { loop(); });
}

Mapper::~Mapper() {
  {
    const std::lock_guard<std::mutex> lock(queue_mutex_);
    stopping_ = true;
  }
  wake_.notify_all();
  if (thread_.joinable()) thread_.join();
}

std::uint64_t Mapper::submit(Command command) {
  std::uint64_t id = 0;
  {
    const std::lock_guard<std::mutex> lock(queue_mutex_);
    id = ++last_id_;
    command.id = id;
    queue_.push_back(std::move(command));
  }
  wake_.notify_one();
  return id;
}

Outcome Mapper::execute(Command command) {
  Outcome outcome;
  Transaction tx(*driver_);
  try {
    tx.create(command.create);
    driver_->zero(command.zero);
    tx.map(command.map);
    driver_->unmap(command.unmap);
    tx.set_access(command.access, Access::kReadWrite);
    outcome.done = true;
    outcome.num_calls = static_cast<std::int64_t>(command.map.size() + command.unmap.size() +
                                                  command.access.size());
  } catch (const Error& error) {
    const auto* refusal = dynamic_cast<const DriverError*>(&error);
    outcome.sticky = refusal != nullptr && refusal->sticky;
    outcome.error = error.what();
    if (command.kind == Command::Kind::kUnmap) {
      // Completed unmaps stay; the others are still to be done.
      outcome.unfinished.error = error.what();
      outcome.unfinished.steps.assign(
          command.unmap.begin() + static_cast<std::ptrdiff_t>(error.completed),
          command.unmap.end());
    } else {
      outcome.unfinished = tx.rollback();
    }
  } catch (const std::exception& error) {
    // Not an error of the driver (bad_alloc): the progress is unknown.
    outcome.sticky = true;
    outcome.error = error.what();
  }
  outcome.command = std::move(command);
  return outcome;
}

bool Mapper::run_one(std::uint64_t up_to, bool waited) {
  const std::lock_guard<std::mutex> executing(execution_);
  Command command;
  {
    const std::lock_guard<std::mutex> lock(queue_mutex_);
    if (queue_.empty() || queue_.front().id > up_to || stopping_) return false;
    command = std::move(queue_.front());
    queue_.pop_front();
  }
  const double start = thread_cpu_seconds();
  Outcome outcome = execute(std::move(command));
  outcome.waited = waited;
  const double seconds = thread_cpu_seconds() - start;
  const std::lock_guard<std::mutex> lock(queue_mutex_);
  done_id_ = outcome.command.id;
  cpu_seconds_ += seconds;
  outcomes_.push_back(std::move(outcome));
  return true;
}

void Mapper::loop() {
  // Without SCHED_BATCH, the woken thread would pre-empt the step that submitted the command if
  // cores are busy. Needs no privilege; a refusal changes nothing.
  const sched_param no_priority{};
  ::sched_setscheduler(0, SCHED_BATCH, &no_priority);
  for (;;) {
    {
      std::unique_lock<std::mutex> lock(queue_mutex_);
      wake_.wait(lock, [this] { return stopping_ || !queue_.empty(); });
      if (stopping_) return;
    }
    run_one(kAll);
  }
}

bool Mapper::wait(std::uint64_t id, bool is_waited_for) {
  {
    const std::lock_guard<std::mutex> lock(queue_mutex_);
    if (done_id_ >= id) return false;
  }
  // Under the execution lock, the queue's front is the next command and none is half done.
  while (run_one(id, /*waited=*/is_waited_for)) {
  }
  return true;
}

std::int64_t Mapper::run(std::int64_t max_commands) {
  std::int64_t count = 0;
  while (count < max_commands && run_one(kAll)) ++count;
  return count;
}

std::vector<Outcome> Mapper::take_outcomes() {
  const std::lock_guard<std::mutex> lock(queue_mutex_);
  std::vector<Outcome> taken;
  taken.swap(outcomes_);
  return taken;
}

bool Mapper::has_outcomes() {
  const std::lock_guard<std::mutex> lock(queue_mutex_);
  return !outcomes_.empty();
}

double Mapper::cpu_seconds() {
  const std::lock_guard<std::mutex> lock(queue_mutex_);
  return cpu_seconds_;
}

}  // namespace vmserve
