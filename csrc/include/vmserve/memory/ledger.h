// The books: sequences, slots, pages and blocks, and the epochs that use them. No driver call.
// Terms and laws are those of kv_memory.h.
#pragma once

#include <cstdint>
#include <deque>
#include <limits>
#include <unordered_map>
#include <vector>

#include "vmserve/block_pool.h"
#include "vmserve/kv_memory_types.h"
#include "vmserve/lazy_array.h"
#include "vmserve/prefix_digest.h"
#include "vmserve/slot_table.h"
#include "vmserve/swap_space.h"

namespace vmserve {

// What a sequence has in memory.
struct Holding {
  View view = View::kVirtual;
  SlotId slot = kNoSlot;
  std::int64_t length = 0;
  std::int64_t sealed = 0;
  std::int64_t seal_limit = std::numeric_limits<std::int64_t>::max();  // worthless from here on
  std::int64_t num_trimmed = 0;                                        // leading blocks given up
  std::int64_t num_published = 0;  // leading blocks offered to the prefix cache
  std::vector<BlockId> blocks;
  bool swapped = false;
  std::vector<SwapId> swap;
};

struct Sequence {
  bool open = false;
  std::uint32_t generation = 0;  // tells apart those that had the same id
  Tenant tenant = 0;
  Holding has;
  std::vector<std::int32_t> tokens;
  bool nameless = false;  // its tokens are not (or not all) known: nothing is published
  Digest root{};
  std::vector<Digest> digests;  // of the first full blocks
};

// How one page of a virtual sequence comes about from blocks that exist.
struct BoundPage {
  enum class Kind { kHole, kShare, kClaim, kCopy } kind;
  PageId page;
  std::int32_t num_blocks;  // that hold its tokens
};

struct Forked {
  SeqId child;
  SeqId parent;
  std::int64_t num_tokens;
};

// Positions [start, length) that an epoch writes of a sequence.
struct Written {
  SeqId seq;
  std::uint32_t generation;
  std::int64_t start;
  std::int64_t length;
};

struct Record {
  Epoch epoch;
  std::vector<Written> written;
};

// Pages and newcomers of a step, and pages that a newcomer with nothing cached began with: those
// of the change that is being made, and the most of late, which is forgotten by and by.
struct RecentDemand {
  std::int64_t pages_now = 0;
  std::int64_t newcomers_now = 0;
  double step_pages = 0;
  double step_newcomers = 0;
  double first_pages = 0;
  Tenant newest_tenant = 0;
};

inline std::int64_t round_up_div(std::int64_t a, std::int64_t b) {
  return (a + b - 1) / b;
}

class Ledger {
 public:
  // `extent_pages`: see BlockPool. `traps_writes`: pages can be mapped read-only.
  Ledger(const MemoryConfig& config, std::int64_t extent_pages, bool traps_writes);

  const Sequence& open_seq(SeqId seq) const;
  Sequence& open_seq(SeqId seq);
  std::int64_t pages_for(std::int64_t num_tokens) const;
  std::int64_t blocks_for(std::int64_t num_tokens) const;
  std::int64_t num_pages(const Sequence& seq) const;
  std::int64_t num_matched(const Sequence& seq) const;  // blocks
  void extend_digests(Sequence& seq);
  void seal(SeqId id, std::int64_t length);
  void park(SlotId slot, Epoch retire);
  void write_table(SeqId seq, std::size_t from);
  // `own`: the sequence has these blocks already. `held`: how often a page may be held and still
  // be had as a whole.
  std::vector<BoundPage> bind_pages(const std::vector<BlockId>& blocks, std::int64_t num_tokens,
                                    bool own, std::int32_t held) const;
  std::int64_t num_restless_pages() const;
  std::vector<BlockId> matched_blocks(const Sequence& seq, std::int64_t num_tokens) const;
  bool takes_whole_page(std::int64_t block_index, bool dense) const;
  std::unordered_map<Tenant, std::vector<PageId>> loose_pages() const;
  std::int64_t num_usable_slots() const;
  std::int64_t num_retiring_pages() const;
  std::int64_t num_own_behind(SeqId seq, BlockId block) const;
  void inherit(const Forked& fork);
  void trim_front(SeqId id, std::int64_t first_token);
  bool can_unmap(const Slot& slot) const;
  SlotId oldest_parked() const;
  void forget_entries(SlotId slot, std::int64_t first, std::int64_t count);
  bool is_sole(PageId page) const;
  // Copy on write: others read the block, or may find it, and its rest is about to be written.
  // `gone`: how many of them will have copies of their own. A copy to host memory reads it too.
  bool needs_copy(BlockId block, std::int32_t gone = 0) const {
    return pool.refs(block) - gone > 1 || pool.is_published(block) || pool.copies(block) > 0;
  }
  void publish(Sequence& seq);
  bool offers_more(PageId page, std::int32_t count) const;
  bool is_clearing_late(PageId page) const;
  // Of all that decides what happens next: equal before and after a trial.
  std::uint64_t fingerprint() const;

  const MemoryConfig config;
  const bool traps_writes;
  BlockPool pool;
  std::vector<Sequence> seqs;
  std::vector<Slot> slots;
  std::int64_t pages_per_slot;
  std::int64_t blocks_per_row;
  LazyArray<BlockId> tables;
  std::vector<std::size_t> row_sizes;
  // Raised by what callers change, not by what happens behind them: that brings more than a plan
  // counted on or, if the driver refuses, is found out when the plan is carried out.
  std::uint64_t version = 0;
  std::uint64_t parkings = 0;
  Epoch begun = 0;
  Epoch completed = 0;
  std::deque<Record> records;
  std::int64_t num_open = 0;
  bool may_reopen = false;  // a page may be read-only that nobody shares any more
  RecentDemand recent;
  MemoryCounters totals;
};

// The ledger's parts, by the names that whoever works on it calls them.
class OnLedger {
 protected:
  explicit OnLedger(Ledger& ledger)
      : ledger_(ledger),
        config_(ledger.config),
        pool_(ledger.pool),
        seqs_(ledger.seqs),
        slots_(ledger.slots) {}

  Ledger& ledger_;
  const MemoryConfig& config_;
  BlockPool& pool_;
  std::vector<Sequence>& seqs_;
  std::vector<Slot>& slots_;
};

}  // namespace vmserve
