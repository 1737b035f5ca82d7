// Inputs and outputs of KV memory: configuration, operations, plans, statistics and the memory map.
// Terms: kv_memory.h.
#pragma once

#include <cstdint>
#include <vector>

#include "vmserve/block_pool.h"
#include "vmserve/mapper.h"
#include "vmserve/types.h"

namespace vmserve {

enum class View : std::uint8_t { kVirtual, kPaged };
enum class Health : std::uint8_t { kHealthy, kDegraded, kFailed };

struct MemoryConfig {
  std::int32_t num_groups = 1;
  std::int32_t block_tokens = 16;
  std::int32_t blocks_per_page = 1;
  std::int64_t token_bytes = 0;  // bytes from one token to the next, in one group
  std::int64_t window = 0;       // tokens that a query sees, its own included; 0: all
  // > 0: layers keep a state of this many bytes (in one group) instead of K and V of each token. A
  // sequence has one block, a page, whatever its length; each step overwrites it.
  std::int64_t state_bytes = 0;
  // The prefix cache gets the state of a sequence at multiples of this, and at the end of the last
  // whole block before the last token known at open().
  std::int64_t checkpoint_tokens = 0;
  std::int32_t max_seqs = 0;  // maximum of open sequences
  std::int32_t num_slots = 0;
  std::int64_t max_len = 0;      // tokens
  std::int64_t read_slack = 0;   // tokens past the length that kernels may read (virtual view)
  std::int64_t limit_pages = 0;  // limit of the pool
  std::int64_t max_pages = 0;    // highest possible limit; sizes the arena's reservation
  std::int64_t grow_pages = 1;   // pages committed at a time, at least
  std::int64_t ready_pages = 0;  // free pages committed at start and kept ready by the mapper
  ZeroPolicy zero_policy = ZeroPolicy::kTenant;
  bool prefix_caching = true;
  // Reserves page 0, which stays zero: block tables name block 0 where no block is needed.
  bool null_page = false;
  bool deferred_reclamation = true;  // else release() unmaps at once
  bool seal_read_only = true;        // slots map sealed pages read-only
  bool access_under_readers = true;  // else a page's access changes only while no epoch runs
  std::int64_t swap_blocks = 0;      // maximum of blocks in host memory

  MapperMode mapper = MapperMode::kOff;
  std::int64_t lookahead_tokens = 0;  // tokens mapped ahead of a virtual sequence; 0: none
  // Unused slots kept ready with eager_pages mapped pages each. If eager_pages is 0, the demand of
  // new sequences decides pages and slots, and eager_slots is the maximum.
  std::int32_t eager_slots = 0;
  std::int64_t eager_pages = 0;
  double reclaim_share = 0.10;  // Below this share of available pages, parked slots are unmapped.

  std::int64_t page_tokens() const { return std::int64_t{block_tokens} * blocks_per_page; }
  bool has_state() const { return state_bytes > 0; }
  // Of a sequence of `length` tokens, the first position that the next token's query sees. A state
  // is like a window of two positions: the one before and the query's own.
  std::int64_t first_seen(std::int64_t length) const {
    const std::int64_t seen = has_state() ? 2 : window;
    return seen == 0 || length < seen ? 0 : length + 1 - seen;
  }
  bool sees_all() const { return !has_state() && window == 0; }
  // Positions of a sequence that one block holds.
  std::int64_t block_span() const { return has_state() ? max_len + 1 : block_tokens; }
  // Bytes of a block's first `num_tokens` tokens, or of a state, in one group.
  std::int64_t bytes_of(std::int64_t num_tokens) const {
    return has_state() ? state_bytes : num_tokens * token_bytes;
  }
  std::int64_t block_bytes() const { return bytes_of(block_tokens); }
};

enum class OpKind : std::uint8_t { kAttach, kFork, kConvert, kSwapOut, kSwapIn, kGrow };

// One operation on one sequence. In one plan, a sequence has at most one op other than kGrow, and
// its kGrow ops are merged (the largest counts). Parents of forks may grow.
//   kAttach   takes the first `num_tokens` from the prefix cache: whole blocks, at most match(seq).
//             Cached blocks can go at any time: a plan that asks for more does not fit. `seq` is
//             empty before. Length and sealed become num_tokens. Blocks wholly before
//             `first_token` are not taken, and need not be cached (sliding window)
//   kFork     gives `seq` the first `num_tokens` (<= length) of `other`, its parent. `seq` is empty
//             and of the same tenant. A state is that of `other`'s length alone. Whole pages
//             (virtual) or blocks (paged) are shared. The rest is copied at once (virtual) or when
//             one of the two writes (paged). `seq` inherits the parent's known tokens up to
//             num_tokens; append_tokens() adds later ones
//   kConvert  changes the view of `seq` to `view`; no change for a state
//   kSwapOut  copies the blocks of `seq` to host memory and releases its pages
//   kSwapIn   copies them back, into the view that `seq` had
//             NOTE: apply() requests these copies. Kernels of earlier epochs that are launched
//             later must not write what is copied: with a copy stream they do not wait for it
//   kGrow     makes positions up to `num_tokens` usable; never shrinks. The epoch that apply()
//             begins writes those from the length on. Positions before `first_token` are no longer
//             needed (sliding window): blocks or pages wholly before it are dropped. The last
//             `num_drafted` positions may be rejected: the length does not count them, they are
//             not sealed, and the next epoch writes them again unless keep() is called first. A
//             state takes no drafts: it would have seen those that are rejected
struct Op {
  OpKind kind;
  SeqId seq;
  std::int64_t num_tokens = 0;
  std::int64_t first_token = 0;
  SeqId other = kNoSeq;
  View view = View::kVirtual;
  std::int64_t num_drafted = 0;
  // The length after a kGrow, unless the sequence is longer.
  std::int64_t kept_tokens() const { return num_tokens - num_drafted; }
  bool operator==(const Op& other_op) const {
    return kind == other_op.kind && seq == other_op.seq && num_tokens == other_op.num_tokens &&
           first_token == other_op.first_token && other == other_op.other &&
           view == other_op.view && num_drafted == other_op.num_drafted;
  }
};

// The growths of merged ops, which are the last of them.
class Grows {
 public:
  explicit Grows(const std::vector<Op>& merged)
      : end_(merged.data() + merged.size()), first_(end_) {
    while (first_ != merged.data() && first_[-1].kind == OpKind::kGrow) --first_;
  }
  const Op* begin() const { return first_; }
  const Op* end() const { return end_; }
  std::size_t size() const { return static_cast<std::size_t>(end_ - first_); }
  const Op& operator[](std::size_t i) const { return first_[i]; }

