// The mapper: a thread that calls the driver while a step computes.
//
// It executes commands in order and has no ledger. The submitter reserves the pages and addresses
// of a command and gets its result from take_outcomes(). wait() executes the queue on the caller's
// thread, so that a command is never slower than a direct call.
//
// A step must not wait long for the mapper. Other threads that wait for the driver get it before
// the mapper's thread, which releases it after every piece of a command.
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
  kOff,     // no background work
  kManual,  // commands wait for run() or wait(): for tests
  kThread,
};

struct Command {
  enum class Kind : std::uint8_t { kMap, kUnmap, kSeal, kGrow };
  Kind kind = Kind::kMap;
  // Executed in this order, completely or, if the driver can undo it, not at all.
  std::vector<FrameRun> create;
  std::vector<AddressRun> zero;
  std::vector<MapRun> map;
  std::vector<AddressRun> unmap;
  std::vector<AccessRun> access;  // all are kReadWrite before
  // For the submitter.
  SlotId slot = kNoSlot;
  std::int64_t first_index = 0;
  std::vector<PageId> pages;
  std::vector<PageRun> runs;
  std::vector<std::pair<SlotId, std::int64_t>> sealed;
  std::int64_t num_mappings = 0;  // upper bound of new mappings
  std::uint64_t id = 0;
};

struct Outcome {
  Command command;
  bool done = false;
  bool sticky = false;
  bool waited = false;  // executed by a caller of wait() which needed it
  std::string error;
  // Undo steps that failed; of an unmap, the runs still to unmap.
  Unfinished unfinished;
  std::int64_t num_calls = 0;
};

// The right to call the driver. The mapper's thread takes it after others, but does not wait for
// ever.
class DriverTurn {
 public:
  void lock();
  void unlock();
  void lock_behind();
  // Lets waiting threads go first. Pre: the caller has the turn. Post: it has it again.
  void give_way();

 private:
  std::mutex mutex_;
  std::condition_variable freed_;
  int num_waiting_ = 0;          // in lock()
  std::uint64_t num_turns_ = 0;  // taken by lock()
  bool is_taken_ = false;
  bool is_overdue_ = false;  // the thread in lock_behind() is next
};

// The number of runs of a kind of driver call in one piece, from the time that earlier runs took.
class PieceSize {
 public:
  std::size_t runs() const { return runs_; }
  void took(std::size_t runs, double seconds);

 private:
  std::size_t runs_ = 1;
};

class Mapper {
 public:
  Mapper(std::shared_ptr<PageDriver> driver, MapperMode mode);
  ~Mapper();  // joins; queued commands are dropped
  Mapper(const Mapper&) = delete;
  Mapper& operator=(const Mapper&) = delete;

  MapperMode mode() const { return mode_; }
  std::uint64_t submit(Command command);
  // Post: command `id` and all before it are executed. True if they were not yet. `is_waited_for`:
  // mark the commands executed here as waited for.
  bool wait(std::uint64_t id, bool is_waited_for = true);
  // Executes up to `max_commands` on this thread; returns their number.
  std::int64_t run(std::int64_t max_commands);
  std::uint64_t last_id() const { return last_id_; }
  std::vector<Outcome> take_outcomes();
  bool has_outcomes();
  // CPU seconds of commands, on all threads.
  double cpu_seconds();
  // Protects direct driver calls against the mapper's.
  std::unique_lock<DriverTurn> lock_driver() { return std::unique_lock<DriverTurn>(turn_); }
  // Wall seconds of a kMap command of one page on the mapper's thread, recently; 0 if unknown.
  double map_seconds();

 private:
  enum class Who : std::uint8_t { kThread, kManual, kWaiter };
  void loop();
  bool run_one(std::uint64_t up_to, Who who);
  Outcome execute(Command command, bool gives_way);

  std::shared_ptr<PageDriver> driver_;
  MapperMode mode_;
  DriverTurn turn_;
  // Used only by the mapper's thread.
  PieceSize create_size_, map_size_, unmap_size_, access_size_;
  std::mutex queue_mutex_;  // never held while a driver call runs
  std::condition_variable wake_;
  std::condition_variable finished_;
  bool is_running_ = false;  // a command is being executed
  int num_waiting_ = 0;      // in wait(): the thread begins no command
  double map_seconds_ = 0;
  std::deque<Command> queue_;
  std::vector<Outcome> outcomes_;
  std::uint64_t last_id_ = 0;  // used only by the submitter
  std::uint64_t done_id_ = 0;
  double cpu_seconds_ = 0;
  bool stopping_ = false;
  std::thread thread_;
};

}  // namespace vmserve
