// What ops need and what there is: reads only.
//
// The counts are exact for what apply() will do, with two exceptions on the safe side: a page of a
// parked slot that nobody has to wait for, and the copy that the last one of a fork's family
// spares, are counted as needed.
#include <algorithm>

#include "vmserve/errors.h"
#include "vmserve/kv_memory.h"
#include "vmserve/text.h"

namespace vmserve {
namespace {

// `text` is a function: nobody builds a message that nobody reads.
template <typename Text>
void require(bool holds, Text text) {
  if (!holds) throw MisuseError(text());
}

std::string name(SeqId seq) {
  return "sequence " + std::to_string(seq);
}

}  // namespace

void KVMemory::validate(const std::vector<Op>& ops) const {
  std::vector<std::uint8_t> seen(seqs_.size());  // 1: an op other than kGrow; 2: kSwapOut
  for (const Op& op : ops) {
    const Sequence& seq = open_seq(op.seq);
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
        require(op.num_tokens <= num_matched(seq) * config_.block_tokens, [&] {
          return name(op.seq) + " asks for " + with_commas(op.num_tokens) +
                 " cached tokens: " + with_commas(num_matched(seq) * config_.block_tokens) +
                 " are there";
        });
        break;
      case OpKind::kFork: {
        const Sequence& parent = open_seq(op.other);
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

std::vector<Op> KVMemory::merged(const std::vector<Op>& ops) const {
  std::vector<Op> result;
  result.reserve(ops.size());
  std::vector<std::int32_t> grows(seqs_.size(), -1);
  for (const Op& op : ops) {
    open_seq(op.seq);
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
    open_seq(op.other);
    forks[op.other] = any = true;
  }
  if (any) {
    std::stable_partition(result.begin() + num_others, result.end(),
                          [&](const Op& op) { return !forks[op.seq]; });
  }
  return result;
}

std::vector<BlockId> KVMemory::matched_blocks(const Sequence& seq, std::int64_t num_tokens) const {
  std::vector<BlockId> blocks;
  for (std::int64_t i = 0; i < num_tokens / config_.block_tokens; ++i) {
    blocks.push_back(pool_.find(seq.digests[i]));
  }
  return blocks;
}

bool KVMemory::takes_whole_page(std::int64_t block_index, bool dense) const {
  // Short sequences share split pages; a longer one takes whole pages where they start, so that
  // its blocks fill them in order and the virtual view costs no copy.
  return !dense && config_.blocks_per_page > 1 && block_index >= config_.blocks_per_page &&
         block_index % config_.blocks_per_page == 0;
}

// Whether the prefix cache would lose something with the page's blocks from `count` on.
bool KVMemory::offers_more(PageId page, std::int32_t count) const {
  for (std::int32_t j = count; j < config_.blocks_per_page; ++j) {
    if (pool_.is_published(pool_.first_block(page) + j)) return true;
  }
  return false;
}

// Whether an epoch that runs may read what clearing the page's other blocks, which is done at once,
// would take from it. (Writing them would not: the kernels that do come after it.)
bool KVMemory::is_clearing_late(PageId page) const {
  return config_.zero_policy == ZeroPolicy::kAlways && pool_.retire(page) > completed_;
}

std::vector<KVMemory::BoundPage> KVMemory::bind_pages(const std::vector<BlockId>& blocks,
                                                      std::int64_t num_tokens, bool own,
                                                      std::int32_t held) const {
  const std::int32_t width = config_.blocks_per_page;
  const std::int64_t total = blocks_for(num_tokens);
  std::vector<BoundPage> bound;
  for (std::int64_t first = 0; first < total; first += width) {
    const auto count = static_cast<std::int32_t>(std::min<std::int64_t>(width, total - first));
    std::int32_t present = 0;
    bool in_order = true;
    const PageId page = blocks[first] == kNoBlock ? kNoPage : pool_.page_of(blocks[first]);
    for (std::int32_t j = 0; j < count; ++j) {
      present += blocks[first + j] != kNoBlock ? 1 : 0;
      in_order = in_order && page != kNoPage && blocks[first + j] == pool_.first_block(page) + j;
    }
    using Kind = BoundPage::Kind;
    const bool is_full = (first + width) * config_.block_tokens <= num_tokens;
    // All given up; what is still to be written behind it needs memory all the same.
    if (present == 0 && is_full) {
      bound.push_back({Kind::kHole, kNoPage, 0});
    } else if (in_order && is_full) {
      bound.push_back({Kind::kShare, page, count});
    } else if (in_order && pool_.total_refs(page) == (own ? count : 0) &&
               !offers_more(page, count) && pool_.held(page) <= held && !is_clearing_late(page) &&
               pool_.copying(page) == 0) {
      bound.push_back({Kind::kClaim, page, count});
    } else {
      bound.push_back({Kind::kCopy, kNoPage, count});
    }
  }
  return bound;
}

void KVMemory::demand_bind(Demand& demand, const Sequence& seq, const std::vector<BlockId>& blocks,
                           std::int64_t num_tokens, bool own) const {
  if (seq.has.view == View::kVirtual || own) {
    ++demand.slots;
    const std::vector<BoundPage> bound = bind_pages(blocks, num_tokens, own, 0);
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

void KVMemory::demand_paged(Demand& demand, SeqId id, std::int64_t have, std::int64_t want) const {
  const bool dense = demand.dense;
  const Sequence& seq = seqs_[id];
  const std::int32_t width = config_.blocks_per_page;
  // Blocks of the page that the sequence fills in order cost nothing more.
  std::int64_t own_left = 0;
  if (have > 0 && have == static_cast<std::int64_t>(seq.has.blocks.size())) {
    const BlockId last = seq.has.blocks.back();
    if (last != kNoBlock && !dense) own_left = num_own_behind(id, last);
  }
  for (std::int64_t index = have; index < want; ++index) {
    if (takes_whole_page(index, dense)) {
      ++demand.pages;
      own_left = width - 1;
    } else if (own_left > 0) {
      --own_left;
    } else {
      ++demand.blocks[seq.tenant];
    }
  }
}

void KVMemory::note_attached(Demand& demand, const std::vector<Op>& ops) const {
  for (const Op& op : ops) {
    if (op.kind != OpKind::kAttach || op.num_tokens == 0) continue;
    PageId last = kNoPage;
    for (const BlockId block : matched_blocks(seqs_[op.seq], op.num_tokens)) {
      const PageId page = pool_.page_of(block);
      if (page == last) continue;
      last = page;
      std::vector<PageId>& attached = demand.attached;
      const bool again = std::find(attached.begin(), attached.end(), page) != attached.end();
      (again ? demand.contested : attached).push_back(page);
    }
  }
}

KVMemory::Demand KVMemory::demand(const std::vector<Op>& ops, bool dense) const {
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

void KVMemory::demand_op(Demand& demand, const Op& op) const {
  const Sequence& seq = seqs_[op.seq];
  Tentative after{seq.has.view, seq.has.length};
  bool binds = false;  // to whole pages, and to the slack behind them
  switch (op.kind) {
    case OpKind::kAttach:
      after.length = op.num_tokens;
      binds = op.num_tokens > 0;
      if (binds) demand_bind(demand, seq, matched_blocks(seq, op.num_tokens), op.num_tokens, false);
      break;
    case OpKind::kFork: {
      after.length = op.num_tokens;
      binds = op.num_tokens > 0;
      std::vector<BlockId> blocks = seqs_[op.other].has.blocks;
      blocks.resize(static_cast<std::size_t>(blocks_for(op.num_tokens)));
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
      for (std::int64_t i = 0; i < blocks_for(seq.has.length); ++i) {
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
  const std::int64_t behind = pages_for(after.length) - (after.length + width - 1) / width;
  demand.pages += behind;
  demand.runs += behind;
}

bool KVMemory::is_parent(const Demand& demand, SeqId id) {
  return std::find(demand.parents.begin(), demand.parents.end(), id) != demand.parents.end();
}

// Whether an attach of the plan finds blocks of the sequence's last page.
bool KVMemory::is_wanted(const Demand& demand, const Sequence& seq) const {
  const BlockId last = seq.has.blocks.empty() ? kNoBlock : seq.has.blocks.back();
  return last != kNoBlock && std::find(demand.attached.begin(), demand.attached.end(),
                                       pool_.page_of(last)) != demand.attached.end();
}

// Pages that a paged sequence would have for itself in the virtual view, but for forks of it, or
// attaches of its blocks, in the same plan (`all`), or for the packing that comes first: it may
// fill a page's gaps with other blocks.
std::int64_t KVMemory::num_claims(const Sequence& seq, bool all) const {
  const auto bound = bind_pages(seq.has.blocks, seq.has.length, /*own=*/true, 0);
  return std::count_if(bound.begin(), bound.end(), [&](const BoundPage& page) {
    return page.kind == BoundPage::Kind::kClaim &&
           (all || pool_.used(page.page) < config_.blocks_per_page);
  });
}

// Blocks that split pages offer to others until the sequence has the pages for itself.
std::int64_t KVMemory::num_claimed_gaps(const Sequence& seq) const {
  std::int64_t gaps = 0;
  for (const BoundPage& bound : bind_pages(seq.has.blocks, seq.has.length, /*own=*/true, 0)) {
    if (bound.kind != BoundPage::Kind::kClaim) continue;
    if (pool_.state(bound.page) != PageState::kSplit) continue;
    gaps += config_.blocks_per_page - pool_.used(bound.page) - pool_.cached(bound.page);
  }
  return gaps;
}

void KVMemory::demand_swap_in(Demand& demand, SeqId id) const {
  const Sequence& seq = seqs_[id];
  const auto total = static_cast<std::int64_t>(seq.has.swap.size());
  std::int64_t holes = 0;
  while (holes < total && seq.has.swap[holes] == kNoSwap) ++holes;
  if (seq.has.view == View::kPaged) {
    demand_paged(demand, id, holes, total);
  } else if (total > 0) {
    ++demand.slots;
    const std::int64_t pages = pages_for(seq.has.length) - holes / config_.blocks_per_page;
    demand.pages += pages;
    demand.runs += 1 + pages;
  }
}

void KVMemory::demand_grow(Demand& demand, const Op& op) const {
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
    const std::int64_t have = is_changed ? pages_for(now.length) : num_pages(seq);
    const std::int64_t want = pages_for(op.num_tokens);
    if (want <= have) return;
    demand.pages += want - have;
    demand.coming += is_changed ? 0 : num_coming(seq, have, want);
    demand.runs += want - have;
    return;
  }
  const std::int64_t have =
      is_changed ? blocks_for(now.length) : static_cast<std::int64_t>(seq.has.blocks.size());
  demand_paged(demand, op.seq, have, blocks_for(op.num_tokens));
  if (now.length % config_.block_tokens == 0) return;
  // The tail block is copied if others read it, or may.
  const BlockId tail = is_changed ? kNoBlock : seq.has.blocks[now.length / config_.block_tokens];
  if (is_changed || is_parent(demand, op.seq) ||
      (tail != kNoBlock &&
       (pool_.refs(tail) > 1 || pool_.is_published(tail) || pool_.copies(tail) > 0))) {
    ++demand.blocks[seq.tenant];
  }
}

// Pages of the slot, from `have` to `want`, that the mapper has in hand: nobody else can have them.
std::int64_t KVMemory::num_coming(const Sequence& seq, std::int64_t have, std::int64_t want) const {
  if (seq.has.slot == kNoSlot) return 0;
  const Slot& slot = slots_[seq.has.slot];
  std::int64_t coming = 0;
  for (std::int64_t i = have; i < std::min(want, slot.size()); ++i) {
    const PageId page = slot.entries[i].page;
    coming += page != kNoPage && pool_.state(page) == PageState::kHeld ? 1 : 0;
  }
  return coming;
}

std::int64_t KVMemory::pages_missing(const Demand& demand, bool squeezed) const {
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

// Pages that squeeze() may take apart: of paged sequences, with blocks that are free, cached or set
// aside for one of them. While an epoch runs that may write them there are none, and none of which
// a block is copied.
std::unordered_map<Tenant, std::vector<PageId>> KVMemory::loose_pages() const {
  std::unordered_map<Tenant, std::vector<PageId>> pages;
  if (completed_ != begun_) return pages;
  for (std::int64_t id = pool_.next_committed(0); id >= 0; id = pool_.next_committed(id + 1)) {
    const auto page = static_cast<PageId>(id);
    const std::int32_t used = pool_.used(page);
    const bool is_loose = used > 0 && used < config_.blocks_per_page && pool_.maps(page) == 0 &&
                          pool_.held(page) == 0 && pool_.copying(page) == 0;
    if (is_loose) pages[pool_.tenant(page)].push_back(page);
  }
  return pages;
}

// How many pages squeeze() would empty; `left`: the blocks that each tenant's split pages offer
// afterwards.
std::int64_t KVMemory::squeezable_pages(std::unordered_map<Tenant, std::int64_t>& left) const {
  std::int64_t emptied = 0;
  const std::int64_t width = config_.blocks_per_page;
  for (const auto& [tenant, pages] : loose_pages()) {
    std::int64_t used = 0;
    for (const PageId page : pages) used += pool_.used(page);
    const std::int64_t packed = (used + width - 1) / width;
    emptied += static_cast<std::int64_t>(pages.size()) - packed;
    left[tenant] = packed * width - used;
  }
  return emptied;
}

std::int64_t KVMemory::num_usable_slots() const {
  return std::count_if(slots_.begin(), slots_.end(), [&](const Slot& slot) {
    return !slot.active() && !slot.in_repair && slot.retire <= completed_;
  });
}

bool KVMemory::attaches(const std::vector<Op>& ops) {
  return std::any_of(ops.begin(), ops.end(),
                     [](const Op& op) { return op.kind == OpKind::kAttach && op.num_tokens > 0; });
}

// Pages in use whose gaps are nobody's to fill, and not to be packed, while an epoch or a copy
// runs; and those of which a block is copied, which is not written to meanwhile.
std::int64_t KVMemory::num_restless_pages() const {
  if (completed_ == begun_ && copying_.empty()) return 0;
  std::int64_t restless = 0;
  for (std::int64_t id = pool_.next_committed(0); id >= 0; id = pool_.next_committed(id + 1)) {
    const auto page = static_cast<PageId>(id);
    const bool has_gaps = pool_.used(page) > 0 && pool_.used(page) < config_.blocks_per_page;
    const bool is_loose = has_gaps && pool_.maps(page) == 0 && pool_.held(page) == 0;
    const bool is_copied = pool_.used(page) > 0 && pool_.copying(page) > 0;
    restless += is_loose || is_copied ? 1 : 0;
  }
  return restless;
}

Plan KVMemory::assess(const std::vector<Op>& ops, bool& dense) const {
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
  plan.missing_slots = std::max<std::int64_t>(0, wanted.slots - num_usable_slots());
  plan.missing_swap_blocks = std::max<std::int64_t>(0, wanted.swap_blocks - swap_->num_free());
  plan.needed_mappings = wanted.runs * mappings_per_run();
  plan.available_mappings = available_mappings(plan.needed_mappings);
  if (plan.needed_mappings > plan.available_mappings) plan.waiting_pages += num_retiring_pages();
  if (!plan.fits()) plan.waiting_pages += num_restless_pages();
  plan.version = version_;
  return plan;
}

Plan KVMemory::plan(const std::vector<Op>& ops) {
  const auto lock = enter();
  absorb();
  // Only asking what there is leaves an earlier plan as good as it was, and what is attached has
  // been found already.
  if (!ops.empty() && !attaches(ops)) shed();
  const std::vector<Op> wanted = merged(ops);
  validate(wanted);
  bool dense = false;
  Plan plan = assess(wanted, dense);
  if (!plan.fits() && (works_ahead() || !repairs_.empty())) {
    // Pages that the mapper or a repair has in hand are nobody's yet.
    settle_locked();
    if (failure_.empty()) retry_repairs();
    plan = assess(wanted, dense);
  }
  return plan;
}

}  // namespace vmserve
