// The counts are exact for what apply() will do, with two exceptions on the safe side: a page of a
// parked slot that nobody has to wait for, and the copy that the last one of a fork's family
// spares, are counted as needed.
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

void Planner::validate(const std::vector<Op>& ops) const {
  std::vector<std::uint8_t> seen(seqs_.size());  // 1: an op other than kGrow; 2: kSwapOut
  for (const Op& op : ops) {
    const Sequence& seq = ledger_.open_seq(op.seq);
    require(op.num_tokens >= 0 && op.num_tokens <= config_.max_len, [&] {
      return name(op.seq) + " cannot hold " + with_commas(op.num_tokens) + " tokens: max_len is " +
             with_commas(config_.max_len);
    });
    if (op.kind == OpKind::kGrow) {
      require(seen[op.seq] != 2 && (!seq.has.swapped || seen[op.seq] == 1),
              [&] { return name(op.seq) + " is swapped out"; });
      require(op.first_token >= 0 && op.first_token <= std::max(op.num_tokens, seq.has.length),
              [&] { return name(op.seq) + " cannot give up tokens that it does not have"; });
      continue;
    }
    require(seen[op.seq] == 0, [&] { return name(op.seq) + " has two ops in one plan"; });
    seen[op.seq] = op.kind == OpKind::kSwapOut ? 2 : 1;
    const bool is_empty = seq.has.length == 0 && seq.has.blocks.empty() && !seq.has.swapped;
    switch (op.kind) {
      case OpKind::kAttach:
        require(is_empty, [&] { return name(op.seq) + " is not empty"; });
        require(op.num_tokens % config_.block_tokens == 0, [&] {
          return "cached prefixes are whole blocks of " + std::to_string(config_.block_tokens) +
                 " tokens, not " + with_commas(op.num_tokens);
        });
        require(op.num_tokens <= ledger_.num_matched(seq) * config_.block_tokens, [&] {
          return name(op.seq) + " asks for " + with_commas(op.num_tokens) +
                 " cached tokens: " + with_commas(ledger_.num_matched(seq) * config_.block_tokens) +
                 " are there";
        });
        break;
      case OpKind::kFork: {
        const Sequence& parent = ledger_.open_seq(op.other);
        require(op.other != op.seq && is_empty, [&] { return name(op.seq) + " is not empty"; });
        require(parent.tenant == seq.tenant,
                [&] { return std::string("a fork stays with its parent's tenant"); });
        require(!parent.has.swapped && seen[op.other] == 0,
                [&] { return name(op.other) + " is swapped out, or changes in the same plan"; });
        require(op.num_tokens <= parent.has.length, [&] {
          return "cannot fork " + name(op.other) + " at " + with_commas(op.num_tokens) +
                 " tokens: it holds " + with_commas(parent.has.length);
        });
        break;
      }
      case OpKind::kSwapIn:
        require(seq.has.swapped, [&] { return name(op.seq) + " is not swapped out"; });
        break;
      default:
        require(!seq.has.swapped, [&] { return name(op.seq) + " is swapped out"; });
    }
  }
}

std::vector<Op> Planner::merged(const std::vector<Op>& ops) const {
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
      result[at].num_tokens = std::max(result[at].num_tokens, op.num_tokens);
      result[at].first_token = std::max(result[at].first_token, op.first_token);
    }
  }
  // Parents last: whoever grows last keeps the block that all share, and the page behind it is the
  // parent's to fill.
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

void Planner::demand_bind(Demand& demand, const Sequence& seq, const std::vector<BlockId>& blocks,
                          std::int64_t num_tokens, bool own) const {
  if (seq.has.view == View::kVirtual || own) {
    ++demand.slots;
    const std::vector<BoundPage> bound = ledger_.bind_pages(blocks, num_tokens, own, 0);
    demand.runs += 1 + num_runs(bound);  // the first one cuts the gap around it, too
    for (const BoundPage& page : bound) {
      const bool is_contested = page.kind == BoundPage::Kind::kClaim && !own &&
                                std::find(demand.contested.begin(), demand.contested.end(),
                                          page.page) != demand.contested.end();
      if (page.kind == BoundPage::Kind::kCopy || is_contested) ++demand.pages;
    }
  }
  // Idle pages leave the pool's reserve, also those that are only copied from. What is to be idle
  // when an epoch or a command of the mapper ends, perhaps before apply(), is counted the same way.
  for (const BlockId block : blocks) {
    if (block == kNoBlock || pool_.used(pool_.page_of(block)) > 0) continue;
    if (!demand.claimed.insert(pool_.page_of(block)).second) continue;
    ++demand.pages;
    demand.coming += pool_.state(pool_.page_of(block)) == PageState::kIdle ? 0 : 1;
  }
}

