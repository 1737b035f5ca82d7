// The ledger of pages and blocks: which exist, who references them, what they hold, and the order
// in which they may be reused. No driver call.
//
// States of a page
//   absent   not committed: no memory behind it
//   free     committed and unused; its content does not matter
//   in use   a block of it has references; *split* if its unused blocks can be handed out singly
//   waiting  released, but a running epoch may read it or one of its blocks is being copied to host
//            memory
//   idle     evictable: it has cached blocks or is mapped in a slot. Evicted first: *expendable*
//            pages (used before, nothing cached); then the others, least recently used first; last
//            those that keep_found() keeps
//   held     without references, but reserved for a repair or a mapper command
// Laws
//   * the state is a function of the counters (state_for), and the page is in the list of its state
//   * used, cached and shared count the blocks of a page with references, published without
//     references, and with two or more references; copying sums the copies in flight of its blocks
//   * a digest names one block, and a block has at most one digest
//   * known_zero(p) only if every byte of the page is zero
#pragma once

#include <cstdint>
#include <deque>
#include <unordered_map>
#include <utility>
#include <vector>

#include "vmserve/lazy_array.h"
#include "vmserve/page_set.h"
#include "vmserve/prefix_digest.h"
#include "vmserve/types.h"

namespace vmserve {

enum class ZeroPolicy : std::uint8_t {
  kAlways,  // zero a page whenever it is handed out
  kTenant,  // zero a page that last belonged to another tenant
  kNever,
};

enum class PageState : std::uint8_t { kAbsent, kFree, kInUse, kSplit, kWaiting, kIdle, kHeld };

class BlockPool {
 public:
  // An extent is `extent_pages` adjacent pages: see take_page().
  BlockPool(std::int64_t max_pages, std::int32_t blocks_per_page, std::int64_t limit,
            ZeroPolicy policy, std::int64_t extent_pages = 1);

  std::int64_t max_pages() const { return committed_.capacity(); }
  std::int32_t blocks_per_page() const { return blocks_per_page_; }
  std::int64_t limit() const { return limit_; }
  // Pre: 0 < limit <= max_pages. The caller trims pages above a lower limit.
  void set_limit(std::int64_t limit) { limit_ = limit; }

  PageId page_of(BlockId block) const { return block / blocks_per_page_; }
  BlockId first_block(PageId page) const { return page * blocks_per_page_; }

  std::int64_t num_committed() const { return committed_.size(); }
  std::int64_t num_free() const { return free_.size(); }
  std::int64_t count(PageState state) const { return summary_.counts[static_cast<int>(state)]; }
  std::int64_t num_idle_mapped() const { return summary_.num_idle_mapped; }
  std::int64_t num_shared_pages() const { return summary_.num_shared_pages; }
  std::int64_t num_used_blocks() const { return summary_.num_used_blocks; }
  std::int64_t num_shared_blocks() const { return summary_.num_shared_blocks; }
  std::int64_t num_cached_blocks() const { return summary_.num_cached_blocks; }
  // Copies of blocks to host memory in flight.
  std::int64_t num_copies() const { return summary_.num_copies; }
  // Pages available: free, idle, and absent within the limit. Negative if a lowered limit is
  // exceeded by pages in use, waiting or held.
  std::int64_t num_available() const;

  PageState state(PageId page) const { return pages_[page].state; }
  bool is_committed(PageId page) const { return committed_.contains(page); }
  std::int64_t next_committed(std::int64_t from) const { return committed_.lowest(from); }
  std::int32_t refs(BlockId block) const { return blocks_[block].refs; }
  std::int32_t copies(BlockId block) const { return blocks_[block].copies; }
  std::int32_t used(PageId page) const { return pages_[page].used; }
  std::int32_t cached(PageId page) const { return pages_[page].cached; }
  std::int32_t shared(PageId page) const { return pages_[page].shared; }
  std::int32_t maps(PageId page) const { return pages_[page].maps; }
  std::int32_t held(PageId page) const { return pages_[page].held; }
  SeqId owner(PageId page) const { return pages_[page].owner; }
  std::int32_t index(PageId page) const { return pages_[page].index; }
  Tenant tenant(PageId page) const { return pages_[page].tenant; }
  Epoch retire(PageId page) const { return pages_[page].retire; }
  std::int32_t copying(PageId page) const { return pages_[page].copying; }
  // No epoch or copy still reads released blocks of the page.
  bool is_at_rest(PageId page) const {
    return pages_[page].retire <= completed_ && pages_[page].copying == 0;
  }
  // References to all blocks of the page.
  std::int64_t total_refs(PageId page) const;

