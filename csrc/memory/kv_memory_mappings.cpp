// The ledger of map areas. The driver counts the mappings that there are, exactly (SegmentMap);
// here is what a change may add to them, what parked slots would give back, and how it is taken.
#include <algorithm>

#include "vmserve/errors.h"
#include "vmserve/kv_memory.h"
#include "vmserve/text.h"

namespace vmserve {

// One in every group, and as many in the shadow.
std::int64_t KVMemory::mappings_per_run() const {
  return std::int64_t{config_.num_groups} * (space_->has_shadow() ? 2 : 1);
}

std::int64_t KVMemory::mapping_room() const {
  const std::int64_t room = driver_->mapping_room();
  return room == kUnlimitedMappings ? room : room - pending_mappings_;
}

// Runs that the bound pages make in a slot, at most.
std::int64_t KVMemory::num_runs(const std::vector<BoundPage>& bound) {
  std::int64_t runs = 0;
  PageId next = kNoPage;
  for (const BoundPage& page : bound) {
    const bool is_shared = page.kind == BoundPage::Kind::kShare;
    runs += page.kind == BoundPage::Kind::kHole || (is_shared && page.page == next) ? 0 : 1;
    next = is_shared ? page.page + 1 : kNoPage;
  }
  return runs;
}

bool KVMemory::can_unmap(const Slot& slot) const {
  return !slot.active() && !slot.empty() && !slot.in_repair && slot.num_pending == 0 &&
         slot.retire <= completed_;
}

// What unmapping the slot gives back, at least: its runs join the gap behind them.
std::int64_t KVMemory::parked_mappings(const Slot& slot) const {
  std::int64_t runs = 0;
  SlotEntry last{kNoPage, false};
  for (const SlotEntry& entry : slot.entries) {
    const bool joins = entry.page != kNoPage && last.page != kNoPage &&
                       entry.page == last.page + 1 && entry.read_only == last.read_only;
    runs += entry.page == kNoPage || joins ? 0 : 1;
    last = entry;
  }
  const bool has_gap_behind = slot.size() < space_->shape().slot_pages;
  return std::max<std::int64_t>(0, has_gap_behind ? runs : runs - 1) * mappings_per_run();
}

// Looks at the parked slots only where there are not as many without them.
std::int64_t KVMemory::available_mappings(std::int64_t needed) const {
  std::int64_t available = mapping_room();
  if (available >= needed) return available;
  for (const Slot& slot : slots_) {
    if (can_unmap(slot)) available += parked_mappings(slot);
  }
  return std::max<std::int64_t>(0, available);
}

// Pages shown by slots that nobody has and an epoch still reads.
std::int64_t KVMemory::num_retiring_pages() const {
  std::int64_t pages = 0;
  for (const Slot& slot : slots_) {
    pages += !slot.active() && slot.retire > completed_ ? slot.size() : 0;
  }
  return pages;
}

SlotId KVMemory::oldest_parked() const {
  SlotId oldest = kNoSlot;
  for (SlotId id = 0; id < config_.num_slots; ++id) {
    if (!can_unmap(slots_[id])) continue;
    if (oldest == kNoSlot || slots_[id].parked_at < slots_[oldest].parked_at) oldest = id;
  }
  return oldest;
}

// Parked slots are unmapped, the oldest first, until so many mappings can be made.
void KVMemory::make_mapping_room(std::int64_t needed) {
  while (mapping_room() < needed) {
    const SlotId oldest = oldest_parked();
    if (oldest == kNoSlot) {
      throw OutOfMemoryError("needs " + with_commas(needed) + " memory mappings, " +
                             with_commas(std::max<std::int64_t>(0, mapping_room())) +
                             " can be had (of vm.max_map_count)" +
                             (last_error_.empty() ? "" : ": " + last_error_));
    }
    truncate(oldest, 0);  // refused, it is in a repair and not asked again
  }
}

// Ahead of need only what leaves the reserve to those who need it now.
bool KVMemory::has_room_ahead(std::int64_t num_pages) const {
  return mapping_room() - mapping_reserve_ / 2 >= (1 + num_pages) * mappings_per_run();
}

std::uint64_t KVMemory::submit(Command command) {
  // A mapping can cut a gap in two, a change of access a run in three.
  command.num_mappings = static_cast<std::int64_t>(2 * command.map.size() + command.unmap.size() +
                                                   2 * command.access.size());
  pending_mappings_ += command.num_mappings;
  const bool maps = command.kind != Command::Kind::kSeal;
  const std::uint64_t id = mapper_->submit(std::move(command));
  if (maps) last_mapping_ = id;
  return id;
}

}  // namespace vmserve
