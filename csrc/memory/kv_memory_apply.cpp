// Plans carried out. Books are changed first, with a log of what to undo; then the driver does
// what makes them true, as one transaction; then what can only be given up (blocks that nobody
// needs any more) is given up, which cannot fail.
#include <algorithm>
#include <cerrno>
#include <chrono>
#include <numeric>
#include <utility>

#include "vmserve/errors.h"
#include "vmserve/kv_memory.h"
#include "vmserve/text.h"

namespace vmserve {
namespace {

using Clock = std::chrono::steady_clock;

double seconds_since(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

// Appends a run, merged with the last one where the two are adjacent.
void append(std::vector<MapRun>& runs, const MapRun& run, std::size_t frame_bytes) {
  if (!runs.empty()) {
    MapRun& last = runs.back();
    const Address end = last.addr + static_cast<std::size_t>(last.frames.count) * frame_bytes;
    if (run.addr == end && run.frames.first == last.frames.first + last.frames.count &&
        run.access == last.access && run.prefault == last.prefault) {
      last.frames.count += run.frames.count;
      return;
    }
  }
  runs.push_back(run);
}

void append(std::vector<CopyRun>& runs, const CopyRun& run) {
  if (!runs.empty()) {
    CopyRun& last = runs.back();
    if (run.dst == last.dst + last.bytes && run.src == last.src + last.bytes) {
      last.bytes += run.bytes;
      return;
    }
  }
  runs.push_back(run);
}

void append(std::vector<AddressRun>& runs, const AddressRun& run) {
  if (!runs.empty() && run.addr == runs.back().addr + runs.back().bytes) {
    runs.back().bytes += run.bytes;
    return;
  }
  runs.push_back(run);
}

}  // namespace

Epoch KVMemory::apply(const std::vector<Op>& ops, std::uint64_t version) {
  const auto lock = enter();
  require_alive();
  if (version != version_) {
    throw MisuseError("the plan is stale: something was changed or released since; plan again");
  }
  const auto start = Clock::now();
  const std::vector<Op> wanted = merged(ops);
  validate(wanted);
  retry_repairs();
  Change change(*driver_);
  Plan plan = assess(wanted, change.dense);
  wait_for_mapper(wanted, plan);
  plan = assess(wanted, change.dense);
  if (!plan.fits()) {
    throw OutOfMemoryError("the plan needs " + with_commas(plan.needed_pages) + " pages, " +
                           with_commas(plan.available_pages) + " can be had, and lacks " +
                           with_commas(plan.missing_slots) + " slots and " +
                           with_commas(plan.missing_swap_blocks) + " swap blocks");
  }
  try {
    // Packing forgets what split pages have cached, which an attach relies on.
    if (change.dense && !attaches(wanted)) squeeze();
    hold_matches(change, wanted);
    std::unordered_map<BlockId, SwapId> copied;
    for (const Op& op : wanted) {
      if (op.kind == OpKind::kSwapOut) {
        stage_swap_out(change, op, copied);
      } else {
        stage(change, op);
      }
    }
    assign_fresh(change);
    execute(change);
  } catch (const Error& error) {
    rollback(change);
    fail_if_sticky(error);
    throw;
  } catch (...) {
    rollback(change);
    throw;
  }
  commit(change);
  totals_.map_seconds += change.num_maps > 0 ? seconds_since(start) : 0;
  tend(change.grows);
  return begun_;
}

// What the ops touch must not be in the mapper's hands. In the steady state nothing is.
void KVMemory::wait_for_mapper(const std::vector<Op>& ops, const Plan& plan) {
  if (!works_ahead()) return;
  std::uint64_t until = 0;
  const std::int64_t at_hand = pool_.num_free();
  if (plan.needed_pages > at_hand) until = mapper_->last_id();
  for (const Op& op : ops) {
    const Sequence& seq = seqs_[op.seq];
    if (op.kind != OpKind::kGrow) {
      until = mapper_->last_id();
    } else if (seq.has.view == View::kVirtual && pages_for(op.num_tokens) > num_pages(seq)) {
      const bool has_slot = seq.has.slot != kNoSlot;
      // Sealing what lies behind may take its time: growth goes on behind it.
      until = std::max(until, has_slot ? slots_[seq.has.slot].last_map : mapper_->last_id());
    }
  }
  if (until == 0) return;
  const auto start = Clock::now();
  if (mapper_->wait(until)) {
    ++totals_.waits;
    totals_.wait_seconds += seconds_since(start);
  }
  absorb();
}

// -- the log

void KVMemory::add_ref(Change& change, BlockId block) {
  change.refs.push_back(block);
  pool_.add_ref(block);
}

void KVMemory::save(Change& change, SeqId id) {
  change.holdings.emplace_back(id, seqs_[id].has);
  change.touched.push_back(id);
}

KVMemory::Change::SavedSlot& KVMemory::saved(Change& change, SlotId id) {
  for (Change::SavedSlot& slot : change.slots) {
    if (slot.slot == id) return slot;
  }
  change.slots.push_back({id, slots_[id].seq, slots_[id].size(), slots_[id].retire, {}, {}});
  return change.slots.back();
}

void KVMemory::make_writable(Change& change, SlotId slot, std::int64_t index) {
  SlotEntry& entry = slots_[slot].entries[index];
  if (!entry.read_only) return;
  saved(change, slot).made_writable.push_back(index);
  entry.read_only = false;
}

void KVMemory::make_read_only(Change& change, SlotId slot, std::int64_t index) {
  SlotEntry& entry = slots_[slot].entries[index];
  if (entry.read_only || !driver_->capabilities().read_only) return;
  saved(change, slot).made_read_only.push_back(index);
  entry.read_only = true;
}

// What it shows stays mapped: epochs that run may read it, and if the change fails it is still the
// sequence's.
void KVMemory::leave_slot(Change& change, SeqId id) {
  const SlotId slot = std::exchange(seqs_[id].has.slot, kNoSlot);
  if (slot == kNoSlot) return;
  saved(change, slot);
  slots_[slot].seq = kNoSeq;
  slots_[slot].retire = begun_ + 1;
}

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

void KVMemory::stage_attach(Change& change, const Op& op) {
  Sequence& seq = seqs_[op.seq];
  change.query_blocks +=
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
  change.hit_blocks += seq.has.num_published;
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
  seal_shared(change, parent, op.num_tokens);
  change.forked.push_back({op.seq, op.other, op.num_tokens});
}

// What a fork shares is read-only for the parent, too: a write that was not copied first is a trap.
// Positions that an epoch is still to write stay writable until they are sealed.
void KVMemory::seal_shared(Change& change, const Sequence& parent, std::int64_t num_tokens) {
  if (parent.has.slot == kNoSlot) return;
  require_whole(parent.has.slot);
  Slot& slot = slots_[parent.has.slot];
  // A page that is shared in part is sealed as a whole, or not yet.
  const std::int64_t width = config_.page_tokens();
  const std::int64_t stop = std::min(parent.has.sealed / width, (num_tokens + width - 1) / width);
  for (std::int64_t i = stop - 1; i >= 0 && !slot.entries[i].read_only; --i) {
    if (slot.entries[i].page == kNoPage) break;
    make_read_only(change, parent.has.slot, i);
  }
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
    ++change.to_virtual;
    return;
  }
  seq.has.view = View::kPaged;
  const auto keep = static_cast<std::size_t>(blocks_for(seq.has.length));
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
  ++change.to_paged;
  ++change.zero_copy;
}

void KVMemory::stage_swap_out(Change& change, const Op& op,
                              std::unordered_map<BlockId, SwapId>& copied) {
  Sequence& seq = seqs_[op.seq];
  save(change, op.seq);
  const std::int64_t total = blocks_for(seq.has.length);
  try {
    const auto driving = mapper_->lock_driver();
    swap_->reserve(std::min(total, swap_->num_free()));
  } catch (const OutOfMemoryError& error) {
    swap_->disable();  // from now on plans say that there is no room
    last_error_ = error.what();
    throw;
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
  totals_.evicted += pool_.drop_cached(page);
  prepare_page(change, page, seq.tenant);
  for (std::int32_t j = 0; j < config_.blocks_per_page; ++j) {
    const BlockId block = pool_.first_block(page) + j;
    add_ref(change, block);
    seq.has.blocks[index * config_.blocks_per_page + j] = block;
  }
  make_writable(change, slot_id, index);
  ++change.adopted_pages;
  return true;
}

void KVMemory::grow_paged(Change& change, SeqId id, std::int64_t num_tokens) {
  Sequence& seq = seqs_[id];
  const auto have = static_cast<std::int64_t>(seq.has.blocks.size());
  const std::int64_t want = blocks_for(num_tokens);
  Change::Grown grown{id, seq.has.blocks.size(), -1, kNoBlock};
  const std::int64_t tail = seq.has.length / config_.block_tokens;
  const std::int64_t written = seq.has.length % config_.block_tokens;
  if (written > 0 && seq.has.blocks[tail] != kNoBlock &&
      (pool_.refs(seq.has.blocks[tail]) > 1 || pool_.is_published(seq.has.blocks[tail]))) {
    // Copy on write: others read this block, or may find it, and its rest is about to be written.
    grown.cow_index = tail;
    grown.cow_block = seq.has.blocks[tail];
    change.copies.push_back({id, tail, grown.cow_block, written});
    change.drops.push_back(grown.cow_block);
    change.fresh.push_back({Fresh::Kind::kBlock, id, tail});
    ++change.cow;
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
  const SlotId slot_id = seq.has.slot;
  Slot& slot = slots_[slot_id];
  seq.has.blocks.clear();
  bool is_free = true;
  for (std::size_t i = 0; i < bound.size(); ++i) {
    const auto index = static_cast<std::int64_t>(i);
    const auto first = static_cast<std::int64_t>(i) * width;
    const bool mapped = index < slot.size();
    using Kind = BoundPage::Kind;
    if (bound[i].kind == Kind::kHole) {
      if (!mapped) slot.entries.push_back({kNoPage, false});
      seq.has.blocks.insert(seq.has.blocks.end(), static_cast<std::size_t>(width), kNoBlock);
      continue;
    }
    if (bound[i].kind == Kind::kCopy) {
      seq.has.blocks.insert(seq.has.blocks.end(), static_cast<std::size_t>(width), kNoBlock);
      if (!mapped || !claim_spare(change, id, index)) {
        slot.entries.push_back({kNoPage, false});
        change.fresh.push_back({Fresh::Kind::kSlotPage, id, index});
      }
      for (std::int32_t j = 0; j < bound[i].num_blocks; ++j) {
        const std::int64_t left = num_tokens - (first + j) * config_.block_tokens;
        if (blocks[first + j] == kNoBlock) continue;
        change.copies.push_back(
            {id, first + j, blocks[first + j], std::min<std::int64_t>(left, config_.block_tokens)});
      }
      is_free = false;
      continue;
    }
    const bool shares = bound[i].kind == Kind::kShare;
    const PageId page = bound[i].page;
    for (std::int32_t j = 0; j < width; ++j) {
      const BlockId block = pool_.first_block(page) + j;
      // What lies behind the tokens will be written.
      const bool is_whole = (first + j + 1) * config_.block_tokens <= num_tokens;
      if (!is_whole && pool_.is_published(block)) {
        pool_.unpublish(block);
        ++totals_.evicted;
      }
      add_ref(change, block);
      seq.has.blocks.push_back(block);
    }
    if (!mapped) {
      slot.entries.push_back({page, shares});
      pool_.add_map(page, static_cast<std::int32_t>(i));
      change.maps.push_back({slot_id, index, shares});
    } else if (!shares) {
      make_writable(change, slot_id, index);
    } else {
      make_read_only(change, slot_id, index);
      ++change.adopted_pages;
    }
  }
  if (own && is_free) ++change.zero_copy;
  if (pages_for(num_tokens) > static_cast<std::int64_t>(bound.size())) {
    grow_virtual(change, id, num_tokens);
  }
}

bool KVMemory::shows_foreign(PageId page, Tenant tenant) const {
  return page != kNoPage && config_.zero_policy != ZeroPolicy::kNever &&
         pool_.tenant(page) != tenant && !pool_.known_zero(page);
}

// A slot for a sequence that starts with `bound` and needs `want` pages. Best first: one that shows
// the bound pages already; one whose pages nobody would miss; an empty one; the one that was parked
// longest ago, in place if memory is short.
SlotId KVMemory::choose_slot(const Change& change, Tenant tenant,
                             const std::vector<BoundPage>& bound, std::int64_t want,
                             bool pressed) const {
  SlotId best = kNoSlot;
  std::int64_t best_rank = -1;
  std::int64_t best_score = 0;
  for (SlotId id = 0; id < config_.num_slots; ++id) {
    const Slot& slot = slots_[id];
    if (slot.active() || slot.in_repair || slot.retire > completed_) continue;
    // One that a sequence leaves in this very change is still hers if the change fails.
    if (std::any_of(change.slots.begin(), change.slots.end(),
                    [&](const Change::SavedSlot& before) { return before.slot == id; })) {
      continue;
    }
    std::int64_t matched = 0;
    const auto most = std::min<std::int64_t>(slot.size(), static_cast<std::int64_t>(bound.size()));
    while (matched < most && bound[matched].page != kNoPage &&
           slot.entries[matched].page == bound[matched].page) {
      ++matched;
    }
    bool is_missed = false;  // a spare that holds cached blocks or is somebody's
    for (std::int64_t i = matched; i < slot.size() && !is_missed; ++i) {
      const PageId page = slot.entries[i].page;
      is_missed = page == kNoPage || pool_.used(page) > 0 || pool_.cached(page) > 0 ||
                  shows_foreign(page, tenant);
    }
    const bool fits = matched == static_cast<std::int64_t>(bound.size()) || slot.size() == matched;
    std::int64_t rank = 0;
    std::int64_t score = -static_cast<std::int64_t>(slot.parked_at);
    if (matched > 0 && fits && (!is_missed || pressed)) {
      rank = 4;
      score = matched;
    } else if (bound.empty() && !slot.empty() && !is_missed) {
      rank = 3;  // the least that is enough, else the most
      score = slot.size() >= want ? (std::int64_t{1} << 40) - slot.size() : slot.size();
    } else if (slot.empty()) {
      rank = 1;
      score = -id;
    } else if (pressed && bound.empty() && want >= slot.size()) {
      rank = 2;  // all of it would be evicted anyway, tail first
    }
    if (rank > best_rank || (rank == best_rank && score > best_score)) {
      best = id;
      best_rank = rank;
      best_score = score;
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
  std::int64_t matched = 0;
  const auto most = std::min<std::int64_t>(slot.size(), static_cast<std::int64_t>(bound.size()));
  while (matched < most && bound[matched].page != kNoPage &&
         slot.entries[matched].page == bound[matched].page) {
    ++matched;
  }
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
  change.adopted_slots += slot.empty() ? 0 : 1;
  for (std::size_t i = 0; i < bound.size() && bound[i].kind == BoundPage::Kind::kHole; ++i) {
    if (static_cast<std::int64_t>(i) >= slot.size()) slot.entries.push_back({kNoPage, false});
  }
}

// -- fresh memory

void KVMemory::prepare_page(Change& change, PageId page, Tenant tenant) {
  if (pool_.needs_zero(page, tenant)) change.zero_pages.emplace_back(page, pool_.tenant(page));
  pool_.mark_written(page, tenant);
}

void KVMemory::assign_fresh(Change& change) {
  std::int64_t pages = 0;
  std::unordered_map<Tenant, std::int64_t> blocks;
  for (const Fresh& fresh : change.fresh) {
    pages += fresh.kind != Fresh::Kind::kBlock ? 1 : 0;
    blocks[seqs_[fresh.seq].tenant] += fresh.kind == Fresh::Kind::kBlock ? 1 : 0;
  }
  for (const auto& [tenant, count] : blocks) {
    const std::int64_t width = config_.blocks_per_page;
    const std::int64_t missing = std::max<std::int64_t>(0, count - pool_.num_split_blocks(tenant));
    pages += (missing + width - 1) / width;
  }
  // Blocks that a sequence finds in a page of its own were counted as if they needed another.
  make_room(std::min(pages, pool_.num_available()));
  const auto take = [&](PageId previous, Tenant tenant) {
    if (pool_.num_free() == 0) make_room(1);
    const PageId page = pool_.take_page(previous);
    change.held.push_back(page);
    prepare_page(change, page, tenant);
    return page;
  };
  for (const Fresh& fresh : change.fresh) {
    Sequence& seq = seqs_[fresh.seq];
    const std::int32_t width = config_.blocks_per_page;
    const std::int64_t at =
        fresh.kind == Fresh::Kind::kSlotPage ? fresh.index * width : fresh.index;
    const BlockId before = at > 0 ? seq.has.blocks[at - 1] : kNoBlock;
    const PageId previous = before == kNoBlock ? kNoPage : pool_.page_of(before);
    if (fresh.kind == Fresh::Kind::kSlotPage) {
      const PageId page = take(previous, seq.tenant);
      for (std::int32_t j = 0; j < width; ++j) {
        add_ref(change, pool_.first_block(page) + j);
        seq.has.blocks[at + j] = pool_.first_block(page) + j;
      }
      slots_[seq.has.slot].entries[fresh.index].page = page;
      pool_.add_map(page, static_cast<std::int32_t>(fresh.index));
      change.maps.push_back({seq.has.slot, fresh.index, false});
      continue;
    }
    BlockId block = kNoBlock;
    if (fresh.kind == Fresh::Kind::kWholePage) {
      const PageId page = take(previous, seq.tenant);
      block = pool_.first_block(page);
      add_ref(change, block);
      change.owners.emplace_back(page, pool_.owner(page));
      pool_.set_owner(page, fresh.seq);
    } else if (before != kNoBlock && pool_.owner(previous) == fresh.seq &&
               pool_.retire(previous) <= completed_ && (before + 1) % width != 0 &&
               pool_.refs(before + 1) == 0 && !pool_.is_published(before + 1)) {
      block = before + 1;
      add_ref(change, block);
    } else {
      block = pool_.take_block(seq.tenant);
      if (block == kNoBlock) {
        const PageId page = take(previous, seq.tenant);
        block = pool_.take_block_in(page);
        pool_.unhold(page);  // it splits: others may take its blocks at once
        change.held.pop_back();
      } else if (config_.zero_policy == ZeroPolicy::kAlways) {
        change.zero_blocks.push_back(block);
      }
      change.refs.push_back(block);
    }
    seq.has.blocks[at] = block;
  }
}

// -- the driver's part

void KVMemory::map_runs(const Change& change, std::vector<MapRun>& runs) const {
  const std::size_t page_bytes = space_->page_bytes();
  for (std::int32_t group = 0; group < config_.num_groups; ++group) {
    for (const SlotMap& map : change.maps) {
      const PageId page = slots_[map.slot].entries[map.index].page;
      append(runs,
             {space_->slot(group, map.slot, map.index),
              {space_->frame(group, page), 1},
              map.read_only ? Access::kRead : Access::kReadWrite,
              !map.read_only},
             page_bytes);
    }
  }
  for (std::int32_t group = 0; space_->has_shadow() && group < config_.num_groups; ++group) {
    for (const SlotMap& map : change.maps) {
      const PageId page = slots_[map.slot].entries[map.index].page;
      append(runs,
             {space_->shadow(group, map.slot, map.index),
              {space_->frame(group, page), 1},
              Access::kRead,
              false},
             page_bytes);
    }
  }
}

std::vector<CopyRun> KVMemory::copy_runs(const Change& change) const {
  const auto block_bytes = static_cast<std::size_t>(config_.block_tokens * config_.token_bytes);
  std::vector<CopyRun> runs;
  for (std::int32_t group = 0; group < config_.num_groups; ++group) {
    for (const BlockCopy& copy : change.copies) {
      const BlockId block = seqs_[copy.seq].has.blocks[copy.index];
      append(runs, {space_->arena(group) + static_cast<std::size_t>(block) * block_bytes,
                    space_->arena(group) + static_cast<std::size_t>(copy.source) * block_bytes,
                    static_cast<std::size_t>(copy.num_tokens * config_.token_bytes)});
    }
  }
  return runs;
}

std::vector<CopyRun> KVMemory::swap_runs(const std::vector<SwapCopy>& copies, bool out) const {
  const auto block_bytes = static_cast<std::size_t>(config_.block_tokens * config_.token_bytes);
  std::vector<CopyRun> runs;
  for (std::int32_t group = 0; group < config_.num_groups; ++group) {
    for (const SwapCopy& copy : copies) {
      const Address block =
          space_->arena(group) + static_cast<std::size_t>(copy.block) * block_bytes;
      const Address swap = swap_->address(group, copy.swap);
      append(runs, out ? CopyRun{swap, block, block_bytes} : CopyRun{block, swap, block_bytes});
    }
  }
  return runs;
}

std::vector<AccessRun> KVMemory::access_runs(const Change& change, bool writable) const {
  std::vector<AccessRun> runs;
  const Access access = writable ? Access::kReadWrite : Access::kRead;
  for (const Change::SavedSlot& slot : change.slots) {
    for (const std::int64_t index : writable ? slot.made_writable : slot.made_read_only) {
      for (std::int32_t group = 0; group < config_.num_groups; ++group) {
        runs.push_back({space_->slot(group, slot.slot, index), space_->page_bytes(), access});
      }
    }
  }
  return runs;
}

void KVMemory::execute(Change& change) {
  for (SwapCopy& copy : change.swap_in) copy.block = seqs_[copy.seq].has.blocks[copy.index];
  std::vector<AddressRun> zeros;
  for (std::int32_t group = 0; group < config_.num_groups; ++group) {
    for (const auto& [page, before] : change.zero_pages) {
      append(zeros, {space_->arena(group, page), space_->page_bytes()});
    }
    const auto bytes = static_cast<std::size_t>(config_.block_tokens * config_.token_bytes);
    for (const BlockId block : change.zero_blocks) {
      append(zeros, {space_->arena(group) + static_cast<std::size_t>(block) * bytes, bytes});
    }
  }
  std::vector<MapRun> maps;
  map_runs(change, maps);
  const std::vector<AccessRun> writable = access_runs(change, /*writable=*/true);
  const std::vector<AccessRun> read_only = access_runs(change, /*writable=*/false);
  const std::vector<CopyRun> out = swap_runs(change.swap_out, /*out=*/true);
  const std::vector<CopyRun> in = swap_runs(change.swap_in, /*out=*/false);
  const std::vector<CopyRun> copies = copy_runs(change);
  change.num_maps = static_cast<std::int64_t>(maps.size());
  change.num_access = static_cast<std::int64_t>(writable.size() + read_only.size());
  change.copied_blocks = static_cast<std::int64_t>(change.copies.size());
  if (zeros.empty() && maps.empty() && change.num_access == 0 && out.empty() && in.empty() &&
      copies.empty()) {
    return;
  }
  const auto driving = mapper_->lock_driver();
  driver_->copy(out);  // before anything is written
  driver_->zero(zeros);
  driver_->copy(copies);
  driver_->copy(in);
  change.tx.map(maps);
  change.tx.set_access(writable, Access::kRead);
  change.tx.set_access(read_only, Access::kReadWrite);
  totals_.swap_runs += static_cast<std::int64_t>(out.size() + in.size());
}

// -- the end of it

void KVMemory::commit(Change& change) {
  ++begun_;
  ++version_;
  totals_.zeroed += static_cast<std::int64_t>(change.zero_pages.size());
  for (const PageId page : change.held) pool_.unhold(page);
  for (const BlockId block : change.matched) pool_.drop_ref(block, 0);
  for (auto block = change.drops.rbegin(); block != change.drops.rend(); ++block) {
    pool_.drop_ref(*block, begun_);
  }
  for (const SwapId swap : change.swap_drops) swap_->drop(swap);
  for (const Change::SavedSlot& slot : change.slots) {
    if (!slots_[slot.slot].active()) park(slot.slot, begun_);
  }
  Record record{begun_, {}, {}};
  record.seqs.reserve(change.grows.size());
  record.lengths.reserve(change.grows.size());
  for (const Op& op : change.grows) {
    Sequence& seq = seqs_[op.seq];
    const std::int64_t before = seq.has.length;
    seq.has.length = std::max(before, op.num_tokens);
    record.seqs.emplace_back(op.seq, seq.generation);
    record.lengths.push_back(seq.has.length);
  }
  records_.push_back(std::move(record));
  for (const Forked& fork : change.forked) inherit(fork);
  for (const Op& op : change.grows) {
    if (op.first_token > 0) trim_front(op.seq, op.first_token);
  }
  for (const SeqId id : change.touched) write_table(id, 0);
  totals_.mapped += static_cast<std::int64_t>(change.maps.size());
  totals_.map_calls += change.num_maps;
  totals_.access_calls += change.num_access;
  totals_.unhidden += change.num_maps + change.num_access;
  totals_.adopted_pages += change.adopted_pages;
  totals_.adopted_slots += change.adopted_slots;
  totals_.cow += change.cow;
  totals_.copied += change.copied_blocks;
  totals_.forks += static_cast<std::int64_t>(change.forked.size());
  totals_.to_virtual += change.to_virtual;
  totals_.to_paged += change.to_paged;
  totals_.zero_copy += change.zero_copy;
  totals_.queries += change.query_blocks;
  totals_.hits += change.hit_blocks;
  totals_.swapped_out += static_cast<std::int64_t>(change.swap_out.size());
  totals_.swapped_in += static_cast<std::int64_t>(change.swap_in.size());
}

// The child's prefix has the parent's name.
void KVMemory::inherit(const Forked& fork) {
  const Sequence& parent = seqs_[fork.parent];
  Sequence& child = seqs_[fork.child];
  const auto known = std::min(parent.tokens.size(), static_cast<std::size_t>(fork.num_tokens));
  child.nameless = parent.nameless || known < static_cast<std::size_t>(fork.num_tokens);
  child.root = parent.root;
  child.tokens.assign(parent.tokens.begin(),
                      parent.tokens.begin() + static_cast<std::ptrdiff_t>(known));
  // What epochs that run still write of it is sealed, or worthless, with them.
  for (Record& record : records_) {
    if (record.epoch == begun_) break;
    for (std::size_t i = 0; i < record.seqs.size(); ++i) {
      if (record.seqs[i] != std::make_pair(fork.parent, parent.generation)) continue;
      record.lengths.push_back(std::min(record.lengths[i], fork.num_tokens));
      record.seqs.emplace_back(fork.child, child.generation);
      break;
    }
  }
  const auto full = std::min(parent.digests.size(), known / config_.block_tokens);
  child.digests.assign(parent.digests.begin(),
                       parent.digests.begin() + static_cast<std::ptrdiff_t>(full));
}

// Pages (virtual) or blocks (paged) that lie wholly before the token are given up.
void KVMemory::trim_front(SeqId id, std::int64_t first_token) {
  Sequence& seq = seqs_[id];
  const std::int64_t unit =
      seq.has.view == View::kVirtual ? config_.page_tokens() : config_.block_tokens;
  const std::int64_t stop = std::min(first_token / unit * unit / config_.block_tokens,
                                     static_cast<std::int64_t>(seq.has.blocks.size()));
  if (stop <= seq.has.num_trimmed) return;
  for (std::int64_t i = seq.has.num_trimmed; i < stop; ++i) {
    BlockId& block = seq.has.blocks[i];
    if (block == kNoBlock) continue;
    const PageId page = pool_.page_of(block);
    pool_.drop_ref(block, begun_);
    if (pool_.owner(page) == id && pool_.used(page) == 0) pool_.set_owner(page, kNoSeq);
    block = kNoBlock;
  }
  seq.has.num_trimmed = stop;
  write_table(id, 0);
}

void KVMemory::rollback(Change& change) {
  Unfinished unfinished;
  {
    const auto driving = mapper_->lock_driver();
    unfinished = change.tx.rollback();
  }
  Repair repair;
  repair.steps = std::move(unfinished.steps);
  const bool is_clean = repair.steps.empty();
  // Entries that this change appended, or made writable, are as before.
  for (auto saved = change.slots.rbegin(); saved != change.slots.rend(); ++saved) {
    Slot& slot = slots_[saved->slot];
    for (const std::int64_t index : saved->made_writable) {
      if (index < saved->size) slot.entries[index].read_only = true;
    }
    for (const std::int64_t index : saved->made_read_only) slot.entries[index].read_only = false;
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
  for (const auto& [page, before] : change.zero_pages) pool_.mark_written(page, before);
  for (auto grown = change.grown.rbegin(); grown != change.grown.rend(); ++grown) {
    std::vector<BlockId>& blocks = seqs_[grown->seq].has.blocks;
    blocks.resize(grown->num_blocks);
    if (grown->cow_index >= 0) blocks[grown->cow_index] = grown->cow_block;
  }
  for (auto holding = change.holdings.rbegin(); holding != change.holdings.rend(); ++holding) {
    seqs_[holding->first].has = std::move(holding->second);
  }
  for (const SwapId swap : change.swap_taken) swap_->drop(swap);
  if (!is_clean) add_repair(std::move(repair), unfinished.error);
}

}  // namespace vmserve
