// Finding pages: commit more, evict what is idle, pack what is split; and giving them back. Each is
// a mutation of its own that stands even if what it was done for fails: no sequence notices.
#include "vmserve/memory/room.h"

#include <algorithm>
#include <cerrno>
#include <unordered_map>

#include "vmserve/errors.h"
#include "vmserve/text.h"

namespace vmserve {

// Parked slots are unmapped, the oldest first, until so many mappings can be made.
void Room::make_mapping_room(std::int64_t needed) {
  while (work_.mapping_room() < needed) {
    const SlotId oldest = ledger_.oldest_parked();
    if (oldest == kNoSlot) {
      throw OutOfMemoryError("needs " + with_commas(needed) + " memory mappings, " +
                             with_commas(std::max<std::int64_t>(0, work_.mapping_room())) +
                             " can be had (of vm.max_map_count)" +
                             (work_.last_error.empty() ? "" : ": " + work_.last_error));
    }
    work_.truncate(oldest, 0);  // refused, it is in a repair and not asked again
  }
}

void Room::make_room(std::int64_t num_pages) {
  const std::int64_t deficit = num_pages - pool_.num_free();
  const std::int64_t growable = std::max<std::int64_t>(0, pool_.limit() - pool_.num_committed());
  if (deficit > 0 && growable > 0) {
    try {
      commit_pages(std::min(deficit, growable));
    } catch (const OutOfMemoryError&) {
      // The system has less than the limit promises; what is idle may still do.
      if (pool_.num_free() + pool_.count(PageState::kIdle) < num_pages) throw;
    }
  }
  PageId page = pool_.oldest_idle();
  while (pool_.num_free() < num_pages && page != kNoPage) {
    const PageId next = pool_.next_idle(page);
    // Evicting the tail of a parked slot may have taken the next one along.
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

// `count` pages more, or as many more as come in one chunk.
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

// The idle page becomes free; with it up to `wanted` pages that a parked slot shows before it and
// that would be next. False if the driver refused.
bool Room::evict(PageId page, std::int64_t wanted) {
  ledger_.totals.evicted_blocks += pool_.drop_cached(page);
  const std::int32_t index = pool_.index(page);
  for (SlotId id = 0; id < config_.num_slots && pool_.maps(page) > 0; ++id) {
    Slot& slot = slots_[id];
    if (index >= slot.size() || slot.entries[index].page != page) continue;
    if (slot.in_repair || slot.num_pending > 0) return false;
    const bool is_past = slot.active() && index < ledger_.num_pages(seqs_[slot.seq]);
    // An epoch that runs may still read the other pages of a slot that was parked in it.
    const bool is_read = !slot.active() && slot.retire > ledger_.completed;
    if (is_past || is_read) {
      if (!work_.punch(id, index)) return false;
      continue;
    }
    // One call for the run of this slot's pages that would be evicted next anyway.
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

// Idle pages are evicted, oldest first, until free and idle ones are no more than `keep`.
std::int64_t Room::evict_idle(std::int64_t keep) {
  const std::int64_t at_hand = pool_.num_free() + pool_.count(PageState::kIdle);
  std::int64_t wanted = std::min(at_hand - keep, pool_.count(PageState::kIdle));
  std::int64_t dropped = 0;
  PageId page = pool_.oldest_idle();
  while (dropped < wanted && page != kNoPage) {
    const PageId next = pool_.next_idle(page);
    const std::int64_t before = pool_.count(PageState::kIdle);
    const bool done = evict(page, 1);
    dropped += before - pool_.count(PageState::kIdle);
    page = done ? pool_.oldest_idle() : next;
  }
  return dropped;
}

// Pages from the inside of the pool cut its arena in two: where the system has no mappings for that
// they stay, and so does what lies below them.
std::int64_t Room::give_back(std::int64_t count) {
  std::int64_t num_pages = 0;
  if (count <= 0) return num_pages;
  try {
    const auto driving = work_.lock();
    work_.driver->fence();  // copies may still read or write what is about to go
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
      // Frames that were made again are empty.
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
  ++ledger_.version;
}

// What is free or idle above a lowered limit.
void Room::give_back_excess() {
  const std::int64_t excess = pool_.num_committed() - pool_.limit();
  if (excess <= 0) return;
  if (excess > pool_.num_free()) {
    evict_idle(
        std::max<std::int64_t>(0, pool_.num_free() + pool_.count(PageState::kIdle) - excess));
  }
  give_back(std::min(pool_.num_free(), excess));
}

// The same where pages may have become free or idle. Nobody asked for it: what the driver refuses
// stays until the next time. NOTE: plans that were made before are stale afterwards.
void Room::try_give_back_excess() {
  if (!work_.failure.empty()) return;
  try {
    give_back_excess();
  } catch (const Error& error) {
    work_.last_error = error.what();
  }
}

void Room::compact_all(Change* trial) {
  for (auto& [tenant, pages] : ledger_.compactable_pages()) {
    for (const PageId page : pages) release_gaps(page);
    compact(pages, trial);
  }
}

// Every block of the page that has no references can be handed out to its tenant.
void Room::release_gaps(PageId page) {
  if (pool_.owner(page) != kNoSeq) pool_.set_owner(page, kNoSeq);
  ledger_.totals.evicted_blocks += pool_.drop_cached(page);
}

// Moves blocks until as few of the (loose) pages as possible hold them; how many it emptied.
std::int64_t Room::compact(std::vector<PageId> pages, Change* trial) {
  std::int64_t used = 0;
  for (const PageId page : pages) used += pool_.used(page);
  const std::int64_t capacity = config_.blocks_per_page;
  if (static_cast<std::int64_t>(pages.size()) == (used + capacity - 1) / capacity) return 0;
  for (const PageId page : pages) release_gaps(page);
  std::stable_sort(pages.begin(), pages.end(),
                   [&](PageId a, PageId b) { return pool_.used(a) > pool_.used(b); });
  // From the emptiest page's blocks to the fullest page's gaps, until the two meet.
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
    gaps -= width - pool_.used(source);  // its own gaps take nothing
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
  const auto bytes = static_cast<std::size_t>(config_.block_tokens * config_.token_bytes);
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
    Sequence& seq = seqs_[id];
    if (!seq.open) continue;
    bool is_touched = false;
    for (BlockId& block : seq.kv.blocks) {
      const auto place = places.find(block);
      if (place == places.end()) continue;
      if (!is_touched && trial != nullptr) trial->save(id);
      pool_.add_ref(place->second);
      pool_.drop_ref(block, ledger_.begun);
      block = place->second;
      is_touched = true;
    }
    if (is_touched && trial == nullptr) ledger_.write_table(id, 0);
  }
  for (const auto& [from, to] : moves) {
    if (pool_.is_published(from)) pool_.move_published(from, to);
  }
  ++ledger_.version;
}

}  // namespace vmserve
