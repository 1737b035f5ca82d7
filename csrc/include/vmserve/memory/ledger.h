// The ledger of one kind of layers: slots, pages, blocks, and what sequences have of them. No
// driver call. Terms and laws: kv_memory.h.
#pragma once

#include <cstdint>
#include <functional>
#include <unordered_map>
#include <utility>
#include <vector>

#include "vmserve/block_pool.h"
#include "vmserve/kv_memory_types.h"
#include "vmserve/lazy_array.h"
#include "vmserve/memory/books.h"
#include "vmserve/slot_table.h"
#include "vmserve/swap_space.h"

namespace vmserve {

// What a kind has of one sequence.
struct Held {
  std::vector<BlockId> blocks;
  std::int64_t num_trimmed = 0;   // leading blocks dropped (sliding window)
  std::int64_t first_needed = 0;  // what lies before is dropped once no running epoch reads it
  std::vector<SwapId> swap;
};

// How one page of a virtual sequence is made from existing blocks: nothing there, the page shared,
// the page taken over, or the blocks copied.
struct BoundPage {
  enum class Kind { kHole, kShare, kClaim, kCopy } kind;
  PageId page;
  std::int32_t num_blocks;  // blocks that hold its tokens
};

// Demand of recent steps. `*_now` counts the change in progress. The others are the maximum of
// recent steps and decay slowly. `first_pages`: pages that a new sequence without cached tokens
// started with.
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
  // `number`: that of the kind.
  Ledger(Books& books, std::size_t number, const MemoryConfig& config, std::int64_t extent_pages,
         bool traps_writes);

  // A state has no slot, and is always in the paged view.
  View view(const Sequence& seq) const { return config.has_state() ? View::kPaged : seq.kv.view; }
  SlotId slot_of(const Sequence& seq) const { return config.has_state() ? kNoSlot : seq.kv.slot; }
  std::int64_t pages_for(std::int64_t num_tokens) const;
  std::int64_t blocks_for(std::int64_t num_tokens) const;
  std::int64_t num_pages(SeqId seq) const;
  // The largest n <= `most` for which all blocks are there that a query right after n blocks sees;
  // `is_there` says which are.
  std::int64_t num_matched(const Sequence& seq, std::int64_t most,
                           const std::function<bool(const Digest&)>& is_there) const;
  bool is_cached(const Digest& digest) const { return pool.find(digest) != kNoBlock; }
  void park(SlotId slot, Epoch retire);
  void write_table(SeqId seq, std::size_t from);
  // How each page can be made from `blocks`. `own`: the sequence already has these blocks. `held`:
  // holds of this change on a page, which do not prevent taking it over.
  std::vector<BoundPage> bind_pages(const std::vector<BlockId>& blocks, std::int64_t num_tokens,
                                    bool own, std::int32_t held) const;
  std::int64_t num_uncompactable_pages() const;
  // Cached blocks of positions below `num_tokens`; kNoBlock wholly before `first_token`.
  std::vector<BlockId> matched_blocks(const Sequence& seq, std::int64_t num_tokens,
                                      std::int64_t first_token) const;
  bool takes_whole_page(std::int64_t block_index, bool dense) const;
  std::unordered_map<Tenant, std::vector<PageId>> compactable_pages() const;
  std::int64_t num_retiring_pages() const;
  std::int64_t num_own_blocks_after(SeqId seq, BlockId block) const;
  // Leading blocks, of whole pages in the virtual view, that lie wholly before the token.
  std::int64_t num_past_blocks(const Sequence& seq, std::int64_t first_token) const;
  // Drops pages (virtual) or blocks (paged) that lie wholly before the token. Returns whether there
  // were any.
  bool trim_front(SeqId id, std::int64_t first_token);
  // Trims each sequence in running epochs to what the oldest of these reads. Trims sequences that
  // are only in `ended` epochs to what the last of these read. Positions are sealed before they are
  // dropped, and so can be published. Returns whether anything was dropped.
  bool drop_unseen(const EpochRecord& ended = {});
  // The first position that a range of an epoch reads, as this kind needs it.
  std::int64_t first_seen(const EpochRecord& record, std::size_t range) const {
    return record.first_seen[range * books.num_kinds + number];
  }
  bool can_unmap(const Slot& slot) const;
  SlotId oldest_parked() const;
  void remove_entries(SlotId slot, std::int64_t first, std::int64_t count);
  bool is_exclusive(PageId page) const;
  // Whether a write to the block needs a copy first: it is shared, published, or being copied to
  // host memory. `num_replaced`: references that the same change replaces by copies.
  bool needs_copy(BlockId block, std::int32_t num_replaced = 0) const {
    return pool.refs(block) - num_replaced > 1 || pool.is_published(block) ||
           pool.copies(block) > 0;
  }
  // Publishes a block that was sealed.
  void publish(SeqId seq, std::int64_t index);
  // Publishes the state at a checkpoint, unless a later step has begun to overwrite it.
  void publish_state(SeqId seq);
  bool has_published_from(PageId page, std::int32_t count) const;
  bool zeroing_races_readers(PageId page) const;
  // A hash of all state that affects later decisions: equal before and after a trial.
  std::uint64_t fingerprint() const;

  Books& books;
  const std::size_t number;
  const MemoryConfig config;
  const bool traps_writes;  // the driver can map pages read-only
  BlockPool pool;
  std::vector<Held> held;  // by sequence
  std::vector<Slot> slots;
  std::int64_t pages_per_slot;
  std::int64_t blocks_per_row;
  LazyArray<BlockId> tables;
  std::vector<std::size_t> row_sizes;
  std::uint64_t parkings = 0;
  bool may_restore_access = false;  // a page may be read-only and no longer shared
  RecentDemand recent;
  MemoryCounters totals;
  // Digests of blocks that steps published, for a store.
  bool logs_published = false;
  std::vector<Digest> just_published;

 private:
  void publish_block(BlockId block, const Digest& digest);
};

// Base class with short names for the parts of the ledger and the books.
class LedgerClient {
 protected:
  explicit LedgerClient(Ledger& ledger)
      : ledger_(ledger),
        books_(ledger.books),
        config_(ledger.config),
        pool_(ledger.pool),
        seqs_(ledger.books.seqs),
        held_(ledger.held),
        slots_(ledger.slots) {}

  Ledger& ledger_;
  Books& books_;
  const MemoryConfig& config_;
  BlockPool& pool_;
  std::vector<Sequence>& seqs_;
  std::vector<Held>& held_;
  std::vector<Slot>& slots_;
};

}  // namespace vmserve
