// Driver calls that happen together or not at all.
//
// Every run that a driver completes is logged with its inverse. A rollback runs the inverses,
// last first; what refuses to be undone is returned, so that its owner can quarantine the pages
// concerned and try again later.
#pragma once

#include <string>
#include <variant>
#include <vector>

#include "vmserve/driver.h"

namespace vmserve {

struct Create {
  FrameRun frames;
};
struct Destroy {
  FrameRun frames;
};

// One driver run that is still to be done to get back to a known state.
using UndoStep = std::variant<Create, Destroy, MapRun, AddressRun, AccessRun>;

// What a rollback could not undo: the steps still to run, in order, and the first refusal.
struct Unfinished {
  std::vector<UndoStep> steps;
  std::string error;
};

// Runs the steps in order; those that fail are returned.
Unfinished run_steps(PageDriver& driver, const std::vector<UndoStep>& steps);

class Transaction {
 public:
  explicit Transaction(PageDriver& driver) : driver_(driver) {}

  void create(const std::vector<FrameRun>& runs);
  // NOTE: undone by creating the frames again, empty: only for frames without content.
  void destroy(const std::vector<FrameRun>& runs);
  void map(const std::vector<MapRun>& runs);
  // The runs say what is mapped there now, so that it can be mapped again.
  void unmap(const std::vector<MapRun>& runs);
  void set_access(const std::vector<AccessRun>& runs, Access before);

  void commit() noexcept { undo_.clear(); }
  // Post: the log is empty.
  Unfinished rollback();

 private:
  template <typename Run, typename Call, typename Inverse>
  void execute(const std::vector<Run>& runs, Call call, Inverse inverse);

  PageDriver& driver_;
  std::vector<UndoStep> undo_;
};

}  // namespace vmserve
