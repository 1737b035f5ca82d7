// Epochs of several kinds of layers: how they end, and what windows give up then.
#include <algorithm>
#include <utility>

#include "vmserve/errors.h"
#include "vmserve/kinds_memory.h"
#include "vmserve/memory/require.h"

namespace vmserve {

void KindsMemory::complete(Epoch epoch) {
  const auto lock = lock_calls();
  for (const auto& kind : kinds_) kind->complete(epoch);
  const auto locks = enter();
  give_up_past(/*from_slots=*/false);
}

// Drops positions that no later query sees, because growth would drop them too late. Returns
// whether there were any. Dropping at the end of each step helps to find prefixes of sequences of
// blocks, but not of slots. Slots drop pages when these are needed (docs/log/2026-11-24.md).
bool KindsMemory::give_up_past(bool from_slots) {
  bool gave_any = false;
  for (std::size_t k = 0; k < kinds_.size(); ++k) {
    Ledger& ledger = kinds_[k]->ledger_;
    if (windows_[k] == 0) continue;
    bool gave = false;
    const std::vector<bool> running = ledger.running_seqs();
    for (SeqId id = 0; id < ledger.config.max_seqs; ++id) {
      const Sequence& seq = ledger.seqs[id];
      if (!seq.open || running[id] || seq.kv.swapped) continue;
      if (seq.kv.view == View::kVirtual && !from_slots) continue;
      if (!ledger.trim_front(id, seq.kv.length + 1 - windows_[k])) continue;
      ++ledger.version;
      gave = true;
    }
    if (gave) kinds_[k]->background_.restore_write_access();
    gave_any = gave_any || gave;
  }
  return gave_any;
}

// Whether sequences of running epochs will drop blocks when these end.
bool KindsMemory::will_give_up_past() const {
  for (std::size_t k = 0; k < kinds_.size(); ++k) {
    const Ledger& ledger = kinds_[k]->ledger_;
    if (windows_[k] == 0 || ledger.records.empty()) continue;
    const std::vector<bool> running = ledger.running_seqs();
    for (SeqId id = 0; id < ledger.config.max_seqs; ++id) {
      const KvState& kv = ledger.seqs[id].kv;
      const std::int64_t unit =
          kv.view == View::kVirtual ? ledger.config.page_tokens() : ledger.config.block_tokens;
      const std::int64_t first = std::max<std::int64_t>(0, kv.length + 1 - windows_[k]);
      const std::int64_t behind = first / unit * unit / ledger.config.block_tokens;
      if (running[id] && !kv.swapped && kv.num_trimmed < behind) return true;
    }
  }
  return false;
}

void KindsMemory::abandon_epoch(Epoch epoch) {
  const auto lock = lock_calls();
  for (const auto& kind : kinds_) kind->abandon_epoch(epoch);
}

void KindsMemory::launched(Epoch epoch) {
  const auto lock = lock_calls();
  const auto locks = enter();
  require(epoch <= kinds_[0]->ledger_.begun,
          [&] { return "epoch " + std::to_string(epoch) + " has not begun"; });
  std::vector<Mark> marks;
  for (const auto& kind : kinds_) {
    kind->work_.require_alive();
    const auto driving = kind->work_.lock();
    marks.push_back(kind->work_.driver->mark());
  }
  marks_.emplace_back(epoch, std::move(marks));
}

// An epoch ends in all kinds at once: when the device has done all work that their drivers were
// asked for before its launch.
void KindsMemory::apply_reached_marks() {
  for (; !marks_.empty(); marks_.pop_front()) {
    for (std::size_t k = 0; k < kinds_.size(); ++k) {
      DriverWork& work = kinds_[k]->work_;
      try {
        const auto driving = work.lock();
        if (!work.driver->reached(marks_.front().second[k])) return;
      } catch (const Error& error) {
        return work.fail_if_sticky(error);
      }
    }
    for (const auto& kind : kinds_) kind->background_.complete(marks_.front().first, true);
    give_up_past(/*from_slots=*/false);
  }
}

bool KindsMemory::finish_copies() {
  const auto lock = lock_calls();
  bool waited = false;
  for (const auto& kind : kinds_) waited = kind->finish_copies() || waited;
  return waited;
}

bool KindsMemory::is_copying() {
  const auto lock = lock_calls();
  {
    const auto locks = enter();
    apply_reached_marks();
  }
  return std::any_of(kinds_.begin(), kinds_.end(),
                     [](const auto& kind) { return kind->is_copying(); });
}

void KindsMemory::clear_cache() {
  const auto lock = lock_calls();
  for (const auto& kind : kinds_) kind->clear_cache();
}

}  // namespace vmserve
