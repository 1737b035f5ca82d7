// What a sampler asks of a row of logits: read twice, in order, by one thread, whatever other rows
// there are.
#pragma once

#include "kernel_common.h"

namespace vmserve::cpu {
namespace {

// Elements whose maximum, or sum in float32, is found before anything else is done with it.
constexpr std::int64_t kPeakBlock = 32 * Vec::kWidth;

// The elements of a block as vectors; behind the last one of the row lies `rest`.
template <class Body>
void for_vectors(const float* row, std::int64_t count, float rest, const Body& body) {
  std::int64_t i = 0;
  for (; i + Vec::kWidth <= count; i += Vec::kWidth) body(Vec::load(row + i));
  if (i == count) return;
  float lanes[Vec::kWidth];
  for (int lane = 0; lane < Vec::kWidth; ++lane) {
    lanes[lane] = i + lane < count ? row[i + lane] : rest;
  }
  body(Vec::load(lanes));
}

inline void peak(const PeaksArgs& a, std::int64_t r) {
  const float* const row = a.rows + r * a.width;
  float maximum = -INFINITY;
  std::int64_t block_of_maximum = 0;
  // -inf as long as all are finite or -inf, else NaN.
  Vec::R sound = Vec::set(-INFINITY);
  for (std::int64_t at = 0; at < a.width; at += kPeakBlock) {
    Vec::R best = Vec::set(-INFINITY);
    for_vectors(row + at, least(kPeakBlock, a.width - at), -INFINITY, [&](Vec::R x) {
      best = Vec::max(x, best);
      sound = Vec::add(sound, x);
    });
    const float largest = Vec::reduce_max(best);
    if (largest > maximum) {
      maximum = largest;
      block_of_maximum = at;
    }
  }
  std::int64_t id = block_of_maximum;
  while (id + 1 < a.width && row[id] != maximum) ++id;
  double total = 0.0;
  const Vec::R shift = Vec::set(maximum), factor = Vec::set(kLog2E);
  for (std::int64_t at = 0; at < a.width; at += kPeakBlock) {
    Vec::R sum = Vec::zero();
    for_vectors(row + at, least(kPeakBlock, a.width - at), -INFINITY,
                [&](Vec::R x) { sum = Vec::add(sum, exp2(Vec::mul(Vec::sub(x, shift), factor))); });
    total += static_cast<double>(Vec::reduce_add(sum));
  }
  const float sum = Vec::reduce_add(sound);
  const bool is_sound = sum == sum && maximum > -INFINITY;
  a.ids[r] = id;
  a.maxima[r] = maximum;
  a.totals[r] = is_sound ? total : static_cast<double>(NAN);
}

inline void peaks(const PeaksArgs& a) {
  for (std::int64_t row = 0; row < a.num_rows; ++row) peak(a, row);
}

}  // namespace
}  // namespace vmserve::cpu
