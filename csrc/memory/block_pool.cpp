#include "vmserve/block_pool.h"

#include <algorithm>
#include <limits>
#include <string>

#include "vmserve/errors.h"
#include "vmserve/text.h"

namespace vmserve {

BlockPool::BlockPool(std::int64_t max_pages, std::int32_t blocks_per_page, std::int64_t limit,
                     ZeroPolicy policy, std::int64_t extent_pages)
    : blocks_per_page_(blocks_per_page),
      limit_(limit),
      policy_(policy),
      extent_pages_(extent_pages) {
  const std::int64_t most = std::numeric_limits<BlockId>::max() / blocks_per_page;
  if (max_pages <= 0 || max_pages > most) {
    throw MisuseError("max_pages is " + with_commas(max_pages) + ": it must lie between 1 and " +
                      with_commas(most) + "; use larger pages");
  }
  committed_ = PageSet(max_pages);
  free_ = PageSet(max_pages);
  whole_ = PageSet(max_pages / extent_pages + 1);
  free_in_extent_ = LazyArray<std::int32_t>(max_pages / extent_pages + 1);
  pages_ = LazyArray<Page>(max_pages);
  blocks_ = LazyArray<Block>(max_pages * blocks_per_page);
  digests_ = LazyArray<Digest>(max_pages * blocks_per_page);
}

std::int64_t BlockPool::num_available() const {
  return limit_ - num_committed() + num_free() + count(PageState::kIdle);
}

std::int64_t BlockPool::total_refs(PageId page) const {
  std::int64_t total = 0;
  for (std::int32_t j = 0; j < blocks_per_page_; ++j) total += blocks_[first_block(page) + j].refs;
  return total;
}

// -- states

PageState BlockPool::state_for(PageId id) const {
  const Page& page = pages_[id];
  if (!committed_.contains(id)) return PageState::kAbsent;
  if (page.used > 0) {
    const bool splits =
        page.maps == 0 && page.owner == kNoSeq && page.held == 0 && spare_blocks(page) > 0 &&
        is_at_rest(id);  // an epoch may still write the block that was given up, or a copy read it
    return splits ? PageState::kSplit : PageState::kInUse;
  }
  if (page.held > 0) return PageState::kHeld;
  if (!is_at_rest(id)) return PageState::kWaiting;
  return page.cached > 0 || page.maps > 0 ? PageState::kIdle : PageState::kFree;
}

void BlockPool::link(List& list, PageId id) noexcept {
  link_behind(list, id, list.tail);
}

void BlockPool::link_behind(List& list, PageId id, PageId before) noexcept {
  Page& page = pages_[id];
  page.prev = before;
  page.next = before == kNoPage ? list.head : pages_[before].next;
  (page.prev == kNoPage ? list.head : pages_[page.prev].next) = id;
  (page.next == kNoPage ? list.tail : pages_[page.next].prev) = id;
}

void BlockPool::unlink(List& list, PageId id) noexcept {
  const Page& page = pages_[id];
  (page.prev == kNoPage ? list.head : pages_[page.prev].next) = page.next;
  (page.next == kNoPage ? list.tail : pages_[page.next].prev) = page.prev;
}

void BlockPool::leave(PageId id) noexcept {
  Page& page = pages_[id];
  --counts_[static_cast<int>(page.state)];
  if (page.state == PageState::kFree) {
    free_.erase(id);
    const std::int64_t extent = id / extent_pages_;
    if (free_in_extent_[extent]-- == extent_pages_) whole_.erase(extent);
  }
  if (page.state == PageState::kIdle) {
    if (last_worthless_ == id) last_worthless_ = page.prev;
    page.worthless = false;
    unlink(idle_, id);
    num_idle_mapped_ -= page.counted_mapped ? 1 : 0;
    page.counted_mapped = false;
  }
  if (page.state == PageState::kSplit) {
    List& list = split_[page.tenant];
    unlink(list, id);
    list.free_blocks -= page.offered;
    page.offered = 0;
    if (list.head == kNoPage) split_.erase(page.tenant);
  }
}

void BlockPool::enter(PageId id) noexcept {
  Page& page = pages_[id];
  ++counts_[static_cast<int>(page.state)];
  if (page.state == PageState::kFree) {
    free_.insert(id);
    page.owner = kNoSeq;
    const std::int64_t extent = id / extent_pages_;
    if (++free_in_extent_[extent] == extent_pages_) whole_.insert(extent);
  }
  if (page.state == PageState::kIdle && page.worthless) {
    link_behind(idle_, id, last_worthless_);
    last_worthless_ = id;
  } else if (page.state == PageState::kIdle) {
    link(idle_, id);
  }
  if (page.state == PageState::kSplit) link(split_[page.tenant], id);
}

void BlockPool::settle(PageId id) noexcept {
  Page& page = pages_[id];
  const PageState wanted = state_for(id);
  if (wanted != page.state) {
    // What the mapper has mapped ahead of somebody comes from its hands, and is wanted soon.
    const bool was_used = page.state != PageState::kHeld && page.state != PageState::kFree;
    leave(id);
    page.state = wanted;
    page.worthless = wanted == PageState::kIdle && was_used && page.cached == 0;
    enter(id);
  }
  if (wanted == PageState::kSplit) {
    const std::int32_t offers = spare_blocks(page);
    split_[page.tenant].free_blocks += offers - page.offered;
    page.offered = offers;
  }
  if (wanted == PageState::kIdle && page.counted_mapped != (page.maps > 0)) {
    page.counted_mapped = page.maps > 0;
    num_idle_mapped_ += page.counted_mapped ? 1 : -1;
  }
}

void BlockPool::complete(Epoch epoch) noexcept {
  completed_ = std::max(completed_, epoch);
  while (!waiting_.empty() && waiting_.front().first <= completed_) {
    const PageId page = waiting_.front().second;
    waiting_.pop_front();
    settle(page);
  }
}

// -- commitment

std::vector<PageRun> BlockPool::lowest_absent(std::int64_t count) const {
  std::vector<PageRun> runs;
  for (std::int64_t id = committed_.lowest_absent(); id >= 0 && count > 0; --count) {
    if (!runs.empty() && runs.back().first + runs.back().count == id) {
      ++runs.back().count;
    } else {
      runs.push_back({static_cast<PageId>(id), 1});
    }
    id = committed_.lowest_absent(id + 1);
  }
  return runs;
}

std::vector<PageRun> BlockPool::highest_free(std::int64_t count) const {
  std::vector<PageRun> runs;
  for (std::int64_t id = free_.highest(max_pages() - 1); id >= 0 && count > 0; --count) {
    if (!runs.empty() && runs.back().first == id + 1) {
      runs.back().first = static_cast<PageId>(id);
      ++runs.back().count;
    } else {
      runs.push_back({static_cast<PageId>(id), 1});
    }
    id = free_.highest(id - 1);
  }
  return runs;
}

void BlockPool::commit_held(const PageRun& run) noexcept {
  for (PageId id = run.first; id < run.first + run.count; ++id) {
    --counts_[static_cast<int>(PageState::kAbsent)];
    committed_.insert(id);
    Page fresh{};
    fresh.owner = kNoSeq;
    fresh.held = 1;
    fresh.known_zero = true;
    fresh.state = PageState::kHeld;
    fresh.prev = fresh.next = kNoPage;
    pages_[id] = fresh;
    enter(id);
  }
}

void BlockPool::uncommit(const PageRun& run) noexcept {
  for (PageId id = run.first; id < run.first + run.count; ++id) {
    leave(id);
    committed_.erase(id);
    pages_[id] = Page{};  // kAbsent
    ++counts_[static_cast<int>(PageState::kAbsent)];
  }
}

// -- taking

PageId BlockPool::take_page(PageId previous, bool grows) noexcept {
  has_growing_runs_ = has_growing_runs_ || (grows && extent_pages_ > 1);
  const bool adjacent = previous != kNoPage && free_.contains(std::int64_t{previous} + 1);
  std::int64_t first = grows && !adjacent ? whole_.lowest() : -1;
  first = first < 0 ? free_.lowest() : first * extent_pages_;
  const PageId page = adjacent ? previous + 1 : static_cast<PageId>(first);
  hold(page);
  return page;
}

BlockId BlockPool::take_block(Tenant tenant) noexcept {
  const auto list = split_.find(tenant);
  return list == split_.end() ? kNoBlock : take_block_in(list->second.tail);
}

BlockId BlockPool::take_block_in(PageId page) noexcept {
  BlockId block = first_block(page);
  while (blocks_[block].refs > 0 || blocks_[block].published) ++block;
  add_ref(block);
  return block;
}

std::int64_t BlockPool::num_split_blocks(Tenant tenant) const {
  const auto list = split_.find(tenant);
  return list == split_.end() ? 0 : list->second.free_blocks;
}

void BlockPool::hold(PageId page) noexcept {
  ++pages_[page].held;
  settle(page);
}

void BlockPool::unhold(PageId page) noexcept {
  --pages_[page].held;
  settle(page);
}

void BlockPool::add_ref(BlockId id) noexcept {
  Block& block = blocks_[id];
  const PageId page_id = page_of(id);
  Page& page = pages_[page_id];
  ++block.refs;
  if (block.refs == 2) {
    ++num_shared_blocks_;
    if (++page.shared == 1) ++num_shared_pages_;
  }
  if (block.refs > 1) return;
  ++page.used;
  ++num_used_blocks_;
  if (block.published) {
    --page.cached;
    --num_cached_blocks_;
  }
  settle(page_id);
}

void BlockPool::drop_ref(BlockId id, Epoch epoch) noexcept {
  Block& block = blocks_[id];
  const PageId page_id = page_of(id);
  Page& page = pages_[page_id];
  if (epoch > page.retire) {
    page.retire = epoch;
    if (epoch > completed_) waiting_.emplace_back(epoch, page_id);
  }
  --block.refs;
  if (block.refs == 1) {
    --num_shared_blocks_;
    if (--page.shared == 0) --num_shared_pages_;
  }
  if (block.refs > 0) return settle(page_id);  // it may have to wait
  --page.used;
  --num_used_blocks_;
  if (block.published) {
    ++page.cached;
    ++num_cached_blocks_;
  }
  settle(page_id);
}

void BlockPool::begin_copy(BlockId block) noexcept {
  ++blocks_[block].copies;
  ++pages_[page_of(block)].copying;
  ++num_copies_;
  settle(page_of(block));
}

void BlockPool::end_copy(BlockId block) noexcept {
  --blocks_[block].copies;
  --pages_[page_of(block)].copying;
  --num_copies_;
  settle(page_of(block));
}

void BlockPool::add_map(PageId page, std::int32_t index) noexcept {
  ++pages_[page].maps;
  pages_[page].index = index;
  settle(page);
}

void BlockPool::drop_map(PageId page) noexcept {
  --pages_[page].maps;
  settle(page);
}

void BlockPool::set_owner(PageId page, SeqId owner) noexcept {
  pages_[page].owner = owner;
  settle(page);
}

// -- prefix cache

BlockId BlockPool::find(const Digest& digest) const {
  const auto it = index_.find(digest);
  return it == index_.end() ? kNoBlock : it->second;
}

bool BlockPool::publish(BlockId id, const Digest& digest) {
  if (!index_.emplace(digest, id).second) return false;
  digests_[id] = digest;
  Block& block = blocks_[id];
  block.published = true;
  if (block.refs == 0) {
    ++pages_[page_of(id)].cached;
    ++num_cached_blocks_;
  }
  settle(page_of(id));
  return true;
}

void BlockPool::unpublish(BlockId id) noexcept {
  Block& block = blocks_[id];
  index_.erase(digests_[id]);
  block.published = false;
  if (block.refs == 0) {
    --pages_[page_of(id)].cached;
    --num_cached_blocks_;
  }
  settle(page_of(id));
}

std::int32_t BlockPool::drop_cached(PageId page) noexcept {
  std::int32_t dropped = 0;
  for (BlockId id = first_block(page); id < first_block(page) + blocks_per_page_; ++id) {
    if (!blocks_[id].published || blocks_[id].refs > 0) continue;
    unpublish(id);
    ++dropped;
  }
  return dropped;
}

void BlockPool::clear_index() noexcept {
  while (!index_.empty()) unpublish(index_.begin()->second);
}

void BlockPool::move_published(BlockId from, BlockId to) noexcept {
  const Digest digest = digests_[from];
  unpublish(from);
  publish(to, digest);
}

// -- content

bool BlockPool::needs_zero(PageId page, Tenant tenant) const {
  if (policy_ == ZeroPolicy::kNever || pages_[page].known_zero) return false;
  return policy_ == ZeroPolicy::kAlways || pages_[page].tenant != tenant;
}

void BlockPool::mark_written(PageId page, Tenant tenant) noexcept {
  pages_[page].known_zero = false;
  pages_[page].tenant = tenant;
}

// -- laws

void BlockPool::check_page(PageId id) const {
  const Page& page = pages_[id];
  Page counted{};
  for (BlockId b = first_block(id); b < first_block(id) + blocks_per_page_; ++b) {
    const Block& block = blocks_[b];
    counted.used += block.refs > 0 ? 1 : 0;
    counted.shared += block.refs > 1 ? 1 : 0;
    counted.cached += block.refs == 0 && block.published ? 1 : 0;
    counted.copying += block.copies;
    if (block.refs < 0 || (block.published && find(digests_[b]) != b)) {
      throw InvariantError("block " + std::to_string(b) + " has " + std::to_string(block.refs) +
                           " references or is published under another's digest");
    }
  }
  if (counted.used != page.used || counted.cached != page.cached || counted.shared != page.shared ||
      counted.copying != page.copying || page.maps < 0 || page.held < 0) {
    throw InvariantError("page " + std::to_string(id) + " counts its blocks wrongly");
  }
  if (state_for(id) != page.state || free_.contains(id) != (page.state == PageState::kFree)) {
    throw InvariantError("page " + std::to_string(id) + " is not in the state of its counters");
  }
}

void BlockPool::check() const {
  std::int64_t counted[7] = {};
  std::int64_t published = 0;
  for (std::int64_t id = committed_.lowest(); id >= 0; id = committed_.lowest(id + 1)) {
    const auto page = static_cast<PageId>(id);
    check_page(page);
    ++counted[static_cast<int>(pages_[id].state)];
    for (std::int32_t j = 0; j < blocks_per_page_; ++j) {
      published += blocks_[first_block(page) + j].published ? 1 : 0;
    }
  }
  for (int state = 1; state < 7; ++state) {
    if (counted[state] != counts_[state]) {
      throw InvariantError("counted " + std::to_string(counted[state]) + " pages in state " +
                           std::to_string(state) + ", recorded " + std::to_string(counts_[state]));
    }
  }
  std::int64_t idle = 0;
  PageId last_worthless = kNoPage;
  for (PageId id = idle_.head; id != kNoPage; id = pages_[id].next) {
    ++idle;
    if (!pages_[id].worthless) continue;
    if (pages_[id].prev != last_worthless) {
      throw InvariantError("page " + std::to_string(id) + " is to be evicted too late");
    }
    last_worthless = id;
  }
  if (last_worthless != last_worthless_) {
    throw InvariantError("the idle list's worthless pages end elsewhere");
  }
  if (idle != counts_[static_cast<int>(PageState::kIdle)]) {
    throw InvariantError("the idle list has " + std::to_string(idle) + " pages");
  }
  for (std::int64_t extent = 0; extent < whole_.capacity(); ++extent) {
    std::int64_t free = 0;
    for (std::int64_t i = 0; i < extent_pages_; ++i) {
      free += free_.contains(extent * extent_pages_ + i) ? 1 : 0;
    }
    if (free != free_in_extent_[extent] || whole_.contains(extent) != (free == extent_pages_)) {
      throw InvariantError("extent " + std::to_string(extent) + " counts its free pages wrongly");
    }
  }
  if (published != num_digests()) {
    throw InvariantError(std::to_string(published) + " blocks are published under " +
                         std::to_string(num_digests()) + " digests");
  }
}

}  // namespace vmserve
