// Slots: which pages each contiguous range of addresses shows, in order.
//
// A slot's first entries are those of the sequence that has it; the others are spares. Entries of
// a sliding window's past are kNoPage. The last `num_pending` entries are still being mapped.
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
  std::int64_t num_sealed = 0;  // none of the first entries, so many, is writable
  bool in_repair = false;
  Epoch retire = 0;                // the last epoch whose kernels may use these addresses
  std::uint64_t parked_at = 0;     // order of parking
  std::uint64_t last_command = 0;  // of the mapper, that concerns these addresses
  std::uint64_t last_map = 0;      // of those, the last one that changes what is mapped

  bool active() const { return seq != kNoSeq; }
  bool empty() const { return entries.empty(); }
  std::int64_t size() const { return static_cast<std::int64_t>(entries.size()); }
};

}  // namespace vmserve
