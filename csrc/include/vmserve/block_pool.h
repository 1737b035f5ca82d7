// The ledger of pages and blocks: which exist, who references them, what they hold, and in which
// order they may be given to somebody else. It talks to no driver.
//
// A page is one of
//   absent   no memory behind it
//   free     committed, nobody's; its content is of no use
//   in use   a block of it has references; *split* if its other blocks can be handed out one by one
//   waiting  given up, but an epoch that could read it is not complete, or a block of it is being
//            copied to host memory
//   idle     evictable: it has cached blocks or a slot shows it. First those that were used and
//            have nothing cached, then the others, oldest use first
//   held     without references, but a repair or a command of the mapper has it
// Laws
//   * the state is a function of the counters (state_for), and the page is in that state's list
//   * used, cached and shared of a page count its blocks with references, the published ones
//     without, and those with two or more; copying sums the copies of its blocks that run
//   * a digest names one block, and a block at most one digest
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
  kAlways,  // a page is zero whenever it is handed out
  kTenant,  // zero when it last belonged to another tenant
  kNever,
};

enum class PageState : std::uint8_t { kAbsent, kFree, kInUse, kSplit, kWaiting, kIdle, kHeld };

class BlockPool {
 public:
  // Pre: 0 < limit <= max_pages, max_pages x blocks_per_page < 2^31.
  // Extents are `extent_pages` pages each: where a run of pages begins, see take_page().
  BlockPool(std::int64_t max_pages, std::int32_t blocks_per_page, std::int64_t limit,
            ZeroPolicy policy, std::int64_t extent_pages = 1);

  std::int64_t max_pages() const { return committed_.capacity(); }
  std::int32_t blocks_per_page() const { return blocks_per_page_; }
  std::int64_t limit() const { return limit_; }
  // Pre: 0 < limit <= max_pages. Pages above a lower limit are the caller's to trim.
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
  // Copies of blocks to host memory that run.
  std::int64_t num_copies() const { return summary_.num_copies; }
  // How many pages can be had: free, idle, and absent ones within the limit. Negative while so
  // many more are in use, waiting or held than a lowered limit allows.
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
  // Nothing that was given up of the page may be read any more.
  bool is_at_rest(PageId page) const {
    return pages_[page].retire <= completed_ && pages_[page].copying == 0;
  }
  // References to all blocks of the page together.
  std::int64_t total_refs(PageId page) const;

  // -- commitment. The lowest `count` absent pages, the highest `count` free ones.
  std::vector<PageRun> lowest_absent(std::int64_t count) const;
  std::vector<PageRun> highest_free(std::int64_t count) const;
  // Absent -> held; what is absent no more has memory (and is zero) once it is unheld.
  void commit_held(const PageRun& run) noexcept;
  // Held (by nobody else) or free -> absent.
  void uncommit(const PageRun& run) noexcept;

  // -- taking. Free -> held: the page after `previous` if it is free, so that the two map as one
  // run; else, for a run that is to grow, the first of the lowest extent that is wholly free; else
  // the lowest. Nobody owns an extent: it only keeps runs that grow in turns apart while there is
  // room. Pre: num_free() > 0.
  PageId take_page(PageId previous, bool grows = false) noexcept;
  // A run that is to grow has been asked for, and there is no extent for the next one.
  bool lacks_extent() const { return summary_.has_growing_runs && whole_.size() == 0; }
  std::int64_t extent_pages() const { return extent_pages_; }
  // A block of one of the tenant's split pages, with its first reference; kNoBlock if none is left.
  BlockId take_block(Tenant tenant) noexcept;
  // The same from this page. Pre: it has an unreferenced, unpublished block.
  BlockId take_block_in(PageId page) noexcept;
  // Unreferenced, unpublished blocks of the tenant's split pages.
  std::int64_t num_split_blocks(Tenant tenant) const;

  void hold(PageId page) noexcept;
  void unhold(PageId page) noexcept;
  void add_ref(BlockId block) noexcept;
  // `epoch`: the last one whose kernels may still read the block.
  void drop_ref(BlockId block, Epoch epoch) noexcept;
  // A copy reads the block, whoever has it: until it ends nobody may write to it.
  void begin_copy(BlockId block) noexcept;
  void end_copy(BlockId block) noexcept;
  void add_map(PageId page, std::int32_t index) noexcept;
  void drop_map(PageId page) noexcept;
  void set_owner(PageId page, SeqId owner) noexcept;
  // Epochs up to this one are complete: what waited for them is idle or free.
  void complete(Epoch epoch) noexcept;

