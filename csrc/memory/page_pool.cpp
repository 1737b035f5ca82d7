#include "vmserve/page_pool.h"

#include <algorithm>
#include <limits>
#include <string>

#include "vmserve/errors.h"
#include "vmserve/text.h"

namespace vmserve {

PagePool::PagePool(std::int64_t max_pages, std::int64_t limit, ZeroPolicy policy)
    : limit_(limit), policy_(policy) {
  if (max_pages <= 0 || max_pages > std::numeric_limits<PageId>::max()) {
    throw MisuseError("max_pages is " + with_commas(max_pages) +
                      ": it must lie between 1 and 2,147,483,647; use larger pages");
  }
  committed_ = PageSet(max_pages);
  free_ = PageSet(max_pages);
  pages_ = LazyArray<Page>(max_pages);
}

std::int64_t PagePool::num_available() const {
  return std::max<std::int64_t>(0, limit_ - num_taken());
}

std::vector<PageRun> PagePool::lowest_absent(std::int64_t count) const {
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

std::vector<PageRun> PagePool::highest_free(std::int64_t count) const {
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

void PagePool::commit(const PageRun& run) noexcept {
  for (PageId page = run.first; page < run.first + run.count; ++page) {
    committed_.insert(page);
    free_.insert(page);
    pages_[page] = Page{0, true, 0};
  }
}

void PagePool::uncommit(const PageRun& run) noexcept {
  for (PageId page = run.first; page < run.first + run.count; ++page) {
    free_.erase(page);
    committed_.erase(page);
  }
}

PageId PagePool::take(PageId previous) noexcept {
  const bool adjacent = previous != kNoPage && free_.contains(std::int64_t{previous} + 1);
  const PageId page = adjacent ? previous + 1 : static_cast<PageId>(free_.lowest());
  claim(page);
  return page;
}

void PagePool::claim(PageId page) noexcept {
  free_.erase(page);
  pages_[page].refs = 1;
}

void PagePool::share(PageId page) noexcept {
  if (++pages_[page].refs == 2) ++num_shared_;
}

bool PagePool::drop(PageId page) noexcept {
  const std::int32_t left = --pages_[page].refs;
  if (left == 1) --num_shared_;
  if (left == 0) free_.insert(page);
  return left == 0;
}

bool PagePool::needs_zero(PageId page, Tenant tenant) const {
  if (policy_ == ZeroPolicy::kNever || pages_[page].known_zero) return false;
  return policy_ == ZeroPolicy::kAlways || pages_[page].last_tenant != tenant;
}

void PagePool::mark_written(PageId page, Tenant tenant) noexcept {
  pages_[page].known_zero = false;
  pages_[page].last_tenant = tenant;
}

void PagePool::check() const {
  std::int64_t taken = 0;
  std::int64_t shared = 0;
  for (std::int64_t id = committed_.lowest(); id >= 0; id = committed_.lowest(id + 1)) {
    const std::int32_t refs = pages_[id].refs;
    if (refs < 0 || (refs == 0) != free_.contains(id)) {
      throw InvariantError("page " + std::to_string(id) + " has " + std::to_string(refs) +
                           " references and is" + (free_.contains(id) ? "" : " not") + " free");
    }
    taken += refs > 0 ? 1 : 0;
    shared += refs > 1 ? 1 : 0;
  }
  for (std::int64_t id = free_.lowest(); id >= 0; id = free_.lowest(id + 1)) {
    if (!committed_.contains(id)) {
      throw InvariantError("page " + std::to_string(id) + " is free but not committed");
    }
  }
  if (taken != num_taken() || shared != num_shared_) {
    throw InvariantError("counted " + std::to_string(taken) + " taken and " +
                         std::to_string(shared) + " shared pages, recorded " +
                         std::to_string(num_taken()) + " and " + std::to_string(num_shared_));
  }
}

}  // namespace vmserve