void Planner::demand_paged(Demand& demand, SeqId id, std::int64_t have, std::int64_t want) const {
  const bool dense = demand.dense;
  const Sequence& seq = seqs_[id];
  const std::int32_t width = config_.blocks_per_page;
  // Blocks of the page that the sequence fills in order cost nothing more.
  std::int64_t own_left = 0;
  if (have > 0 && have == static_cast<std::int64_t>(seq.has.blocks.size())) {
    const BlockId last = seq.has.blocks.back();
    if (last != kNoBlock && !dense) own_left = ledger_.num_own_behind(id, last);
  }
  for (std::int64_t index = have; index < want; ++index) {
    if (ledger_.takes_whole_page(index, dense)) {
      ++demand.pages;
      own_left = width - 1;
    } else if (own_left > 0) {
      --own_left;
    } else {
      ++demand.blocks[seq.tenant];
    }
  }
}

void Planner::note_attached(Demand& demand, const std::vector<Op>& ops) const {
  for (const Op& op : ops) {
    if (op.kind != OpKind::kAttach || op.num_tokens == 0) continue;
    PageId last = kNoPage;
    for (const BlockId block : ledger_.matched_blocks(seqs_[op.seq], op.num_tokens)) {
      const PageId page = pool_.page_of(block);
      if (page == last) continue;
      last = page;
      std::vector<PageId>& attached = demand.attached;
      const bool again = std::find(attached.begin(), attached.end(), page) != attached.end();
      (again ? demand.contested : attached).push_back(page);
    }
  }
}

Demand Planner::demand(const std::vector<Op>& ops, bool dense) const {
  Demand demand;
  demand.dense = dense;
  note_attached(demand, ops);
  for (const Op& op : ops) {
    if (op.kind == OpKind::kFork) demand.parents.push_back(op.other);
  }
  for (const Op& op : ops) {
    op.kind == OpKind::kGrow ? demand_grow(demand, op) : demand_op(demand, op);
  }
  return demand;
}

void Planner::demand_op(Demand& demand, const Op& op) const {
  const Sequence& seq = seqs_[op.seq];
  Tentative after{seq.has.view, seq.has.length};
  bool binds = false;  // to whole pages, and to the slack behind them
  switch (op.kind) {
    case OpKind::kAttach:
      after.length = op.num_tokens;
      binds = op.num_tokens > 0;
      if (binds)
        demand_bind(demand, seq, ledger_.matched_blocks(seq, op.num_tokens), op.num_tokens, false);
      break;
    case OpKind::kFork: {
      after.length = op.num_tokens;
      binds = op.num_tokens > 0;
      std::vector<BlockId> blocks = seqs_[op.other].has.blocks;
      blocks.resize(static_cast<std::size_t>(ledger_.blocks_for(op.num_tokens)));
      if (binds) demand_bind(demand, seq, blocks, op.num_tokens, false);
      break;
    }
    case OpKind::kConvert:
      after.view = op.view;
      binds = op.view == View::kVirtual && seq.has.view == View::kPaged && seq.has.length > 0;
      if (binds) demand_bind(demand, seq, seq.has.blocks, seq.has.length, true);
      if (binds && (is_parent(demand, op.seq) || is_wanted(demand, seq))) {
        demand.pages += num_claims(seq, /*all=*/true);
      } else if (binds && demand.dense) {
        demand.pages += num_claims(seq, /*all=*/false);
      } else if (binds) {
        demand.blocks[seq.tenant] += num_claimed_gaps(seq);
      }
      break;
    case OpKind::kSwapOut:
      for (std::int64_t i = 0; i < ledger_.blocks_for(seq.has.length); ++i) {
        const BlockId block = seq.has.blocks[i];
        if (block != kNoBlock && demand.swapped.insert(block).second) ++demand.swap_blocks;
      }
      break;
    case OpKind::kSwapIn:
      demand_swap_in(demand, op.seq);
      break;
    case OpKind::kGrow:
      break;
  }
  demand.tentative[op.seq] = after;
  if (!binds || after.view == View::kPaged) return;
  const std::int64_t width = config_.page_tokens();
  const std::int64_t behind = ledger_.pages_for(after.length) - (after.length + width - 1) / width;
  demand.pages += behind;
  demand.runs += behind;
}

