// KV memory: one pool of pages, seen through slots (one contiguous range per sequence) and
// through an arena (every page at its own place).
//
// Glossary
//   page        page_tokens tokens of every layer; one frame per layer group, mapped together
//   arena       where each committed page is mapped, at page id x page bytes, while committed
//   slot        a sequence's contiguous range: its pages are mapped there a second time, in order
//   shadow      a second, read-only view of the slots that reads as zero where nothing is mapped
//   repair      driver calls that could not be undone; the pages concerned are held (quarantined)
//               until the calls succeed, which every later mutation tries first
// Laws, executed by check()
//   * refs(page) = the slots that list it + the repairs that hold it
//   * free + used + quarantined = committed
//   * a slot lists a page at most once; unused slots list none
//   * every listed page is mapped at its slot address in every group, read-only exactly within
//     the slot's shared prefix, and every committed page writable in the arena; nothing else is
//     mapped
//   * length <= pages x page_tokens
#pragma once

#include <sys/types.h>

#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "vmserve/address_space.h"
#include "vmserve/driver.h"
#include "vmserve/page_pool.h"
#include "vmserve/transaction.h"

namespace vmserve {

using SlotId = std::int32_t;

struct MemoryConfig {
  std::int32_t num_groups = 1;
  std::int64_t page_tokens = 0;
  std::int64_t token_bytes = 0;  // from one token to the next, in one group
  std::int32_t num_slots = 0;
  std::int64_t max_len = 0;      // tokens
  std::int64_t read_slack = 0;   // tokens past the length that kernels may read
  std::int64_t limit_pages = 0;  // cap of the pool
  std::int64_t max_pages = 0;    // cap of the cap: sizes the arena's reservation
  std::int64_t grow_pages = 1;   // the pool commits at least this many at a time
  ZeroPolicy zero_policy = ZeroPolicy::kTenant;
};

// The first `num_tokens` positions of `slot` become usable; never shrinks.
struct Growth {
  SlotId slot;
  std::int64_t num_tokens;
};

struct Plan {
  std::int64_t needed_pages;
  std::int64_t available_pages;
  std::uint64_t version;
};

struct MemoryStats {
  std::int64_t page_bytes, page_tokens, limit_pages, committed_pages, free_pages, used_pages,
      quarantined_pages, shared_pages, num_slots, used_slots, used_tokens, tail_waste_bytes,
      pages_mapped_total, pages_unmapped_total, pages_committed_total, pages_given_back_total,
      pages_zeroed_total, map_calls_total, unmap_calls_total, arena_map_calls_total,
      memfd_allocated_bytes, num_mappings, pending_repairs;
  double map_seconds_total;
};

// Thread-safe: one lock around every call. Every mutation happens as a whole or not at all.
class KVMemory {
 public:
  KVMemory(std::shared_ptr<PageDriver> driver, const MemoryConfig& config);

  const MemoryConfig& config() const { return config_; }

  // The lowest unused slot; nothing when all are taken.
  std::optional<SlotId> alloc_slot(Tenant tenant);

  // Read-only. The growths fit if needed_pages <= available_pages.
  Plan plan(const std::vector<Growth>& growths) const;

  // Pre: `version` is that of the last plan() and nothing was mutated since.
  // Throws OutOfMemoryError (the limit, or the system has less) or DriverError; then nothing
  // changed.
  void apply(const std::vector<Growth>& growths, std::uint64_t version);

  // The slot is empty and its references are dropped. Never fails for the driver's sake: what
  // cannot be unmapped is quarantined with the slot until a repair succeeds.
  void release(SlotId slot);

  // A new slot with the first `num_tokens` of `src`: whole pages are shared, read-only in both,
  // and the last partial page is copied. Nothing when all slots are taken.
  // Pre: those tokens are written; writing one of a shared page is a fault from here on.
  std::optional<SlotId> fork_slot(SlotId src, std::int64_t num_tokens);

  // Gives free pages above `keep_pages` back to the system, highest ids first; returns how many.
  std::int64_t trim(std::int64_t keep_pages);

  // A lower limit gives back what is free above it at once, the rest as slots are released. The
  // limit holds even when giving back throws DriverError; trim() then tries again.
  void set_limit(std::int64_t limit_pages);

