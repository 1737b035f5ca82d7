// The journal of one mutation: its effects on the ledger, how to undo them, and the driver calls
// that it still needs.
#pragma once

#include <optional>
#include <unordered_map>
#include <utility>
#include <vector>

#include "vmserve/driver.h"
#include "vmserve/memory/ledger.h"
#include "vmserve/transaction.h"

namespace vmserve {

// Memory that a change needs and that is not assigned yet.
struct Fresh {
  enum class Kind { kSlotPage, kWholePage, kBlock } kind;
  SeqId seq;
  std::int64_t index;  // kSlotPage: index of the page; else of the block
};

struct BlockCopy {
  SeqId seq;
  std::int64_t index;  // index of the block
  BlockId source;
  std::int64_t num_tokens;
};

struct SlotMap {
  SlotId slot;
  std::int64_t index;
  bool read_only;
};

struct SwapCopy {
  SeqId seq;
  std::int64_t index;  // index of the block; swap-in fills in `block` when memory is assigned
  BlockId block;
  SwapId swap;
};

// Slot entries removed from the ledger, and the address ranges to unmap for them.
struct RemovedEntries {
  SlotId slot;
  std::vector<SlotEntry> entries;
  std::vector<AddressRun> ranges;
};

struct Attached {
  SeqId seq;
  std::vector<BlockId> blocks;
};

// A mutation in progress: saved state for its undo, and the driver calls that make it effective.
//
// In a trial, ops are staged only to count what they need, and are undone completely. A shortage is
// counted instead of refused. Pages of a slot's pending mapper command count as if the command had
// finished.
class Change : LedgerClient {
 public:
  struct Grown {
    SeqId seq;
    std::size_t num_blocks;
    std::int64_t cow_index;
    BlockId cow_block;
  };
  struct SavedSlot {
    SlotId slot;
    SeqId seq;
    std::int64_t size;
    std::int64_t num_sealed;
    std::int64_t first_pending;
    Epoch retire;
    std::vector<std::int64_t> made_writable;
    std::vector<std::int64_t> made_read_only;
  };
  Change(Ledger& ledger, PageDriver& driver, bool dense, bool is_trial)
      : LedgerClient(ledger), tx(driver), dense(dense), is_trial(is_trial) {}

  // The slot's state before this change, saved at the first call.
  SavedSlot& saved_slot(SlotId slot);
  // Change the recorded access; the driver's access changes in DriverWork::execute().
  void make_writable(SlotId slot, std::int64_t index);
  void make_read_only(SlotId slot, std::int64_t index);
  // Parks the sequence's slot, if it has one. Its pages stay mapped.
  void leave_slot(SeqId id);
  void add_ref(BlockId block);
  // Saves what the sequence has and marks its block table as changed.
  void save(SeqId id);
  // Records that the tenant will write the page, and zeroes it first if the policy requires it.
  void prepare_page(PageId page, Tenant tenant);

  Transaction tx;
  const bool dense;  // no page is reserved for one sequence
  const bool is_trial;
  // Results of a trial.
  // Coming pages: not idle yet, but idle or mapped in the slot before the plan is applied.
  std::int64_t num_coming = 0;
  std::int64_t missing_slots = 0;
  std::int64_t missing_swap_blocks = 0;
  std::int64_t num_split_gaps = 0;  // first mappings of slots; each splits an unmapped range
  // Driver work before memory is assigned. Removed entries stay removed even if the change fails.
  std::vector<RemovedEntries> removed;
  std::uint64_t awaited_command = 0;  // last mapper command on these slots
  std::vector<SlotId> used_slots;     // slots that must not be in a repair
  SlotChoices taken_slots;            // slots that sequences took
  std::vector<std::pair<SeqId, Held>> saved;
  std::vector<Grown> grown;
  std::vector<SavedSlot> slots;
  std::vector<BlockId> refs;
  std::vector<BlockId> matched;  // referenced so that finding memory cannot evict them
  // Lengths to which converted sequences grow in the same plan.
  std::unordered_map<SeqId, std::int64_t> targets;
  std::vector<PageId> held;
  std::vector<std::pair<PageId, SeqId>> owners;
  std::vector<SwapId> swap_taken;
  std::unordered_map<BlockId, SwapId> swapped;  // where blocks that are swapped out go
  std::vector<Fresh> fresh;
  std::vector<BlockCopy> copies;
  std::vector<SwapCopy> swap_out, swap_in;
  std::optional<Mark> copy_mark;  // reached when swap_out is done; set with a copy stream
  std::vector<Attached> attached;
  // References that the change replaces by private copies (copy on write).
  std::unordered_map<BlockId, std::int32_t> replaced_refs;
  std::vector<PageId> zero_pages;
  std::vector<BlockId> zero_blocks;
  std::vector<SlotMap> maps;
  // Applied by commit().
  std::vector<BlockId> drops;
  std::vector<SwapId> swap_drops;
  bool drops_past = false;  // a growth sees not all that its sequence has
  std::vector<SeqId> touched;
  MemoryCounters counts;
};

}  // namespace vmserve
