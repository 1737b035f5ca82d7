// Driver calls for changes and slots, and the repair of calls that could not be undone. All driver
// calls are made by this class, by parts that hold its lock, or by the mapper.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "vmserve/address_space.h"
#include "vmserve/driver.h"
#include "vmserve/errors.h"
#include "vmserve/mapper.h"
#include "vmserve/memory/journal.h"
#include "vmserve/swap_space.h"

namespace vmserve {

// Driver calls that could not be undone. Until they succeed, their pages are held and their slots
// are unusable. Every later mutation retries them first.
struct Repair {
  std::vector<UndoStep> steps;
  std::vector<PageId> held;
  std::vector<PageRun> created;  // pages to uncommit afterwards; held too
  std::vector<SlotId> slots;
};

// Blocks that are being copied to host memory while kernels run.
struct InFlightCopies {
  Mark mark;
  std::vector<BlockId> blocks;
};

class DriverWork : LedgerClient {
 public:
  DriverWork(std::shared_ptr<PageDriver> page_driver, Ledger& ledger);

  // Protects direct driver calls against the mapper's.
  std::unique_lock<DriverTurn> lock() { return mapper->lock_driver(); }
  void require_alive() const;  // throws after a sticky driver error
  void fail_if_sticky(const Error& error);
  void require_not_in_repair(SlotId slot) const;  // throws while a repair includes the slot
  // Prepares the driver for the change: waits for mapper commands on its slots, unmaps removed
  // entries and allocates swap memory. Throws if the driver refuses.
  void prepare(Change& change);
  // Unmaps the change's removed entries. Post: change.removed is empty. False if the driver
  // refused; then a repair exists.
  bool unmap_removed(Change& change);
  // Makes the driver calls of a staged change. Pre: its memory is assigned.
  void execute(Change& change);
  std::int64_t mappings_per_run() const;
  // Mappings still possible, less those that queued mapper commands may take.
  std::int64_t mapping_room() const;
  // mapping_room() plus, if that is less than `needed`, what unmapping parked slots frees.
  std::int64_t available_mappings(std::int64_t needed) const;
  // Whether mapping `num_pages` before they are needed leaves the reserve for urgent mappings.
  bool may_map_ahead(std::int64_t num_pages) const;
  std::uint64_t submit(Command command);
  // Unmaps the slot's entries from `index` on, or only entry `index` (punch). Post: the ledger does
  // not have them. False if the driver refused; then a repair exists.
  bool truncate(SlotId slot, std::int64_t index);
  bool punch(SlotId slot, std::int64_t index);
  // Removes entries from the ledger and returns what is to be unmapped. No driver call.
  RemovedEntries remove_entries(SlotId slot, std::int64_t first, std::int64_t count);
  std::vector<AddressRun> entry_ranges(SlotId slot, std::int64_t first, std::int64_t count) const;
  void retry_repairs();
  void add_repair(Repair repair, const std::string& error);
  bool has_mapper() const { return mapper->mode() != MapperMode::kOff; }
  std::int64_t num_quarantined() const;

  std::shared_ptr<PageDriver> driver;
  std::shared_ptr<AddressSpace> space;  // null after close()
  std::unique_ptr<Mapper> mapper;
  std::unique_ptr<SwapSpace> swap;
  std::vector<Repair> repairs;
  std::string last_error;
  std::string failure;                // text of the sticky error; empty while healthy
  std::int64_t mapping_reserve = 0;   // with less room, parked slots are unmapped
  std::int64_t pending_mappings = 0;  // upper bound for queued mapper commands
  std::uint64_t last_mapping = 0;     // newest mapper command other than kSeal
  bool has_copy_stream;               // copies to host memory run in parallel to kernels

 private:
  std::vector<AccessRun> access_runs(const Change& change, bool writable) const;
  std::vector<CopyRun> copy_runs(const Change& change) const;
  std::vector<CopyRun> swap_runs(const std::vector<SwapCopy>& copies, bool out) const;
  void map_runs(const Change& change, std::vector<MapRun>& runs) const;
  std::int64_t parked_mappings(const Slot& slot) const;
  bool unmap(const RemovedEntries& removed);
  bool retry(Repair& repair);
};

}  // namespace vmserve
