// Blocks that outlive the process: what KVMemory does with its stores.
#include <algorithm>
#include <chrono>

#include "vmserve/kv_memory.h"
#include "vmserve/memory/require.h"

namespace vmserve {
namespace {

using Clock = std::chrono::steady_clock;

}  // namespace

void KVMemory::persist_to(const std::vector<std::shared_ptr<PageStore>>& stores,
                          double touch_seconds) {
  const auto lock = enter();
  require(stores.size() == kinds_.size(),
          [] { return std::string("each kind of layers has a store of its own"); });
  const Kind& first = *kinds_.front();
  require(first.config.prefix_caching && first.background.persistence() == nullptr &&
              books_.num_open == 0,
          [] {
            return std::string("a memory with a prefix cache and no sequences takes stores once");
          });
  require(std::all_of(stores.begin(), stores.end(), [](const auto& store) { return store; }),
          [] { return std::string("a store is missing"); });
  books_.generation = 0;
  for (const auto& store : stores) {
    books_.generation = std::max(books_.generation, store->generation());
  }
  for (std::size_t k = 0; k < kinds_.size(); ++k) {
    Background& background = kinds_[k]->background;
    background.persist_to(stores[k], touch_seconds);
    background.persistence()->call_when_written([this, &background] {
      const std::lock_guard<std::mutex> written(mutex_);
      if (is_idle_ && !is_closed_) background.persistence()->write_behind();
    });
  }
}

bool KVMemory::restore(SeqId id, const std::vector<Op>& attaching) {
  const auto lock = enter();
  const Sequence& seq = books_.open_seq(id);
  for (const Op& op : attaching) books_.open_seq(op.seq);
  for (const auto& kind : kinds_) {
    if (kind->background.persistence() == nullptr || !kind->work.failure.empty()) return false;
  }
  apply_finished_work();
  const std::int64_t end = num_matched(seq, /*stored=*/true);
  std::vector<MissingBlocks> missing;
  std::vector<std::int64_t> first, needed;
  std::int64_t needed_bytes = 0;
  bool is_coming = false, lacks = false;
  for (const auto& kind : kinds_) {
    // The first block of the kind that the query after the prefix sees.
    const std::int64_t width = kind->config.block_tokens;
    first.push_back(kind->config.first_seen(end * width) / width);
    Persistence& persistence = *kind->background.persistence();
    missing.push_back(persistence.look_up(seq, first.back(), end));
    needed.push_back(persistence.pages_for(missing.back().indices));
    needed_bytes += needed.back() * kind->page_bytes();
    is_coming = is_coming || missing.back().is_coming;
    lacks = lacks || !missing.back().indices.empty();
  }
  if (!lacks) return is_coming;
  std::vector<std::vector<PageId>> held;
  for (std::size_t k = 0; k < kinds_.size(); ++k) {
    kinds_[k]->background.persistence()->hold_cached(seq, first[k], end, held.emplace_back());
    kinds_[k]->hold_found(kinds_[k]->own_ops(attaching), held.back());
  }
  std::size_t at = 0;
  try {
    if (needed_bytes <= budget_.available_bytes()) {
      budget_.gather(needed);
      for (at = 0; at < kinds_.size(); ++at) {
        if (needed[at] == 0) continue;
        Kind& kind = *kinds_[at];
        budget_.allow_beside(at, needed);
        kind.room.make_room(needed[at]);
        kind.background.persistence()->begin_restore(seq, missing[at].indices);
      }
    }
  } catch (const Error& error) {
    kinds_[at]->work.last_error = error.what();
    kinds_[at]->work.fail_if_sticky(error);
  }
  for (std::size_t k = 0; k < kinds_.size(); ++k) {
    for (const PageId page : held[k]) kinds_[k]->pool.unhold(page);
  }
  ++books_.version;
  apply_finished_work();
  return std::any_of(kinds_.begin(), kinds_.end(), [](const auto& kind) {
    return kind->background.persistence()->is_restoring();
  });
}

void KVMemory::finish_restores() {
  const auto lock = enter();
  for (const auto& kind : kinds_) {
    Persistence* const persistence = kind->background.persistence();
    if (persistence != nullptr) persistence->finish_restores();
  }
}

void KVMemory::write_when_idle() {
  const auto lock = enter();
  for (const auto& kind : kinds_) {
    Persistence* const persistence = kind->background.persistence();
    if (persistence == nullptr) return;
    is_idle_ = true;
    persistence->write_behind();
  }
}

bool KVMemory::flush(double seconds) {
  const auto until = Clock::now() + std::chrono::duration<double>(seconds);
  for (const auto& kind : kinds_) {
    Persistence* persistence = nullptr;
    for (;;) {
      {
        const auto lock = enter();
        persistence = kind->background.persistence();
        if (persistence == nullptr) return true;
        persistence->tell_hits();
        persistence->write_behind();
        if (!persistence->has_writes()) break;
      }
      if (Clock::now() > until) return false;
      persistence->wait_for_writer();
    }
    persistence->wait_for_writer();  // touches files of hits
  }
  return true;
}

std::string KVMemory::persist_message() {
  const auto lock = enter();
  for (const auto& kind : kinds_) {
    Persistence* const persistence = kind->background.persistence();
    if (persistence == nullptr) continue;
    if (std::string message = persistence->store().take_message(); !message.empty()) {
      return message;
    }
  }
  return "";
}

std::int64_t KVMemory::run_store(std::int64_t max_jobs) {
  std::int64_t count = 0;
  for (const auto& kind : kinds_) {
    Persistence* const persistence = kind->background.persistence();
    count += persistence == nullptr ? 0 : persistence->run(max_jobs);
  }
  return count;
}

}  // namespace vmserve
