// What a mutation did to the books, and so what to undo; and what is still to be done for it.
#pragma once

#include <optional>
#include <unordered_map>
#include <utility>
#include <vector>

#include "vmserve/driver.h"
#include "vmserve/memory/ledger.h"
#include "vmserve/transaction.h"

namespace vmserve {

// Memory that a change still has to find.
struct Fresh {
  enum class Kind { kSlotPage, kWholePage, kBlock } kind;
  SeqId seq;
  std::int64_t index;  // kSlotPage: of the page; else of the block
};

struct BlockCopy {
  SeqId seq;
  std::int64_t index;  // of the block
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
  std::int64_t index;  // of the block, which swapping in finds last
  BlockId block;
  SwapId swap;
};

// Entries that a slot has no more in the books, and the driver's part of that.
struct Cut {
  SlotId slot;
  std::vector<SlotEntry> entries;
  std::vector<AddressRun> ranges;
};

struct Attached {
  SeqId seq;
  std::vector<BlockId> blocks;
};

// A mutation under way: what was done to the books, and so what to undo; and what the driver is
// to do before it is true. In a trial the ops are staged to be counted, and undone to the bit:
// what they lack is counted, not refused, and pages that the mapper has in hand for a slot count as
// if it had finished.
class Change : OnLedger {
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
      : OnLedger(ledger),
        tx(driver),
        dense(dense),
        is_trial(is_trial),
        before{ledger.version, ledger.recent, ledger.totals} {}

  SavedSlot& saved(SlotId slot);
  void make_writable(SlotId slot, std::int64_t index);
  void make_read_only(SlotId slot, std::int64_t index);
  void leave_slot(SeqId id);
  void add_ref(BlockId block);
  void save(SeqId id);
  void prepare_page(PageId page, Tenant tenant);

  Transaction tx;
  const bool dense;  // no page is set aside for a sequence
  const bool is_trial;
  // Of a trial.
  std::int64_t num_coming = 0;  // pages that are to be idle, or in a slot, any moment
  std::int64_t missing_slots = 0;
  std::int64_t missing_swap_blocks = 0;
  struct {
    std::uint64_t version;
    RecentDemand recent;
    MemoryCounters totals;
  } before;
  std::int64_t num_cut_gaps = 0;  // slots that begin to show something
  // Before anything is assigned or written. Cuts stand even if the change fails.
  std::vector<Cut> cuts;
  std::uint64_t wait_for = 0;  // the mapper's command that may concern what slots show
  std::vector<SlotId> uses;    // slots whose mappings must be as the books say
  std::vector<std::pair<SeqId, Holding>> holdings;
  std::vector<Grown> grown;
  std::vector<SavedSlot> slots;
  std::vector<BlockId> refs;
  std::vector<BlockId> matched;                     // kept while memory is sought
  std::unordered_map<SeqId, std::int64_t> targets;  // tokens that what is converted grows to
  std::vector<PageId> held;
  std::vector<std::pair<PageId, SeqId>> owners;
  std::vector<SwapId> swap_taken;
  std::vector<Fresh> fresh;
  std::vector<BlockCopy> copies;
  std::vector<SwapCopy> swap_out, swap_in;
  std::optional<Mark> copy_mark;  // behind swap_out, where that runs beside the kernels
  std::vector<Attached> attached;
  std::unordered_map<BlockId, std::int32_t> left;  // by so many, each to a copy of its own
  std::vector<PageId> zero_pages;
  std::vector<BlockId> zero_blocks;
  std::vector<SlotMap> maps;
  // At the commit.
  std::vector<BlockId> drops;
  std::vector<SwapId> swap_drops;
  std::vector<Op> grows;
  std::vector<Forked> forked;
  std::vector<SeqId> touched;
  MemoryCounters counts;
};

}  // namespace vmserve
