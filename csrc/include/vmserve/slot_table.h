// Slots: which pages each contiguous address range shows, in order.
//
// A slot's first entries are the pages of its sequence; the others are spares. Entries dropped by a
// sliding window are kNoPage. The last `num_pending` entries are still being mapped.
#pragma once

#include <cstdint>
#include <vector>

#include "vmserve/types.h"

namespace vmserve {

struct SlotEntry {
  PageId page;
  bool read_only;
};

struct Slot {
  SeqId seq = kNoSeq;
  std::vector<SlotEntry> entries;
  std::int64_t num_pending = 0;
  std::int64_t num_sealed = 0;  // the first `num_sealed` entries are not writable
  bool in_repair = false;
  Epoch retire = 0;                // last epoch whose kernels may use these addresses
  std::uint64_t parked_at = 0;     // order of parking
  std::uint64_t last_command = 0;  // newest mapper command for these addresses
  std::uint64_t last_map = 0;      // newest one that changes mappings

  bool active() const { return seq != kNoSeq; }
  bool empty() const { return entries.empty(); }
  std::int64_t size() const { return static_cast<std::int64_t>(entries.size()); }
};

}  // namespace vmserve
