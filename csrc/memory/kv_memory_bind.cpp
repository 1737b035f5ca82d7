// How a sequence comes by its memory: blocks that exist, spares of its slot, fresh pages.
#include <algorithm>
#include <cerrno>

#include "vmserve/errors.h"
#include "vmserve/kv_memory.h"
#include "vmserve/text.h"

namespace vmserve {

// -- binding: a sequence gets blocks that exist

void KVMemory::bind(Change& change, SeqId id, const std::vector<BlockId>& blocks,
                    std::int64_t num_tokens, bool own) {
  Sequence& seq = seqs_[id];
  if (seq.has.view == View::kPaged) {
    for (const BlockId block : blocks) {
      if (block != kNoBlock) add_ref(change, block);
    }
    seq.has.blocks = blocks;
    return;
  }
  const std::int32_t width = config_.blocks_per_page;
  const std::vector<BoundPage> bound = bind_pages(blocks, num_tokens, own, own ? 0 : 1);
  // Whole pages from here on: one that is needed in part has all its blocks again.
  seq.has.num_trimmed = seq.has.num_trimmed / width * width;
  take_slot(change, id, bound, pages_for(num_tokens));
  Slot& slot = slots_[seq.has.slot];
  seq.has.blocks.assign(bound.size() * static_cast<std::size_t>(width), kNoBlock);
  bool is_free = true;
  for (std::size_t i = 0; i < bound.size(); ++i) {
    const auto index = static_cast<std::int64_t>(i);
    const bool is_mapped = index < slot.size();
    if (bound[i].kind == BoundPage::Kind::kHole) {
      if (!is_mapped) slot.entries.push_back({kNoPage, false});
    } else if (bound[i].kind == BoundPage::Kind::kCopy) {
      bind_copy(change, id, index, blocks, num_tokens);
      is_free = false;
    } else {
      bind_page(change, id, index, bound[i], num_tokens);
    }
  }
  if (own && is_free) ++change.counts.converted_zero_copy;
  if (pages_for(num_tokens) > static_cast<std::int64_t>(bound.size())) {
    grow_virtual(change, id, num_tokens);
  }
}

// The page at `index` is a new one, with copies of the blocks.
void KVMemory::bind_copy(Change& change, SeqId id, std::int64_t index,
                         const std::vector<BlockId>& blocks, std::int64_t num_tokens) {
  Slot& slot = slots_[seqs_[id].has.slot];
  if (index >= slot.size() || !claim_spare(change, id, index)) {
    slot.entries.push_back({kNoPage, false});
    change.fresh.push_back({Fresh::Kind::kSlotPage, id, index});
  }
  const std::int64_t first = index * config_.blocks_per_page;
  const std::int64_t stop = std::min(first + config_.blocks_per_page, blocks_for(num_tokens));
  for (std::int64_t at = first; at < stop; ++at) {
    if (blocks[at] == kNoBlock) continue;
    const std::int64_t left = num_tokens - at * config_.block_tokens;
    change.copies.push_back(
        {id, at, blocks[at], std::min<std::int64_t>(left, config_.block_tokens)});
  }
}

// The page at `index` is one that exists: shared, or the sequence's alone.
void KVMemory::bind_page(Change& change, SeqId id, std::int64_t index, const BoundPage& bound,
                         std::int64_t num_tokens) {
  Sequence& seq = seqs_[id];
  Slot& slot = slots_[seq.has.slot];
  const std::int64_t first = index * config_.blocks_per_page;
  for (std::int32_t j = 0; j < config_.blocks_per_page; ++j) {
    const BlockId block = pool_.first_block(bound.page) + j;
    // What lies behind the tokens will be written.
    const bool is_whole = (first + j + 1) * config_.block_tokens <= num_tokens;
    if (!is_whole && pool_.is_published(block)) {
      pool_.unpublish(block);
      ++totals_.evicted_blocks;
    }
    // What somebody of the same tenant left behind the tokens is not the newcomer's.
    const bool is_left = j >= bound.num_blocks && config_.zero_policy == ZeroPolicy::kAlways;
    if (is_left) change.zero_blocks.push_back(block);
    add_ref(change, block);
    seq.has.blocks[first + j] = block;
  }
  const bool shares = bound.kind == BoundPage::Kind::kShare;
  if (index >= slot.size()) {
    slot.entries.push_back({bound.page, shares});
    pool_.add_map(bound.page, static_cast<std::int32_t>(index));
    change.maps.push_back({seq.has.slot, index, shares});
  } else if (!shares) {
    make_writable(change, seq.has.slot, index);
  } else {
    make_read_only(change, seq.has.slot, index);
    ++change.counts.adopted_pages;
  }
}

bool KVMemory::shows_foreign(PageId page, Tenant tenant) const {
  return page != kNoPage && config_.zero_policy != ZeroPolicy::kNever &&
         pool_.tenant(page) != tenant && !pool_.known_zero(page);
}

// How many of the bound pages the slot shows in their places, from the first on.
std::int64_t KVMemory::num_shown(const Slot& slot, const std::vector<BoundPage>& bound) const {
  const auto most = std::min<std::int64_t>(slot.size(), static_cast<std::int64_t>(bound.size()));
  std::int64_t shown = 0;
  while (shown < most && bound[shown].page != kNoPage &&
         slot.entries[shown].page == bound[shown].page) {
    ++shown;
  }
  return shown;
}

// Whether somebody would miss what the slot shows from `first` on: cached blocks, pages in use, or
// another tenant's (which would have to be unmapped).
bool KVMemory::is_missed(const Slot& slot, std::int64_t first, Tenant tenant) const {
  return std::any_of(slot.entries.begin() + first, slot.entries.end(), [&](const SlotEntry& entry) {
    const PageId page = entry.page;
    return page == kNoPage || pool_.used(page) > 0 || pool_.cached(page) > 0 ||
           shows_foreign(page, tenant);
  });
}

// How well a parked slot serves a sequence that starts with `bound` and needs `want` pages: a rank,
// and a score within it. Best first: one that shows the bound pages already; one whose pages nobody
// would miss; if memory is short, the one that was parked longest ago, in place; an empty one; any.
std::pair<std::int64_t, std::int64_t> KVMemory::rank_slot(const Slot& slot, Tenant tenant,
                                                          const std::vector<BoundPage>& bound,
                                                          std::int64_t want, bool pressed) const {
  const std::int64_t oldest = -static_cast<std::int64_t>(slot.parked_at);
  if (slot.empty()) return {1, 0};
  const std::int64_t shown = num_shown(slot, bound);
  const bool missed = is_missed(slot, shown, tenant);
  const bool fits = shown == static_cast<std::int64_t>(bound.size()) || slot.size() == shown;
  if (shown > 0 && fits && (!missed || pressed)) return {4, shown};
  if (!bound.empty()) return {0, oldest};
  // The least that is enough, else the most.
  constexpr std::int64_t kEnough = std::int64_t{1} << 40;
  if (!missed) return {3, slot.size() >= want ? kEnough - slot.size() : slot.size()};
  // All of it would be evicted anyway, tail first.
  return {pressed && want >= slot.size() ? 2 : 0, oldest};
}

SlotId KVMemory::choose_slot(const Change& change, Tenant tenant,
                             const std::vector<BoundPage>& bound, std::int64_t want,
                             bool pressed) const {
  SlotId best = kNoSlot;
  std::pair<std::int64_t, std::int64_t> best_rank;
  for (SlotId id = 0; id < config_.num_slots; ++id) {
    const Slot& slot = slots_[id];
    if (slot.active() || slot.in_repair || slot.retire > completed_) continue;
    // One that a sequence leaves in this very change is still its own if the change fails.
    if (std::any_of(change.slots.begin(), change.slots.end(),
                    [&](const Change::SavedSlot& before) { return before.slot == id; })) {
      continue;
    }
    const auto rank = rank_slot(slot, tenant, bound, want, pressed);
    if (best == kNoSlot || rank > best_rank) {
      best = id;
      best_rank = rank;
    }
  }
  return best;
}

void KVMemory::take_slot(Change& change, SeqId id, const std::vector<BoundPage>& bound,
                         std::int64_t want) {
  want = std::max(want, pages_for(std::min(config_.max_len,
                                           static_cast<std::int64_t>(seqs_[id].tokens.size()))));
  const std::int64_t at_hand = pool_.num_free() + pool_.limit() - pool_.num_committed();
  const bool pressed = at_hand < want - static_cast<std::int64_t>(bound.size());
  const SlotId slot_id = choose_slot(change, seqs_[id].tenant, bound, want, pressed);
  if (slot_id == kNoSlot) {
    throw OutOfMemoryError("all " + std::to_string(config_.num_slots) +
                           " slots are taken: raise --max-num-seqs");
  }
  Slot& slot = slots_[slot_id];
  mapper_->wait(slot.last_command);
  const std::int64_t matched = num_shown(slot, bound);
  const auto most = std::min<std::int64_t>(slot.size(), static_cast<std::int64_t>(bound.size()));
  const bool conflicts = matched < most || (!bound.empty() && matched == 0 && !slot.empty());
  std::int64_t keep = conflicts ? matched : slot.size();
  // Nobody's addresses show what another tenant left, not even beyond the length.
  for (std::int64_t i = matched; i < keep; ++i) {
    if (shows_foreign(slot.entries[i].page, seqs_[id].tenant)) keep = i;
  }
  if (!truncate(slot_id, keep)) throw DriverError("unmap", EIO, last_error_);
  saved(change, slot_id);
  slot.seq = id;
  seqs_[id].has.slot = slot_id;
  change.counts.adopted_slots += slot.empty() ? 0 : 1;
  for (std::size_t i = 0; i < bound.size() && bound[i].kind == BoundPage::Kind::kHole; ++i) {
    if (static_cast<std::int64_t>(i) >= slot.size()) slot.entries.push_back({kNoPage, false});
  }
}

// -- fresh memory

void KVMemory::prepare_page(Change& change, PageId page, Tenant tenant) {
  if (pool_.needs_zero(page, tenant)) change.zero_pages.push_back(page);
  pool_.mark_written(page, tenant);
}

// Blocks that the sequence can have behind `block` in a page of its own.
std::int64_t KVMemory::num_own_behind(SeqId id, BlockId block) const {
  const PageId page = pool_.page_of(block);
  if (pool_.owner(page) != id || !pool_.is_at_rest(page)) return 0;
  const BlockId end = pool_.first_block(page) + config_.blocks_per_page;
  BlockId next = block + 1;
  while (next < end && pool_.refs(next) == 0 && !pool_.is_published(next)) ++next;
  return next - block - 1;
}

// How many pages the fresh memory takes. NOTE: no more than the plan said. Beyond that it would
// evict what the mapper has in hand, which can be refused, for nothing.
std::int64_t KVMemory::pages_for_fresh(const Change& change) const {
  std::int64_t pages = 0;
  std::unordered_map<Tenant, std::int64_t> blocks;
  std::unordered_map<SeqId, std::int64_t> own;  // left in the page of the block before
  for (const Fresh& fresh : change.fresh) {
    if (fresh.kind != Fresh::Kind::kBlock) {
      ++pages;
      own[fresh.seq] = config_.blocks_per_page - 1;
      continue;
    }
    const Sequence& seq = seqs_[fresh.seq];
    const BlockId before = fresh.index > 0 ? seq.has.blocks[fresh.index - 1] : kNoBlock;
    std::int64_t& left = own[fresh.seq];
    if (before != kNoBlock) left = num_own_behind(fresh.seq, before);
    blocks[seq.tenant] += left > 0 ? 0 : 1;
    left = std::max<std::int64_t>(0, left - 1);
  }
  for (const auto& [tenant, count] : blocks) {
    const std::int64_t width = config_.blocks_per_page;
    const std::int64_t missing = std::max<std::int64_t>(0, count - pool_.num_split_blocks(tenant));
    pages += (missing + width - 1) / width;
  }
  return pages;
}

void KVMemory::assign_fresh(Change& change) {
  const std::int64_t needed = pages_for_fresh(change);
  pages_now_ += needed;
  make_room(std::min(needed, pool_.num_available()));
  for (const Fresh& fresh : change.fresh) {
    Sequence& seq = seqs_[fresh.seq];
    const std::int32_t width = config_.blocks_per_page;
    const bool is_slot_page = fresh.kind == Fresh::Kind::kSlotPage;
    const std::int64_t at = is_slot_page ? fresh.index * width : fresh.index;
    const BlockId before = at > 0 ? seq.has.blocks[at - 1] : kNoBlock;
    if (!is_slot_page) {
      seq.has.blocks[at] = fresh.kind == Fresh::Kind::kWholePage
                               ? fresh_whole_page(change, fresh.seq, before)
                               : fresh_block(change, fresh.seq, before);
      continue;
    }
    const PageId page = fresh_page(change, before, seq.tenant, /*grows=*/true);
    for (std::int32_t j = 0; j < width; ++j) {
      add_ref(change, pool_.first_block(page) + j);
      seq.has.blocks[at + j] = pool_.first_block(page) + j;
    }
    slots_[seq.has.slot].entries[fresh.index].page = page;
    pool_.add_map(page, static_cast<std::int32_t>(fresh.index));
    change.maps.push_back({seq.has.slot, fresh.index, false});
  }
}

// A free page, held; the one behind the page of `before` if it can be.
PageId KVMemory::fresh_page(Change& change, BlockId before, Tenant tenant, bool grows) {
  if (pool_.num_free() == 0) make_room(1);
  const PageId page = pool_.take_page(before == kNoBlock ? kNoPage : pool_.page_of(before), grows);
  change.held.push_back(page);
  prepare_page(change, page, tenant);
  return page;
}

// The first block of a page whose others are set aside for the sequence.
BlockId KVMemory::fresh_whole_page(Change& change, SeqId id, BlockId before) {
  const PageId page = fresh_page(change, before, seqs_[id].tenant, /*grows=*/false);
  const BlockId block = pool_.first_block(page);
  add_ref(change, block);
  change.owners.emplace_back(page, pool_.owner(page));
  pool_.set_owner(page, id);
  return block;
}

// The next block of the sequence's own page, or one of a split page.
BlockId KVMemory::fresh_block(Change& change, SeqId id, BlockId before) {
  if (before != kNoBlock && num_own_behind(id, before) > 0) {
    if (config_.zero_policy == ZeroPolicy::kAlways) change.zero_blocks.push_back(before + 1);
    add_ref(change, before + 1);
    return before + 1;
  }
  BlockId block = pool_.take_block(seqs_[id].tenant);
  if (block == kNoBlock) {
    const PageId page = fresh_page(change, before, seqs_[id].tenant, /*grows=*/false);
    block = pool_.take_block_in(page);
    pool_.unhold(page);  // it splits: others may take its blocks at once
    change.held.pop_back();
  } else if (config_.zero_policy == ZeroPolicy::kAlways) {
    change.zero_blocks.push_back(block);
  }
  change.refs.push_back(block);
  return block;
}

}  // namespace vmserve