  // -- commitment: the lowest `count` absent pages, the highest `count` free ones.
  std::vector<PageRun> lowest_absent(std::int64_t count) const;
  std::vector<PageRun> highest_free(std::int64_t count) const;
  // Absent -> held. The pages have memory, and are zero, when they are unheld.
  void commit_held(const PageRun& run) noexcept;
  // Held (only by the caller) or free -> absent.
  void uncommit(const PageRun& run) noexcept;

  // -- taking. Free -> held. Takes the page after `previous` if it is free, so that the two map as
  // one run. Else, for a run that will grow, the first page of the lowest free extent. Else the
  // lowest free page. Extents are not reserved: they only separate growing runs while there is
  // room. Pre: num_free() > 0.
  PageId take_page(PageId previous, bool grows = false) noexcept;
  // A growing run was requested, and no extent is free for the next one.
  bool lacks_extent() const { return summary_.has_growing_runs && whole_.size() == 0; }
  std::int64_t extent_pages() const { return extent_pages_; }
  // A block of one of the tenant's split pages, with its first reference; kNoBlock if there is
  // none.
  BlockId take_block(Tenant tenant) noexcept;
  // The same from this page. Pre: it has an unreferenced, unpublished block.
  BlockId take_block_in(PageId page) noexcept;
  // Unreferenced, unpublished blocks of the tenant's split pages.
  std::int64_t num_split_blocks(Tenant tenant) const;

  void hold(PageId page) noexcept;
  void unhold(PageId page) noexcept;
  void add_ref(BlockId block) noexcept;
  // `epoch`: the last epoch whose kernels may read the block.
  void drop_ref(BlockId block, Epoch epoch) noexcept;
  // Counts a copy to host memory that reads the block. Until it ends, the block must not be
  // written.
  void begin_copy(BlockId block) noexcept;
  void end_copy(BlockId block) noexcept;
  void add_map(PageId page, std::int32_t index) noexcept;
  void drop_map(PageId page) noexcept;
  void set_owner(PageId page, SeqId owner) noexcept;
  // Completes epochs up to `epoch`: pages that waited for them become idle or free.
  void complete(Epoch epoch) noexcept;

  // From now on, pages of which another sequence took a published block are evicted after the
  // others. If they are more than an eighth of the committed pages, the oldest of them becomes like
  // the others.
  void keep_found() { keeps_found_ = true; }
  bool is_kept(PageId page) const { return pages_[page].kept; }

  // -- idle pages, in eviction order.
  PageId oldest_idle() const { return summary_.idle.head; }
  PageId next_idle(PageId page) const { return pages_[page].next; }

  // -- prefix cache. The block with this digest, or kNoBlock.
  BlockId find(const Digest& digest) const;
  bool is_published(BlockId block) const { return blocks_[block].published; }
  const Digest& digest(BlockId block) const { return digests_[block]; }
  // False, without effect, if another block has this digest.
  bool publish(BlockId block, const Digest& digest);
  void unpublish(BlockId block) noexcept;
  // Since it was cleared: a block was unpublished, which may have left its page to one sequence.
  bool has_unpublished() const { return has_unpublished_; }
  void clear_has_unpublished() { has_unpublished_ = false; }
  // Unpublishes the page's blocks without references; returns their number.
  std::int32_t drop_cached(PageId page) noexcept;
  void clear_index() noexcept;
  // Moves a block's digest to another block. Pre: `to` is not published.
  void move_published(BlockId from, BlockId to) noexcept;
  std::int64_t num_digests() const { return static_cast<std::int64_t>(index_.size()); }

  // -- content
  bool needs_zero(PageId page, Tenant tenant) const;
  ZeroPolicy zero_policy() const { return policy_; }
  void mark_zero(PageId page) noexcept { change(page).known_zero = true; }
  // Notes that the page holds, or will hold, the tenant's data.
  void mark_written(PageId page, Tenant tenant) noexcept;
  bool known_zero(PageId page) const { return pages_[page].known_zero; }