 private:
  const Op* end_;
  const Op* first_;
};

// The needs of ops, and what is available. They fit if needed_pages <= available_pages,
// needed_mappings <= available_mappings, no slots or swap blocks are missing, and no prefix is
// lost. `lost_prefixes` are attaches that ask for more than is cached; with any of them nothing
// else is counted.
//
// Mappings are limited by the system (vm.max_map_count). needed_mappings is an upper bound for
// slots: it assumes that fresh pages are not adjacent. available_mappings includes those that
// unmapping parked slots frees.
//
// While a lowered limit is exceeded, no page is available, and `excess_pages` must become free
// first. `waiting_pages` become available when running epochs and copies end. If the ops do not
// fit, pages that cannot be compacted before that count as waiting, too.
struct Plan {
  std::int64_t needed_pages = 0;
  std::int64_t available_pages = 0;
  std::int64_t excess_pages = 0;
  std::int64_t waiting_pages = 0;
  std::int64_t missing_slots = 0;
  std::int64_t missing_swap_blocks = 0;
  std::int64_t lost_prefixes = 0;
  std::int64_t needed_mappings = 0;
  std::int64_t available_mappings = 0;
  std::uint64_t version = 0;
  bool fits() const {
    return needed_pages <= available_pages && needed_mappings <= available_mappings &&
           missing_slots == 0 && missing_swap_blocks == 0 && lost_prefixes == 0;
  }
};

struct MemoryCounters {
#define VMSERVE_COUNTER(type, name, rule, what) type name = 0;
#include "vmserve/stats.def"
  void add(const MemoryCounters& other) {
#define VMSERVE_COUNTER(type, name, rule, what) name += other.name;
#include "vmserve/stats.def"
  }
};

struct MemoryStats {
#define VMSERVE_GAUGE(type, name, rule, what) type name = 0;
#define VMSERVE_COUNTER(type, name, rule, what) type name##_total = 0;
#include "vmserve/stats.def"
  Health health = Health::kHealthy;
};

// How a page is used: the low four bits of a code in MemoryMap.
enum class PageUse : std::uint8_t {
  kAbsent,  // not committed
  kFree,
  kVirtual,  // used by sequences of the virtual view
  kPaged,
  kBoth,     // used by sequences of both views
  kCached,   // unused; the prefix cache finds its blocks
  kParked,   // mapped in a slot without a sequence
  kSpare,    // mapped ahead of a live sequence
  kWaiting,  // released, but a running epoch may read it
  kHeld,     // reserved for a mapper command or a repair
};
constexpr std::uint8_t kPageShared = 16;  // one of its blocks has several references
constexpr std::uint8_t kPageMapped = 32;  // mapped in a slot
constexpr int kNumPageCodes = 64;

struct MemoryMap {
  struct SlotRow {
    SeqId seq;            // kNoSeq: unused slot
    std::int32_t mapped;  // mapped pages
    std::int32_t used;    // of those, pages of its sequence
  };
  std::int64_t num_pages = 0;       // the limit, or more while a lower limit is being reached
  std::int64_t pages_per_cell = 1;  // the last cell may have fewer
  std::vector<std::uint8_t> cells;
  std::vector<std::int64_t> counts;  // number of pages by code
  std::vector<SlotRow> slots;
};

}  // namespace vmserve