  // -- idle pages, in the order in which they are to be evicted.
  PageId oldest_idle() const { return summary_.idle.head; }
  PageId next_idle(PageId page) const { return pages_[page].next; }

  // -- prefix cache. The block of this digest, or kNoBlock.
  BlockId find(const Digest& digest) const;
  bool is_published(BlockId block) const { return blocks_[block].published; }
  const Digest& digest(BlockId block) const { return digests_[block]; }
  // False (and nothing happens) if another block has this digest already.
  bool publish(BlockId block, const Digest& digest);
  void unpublish(BlockId block) noexcept;
  // Forgets the page's published blocks that nobody references; returns how many.
  std::int32_t drop_cached(PageId page) noexcept;
  void clear_index() noexcept;
  // A published block's name and content move to another. Pre: `to` is not published.
  void move_published(BlockId from, BlockId to) noexcept;
  std::int64_t num_digests() const { return static_cast<std::int64_t>(index_.size()); }

  // -- content
  bool needs_zero(PageId page, Tenant tenant) const;
  ZeroPolicy zero_policy() const { return policy_; }
  void mark_zero(PageId page) noexcept { change(page).known_zero = true; }
  // The page holds, or is about to hold, the tenant's data.
  void mark_written(PageId page, Tenant tenant) noexcept;
  bool known_zero(PageId page) const { return pages_[page].known_zero; }

  // -- trials. What is changed from here on is undone by end_trial(), to the bit and in the order
  // of every list. Pre: no trial runs; until it ends nothing is committed, uncommitted or given up
  // to an epoch that runs.
  void begin_trial();
  void end_trial() noexcept;

  // Throws InvariantError naming the law that does not hold.
  void check() const;
  // Of all that decides what happens next: equal before and after a trial.
  std::uint64_t fingerprint() const;

 private:
  struct Page {
    std::int32_t used, cached, shared, held, maps, copying;
    std::int32_t index;    // where slots show it
    SeqId owner;           // the paged sequence that takes its blocks in order
    std::int32_t offered;  // blocks counted in its tenant's split list
    PageState state;
    bool known_zero;
    bool counted_mapped;  // counted in summary_.num_idle_mapped
    bool worthless;       // idle, and among the first: see summary_.last_worthless
    Tenant tenant;        // whose data it holds, or held last
    Epoch retire;         // the last epoch that may read it
    PageId prev, next;    // in the idle list or its tenant's split list
  };
  struct Block {
    std::int32_t refs;
    std::uint16_t copies;  // each is of another sequence that had the block
    bool published;
  };
  struct List {
    PageId head = kNoPage;
    PageId tail = kNoPage;
    std::int64_t free_blocks = 0;  // split lists only
  };
  struct Summary {
    List idle;
    // The idle list begins with pages that are only mapped where somebody was: losing one costs a
    // map call at most, losing a cached block costs computing it again.
    PageId last_worthless = kNoPage;
    bool has_growing_runs = false;
    std::int64_t counts[7] = {};
    std::int64_t num_idle_mapped = 0, num_shared_pages = 0, num_used_blocks = 0,
                 num_shared_blocks = 0, num_cached_blocks = 0, num_copies = 0;
  };
  // What was there before each change of a trial.
  struct Trial {
    bool runs = false;
    Summary summary;
    std::vector<std::pair<PageId, Page>> pages;
    std::vector<std::pair<BlockId, Block>> blocks;
    std::vector<std::pair<Tenant, List>> split;
    std::vector<PageId> moved;                      // into or out of the free ones
    std::vector<std::pair<BlockId, Digest>> named;  // published, or unpublished
  };

  Page& change(PageId page) noexcept;
  Block& change_block(BlockId block) noexcept;
  List& change_split(Tenant tenant) noexcept;
  void set_free(PageId page, bool is_free) noexcept;
  void set_name(BlockId block, const Digest& digest, bool is_published);
  PageState state_for(PageId page) const;
  // After any change of a page's counters: it goes to where it now belongs.
  void settle(PageId page) noexcept;
  void enter(PageId page) noexcept;
  void leave(PageId page) noexcept;
  void link(List& list, PageId page) noexcept;
  void link_behind(List& list, PageId page, PageId before) noexcept;  // kNoPage: as the first
  void unlink(List& list, PageId page) noexcept;
  std::int32_t spare_blocks(const Page& page) const {
    return blocks_per_page_ - page.used - page.cached;
  }
  void check_page(PageId page) const;

  std::int32_t blocks_per_page_;
  std::int64_t limit_;
  ZeroPolicy policy_;
  Epoch completed_ = 0;
  PageSet committed_;
  PageSet free_;
  std::int64_t extent_pages_;
  PageSet whole_;  // extents of which every page is free
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
