// What each op does to the books, with a log of what to undo. No driver call but in assign_fresh(),
// which finds pages, and in rollback().
#pragma once

#include <cstdint>
#include <unordered_map>
#include <utility>
#include <vector>

#include "vmserve/memory/driver_work.h"
#include "vmserve/memory/room.h"

namespace vmserve {

class Ops : OnLedger {
 public:
  Ops(Ledger& ledger, DriverWork& work, Room& room) : OnLedger(ledger), work_(work), room_(room) {}

  void stage(Change& change, const std::vector<Op>& ops);
  std::int64_t pages_for_fresh(const Change& change) const;
  void assign_fresh(Change& change);
  // What cannot stay as it was without the driver stays changed: cuts, pages that were found.
  void rollback(Change& change);
  // All is as before the trial, to the bit.
  void end_trial(Change& change);

 private:
  void stage_one(Change& change, const Op& op);
  void stage_swap_out(Change& change, const Op& op, std::unordered_map<BlockId, SwapId>& copied);
  void hold_matches(Change& change, const std::vector<Op>& ops);
  static void note_targets(Change& change, const std::vector<Op>& ops);
  void undo_sequences(Change& change);
  void stage_attach(Change& change, const Op& op);
  void stage_fork(Change& change, const Op& op);
  void stage_convert(Change& change, const Op& op);
  void stage_swap_in(Change& change, const Op& op);
  void stage_grow(Change& change, const Op& op);
  void grow_virtual(Change& change, SeqId id, std::int64_t num_tokens);
  bool needs_copy(const Change& change, BlockId block) const;
  void grow_paged(Change& change, SeqId id, std::int64_t num_tokens);
  void bind(Change& change, SeqId id, const std::vector<BlockId>& blocks, std::int64_t num_tokens,
            bool own);
  void bind_copy(Change& change, SeqId id, std::int64_t index, const std::vector<BlockId>& blocks,
                 std::int64_t num_tokens);
  void bind_page(Change& change, SeqId id, std::int64_t index, const BoundPage& bound,
                 std::int64_t num_tokens);
  std::int64_t num_shown(const Slot& slot, const std::vector<BoundPage>& bound) const;
  bool is_missed(const Slot& slot, std::int64_t first, Tenant tenant) const;
  std::pair<std::int64_t, std::int64_t> rank_slot(const Slot& slot, Tenant tenant,
                                                  const std::vector<BoundPage>& bound,
                                                  std::int64_t want, bool pressed) const;
  SlotId choose_slot(const Change& change, Tenant tenant, const std::vector<BoundPage>& bound,
                     std::int64_t want, bool pressed) const;
  bool shows_foreign(PageId page, Tenant tenant) const;
  void take_slot(Change& change, SeqId id, const std::vector<BoundPage>& bound, std::int64_t want);
  void cut(Change& change, SlotId slot, std::int64_t index);
  bool claim_spare(Change& change, SeqId id, std::int64_t index);
  void seal_shared(Change& change, const Sequence& parent, const Op& op);
  PageId fresh_page(Change& change, BlockId before, Tenant tenant, bool grows);
  BlockId fresh_whole_page(Change& change, SeqId id, BlockId before);
  BlockId fresh_block(Change& change, SeqId id, BlockId before);

  DriverWork& work_;
  Room& room_;
};

}  // namespace vmserve
