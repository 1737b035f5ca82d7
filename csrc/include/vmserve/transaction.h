// Driver calls that succeed together or are undone together.
//
// Each completed run is logged with its inverse. rollback() executes the inverses in reverse order.
// It returns those that fail; their owner quarantines the pages and tries again later.
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

// One driver run of an undo.
using UndoStep = std::variant<Create, Destroy, MapRun, AddressRun, AccessRun>;

// Undo steps that failed, in order, and the first error.
struct Unfinished {
  std::vector<UndoStep> steps;
  std::string error;
};

// Executes the steps in order and returns those that failed.
Unfinished run_steps(PageDriver& driver, const std::vector<UndoStep>& steps);

class Transaction {
 public:
  explicit Transaction(PageDriver& driver) : driver_(driver) {}

  void create(const std::vector<FrameRun>& runs);
  // NOTE: its undo creates the frames again, empty. Use it only for frames without content.
  void destroy(const std::vector<FrameRun>& runs);
  void map(const std::vector<MapRun>& runs);
  // The runs say what is mapped there, for the undo.
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
