#include "vmserve/memory/planner.h"

#include <algorithm>

#include "vmserve/memory/op_rules.h"

namespace vmserve {

// Tokens up to which all blocks are cached that the attach needs.
std::int64_t Planner::num_cached(const Sequence& seq, const Op& attach) const {
  std::int64_t block = first_block(attach);
  const bool is_whole = block == 0 && !config_.has_state();
  const std::int64_t end =
      is_whole ? books_.num_matchable(seq) : static_cast<std::int64_t>(seq.digests.size());
  while (block < end && ledger_.is_cached(seq.digests[block])) ++block;
  return block * config_.block_tokens;
}

std::int64_t Planner::first_block(const Op& attach) const {
  const std::int64_t last = std::max<std::int64_t>(0, attach.num_tokens - 1);
  return (config_.has_state() ? last : attach.first_token) / config_.block_tokens;
}

std::int64_t Planner::num_lost_prefixes(const std::vector<Op>& ops) const {
  return std::count_if(ops.begin(), ops.end(), [this](const Op& op) {
    return op.kind == OpKind::kAttach && op.num_tokens > num_cached(seqs_[op.seq], op);
  });
}

namespace {

// Restores the ledger and the books when it is destroyed: the pool and the counters here, the rest
// by the changes.
class Trial {
 public:
  Trial(Ledger& ledger, DriverWork& work, Ops& ops, bool dense)
      : change(ledger, *work.driver, dense, /*is_trial=*/true),
        ledger_(ledger),
        ops_(ops),
        books_change_(ledger.books),
        version_(ledger.books.version),
        recent_(ledger.recent),
        totals_(ledger.totals) {
    ledger.pool.begin_trial();
  }
  ~Trial() {
    ops_.undo_trial(change);
    books_change_.undo();
    ledger_.pool.end_trial();
    ledger_.books.version = version_;
    ledger_.recent = recent_;
    ledger_.totals = totals_;
  }
  Trial(const Trial&) = delete;
  Trial& operator=(const Trial&) = delete;

  void stage(const std::vector<Op>& ops) {
    ops_.begin(change, ops);
    for (const Op& op : ops) books_change_.stage(op, ops_.stage(change, op));
  }

  Change change;

 private:
  Ledger& ledger_;
  Ops& ops_;
  BooksChange books_change_;
  const std::uint64_t version_;
  const RecentDemand recent_;
  const MemoryCounters totals_;
};

// Counts runs of adjacent pages.
std::int64_t num_index_runs(std::vector<std::int64_t> indices) {
  std::sort(indices.begin(), indices.end());
  std::int64_t runs = 0;
  for (std::size_t i = 0; i < indices.size(); ++i) {
    runs += i > 0 && indices[i] == indices[i - 1] + 1 ? 0 : 1;
  }
  return runs;
}

}  // namespace

// Counts the page runs that the change maps or changes in one group, as an upper bound.
std::int64_t Planner::max_mapping_runs(const Change& change) const {
  std::int64_t runs = change.num_split_gaps;
  for (const Fresh& fresh : change.fresh) runs += fresh.kind == Fresh::Kind::kSlotPage ? 1 : 0;
  SlotMap last{kNoSlot, 0, false};
  PageId last_page = kNoPage;
  for (const SlotMap& map : change.maps) {
    const PageId page = slots_[map.slot].entries[map.index].page;
    const bool joins = map.slot == last.slot && map.index == last.index + 1 &&
                       page == last_page + 1 && map.read_only == last.read_only;
    runs += joins ? 0 : 1;
    last = map;
    last_page = page;
  }
  for (const Change::SavedSlot& slot : change.slots) {
    runs += num_index_runs(slot.made_writable);
    // Pages that a fork seals extend the sealed run before them.
    const bool is_taken = slots_[slot.slot].seq != slot.seq;
    runs += is_taken ? num_index_runs(slot.made_read_only) : 0;
  }
  return runs;
}

Assessed Planner::trial(const std::vector<Op>& ops, Packing packing) {
  Assessed found{{}, packing, {}};
  Plan& plan = found.plan;
  Trial trial(ledger_, work_, ops_, packing != Packing::kNone);
  Change& change = trial.change;
  if (packing == Packing::kCompacted) room_.compact_all(&change);
  const std::int64_t available = pool_.num_available();
  trial.stage(ops);
  // Idle pages that the ops take are no longer available, like fresh ones.
  const std::int64_t taken = available - pool_.num_available();
  plan.needed_pages = ops_.pages_for_fresh(change) + taken + change.num_coming;
  plan.available_pages = available + change.num_coming;
  plan.missing_slots = change.missing_slots;
  plan.missing_swap_blocks = change.missing_swap_blocks;
  plan.needed_mappings = max_mapping_runs(change) * work_.mappings_per_run();
  found.taken_slots = std::move(change.taken_slots);
  return found;
}

Assessed Planner::assess(const std::vector<Op>& ops) {
  const auto lacking = [](const Assessed& of) {
    return of.plan.needed_pages - std::max<std::int64_t>(0, of.plan.available_pages);
  };
  if (const std::int64_t lost = num_lost_prefixes(ops); lost > 0) {
    Assessed none;
    none.plan.lost_prefixes = lost;
    none.plan.version = books_.version;
    return none;
  }
  Assessed best = trial(ops, Packing::kNone);
  for (const Packing packing : {Packing::kDense, Packing::kCompacted}) {
    if ((lacking(best) <= 0 && !packs_always) || config_.blocks_per_page == 1) break;
    if (packing == Packing::kCompacted && has_attach(ops)) break;
    Assessed packed = trial(ops, packing);
    if (lacking(packed) < lacking(best)) best = packed;
  }
  Plan& plan = best.plan;
  plan.excess_pages = std::max<std::int64_t>(0, -plan.available_pages);
  plan.available_pages = std::max<std::int64_t>(0, plan.available_pages);
  plan.waiting_pages = pool_.count(PageState::kWaiting);
  plan.available_mappings = work_.available_mappings(plan.needed_mappings);
  if (plan.needed_mappings > plan.available_mappings)
    plan.waiting_pages += ledger_.num_retiring_pages();
  if (!plan.fits()) plan.waiting_pages += ledger_.num_uncompactable_pages();
  plan.version = books_.version;
  return best;
}

}  // namespace vmserve
