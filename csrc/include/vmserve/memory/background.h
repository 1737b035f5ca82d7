// Work of one kind of layers that runs while steps compute: background mapping, copies in flight.
#pragma once

#include <cstdint>
#include <deque>
#include <memory>
#include <utility>
#include <vector>

#include "vmserve/memory/driver_work.h"
#include "vmserve/memory/persistence.h"

namespace vmserve {

class Background : LedgerClient {
 public:
  Background(Ledger& ledger, DriverWork& work) : LedgerClient(ledger), work_(work) {}

  // After epochs have ended, which sealed what they wrote of the `grown` sequences. Drops what
  // running epochs do not read any more; `ended` has the ranges that read only a part.
  void end_epochs(const std::vector<SeqId>& grown, const EpochRecord& ended);
  // Makes fully sealed pages read-only in the slots.
  void seal_slots(const std::vector<SeqId>& seqs);
  // Applies mapper outcomes and finished copies to the ledger.
  void apply_finished_work();
  // Waits until no copy is in flight. False if none was, or if the driver failed to wait.
  bool finish_copies();
  void apply_outcome(Outcome outcome);
  // Waits until the mapper is idle and applies its outcomes. `is_waited_for`: count the driver
  // calls made here as calls that a step waited for.
  void drain_mapper(bool is_waited_for = true);
  // Submits the mapper commands that the next steps will need: growth, mapping, eviction,
  // unmapping.
  void schedule_work(const Grows& grows);
  // Makes pages writable again that were read-only because they were shared.
  void restore_write_access();
  const std::deque<InFlightCopies>& copies_in_flight() const { return copies_in_flight_; }
  void begin_copies(const Change& change);
  // Makes blocks outlive the process. At most once.
  void persist_to(std::shared_ptr<PageStore> store, double touch_seconds);
  // Null if there is no store.
  Persistence* persistence() const { return persistence_.get(); }
  void end_persistence() { persistence_.reset(); }
  // For a fork of the process, which has no threads to join.
  void abandon_persistence() { static_cast<void>(persistence_.release()); }

 private:
  void apply_finished_copies();
  void end_oldest_copies();
  std::int64_t lookahead_tokens(std::int64_t num_growing);
  void map_lookahead(SeqId id, std::int64_t target, std::int64_t least);
  // Maps `count` free pages after the slot's entries.
  void submit_map(SlotId slot, std::int64_t count, Tenant tenant);
  void apply_map(const Outcome& outcome);
  void apply_unmap(Outcome& outcome);
  void apply_grow(Outcome& outcome);
  // Marks the pages of a failed kSeal command as writable.
  void undo_seal(const Command& command, Unfinished unfinished);
  // Removes the slot's entries from `first` on; their pages are held until they are unmapped.
  std::vector<PageId> detach_pages(SlotId slot, std::int64_t first);
  void map_eager_slots();
  void update_recent_demand();
  std::int64_t target_free_pages() const;
  void grow_ahead(std::int64_t num_growing);
  void evict_ahead();
  void reclaim_ahead();
  void reclaim(SlotId slot, std::int64_t num_pages);
  bool is_free_for_newcomer(const Slot& slot) const;
  void seal_now(const Command& command);

  DriverWork& work_;
  std::deque<InFlightCopies> copies_in_flight_;
  std::vector<PageId> reclaimed_;  // unmapped by the mapper since the last step began
  double last_step_at_ = 0;
  double step_seconds_ = 0;  // mean of recent times from step to step
  bool is_growing_ = false;  // a kGrow command is in flight
  std::unique_ptr<Persistence> persistence_;
};

}  // namespace vmserve
