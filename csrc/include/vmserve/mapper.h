// The mapper: one long-lived thread that talks to the driver while a step computes.
//
// It executes commands in the order in which they were given and keeps no books: pages and
// addresses in a command are set aside for it by whoever submitted it, who learns of the outcome by
// take_outcomes(). Whoever cannot wait for the thread to be scheduled executes the queue himself
// (wait), so that a command is never slower than a direct call.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "vmserve/driver.h"
#include "vmserve/transaction.h"
#include "vmserve/types.h"

namespace vmserve {

enum class MapperMode : std::uint8_t {
  kOff,     // nothing is done in the background
  kManual,  // commands wait for run() or wait(): for tests
  kThread,
};

struct Command {
  enum class Kind : std::uint8_t { kMap, kUnmap, kSeal, kGrow };
  Kind kind = Kind::kMap;
  // Executed in this order, all or (as far as the driver lets us) nothing.
  std::vector<FrameRun> create;
  std::vector<AddressRun> zero;
  std::vector<MapRun> map;
  std::vector<AddressRun> unmap;
  std::vector<AccessRun> access;  // from kReadWrite
  // For whoever submitted it.
  SlotId slot = kNoSlot;
  std::int64_t first_index = 0;
  std::vector<PageId> pages;
  std::vector<PageRun> runs;
  std::vector<std::pair<SlotId, std::int64_t>> sealed;
  std::int64_t num_mappings = 0;  // that it may make, at most
  std::uint64_t id = 0;
};

struct Outcome {
  Command command;
  bool done = false;
  bool sticky = false;
  bool waited = false;  // somebody needed it, and executed it himself
  std::string error;
  // What could not be undone of a command that failed; of an unmap, what is left to do.
  Unfinished unfinished;
  std::int64_t num_calls = 0;
};

class Mapper {
 public:
  Mapper(std::shared_ptr<PageDriver> driver, MapperMode mode);
  ~Mapper();  // executes nothing any more; joins
  Mapper(const Mapper&) = delete;
  Mapper& operator=(const Mapper&) = delete;

  MapperMode mode() const { return mode_; }
  std::uint64_t submit(Command command);
  // Post: command `id` and those before it are executed, by whom ever. True if it had to be waited
  // for. `counts`: what is executed here counts as waited for.
  bool wait(std::uint64_t id, bool counts = true);
  // Executes up to `max_commands` on this thread; how many there were.
  std::int64_t run(std::int64_t max_commands);
  std::uint64_t last_id() const { return last_id_; }
  std::vector<Outcome> take_outcomes();
  bool has_outcomes();
  // Processor time spent on commands, by whom ever, in seconds.
  double cpu_seconds();
  // Direct calls of the driver are made under this lock.
  std::unique_lock<std::mutex> lock_driver() { return std::unique_lock<std::mutex>(execution_); }

 private:
  void loop();
  bool run_one(std::uint64_t up_to, bool waited = false);
  Outcome execute(Command command);

  std::shared_ptr<PageDriver> driver_;
  MapperMode mode_;
  std::mutex execution_;  // taken before queue_mutex_
  std::mutex queue_mutex_;
  std::condition_variable wake_;
  std::deque<Command> queue_;
  std::vector<Outcome> outcomes_;
  std::uint64_t last_id_ = 0;  // of the submitter's thread
  std::uint64_t done_id_ = 0;
  double cpu_seconds_ = 0;
  bool stopping_ = false;
  std::thread thread_;
};

}  // namespace vmserve
