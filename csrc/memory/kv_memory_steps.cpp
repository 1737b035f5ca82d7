// The steps that the mutations of KVMemory are made of, and what takes them back.
#include <algorithm>

#include "vmserve/errors.h"
#include "vmserve/kv_memory.h"
#include "vmserve/text.h"

namespace vmserve {
namespace {

// Appends a run, or lengthens the last one where both frames and addresses go on.
void append(std::vector<MapRun>& runs, const MapRun& next, std::size_t page_bytes) {
  if (!runs.empty()) {
    MapRun& last = runs.back();
    const auto bytes = static_cast<std::size_t>(last.frames.count) * page_bytes;
    if (last.addr + bytes == next.addr && last.access == next.access &&
        last.prefault == next.prefault &&
        last.frames.first + last.frames.count == next.frames.first) {
      last.frames.count += next.frames.count;
      return;
    }
  }
  runs.push_back(next);
}

void append(std::vector<AddressRun>& runs, const AddressRun& next) {
  if (!runs.empty() && runs.back().addr + runs.back().bytes == next.addr) {
    runs.back().bytes += next.bytes;
  } else {
    runs.push_back(next);
  }
}

}  // namespace

std::vector<AddressRun> KVMemory::slot_ranges(SlotId slot, std::int64_t num_pages) const {
  std::vector<AddressRun> ranges;
  if (num_pages == 0) return ranges;
  const std::size_t bytes = static_cast<std::size_t>(num_pages) * space_->page_bytes();
  for (std::int32_t group = 0; group < config_.num_groups; ++group) {
    ranges.push_back({space_->slot(group, slot), bytes});
    if (space_->has_shadow()) ranges.push_back({space_->shadow(group, slot), bytes});
  }
  return ranges;
}

void KVMemory::ensure_free(Change& change, std::int64_t count) {
  const std::int64_t available = pool_.num_available();
  if (count > available) {
    const auto page_bytes = static_cast<std::uint64_t>(config_.num_groups) * space_->page_bytes();
    throw OutOfMemoryError(
        "needs " + with_commas(count) + " pages, " + with_commas(available) +
        " can be taken: raise the limit of the KV cache from " +
        human_bytes(static_cast<std::uint64_t>(pool_.limit()) * page_bytes) + " to " +
        human_bytes(static_cast<std::uint64_t>(pool_.num_taken() + count) * page_bytes) +
        " (--kv-cache-memory) or release slots");
  }
  const std::int64_t deficit = count - pool_.num_free();
  if (deficit <= 0) return;
  const std::int64_t chunk =
      std::min(std::max(deficit, config_.grow_pages), pool_.limit() - pool_.num_committed());
  try {
    commit_pages(change, chunk);
  } catch (const OutOfMemoryError&) {
    if (chunk == deficit) throw;
    commit_pages(change, deficit);
  }
}

void KVMemory::commit_pages(Change& change, std::int64_t count) {
  const std::vector<PageRun> runs = pool_.lowest_absent(count);
  std::vector<FrameRun> frames;
  std::vector<MapRun> maps;
  for (std::int32_t group = 0; group < config_.num_groups; ++group) {
    for (const PageRun& run : runs) {
      const FrameRun in_group{space_->frame(group, run.first), run.count};
      frames.push_back(in_group);
      maps.push_back({space_->arena(group, run.first), in_group, Access::kReadWrite});
    }
  }
  change.created.reserve(change.created.size() + runs.size());
  change.tx.create(frames);
  for (const PageRun& run : runs) {
    pool_.commit(run);
    change.created.push_back(run);
  }
  change.tx.map(maps);
  change.arena_map_calls += static_cast<std::int64_t>(maps.size());
}

KVMemory::Extension KVMemory::extend(Change& change, SlotId slot, std::int64_t first_index,
                                     std::int64_t count) {
  Extension extension{slot, slots_[slot].tenant, first_index, {}};
  extension.pages.reserve(static_cast<std::size_t>(count));
  // attach() runs when everything is mapped: it must not need memory.
  slots_[slot].pages.reserve(static_cast<std::size_t>(space_->shape().slot_pages));
  change.taken.reserve(change.taken.size() + static_cast<std::size_t>(count));
  PageId previous = slots_[slot].pages.empty() ? kNoPage : slots_[slot].pages.back();
  for (std::int64_t i = 0; i < count; ++i) {
    previous = pool_.take(previous);
    change.taken.push_back(previous);
    extension.pages.push_back(previous);
  }
  return extension;
}

void KVMemory::zero_pages(Change& change, const std::vector<Extension>& extensions) {
  std::vector<PageId> dirty;
  for (const Extension& extension : extensions) {
    std::copy_if(extension.pages.begin(), extension.pages.end(), std::back_inserter(dirty),
                 [&](PageId page) { return pool_.needs_zero(page, extension.tenant); });
  }
  if (dirty.empty()) return;
  std::sort(dirty.begin(), dirty.end());
  std::vector<AddressRun> runs;
  for (std::int32_t group = 0; group < config_.num_groups; ++group) {
    for (const PageId page : dirty) {
      append(runs, {space_->arena(group, page), space_->page_bytes()});
    }
  }
  space_->driver().zero(runs);
  for (const PageId page : dirty) pool_.mark_zero(page);
  change.zeroed += static_cast<std::int64_t>(dirty.size());
}

void KVMemory::map_pages(Change& change, const std::vector<Extension>& extensions, Access access) {
  std::vector<MapRun> runs;
  for (const Extension& extension : extensions) {
    const std::int64_t first = extension.first_index;
    for (std::int32_t group = 0; group < config_.num_groups; ++group) {
      // The step writes and reads the slot right away; nobody may ever look at the shadow.
      append_pages(runs, space_->slot(group, extension.slot, first), group, extension.pages, access,
                   /*prefault=*/true);
      if (!space_->has_shadow()) continue;
      append_pages(runs, space_->shadow(group, extension.slot, first), group, extension.pages,
                   Access::kRead, /*prefault=*/false);
    }
    change.pages_mapped += static_cast<std::int64_t>(extension.pages.size());
  }
  change.tx.map(runs);
  change.map_calls += static_cast<std::int64_t>(runs.size());
}

void KVMemory::append_pages(std::vector<MapRun>& runs, Address start, std::int32_t group,
                            const std::vector<PageId>& pages, Access access, bool prefault) const {
  for (std::size_t i = 0; i < pages.size(); ++i) {
    const FrameRun frame{space_->frame(group, pages[i]), 1};
    append(runs, {start + i * space_->page_bytes(), frame, access, prefault}, space_->page_bytes());
  }
}

void KVMemory::make_readonly(Change& change, SlotId slot, std::int64_t num_pages) {
  const std::int64_t from = slots_[slot].num_readonly;
  if (num_pages <= from) return;
  std::vector<AccessRun> runs;
  for (std::int32_t group = 0; group < config_.num_groups; ++group) {
    runs.push_back({space_->slot(group, slot, from),
                    static_cast<std::size_t>(num_pages - from) * space_->page_bytes(),
                    Access::kRead});
  }
  change.tx.set_access(runs, Access::kReadWrite);
}

void KVMemory::copy_partial_page(PageId dst, PageId src, std::int64_t num_tokens) {
  pool_.mark_written(dst, pool_.last_tenant(src));  // and so it stays, whatever fails after
  std::vector<CopyRun> runs;
  for (std::int32_t group = 0; group < config_.num_groups; ++group) {
    runs.push_back({space_->arena(group, dst), space_->arena(group, src),
                    static_cast<std::size_t>(num_tokens * config_.token_bytes)});
  }
  space_->driver().copy(runs);
}

void KVMemory::attach(const Extension& extension) {
  Slot& slot = slots_[extension.slot];
  slot.pages.insert(slot.pages.end(), extension.pages.begin(), extension.pages.end());
  for (const PageId page : extension.pages) pool_.mark_written(page, extension.tenant);
}

void KVMemory::finish(const Change& change, double seconds) {
  for (const PageRun& run : change.created) totals_.committed += run.count;
  totals_.zeroed += change.zeroed;
  totals_.mapped += change.pages_mapped;
  totals_.map_calls += change.map_calls;
  totals_.arena_map_calls += change.arena_map_calls;
  totals_.map_seconds += seconds;
  ++version_;
}

void KVMemory::abandon(Change& change, const std::vector<SlotId>& slots) {
  Unfinished unfinished = change.tx.rollback();
  if (unfinished.steps.empty()) {
    for (const PageId page : change.taken) pool_.drop(page);
    for (const PageRun& run : change.created) pool_.uncommit(run);
    return;
  }
  // Nobody may get these pages while some address may still show them.
  for (const PageRun& run : change.created) {
    for (PageId page = run.first; page < run.first + run.count; ++page) {
      if (!pool_.is_free(page)) continue;
      pool_.claim(page);
      change.taken.push_back(page);
    }
  }
  for (const SlotId slot : slots) slots_[slot].in_repair = true;
  last_error_ = unfinished.error;
  repairs_.push_back(
      {std::move(unfinished.steps), std::move(change.taken), std::move(change.created), slots});
  ++version_;
}

std::int64_t KVMemory::give_back(std::int64_t count) {
  if (count <= 0) return 0;
  const std::vector<PageRun> runs = pool_.highest_free(count);
  Change change(space_->driver());
  std::vector<FrameRun> frames;
  std::vector<MapRun> maps;
  std::int64_t num_pages = 0;
  for (const PageRun& run : runs) {
    for (PageId page = run.first; page < run.first + run.count; ++page) {
      change.taken.push_back(page);
      pool_.claim(page);
    }
    for (std::int32_t group = 0; group < config_.num_groups; ++group) {
      const FrameRun in_group{space_->frame(group, run.first), run.count};
      frames.push_back(in_group);
      maps.push_back({space_->arena(group, run.first), in_group, Access::kReadWrite});
    }
    num_pages += run.count;
  }
  try {
    change.tx.unmap(maps);
    change.tx.destroy(frames);
  } catch (...) {
    abandon(change, {});
    throw;
  }
  for (const PageId page : change.taken) pool_.drop(page);
  for (const PageRun& run : runs) pool_.uncommit(run);
  totals_.given_back += num_pages;
  ++version_;
  return num_pages;
}

bool KVMemory::retry(Repair& repair) {
  Unfinished unfinished = run_steps(space_->driver(), repair.steps);
  repair.steps = std::move(unfinished.steps);
  if (!repair.steps.empty()) {
    last_error_ = unfinished.error;
    return false;
  }
  for (const PageId page : repair.held) pool_.drop(page);
  for (const PageRun& run : repair.created) pool_.uncommit(run);
  for (const SlotId slot : repair.slots) slots_[slot].in_repair = false;
  return true;
}

void KVMemory::retry_repairs() {
  if (repairs_.empty()) return;
  const auto repaired = std::remove_if(repairs_.begin(), repairs_.end(),
                                       [&](Repair& repair) { return retry(repair); });
  repairs_.erase(repaired, repairs_.end());
  // A slot can be part of several repairs.
  for (const Repair& repair : repairs_) {
    for (const SlotId slot : repair.slots) slots_[slot].in_repair = true;
  }
}

void KVMemory::forget_access_repairs(const std::vector<AddressRun>& ranges) {
  const auto inside = [&](const UndoStep& step) {
    const auto* run = std::get_if<AccessRun>(&step);
    return run != nullptr &&
           std::any_of(ranges.begin(), ranges.end(), [&](const AddressRun& range) {
             return run->addr >= range.addr && run->addr < range.addr + range.bytes;
           });
  };
  for (Repair& repair : repairs_) {
    repair.steps.erase(std::remove_if(repair.steps.begin(), repair.steps.end(), inside),
                       repair.steps.end());
  }
}

void KVMemory::enable_shadow() {
  const auto lock = enter();
  if (space_->has_shadow()) return;
  retry_repairs();
  space_->reserve_shadow();
  std::vector<MapRun> runs;
  for (SlotId slot = 0; slot < config_.num_slots; ++slot) {
    for (std::int32_t group = 0; group < config_.num_groups; ++group) {
      append_pages(runs, space_->shadow(group, slot), group, slots_[slot].pages, Access::kRead,
                   /*prefault=*/false);
    }
  }
  try {
    space_->driver().map(runs);
  } catch (...) {
    space_->free_shadow();
    throw;
  }
}

}  // namespace vmserve
