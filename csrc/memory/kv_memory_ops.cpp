// What each op does to the books, before any driver call.
#include <algorithm>
#include <cerrno>

#include "vmserve/errors.h"
#include "vmserve/kv_memory.h"
#include "vmserve/text.h"

namespace vmserve {
namespace {

// What is remembered of what a newcomer took when the next one comes.
constexpr double kRememberedOfNewcomers = 0.98;

}  // namespace

// -- ops

void KVMemory::stage(Change& change, const Op& op) {
  switch (op.kind) {
    case OpKind::kAttach:
      return stage_attach(change, op);
    case OpKind::kFork:
      return stage_fork(change, op);
    case OpKind::kConvert:
      return stage_convert(change, op);
    case OpKind::kSwapIn:
      return stage_swap_in(change, op);
    case OpKind::kGrow:
      return stage_grow(change, op);
    case OpKind::kSwapOut:
      return;
  }
}

// What is attached must not be evicted, or claimed by another op, while memory is sought.
void KVMemory::hold_matches(Change& change, const std::vector<Op>& ops) {
  for (const Op& op : ops) {
    if (op.kind != OpKind::kAttach || op.num_tokens == 0) continue;
    change.attached.push_back({op.seq, matched_blocks(seqs_[op.seq], op.num_tokens)});
    PageId last = kNoPage;
    for (const BlockId block : change.attached.back().blocks) {
      // A page in use is not evicted, and the plan counts on its other blocks: only this one is
      // kept.
      if (pool_.used(pool_.page_of(block)) > 0) {
        add_ref(change, block);
        change.matched.push_back(block);
        continue;
      }
      if (pool_.page_of(block) == last) continue;
      last = pool_.page_of(block);
      change.held.push_back(last);
      pool_.hold(last);
    }
  }
}

void KVMemory::note_targets(Change& change, const std::vector<Op>& ops) {
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

void KVMemory::stage_attach(Change& change, const Op& op) {
  Sequence& seq = seqs_[op.seq];
  change.counts.prefix_query_blocks +=
      std::max<std::int64_t>(0, static_cast<std::int64_t>(seq.tokens.size()) - 1) /
      config_.block_tokens;
  if (op.num_tokens == 0) return;
  save(change, op.seq);
  const auto attached =
      std::find_if(change.attached.begin(), change.attached.end(),
                   [&](const Attached& candidate) { return candidate.seq == op.seq; });
  bind(change, op.seq, attached->blocks, op.num_tokens, /*own=*/false);
  seq.has.length = seq.has.sealed = op.num_tokens;
  seq.has.num_published = op.num_tokens / config_.block_tokens;
  change.counts.prefix_hit_blocks += seq.has.num_published;
}

void KVMemory::stage_fork(Change& change, const Op& op) {
  const Sequence& parent = seqs_[op.other];
  Sequence& child = seqs_[op.seq];
  save(change, op.seq);
  std::vector<BlockId> blocks(parent.has.blocks.begin(),
                              parent.has.blocks.begin() + blocks_for(op.num_tokens));
  child.has.num_trimmed = std::min(parent.has.num_trimmed, blocks_for(op.num_tokens));
  if (op.num_tokens > 0) bind(change, op.seq, blocks, op.num_tokens, /*own=*/false);
  child.has.length = op.num_tokens;
  child.has.sealed = std::min(parent.has.sealed, op.num_tokens);
  // What is worthless of the parent may lie behind the fork.
  if (parent.has.seal_limit < op.num_tokens) child.has.seal_limit = parent.has.seal_limit;
  child.has.num_published =
      std::min(parent.has.num_published, op.num_tokens / config_.block_tokens);
  seal_shared(change, parent, op);
  change.forked.push_back({op.seq, op.other, op.num_tokens});
}

// What a fork shares is read-only for the parent, too: a write that was not copied first is a trap.
// Positions that an epoch is still to write stay writable until they are sealed.
void KVMemory::seal_shared(Change& change, const Sequence& parent, const Op& op) {
  if (!config_.access_under_readers || parent.has.slot == kNoSlot) return;
  require_whole(parent.has.slot);
  Slot& slot = slots_[parent.has.slot];
  // A paged child shares blocks of the last page: it is sealed as a whole, or not yet. A virtual
  // child has a copy of a partial one.
  const std::int64_t width = config_.page_tokens();
  const std::int64_t slack = seqs_[op.seq].has.view == View::kPaged ? width - 1 : 0;
  const std::int64_t stop = std::min(parent.has.sealed / width, (op.num_tokens + slack) / width);
  for (std::int64_t i = slot.num_sealed; i < stop; ++i) {
    if (slot.entries[i].page != kNoPage) make_read_only(change, parent.has.slot, i);
  }
  slot.num_sealed = std::max(slot.num_sealed, stop);
}

void KVMemory::stage_convert(Change& change, const Op& op) {
  Sequence& seq = seqs_[op.seq];
  if (seq.has.view == op.view) return;
  save(change, op.seq);
  if (op.view == View::kVirtual) {
    const std::vector<BlockId> before = seq.has.blocks;
    seq.has.view = View::kVirtual;
    seq.has.blocks.clear();
    if (seq.has.length > 0) bind(change, op.seq, before, seq.has.length, /*own=*/true);
    for (const BlockId block : before) {
      if (block != kNoBlock) change.drops.push_back(block);
    }
    ++change.counts.converted_to_virtual;
    return;
  }
  seq.has.view = View::kPaged;
  // What it grows into in the same plan it has already.
  const auto growth = change.targets.find(op.seq);
  const std::int64_t target = growth == change.targets.end() ? 0 : growth->second;
  const auto keep = std::min(static_cast<std::size_t>(blocks_for(std::max(seq.has.length, target))),
                             seq.has.blocks.size());
  while (seq.has.blocks.size() > keep) {
    if (seq.has.blocks.back() != kNoBlock) change.drops.push_back(seq.has.blocks.back());
    seq.has.blocks.pop_back();
  }
  leave_slot(change, op.seq);
  if (keep > 0 && seq.has.blocks.back() != kNoBlock) {
    // The rest of the tail page stays this sequence's to fill.
    const PageId tail = pool_.page_of(seq.has.blocks.back());
    if (pool_.owner(tail) == kNoSeq && keep % config_.blocks_per_page != 0) {
      change.owners.emplace_back(tail, kNoSeq);
      pool_.set_owner(tail, op.seq);
    }
  }
  ++change.counts.converted_to_paged;
  ++change.counts.converted_zero_copy;
}

void KVMemory::stage_swap_out(Change& change, const Op& op,
                              std::unordered_map<BlockId, SwapId>& copied) {
  Sequence& seq = seqs_[op.seq];
  save(change, op.seq);
  const std::int64_t total = blocks_for(seq.has.length);
  {
    const auto driving = mapper_->lock_driver();
    swap_->reserve(std::min(total, swap_->num_free()));
  }
  for (std::int64_t i = 0; i < static_cast<std::int64_t>(seq.has.blocks.size()); ++i) {
    const BlockId block = seq.has.blocks[i];
    if (block == kNoBlock) {
      if (i < total) seq.has.swap.push_back(kNoSwap);
      continue;
    }
    change.drops.push_back(block);
    if (i >= total) continue;
    const auto [at, is_new] = copied.emplace(block, kNoSwap);
    if (is_new) {
      at->second = swap_->take();
      change.swap_out.push_back({op.seq, i, block, at->second});
    } else {
      swap_->share(at->second);
    }
    change.swap_taken.push_back(at->second);
    seq.has.swap.push_back(at->second);
  }
  leave_slot(change, op.seq);
  seq.has.blocks.clear();
  seq.has.swapped = true;
}

void KVMemory::stage_swap_in(Change& change, const Op& op) {
  Sequence& seq = seqs_[op.seq];
  save(change, op.seq);
  const std::vector<SwapId> swap = std::move(seq.has.swap);
  seq.has.swap.clear();
  seq.has.swapped = false;
  const auto total = static_cast<std::int64_t>(swap.size());
  std::int64_t holes = 0;
  while (holes < total && swap[holes] == kNoSwap) ++holes;
  if (seq.has.view == View::kVirtual) {
    // Pages that lie wholly in the past stay given up.
    const std::int64_t hole_pages = holes / config_.blocks_per_page;
    if (total > 0) {
      const std::vector<BoundPage> past(static_cast<std::size_t>(hole_pages),
                                        {BoundPage::Kind::kHole, kNoPage, 0});
      take_slot(change, op.seq, past, pages_for(seq.has.length));
      seq.has.blocks.assign(static_cast<std::size_t>(hole_pages * config_.blocks_per_page),
                            kNoBlock);
      grow_virtual(change, op.seq, seq.has.length);
    }
  } else {
    seq.has.blocks.assign(static_cast<std::size_t>(holes), kNoBlock);
    const std::int64_t length = seq.has.length;
    seq.has.length = 0;  // nothing there to copy on write
    grow_paged(change, op.seq, length);
    seq.has.length = length;
  }
  for (std::int64_t i = 0; i < total; ++i) {
    if (swap[i] == kNoSwap) continue;
    change.swap_drops.push_back(swap[i]);
    change.swap_in.push_back({op.seq, i, kNoBlock, swap[i]});
  }
}

void KVMemory::stage_grow(Change& change, const Op& op) {
  Sequence& seq = seqs_[op.seq];
  change.grows.push_back(op);
  if (op.num_tokens == 0 && seq.has.view == View::kVirtual && seq.has.slot == kNoSlot) {
    save(change, op.seq);
    take_slot(change, op.seq, {}, 0);
  }
  if (op.num_tokens <= seq.has.length) return;
  if (seq.has.view == View::kVirtual) {
    grow_virtual(change, op.seq, op.num_tokens);
  } else {
    grow_paged(change, op.seq, op.num_tokens);
  }
}

void KVMemory::require_whole(SlotId slot) const {
  if (!slots_[slot].in_repair) return;
  throw DriverError(
      "repair", EBUSY,
      "slot " + std::to_string(slot) + " has mappings that could not be undone: " + last_error_);
}

void KVMemory::grow_virtual(Change& change, SeqId id, std::int64_t num_tokens) {
  Sequence& seq = seqs_[id];
  const std::int64_t have = num_pages(seq);
  const std::int64_t want = pages_for(num_tokens);
  if (want <= have) return;
  if (seq.has.slot == kNoSlot) {
    save(change, id);
    take_slot(change, id, {}, want);
    ++newcomers_now_;
    newest_tenant_ = seq.tenant;
    first_pages_ = std::max(static_cast<double>(want), first_pages_ * kRememberedOfNewcomers);
  } else {
    require_whole(seq.has.slot);
    change.grown.push_back({id, seq.has.blocks.size(), -1, kNoBlock});
    change.touched.push_back(id);
  }
  saved(change, seq.has.slot);
  Slot& slot = slots_[seq.has.slot];
  seq.has.blocks.resize(static_cast<std::size_t>(want * config_.blocks_per_page), kNoBlock);
  for (std::int64_t index = have; index < want; ++index) {
    if (claim_spare(change, id, index)) continue;
    slot.entries.push_back({kNoPage, false});
    change.fresh.push_back({Fresh::Kind::kSlotPage, id, index});
  }
}

// The slot's page at `index`, which its last sequence or the mapper left there, becomes the
// sequence's. False if there is none, or it is somebody's; then the slot ends before it.
bool KVMemory::claim_spare(Change& change, SeqId id, std::int64_t index) {
  Sequence& seq = seqs_[id];
  const SlotId slot_id = seq.has.slot;
  Slot& slot = slots_[slot_id];
  if (index >= slot.size()) return false;
  const PageId page = slot.entries[index].page;
  if (page == kNoPage || pool_.state(page) != PageState::kIdle) {
    Change::SavedSlot& before = saved(change, slot_id);
    before.size = std::min(before.size, index);
    if (!truncate(slot_id, index)) throw DriverError("unmap", EIO, last_error_);
    return false;
  }
  totals_.evicted_blocks += pool_.drop_cached(page);
  prepare_page(change, page, seq.tenant);
  for (std::int32_t j = 0; j < config_.blocks_per_page; ++j) {
    const BlockId block = pool_.first_block(page) + j;
    add_ref(change, block);
    seq.has.blocks[index * config_.blocks_per_page + j] = block;
  }
  make_writable(change, slot_id, index);
  ++change.counts.adopted_pages;
  return true;
}

// Copy on write: others read this block, or may find it, and its rest is about to be written. Of
// those that all go on from it in one step the last one stays. A copy to host memory reads it too.
bool KVMemory::needs_copy(const Change& change, BlockId block) const {
  const auto left = change.left.find(block);
  const std::int32_t gone = left == change.left.end() ? 0 : left->second;
  return pool_.refs(block) - gone > 1 || pool_.is_published(block) || pool_.copies(block) > 0;
}

void KVMemory::grow_paged(Change& change, SeqId id, std::int64_t num_tokens) {
  Sequence& seq = seqs_[id];
  const auto have = static_cast<std::int64_t>(seq.has.blocks.size());
  const std::int64_t want = blocks_for(num_tokens);
  Change::Grown grown{id, seq.has.blocks.size(), -1, kNoBlock};
  const std::int64_t tail = seq.has.length / config_.block_tokens;
  const std::int64_t written = seq.has.length % config_.block_tokens;
  if (written > 0 && seq.has.blocks[tail] != kNoBlock && needs_copy(change, seq.has.blocks[tail])) {
    grown.cow_index = tail;
    grown.cow_block = seq.has.blocks[tail];
    ++change.left[grown.cow_block];
    change.copies.push_back({id, tail, grown.cow_block, written});
    change.drops.push_back(grown.cow_block);
    change.fresh.push_back({Fresh::Kind::kBlock, id, tail});
    ++change.counts.cow_blocks;
  }
  if (want <= have && grown.cow_index < 0) return;
  change.grown.push_back(grown);
  change.touched.push_back(id);
  if (grown.cow_index >= 0) seq.has.blocks[tail] = kNoBlock;
  seq.has.blocks.resize(static_cast<std::size_t>(std::max(have, want)), kNoBlock);
  for (std::int64_t index = have; index < want; ++index) {
    const auto kind =
        takes_whole_page(index, change.dense) ? Fresh::Kind::kWholePage : Fresh::Kind::kBlock;
    change.fresh.push_back({kind, id, index});
  }
}

}  // namespace vmserve
