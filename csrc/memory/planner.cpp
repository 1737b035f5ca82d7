#include "vmserve/memory/planner.h"

#include <algorithm>

#include "vmserve/memory/require.h"
#include "vmserve/text.h"
namespace vmserve {
namespace {

std::string name(SeqId seq) {
  return "sequence " + std::to_string(seq);
}

}  // namespace

// Tokens up to which all blocks are cached that the attach needs.
std::int64_t Planner::num_cached(const Sequence& seq, const Op& attach) const {
  std::int64_t block = first_block(attach);
  if (block == 0 && !config_.has_state()) return ledger_.num_matched(seq) * config_.block_tokens;
  const auto end = static_cast<std::int64_t>(seq.digests.size());
  while (block < end && pool_.find(seq.digests[block]) != kNoBlock) ++block;
  return block * config_.block_tokens;
}

std::int64_t Planner::first_block(const Op& attach) const {
  const std::int64_t last = std::max<std::int64_t>(0, attach.num_tokens - 1);
  return (config_.has_state() ? last : attach.first_token) / config_.block_tokens;
}

std::int64_t Planner::num_lost_prefixes(const std::vector<Op>& ops) const {
  return std::count_if(ops.begin(), ops.end(), [this](const Op& op) {
    return op.kind == OpKind::kAttach && op.num_tokens > num_cached(ledger_.open_seq(op.seq), op);
  });
}

void Planner::validate(const std::vector<Op>& ops) const {
  std::vector<std::uint8_t> seen(seqs_.size());  // 1: an op other than kGrow; 2: kSwapOut
  for (const Op& op : ops) {
    const Sequence& seq = ledger_.open_seq(op.seq);
    require(op.num_tokens >= 0 && op.num_tokens <= config_.max_len, [&] {
      return name(op.seq) + " cannot hold " + with_commas(op.num_tokens) + " tokens: max_len is " +
             with_commas(config_.max_len);
    });
    if (op.kind == OpKind::kGrow) {
      require(seen[op.seq] != 2 && (!seq.kv.swapped || seen[op.seq] == 1),
              [&] { return name(op.seq) + " is swapped out"; });
      require(op.num_drafted >= 0 && op.num_drafted <= op.num_tokens,
              [&] { return name(op.seq) + " grows by fewer tokens than are drafted"; });
      require(op.num_drafted == 0 || !config_.has_state(),
              [&] { return name(op.seq) + " has a state, which rejected drafts would change"; });
      require(op.first_token >= 0 && op.first_token <= std::max(op.kept_tokens(), seq.kv.length),
              [&] { return name(op.seq) + " cannot drop tokens that it does not have"; });
      continue;
    }
    require(seen[op.seq] == 0, [&] { return name(op.seq) + " has two ops in one plan"; });
    seen[op.seq] = op.kind == OpKind::kSwapOut ? 2 : 1;
    const bool is_empty = seq.kv.length == 0 && seq.kv.blocks.empty() && !seq.kv.swapped;
    switch (op.kind) {
      case OpKind::kAttach:
        require(is_empty, [&] { return name(op.seq) + " is not empty"; });
        require(op.num_tokens % config_.block_tokens == 0, [&] {
          return "a cached prefix has whole blocks of " + std::to_string(config_.block_tokens) +
                 " tokens, not " + with_commas(op.num_tokens);
        });
        break;
      case OpKind::kFork: {
        const Sequence& parent = ledger_.open_seq(op.other);
        require(op.other != op.seq && is_empty, [&] { return name(op.seq) + " is not empty"; });
        require(parent.tenant == seq.tenant,
                [&] { return std::string("a fork must have its parent's tenant"); });
        require(!parent.kv.swapped && seen[op.other] == 0,
                [&] { return name(op.other) + " is swapped out, or changes in the same plan"; });
        require(op.num_tokens <= parent.kv.length, [&] {
          return "cannot fork " + name(op.other) + " at " + with_commas(op.num_tokens) +
                 " tokens: it holds " + with_commas(parent.kv.length);
        });
        require(!config_.has_state() || op.num_tokens == 0 || op.num_tokens == parent.kv.length,
                [&] {
                  return "cannot fork " + name(op.other) + " at " + with_commas(op.num_tokens) +
                         " tokens: its state is that of " + with_commas(parent.kv.length);
                });
        break;
      }
      case OpKind::kSwapIn:
        require(seq.kv.swapped, [&] { return name(op.seq) + " is not swapped out"; });
        break;
      default:
        require(!seq.kv.swapped, [&] { return name(op.seq) + " is swapped out"; });
    }
  }
}

std::vector<Op> Planner::merge_grows(const std::vector<Op>& ops) const {
  std::vector<Op> result;
  result.reserve(ops.size());
  std::vector<std::int32_t> grows(seqs_.size(), -1);
  for (const Op& op : ops) {
    ledger_.open_seq(op.seq);
    if (op.kind != OpKind::kGrow) result.push_back(op);
  }
  const auto num_others = static_cast<std::ptrdiff_t>(result.size());
  for (const Op& op : ops) {
    if (op.kind != OpKind::kGrow) continue;
    std::int32_t& at = grows[op.seq];
    if (at < 0) {
      at = static_cast<std::int32_t>(result.size());
      result.push_back(op);
    } else {
      const std::int64_t kept = std::max(result[at].kept_tokens(), op.kept_tokens());
      result[at].num_tokens = std::max(result[at].num_tokens, op.num_tokens);
      result[at].num_drafted = result[at].num_tokens - kept;
      result[at].first_token = std::max(result[at].first_token, op.first_token);
    }
  }
  // Parents grow last: the last to grow keeps the shared block without a copy, and only the parent
  // owns the rest of that page.
  std::vector<bool> forks(num_others > 0 ? seqs_.size() : 0);
  bool any = false;
  for (const Op& op : result) {
    if (op.kind != OpKind::kFork) continue;
    ledger_.open_seq(op.other);
    forks[op.other] = any = true;
  }
  if (any) {
    std::stable_partition(result.begin() + num_others, result.end(),
                          [&](const Op& op) { return !forks[op.seq]; });
  }
  return result;
}

// Compacting evicts cached blocks of split pages, which an attach relies on.
bool Planner::has_attach(const std::vector<Op>& ops) {
  return std::any_of(ops.begin(), ops.end(),
                     [](const Op& op) { return op.kind == OpKind::kAttach && op.num_tokens > 0; });
}

namespace {

// Restores the ledger when it is destroyed: the pool and the counters here, the rest by the change.
class Trial {
 public:
  Trial(Ledger& ledger, DriverWork& work, Ops& ops, bool dense)
      : change(ledger, *work.driver, dense, /*is_trial=*/true),
        ledger_(ledger),
        ops_(ops),
        version_(ledger.version),
        recent_(ledger.recent),
        totals_(ledger.totals) {
    ledger.pool.begin_trial();
  }
  ~Trial() {
    ops_.undo_trial(change);
    ledger_.pool.end_trial();
    ledger_.version = version_;
    ledger_.recent = recent_;
    ledger_.totals = totals_;
  }
  Trial(const Trial&) = delete;
  Trial& operator=(const Trial&) = delete;

  Change change;

 private:
  Ledger& ledger_;
  Ops& ops_;
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
  ops_.stage(change, ops);
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
    none.plan.version = ledger_.version;
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
  plan.version = ledger_.version;
  return best;
}

}  // namespace vmserve
