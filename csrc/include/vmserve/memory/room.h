// Finding pages, and giving them back.
#pragma once

#include <cstdint>
#include <utility>
#include <vector>

#include "vmserve/memory/driver_work.h"

namespace vmserve {

class Room : OnLedger {
 public:
  Room(Ledger& ledger, DriverWork& work) : OnLedger(ledger), work_(work) {}

  void make_mapping_room(std::int64_t needed);
  void make_room(std::int64_t num_pages);
  void commit_pages(std::int64_t count);
  void create_pages(std::int64_t count);
  std::int64_t give_back(std::int64_t count);
  void give_back(const PageRun& run);
  std::int64_t drop_idle(std::int64_t keep);
  void give_back_excess();
  void shed();
  // `trial`: in the books alone, to be undone.
  void squeeze(Change* trial = nullptr);
  std::int64_t pack(std::vector<PageId> pages, Change* trial = nullptr);

 private:
  bool evict(PageId page, std::int64_t wanted);
  void loosen(PageId page);
  void copy_blocks(const std::vector<std::pair<BlockId, BlockId>>& moves);
  void move_blocks(const std::vector<std::pair<BlockId, BlockId>>& moves, Change* trial);

  DriverWork& work_;
};

}  // namespace vmserve