  // -- trials. end_trial() undoes all changes since begin_trial() exactly, including the order of
  // every list. Pre: no trial is open; during a trial nothing is committed, uncommitted, or
  // released to a running epoch.
  void begin_trial();
  void end_trial() noexcept;

  // Throws InvariantError with the broken law.
  void check() const;
  // A hash of all state that affects later decisions: equal before and after a trial.
  std::uint64_t fingerprint() const;

 private:
  struct Page {
    std::int32_t used, cached, shared, held, maps, copying;
    std::int32_t index;           // its index in slots
    SeqId owner;                  // the paged sequence for which its blocks are reserved in order
    std::int32_t offered_blocks;  // unused blocks counted in its tenant's split list
    PageState state;
    bool known_zero;
    bool counted_mapped;  // counted in summary_.num_idle_mapped
    bool expendable;      // idle and evicted first: see summary_.last_expendable
    bool found;           // a published block of it was taken by another sequence
    bool kept;            // idle and evicted last: see summary_.first_kept
    Tenant tenant;        // tenant whose data it holds or held last
    Epoch retire;         // last epoch that may read it
    PageId prev, next;    // neighbours in the idle list or its tenant's split list
  };
  struct Block {
    std::int32_t refs;
    std::uint16_t copies;  // copies in flight; each for another sequence with the block
    bool published;
  };
  struct List {
    PageId head = kNoPage;
    PageId tail = kNoPage;
    std::int64_t free_blocks = 0;  // split lists only
  };
  struct Summary {
    List idle;
    // The idle list begins with expendable pages. Losing one costs at most a map call; losing a
    // cached block costs computing it again.
    PageId last_expendable = kNoPage;
    // It ends with kept pages.
    PageId first_kept = kNoPage;
    std::int64_t num_kept = 0;
    bool has_growing_runs = false;
    std::int64_t counts[7] = {};
    std::int64_t num_idle_mapped = 0, num_shared_pages = 0, num_used_blocks = 0,
                 num_shared_blocks = 0, num_cached_blocks = 0, num_copies = 0;
  };
  // Values before each change of a trial.
  struct Trial {
    bool runs = false;
    Summary summary;
    std::vector<std::pair<PageId, Page>> pages;
    std::vector<std::pair<BlockId, Block>> blocks;
    std::vector<std::pair<Tenant, List>> split;
    std::vector<PageId> moved;                        // entered or left the free set
    std::vector<std::pair<BlockId, Digest>> digests;  // published or unpublished
  };

  Page& change(PageId page) noexcept;
  Block& change_block(BlockId block) noexcept;
  List& change_split(Tenant tenant) noexcept;
  void set_free(PageId page, bool is_free) noexcept;
  void set_digest(BlockId block, const Digest& digest, bool is_published);
  PageState state_for(PageId page) const;
  // Moves the page to the state of its counters. Called after each change of a counter.
  void update_state(PageId page) noexcept;
  void enter_state(PageId page) noexcept;
  void enter_idle(PageId page) noexcept;
  // Makes the oldest kept page the youngest of the others.
  void drop_kept() noexcept;
  void leave_state(PageId page) noexcept;
  void link(List& list, PageId page) noexcept;
  // `before` == kNoPage: at the head.
  void link_after(List& list, PageId page, PageId before) noexcept;
  void unlink(List& list, PageId page) noexcept;
  std::int32_t spare_blocks(const Page& page) const {
    return blocks_per_page_ - page.used - page.cached;
  }
  void check_page(PageId page) const;

  std::int32_t blocks_per_page_;
  std::int64_t limit_;
  ZeroPolicy policy_;
  bool keeps_found_ = false;
  bool has_unpublished_ = false;
  Epoch completed_ = 0;
  PageSet committed_;
  PageSet free_;
  std::int64_t extent_pages_;
  PageSet whole_;  // extents whose pages are all free
  LazyArray<std::int32_t> free_in_extent_;
  LazyArray<Page> pages_;
  LazyArray<Block> blocks_;
  LazyArray<Digest> digests_;
  std::unordered_map<Digest, BlockId, DigestHash> index_;
  std::unordered_map<Tenant, List> split_;
  std::deque<std::pair<Epoch, PageId>> waiting_;
  Summary summary_;
  Trial trial_;
};

}  // namespace vmserve
