// The ledger: sequences, slots, pages, blocks, and the epochs that use them. No driver call. Terms
// and laws: kv_memory.h.
#pragma once

#include <cstdint>
#include <deque>
#include <functional>
#include <limits>
#include <unordered_map>
#include <utility>
#include <vector>

#include "vmserve/block_pool.h"
#include "vmserve/kv_memory_types.h"
#include "vmserve/lazy_array.h"
#include "vmserve/prefix_digest.h"
#include "vmserve/slot_table.h"
#include "vmserve/swap_space.h"

namespace vmserve {

// The KV memory of one sequence.
struct KvState {
  View view = View::kVirtual;
  SlotId slot = kNoSlot;
  std::int64_t length = 0;
  std::int64_t sealed = 0;
  // Positions from here on were not computed (abandoned epoch); they are never sealed.
  std::int64_t seal_limit = std::numeric_limits<std::int64_t>::max();
  std::int64_t num_trimmed = 0;    // leading blocks dropped (sliding window)
  std::int64_t first_needed = 0;   // what lies before is dropped once no running epoch reads it
  std::int64_t num_published = 0;  // leading blocks offered to the prefix cache
  std::vector<BlockId> blocks;
  bool swapped = false;
  std::vector<SwapId> swap;
};

struct Sequence {
  bool open = false;
  std::uint32_t generation = 0;  // distinguishes sequences that had the same id
  Tenant tenant = 0;
  KvState kv;
  std::vector<std::int32_t> tokens;
  bool tokens_unknown = false;       // No or not all token ids are known: nothing is published.
  std::int64_t last_checkpoint = 0;  // a state's, besides the multiples of checkpoint_tokens
  Digest root{};
  std::vector<Digest> digests;  // of the leading full blocks
};

// How one page of a virtual sequence is made from existing blocks: nothing there, the page shared,
// the page taken over, or the blocks copied.
struct BoundPage {
  enum class Kind { kHole, kShare, kClaim, kCopy } kind;
  PageId page;
  std::int32_t num_blocks;  // blocks that hold its tokens
};

// Slots that sequences take.
using SlotChoices = std::vector<std::pair<SeqId, SlotId>>;

struct Forked {
  SeqId child;
  SeqId parent;
  std::int64_t num_tokens;
};

// Positions [start, length) of a sequence that an epoch writes. It reads nothing before
// `first_seen`.
struct WrittenRange {
  SeqId seq;
  std::uint32_t generation;
  std::int64_t start;
  std::int64_t length;
  std::int64_t first_seen;
};

struct EpochRecord {
  Epoch epoch;
  std::vector<WrittenRange> written;
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

// A state is like a window of two positions: the one before and the query's own.
constexpr std::int64_t kWindowOfState = 2;

class Ledger {
 public:
  Ledger(const MemoryConfig& config, std::int64_t extent_pages, bool traps_writes);

  const Sequence& open_seq(SeqId seq) const;
  Sequence& open_seq(SeqId seq);
  std::int64_t pages_for(std::int64_t num_tokens) const;
  std::int64_t blocks_for(std::int64_t num_tokens) const;
  std::int64_t num_pages(const Sequence& seq) const;
  std::int64_t num_matched(const Sequence& seq) const;  // blocks
  // The largest n <= `most` for which all blocks are cached that a query right after n blocks sees
  // through the window.
  std::int64_t num_matched(const Sequence& seq, std::int64_t most, std::int64_t window) const;
  // The same, where `is_there` says which blocks count as cached. `window` 0: all blocks.
  std::int64_t num_matched(const Sequence& seq, std::int64_t most, std::int64_t window,
                           const std::function<bool(const Digest&)>& is_there) const;
  // Leading blocks of a sequence that another may have computed: one token is left to compute.
  std::int64_t num_matchable(const Sequence& seq) const;
  void extend_digests(Sequence& seq);
  void seal(SeqId id, std::int64_t length);
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
  std::int64_t num_usable_slots() const;
  std::int64_t num_retiring_pages() const;
  std::int64_t num_own_blocks_after(SeqId seq, BlockId block) const;
  void inherit_prefix(const Forked& fork);
  // Drops pages (virtual) or blocks (paged) that lie wholly before the token. Returns whether there
  // were any.
  bool trim_front(SeqId id, std::int64_t first_token);
  // Trims each sequence in running epochs to what the oldest of these reads. Trims sequences that
  // are only in `ended` epochs to what the last of these read. Positions are sealed before they are
  // dropped, and so can be published. Returns whether anything was dropped.
  bool drop_unseen(const std::vector<WrittenRange>& ended = {});
  std::vector<bool> running_seqs() const;  // those that a running epoch computes
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
  void publish(Sequence& seq);
  void publish_block(BlockId block, const Digest& digest);
  void publish_state(const Sequence& seq);
  bool has_published_from(PageId page, std::int32_t count) const;
  bool zeroing_races_readers(PageId page) const;
  // A hash of all state that affects later decisions: equal before and after a trial.
  std::uint64_t fingerprint() const;

  const MemoryConfig config;
  const bool traps_writes;  // the driver can map pages read-only
  BlockPool pool;
  std::vector<Sequence> seqs;
  std::vector<Slot> slots;
  std::int64_t pages_per_slot;
  std::int64_t blocks_per_row;
  LazyArray<BlockId> tables;
  std::vector<std::size_t> row_sizes;
  // Incremented by callers' changes, not by background work. That only adds to what a plan counted
  // on; a driver refusal is found when the plan is applied.
  std::uint64_t version = 0;
  std::uint64_t parkings = 0;
  Epoch begun = 0;
  Epoch completed = 0;
  std::deque<EpochRecord> records;
  std::int64_t num_open = 0;
  bool may_restore_access = false;  // a page may be read-only and no longer shared
  RecentDemand recent;
  MemoryCounters totals;
  // Digests of blocks that steps published, for a store.
  bool logs_published = false;
  std::vector<Digest> just_published;
};

// Base class with short names for the ledger's parts.
class LedgerClient {
 protected:
  explicit LedgerClient(Ledger& ledger)
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
