// Plans carried out. Books are changed first (kv_memory_ops.cpp, kv_memory_bind.cpp), with a log of
// what to undo; then the driver does what makes them true (kv_memory_execute.cpp), as one
// transaction; then what can only be given up is given up, which cannot fail.
#include <algorithm>
#include <chrono>
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
  if (wait_for_mapper(wanted, plan)) plan = assess(wanted, change.dense);
  if (plan.needed_mappings > mapping_room()) {
    settle_locked();  // what the mapper has made is counted, what it may make is not
    plan = assess(wanted, change.dense);
  }
  if (!plan.fits()) {
    throw OutOfMemoryError("the plan needs " + with_commas(plan.needed_pages) + " pages, " +
                           with_commas(plan.available_pages) + " can be had, and lacks " +
                           with_commas(plan.missing_slots) + " slots and " +
                           with_commas(plan.missing_swap_blocks) + " swap blocks; it needs " +
                           with_commas(plan.needed_mappings) + " memory mappings, " +
                           with_commas(plan.available_mappings) + " can be had");
  }
  try {
    make_mapping_room(plan.needed_mappings);
    // Packing forgets what split pages have cached, which an attach relies on.
    if (change.dense && !attaches(wanted)) squeeze();
    hold_matches(change, wanted);
    note_targets(change, wanted);
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
  totals_.map_seconds += change.counts.map_calls > 0 ? seconds_since(start) : 0;
  tend(change.grows);
  reopen_pages();
  shed();
  return begun_;
}

// What the ops touch must not be in the mapper's hands. In the steady state nothing is.
// True if its outcomes were entered, which may change what a plan needs.
bool KVMemory::wait_for_mapper(const std::vector<Op>& ops, const Plan& plan) {
  if (!works_ahead()) return false;
  std::uint64_t until = 0;
  const std::int64_t at_hand = pool_.num_free();
  if (plan.needed_pages > at_hand) until = mapper_->last_id();
  for (const Op& op : ops) {
    const Sequence& seq = seqs_[op.seq];
    if (op.kind != OpKind::kGrow && op.kind != OpKind::kAttach) {
      until = mapper_->last_id();
    } else if (op.kind == OpKind::kAttach ||
               (seq.has.view == View::kVirtual && pages_for(op.num_tokens) > num_pages(seq))) {
      const bool has_slot = seq.has.slot != kNoSlot;
      // Sealing what lies behind may take its time: growth goes on behind it, and a newcomer waits
      // for that of the slot which it takes alone.
      until = std::max(until, has_slot ? slots_[seq.has.slot].last_map : last_mapping_);
    }
  }
  if (until == 0) return false;
  const auto start = Clock::now();
  if (mapper_->wait(until)) {
    ++totals_.mapper_waits;
    totals_.mapper_wait_seconds += seconds_since(start);
  }
  absorb();
  return true;
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
  slots_[slot].num_sealed = std::min(slots_[slot].num_sealed, index);
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

// -- the end of it

void KVMemory::commit(Change& change) {
  ++begun_;
  ++version_;
  for (const PageId page : change.held) pool_.unhold(page);
  for (const BlockId block : change.matched) pool_.drop_ref(block, 0);
  if (change.copy_mark) {
    Copying copying{*change.copy_mark, {}};
    copying.blocks.reserve(change.swap_out.size());
    for (const SwapCopy& copy : change.swap_out) {
      copying.blocks.push_back(copy.block);
      pool_.begin_copy(copy.block);
    }
    copying_.push_back(std::move(copying));
  }
  for (auto block = change.drops.rbegin(); block != change.drops.rend(); ++block) {
    pool_.drop_ref(*block, begun_);
  }
  // What is converted was bound as if it were shared.
  may_reopen_ = may_reopen_ || !change.drops.empty() || change.counts.converted_to_virtual > 0;
  for (const SwapId swap : change.swap_drops) swap_->drop(swap);
  for (const Change::SavedSlot& slot : change.slots) {
    if (!slots_[slot.slot].active()) park(slot.slot, begun_);
  }
  Record record{begun_, {}};
  record.written.reserve(change.grows.size());
  for (const Op& op : change.grows) {
    Sequence& seq = seqs_[op.seq];
    const std::int64_t before = seq.has.length;
    seq.has.length = std::max(before, op.num_tokens);
    record.written.push_back({op.seq, seq.generation, before, seq.has.length});
  }
  records_.push_back(std::move(record));
  for (const Forked& fork : change.forked) inherit(fork);
  for (const Op& op : change.grows) {
    if (op.first_token > 0) trim_front(op.seq, op.first_token);
  }
  for (const SeqId id : change.touched) write_table(id, 0);
  MemoryCounters& counts = change.counts;
  counts.pages_zeroed = static_cast<std::int64_t>(change.zero_pages.size());
  counts.pages_mapped = static_cast<std::int64_t>(change.maps.size());
  counts.unhidden_calls = counts.map_calls + counts.access_calls;
  counts.forks = static_cast<std::int64_t>(change.forked.size());
  counts.swapped_out_blocks = static_cast<std::int64_t>(change.swap_out.size());
  counts.swapped_in_blocks = static_cast<std::int64_t>(change.swap_in.size());
  totals_.add(counts);
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
    const auto of_parent =
        std::find_if(record.written.begin(), record.written.end(), [&](const Written& written) {
          return written.seq == fork.parent && written.generation == parent.generation;
        });
    if (of_parent == record.written.end()) continue;
    record.written.push_back({fork.child, child.generation,
                              std::min(of_parent->start, fork.num_tokens),
                              std::min(of_parent->length, fork.num_tokens)});
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
    may_reopen_ = may_reopen_ || pool_.refs(block) > 1;
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
    for (const std::int64_t index : saved->made_read_only) {
      slot.entries[index].read_only = false;
      slot.num_sealed = std::min(slot.num_sealed, index);
    }
    slot.num_sealed = std::min(slot.num_sealed, saved->size);
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
  // What was queued before the failure may have cleared them, or copied to them: nobody's data, so
  // that whoever comes next has them cleared.
  for (const PageId page : change.zero_pages) pool_.mark_written(page, kNobody);
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