bool Planner::is_parent(const Demand& demand, SeqId id) {
  return std::find(demand.parents.begin(), demand.parents.end(), id) != demand.parents.end();
}

// Whether an attach of the plan finds blocks of the sequence's last page.
bool Planner::is_wanted(const Demand& demand, const Sequence& seq) const {
  const BlockId last = seq.has.blocks.empty() ? kNoBlock : seq.has.blocks.back();
  return last != kNoBlock && std::find(demand.attached.begin(), demand.attached.end(),
                                       pool_.page_of(last)) != demand.attached.end();
}

// Pages that a paged sequence would have for itself in the virtual view, but for forks of it, or
// attaches of its blocks, in the same plan (`all`), or for the packing that comes first: it may
// fill a page's gaps with other blocks.
std::int64_t Planner::num_claims(const Sequence& seq, bool all) const {
  const auto bound = ledger_.bind_pages(seq.has.blocks, seq.has.length, /*own=*/true, 0);
  return std::count_if(bound.begin(), bound.end(), [&](const BoundPage& page) {
    return page.kind == BoundPage::Kind::kClaim &&
           (all || pool_.used(page.page) < config_.blocks_per_page);
  });
}

// Blocks that split pages offer to others until the sequence has the pages for itself.
std::int64_t Planner::num_claimed_gaps(const Sequence& seq) const {
  std::int64_t gaps = 0;
  for (const BoundPage& bound :
       ledger_.bind_pages(seq.has.blocks, seq.has.length, /*own=*/true, 0)) {
    if (bound.kind != BoundPage::Kind::kClaim) continue;
    if (pool_.state(bound.page) != PageState::kSplit) continue;
    gaps += config_.blocks_per_page - pool_.used(bound.page) - pool_.cached(bound.page);
  }
  return gaps;
}

void Planner::demand_swap_in(Demand& demand, SeqId id) const {
  const Sequence& seq = seqs_[id];
  const auto total = static_cast<std::int64_t>(seq.has.swap.size());
  std::int64_t holes = 0;
  while (holes < total && seq.has.swap[holes] == kNoSwap) ++holes;
  if (seq.has.view == View::kPaged) {
    demand_paged(demand, id, holes, total);
  } else if (total > 0) {
    ++demand.slots;
    const std::int64_t pages = ledger_.pages_for(seq.has.length) - holes / config_.blocks_per_page;
    demand.pages += pages;
    demand.runs += 1 + pages;
  }
}

void Planner::demand_grow(Demand& demand, const Op& op) const {
  const Sequence& seq = seqs_[op.seq];
  const auto changed = demand.tentative.find(op.seq);
  const bool is_changed = changed != demand.tentative.end();
  const Tentative now = is_changed ? changed->second : Tentative{seq.has.view, seq.has.length};
  if (now.view == View::kVirtual) {
    const bool is_slotless = seq.has.slot == kNoSlot && (!is_changed || now.length == 0);
    if (is_slotless && (op.num_tokens == 0 || op.num_tokens > now.length)) {
      ++demand.slots;
      demand.runs += op.num_tokens > 0 ? 1 : 0;
    }
  }
  if (op.num_tokens <= now.length) return;
  if (now.view == View::kVirtual) {
    const std::int64_t have = is_changed ? ledger_.pages_for(now.length) : ledger_.num_pages(seq);
    const std::int64_t want = ledger_.pages_for(op.num_tokens);
    if (want <= have) return;
    demand.pages += want - have;
    demand.coming += is_changed ? 0 : num_coming(seq, have, want);
    demand.runs += want - have;
    return;
  }
  const std::int64_t have = is_changed ? ledger_.blocks_for(now.length)
                                       : static_cast<std::int64_t>(seq.has.blocks.size());
  demand_paged(demand, op.seq, have, ledger_.blocks_for(op.num_tokens));
  if (now.length % config_.block_tokens == 0) return;
  // The tail block is copied if others read it, or may.
  const BlockId tail = is_changed ? kNoBlock : seq.has.blocks[now.length / config_.block_tokens];
  if (is_changed || is_parent(demand, op.seq) || (tail != kNoBlock && ledger_.needs_copy(tail))) {
    ++demand.blocks[seq.tenant];
  }
}

