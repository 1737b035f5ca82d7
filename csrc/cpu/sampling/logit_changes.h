// Changes that a request makes to a row of logits before a token is chosen.
#pragma once

#include <cstdint>
#include <utility>
#include <vector>

#include "row_sampler.h"

namespace vmserve::sampling {

// Buffers of apply_changes. `counts` is all zero between calls.
struct ChangesRoom {
  std::vector<std::int32_t> counts;                   // [vocab]
  std::vector<std::pair<std::int32_t, float>> saved;  // capacity for all allowed or banned ids
};

// Pre: all ids are in [0, vocab).
void apply_changes(const LogitChanges& changes, float* row, std::int64_t vocab, ChangesRoom& room);

}  // namespace vmserve::sampling
