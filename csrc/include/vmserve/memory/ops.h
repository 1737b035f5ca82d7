// Makes the changes of each op to the ledger, with a journal to undo them. Only assign_fresh(),
// which finds pages, and rollback() call the driver.
#pragma once

#include <cstdint>
#include <utility>
#include <vector>

#include "vmserve/memory/driver_work.h"
#include "vmserve/memory/room.h"

namespace vmserve {

class Ops : LedgerClient {
 public:
  Ops(Ledger& ledger, DriverWork& work, Room& room)
      : LedgerClient(ledger), work_(work), room_(room) {}

  // Ops are staged one by one, which changes the ledger and records in `change` what the driver has
  // to do. The books still have what was before; they are changed after each op.
  void begin(Change& change, const std::vector<Op>& ops);
  // Returns the slot that the sequence takes, or kNoSlot.
  SlotId stage(Change& change, const Op& op);
  // Free pages that assign_fresh() will take.
  std::int64_t pages_for_fresh(const Change& change) const;
  // Assigns pages and blocks to change.fresh; commits and evicts pages for that.
  void assign_fresh(Change& change);
  // Undoes a failed change. Removed slot entries stay removed, and pages that were found stay
  // committed.
  void rollback(Change& change);
  // Restores slots, what sequences have, and swap blocks exactly. The pool undoes its own part.
  void undo_trial(Change& change);

  // Slots that another kind of layers chose for the sequences: a sequence has one slot in all.
  SlotChoices given_slots;

 private:
  void hold_matches(Change& change, const std::vector<Op>& ops);
  static void collect_growth_targets(Change& change, const std::vector<Op>& ops);
  void undo_sequences(Change& change);
  SlotId stage_attach(Change& change, const Op& op);
  SlotId stage_fork(Change& change, const Op& op);
  SlotId stage_convert(Change& change, const Op& op);
  void stage_swap_out(Change& change, const Op& op);
  SlotId stage_swap_in(Change& change, const Op& op);
  SlotId stage_grow(Change& change, const Op& op);
  SlotId grow_virtual(Change& change, SeqId id, SlotId slot, std::int64_t num_tokens);
  bool needs_copy(const Change& change, BlockId block) const;
  void grow_paged(Change& change, SeqId id, std::int64_t length, std::int64_t num_tokens);
  SlotId bind(Change& change, SeqId id, const std::vector<BlockId>& blocks,
              std::int64_t num_tokens);
  SlotId bind_to_slot(Change& change, SeqId id, const std::vector<BlockId>& blocks,
                      std::int64_t num_tokens, bool own);
  void bind_copy(Change& change, SeqId id, SlotId slot, std::int64_t index,
                 const std::vector<BlockId>& blocks, std::int64_t num_tokens);
  void bind_page(Change& change, SeqId id, SlotId slot, std::int64_t index, const BoundPage& bound,
                 std::int64_t num_tokens);
  std::int64_t num_shown(const Slot& slot, const std::vector<BoundPage>& bound) const;
  bool has_needed_pages(const Slot& slot, std::int64_t first, Tenant tenant) const;
  std::pair<std::int64_t, std::int64_t> rank_slot(const Slot& slot, Tenant tenant,
                                                  const std::vector<BoundPage>& bound,
                                                  std::int64_t want, bool short_of_pages) const;
  SlotId choose_slot(const Change& change, Tenant tenant, const std::vector<BoundPage>& bound,
                     std::int64_t want, bool short_of_pages) const;
  bool shows_other_tenant(PageId page, Tenant tenant) const;
  SlotId assign_slot(Change& change, SeqId id, const std::vector<BoundPage>& bound,
                     std::int64_t want);
  void truncate_entries(Change& change, SlotId slot, std::int64_t index);
  bool claim_spare(Change& change, SeqId id, SlotId slot, std::int64_t index);
  void seal_shared(Change& change, const Sequence& parent, const Op& op);
  PageId fresh_page(Change& change, BlockId before, Tenant tenant, bool grows);
  BlockId fresh_whole_page(Change& change, SeqId id, BlockId before);
  BlockId fresh_block(Change& change, SeqId id, BlockId before);

  DriverWork& work_;
  Room& room_;
};

}  // namespace vmserve