// Pages of the slot, from `have` to `want`, that the mapper has in hand: nobody else can have them.
std::int64_t Planner::num_coming(const Sequence& seq, std::int64_t have, std::int64_t want) const {
  if (seq.has.slot == kNoSlot) return 0;
  const Slot& slot = slots_[seq.has.slot];
  std::int64_t coming = 0;
  for (std::int64_t i = have; i < std::min(want, slot.size()); ++i) {
    const PageId page = slot.entries[i].page;
    coming += page != kNoPage && pool_.state(page) == PageState::kHeld ? 1 : 0;
  }
  return coming;
}

std::int64_t Planner::pages_missing(const Demand& demand, bool squeezed) const {
  std::unordered_map<Tenant, std::int64_t> left;
  if (squeezed) squeezable_pages(left);
  std::int64_t pages = demand.pages;
  for (const auto& [tenant, blocks] : demand.blocks) {
    const auto it = left.find(tenant);
    const std::int64_t there =
        squeezed ? (it == left.end() ? 0 : it->second) : pool_.num_split_blocks(tenant);
    const std::int64_t width = config_.blocks_per_page;
    pages += (std::max<std::int64_t>(0, blocks - there) + width - 1) / width;
  }
  return pages;
}

// How many pages squeeze() would empty; `left`: the blocks that each tenant's split pages offer
// afterwards.
std::int64_t Planner::squeezable_pages(std::unordered_map<Tenant, std::int64_t>& left) const {
  std::int64_t emptied = 0;
  const std::int64_t width = config_.blocks_per_page;
  for (const auto& [tenant, pages] : ledger_.loose_pages()) {
    std::int64_t used = 0;
    for (const PageId page : pages) used += pool_.used(page);
    const std::int64_t packed = (used + width - 1) / width;
    emptied += static_cast<std::int64_t>(pages.size()) - packed;
    left[tenant] = packed * width - used;
  }
  return emptied;
}

bool Planner::attaches(const std::vector<Op>& ops) {
  return std::any_of(ops.begin(), ops.end(),
                     [](const Op& op) { return op.kind == OpKind::kAttach && op.num_tokens > 0; });
}

Plan Planner::assess(const std::vector<Op>& ops, bool& dense) const {
  Plan plan;
  Demand wanted = demand(ops, /*dense=*/false);
  plan.needed_pages = pages_missing(wanted, /*squeezed=*/false);
  std::int64_t available = pool_.num_available() + wanted.coming;
  dense = false;
  if (plan.needed_pages > std::max<std::int64_t>(0, available) && config_.blocks_per_page > 1) {
    wanted = demand(ops, /*dense=*/true);
    std::unordered_map<Tenant, std::int64_t> left;
    const bool squeezes = !attaches(ops);
    const std::int64_t emptied = squeezes ? squeezable_pages(left) : 0;
    const std::int64_t needed = pages_missing(wanted, squeezes);
    if (needed - emptied < plan.needed_pages) {
      plan.needed_pages = needed;
      available += emptied;
      dense = true;
    }
  }
  plan.available_pages = std::max<std::int64_t>(0, available);
  plan.excess_pages = std::max<std::int64_t>(0, -available);
  plan.waiting_pages = pool_.count(PageState::kWaiting);
  plan.missing_slots = std::max<std::int64_t>(0, wanted.slots - ledger_.num_usable_slots());
  plan.missing_swap_blocks = std::max<std::int64_t>(0, wanted.swap_blocks - work_.swap->num_free());
  plan.needed_mappings = wanted.runs * work_.mappings_per_run();
  plan.available_mappings = work_.available_mappings(plan.needed_mappings);
  if (plan.needed_mappings > plan.available_mappings)
    plan.waiting_pages += ledger_.num_retiring_pages();
  if (!plan.fits()) plan.waiting_pages += ledger_.num_restless_pages();
  plan.version = ledger_.version;
  return plan;
}

// Runs that the bound pages make in a slot, at most.
std::int64_t Planner::num_runs(const std::vector<BoundPage>& bound) {
  std::int64_t runs = 0;
  PageId next = kNoPage;
  for (const BoundPage& page : bound) {
    const bool is_shared = page.kind == BoundPage::Kind::kShare;
    runs += page.kind == BoundPage::Kind::kHole || (is_shared && page.page == next) ? 0 : 1;
    next = is_shared ? page.page + 1 : kNoPage;
  }
  return runs;
}

}  // namespace vmserve
