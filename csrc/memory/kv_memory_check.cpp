// The laws of KVMemory, executed, and its statistics.
#include <algorithm>
#include <string>

#include "vmserve/errors.h"
#include "vmserve/kv_memory.h"

namespace vmserve {
namespace {

void law(bool holds, const std::string& broken) {
  if (!holds) throw InvariantError(broken);
}

std::string page_text(PageId page) {
  return "page " + std::to_string(page);
}

}  // namespace

std::vector<PageId> KVMemory::held_pages() const {
  std::vector<PageId> held;
  for (const Repair& repair : repairs_) {
    held.insert(held.end(), repair.held.begin(), repair.held.end());
  }
  std::sort(held.begin(), held.end());
  return held;
}

std::int64_t KVMemory::num_quarantined() const {
  const std::vector<PageId> held = held_pages();
  std::int64_t quarantined = 0;
  for (auto it = held.begin(); it != held.end();) {
    const auto next = std::upper_bound(it, held.end(), *it);
    quarantined += pool_.refs(*it) == next - it ? 1 : 0;
    it = next;
  }
  return quarantined;
}

MemoryStats KVMemory::stats() const {
  const auto lock = enter();
  const DriverStats driver = space_->driver().stats();
  MemoryStats stats{};
  stats.page_bytes = config_.num_groups * static_cast<std::int64_t>(space_->page_bytes());
  stats.page_tokens = config_.page_tokens;
  stats.limit_pages = pool_.limit();
  stats.committed_pages = pool_.num_committed();
  stats.free_pages = pool_.num_free();
  stats.quarantined_pages = num_quarantined();
  stats.used_pages = pool_.num_taken() - stats.quarantined_pages;
  stats.shared_pages = pool_.num_shared();
  stats.num_slots = config_.num_slots;
  for (const Slot& slot : slots_) {
    if (!slot.used) continue;
    ++stats.used_slots;
    stats.used_tokens += slot.length;
    const auto room = static_cast<std::int64_t>(slot.pages.size()) * config_.page_tokens;
    stats.tail_waste_bytes += (room - slot.length) * config_.token_bytes * config_.num_groups;
  }
  stats.pages_mapped_total = totals_.mapped;
  stats.pages_unmapped_total = totals_.unmapped;
  stats.pages_committed_total = totals_.committed;
  stats.pages_given_back_total = totals_.given_back;
  stats.pages_zeroed_total = totals_.zeroed;
  stats.map_calls_total = totals_.map_calls;
  stats.unmap_calls_total = totals_.unmap_calls;
  stats.arena_map_calls_total = totals_.arena_map_calls;
  stats.map_seconds_total = totals_.map_seconds;
  stats.memfd_allocated_bytes = driver.allocated_bytes;
  stats.num_mappings = driver.num_mappings;
  stats.pending_repairs = static_cast<std::int64_t>(repairs_.size());
  return stats;
}

void KVMemory::check() const {
  const auto lock = enter();
  pool_.check();
  check_slots();
  check_references();
  check_mappings();
}

void KVMemory::check_slots() const {
  for (SlotId id = 0; id < config_.num_slots; ++id) {
    const Slot& slot = slots_[id];
    const std::string name = "slot " + std::to_string(id);
    const auto num_pages = static_cast<std::int64_t>(slot.pages.size());
    law(slot.used || (num_pages == 0 && slot.length == 0), name + " is unused but not empty");
    law(num_pages <= space_->shape().slot_pages, name + " lists more pages than it has room for");
    law(slot.length <= num_pages * config_.page_tokens, name + " is longer than its pages");
    law(slot.num_readonly * config_.page_tokens <= slot.length,
        name + " shares pages beyond its length");
    std::vector<PageId> pages = slot.pages;
    std::sort(pages.begin(), pages.end());
    law(std::adjacent_find(pages.begin(), pages.end()) == pages.end(),
        name + " lists a page twice");
  }
}

void KVMemory::check_references() const {
  std::vector<PageId> references = held_pages();
  for (const Slot& slot : slots_) {
    references.insert(references.end(), slot.pages.begin(), slot.pages.end());
    for (std::size_t i = 0; i < slot.pages.size(); ++i) {
      law(pool_.refs(slot.pages[i]) < 2 || static_cast<std::int64_t>(i) < slot.num_readonly ||
              slot.in_repair,
          page_text(slot.pages[i]) + " is shared but writable in a slot");
    }
  }
  std::sort(references.begin(), references.end());
  std::int64_t distinct = 0;
  for (auto it = references.begin(); it != references.end();) {
    const auto next = std::upper_bound(it, references.end(), *it);
    law(pool_.is_committed(*it), page_text(*it) + " is referenced but not committed");
    law(pool_.refs(*it) == next - it, page_text(*it) + " has " + std::to_string(pool_.refs(*it)) +
                                          " references recorded and " + std::to_string(next - it) +
                                          " counted");
    ++distinct;
    it = next;
  }
  law(distinct == pool_.num_taken(), std::to_string(pool_.num_taken()) + " pages are taken, " +
                                         std::to_string(distinct) + " are referenced");
}

void KVMemory::check_mappings() const {
  const PageDriver& driver = space_->driver();
  const std::vector<PageId> held = held_pages();
  const auto expect = [&](Address addr, std::int32_t group, PageId page, Access access,
                          const char* where) {
    if (std::binary_search(held.begin(), held.end(), page)) return;
    const Mapping found = driver.query(addr);
    law(found.frame == space_->frame(group, page) && found.access == access,
        page_text(page) + " of group " + std::to_string(group) + " is not mapped as recorded in " +
            where);
  };
  std::int64_t num_mapped = 0;
  for (std::int32_t group = 0; group < config_.num_groups; ++group) {
    for (std::int64_t id = pool_.next_committed(0); id >= 0; id = pool_.next_committed(id + 1)) {
      const auto page = static_cast<PageId>(id);
      expect(space_->arena(group, page), group, page, Access::kReadWrite, "the arena");
      ++num_mapped;
    }
    for (SlotId id = 0; id < config_.num_slots; ++id) {
      const Slot& slot = slots_[id];
      for (std::int64_t i = 0; i < static_cast<std::int64_t>(slot.pages.size()); ++i) {
        const Access access = i < slot.num_readonly ? Access::kRead : Access::kReadWrite;
        if (!slot.in_repair) {
          expect(space_->slot(group, id, i), group, slot.pages[i], access, "its slot");
        }
        ++num_mapped;
        if (!space_->has_shadow()) continue;
        expect(space_->shadow(group, id, i), group, slot.pages[i], Access::kRead, "the shadow");
        ++num_mapped;
      }
    }
  }
  law(!repairs_.empty() || driver.stats().mapped_frames == num_mapped,
      std::to_string(driver.stats().mapped_frames) + " frames are mapped, " +
          std::to_string(num_mapped) + " are recorded");
}

}  // namespace vmserve
