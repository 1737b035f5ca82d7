// One kind of layers: its pages, and all that works on them. Terms and laws: kv_memory.h.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "vmserve/memory/background.h"
#include "vmserve/memory/ops.h"
#include "vmserve/memory/planner.h"
#include "vmserve/memory/room.h"

namespace vmserve {

struct KindConfig {
  std::shared_ptr<PageDriver> driver;
  MemoryConfig memory;
};

// Throws MisuseError for numbers that no configuration has.
void check_sizes(const MemoryConfig& config);
// Throws MisuseError for a configuration that the driver cannot have.
MemoryConfig validated(const PageDriver& driver, MemoryConfig config);

// Functions are called with the memory's lock held.
class Kind {
 public:
  // Pre: the configuration was validated. `number`: that of the kind in its memory.
  Kind(const KindConfig& kind, Books& books, std::size_t number);

  std::int64_t page_bytes() const {
    return config.num_groups * static_cast<std::int64_t>(work.space->page_bytes());
  }

  // -- parts of a plan
  // The ops as this kind sees them: it needs no position before its window.
  std::vector<Op> own_ops(std::vector<Op> merged) const;
  void assess(const std::vector<Op>& own);
  // The same for ops that are about to be applied. `is_planned`: nothing changed since assess().
  void assess_again(const std::vector<Op>& own, bool is_planned);
  const Assessed& assessed() const { return assessed_; }

  // -- parts of a mutation
  void make_room_for_plan();     // mappings, and pages by compacting
  void execute(Change& change);  // finds pages and makes the driver calls
  void undo(Change& change, const Error* error);
  // Before and after the books have the change.
  void commit_pages(Change& change, bool has_forks);
  void commit_tables(const Change& change);
  // Notes a growth that is committed. Returns the first position that its epoch reads.
  std::int64_t note_growth(const Op& grow);
  void release(SeqId seq);
  void park(SlotId slot);

  // Gives up positions that no later query sees, of sequences that no running epoch computes.
  // Returns whether there were any.
  bool give_up_past(const std::vector<bool>& running, bool from_slots);
  // Whether sequences of running epochs will drop blocks when these end.
  bool will_give_up_past(const std::vector<bool>& running) const;

  bool is_holding_pages() const;  // work in the background may give back pages
  void finish_pending_work();     // mapper, copies to host memory, repairs
  void release_swap_memory();     // if nothing is swapped out
  void enable_shadow();

  // -- persistence
  bool is_within_reach(const Digest& digest) const {
    return background.persistence()->is_within_reach(digest);
  }
  // Holds idle pages that the attaches need; the caller releases them.
  void hold_found(const std::vector<Op>& attaches, std::vector<PageId>& held);

  // -- reading
  MemoryStats stats();
  std::int64_t num_pages_shown() const;  // up to the last committed one
  MemoryMap map(std::int64_t num_pages, std::int64_t pages_per_cell) const;
  void check();
  std::uint64_t fingerprint() const;

  Ledger ledger;
  const MemoryConfig& config = ledger.config;
  BlockPool& pool = ledger.pool;
  DriverWork work;
  Room room;
  Ops ops;
  Planner planner;
  Background background;

 private:
  bool wait_for_mapper(const std::vector<Op>& own, const Plan& plan);

  Books& books_ = ledger.books;
  std::vector<Sequence>& seqs_ = ledger.books.seqs;
  std::vector<Held>& held_ = ledger.held;
  std::vector<Slot>& slots_ = ledger.slots;
  Assessed assessed_;
};

using Kinds = std::vector<std::unique_ptr<Kind>>;

}  // namespace vmserve
