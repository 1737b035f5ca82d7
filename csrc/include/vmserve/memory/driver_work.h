// The driver's part: what changes ask of it, what slots let go of, and what it refused to undo.
// Every call of the driver is made here, by the parts that share it, or by the mapper.
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

// Driver calls that could not be undone: the pages concerned are held, and the slots unusable,
// until the calls succeed, which every later mutation tries first.
struct Repair {
  std::vector<UndoStep> steps;
  std::vector<PageId> held;
  std::vector<PageRun> created;  // shall not exist afterwards; held too
  std::vector<SlotId> slots;
};

class DriverWork : OnLedger {
 public:
  DriverWork(std::shared_ptr<PageDriver> page_driver, Ledger& ledger);

  // Direct calls of the driver are made under this lock.
  std::unique_lock<std::mutex> lock() { return mapper->lock_driver(); }
  void require_alive() const;  // throws once the pool has failed
  void fail_if_sticky(const Error& error);
  void require_whole(SlotId slot) const;  // throws while it is in a repair
  // What the change relies on: the mapper is done with its slots, cuts are made, and there is
  // memory behind what it swaps out. Throws if the driver refuses.
  void prepare(Change& change);
  // Post: no cut is left to be made; false if the driver refused one (a repair is left).
  bool make_cuts(Change& change);
  void execute(Change& change);
  std::int64_t mappings_per_run() const;
  std::int64_t mapping_room() const;  // that no command of the mapper may take
  std::int64_t available_mappings(std::int64_t needed) const;
  bool has_room_ahead(std::int64_t num_pages) const;
  std::uint64_t submit(Command command);
  // Post: the entries are the slot's no more; false if the driver refused (a repair is left).
  bool truncate(SlotId slot, std::int64_t index);
  bool punch(SlotId slot, std::int64_t index);
  // The books' side of unmapping entries; no driver call.
  Cut forget(SlotId slot, std::int64_t first, std::int64_t count);
  std::vector<AddressRun> entry_ranges(SlotId slot, std::int64_t first, std::int64_t count) const;
  void retry_repairs();
  void add_repair(Repair repair, const std::string& error);
  bool works_ahead() const { return mapper->mode() != MapperMode::kOff; }
  std::int64_t num_quarantined() const;

  std::shared_ptr<PageDriver> driver;
  std::shared_ptr<AddressSpace> space;  // null once closed
  std::unique_ptr<Mapper> mapper;
  std::unique_ptr<SwapSpace> swap;
  std::vector<Repair> repairs;
  std::string last_error;
  std::string failure;                // why the pool has failed; empty if it has not
  std::int64_t mapping_reserve = 0;   // parked slots are unmapped while there is less room
  std::int64_t pending_mappings = 0;  // that the mapper's commands may make, at most
  std::uint64_t last_mapping = 0;     // the mapper's newest command that is more than sealing
  bool copies_beside;                 // the driver's copy stream

 private:
  std::vector<AccessRun> access_runs(const Change& change, bool writable) const;
  std::vector<CopyRun> copy_runs(const Change& change) const;
  std::vector<CopyRun> swap_runs(const std::vector<SwapCopy>& copies, bool out) const;
  void map_runs(const Change& change, std::vector<MapRun>& runs) const;
  std::int64_t parked_mappings(const Slot& slot) const;
  bool unmap(const Cut& cut);
  bool retry(Repair& repair);
};

}  // namespace vmserve
