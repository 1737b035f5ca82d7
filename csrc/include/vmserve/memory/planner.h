// Plans ops of one kind: stages them in the ledger, counts what they need, and undoes them.
#pragma once

#include <cstdint>
#include <vector>

#include "vmserve/memory/driver_work.h"
#include "vmserve/memory/ops.h"
#include "vmserve/memory/room.h"

namespace vmserve {

// How paged sequences get blocks when pages are short. Work in the background never makes a mode
// need more than was planned.
enum class Packing {
  kNone,       // long sequences take whole pages
  kDense,      // blocks of split pages are used first
  kCompacted,  // kDense, after compacting split pages
};

struct Assessed {
  Plan plan;
  Packing packing = Packing::kNone;
  SlotChoices taken_slots;
};

class Planner : LedgerClient {
 public:
  Planner(Ledger& ledger, DriverWork& work, Room& room, Ops& ops)
      : LedgerClient(ledger), work_(work), room_(room), ops_(ops) {}

  // Attaches that ask for more than is cached.
  std::int64_t num_lost_prefixes(const std::vector<Op>& ops) const;
  // The first block that an attach needs: of a state, that of the last token.
  std::int64_t first_block(const Op& attach) const;
  // Plans valid ops with the packing that lacks the fewest pages. Post: ledger and books are
  // unchanged.
  Assessed assess(const std::vector<Op>& ops);
  // Packs even if the ops fit: others are short of the pages.
  bool packs_always = false;

 private:
  Assessed trial(const std::vector<Op>& ops, Packing packing);
  std::int64_t max_mapping_runs(const Change& change) const;
  std::int64_t num_cached(const Sequence& seq, const Op& attach) const;

  DriverWork& work_;
  Room& room_;
  Ops& ops_;
};

}  // namespace vmserve
