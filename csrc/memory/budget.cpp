#include "vmserve/memory/budget.h"

#include <algorithm>
#include <cstdlib>
#include <tuple>
#include <utility>

#include "vmserve/errors.h"
#include "vmserve/text.h"

namespace vmserve {

std::int64_t Budget::uncommitted_bytes() const {
  std::int64_t bytes = limit_bytes_;
  for (const auto& kind : kinds_) bytes -= kind->pool.num_committed() * kind->page_bytes();
  return bytes;
}

std::int64_t Budget::free_bytes() const {
  std::int64_t bytes = 0;
  for (const auto& kind : kinds_) bytes += kind->pool.num_free() * kind->page_bytes();
  return bytes;
}

std::int64_t Budget::reclaimable_bytes() const {
  std::int64_t bytes = free_bytes();
  for (const auto& kind : kinds_) bytes += kind->pool.count(PageState::kIdle) * kind->page_bytes();
  return bytes;
}

void Budget::allow(Kind& kind, std::int64_t bytes) const {
  const std::int64_t size = kind.page_bytes();
  const std::int64_t more = bytes < 0 ? -round_up_div(-bytes, size) : bytes / size;
  kind.pool.set_limit(
      std::clamp<std::int64_t>(kind.pool.num_committed() + more, 0, kind.config.max_pages));
}

void Budget::allow_beside(std::size_t number, const std::vector<std::int64_t>& needed) const {
  std::int64_t bytes = uncommitted_bytes();
  for (std::size_t j = number + 1; j < kinds_.size(); ++j) {
    const std::int64_t more = needed[j] - kinds_[j]->pool.num_free();
    bytes -= std::max<std::int64_t>(0, more) * kinds_[j]->page_bytes();
  }
  allow(*kinds_[number], bytes);
}

void Budget::share() const {
  for (const auto& kind : kinds_) allow(*kind, uncommitted_bytes());
}

void Budget::allow_all() const {
  const std::int64_t available = available_bytes();
  for (const auto& kind : kinds_) {
    const std::int64_t own = kind->pool.num_free() + kind->pool.count(PageState::kIdle);
    allow(*kind, available - own * kind->page_bytes());
  }
}

// Evicts the page that was used least recently. One without cached blocks goes first, those that
// their pool keeps last; of equally old ones, that of the kind with the largest pages.
bool Budget::evict_oldest() {
  using Age = std::tuple<bool, bool, Epoch, std::int64_t>;
  std::vector<std::pair<Age, Kind*>> oldest;
  for (const auto& kind : kinds_) {
    const BlockPool& pool = kind->pool;
    const PageId page = pool.oldest_idle();
    if (page == kNoPage) continue;
    const Age age{pool.cached(page) > 0, pool.is_kept(page), pool.retire(page),
                  -kind->page_bytes()};
    oldest.emplace_back(age, kind.get());
  }
  std::sort(oldest.begin(), oldest.end(),
            [](const auto& a, const auto& b) { return a.first < b.first; });
  return std::any_of(oldest.begin(), oldest.end(),
                     [](const auto& candidate) { return candidate.second->room.evict_oldest(); });
}

void Budget::evict_until_free(std::int64_t bytes) {
  while (free_bytes() < bytes && evict_oldest()) {
  }
}

std::int64_t Budget::return_free(std::int64_t bytes, const std::vector<std::int64_t>& needed) {
  std::int64_t returned = 0;
  for (std::size_t k = 0; k < kinds_.size() && returned < bytes; ++k) {
    const std::int64_t size = kinds_[k]->page_bytes();
    const std::int64_t spare = kinds_[k]->pool.num_free() - needed[k];
    const std::int64_t wanted = round_up_div(bytes - returned, size);
    if (spare > 0) returned += kinds_[k]->room.give_back(std::min(spare, wanted)) * size;
  }
  return returned;
}

void Budget::gather(const std::vector<std::int64_t>& needed) {
  // A kind evicts its own pages itself, several at a time. Above a lowered limit, sequences may
  // leave nothing to give back. A caller that needs no page goes on all the same.
  bool is_short = false;
  for (std::size_t k = 0; k < kinds_.size() && kinds_.size() > 1; ++k) {
    is_short = is_short || needed[k] > kinds_[k]->pool.num_free();
  }
  if (!is_short) return;
  // Bytes that must be returned, and those that kinds have free beyond what they need.
  const auto missing = [&] {
    std::pair<std::int64_t, std::int64_t> bytes{-uncommitted_bytes(), 0};
    for (std::size_t k = 0; k < kinds_.size(); ++k) {
      const std::int64_t spare = kinds_[k]->pool.num_free() - needed[k];
      (spare < 0 ? bytes.first : bytes.second) += std::abs(spare) * kinds_[k]->page_bytes();
    }
    return bytes;
  };
  for (auto bytes = missing(); bytes.first > bytes.second; bytes = missing()) {
    if (!evict_oldest()) break;
  }
  return_free(missing().first, needed);
  const std::int64_t left = missing().first;
  if (left <= 0) return;
  std::string reason;
  for (const auto& kind : kinds_) {
    if (reason.empty() && !kind->work.last_error.empty()) {
      reason = " (" + kind->work.last_error + ")";
    }
  }
  throw OutOfMemoryError("needs " + with_commas(left) + " bytes that other kinds of layers hold" +
                         reason);
}

void Budget::give_back_excess() {
  const std::int64_t excess = -uncommitted_bytes();
  if (excess <= 0) return;
  evict_until_free(excess);
  return_free(excess, std::vector<std::int64_t>(kinds_.size()));
}

void Budget::try_give_back_excess() {
  const bool has_failed = std::any_of(kinds_.begin(), kinds_.end(),
                                      [](const auto& kind) { return !kind->work.failure.empty(); });
  if (has_failed) return;
  try {
    give_back_excess();
  } catch (const Error& error) {
    kinds_.front()->work.last_error = error.what();
  }
}

}  // namespace vmserve
