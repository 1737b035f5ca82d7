#include "vmserve/memory/driver_work.h"

#include <algorithm>
#include <cerrno>
#include <utility>

namespace vmserve {
namespace {

// 1/8 of all possible mappings is reserved for urgent ones.
constexpr std::int64_t kReserveShare = 8;

// Appends a run, merged with the last one if adjacent.
void append(std::vector<MapRun>& runs, const MapRun& run, std::size_t frame_bytes) {
  if (!runs.empty()) {
    MapRun& last = runs.back();
    const Address end = last.addr + static_cast<std::size_t>(last.frames.count) * frame_bytes;
    if (run.addr == end && run.frames.first == last.frames.first + last.frames.count &&
        run.access == last.access && run.prefault == last.prefault) {
      last.frames.count += run.frames.count;
      return;
    }
  }
  runs.push_back(run);
}

void append(std::vector<AccessRun>& runs, const AccessRun& run) {
  if (!runs.empty() && run.addr == runs.back().addr + runs.back().bytes) {
    runs.back().bytes += run.bytes;
    return;
  }
  runs.push_back(run);
}

void append(std::vector<CopyRun>& runs, const CopyRun& run) {
  if (!runs.empty()) {
    CopyRun& last = runs.back();
    if (run.dst == last.dst + last.bytes && run.src == last.src + last.bytes) {
      last.bytes += run.bytes;
      return;
    }
  }
  runs.push_back(run);
}

void append(std::vector<AddressRun>& runs, const AddressRun& run) {
  if (!runs.empty() && run.addr == runs.back().addr + runs.back().bytes) {
    runs.back().bytes += run.bytes;
    return;
  }
  runs.push_back(run);
}

}  // namespace

DriverWork::DriverWork(std::shared_ptr<PageDriver> page_driver, Ledger& ledger)
    : LedgerClient(ledger),
      driver(std::move(page_driver)),
      has_copy_stream(driver->capabilities().copy_stream) {
  space = std::make_shared<AddressSpace>(
      driver, AddressSpace::Shape{config_.num_groups, config_.num_slots, ledger.pages_per_slot,
                                  config_.max_pages});
  swap = std::make_unique<SwapSpace>(driver, config_.num_groups,
                                     static_cast<std::size_t>(config_.block_bytes()),
                                     config_.swap_blocks);
  mapper = std::make_unique<Mapper>(driver, config_.mapper);
  const std::int64_t most = driver->stats().max_mappings;
  if (driver->mapping_room() != kUnlimitedMappings) mapping_reserve = most / kReserveShare;
}

void DriverWork::require_alive() const {
  if (failure.empty()) return;
  throw DriverError("kv memory", EIO, "the KV memory has failed and serves no more: " + failure, 0,
                    /*sticky=*/true);
}

void DriverWork::fail_if_sticky(const Error& error) {
  const auto* refusal = dynamic_cast<const DriverError*>(&error);
  if (refusal != nullptr && refusal->sticky && failure.empty()) failure = error.what();
}

void DriverWork::require_not_in_repair(SlotId slot) const {
  if (!slots_[slot].in_repair) return;
  throw DriverError(
      "repair", EBUSY,
      "slot " + std::to_string(slot) + " has mappings that could not be undone: " + last_error);
}

void DriverWork::map_runs(const Change& change, std::vector<MapRun>& runs) const {
  const std::size_t page_bytes = space->page_bytes();
  for (std::int32_t group = 0; group < config_.num_groups; ++group) {
    for (const SlotMap& map : change.maps) {
      const PageId page = slots_[map.slot].entries[map.index].page;
      append(runs,
             {space->slot(group, map.slot, map.index),
              {space->frame(group, page), 1},
              map.read_only ? Access::kRead : Access::kReadWrite,
              !map.read_only},
             page_bytes);
    }
  }
  for (std::int32_t group = 0; space->has_shadow() && group < config_.num_groups; ++group) {
    for (const SlotMap& map : change.maps) {
      const PageId page = slots_[map.slot].entries[map.index].page;
      append(runs,
             {space->shadow(group, map.slot, map.index),
              {space->frame(group, page), 1},
              Access::kRead,
              false},
             page_bytes);
    }
  }
}

std::vector<CopyRun> DriverWork::copy_runs(const Change& change) const {
  const auto block_bytes = static_cast<std::size_t>(config_.block_bytes());
  std::vector<CopyRun> runs;
  for (std::int32_t group = 0; group < config_.num_groups; ++group) {
    for (const BlockCopy& copy : change.copies) {
      const BlockId block = held_[copy.seq].blocks[copy.index];
      append(runs, {space->arena(group) + static_cast<std::size_t>(block) * block_bytes,
                    space->arena(group) + static_cast<std::size_t>(copy.source) * block_bytes,
                    static_cast<std::size_t>(config_.bytes_of(copy.num_tokens))});
    }
  }
  return runs;
}

std::vector<CopyRun> DriverWork::swap_runs(const std::vector<SwapCopy>& copies, bool out) const {
  const auto block_bytes = static_cast<std::size_t>(config_.block_bytes());
  std::vector<CopyRun> runs;
  for (std::int32_t group = 0; group < config_.num_groups; ++group) {
    for (const SwapCopy& copy : copies) {
      const Address block =
          space->arena(group) + static_cast<std::size_t>(copy.block) * block_bytes;
      const Address host = swap->address(group, copy.swap);
      append(runs, out ? CopyRun{host, block, block_bytes} : CopyRun{block, host, block_bytes});
    }
  }
  return runs;
}

std::vector<AccessRun> DriverWork::access_runs(const Change& change, bool writable) const {
  std::vector<AccessRun> runs;
  const Access access = writable ? Access::kReadWrite : Access::kRead;
  for (const Change::SavedSlot& slot : change.slots) {
    std::vector<std::int64_t> indices = writable ? slot.made_writable : slot.made_read_only;
    // Finding memory may have evicted a page that a window had dropped.
    const auto is_gone = [&](std::int64_t index) {
      const Slot& here = slots_[slot.slot];
      return index >= here.size() || here.entries[index].page == kNoPage;
    };
    indices.erase(std::remove_if(indices.begin(), indices.end(), is_gone), indices.end());
    std::sort(indices.begin(), indices.end());
    for (std::int32_t group = 0; group < config_.num_groups; ++group) {
      for (const std::int64_t index : indices) {
        append(runs, {space->slot(group, slot.slot, index), space->page_bytes(), access});
      }
    }
  }
  return runs;
}

void DriverWork::execute(Change& change) {
  for (SwapCopy& copy : change.swap_in) copy.block = held_[copy.seq].blocks[copy.index];
  std::vector<AddressRun> zeros;
  for (std::int32_t group = 0; group < config_.num_groups; ++group) {
    for (const PageId page : change.zero_pages) {
      append(zeros, {space->arena(group, page), space->page_bytes()});
    }
    const auto bytes = static_cast<std::size_t>(config_.block_bytes());
    for (const BlockId block : change.zero_blocks) {
      append(zeros, {space->arena(group) + static_cast<std::size_t>(block) * bytes, bytes});
    }
  }
  std::vector<MapRun> maps;
  map_runs(change, maps);
  const std::vector<AccessRun> writable = access_runs(change, /*writable=*/true);
  const std::vector<AccessRun> read_only = access_runs(change, /*writable=*/false);
  const std::vector<CopyRun> out = swap_runs(change.swap_out, /*out=*/true);
  const std::vector<CopyRun> in = swap_runs(change.swap_in, /*out=*/false);
  const std::vector<CopyRun> copies = copy_runs(change);
  change.counts.map_calls = static_cast<std::int64_t>(maps.size());
  change.counts.access_calls = static_cast<std::int64_t>(writable.size() + read_only.size());
  change.counts.copied_blocks = static_cast<std::int64_t>(change.copies.size());
  if (zeros.empty() && maps.empty() && change.counts.access_calls == 0 && out.empty() &&
      in.empty() && copies.empty()) {
    return;
  }
  const auto driving = lock();
  driver->copy_out(out);  // before anything is overwritten
  // NOTE: if the driver refuses the mark, the end of the copies is unknown and the change is
  // undone. Their targets in host memory are reused safely: later copies run after these.
  if (!out.empty() && has_copy_stream) change.copy_mark = driver->copy_mark();
  driver->zero(zeros);
  driver->copy(copies);
  driver->copy_in(in);
  change.tx.map(maps);
  change.tx.set_access(writable, Access::kRead);
  change.tx.set_access(read_only, Access::kReadWrite);
  change.counts.swap_copy_runs = static_cast<std::int64_t>(out.size() + in.size());
}

std::int64_t DriverWork::mappings_per_run() const {
  return std::int64_t{config_.num_groups} * (space->has_shadow() ? 2 : 1);
}

std::int64_t DriverWork::mapping_room() const {
  const std::int64_t room = driver->mapping_room();
  return room == kUnlimitedMappings ? room : room - pending_mappings;
}

// Mappings freed by unmapping the slot, at least: its runs merge with the gap after them.
std::int64_t DriverWork::parked_mappings(const Slot& slot) const {
  std::int64_t runs = 0;
  SlotEntry last{kNoPage, false};
  for (const SlotEntry& entry : slot.entries) {
    const bool joins = entry.page != kNoPage && last.page != kNoPage &&
                       entry.page == last.page + 1 && entry.read_only == last.read_only;
    runs += entry.page == kNoPage || joins ? 0 : 1;
    last = entry;
  }
  const bool has_gap_behind = slot.size() < space->shape().slot_pages;
  return std::max<std::int64_t>(0, has_gap_behind ? runs : runs - 1) * mappings_per_run();
}

std::int64_t DriverWork::available_mappings(std::int64_t needed) const {
  std::int64_t available = mapping_room();
  if (available >= needed) return available;
  for (const Slot& slot : slots_) {
    if (ledger_.can_unmap(slot)) available += parked_mappings(slot);
  }
  return std::max<std::int64_t>(0, available);
}

bool DriverWork::may_map_ahead(std::int64_t num_pages) const {
  return mapping_room() - mapping_reserve / 2 >= (1 + num_pages) * mappings_per_run();
}

std::uint64_t DriverWork::submit(Command command) {
  // A map call can split a gap in two, an access change a run in three.
  command.num_mappings = static_cast<std::int64_t>(2 * command.map.size() + command.unmap.size() +
                                                   2 * command.access.size());
  pending_mappings += command.num_mappings;
  const bool maps = command.kind != Command::Kind::kSeal;
  const std::uint64_t id = mapper->submit(std::move(command));
  if (maps) last_mapping = id;
  return id;
}

std::vector<AddressRun> DriverWork::entry_ranges(SlotId slot, std::int64_t first,
                                                 std::int64_t count) const {
  std::vector<AddressRun> ranges;
  const std::vector<SlotEntry>& entries = slots_[slot].entries;
  for (std::int64_t i = first; i < first + count; ++i) {
    if (entries[i].page == kNoPage) continue;
    const std::int64_t start = i;
    while (i + 1 < first + count && entries[i + 1].page != kNoPage) ++i;
    const std::size_t bytes = static_cast<std::size_t>(i + 1 - start) * space->page_bytes();
    for (std::int32_t group = 0; group < config_.num_groups; ++group) {
      ranges.push_back({space->slot(group, slot, start), bytes});
      if (space->has_shadow()) ranges.push_back({space->shadow(group, slot, start), bytes});
    }
  }
  return ranges;
}

RemovedEntries DriverWork::remove_entries(SlotId id, std::int64_t first, std::int64_t count) {
  const auto begin = slots_[id].entries.begin() + first;
  RemovedEntries removed{id, {begin, begin + count}, entry_ranges(id, first, count)};
  ledger_.remove_entries(id, first, count);
  ++books_.version;
  return removed;
}

bool DriverWork::unmap(const RemovedEntries& removed) {
  if (removed.ranges.empty()) return true;
  std::vector<PageId> pages;
  for (const SlotEntry& entry : removed.entries) {
    if (entry.page != kNoPage) pages.push_back(entry.page);
  }
  Repair repair;
  std::string error_text;
  mapper->wait(slots_[removed.slot].last_command);  // it may be changing the access of these pages
  try {
    const auto driving = lock();
    driver->unmap(removed.ranges);
  } catch (const Error& error) {
    fail_if_sticky(error);
    repair.steps.assign(removed.ranges.begin() + static_cast<std::ptrdiff_t>(error.completed),
                        removed.ranges.end());
    error_text = error.what();
  }
  const auto num_calls = static_cast<std::int64_t>(removed.ranges.size() - repair.steps.size());
  ledger_.totals.pages_unmapped += static_cast<std::int64_t>(pages.size());
  ledger_.totals.unmap_calls += num_calls;
  ledger_.totals.unhidden_calls += num_calls;
  if (repair.steps.empty()) return true;
  for (const PageId page : pages) pool_.hold(page);
  repair.held = std::move(pages);
  repair.slots = {removed.slot};
  add_repair(std::move(repair), error_text);
  return false;
}

bool DriverWork::truncate(SlotId slot, std::int64_t index) {
  const std::int64_t count = slots_[slot].size() - index;
  return count <= 0 || unmap(remove_entries(slot, index, count));
}

// Leaves a hole even at the end: the sequence may have or get entries after it.
bool DriverWork::punch(SlotId slot, std::int64_t index) {
  const bool done = unmap(remove_entries(slot, index, 1));
  if (slots_[slot].size() == index) slots_[slot].entries.push_back({kNoPage, false});
  return done;
}

bool DriverWork::unmap_removed(Change& change) {
  if (change.awaited_command > 0) mapper->wait(change.awaited_command);
  bool done = true;
  for (const RemovedEntries& removed : std::exchange(change.removed, {}))
    done = unmap(removed) && done;
  return done;
}

void DriverWork::prepare(Change& change) {
  for (const SlotId slot : change.used_slots) require_not_in_repair(slot);
  if (!unmap_removed(change)) throw DriverError("unmap", EIO, last_error);
  if (change.swap_taken.empty()) return;
  const auto driving = lock();
  swap->back();
}

void DriverWork::add_repair(Repair repair, const std::string& error) {
  last_error = error;
  for (const SlotId slot : repair.slots) slots_[slot].in_repair = true;
  repairs.push_back(std::move(repair));
}

bool DriverWork::retry(Repair& repair) {
  Unfinished unfinished;
  {
    const auto driving = lock();
    unfinished = run_steps(*driver, repair.steps);
  }
  repair.steps = std::move(unfinished.steps);
  if (!repair.steps.empty()) {
    last_error = unfinished.error;
    return false;
  }
  for (const PageId page : repair.held) pool_.unhold(page);
  for (const PageRun& run : repair.created) pool_.uncommit(run);
  for (const SlotId slot : repair.slots) slots_[slot].in_repair = false;
  return true;
}

void DriverWork::retry_repairs() {
  if (repairs.empty()) return;
  const auto repaired =
      std::remove_if(repairs.begin(), repairs.end(), [&](Repair& repair) { return retry(repair); });
  repairs.erase(repaired, repairs.end());
  // A slot can be in several repairs.
  for (const Repair& repair : repairs) {
    for (const SlotId slot : repair.slots) slots_[slot].in_repair = true;
  }
}

std::int64_t DriverWork::num_quarantined() const {
  std::vector<PageId> held;
  for (const Repair& repair : repairs) {
    held.insert(held.end(), repair.held.begin(), repair.held.end());
    for (const PageRun& run : repair.created) {
      for (PageId page = run.first; page < run.first + run.count; ++page) held.push_back(page);
    }
  }
  std::sort(held.begin(), held.end());
  held.erase(std::unique(held.begin(), held.end()), held.end());
  return std::count_if(held.begin(), held.end(),
                       [&](PageId page) { return pool_.used(page) == 0; });
}

}  // namespace vmserve
