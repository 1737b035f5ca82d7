// What a request changes in a row of logits before a token is chosen.
#pragma once

#include <cstdint>
#include <utility>
#include <vector>

#include "row_sampler.h"

namespace vmserve::sampling {

// Room for apply_changes. Between calls `counts` is zero.
struct ChangesRoom {
  std::vector<std::int32_t> counts;                   // [vocab]
  std::vector<std::pair<std::int32_t, float>> saved;  // at least as many as are allowed or banned
};

// Pre: every id is in [0, vocab).
void apply_changes(const LogitChanges& changes, float* row, std::int64_t vocab, ChangesRoom& room);

}  // namespace vmserve::sampling
