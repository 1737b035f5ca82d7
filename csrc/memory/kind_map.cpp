// The memory map: how each page is used, and what each slot shows.
#include <algorithm>
#include <array>

#include "vmserve/memory/kind.h"

namespace vmserve {
namespace {

constexpr std::uint8_t kVirtualUse = 1, kPagedUse = 2, kSpareUse = 4;

std::uint8_t code(PageUse use, bool shared, bool mapped) {
  return static_cast<std::uint8_t>(static_cast<int>(use) + (shared ? kPageShared : 0) +
                                   (mapped ? kPageMapped : 0));
}

// `uses`: the views of live sequences that use the page.
std::uint8_t code_of(const BlockPool& pool, PageId page, std::uint8_t uses) {
  switch (pool.state(page)) {
    case PageState::kAbsent:
      return code(PageUse::kAbsent, false, false);
    case PageState::kFree:
      return code(PageUse::kFree, false, false);
    case PageState::kWaiting:
      return code(PageUse::kWaiting, false, pool.maps(page) > 0);
    case PageState::kHeld:
      return code(PageUse::kHeld, false, pool.maps(page) > 0);
    case PageState::kIdle: {
      const bool spare = (uses & kSpareUse) != 0;
      const PageUse use = pool.cached(page) > 0 ? PageUse::kCached
                          : spare               ? PageUse::kSpare
                                                : PageUse::kParked;
      return code(use, false, pool.maps(page) > 0);
    }
    case PageState::kInUse:
    case PageState::kSplit:
      break;
  }
  const bool is_virtual = (uses & kVirtualUse) != 0, is_paged = (uses & kPagedUse) != 0;
  const PageUse use = !is_virtual ? PageUse::kPaged : is_paged ? PageUse::kBoth : PageUse::kVirtual;
  return code(use, pool.shared(page) > 0, pool.maps(page) > 0);
}

// A cell of several pages has their most frequent code; of equally frequent ones, the lowest.
void draw_cells(MemoryMap& map, const BlockPool& pool, const std::vector<std::uint8_t>& uses,
                std::int64_t pages_per_cell) {
  const auto num_pages_shown = static_cast<std::int64_t>(uses.size());
  map.num_pages = num_pages_shown;
  map.pages_per_cell = pages_per_cell;
  map.counts.assign(kNumPageCodes, 0);
  map.cells.reserve(static_cast<std::size_t>(num_pages_shown / map.pages_per_cell + 1));
  std::array<std::int64_t, kNumPageCodes> counts{};
  for (std::int64_t page = 0; page < num_pages_shown; ++page) {
    const std::uint8_t seen = code_of(pool, static_cast<PageId>(page), uses[page]);
    map.counts[seen] += 1;
    if (map.pages_per_cell == 1) {
      map.cells.push_back(seen);
      continue;
    }
    counts[seen] += 1;
    if ((page + 1) % map.pages_per_cell == 0 || page + 1 == num_pages_shown) {
      const auto most = std::max_element(counts.begin(), counts.end());
      map.cells.push_back(static_cast<std::uint8_t>(most - counts.begin()));
      counts.fill(0);
    }
  }
}

}  // namespace

std::int64_t Kind::num_pages_shown() const {
  std::int64_t shown = 0;
  for (std::int64_t page = pool.next_committed(0); page >= 0;
       page = pool.next_committed(page + 1)) {
    shown = page + 1;
  }
  return shown;
}

MemoryMap Kind::map(std::int64_t num_pages, std::int64_t pages_per_cell) const {
  std::vector<std::uint8_t> uses(static_cast<std::size_t>(num_pages));
  MemoryMap map;
  map.slots.reserve(slots_.size());
  for (const Slot& slot : slots_) {
    const std::int64_t own = slot.active() ? ledger.num_pages(slot.seq) : 0;
    map.slots.push_back({slot.seq, static_cast<std::int32_t>(slot.size()),
                         static_cast<std::int32_t>(std::min(own, slot.size()))});
    for (std::int64_t i = own; slot.active() && i < slot.size(); ++i) {
      if (slot.entries[i].page != kNoPage) uses[slot.entries[i].page] |= kSpareUse;
    }
  }
  for (SeqId id = 0; id < config.max_seqs; ++id) {
    const std::uint8_t use = ledger.view(seqs_[id]) == View::kVirtual ? kVirtualUse : kPagedUse;
    for (const BlockId block : held_[id].blocks) {
      if (block != kNoBlock) uses[pool.page_of(block)] |= use;
    }
  }
  draw_cells(map, pool, uses, pages_per_cell);
  return map;
}

}  // namespace vmserve
