// What can be read of KV memory: sequences, statistics, the map, and the laws of all kinds.
#include <algorithm>

#include "vmserve/kv_memory.h"
#include "vmserve/memory/require.h"
#include "vmserve/mix.h"

namespace vmserve {

const Kind& KVMemory::kind_at(std::size_t kind) const {
  require(kind < kinds_.size(), [&] {
    return "kind " + std::to_string(kind) + " is outside 0 .. " + std::to_string(kinds_.size() - 1);
  });
  return *kinds_[kind];
}

const MemoryConfig& KVMemory::config(std::size_t kind) const {
  return kind_at(kind).config;
}

std::int64_t KVMemory::length(SeqId seq) const {
  const auto lock = enter();
  return books_.open_seq(seq).kv.length;
}

std::int64_t KVMemory::sealed(SeqId seq) const {
  const auto lock = enter();
  return books_.open_seq(seq).kv.sealed;
}

View KVMemory::view(SeqId seq) const {
  const auto lock = enter();
  return books_.open_seq(seq).kv.view;
}

bool KVMemory::swapped(SeqId seq) const {
  const auto lock = enter();
  return books_.open_seq(seq).kv.swapped;
}

std::optional<SlotId> KVMemory::slot(SeqId seq) const {
  const auto lock = enter();
  const SlotId slot = books_.open_seq(seq).kv.slot;
  return slot == kNoSlot ? std::nullopt : std::optional<SlotId>(slot);
}

std::vector<SlotId> KVMemory::slots(const std::vector<SeqId>& seqs) const {
  const auto lock = enter();
  std::vector<SlotId> slots;
  slots.reserve(seqs.size());
  for (const SeqId seq : seqs) slots.push_back(books_.open_seq(seq).kv.slot);
  return slots;
}

std::vector<BlockId> KVMemory::blocks(SeqId seq, std::size_t kind) const {
  const auto lock = enter();
  books_.open_seq(seq);
  return kind_at(kind).ledger.held[seq].blocks;
}

std::vector<PageId> KVMemory::slot_pages(SlotId slot, std::size_t kind) const {
  const auto lock = enter();
  const std::vector<Slot>& slots = kind_at(kind).ledger.slots;
  require(slot >= 0 && slot < static_cast<SlotId>(slots.size()), [&] {
    return "slot " + std::to_string(slot) + " is outside 0 .. " + std::to_string(slots.size() - 1);
  });
  std::vector<PageId> pages;
  for (const SlotEntry& entry : slots[slot].entries) pages.push_back(entry.page);
  return pages;
}

std::int32_t KVMemory::block_refs(BlockId block, std::size_t kind) const {
  const auto lock = enter();
  const Kind& of = kind_at(kind);
  require(block >= 0 && block < of.pool.max_pages() * of.config.blocks_per_page,
          [&] { return "block " + std::to_string(block) + " does not exist"; });
  return of.pool.refs(block);
}

std::shared_ptr<AddressSpace> KVMemory::address_space(std::size_t kind) const {
  const auto lock = enter();
  return kind_at(kind).work.space;
}

std::string KVMemory::last_error() const {
  const auto lock = enter();
  for (const auto& kind : kinds_) {
    if (!kind->work.last_error.empty()) return kind->work.last_error;
  }
  return "";
}

// -- statistics

namespace {

// Adds up figures of kinds by the rules of stats.def: `add` for each kind, `end` after the last.
struct OF_FIRST {
  template <typename Number>
  static void add(Number& sum, Number own, const MemoryStats&, bool is_first) {
    if (is_first) sum = own;
  }
  template <typename Number>
  static void end(Number&, std::int64_t, const MemoryStats&) {}
};
struct SUM {
  template <typename Number>
  static void add(Number& sum, Number own, const MemoryStats&, bool) {
    sum += own;
  }
  template <typename Number>
  static void end(Number&, std::int64_t, const MemoryStats&) {}
};
struct LEAST {
  static void add(std::int64_t& sum, std::int64_t own, const MemoryStats&, bool is_first) {
    sum = is_first ? own : std::min(sum, own);
  }
  static void end(std::int64_t&, std::int64_t, const MemoryStats&) {}
};
struct WHOLE_PAGES {
  static void add(std::int64_t& sum, std::int64_t own, const MemoryStats& of, bool) {
    sum += own * of.page_bytes;
  }
  static void end(std::int64_t& sum, std::int64_t whole, const MemoryStats&) { sum /= whole; }
};
struct WHOLE_BLOCKS {
  static void add(std::int64_t& sum, std::int64_t own, const MemoryStats& of, bool) {
    sum += own * (of.page_bytes / of.blocks_per_page);
  }
  static void end(std::int64_t& sum, std::int64_t whole, const MemoryStats& first) {
    sum /= whole / first.blocks_per_page;
  }
};

}  // namespace

std::vector<MemoryStats> KVMemory::kind_stats() {
  const auto lock = enter();
  apply_finished_work();
  std::vector<MemoryStats> stats;
  for (const auto& kind : kinds_) stats.push_back(kind->stats());
  return stats;
}

MemoryStats KVMemory::stats() {
  const std::vector<MemoryStats> of_kinds = kind_stats();
  const MemoryStats& first = of_kinds.front();
  MemoryStats sum;
  for (const MemoryStats& own : of_kinds) {
    const bool is_first = &own == &first;
    sum.health = std::max(sum.health, own.health);
#define VMSERVE_GAUGE(type, name, rule, what) rule::add(sum.name, own.name, own, is_first);
#define VMSERVE_COUNTER(type, name, rule, what) \
  rule::add(sum.name##_total, own.name##_total, own, is_first);
#include "vmserve/stats.def"
  }
  const auto lock = enter();
  const std::int64_t whole = whole_page_bytes_;
#define VMSERVE_GAUGE(type, name, rule, what) rule::end(sum.name, whole, first);
#include "vmserve/stats.def"
  sum.page_bytes = whole;
  sum.limit_pages = budget_.limit_bytes() / whole;
  return sum;
}

MemoryMap KVMemory::memory_map(std::int64_t max_cells) {
  require(max_cells >= 1, [] { return std::string("a memory map has at least one cell"); });
  const auto lock = enter();
  apply_finished_work();
  // Pages that no kind has committed follow those of the first kind; above a lowered limit there
  // are none.
  std::vector<std::int64_t> shown;
  std::int64_t gaps = 0, total = 0;
  for (const auto& kind : kinds_) {
    shown.push_back(kind->num_pages_shown());
    gaps += shown.back() - kind->pool.num_committed();
    total += shown.back();
  }
  const Kind& first = *kinds_.front();
  const std::int64_t absent = budget_.uncommitted_bytes() / first.page_bytes() - gaps;
  const std::int64_t more =
      std::clamp<std::int64_t>(absent, 0, first.config.max_pages - shown.front());
  shown.front() += more;
  const std::int64_t width = std::max<std::int64_t>(1, round_up_div(total + more, max_cells));
  MemoryMap sum;
  for (std::size_t k = 0; k < kinds_.size(); ++k) {
    MemoryMap own = kinds_[k]->map(shown[k], width);
    if (k == 0) {
      sum = std::move(own);
      continue;
    }
    sum.num_pages += own.num_pages;
    sum.cells.insert(sum.cells.end(), own.cells.begin(), own.cells.end());
    for (std::size_t code = 0; code < kNumPageCodes; ++code) sum.counts[code] += own.counts[code];
  }
  return sum;
}

void KVMemory::check() {
  const auto lock = enter();
  apply_reached_marks();
  for (const auto& kind : kinds_) kind->check();
}

std::uint64_t KVMemory::fingerprint() const {
  const auto lock = enter();
  budget_.allow_all();  // the kinds' limits follow from the rest
  Mix mix;
  mix.add(budget_.limit_bytes(), books_.fingerprint());
  for (const auto& kind : kinds_) mix.add(kind->fingerprint());
  return mix.value();
}

}  // namespace vmserve
