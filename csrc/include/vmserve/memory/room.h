// Finds pages for changes and returns pages to the system.
#pragma once

#include <cstdint>
#include <utility>
#include <vector>

#include "vmserve/memory/driver_work.h"

namespace vmserve {

class Room : LedgerClient {
 public:
  Room(Ledger& ledger, DriverWork& work) : LedgerClient(ledger), work_(work) {}

  // Unmaps parked slots until `needed` mappings are possible, else throws OutOfMemoryError.
  void make_mapping_room(std::int64_t needed);
  // Commits or evicts pages until `num_pages` are free, else throws OutOfMemoryError.
  void make_room(std::int64_t num_pages);
  // Commits at least `count` pages, config.grow_pages if possible. create_pages: exactly `count`.
  void commit_pages(std::int64_t count);
  void create_pages(std::int64_t count);
  // Returns up to `count` free pages to the system, highest ids first; how many were returned.
  std::int64_t give_back(std::int64_t count);
  void give_back(const PageRun& run);
  // Evicts the oldest idle page that the driver lets go. False if there is none.
  bool evict_oldest();
  // Compacts all pages that allow it. `trial`: only in the ledger, to be undone.
  void compact_all(Change* trial = nullptr);
  // Moves blocks of the pages into as few of them as possible; how many pages became empty.
  std::int64_t compact(std::vector<PageId> pages, Change* trial = nullptr);

 private:
  bool evict(PageId page, std::int64_t wanted);
  void release_gaps(PageId page);
  void copy_blocks(const std::vector<std::pair<BlockId, BlockId>>& moves);
  void move_blocks(const std::vector<std::pair<BlockId, BlockId>>& moves, Change* trial);

  DriverWork& work_;
};

}  // namespace vmserve
