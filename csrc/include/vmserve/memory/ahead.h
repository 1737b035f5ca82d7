// What is done while steps compute, and what becomes of it.
#pragma once

#include <cstdint>
#include <deque>
#include <utility>
#include <vector>

#include "vmserve/memory/driver_work.h"

namespace vmserve {

// Blocks on their way to host memory beside the kernels.
struct Copying {
  Mark mark;
  std::vector<BlockId> blocks;
};

class Ahead : OnLedger {
 public:
  Ahead(Ledger& ledger, DriverWork& work) : OnLedger(ledger), work_(work) {}

  void complete(Epoch epoch, bool sealed);
  void absorb();  // the mapper's outcomes, and marks that were reached
  bool finish_copies();
  void absorb(Outcome outcome);
  // Waits for the mapper, then absorbs; `counts`: because somebody needs it.
  void settle(bool counts = true);
  void tend(const std::vector<Op>& grows);  // gives the mapper what the next steps will need
  void reopen_pages();
  // The epoch is over when the driver has reached a mark that is made now.
  void mark(Epoch epoch) { marks_.emplace_back(epoch, work_.driver->mark()); }
  const std::deque<Copying>& copying() const { return copying_; }
  void begin_copies(const Change& change);

 private:
  void absorb_marks();
  void absorb_copies();
  void end_oldest_copies();
  void look_ahead(SeqId id, std::int64_t target);
  void premap(SlotId slot, std::int64_t count, Tenant tenant);
  void premapped(const Outcome& outcome);
  void unmapped(Outcome& outcome);
  void grew(Outcome& outcome);
  void unseal(const Command& command, Unfinished unfinished);
  std::vector<PageId> reclaim_slot(SlotId slot, std::int64_t first);
  void keep_eager_slots();
  void note_demand();
  std::int64_t wanted_free() const;
  void grow_ahead();
  void evict_ahead();
  void reclaim_ahead();
  void reclaim(SlotId slot, std::int64_t num_pages);
  bool is_ready(const Slot& slot) const;
  void seal_slots(const std::vector<SeqId>& seqs);
  void seal_now(const Command& command);

  DriverWork& work_;
  std::deque<std::pair<Epoch, Mark>> marks_;
  std::deque<Copying> copying_;
  std::vector<PageId> reclaimed_;  // by the mapper, since the last step was begun
  bool is_growing_ = false;        // the mapper commits pages
};

}  // namespace vmserve
