// Blocks that outlive the process: what KVMemory and KindsMemory do with their stores.
#include <algorithm>
#include <chrono>

#include "vmserve/kinds_memory.h"
#include "vmserve/memory/require.h"

namespace vmserve {
namespace {

using Clock = std::chrono::steady_clock;

}  // namespace

// -- one kind of layers

void KVMemory::persist_to(std::shared_ptr<PageStore> store, double touch_seconds) {
  const auto lock = enter();
  require(
      config_.prefix_caching && background_.persistence() == nullptr && ledger_.num_open == 0,
      [] { return std::string("a memory with a prefix cache and no sequences takes one store"); });
  generation_ = store->generation();
  background_.persist_to(std::move(store), touch_seconds);
  background_.persistence()->call_when_written([this] {
    const std::lock_guard<std::mutex> written(mutex_);
    if (is_idle_ && work_.space != nullptr) background_.persistence()->write_behind();
  });
}

std::int64_t KVMemory::num_within_reach(const Sequence& seq, std::int64_t most,
                                        std::int64_t window) const {
  const Persistence& persistence = *background_.persistence();
  return ledger_.num_matched(
      seq, most, window, [&](const Digest& digest) { return persistence.is_within_reach(digest); });
}

// Holds idle pages that the attaches need; the caller releases them.
void KVMemory::hold_found(const std::vector<Op>& attaches, std::vector<PageId>& held) {
  for (const Op& op : attaches) {
    const Sequence& seq = ledger_.open_seq(op.seq);
    background_.persistence()->hold_cached(seq, planner_.first_block(op),
                                           op.num_tokens / config_.block_tokens, held);
  }
}

bool KVMemory::restore(SeqId id, const std::vector<Op>& beside) {
  const auto lock = enter();
  Persistence* const persistence = background_.persistence();
  const Sequence& seq = ledger_.open_seq(id);
  if (persistence == nullptr || !work_.failure.empty()) return false;
  background_.apply_finished_work();
  const std::int64_t end = num_within_reach(seq, ledger_.num_matchable(seq), 0);
  const MissingBlocks missing = persistence->look_up(seq, 0, end);
  if (missing.indices.empty()) return missing.is_coming;
  std::vector<PageId> held;
  persistence->hold_cached(seq, 0, end, held);
  hold_found(beside, held);
  const std::int64_t pages = persistence->pages_for(missing.indices);
  try {
    if (pages <= pool_.num_available()) {
      room_.make_room(pages);
      persistence->begin_restore(seq, missing.indices);
    }
  } catch (const Error& error) {
    work_.last_error = error.what();
    work_.fail_if_sticky(error);
  }
  for (const PageId page : held) pool_.unhold(page);
  ++ledger_.version;
  background_.apply_finished_work();
  return persistence->is_restoring();
}

void KVMemory::finish_restores() {
  const auto lock = enter();
  if (background_.persistence() != nullptr) background_.persistence()->finish_restores();
}

void KVMemory::write_when_idle() {
  const auto lock = enter();
  if (background_.persistence() == nullptr) return;
  is_idle_ = true;
  background_.persistence()->write_behind();
}

bool KVMemory::flush(double seconds) {
  const auto until = Clock::now() + std::chrono::duration<double>(seconds);
  Persistence* persistence = nullptr;
  for (;;) {
    {
      const auto lock = enter();
      persistence = background_.persistence();
      if (persistence == nullptr) return true;
      persistence->tell_hits();
      persistence->write_behind();
      if (!persistence->has_writes()) break;
    }
    if (Clock::now() > until) return false;
    persistence->wait_for_writer();
  }
  persistence->wait_for_writer();  // touches files of hits
  return true;
}

std::string KVMemory::persist_message() {
  const auto lock = enter();
  Persistence* const persistence = background_.persistence();
  return persistence == nullptr ? "" : persistence->store().take_message();
}

std::int64_t KVMemory::run_store(std::int64_t max_jobs) {
  Persistence* const persistence = background_.persistence();
  return persistence == nullptr ? 0 : persistence->run(max_jobs);
}

// -- several kinds

void KindsMemory::persist_to(const std::vector<std::shared_ptr<PageStore>>& stores,
                             double touch_seconds) {
  const auto lock = lock_calls();
  require(stores.size() == kinds_.size(),
          [] { return std::string("each kind of layers has a store of its own"); });
  for (std::size_t k = 0; k < kinds_.size(); ++k) kinds_[k]->persist_to(stores[k], touch_seconds);
}

bool KindsMemory::restore(SeqId id, const std::vector<Op>& beside) {
  const auto lock = lock_calls();
  const auto locks = enter();
  if (kinds_[0]->background_.persistence() == nullptr) return false;
  for (const auto& kind : kinds_) {
    if (!kind->work_.failure.empty()) return false;
    kind->background_.apply_finished_work();
  }
  const std::int64_t end = num_matched(id, /*stored=*/true);
  // The first block of a kind that the query after the prefix sees.
  const auto first_of = [&](std::size_t k) {
    const std::int64_t width = kinds_[k]->config_.block_tokens;
    const std::int64_t first = windows_[k] == 0 ? 0 : end * width + 1 - windows_[k];
    return std::max<std::int64_t>(0, first) / width;
  };
  std::vector<MissingBlocks> missing;
  std::vector<std::int64_t> needed;
  std::int64_t needed_bytes = 0;
  bool is_coming = false, lacks = false;
  for (std::size_t k = 0; k < kinds_.size(); ++k) {
    Persistence& persistence = *kinds_[k]->background_.persistence();
    missing.push_back(persistence.look_up(kinds_[k]->ledger_.open_seq(id), first_of(k), end));
    needed.push_back(persistence.pages_for(missing[k].indices));
    needed_bytes += needed[k] * page_bytes(*kinds_[k]);
    is_coming = is_coming || missing[k].is_coming;
    lacks = lacks || !missing[k].indices.empty();
  }
  if (!lacks) return is_coming;
  std::vector<std::vector<PageId>> held;
  for (std::size_t k = 0; k < kinds_.size(); ++k) {
    const Sequence& seq = kinds_[k]->ledger_.open_seq(id);
    kinds_[k]->background_.persistence()->hold_cached(seq, first_of(k), end, held.emplace_back());
    kinds_[k]->hold_found(ops_of(k, beside), held.back());
  }
  try {
    if (needed_bytes <= uncommitted_bytes() + reclaimable_bytes()) {
      gather(needed);
      for (std::size_t k = 0; k < kinds_.size(); ++k) {
        if (needed[k] == 0) continue;
        allow(*kinds_[k], uncommitted_bytes());
        kinds_[k]->room_.make_room(needed[k]);
        kinds_[k]->background_.persistence()->begin_restore(kinds_[k]->ledger_.open_seq(id),
                                                            missing[k].indices);
      }
    }
  } catch (const Error& error) {
    kinds_[0]->work_.last_error = error.what();
  }
  bool is_restoring = false;
  for (std::size_t k = 0; k < kinds_.size(); ++k) {
    KVMemory& kind = *kinds_[k];
    for (const PageId page : held[k]) kind.pool_.unhold(page);
    ++kind.ledger_.version;
    kind.background_.apply_finished_work();
    is_restoring = is_restoring || kind.background_.persistence()->is_restoring();
  }
  return is_restoring;
}

void KindsMemory::finish_restores() {
  const auto lock = lock_calls();
  for (const auto& kind : kinds_) kind->finish_restores();
}

void KindsMemory::write_when_idle() {
  const auto lock = lock_calls();
  for (const auto& kind : kinds_) kind->write_when_idle();
}

bool KindsMemory::flush(double seconds) {
  bool done = true;
  for (const auto& kind : kinds_) done = kind->flush(seconds) && done;
  return done;
}

std::string KindsMemory::persist_message() {
  for (const auto& kind : kinds_) {
    if (std::string message = kind->persist_message(); !message.empty()) return message;
  }
  return "";
}

}  // namespace vmserve
