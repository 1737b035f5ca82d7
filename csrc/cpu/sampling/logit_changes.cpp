#include "logit_changes.h"

#include <algorithm>
#include <cmath>

namespace vmserve::sampling {
namespace {

bool is_ruled_out(const LogitChanges& changes, std::int32_t id) {
  return changes.mask != nullptr && !changes.mask[id];
}

// Returns whether a token remains. If none does, the row is unchanged.
bool keep_allowed(const LogitChanges& changes, float* row, std::int64_t vocab, ChangesRoom& room) {
  room.saved.clear();
  bool remains = false;
  for (const std::int32_t id : changes.banned) room.counts[id] = 1;
  for (const std::int32_t id : changes.fixed->allowed) {
    if (is_ruled_out(changes, id) || room.counts[id] != 0) continue;
    room.saved.emplace_back(id, row[id]);
    remains = remains || row[id] > -INFINITY;
  }
  for (const std::int32_t id : changes.banned) room.counts[id] = 0;
  if (!remains) return false;
  std::fill_n(row, vocab, -INFINITY);
  for (const auto& [id, value] : room.saved) row[id] = value;
  return true;
}

void drop_banned(const LogitChanges& changes, float* row, std::int64_t vocab, ChangesRoom& room) {
  if (changes.mask != nullptr) {
    for (std::int64_t id = 0; id < vocab; ++id) row[id] = changes.mask[id] ? row[id] : -INFINITY;
  }
  room.saved.clear();
  for (const std::int32_t id : changes.banned) room.saved.emplace_back(id, row[id]);
  for (const std::int32_t id : changes.banned) row[id] = -INFINITY;
  if (changes.banned.empty()) return;
  if (std::any_of(row, row + vocab, [](float x) { return x > -INFINITY; })) return;
  for (const auto& [id, value] : room.saved) row[id] = value;
}

// Keskar et al., "CTRL" (2019), section 4.1; signs are handled as in `transformers`.
void penalise_repetition(const LogitChanges& changes, float* row, ChangesRoom& room) {
  for (const auto* seen : {&changes.prompt, &changes.output}) {
    for (const std::int32_t id : *seen) {
      if (room.counts[id]++ > 0) continue;
      const float x = row[id];
      row[id] = x > 0.0F ? x / changes.fixed->repetition : x * changes.fixed->repetition;
    }
  }
  for (const auto* seen : {&changes.prompt, &changes.output}) {
    for (const std::int32_t id : *seen) room.counts[id] = 0;
  }
}

void penalise_output(const LogitChanges& changes, float* row, ChangesRoom& room) {
  for (const std::int32_t id : changes.output) ++room.counts[id];
  for (const std::int32_t id : changes.output) {
    if (room.counts[id] == 0) continue;
    const double amount = -changes.fixed->presence - changes.fixed->frequency * room.counts[id];
    row[id] += static_cast<float>(amount);
    room.counts[id] = 0;
  }
}

}  // namespace

void apply_changes(const LogitChanges& changes, float* row, std::int64_t vocab, ChangesRoom& room) {
  const FixedChanges& fixed = *changes.fixed;
  for (const auto& [id, bias] : fixed.bias) row[id] += bias;
  if (fixed.allowed.empty() || !keep_allowed(changes, row, vocab, room)) {
    drop_banned(changes, row, vocab, room);
  }
  if (fixed.repetition != 1.0F) penalise_repetition(changes, row, room);
  if (fixed.presence != 0.0 || fixed.frequency != 0.0) penalise_output(changes, row, room);
}

}  // namespace vmserve::sampling
