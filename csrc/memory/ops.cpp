#include "vmserve/memory/ops.h"

#include <algorithm>
#include <cerrno>

#include "vmserve/errors.h"
#include "vmserve/text.h"

namespace vmserve {
namespace {

// Decay of `first_pages` per new sequence.
constexpr double kRememberedOfNewcomers = 0.98;

}  // namespace

void Ops::begin(Change& change, const std::vector<Op>& ops) {
  hold_matches(change, ops);
  collect_growth_targets(change, ops);
}

SlotId Ops::stage(Change& change, const Op& op) {
  switch (op.kind) {
    case OpKind::kAttach:
      return stage_attach(change, op);
    case OpKind::kFork:
      return stage_fork(change, op);
    case OpKind::kConvert:
      return stage_convert(change, op);
    case OpKind::kSwapOut:
      stage_swap_out(change, op);
      return kNoSlot;
    case OpKind::kSwapIn:
      return stage_swap_in(change, op);
    case OpKind::kGrow:
      return stage_grow(change, op);
  }
  return kNoSlot;
}

// Holds matched blocks: finding memory must not evict them, and other ops must not claim them.
void Ops::hold_matches(Change& change, const std::vector<Op>& ops) {
  for (const Op& op : ops) {
    if (op.kind != OpKind::kAttach || op.num_tokens == 0) continue;
    change.attached.push_back(
        {op.seq, ledger_.matched_blocks(seqs_[op.seq], op.num_tokens, op.first_token)});
    PageId last = kNoPage;
    for (const BlockId block : change.attached.back().blocks) {
      if (block == kNoBlock) continue;
      // A page in use is not evicted, and the plan counts on its other blocks: reference only this
      // one.
      if (pool_.used(pool_.page_of(block)) > 0) {
        change.add_ref(block);
        change.matched.push_back(block);
        continue;
      }
      if (pool_.page_of(block) == last) continue;
      last = pool_.page_of(block);
      if (change.is_trial && pool_.state(last) != PageState::kIdle) {
        // It may become idle before the plan is applied. A page that this change already holds
        // counts once.
        const auto held = std::find(change.held.begin(), change.held.end(), last);
        change.num_coming += held == change.held.end() ? 1 : 0;
      }
      change.held.push_back(last);
      pool_.hold(last);
    }
  }
}

void Ops::collect_growth_targets(Change& change, const std::vector<Op>& ops) {
  for (const Op& op : ops) {
    if (op.kind == OpKind::kConvert) change.targets.emplace(op.seq, 0);
  }
  if (change.targets.empty()) return;
  for (const Op& op : ops) {
    const auto converted = change.targets.find(op.seq);
    if (op.kind == OpKind::kGrow && converted != change.targets.end()) {
      converted->second = op.num_tokens;
    }
  }
}

SlotId Ops::stage_attach(Change& change, const Op& op) {
  const Sequence& seq = seqs_[op.seq];
  Held& own = held_[op.seq];
  change.counts.prefix_query_blocks +=
      std::max<std::int64_t>(0, static_cast<std::int64_t>(seq.tokens.size()) - 1) /
      config_.block_tokens;
  if (op.num_tokens == 0) return kNoSlot;
  change.save(op.seq);
  const auto attached =
      std::find_if(change.attached.begin(), change.attached.end(),
                   [&](const Attached& candidate) { return candidate.seq == op.seq; });
  own.num_trimmed = config_.has_state() ? 0 : op.first_token / config_.block_tokens;
  const SlotId slot = bind(change, op.seq, attached->blocks, op.num_tokens);
  change.counts.prefix_hit_blocks += op.num_tokens / config_.block_tokens;
  return slot;
}

SlotId Ops::stage_fork(Change& change, const Op& op) {
  const Held& parent = held_[op.other];
  Held& child = held_[op.seq];
  change.save(op.seq);
  const std::vector<BlockId> blocks(parent.blocks.begin(),
                                    parent.blocks.begin() + ledger_.blocks_for(op.num_tokens));
  child.num_trimmed = std::min(parent.num_trimmed, ledger_.blocks_for(op.num_tokens));
  const SlotId slot =
      op.num_tokens > 0 ? bind(change, op.seq, blocks, op.num_tokens) : SlotId{kNoSlot};
  seal_shared(change, seqs_[op.other], op);
  ++change.counts.forks;
  return slot;
}

// Makes shared pages read-only for the parent, too: a write without a copy before it then traps.
// Positions that a running epoch still writes stay writable until they are sealed.
void Ops::seal_shared(Change& change, const Sequence& parent, const Op& op) {
  const SlotId shared = ledger_.slot_of(parent);
  if (!config_.access_under_readers || shared == kNoSlot) return;
  change.used_slots.push_back(shared);
  change.saved_slot(shared);
  Slot& slot = slots_[shared];
  // A paged child shares blocks of the last page, which is sealed as a whole or not yet. A virtual
  // child copies a partial last page.
  const std::int64_t width = config_.page_tokens();
  const std::int64_t slack = ledger_.view(seqs_[op.seq]) == View::kPaged ? width - 1 : 0;
  const std::int64_t stop = std::min(parent.kv.sealed / width, (op.num_tokens + slack) / width);
  for (std::int64_t i = slot.num_sealed; i < stop; ++i) {
    if (slot.entries[i].page != kNoPage) change.make_read_only(shared, i);
  }
  slot.num_sealed = std::max(slot.num_sealed, stop);
}

SlotId Ops::stage_convert(Change& change, const Op& op) {
  const Sequence& seq = seqs_[op.seq];
  Held& own = held_[op.seq];
  if (seq.kv.view == op.view || config_.has_state()) return kNoSlot;
  change.save(op.seq);
  if (op.view == View::kVirtual) {
    const std::vector<BlockId> before = std::move(own.blocks);
    own.blocks.clear();
    const SlotId slot = seq.kv.length > 0
                            ? bind_to_slot(change, op.seq, before, seq.kv.length, /*own=*/true)
                            : SlotId{kNoSlot};
    for (const BlockId block : before) {
      if (block != kNoBlock) change.drops.push_back(block);
    }
    ++change.counts.converted_to_virtual;
    return slot;
  }
  // Keep the blocks into which it grows in the same plan.
  const auto growth = change.targets.find(op.seq);
  const std::int64_t target = growth == change.targets.end() ? 0 : growth->second;
  const auto keep =
      std::min(static_cast<std::size_t>(ledger_.blocks_for(std::max(seq.kv.length, target))),
               own.blocks.size());
  while (own.blocks.size() > keep) {
    if (own.blocks.back() != kNoBlock) change.drops.push_back(own.blocks.back());
    own.blocks.pop_back();
  }
  change.leave_slot(op.seq);
  if (keep > 0 && own.blocks.back() != kNoBlock) {
    // Reserve the rest of the tail page for this sequence.
    const PageId tail = pool_.page_of(own.blocks.back());
    if (pool_.owner(tail) == kNoSeq && keep % config_.blocks_per_page != 0) {
      change.owners.emplace_back(tail, kNoSeq);
      pool_.set_owner(tail, op.seq);
    }
  }
  ++change.counts.converted_to_paged;
  ++change.counts.converted_zero_copy;
  return kNoSlot;
}

void Ops::stage_swap_out(Change& change, const Op& op) {
  Held& own = held_[op.seq];
  change.save(op.seq);
  const std::int64_t total = ledger_.blocks_for(seqs_[op.seq].kv.length);
  for (std::int64_t i = 0; i < static_cast<std::int64_t>(own.blocks.size()); ++i) {
    const BlockId block = own.blocks[i];
    if (block == kNoBlock) {
      if (i < total) own.swap.push_back(kNoSwap);
      continue;
    }
    change.drops.push_back(block);
    if (i >= total) continue;
    const auto [at, is_new] = change.swapped.emplace(block, kNoSwap);
    if (is_new && change.is_trial && work_.swap->num_free() == 0) {
      ++change.missing_swap_blocks;
    } else if (is_new) {
      at->second = work_.swap->take();
      change.swap_out.push_back({op.seq, i, block, at->second});
    } else if (at->second != kNoSwap) {
      work_.swap->share(at->second);
    }
    if (at->second != kNoSwap) change.swap_taken.push_back(at->second);
    own.swap.push_back(at->second);
  }
  change.leave_slot(op.seq);
  own.blocks.clear();
}

SlotId Ops::stage_swap_in(Change& change, const Op& op) {
  const Sequence& seq = seqs_[op.seq];
  Held& own = held_[op.seq];
  change.save(op.seq);
  const std::vector<SwapId> swap = std::move(own.swap);
  own.swap.clear();
  const auto total = static_cast<std::int64_t>(swap.size());
  std::int64_t holes = 0;
  while (holes < total && swap[holes] == kNoSwap) ++holes;
  SlotId slot = kNoSlot;
  if (ledger_.view(seq) == View::kVirtual) {
    // Pages wholly before the window stay dropped.
    const std::int64_t hole_pages = holes / config_.blocks_per_page;
    if (total > 0) {
      const std::vector<BoundPage> past(static_cast<std::size_t>(hole_pages),
                                        {BoundPage::Kind::kHole, kNoPage, 0});
      slot = assign_slot(change, op.seq, past, ledger_.pages_for(seq.kv.length));
      own.blocks.assign(static_cast<std::size_t>(hole_pages * config_.blocks_per_page), kNoBlock);
      grow_virtual(change, op.seq, slot, seq.kv.length);
    }
  } else {
    own.blocks.assign(static_cast<std::size_t>(holes), kNoBlock);
    grow_paged(change, op.seq, /*length=*/0, seq.kv.length);  // no tail block to copy on write yet
  }
  for (std::int64_t i = 0; i < total; ++i) {
    if (swap[i] == kNoSwap) continue;
    change.swap_drops.push_back(swap[i]);
    change.swap_in.push_back({op.seq, i, kNoBlock, swap[i]});
  }
  return slot;
}

SlotId Ops::stage_grow(Change& change, const Op& op) {
  const Sequence& seq = seqs_[op.seq];
  const std::int64_t length = seq.kv.length;
  change.drops_past = change.drops_past || op.first_token > 0;
  if (ledger_.view(seq) == View::kPaged) {
    if (op.num_tokens > length) grow_paged(change, op.seq, length, op.num_tokens);
    return kNoSlot;
  }
  if (op.num_tokens > length) return grow_virtual(change, op.seq, seq.kv.slot, op.num_tokens);
  if (op.num_tokens > 0 || seq.kv.slot != kNoSlot) return kNoSlot;
  change.save(op.seq);
  return assign_slot(change, op.seq, {}, 0);
}

// Grows in `slot`, or in one that it takes and returns.
SlotId Ops::grow_virtual(Change& change, SeqId id, SlotId slot_id, std::int64_t num_tokens) {
  Held& own = held_[id];
  const std::int64_t have = ledger_.num_pages(id);
  const std::int64_t want = ledger_.pages_for(num_tokens);
  if (want <= have) return kNoSlot;
  SlotId taken = kNoSlot;
  if (slot_id == kNoSlot) {
    change.save(id);
    slot_id = taken = assign_slot(change, id, {}, want);
    ++ledger_.recent.newcomers_now;
    ledger_.recent.newest_tenant = seqs_[id].tenant;
    ledger_.recent.first_pages =
        std::max(static_cast<double>(want), ledger_.recent.first_pages * kRememberedOfNewcomers);
  } else {
    change.used_slots.push_back(slot_id);
    change.grown.push_back({id, own.blocks.size(), -1, kNoBlock});
    change.touched.push_back(id);
  }
  change.saved_slot(slot_id);
  own.blocks.resize(static_cast<std::size_t>(want * config_.blocks_per_page), kNoBlock);
  for (std::int64_t index = have; index < want; ++index) {
    if (claim_spare(change, id, slot_id, index)) continue;
    slots_[slot_id].entries.push_back({kNoPage, false});
    change.fresh.push_back({Fresh::Kind::kSlotPage, id, index});
  }
  return taken;
}

// Removes the slot's entries from `index` on; the driver unmaps them later.
void Ops::truncate_entries(Change& change, SlotId slot, std::int64_t index) {
  const std::int64_t count = slots_[slot].size() - index;
  if (count <= 0) return;
  Change::SavedSlot& before = change.saved_slot(slot);
  before.size = std::min(before.size, index);
  // Removed entries must not be lost to bad_alloc.
  change.removed.reserve(change.removed.size() + 1);
  change.removed.push_back(work_.remove_entries(slot, index, count));
}

// Takes over the slot's spare page at `index`, left by its last sequence or mapped ahead. If there
// is none, or it is in use, the slot is truncated before it and the result is false.
bool Ops::claim_spare(Change& change, SeqId id, SlotId slot_id, std::int64_t index) {
  Slot& slot = slots_[slot_id];
  if (index >= slot.size()) return false;
  const PageId page = slot.entries[index].page;
  const bool is_coming =
      change.is_trial && slot.num_pending > 0 && index >= change.saved_slot(slot_id).first_pending;
  change.num_coming += is_coming ? 1 : 0;
  if (!is_coming && (page == kNoPage || pool_.state(page) != PageState::kIdle)) {
    truncate_entries(change, slot_id, index);
    return false;
  }
  ledger_.totals.evicted_blocks += pool_.drop_cached(page);
  change.prepare_page(page, seqs_[id].tenant);
  for (std::int32_t j = 0; j < config_.blocks_per_page; ++j) {
    const BlockId block = pool_.first_block(page) + j;
    change.add_ref(block);
    held_[id].blocks[index * config_.blocks_per_page + j] = block;
  }
  change.make_writable(slot_id, index);
  ++change.counts.adopted_pages;
  return true;
}

// The last of several sequences that continue from one block in a step keeps it without a copy.
bool Ops::needs_copy(const Change& change, BlockId block) const {
  if (change.replaced_refs.empty()) return ledger_.needs_copy(block);  // mostly
  const auto replaced = change.replaced_refs.find(block);
  const std::int32_t num_replaced = replaced == change.replaced_refs.end() ? 0 : replaced->second;
  return ledger_.needs_copy(block, num_replaced);
}

// `length`: positions that are written, of which the next step's are in the tail block.
void Ops::grow_paged(Change& change, SeqId id, std::int64_t length, std::int64_t num_tokens) {
  Held& own = held_[id];
  const auto have = static_cast<std::int64_t>(own.blocks.size());
  const std::int64_t want = ledger_.blocks_for(num_tokens);
  Change::Grown grown{id, own.blocks.size(), -1, kNoBlock};
  const std::int64_t tail = length / config_.block_span();
  const std::int64_t written = length % config_.block_span();
  if (written > 0 && own.blocks[tail] != kNoBlock && needs_copy(change, own.blocks[tail])) {
    grown.cow_index = tail;
    grown.cow_block = own.blocks[tail];
    ++change.replaced_refs[grown.cow_block];
    change.copies.push_back({id, tail, grown.cow_block, written});
    change.drops.push_back(grown.cow_block);
    change.fresh.push_back({Fresh::Kind::kBlock, id, tail});
    ++change.counts.cow_blocks;
  }
  if (want <= have && grown.cow_index < 0) return;
  change.grown.push_back(grown);
  change.touched.push_back(id);
  if (grown.cow_index >= 0) own.blocks[tail] = kNoBlock;
  own.blocks.resize(static_cast<std::size_t>(std::max(have, want)), kNoBlock);
  for (std::int64_t index = have; index < want; ++index) {
    const auto kind = ledger_.takes_whole_page(index, change.dense) ? Fresh::Kind::kWholePage
                                                                    : Fresh::Kind::kBlock;
    change.fresh.push_back({kind, id, index});
  }
}

// Gives an empty sequence existing blocks. Returns the slot that it takes, or kNoSlot.
SlotId Ops::bind(Change& change, SeqId id, const std::vector<BlockId>& blocks,
                 std::int64_t num_tokens) {
  if (ledger_.view(seqs_[id]) == View::kVirtual) {
    return bind_to_slot(change, id, blocks, num_tokens, /*own=*/false);
  }
  for (const BlockId block : blocks) {
    if (block != kNoBlock) change.add_ref(block);
  }
  held_[id].blocks = blocks;
  return kNoSlot;
}

// `own`: the sequence had these blocks before.
SlotId Ops::bind_to_slot(Change& change, SeqId id, const std::vector<BlockId>& blocks,
                         std::int64_t num_tokens, bool own) {
  Held& held = held_[id];
  const std::int32_t width = config_.blocks_per_page;
  const std::vector<BoundPage> bound = ledger_.bind_pages(blocks, num_tokens, own, own ? 0 : 1);
  // The virtual view has whole pages: a partly needed page has all its blocks again.
  held.num_trimmed = held.num_trimmed / width * width;
  const SlotId slot_id = assign_slot(change, id, bound, ledger_.pages_for(num_tokens));
  held.blocks.assign(bound.size() * static_cast<std::size_t>(width), kNoBlock);
  bool is_free = true;
  for (std::size_t i = 0; i < bound.size(); ++i) {
    const auto index = static_cast<std::int64_t>(i);
    Slot& slot = slots_[slot_id];
    if (bound[i].kind == BoundPage::Kind::kHole) {
      if (index >= slot.size()) slot.entries.push_back({kNoPage, false});
    } else if (bound[i].kind == BoundPage::Kind::kCopy) {
      bind_copy(change, id, slot_id, index, blocks, num_tokens);
      is_free = false;
    } else {
      bind_page(change, id, slot_id, index, bound[i], num_tokens);
    }
  }
  if (own && is_free) ++change.counts.converted_zero_copy;
  if (ledger_.pages_for(num_tokens) > static_cast<std::int64_t>(bound.size())) {
    grow_virtual(change, id, slot_id, num_tokens);
  }
  return slot_id;
}

// Makes page `index` a new page with copies of the blocks.
void Ops::bind_copy(Change& change, SeqId id, SlotId slot_id, std::int64_t index,
                    const std::vector<BlockId>& blocks, std::int64_t num_tokens) {
  Slot& slot = slots_[slot_id];
  if (index >= slot.size() || !claim_spare(change, id, slot_id, index)) {
    slot.entries.push_back({kNoPage, false});
    change.fresh.push_back({Fresh::Kind::kSlotPage, id, index});
  }
  const std::int64_t first = index * config_.blocks_per_page;
  const std::int64_t stop =
      std::min(first + config_.blocks_per_page, ledger_.blocks_for(num_tokens));
  for (std::int64_t at = first; at < stop; ++at) {
    if (blocks[at] == kNoBlock) continue;
    const std::int64_t left = num_tokens - at * config_.block_tokens;
    change.copies.push_back(
        {id, at, blocks[at], std::min<std::int64_t>(left, config_.block_tokens)});
  }
}

// Makes page `index` an existing page, shared or taken over.
void Ops::bind_page(Change& change, SeqId id, SlotId slot_id, std::int64_t index,
                    const BoundPage& bound, std::int64_t num_tokens) {
  Slot& slot = slots_[slot_id];
  const std::int64_t first = index * config_.blocks_per_page;
  for (std::int32_t j = 0; j < config_.blocks_per_page; ++j) {
    const BlockId block = pool_.first_block(bound.page) + j;
    // Blocks not wholly filled by the tokens will be written.
    const bool is_whole = (first + j + 1) * config_.block_tokens <= num_tokens;
    if (!is_whole && pool_.is_published(block)) {
      pool_.unpublish(block);
      ++ledger_.totals.evicted_blocks;
    }
    // Zero what another sequence of the tenant left after the tokens.
    const bool is_left = j >= bound.num_blocks && config_.zero_policy == ZeroPolicy::kAlways;
    if (is_left) change.zero_blocks.push_back(block);
    change.add_ref(block);
    held_[id].blocks[first + j] = block;
  }
  const bool shares = bound.kind == BoundPage::Kind::kShare;
  if (index >= slot.size()) {
    slot.entries.push_back({bound.page, shares});
    pool_.add_map(bound.page, static_cast<std::int32_t>(index));
    change.maps.push_back({slot_id, index, shares});
  } else if (!shares) {
    change.make_writable(slot_id, index);
  } else {
    change.make_read_only(slot_id, index);
    ++change.counts.adopted_pages;
  }
}

bool Ops::shows_other_tenant(PageId page, Tenant tenant) const {
  return page != kNoPage && config_.zero_policy != ZeroPolicy::kNever &&
         pool_.tenant(page) != tenant && !pool_.known_zero(page);
}

// Counts the bound pages that the slot already shows at their indices, from the first on.
std::int64_t Ops::num_shown(const Slot& slot, const std::vector<BoundPage>& bound) const {
  const auto most = std::min<std::int64_t>(slot.size(), static_cast<std::int64_t>(bound.size()));
  std::int64_t shown = 0;
  while (shown < most && bound[shown].page != kNoPage &&
         slot.entries[shown].page == bound[shown].page) {
    ++shown;
  }
  return shown;
}

// Whether the slot has entries from `first` on that are cached, in use, or of another tenant (these
// would have to be unmapped).
bool Ops::has_needed_pages(const Slot& slot, std::int64_t first, Tenant tenant) const {
  return std::any_of(slot.entries.begin() + first, slot.entries.end(), [&](const SlotEntry& entry) {
    const PageId page = entry.page;
    return page == kNoPage || pool_.used(page) > 0 || pool_.cached(page) > 0 ||
           shows_other_tenant(page, tenant);
  });
}

// Ranks a parked slot for a sequence that starts with `bound` and needs `want` pages; higher is
// better. 4: shows the bound pages already. 3: has only pages that are not needed. 2: if pages are
// short, the one parked longest ago, whose pages are reused in place. 1: empty. 0: any other. The
// second value orders slots of equal rank.
std::pair<std::int64_t, std::int64_t> Ops::rank_slot(const Slot& slot, Tenant tenant,
                                                     const std::vector<BoundPage>& bound,
                                                     std::int64_t want, bool short_of_pages) const {
  const std::int64_t oldest = -static_cast<std::int64_t>(slot.parked_at);
  if (slot.empty()) return {1, 0};
  const std::int64_t shown = num_shown(slot, bound);
  const bool missed = has_needed_pages(slot, shown, tenant);
  const bool fits = shown == static_cast<std::int64_t>(bound.size()) || slot.size() == shown;
  if (shown > 0 && fits && (!missed || short_of_pages)) return {4, shown};
  if (!bound.empty()) return {0, oldest};
  // The smallest slot that is enough, else the largest.
  constexpr std::int64_t kEnough = std::int64_t{1} << 40;
  if (!missed) return {3, slot.size() >= want ? kEnough - slot.size() : slot.size()};
  // All its pages would be evicted anyway, tail first.
  return {short_of_pages && want >= slot.size() ? 2 : 0, oldest};
}

SlotId Ops::choose_slot(const Change& change, Tenant tenant, const std::vector<BoundPage>& bound,
                        std::int64_t want, bool short_of_pages) const {
  SlotId best = kNoSlot;
  std::pair<std::int64_t, std::int64_t> best_rank;
  for (SlotId id = 0; id < config_.num_slots; ++id) {
    const Slot& slot = slots_[id];
    if (slot.active() || slot.in_repair || slot.retire > books_.completed) continue;
    // A slot left in this change returns to its sequence if the change fails.
    if (std::any_of(change.slots.begin(), change.slots.end(),
                    [&](const Change::SavedSlot& before) { return before.slot == id; })) {
      continue;
    }
    const auto rank = rank_slot(slot, tenant, bound, want, short_of_pages);
    if (best == kNoSlot || rank > best_rank) {
      best = id;
      best_rank = rank;
    }
  }
  return best;
}

SlotId Ops::assign_slot(Change& change, SeqId id, const std::vector<BoundPage>& bound,
                        std::int64_t want) {
  change.num_split_gaps += want > 0 || !bound.empty() ? 1 : 0;
  want = std::max(want, ledger_.pages_for(std::min(
                            config_.max_len, static_cast<std::int64_t>(seqs_[id].tokens.size()))));
  const std::int64_t at_hand = pool_.num_free() + pool_.limit() - pool_.num_committed();
  const bool short_of_pages = at_hand < want - static_cast<std::int64_t>(bound.size());
  const auto given = std::find_if(given_slots.begin(), given_slots.end(),
                                  [&](const auto& choice) { return choice.first == id; });
  SlotId slot_id = given == given_slots.end()
                       ? choose_slot(change, seqs_[id].tenant, bound, want, short_of_pages)
                       : given->second;
  if (slot_id != kNoSlot && slots_[slot_id].in_repair) slot_id = kNoSlot;  // it was given
  if (slot_id == kNoSlot && change.is_trial) {
    ++change.missing_slots;
    slot_id = static_cast<SlotId>(slots_.size());
    slots_.emplace_back();
  } else if (slot_id == kNoSlot) {
    throw OutOfMemoryError("all " + std::to_string(config_.num_slots) +
                           " slots are taken: raise --max-num-seqs");
  } else {
    change.taken_slots.emplace_back(id, slot_id);
  }
  Slot& slot = slots_[slot_id];
  change.awaited_command = std::max(change.awaited_command, slot.last_command);
  const std::int64_t matched = num_shown(slot, bound);
  const auto most = std::min<std::int64_t>(slot.size(), static_cast<std::int64_t>(bound.size()));
  const bool conflicts = matched < most || (!bound.empty() && matched == 0 && !slot.empty());
  std::int64_t keep = conflicts ? matched : slot.size();
  // A slot never shows another tenant's data, not even beyond the length.
  for (std::int64_t i = matched; i < keep; ++i) {
    if (shows_other_tenant(slot.entries[i].page, seqs_[id].tenant)) keep = i;
  }
  change.saved_slot(slot_id);
  truncate_entries(change, slot_id, keep);
  slot.seq = id;
  change.counts.adopted_slots += slot.empty() ? 0 : 1;
  for (std::size_t i = 0; i < bound.size() && bound[i].kind == BoundPage::Kind::kHole; ++i) {
    if (static_cast<std::int64_t>(i) >= slot.size()) slot.entries.push_back({kNoPage, false});
  }
  return slot_id;
}

// NOTE: must not exceed the planned pages. Making more room would evict pages needlessly, possibly
// ones that the mapper holds, and can fail.
std::int64_t Ops::pages_for_fresh(const Change& change) const {
  std::int64_t pages = 0;
  std::unordered_map<Tenant, std::int64_t> blocks;
  // Unused blocks left in the page of the block before.
  std::unordered_map<SeqId, std::int64_t> own;
  for (const Fresh& fresh : change.fresh) {
    if (fresh.kind != Fresh::Kind::kBlock) {
      ++pages;
      own[fresh.seq] = config_.blocks_per_page - 1;
      continue;
    }
    const std::vector<BlockId>& there = held_[fresh.seq].blocks;
    const BlockId before = fresh.index > 0 ? there[fresh.index - 1] : kNoBlock;
    std::int64_t& left = own[fresh.seq];
    if (before != kNoBlock) left = ledger_.num_own_blocks_after(fresh.seq, before);
    blocks[seqs_[fresh.seq].tenant] += left > 0 ? 0 : 1;
    left = std::max<std::int64_t>(0, left - 1);
  }
  for (const auto& [tenant, count] : blocks) {
    const std::int64_t width = config_.blocks_per_page;
    const std::int64_t missing = std::max<std::int64_t>(0, count - pool_.num_split_blocks(tenant));
    pages += (missing + width - 1) / width;
  }
  return pages;
}

void Ops::assign_fresh(Change& change) {
  const std::int64_t needed = pages_for_fresh(change);
  ledger_.recent.pages_now += needed;
  room_.make_room(std::min(needed, pool_.num_available()));
  for (const Fresh& fresh : change.fresh) {
    const Sequence& seq = seqs_[fresh.seq];
    std::vector<BlockId>& own = held_[fresh.seq].blocks;
    const std::int32_t width = config_.blocks_per_page;
    const bool is_slot_page = fresh.kind == Fresh::Kind::kSlotPage;
    const std::int64_t at = is_slot_page ? fresh.index * width : fresh.index;
    const BlockId before = at > 0 ? own[at - 1] : kNoBlock;
    if (!is_slot_page) {
      own[at] = fresh.kind == Fresh::Kind::kWholePage ? fresh_whole_page(change, fresh.seq, before)
                                                      : fresh_block(change, fresh.seq, before);
      continue;
    }
    const PageId page = fresh_page(change, before, seq.tenant, /*grows=*/true);
    for (std::int32_t j = 0; j < width; ++j) {
      change.add_ref(pool_.first_block(page) + j);
      own[at + j] = pool_.first_block(page) + j;
    }
    slots_[seq.kv.slot].entries[fresh.index].page = page;
    pool_.add_map(page, static_cast<std::int32_t>(fresh.index));
    change.maps.push_back({seq.kv.slot, fresh.index, false});
  }
}

// Takes and holds a free page: the one after the page of `before` if possible.
PageId Ops::fresh_page(Change& change, BlockId before, Tenant tenant, bool grows) {
  if (pool_.num_free() == 0) room_.make_room(1);
  const PageId page = pool_.take_page(before == kNoBlock ? kNoPage : pool_.page_of(before), grows);
  change.held.push_back(page);
  change.prepare_page(page, tenant);
  return page;
}

// Takes a page that is reserved for the sequence and returns its first block.
BlockId Ops::fresh_whole_page(Change& change, SeqId id, BlockId before) {
  const PageId page = fresh_page(change, before, seqs_[id].tenant, /*grows=*/false);
  const BlockId block = pool_.first_block(page);
  change.add_ref(block);
  change.owners.emplace_back(page, pool_.owner(page));
  pool_.set_owner(page, id);
  return block;
}

// Takes the next block of the sequence's reserved page, or a block of a split page.
BlockId Ops::fresh_block(Change& change, SeqId id, BlockId before) {
  if (before != kNoBlock && ledger_.num_own_blocks_after(id, before) > 0) {
    if (config_.zero_policy == ZeroPolicy::kAlways) change.zero_blocks.push_back(before + 1);
    change.add_ref(before + 1);
    return before + 1;
  }
  BlockId block = pool_.take_block(seqs_[id].tenant);
  if (block == kNoBlock) {
    const PageId page = fresh_page(change, before, seqs_[id].tenant, /*grows=*/false);
    block = pool_.take_block_in(page);
    pool_.unhold(page);  // now split: other sequences may take its blocks
    change.held.pop_back();
  } else if (config_.zero_policy == ZeroPolicy::kAlways) {
    change.zero_blocks.push_back(block);
  }
  change.refs.push_back(block);
  return block;
}

void Ops::undo_sequences(Change& change) {
  for (auto grown = change.grown.rbegin(); grown != change.grown.rend(); ++grown) {
    std::vector<BlockId>& blocks = held_[grown->seq].blocks;
    blocks.resize(grown->num_blocks);
    if (grown->cow_index >= 0) blocks[grown->cow_index] = grown->cow_block;
  }
  for (auto before = change.saved.rbegin(); before != change.saved.rend(); ++before) {
    held_[before->first] = std::move(before->second);
  }
  for (const SwapId swap : change.swap_taken) work_.swap->drop(swap);
}

void Ops::undo_trial(Change& change) {
  for (auto saved = change.slots.rbegin(); saved != change.slots.rend(); ++saved) {
    Slot& slot = slots_[saved->slot];
    slot.entries.resize(static_cast<std::size_t>(saved->size));
    slot.seq = saved->seq;
    slot.num_sealed = saved->num_sealed;
    slot.retire = saved->retire;
  }
  // In reverse order: each was the tail that earlier removals had left.
  for (auto removed = change.removed.rbegin(); removed != change.removed.rend(); ++removed) {
    std::vector<SlotEntry>& entries = slots_[removed->slot].entries;
    entries.insert(entries.end(), removed->entries.begin(), removed->entries.end());
  }
  for (const Change::SavedSlot& saved : change.slots) {
    std::vector<SlotEntry>& entries = slots_[saved.slot].entries;
    for (const std::int64_t index : saved.made_writable) {
      if (index < slots_[saved.slot].size()) entries[index].read_only = true;
    }
    for (const std::int64_t index : saved.made_read_only) {
      if (index < slots_[saved.slot].size()) entries[index].read_only = false;
    }
  }
  slots_.resize(static_cast<std::size_t>(config_.num_slots));  // drop slots that the trial added
  undo_sequences(change);
}

void Ops::rollback(Change& change) {
  work_.unmap_removed(change);  // the ledger no longer has them
  Unfinished unfinished;
  {
    const auto driving = work_.lock();
    unfinished = change.tx.rollback();
  }
  Repair repair;
  repair.steps = std::move(unfinished.steps);
  const bool is_clean = repair.steps.empty();
  // Restore entries that this change appended or made writable.
  for (auto saved = change.slots.rbegin(); saved != change.slots.rend(); ++saved) {
    Slot& slot = slots_[saved->slot];
    for (const std::int64_t index : saved->made_writable) {
      if (index < saved->size) slot.entries[index].read_only = true;
    }
    for (const std::int64_t index : saved->made_read_only) {
      if (index < slot.size()) slot.entries[index].read_only = false;
    }
    // Pages that were evicted on the way may have cut it shorter, or left a hole.
    slot.num_sealed = std::min({slot.num_sealed, saved->num_sealed, saved->size});
    while (slot.size() > saved->size) {
      const PageId page = slot.entries.back().page;
      slot.entries.pop_back();
      if (page == kNoPage) continue;
      if (!is_clean) {
        pool_.hold(page);
        repair.held.push_back(page);
      }
      pool_.drop_map(page);
    }
    slot.seq = saved->seq;
    slot.retire = saved->retire;
    if (!is_clean) repair.slots.push_back(saved->slot);
  }
  for (const auto& [page, owner] : change.owners) pool_.set_owner(page, owner);
  for (auto block = change.refs.rbegin(); block != change.refs.rend(); ++block) {
    pool_.drop_ref(*block, 0);
  }
  for (const PageId page : change.held) pool_.unhold(page);
  // Queued work may have zeroed these pages or copied to them. Assign them to no tenant, so that
  // they are zeroed for the next one.
  for (const PageId page : change.zero_pages) pool_.mark_written(page, kNobody);
  undo_sequences(change);
  if (!is_clean) work_.add_repair(std::move(repair), unfinished.error);
}

}  // namespace vmserve
