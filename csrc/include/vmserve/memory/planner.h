// What ops need and what there is: the ops are staged, counted, and undone to the bit.
#pragma once

#include <cstdint>
#include <vector>

#include "vmserve/memory/driver_work.h"
#include "vmserve/memory/ops.h"
#include "vmserve/memory/room.h"

namespace vmserve {

// What is done for paged sequences where pages are short. Whatever happens behind callers, none
// of these needs more than it did.
enum class Packing {
  kNone,      // long ones take whole pages
  kDense,     // blocks of split pages go first
  kSqueezed,  // and split pages are packed before
};

struct Assessed {
  Plan plan;
  Packing packing = Packing::kNone;
};

class Planner : OnLedger {
 public:
  Planner(Ledger& ledger, DriverWork& work, Room& room, Ops& ops)
      : OnLedger(ledger), work_(work), room_(room), ops_(ops) {}

  void validate(const std::vector<Op>& ops) const;
  std::vector<Op> merged(const std::vector<Op>& ops) const;
  static bool attaches(const std::vector<Op>& ops);
  // How the ops need the least of what is short. Post: the books are as before.
  Assessed assess(const std::vector<Op>& ops);

 private:
  Assessed trial(const std::vector<Op>& ops, Packing packing);
  std::int64_t num_runs(const Change& change) const;

  DriverWork& work_;
  Room& room_;
  Ops& ops_;
};

}  // namespace vmserve
