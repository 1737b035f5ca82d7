// The ledger of pages: which exist, who references them, what they last held. It talks to no
// driver, so every change of it can be taken back.
//
// A page is one of
//   absent   no memory behind it
//   free     committed, no references; its content is nobody's
//   taken    committed, one or more references
// Laws
//   * committed = free + taken;  0 <= committed <= max_pages
//   * refs(p) > 0 exactly for taken pages
//   * known_zero(p) only if every byte of the page is zero
#pragma once

#include <cstdint>
#include <vector>

#include "vmserve/lazy_array.h"
#include "vmserve/page_set.h"

namespace vmserve {

using PageId = std::int32_t;
using Tenant = std::int64_t;

constexpr PageId kNoPage = -1;

enum class ZeroPolicy : std::uint8_t {
  kAlways,  // a page is zero whenever it is handed out
  kTenant,  // zero when it last belonged to another tenant
  kNever,
};

struct PageRun {
  PageId first;
  PageId count;
};

class PagePool {
 public:
  // Pre: 0 < limit <= max_pages < 2^31.
  PagePool(std::int64_t max_pages, std::int64_t limit, ZeroPolicy policy);

  std::int64_t max_pages() const { return committed_.capacity(); }
  std::int64_t limit() const { return limit_; }
  std::int64_t num_committed() const { return committed_.size(); }
  std::int64_t num_free() const { return free_.size(); }
  std::int64_t num_taken() const { return num_committed() - num_free(); }
  std::int64_t num_shared() const { return num_shared_; }
  // How many pages can be taken: free ones, and absent ones within the limit.
  std::int64_t num_available() const;

  bool is_committed(PageId page) const { return committed_.contains(page); }
  // The lowest committed page >= from; -1 if there is none.
  std::int64_t next_committed(std::int64_t from) const { return committed_.lowest(from); }
  bool is_free(PageId page) const { return free_.contains(page); }
  std::int32_t refs(PageId page) const { return pages_[page].refs; }

  // Pre: 0 < limit <= max_pages. Pages above a lower limit are the caller's to trim.
  void set_limit(std::int64_t limit) { limit_ = limit; }

  // The lowest `count` absent pages, and the highest `count` free ones (or as many as there are).
  std::vector<PageRun> lowest_absent(std::int64_t count) const;
  std::vector<PageRun> highest_free(std::int64_t count) const;

  // Absent -> free, all zero. Free -> absent.
  void commit(const PageRun& run) noexcept;
  void uncommit(const PageRun& run) noexcept;

  // Free -> taken, one reference: the page after `previous` if it is free, so that the two map as
  // one run, else the lowest free page. Pre: num_free() > 0.
  PageId take(PageId previous) noexcept;
  // Free -> taken, this very page.
  void claim(PageId page) noexcept;
  // One more, one less reference. drop() says whether the page became free.
  void share(PageId page) noexcept;
  bool drop(PageId page) noexcept;

  // Whether the policy wants the page cleared before `tenant` sees it.
  bool needs_zero(PageId page, Tenant tenant) const;
  Tenant last_tenant(PageId page) const { return pages_[page].last_tenant; }
  void mark_zero(PageId page) noexcept { pages_[page].known_zero = true; }
  // The page holds, or is about to hold, the tenant's data.
  void mark_written(PageId page, Tenant tenant) noexcept;

  // Throws InvariantError naming the law that does not hold.
  void check() const;

 private:
  struct Page {
    std::int32_t refs;
    bool known_zero;
    Tenant last_tenant;
  };

  std::int64_t limit_;
  ZeroPolicy policy_;
  PageSet committed_;
  PageSet free_;
  LazyArray<Page> pages_;
  std::int64_t num_shared_ = 0;  // pages with two references or more
};

}  // namespace vmserve
