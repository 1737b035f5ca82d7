// What ops need and what there is: reads only.
#pragma once

#include <cstdint>
#include <unordered_map>
#include <unordered_set>
#include <vector>

#include "vmserve/memory/driver_work.h"

namespace vmserve {

// What a sequence is like after the plan's ops so far.
struct Tentative {
  View view;
  std::int64_t length;
};

struct Demand {
  std::int64_t pages = 0;   // fresh ones, and idle ones that are claimed
  std::int64_t coming = 0;  // of those, ones that are nobody else's, though not idle yet
  std::int64_t slots = 0;
  std::int64_t swap_blocks = 0;
  std::int64_t runs = 0;  // of pages that slots are to show, of one group, at most
  std::unordered_map<Tenant, std::int64_t> blocks;
  // While it is counted.
  bool dense = false;
  std::unordered_map<SeqId, Tentative> tentative;
  std::unordered_set<PageId> claimed;
  std::unordered_set<BlockId> swapped;
  std::vector<SeqId> parents;
  std::vector<PageId> attached;   // pages of which a kAttach of the plan finds blocks
  std::vector<PageId> contested;  // of those, ones that another kAttach would like to have, too
};

class Planner : OnLedger {
 public:
  Planner(Ledger& ledger, const DriverWork& work) : OnLedger(ledger), work_(work) {}

  void validate(const std::vector<Op>& ops) const;
  std::vector<Op> merged(const std::vector<Op>& ops) const;
  static bool attaches(const std::vector<Op>& ops);
  Plan assess(const std::vector<Op>& ops, bool& dense) const;

 private:
  Demand demand(const std::vector<Op>& ops, bool dense) const;
  void demand_op(Demand& demand, const Op& op) const;
  void demand_grow(Demand& demand, const Op& op) const;
  static bool is_parent(const Demand& demand, SeqId id);
  std::int64_t num_claims(const Sequence& seq, bool all) const;
  std::int64_t num_claimed_gaps(const Sequence& seq) const;
  void demand_swap_in(Demand& demand, SeqId id) const;
  void demand_bind(Demand& demand, const Sequence& seq, const std::vector<BlockId>& blocks,
                   std::int64_t num_tokens, bool own) const;
  void demand_paged(Demand& demand, SeqId id, std::int64_t have, std::int64_t want) const;
  std::int64_t num_coming(const Sequence& seq, std::int64_t have, std::int64_t want) const;
  void note_attached(Demand& demand, const std::vector<Op>& ops) const;
  bool is_wanted(const Demand& demand, const Sequence& seq) const;
  std::int64_t pages_missing(const Demand& demand, bool squeezed) const;
  std::int64_t squeezable_pages(std::unordered_map<Tenant, std::int64_t>& left) const;
  static std::int64_t num_runs(const std::vector<BoundPage>& bound);

  const DriverWork& work_;
};

}  // namespace vmserve
