#include "vmserve/block_pool.h"

#include <algorithm>
#include <limits>
#include <string>

#include "vmserve/errors.h"
#include "vmserve/mix.h"
#include "vmserve/text.h"

namespace vmserve {
namespace {

constexpr std::int64_t kKeptShare = 8;  // kept pages are at most one of so many

}  // namespace

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

// -- changes, logged for the end of a trial

BlockPool::Page& BlockPool::change(PageId id) noexcept {
  if (trial_.runs) trial_.pages.emplace_back(id, pages_[id]);
  return pages_[id];
}

BlockPool::Block& BlockPool::change_block(BlockId id) noexcept {
  if (trial_.runs) trial_.blocks.emplace_back(id, blocks_[id]);
  return blocks_[id];
}

BlockPool::List& BlockPool::change_split(Tenant tenant) noexcept {
  List& list = split_[tenant];
  if (trial_.runs) trial_.split.emplace_back(tenant, list);
  return list;
}

void BlockPool::set_free(PageId id, bool is_free) noexcept {
  if (trial_.runs) trial_.moved.push_back(id);
  const std::int64_t extent = id / extent_pages_;
  if (is_free) {
    free_.insert(id);
    if (++free_in_extent_[extent] == extent_pages_) whole_.insert(extent);
  } else {
    free_.erase(id);
    if (free_in_extent_[extent]-- == extent_pages_) whole_.erase(extent);
  }
}

// Adds the digest to the index or removes it.
void BlockPool::set_digest(BlockId id, const Digest& digest, bool is_published) {
  if (trial_.runs) trial_.digests.emplace_back(id, digest);
  if (is_published) {
    digests_[id] = digest;
    index_.emplace(digest, id);
  } else {
    index_.erase(digest);
  }
}

void BlockPool::begin_trial() {
  trial_.summary = summary_;
  trial_.runs = true;
}

void BlockPool::end_trial() noexcept {
  trial_.runs = false;
  for (auto at = trial_.pages.rbegin(); at != trial_.pages.rend(); ++at)
    pages_[at->first] = at->second;
  for (auto at = trial_.blocks.rbegin(); at != trial_.blocks.rend(); ++at)
    blocks_[at->first] = at->second;
  for (auto at = trial_.moved.rbegin(); at != trial_.moved.rend(); ++at)
    set_free(*at, !free_.contains(*at));
  for (auto at = trial_.digests.rbegin(); at != trial_.digests.rend(); ++at)
    set_digest(at->first, at->second, find(at->second) == kNoBlock);
  for (auto at = trial_.split.rbegin(); at != trial_.split.rend(); ++at) {
    if (at->second.head == kNoPage) {
      split_.erase(at->first);
    } else {
      split_[at->first] = at->second;
    }
  }
  summary_ = trial_.summary;
  trial_.pages.clear();
  trial_.blocks.clear();
  trial_.moved.clear();
  trial_.digests.clear();
  trial_.split.clear();
}

// -- states

PageState BlockPool::state_for(PageId id) const {
  const Page& page = pages_[id];
  if (!committed_.contains(id)) return PageState::kAbsent;
  if (page.used > 0) {
    const bool splits = page.maps == 0 && page.owner == kNoSeq && page.held == 0 &&
                        spare_blocks(page) > 0 &&
                        is_at_rest(id);  // an epoch or copy may still use the released block
    return splits ? PageState::kSplit : PageState::kInUse;
  }
  if (page.held > 0) return PageState::kHeld;
  if (!is_at_rest(id)) return PageState::kWaiting;
  return page.cached > 0 || page.maps > 0 ? PageState::kIdle : PageState::kFree;
}

void BlockPool::link(List& list, PageId id) noexcept {
  link_after(list, id, list.tail);
}

void BlockPool::link_after(List& list, PageId id, PageId before) noexcept {
  Page& page = change(id);
  page.prev = before;
  page.next = before == kNoPage ? list.head : pages_[before].next;
  (page.prev == kNoPage ? list.head : change(page.prev).next) = id;
  (page.next == kNoPage ? list.tail : change(page.next).prev) = id;
}

void BlockPool::unlink(List& list, PageId id) noexcept {
  const Page& page = pages_[id];
  (page.prev == kNoPage ? list.head : change(page.prev).next) = page.next;
  (page.next == kNoPage ? list.tail : change(page.next).prev) = page.prev;
}

void BlockPool::leave_state(PageId id) noexcept {
  Page& page = change(id);
  --summary_.counts[static_cast<int>(page.state)];
  if (page.state == PageState::kFree) set_free(id, false);
  if (page.state == PageState::kIdle) {
    if (summary_.last_expendable == id) summary_.last_expendable = page.prev;
    page.expendable = false;
    if (summary_.first_kept == id) summary_.first_kept = page.next;
    summary_.num_kept -= page.kept ? 1 : 0;
    page.kept = false;
    unlink(summary_.idle, id);
    summary_.num_idle_mapped -= page.counted_mapped ? 1 : 0;
    page.counted_mapped = false;
  }
  if (page.state == PageState::kSplit) {
    List& list = change_split(page.tenant);
    unlink(list, id);
    list.free_blocks -= page.offered_blocks;
    page.offered_blocks = 0;
    if (list.head == kNoPage) split_.erase(page.tenant);
  }
}

void BlockPool::enter_state(PageId id) noexcept {
  Page& page = change(id);
  ++summary_.counts[static_cast<int>(page.state)];
  if (page.state == PageState::kFree) {
    set_free(id, true);
    page.owner = kNoSeq;
    page.found = false;
  }
  if (page.state == PageState::kIdle) enter_idle(id);
  if (page.state == PageState::kSplit) link(change_split(page.tenant), id);
}

void BlockPool::enter_idle(PageId id) noexcept {
  Page& page = change(id);
  if (page.expendable) {
    link_after(summary_.idle, id, summary_.last_expendable);
    summary_.last_expendable = id;
    return;
  }
  if (!page.found) {
    const PageId kept = summary_.first_kept;
    return link_after(summary_.idle, id, kept == kNoPage ? summary_.idle.tail : pages_[kept].prev);
  }
  link(summary_.idle, id);
  page.kept = true;
  ++summary_.num_kept;
  if (summary_.first_kept == kNoPage) summary_.first_kept = id;
  while (summary_.num_kept * kKeptShare > committed_.size()) drop_kept();
}

void BlockPool::drop_kept() noexcept {
  Page& page = change(summary_.first_kept);
  page.found = page.kept = false;
  summary_.first_kept = page.next;
  --summary_.num_kept;
}

void BlockPool::update_state(PageId id) noexcept {
  Page& page = change(id);
  const PageState wanted = state_for(id);
  if (wanted != page.state) {
    // Pages mapped ahead leave kHeld and will be needed soon: they are not expendable.
    const bool was_used = page.state != PageState::kHeld && page.state != PageState::kFree;
    leave_state(id);
    page.state = wanted;
    page.expendable = wanted == PageState::kIdle && was_used && page.cached == 0;
    enter_state(id);
  }
  if (wanted == PageState::kSplit) {
    const std::int32_t offers = spare_blocks(page);
    change_split(page.tenant).free_blocks += offers - page.offered_blocks;
    page.offered_blocks = offers;
  }
  if (wanted == PageState::kIdle && page.counted_mapped != (page.maps > 0)) {
    page.counted_mapped = page.maps > 0;
    summary_.num_idle_mapped += page.counted_mapped ? 1 : -1;
  }
}

void BlockPool::complete(Epoch epoch) noexcept {
  completed_ = std::max(completed_, epoch);
  while (!waiting_.empty() && waiting_.front().first <= completed_) {
    const PageId page = waiting_.front().second;
    waiting_.pop_front();
    update_state(page);
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
    --summary_.counts[static_cast<int>(PageState::kAbsent)];
    committed_.insert(id);
    Page fresh{};
    fresh.owner = kNoSeq;
    fresh.held = 1;
    fresh.known_zero = true;
    fresh.state = PageState::kHeld;
    fresh.prev = fresh.next = kNoPage;
    pages_[id] = fresh;
    enter_state(id);
  }
}

void BlockPool::uncommit(const PageRun& run) noexcept {
  for (PageId id = run.first; id < run.first + run.count; ++id) {
    leave_state(id);
    committed_.erase(id);
    pages_[id] = Page{};  // kAbsent
    ++summary_.counts[static_cast<int>(PageState::kAbsent)];
  }
}

// -- taking

PageId BlockPool::take_page(PageId previous, bool grows) noexcept {
  summary_.has_growing_runs = summary_.has_growing_runs || (grows && extent_pages_ > 1);
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
  ++change(page).held;
  update_state(page);
}

void BlockPool::unhold(PageId page) noexcept {
  --change(page).held;
  update_state(page);
}

void BlockPool::add_ref(BlockId id) noexcept {
  Block& block = change_block(id);
  const PageId page_id = page_of(id);
  Page& page = change(page_id);
  ++block.refs;
  page.found = page.found || (keeps_found_ && block.published);
  if (block.refs == 2) {
    ++summary_.num_shared_blocks;
    if (++page.shared == 1) ++summary_.num_shared_pages;
  }
  if (block.refs > 1) return;
  ++page.used;
  ++summary_.num_used_blocks;
  if (block.published) {
    --page.cached;
    --summary_.num_cached_blocks;
  }
  update_state(page_id);
}

void BlockPool::drop_ref(BlockId id, Epoch epoch) noexcept {
  Block& block = change_block(id);
  const PageId page_id = page_of(id);
  Page& page = change(page_id);
  if (epoch > page.retire) {
    page.retire = epoch;
    if (epoch > completed_) waiting_.emplace_back(epoch, page_id);
  }
  --block.refs;
  if (block.refs == 1) {
    --summary_.num_shared_blocks;
    if (--page.shared == 0) --summary_.num_shared_pages;
  }
  if (block.refs > 0) return update_state(page_id);  // the page may have to wait
  --page.used;
  --summary_.num_used_blocks;
  if (block.published) {
    ++page.cached;
    ++summary_.num_cached_blocks;
  }
  update_state(page_id);
}

void BlockPool::begin_copy(BlockId block) noexcept {
  ++change_block(block).copies;
  ++change(page_of(block)).copying;
  ++summary_.num_copies;
  update_state(page_of(block));
}

void BlockPool::end_copy(BlockId block) noexcept {
  --change_block(block).copies;
  --change(page_of(block)).copying;
  --summary_.num_copies;
  update_state(page_of(block));
}

void BlockPool::add_map(PageId page, std::int32_t index) noexcept {
  ++change(page).maps;
  pages_[page].index = index;
  update_state(page);
}

void BlockPool::drop_map(PageId page) noexcept {
  --change(page).maps;
  update_state(page);
}

void BlockPool::set_owner(PageId page, SeqId owner) noexcept {
  change(page).owner = owner;
  update_state(page);
}

// -- prefix cache

BlockId BlockPool::find(const Digest& digest) const {
  const auto it = index_.find(digest);
  return it == index_.end() ? kNoBlock : it->second;
}

bool BlockPool::publish(BlockId id, const Digest& digest) {
  if (find(digest) != kNoBlock) return false;
  set_digest(id, digest, true);
  Block& block = change_block(id);
  block.published = true;
  if (block.refs == 0) {
    ++change(page_of(id)).cached;
    ++summary_.num_cached_blocks;
  }
  update_state(page_of(id));
  return true;
}

void BlockPool::unpublish(BlockId id) noexcept {
  Block& block = change_block(id);
  set_digest(id, digests_[id], false);
  block.published = false;
  has_unpublished_ = true;
  if (block.refs == 0) {
    --change(page_of(id)).cached;
    --summary_.num_cached_blocks;
  }
  update_state(page_of(id));
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
  Page& written = change(page);
  written.known_zero = false;
  written.tenant = tenant;
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
    throw InvariantError("page " + std::to_string(id) +
                         " has a state that its counters contradict");
  }
}