  std::vector<PageId> block_table(SlotId slot) const;
  std::int64_t slot_length(SlotId slot) const;

  // Makes the shadow (see above), which is kept in step from then on.
  void enable_shadow();

  MemoryStats stats() const;
  std::string last_error() const;  // why the newest repair was needed; empty if none was
  void check() const;

  // Post: every other call throws MisuseError. The memory itself goes with its last tensor.
  void close();
  bool closed() const;

  // For tensors over the memory, which keep it alive.
  std::shared_ptr<AddressSpace> address_space() const;

 private:
  struct Slot {
    bool used = false;
    bool in_repair = false;
    Tenant tenant = 0;
    std::int64_t length = 0;
    std::int64_t num_readonly = 0;  // the shared prefix, in pages
    std::vector<PageId> pages;
  };

  // Pages to be appended to one slot.
  struct Extension {
    SlotId slot;
    Tenant tenant;
    std::int64_t first_index;
    std::vector<PageId> pages;
  };

  // A mutation under way: what it did so far, and so what to undo.
  struct Change {
    explicit Change(PageDriver& driver) : tx(driver) {}
    Transaction tx;
    std::vector<PageRun> created;
    std::vector<PageId> taken;
    std::int64_t zeroed = 0;
    std::int64_t map_calls = 0;
    std::int64_t arena_map_calls = 0;
    std::int64_t pages_mapped = 0;
  };

  struct Repair {
    std::vector<UndoStep> steps;
    std::vector<PageId> held;      // one reference each
    std::vector<PageRun> created;  // of those held, the ones that shall not exist afterwards
    std::vector<SlotId> slots;     // unusable until repaired
  };

  struct Totals {
    std::int64_t mapped = 0, unmapped = 0, committed = 0, given_back = 0, zeroed = 0, map_calls = 0,
                 unmap_calls = 0, arena_map_calls = 0;
    double map_seconds = 0;
  };

  // Refuses a fork and a closed memory, then locks.
  std::unique_lock<std::mutex> enter() const;

  const Slot& used_slot(SlotId slot) const;
  Slot& healthy_slot(SlotId slot);
  std::optional<SlotId> lowest_unused_slot() const;
  std::int64_t pages_for(std::int64_t num_tokens) const;
  // Growths per slot, each slot once with its largest, in the order of first mention.
  std::vector<Growth> merged(const std::vector<Growth>& growths) const;
  std::int64_t missing_pages(const std::vector<Growth>& growths) const;
  std::vector<AddressRun> slot_ranges(SlotId slot, std::int64_t num_pages) const;

  // The steps of a mutation; each throws, and abandon() takes back what was done.
  void ensure_free(Change& change, std::int64_t count);
  void commit_pages(Change& change, std::int64_t count);
  Extension extend(Change& change, SlotId slot, std::int64_t first_index, std::int64_t count);
  void zero_pages(Change& change, const std::vector<Extension>& extensions);
  void map_pages(Change& change, const std::vector<Extension>& extensions, Access access);
  void append_pages(std::vector<MapRun>& runs, Address start, std::int32_t group,
                    const std::vector<PageId>& pages, Access access, bool prefault) const;
  void make_readonly(Change& change, SlotId slot, std::int64_t num_pages);
  void copy_partial_page(PageId dst, PageId src, std::int64_t num_tokens);
  void attach(const Extension& extension);
  void finish(const Change& change, double seconds);
  void abandon(Change& change, const std::vector<SlotId>& slots);
  std::int64_t give_back(std::int64_t count);

  void retry_repairs();
  bool retry(Repair& repair);
  // The access of addresses that are being unmapped needs no repair any more.
  void forget_access_repairs(const std::vector<AddressRun>& ranges);
  std::vector<PageId> held_pages() const;
  std::int64_t num_quarantined() const;
  void check_references() const;
  void check_slots() const;
  void check_mappings() const;

  MemoryConfig config_;
  pid_t pid_;
  mutable std::mutex mutex_;
  std::shared_ptr<AddressSpace> space_;  // null once closed
  PagePool pool_;
  std::vector<Slot> slots_;
  std::vector<Repair> repairs_;
  std::string last_error_;
  std::uint64_t version_ = 0;
  Totals totals_;
};

}  // namespace vmserve
