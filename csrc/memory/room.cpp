// Finds pages by committing, evicting and compacting, and returns pages to the system. Each step is
// a mutation of its own. It stands even if the change that needed it fails, and no sequence is
// affected.
#include "vmserve/memory/room.h"

#include <algorithm>
#include <cerrno>
#include <unordered_map>

#include "vmserve/errors.h"
#include "vmserve/text.h"

namespace vmserve {

void Room::make_mapping_room(std::int64_t needed) {
  while (work_.mapping_room() < needed) {
    const SlotId oldest = ledger_.oldest_parked();
    if (oldest == kNoSlot) {
      throw OutOfMemoryError("needs " + with_commas(needed) + " memory mappings, " +
                             with_commas(std::max<std::int64_t>(0, work_.mapping_room())) +
                             " can be had (of vm.max_map_count)" +
                             (work_.last_error.empty() ? "" : ": " + work_.last_error));
    }
    work_.truncate(oldest, 0);  // if refused, the slot is in a repair and not tried again
  }
}

void Room::make_room(std::int64_t num_pages) {
  const std::int64_t deficit = num_pages - pool_.num_free();
  const std::int64_t growable = std::max<std::int64_t>(0, pool_.limit() - pool_.num_committed());
  if (deficit > 0 && growable > 0) {
    try {
      commit_pages(std::min(deficit, growable));
    } catch (const OutOfMemoryError&) {
      // The system has less than the limit promises; idle pages may be enough.
      if (pool_.num_free() + pool_.count(PageState::kIdle) < num_pages) throw;
    }
  }
  PageId page = pool_.oldest_idle();
  while (pool_.num_free() < num_pages && page != kNoPage) {
    const PageId next = pool_.next_idle(page);
    // Evicting the tail of a parked slot may have evicted the next page, too.
    if (!evict(page, num_pages - pool_.num_free()) || pool_.state(page) == PageState::kIdle) {
      page = next != kNoPage && pool_.state(next) == PageState::kIdle ? next : kNoPage;
      continue;
    }
    page = pool_.oldest_idle();
  }
  if (pool_.num_free() >= num_pages) return;
  throw OutOfMemoryError("needs " + with_commas(num_pages) + " pages, " +
                         with_commas(pool_.num_free()) + " can be had" +
                         (work_.last_error.empty() ? "" : " (" + work_.last_error + ")"));
}

void Room::commit_pages(std::int64_t count) {
  const std::int64_t growable = pool_.limit() - pool_.num_committed();
  const std::int64_t chunk = std::min(growable, std::max(count, config_.grow_pages));
  try {
    create_pages(chunk);
  } catch (const OutOfMemoryError&) {
    if (chunk == count) throw;
    create_pages(count);
  }
}

void Room::create_pages(std::int64_t count) {
  const std::vector<PageRun> runs = pool_.lowest_absent(count);
  std::vector<FrameRun> frames;
  std::vector<MapRun> maps;
  for (std::int32_t group = 0; group < config_.num_groups; ++group) {
    for (const PageRun& run : runs) {
      const FrameRun in_group{work_.space->frame(group, run.first), run.count};
      frames.push_back(in_group);
      maps.push_back({work_.space->arena(group, run.first), in_group, Access::kReadWrite});
    }
  }
  Transaction tx(*work_.driver);
  Unfinished unfinished;
  {
    const auto driving = work_.lock();
    try {
      tx.create(frames);
      tx.map(maps);
    } catch (const Error& error) {
      unfinished = tx.rollback();
      if (!unfinished.steps.empty()) {
        Repair repair;
        repair.steps = std::move(unfinished.steps);
        repair.created = runs;
        for (const PageRun& run : runs) pool_.commit_held(run);
        work_.add_repair(std::move(repair), unfinished.error);
      }
      throw;
    }
  }
  for (const PageRun& run : runs) {
    pool_.commit_held(run);
    for (PageId page = run.first; page < run.first + run.count; ++page) pool_.unhold(page);
    ledger_.totals.pages_committed += run.count;
  }
  ledger_.totals.arena_map_calls += static_cast<std::int64_t>(maps.size());
  ledger_.totals.unhidden_calls += static_cast<std::int64_t>(maps.size());
}

// Makes the idle page free. If it is the tail of a parked slot, up to `wanted` pages before it that
// would be evicted next are freed with it. False if the driver refused.
bool Room::evict(PageId page, std::int64_t wanted) {
  ledger_.totals.evicted_blocks += pool_.drop_cached(page);
  const std::int32_t index = pool_.index(page);
  for (SlotId id = 0; id < config_.num_slots && pool_.maps(page) > 0; ++id) {
    Slot& slot = slots_[id];
    if (index >= slot.size() || slot.entries[index].page != page) continue;
    if (slot.in_repair || slot.num_pending > 0) return false;
    const bool is_past = slot.active() && index < ledger_.num_pages(slot.seq);
    // A running epoch may still read the slot's other pages.
    const bool is_read = !slot.active() && slot.retire > books_.completed;
    if (is_past || is_read) {
      if (!work_.punch(id, index)) return false;
      continue;
    }
    // Unmap the run of this slot's next pages to evict in one call.
    std::int64_t first = index;
    const bool is_tail = index + 1 == slot.size() && !slot.active();
    PageId last = page;
    while (is_tail && first > 0 && index - first + 1 < wanted) {
      const PageId next = slot.entries[first - 1].page;
      if (next == kNoPage || pool_.next_idle(last) != next || pool_.maps(next) != 1) break;
      ledger_.totals.evicted_blocks += pool_.cached(next);
      last = next;
      --first;
    }
    for (std::int64_t i = first; i < index; ++i) pool_.drop_cached(slot.entries[i].page);
    if (!work_.truncate(id, first)) return false;
  }
  return true;
}

bool Room::evict_oldest() {
  const std::int64_t before = pool_.num_free();
  PageId page = pool_.oldest_idle();
  while (page != kNoPage && pool_.num_free() == before) {
    const PageId next = pool_.next_idle(page);
    evict(page, 1);
    page = next != kNoPage && pool_.state(next) == PageState::kIdle ? next : kNoPage;
  }
  return pool_.num_free() > before;
}

// Returning pages inside the pool splits its arena mapping. If the system has no mapping left for
// that, these pages and those below them stay.
std::int64_t Room::give_back(std::int64_t count) {
  std::int64_t num_pages = 0;
  if (count <= 0) return num_pages;
  try {
    const auto driving = work_.lock();
    work_.driver->fence();  // copies in flight may still use these pages
  } catch (const Error& error) {
    work_.fail_if_sticky(error);
    throw;
  }
  for (const PageRun& run : pool_.highest_free(count)) {
    try {
      give_back(run);
    } catch (const DriverError& error) {
      if (error.code != ENOMEM || error.sticky) throw;
      work_.last_error = error.what();
      break;
    }
    num_pages += run.count;
  }
  return num_pages;
}

void Room::give_back(const PageRun& run) {
  std::vector<FrameRun> frames;
  std::vector<MapRun> maps;
  for (std::int32_t group = 0; group < config_.num_groups; ++group) {
    const FrameRun in_group{work_.space->frame(group, run.first), run.count};
    frames.push_back(in_group);
    maps.push_back({work_.space->arena(group, run.first), in_group, Access::kReadWrite});
  }
  Transaction tx(*work_.driver);
  {
    const auto driving = work_.lock();
    try {
      tx.unmap(maps);
      tx.destroy(frames);
    } catch (const Error& error) {
      Unfinished unfinished = tx.rollback();
      work_.fail_if_sticky(error);
      // Frames created again by the rollback are empty.
      if (!unfinished.steps.empty()) {
        Repair repair;
        repair.steps = std::move(unfinished.steps);
        for (PageId page = run.first; page < run.first + run.count; ++page) {
          pool_.hold(page);
          repair.held.push_back(page);
        }
        work_.add_repair(std::move(repair), unfinished.error);
      }
      throw;
    }
  }
  pool_.uncommit(run);
  ledger_.totals.pages_given_back += run.count;
  ++books_.version;
}

void Room::compact_all(Change* trial) {
  for (auto& [tenant, pages] : ledger_.compactable_pages()) {
    for (const PageId page : pages) release_gaps(page);
    compact(pages, trial);
  }
}

// Makes every unreferenced block of the page available to its tenant.
void Room::release_gaps(PageId page) {
  if (pool_.owner(page) != kNoSeq) pool_.set_owner(page, kNoSeq);
  ledger_.totals.evicted_blocks += pool_.drop_cached(page);
}

std::int64_t Room::compact(std::vector<PageId> pages, Change* trial) {
  std::int64_t used = 0;
  for (const PageId page : pages) used += pool_.used(page);
  const std::int64_t capacity = config_.blocks_per_page;
  if (static_cast<std::int64_t>(pages.size()) == (used + capacity - 1) / capacity) return 0;
  for (const PageId page : pages) release_gaps(page);
  std::stable_sort(pages.begin(), pages.end(),
                   [&](PageId a, PageId b) { return pool_.used(a) > pool_.used(b); });
  // Move blocks from the emptiest pages into gaps of the fullest until the two meet.
  std::vector<std::pair<BlockId, BlockId>> moves;
  std::int64_t emptied = 0;
  std::size_t to = 0;
  std::size_t from = pages.size();
  const std::int32_t width = config_.blocks_per_page;
  std::int32_t gap = 0;
  const auto next_gap = [&](std::size_t stop) {
    for (; to < stop; ++to, gap = 0) {
      for (; gap < width; ++gap) {
        const BlockId block = pool_.first_block(pages[to]) + gap;
        if (pool_.refs(block) == 0) return block;
      }
    }
    return kNoBlock;
  };
  std::int64_t gaps = 0;
  for (const PageId page : pages) gaps += width - pool_.used(page);
  while (from > 0) {
    const PageId source = pages[from - 1];
    gaps -= width - pool_.used(source);  // its own gaps receive nothing
    if (gaps < pool_.used(source)) break;
    for (std::int32_t j = 0; j < width; ++j) {
      const BlockId block = pool_.first_block(source) + j;
      if (pool_.refs(block) == 0) continue;
      moves.emplace_back(block, next_gap(from - 1));
      ++gap;
    }
    gaps -= pool_.used(source);
    --from;
    ++emptied;
  }
  if (moves.empty()) return 0;
  if (trial == nullptr) copy_blocks(moves);
  move_blocks(moves, trial);
  ++ledger_.totals.compactions;
  ledger_.totals.compacted_blocks += static_cast<std::int64_t>(moves.size());
  return emptied;
}

void Room::copy_blocks(const std::vector<std::pair<BlockId, BlockId>>& moves) {
  const auto bytes = static_cast<std::size_t>(config_.block_bytes());
  std::vector<CopyRun> copies;
  for (std::int32_t group = 0; group < config_.num_groups; ++group) {
    for (const auto& [from, to] : moves) {
      copies.push_back({work_.space->arena(group) + static_cast<std::size_t>(to) * bytes,
                        work_.space->arena(group) + static_cast<std::size_t>(from) * bytes, bytes});
    }
  }
  const auto driving = work_.lock();
  work_.driver->copy(copies);
  work_.driver->fence();
}

void Room::move_blocks(const std::vector<std::pair<BlockId, BlockId>>& moves, Change* trial) {
  const std::unordered_map<BlockId, BlockId> places(moves.begin(), moves.end());
  for (SeqId id = 0; id < config_.max_seqs; ++id) {
    bool is_touched = false;
    for (BlockId& block : held_[id].blocks) {
      const auto place = places.find(block);
      if (place == places.end()) continue;
      if (!is_touched && trial != nullptr) trial->save(id);
      pool_.add_ref(place->second);
      pool_.drop_ref(block, books_.begun);
      block = place->second;
      is_touched = true;
    }
    if (is_touched && trial == nullptr) ledger_.write_table(id, 0);
  }
  for (const auto& [from, to] : moves) {
    if (pool_.is_published(from)) pool_.move_published(from, to);
  }
  ++books_.version;
}

}  // namespace vmserve