std::uint64_t BlockPool::fingerprint() const {
  Mix mix;
  mix.add(limit_, completed_, summary_.last_expendable, summary_.has_growing_runs);
  mix.add(summary_.first_kept, summary_.num_kept);
  for (const std::int64_t count : summary_.counts) mix.add(count);
  mix.add(summary_.num_idle_mapped, summary_.num_shared_pages, summary_.num_used_blocks,
          summary_.num_shared_blocks, summary_.num_cached_blocks, summary_.num_copies);
  mix.add(free_.size(), whole_.size(), index_.size(), split_.size(), waiting_.size());
  const auto add_list = [&](const List& list) {
    mix.add(list.tail, list.free_blocks);
    for (PageId id = list.head; id != kNoPage; id = pages_[id].next) mix.add(id, pages_[id].prev);
  };
  add_list(summary_.idle);
  for (std::int64_t id = committed_.lowest(); id >= 0; id = committed_.lowest(id + 1)) {
    const Page& page = pages_[id];
    mix.add(id, page.used, page.cached, page.shared, page.held, page.maps, page.copying,
            page.index);
    mix.add(page.owner, page.offered_blocks, static_cast<int>(page.state), page.known_zero,
            page.counted_mapped, page.expendable, page.found, page.kept, page.tenant, page.retire,
            free_.contains(id));
    if (page.state == PageState::kSplit && page.prev == kNoPage) add_list(split_.at(page.tenant));
    const BlockId first = first_block(static_cast<PageId>(id));
    for (BlockId b = first; b < first + blocks_per_page_; ++b) {
      mix.add(blocks_[b].refs, blocks_[b].copies, blocks_[b].published);
      if (blocks_[b].published) mix.add(find(digests_[b]));
    }
  }
  return mix.value();
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
    if (counted[state] != summary_.counts[state]) {
      throw InvariantError("counted " + std::to_string(counted[state]) + " pages in state " +
                           std::to_string(state) + ", recorded " +
                           std::to_string(summary_.counts[state]));
    }
  }
  std::int64_t idle = 0;
  PageId last_expendable = kNoPage, first_kept = kNoPage;
  std::int64_t num_kept = 0;
  for (PageId id = summary_.idle.head; id != kNoPage; id = pages_[id].next) {
    ++idle;
    num_kept += pages_[id].kept ? 1 : 0;
    if (pages_[id].kept && first_kept == kNoPage) first_kept = id;
    if (!pages_[id].kept && first_kept != kNoPage) {
      throw InvariantError("page " + std::to_string(id) + " lies behind kept ones and is not kept");
    }
    if (!pages_[id].expendable) continue;
    if (pages_[id].prev != last_expendable) {
      throw InvariantError("page " + std::to_string(id) +
                           " is expendable but not in front of the idle list");
    }
    last_expendable = id;
  }
  if (first_kept != summary_.first_kept || num_kept != summary_.num_kept) {
    throw InvariantError("the kept pages of the idle list are not the recorded ones");
  }
  if (last_expendable != summary_.last_expendable) {
    throw InvariantError("the last expendable page of the idle list is not the recorded one");
  }
  if (idle != summary_.counts[static_cast<int>(PageState::kIdle)]) {
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
