#include "vmserve/mapper.h"

#include <sched.h>

#include <algorithm>
#include <chrono>
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
// A piece of a command takes about so long. A step that comes in between waits for one piece.
constexpr double kPieceSeconds = 100e-6;
// The mapper's thread gets its turn after at most so many others.
constexpr std::uint64_t kMostOvertaking = 16;
// Share of the newest command in map_seconds().
constexpr double kNewest = 0.125;

double wall_seconds() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

FrameRun part(const FrameRun& run, std::int64_t frame, std::size_t) {
  return {run.first + frame, 1};
}

MapRun part(const MapRun& run, std::int64_t frame, std::size_t bytes) {
  return {run.addr + static_cast<std::size_t>(frame) * bytes,
          {run.frames.first + frame, 1},
          run.access,
          run.prefault};
}

AddressRun part(const AddressRun& run, std::int64_t frame, std::size_t bytes) {
  return {run.addr + static_cast<std::size_t>(frame) * bytes, bytes};
}

AccessRun part(const AccessRun& run, std::int64_t frame, std::size_t bytes) {
  return {run.addr + static_cast<std::size_t>(frame) * bytes, bytes, run.access};
}

std::int64_t num_frames(const FrameRun& run, std::size_t) {
  return run.count;
}

std::int64_t num_frames(const MapRun& run, std::size_t) {
  return run.frames.count;
}

template <typename Run>
std::int64_t num_frames(const Run& run, std::size_t bytes) {
  return static_cast<std::int64_t>(run.bytes / bytes);
}

// The runs, one for each frame.
template <typename Run>
void split(std::vector<Run>& runs, std::size_t frame_bytes) {
  std::vector<Run> parts;
  for (const Run& run : runs) {
    const std::int64_t count = num_frames(run, frame_bytes);
    for (std::int64_t i = 0; i < count; ++i) parts.push_back(part(run, i, frame_bytes));
  }
  runs = std::move(parts);
}

// Calls `call` with one piece of the runs after another. An error's `completed` counts all runs.
template <typename Run, typename Call>
void in_pieces(const std::vector<Run>& runs, PieceSize& size, DriverTurn& turn, Call call) {
  for (std::size_t first = 0; first < runs.size();) {
    const std::size_t count = std::min(size.runs(), runs.size() - first);
    const auto begin = runs.begin() + static_cast<std::ptrdiff_t>(first);
    const double start = wall_seconds();
    try {
      call(std::vector<Run>(begin, begin + static_cast<std::ptrdiff_t>(count)));
    } catch (Error& error) {
      error.completed += first;
      throw;
    }
    size.took(count, wall_seconds() - start);
    first += count;
    if (first < runs.size()) turn.give_way();
  }
}

}  // namespace

void DriverTurn::lock() {
  std::unique_lock<std::mutex> lock(mutex_);
  ++num_waiting_;
  freed_.wait(lock, [this] { return !is_taken_ && !is_overdue_; });
  --num_waiting_;
  ++num_turns_;
  is_taken_ = true;
}

void DriverTurn::unlock() {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    is_taken_ = false;
  }
  freed_.notify_all();
}

void DriverTurn::lock_behind() {
  std::unique_lock<std::mutex> lock(mutex_);
  const std::uint64_t first = num_turns_;
  freed_.wait(lock, [this, first] {
    is_overdue_ = num_turns_ - first >= kMostOvertaking;
    return !is_taken_ && (is_overdue_ || num_waiting_ == 0);
  });
  is_overdue_ = false;
  is_taken_ = true;
}

void DriverTurn::give_way() {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (num_waiting_ == 0) return;
    is_taken_ = false;
  }
  freed_.notify_all();
  lock_behind();
}

void PieceSize::took(std::size_t runs, double seconds) {
  if (seconds <= kPieceSeconds / 2) {
    runs_ = std::max(runs_, 2 * runs);
  } else if (seconds > kPieceSeconds) {
    runs_ = std::max<std::size_t>(1, runs / 2);
  }
}

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

