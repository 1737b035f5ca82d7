// Keys and values of 8 bits (Code in kernels.h), for decode_int8.h and tile_int8.h.
//
// The other factor of each product has 14 bits: a query row, or the softmax's weights of a tile
// times the scales of its values. Sums of integers are exact, so only the order of the tiles and of
// the sum of weights matters, which is that of decode.h.
#pragma once

#include "kernel_common.h"

namespace vmserve::cpu {
namespace {

// The largest integer of a query or a weight: sums of kMaxHeadDim products fit in int32.
constexpr float kMostWhole = 16383.0F;
static_assert(16384LL * 128 * kMaxHeadDim < 1LL << 31);
// A row, or a tile's weights, with a smaller maximum counts as zero: the reciprocal would not be
// finite.
constexpr float kLeastLargest = 7.888609052210118e-31F;  // 2^-100

// Bytes of a vector, and of its words of four codes.
constexpr int kVectorCodes = 4 * Vec::kWidth;
constexpr int padded_codes(int head_dim) {
  return (head_dim + kVectorCodes - 1) / kVectorCodes * kVectorCodes;
}
// Element of a vector of codes that lane `lane` of pair_rows' vector `i` has.
constexpr int paired_element(int i, int lane) {
  return lane / 4 * 16 + i / 2 * 8 + lane % 4 * 2 + i % 2;
}

inline float scale_of(const Code* row, int head_dim) {
  float scale;
  memcpy(&scale, row + head_dim, sizeof scale);
  return scale;
}

// Widens `count` numbers, with zeros after them up to whole vectors.
template <class T>
void widen_row(const T* from, int count, float* to) {
  int i = 0;
  for (; i + Vec::kWidth <= count; i += Vec::kWidth) Vec::store(to + i, Vec::load(from + i));
  if (i == count) return;
  T rest[Vec::kWidth] = {};
  memcpy(rest, from + i, sizeof(T) * static_cast<size_t>(count - i));
  Vec::store(to + i, Vec::load(rest));
}

// Steps of a row of integers: number = scale * integer, integer = round(number * inverse).
struct Steps {
  float scale;  // NaN if a number is not finite; then the integers are 0
  float inverse;
};

// Steps of a row that widen_row has written, for integers up to `most`.
inline Steps steps_of(const float* row, int count, float most) {
  Vec::R largest = Vec::zero(), rest = Vec::zero();  // x - x is 0 or NaN
  for (int i = 0; i < count; i += Vec::kWidth) {
    const Vec::R x = Vec::load(row + i);
    largest = Vec::max(Vec::abs(x), largest);
    rest = Vec::add(rest, Vec::sub(x, x));
  }
  const float broken = Vec::reduce_add(rest), size = Vec::reduce_max(largest);
  if (broken != 0.0F) return {broken, 0.0F};
  if (size < kLeastLargest) return {0.0F, 0.0F};
  return {size / most, most / size};
}

// Writes the integers of a row, zeros if it is broken.
inline void store_whole(const float* row, int count, Steps steps, std::int16_t* to) {
  for (int i = 0; i < count; i += Vec::kWidth) {
    const Vec::R x = steps.inverse == 0.0F
                         ? Vec::zero()
                         : Vec::round(Vec::mul(Vec::load(row + i), Vec::set(steps.inverse)));
    Vec::store_integers(to + i, x);
  }
}

// Writes a row of the KV cache.
template <class T>
void encode_row(const T* from, int head_dim, Code* to) {
  float row[kMaxHeadDim];
  std::int16_t whole[kMaxHeadDim];
  widen_row(from, head_dim, row);
  const Steps steps = steps_of(row, head_dim, 127.0F);
  store_whole(row, head_dim, steps, whole);
  for (int d = 0; d < head_dim; ++d) to[d].bits = static_cast<std::uint8_t>(whole[d] + 128);
  memcpy(to + head_dim, &steps.scale, sizeof steps.scale);
}

// The integers of a query row, and its scale times the factor of scores.
template <class T>
float encode_query(const T* from, int head_dim, float factor, std::int16_t* to) {
  float row[kMaxHeadDim];
  widen_row(from, head_dim, row);
  const Steps steps = steps_of(row, head_dim, kMostWhole);
  store_whole(row, head_dim, steps, to);
  return steps.scale * factor;
}

// A weight times its value's scale. A token without weight adds nothing, even if it is broken.
inline Vec::R scaled_weight(Vec::R weight, Vec::R scale) {
  return Vec::where_less(Vec::zero(), weight, Vec::mul(weight, scale), Vec::zero());
}

// A weight as an integer; 0 if it is NaN (the sum of weights is, too).
inline Vec::R whole_weight(Vec::R weight, Vec::R inverse) {
  const Vec::R finite = Vec::where_less(Vec::zero(), weight, weight, Vec::zero());
  return Vec::round(Vec::mul(finite, inverse));
}

// For weights up to `largest`: the factor that whole_weight takes, and the scale of the integers.
inline Vec::R inverse_of(Vec::R largest) {
  return Vec::where_less(largest, Vec::set(kLeastLargest), Vec::zero(),
                         Vec::div(Vec::set(kMostWhole), largest));
}
inline Vec::R weight_scale(Vec::R largest) {
  return Vec::where_less(largest, Vec::set(kLeastLargest), Vec::zero(),
                         Vec::div(largest, Vec::set(kMostWhole)));
}

}  // namespace
}  // namespace vmserve::cpu
