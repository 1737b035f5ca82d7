#include "vmserve/memory/journal.h"

#include <algorithm>

namespace vmserve {

void Change::prepare_page(PageId page, Tenant tenant) {
  if (pool_.needs_zero(page, tenant)) zero_pages.push_back(page);
  pool_.mark_written(page, tenant);
}

void Change::add_ref(BlockId block) {
  refs.push_back(block);
  pool_.add_ref(block);
}

void Change::save(SeqId id) {
  saved.emplace_back(id, held_[id]);
  touched.push_back(id);
}

Change::SavedSlot& Change::saved_slot(SlotId id) {
  for (Change::SavedSlot& slot : slots) {
    if (slot.slot == id) return slot;
  }
  const Slot& slot = slots_[id];
  slots.push_back({id,
                   slot.seq,
                   slot.size(),
                   slot.num_sealed,
                   slot.size() - slot.num_pending,
                   slot.retire,
                   {},
                   {}});
  return slots.back();
}

void Change::make_writable(SlotId slot, std::int64_t index) {
  SlotEntry& entry = slots_[slot].entries[index];
  if (!entry.read_only) return;
  saved_slot(slot).made_writable.push_back(index);
  entry.read_only = false;
  slots_[slot].num_sealed = std::min(slots_[slot].num_sealed, index);
}

void Change::make_read_only(SlotId slot, std::int64_t index) {
  SlotEntry& entry = slots_[slot].entries[index];
  if (entry.read_only || !ledger_.traps_writes) return;
  saved_slot(slot).made_read_only.push_back(index);
  entry.read_only = true;
}

// The slot's pages stay mapped: running epochs may read them, and if the change fails the sequence
// keeps the slot.
void Change::leave_slot(SeqId id) {
  const SlotId slot = ledger_.slot_of(seqs_[id]);
  if (slot == kNoSlot) return;
  saved_slot(slot);
  slots_[slot].seq = kNoSeq;
  slots_[slot].retire = books_.begun + 1;
}

}  // namespace vmserve
