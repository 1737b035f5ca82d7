// What goes into KV memory and comes out of it: options, operations, plans, figures and the
// map of the pool. Terms are those of kv_memory.h.
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
  std::int64_t token_bytes = 0;  // from one token to the next, in one group
  std::int32_t max_seqs = 0;     // sequences that can be open
  std::int32_t num_slots = 0;
  std::int64_t max_len = 0;      // tokens
  std::int64_t read_slack = 0;   // tokens past the length that kernels may read, virtual view
  std::int64_t limit_pages = 0;  // cap of the pool
  std::int64_t max_pages = 0;    // cap of the cap: sizes the arena's reservation
  std::int64_t grow_pages = 1;   // the pool commits at least this many at a time
  std::int64_t ready_pages = 0;  // free pages committed at start, and ahead of need by the mapper
  ZeroPolicy zero_policy = ZeroPolicy::kTenant;
  bool prefix_caching = true;
  // Page 0 is kept, zero for ever: block 0 stands in block tables where nothing is needed.
  bool null_page = false;
  bool deferred_reclamation = true;  // else release() unmaps at once
  bool seal_read_only = true;        // slots map pages read-only once they are sealed
  bool access_under_readers = true;  // else a page's access changes only while no epoch runs
  std::int64_t swap_blocks = 0;      // most blocks in host memory

  MapperMode mapper = MapperMode::kOff;
  std::int64_t lookahead_tokens = 0;  // mapped ahead of a virtual sequence; 0: nothing is
  // Unused slots kept with eager_pages pages mapped. If those are 0, what newcomers take is learnt:
  // as many slots and pages as that, but no more slots.
  std::int32_t eager_slots = 0;
  std::int64_t eager_pages = 0;
  double reclaim_share = 0.10;  // parked slots are unmapped while less of the pool is at hand

  std::int64_t page_tokens() const { return std::int64_t{block_tokens} * blocks_per_page; }
};

enum class OpKind : std::uint8_t { kAttach, kFork, kConvert, kSwapOut, kSwapIn, kGrow };

// One thing to be done to one sequence. In one plan a sequence has at most one op other than
// kGrow, and at most one kGrow (repeated growths: the largest counts); a parent of forks may grow.
//   kAttach   `seq` is empty: its first `num_tokens` (whole blocks, at most match(seq)) come from
//             the prefix cache. Length and sealed become num_tokens
//   kFork     `seq` is empty, of `other`'s tenant: it gets other's first `num_tokens` (<= length).
//             Whole pages (virtual) or blocks (paged) are shared, the rest is copied at once
//             (virtual) or when one of the two writes (paged). Its known tokens become other's
//             first `num_tokens`; later ones come by append_tokens()
//   kConvert  `seq` is in the view `view` afterwards
//   kSwapOut  `seq`'s blocks go to host memory and its pages are given up
//   kSwapIn   and back, into the view it had
//             NOTE: copies are asked for when apply() is called; kernels of epochs that have begun
//             and are not launched yet must not write what is copied. Where they run beside the
//             kernels, those that are launched later do not wait for the copies out
//   kGrow     positions up to `num_tokens` can be used; those from the length on are written in the
//             epoch that this apply begins. Never shrinks. Positions before `first_token` are not
//             needed any more (sliding window): what lies wholly before it is given up
struct Op {
  OpKind kind;
  SeqId seq;
  std::int64_t num_tokens = 0;
  std::int64_t first_token = 0;
  SeqId other = kNoSeq;
  View view = View::kVirtual;
  bool operator==(const Op& other_op) const {
    return kind == other_op.kind && seq == other_op.seq && num_tokens == other_op.num_tokens &&
           first_token == other_op.first_token && other == other_op.other && view == other_op.view;
  }
};

// The ops fit if nothing is missing: needed_pages <= available_pages, needed_mappings <=
// available_mappings, and neither slots nor swap blocks are short. Mappings are what the system
// limits (vm.max_map_count): needed are those of slots, at most, if no fresh page lies behind the
// one before it; available are also those of parked slots. While a lowered limit is exceeded
// nothing is available, and `excess_pages` must become free before the first page is.
// `waiting_pages` become available when the epochs that run are complete and the copies that run
// have ended; where the ops do not fit, blocks of them do.
struct Plan {
  std::int64_t needed_pages = 0;
  std::int64_t available_pages = 0;
  std::int64_t excess_pages = 0;
  std::int64_t waiting_pages = 0;
  std::int64_t missing_slots = 0;
  std::int64_t missing_swap_blocks = 0;
  std::int64_t needed_mappings = 0;
  std::int64_t available_mappings = 0;
  std::uint64_t version = 0;
  bool fits() const {
    return needed_pages <= available_pages && needed_mappings <= available_mappings &&
           missing_slots == 0 && missing_swap_blocks == 0;
  }
};

struct MemoryCounters {
#define VMSERVE_COUNTER(type, name, what) type name = 0;
#include "vmserve/stats.def"
  void add(const MemoryCounters& other) {
#define VMSERVE_COUNTER(type, name, what) name += other.name;
#include "vmserve/stats.def"
  }
};

struct MemoryStats {
#define VMSERVE_GAUGE(type, name, what) type name = 0;
#define VMSERVE_COUNTER(type, name, what) type name##_total = 0;
#include "vmserve/stats.def"
  Health health = Health::kHealthy;
};

// What a page is used for: the low four bits of a code in MemoryMap.
enum class PageUse : std::uint8_t {
  kAbsent,  // no memory behind it
  kFree,
  kVirtual,  // live sequences of the virtual view have it
  kPaged,
  kBoth,     // sequences of both views
  kCached,   // nobody's, but the prefix cache can find its blocks
  kParked,   // shown by a slot without a sequence
  kSpare,    // mapped ahead of a live sequence
  kWaiting,  // given up, but a running epoch may read it
  kHeld,     // in the hands of the mapper or of a repair
};
constexpr std::uint8_t kPageShared = 16;  // a block of it has several references
constexpr std::uint8_t kPageMapped = 32;  // a slot shows it
constexpr int kNumPageCodes = 64;

struct MemoryMap {
  struct SlotRow {
    SeqId seq;            // kNoSeq: nobody's
    std::int32_t mapped;  // pages that it shows
    std::int32_t used;    // of those, its sequence's
  };
  std::int64_t num_pages = 0;       // the limit, or more while a lower one is being reached
  std::int64_t pages_per_cell = 1;  // the last cell may have fewer
  std::vector<std::uint8_t> cells;
  std::vector<std::int64_t> counts;  // pages by code
  std::vector<SlotRow> slots;
};

}  // namespace vmserve