Outcome Mapper::execute(Command command, bool gives_way) {
  Outcome outcome;
  Transaction tx(*driver_);
  const auto all = [&](const auto& runs, PieceSize& size, auto call) {
    if (gives_way) {
      in_pieces(runs, size, turn_, call);
    } else {
      call(runs);
    }
  };
  try {
    all(command.create, create_size_, [&](const auto& runs) { tx.create(runs); });
    driver_->zero(command.zero);
    all(command.map, map_size_, [&](const auto& runs) { tx.map(runs); });
    all(command.unmap, unmap_size_, [&](const auto& runs) { driver_->unmap(runs); });
    all(command.access, access_size_,
        [&](const auto& runs) { tx.set_access(runs, Access::kReadWrite); });
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

bool Mapper::run_one(std::uint64_t up_to, Who who) {
  Command command;
  {
    std::unique_lock<std::mutex> lock(queue_mutex_);
    // One at a time, so that they end in order.
    finished_.wait(lock, [this] { return !is_running_; });
    const bool gives_way = who == Who::kThread && num_waiting_ > 0;
    if (gives_way || queue_.empty() || queue_.front().id > up_to || stopping_) return false;
    command = std::move(queue_.front());
    queue_.pop_front();
    is_running_ = true;
  }
  const bool by_thread = who == Who::kThread;
  // A device takes as long for each frame of a run, a host for each call.
  if (by_thread && driver_->capabilities().asynchronous) {
    const std::size_t bytes = driver_->frame_bytes();
    split(command.create, bytes);
    split(command.map, bytes);
    split(command.unmap, bytes);
    split(command.access, bytes);
  }
  const bool is_map = command.kind == Command::Kind::kMap;
  const auto num_pages = static_cast<double>(std::max<std::size_t>(1, command.pages.size()));
  const double start = thread_cpu_seconds();
  const double wall_start = wall_seconds();
  Outcome outcome;
  {
    if (by_thread) {
      turn_.lock_behind();
    } else {
      turn_.lock();
    }
    const std::lock_guard<DriverTurn> driving(turn_, std::adopt_lock);
    outcome = execute(std::move(command), by_thread);
  }
  outcome.waited = who == Who::kWaiter;
  const double seconds = thread_cpu_seconds() - start;
  {
    const std::lock_guard<std::mutex> lock(queue_mutex_);
    is_running_ = false;
    done_id_ = outcome.command.id;
    cpu_seconds_ += seconds;
    if (is_map && by_thread) {
      const double one = (wall_seconds() - wall_start) / num_pages;
      map_seconds_ = map_seconds_ == 0 ? one : map_seconds_ + kNewest * (one - map_seconds_);
    }
    outcomes_.push_back(std::move(outcome));
  }
  finished_.notify_all();
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
      wake_.wait(lock, [this] { return stopping_ || (!queue_.empty() && num_waiting_ == 0); });
      if (stopping_) return;
    }
    run_one(kAll, Who::kThread);
  }
}

bool Mapper::wait(std::uint64_t id, bool is_waited_for) {
  {
    const std::lock_guard<std::mutex> lock(queue_mutex_);
    if (done_id_ >= id) return false;
    ++num_waiting_;
  }
  while (run_one(id, is_waited_for ? Who::kWaiter : Who::kManual)) {
  }
  {
    const std::lock_guard<std::mutex> lock(queue_mutex_);
    --num_waiting_;
  }
  wake_.notify_one();
  return true;
}

std::int64_t Mapper::run(std::int64_t max_commands) {
  std::int64_t count = 0;
  while (count < max_commands && run_one(kAll, Who::kManual)) ++count;
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

double Mapper::map_seconds() {
  const std::lock_guard<std::mutex> lock(queue_mutex_);
  return map_seconds_;
}

double Mapper::cpu_seconds() {
  const std::lock_guard<std::mutex> lock(queue_mutex_);
  return cpu_seconds_;
}

}  // namespace vmserve
