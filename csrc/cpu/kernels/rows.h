// Operations on one row of logits; see RowKernels. Results do not depend on the width of a
// register: sums always have sixteen lanes, and only `fused` fuses a product with a sum.
#pragma once

#include <float.h>

#include "kernel_common.h"

namespace vmserve::cpu {
namespace {

constexpr int kLanes = 16;
constexpr int kParts = kLanes / Vec::kWidth;
static_assert((kParts == 1 || kParts == 2) && kRowBlock % kLanes == 0);

// e^x for x <= 0: 2^n e^f, with ln 2 in two parts and a minimax polynomial of degree 6 on
// [-ln 2 / 2, ln 2 / 2].
inline Vec::R exp_of(Vec::R x) {
  const Vec::R floor = Vec::set(-87.0F);
  const Vec::R clipped = Vec::max(x, floor);
  const Vec::R n = Vec::round(Vec::mul(clipped, Vec::set(kLog2E)));
  const Vec::R near = Vec::fused(n, Vec::set(-kLn2), clipped);
  const Vec::R f = Vec::fused(n, Vec::set(1.9046542e-9F), near);
  Vec::R p = Vec::set(0.00138144695666F);
  p = Vec::fused(p, f, Vec::set(0.00836878083646F));
  p = Vec::fused(p, f, Vec::set(0.04166839271784F));
  p = Vec::fused(p, f, Vec::set(0.16666519641876F));
  p = Vec::fused(p, f, Vec::set(0.49999994039536F));
  p = Vec::fused(p, f, Vec::set(1.0F));
  p = Vec::fused(p, f, Vec::set(1.0F));
  return Vec::where_less(x, floor, Vec::zero(), Vec::scale_by_power(p, n));
}

// Logits after division by the temperature.
struct Unscaled {
  explicit Unscaled(float) {}
  Vec::R operator()(Vec::R x) const { return x; }
};
struct Divided {
  explicit Divided(float temperature) : divisor(Vec::set(temperature)) {}
  // Limited, because a small temperature must not make infinities: their difference is NaN.
  Vec::R operator()(Vec::R x) const { return Vec::min(Vec::div(x, divisor), Vec::set(FLT_MAX)); }
  Vec::R divisor;
};

// Loads `count` elements from `from`, and -inf after them.
inline Vec::R load_or_lowest(const float* from, std::int64_t count) {
  if (count >= Vec::kWidth) return Vec::load(from);
  float lanes[Vec::kWidth];
  for (int lane = 0; lane < Vec::kWidth; ++lane)
    lanes[lane] = lane < count ? from[lane] : -INFINITY;
  return Vec::load(lanes);
}

// Adds halves of the lanes until one is left.
inline float sum_of_lanes(const Vec::R* parts) {
  float lanes[Vec::kWidth];
  Vec::store(lanes, kParts == 1 ? parts[0] : Vec::add(parts[0], parts[kParts - 1]));
  for (int half = Vec::kWidth / 2; half > 0; half /= 2) {
    for (int lane = 0; lane < half; ++lane) lanes[lane] += lanes[lane + half];
  }
  return lanes[0];
}

template <class Scale>
float sum_of_weights(const float* at, std::int64_t count, Scale scale, Vec::R shift) {
  Vec::R sums[kParts];
  for (Vec::R& sum : sums) sum = Vec::zero();
  const auto add = [&](int part, Vec::R x) {
    sums[part] = Vec::add(sums[part], exp_of(Vec::sub(scale(x), shift)));
  };
  std::int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) {
    for (int part = 0; part < kParts; ++part) add(part, Vec::load(at + i + part * Vec::kWidth));
  }
  for (int part = 0; i < count; ++part, i += Vec::kWidth)
    add(part, load_or_lowest(at + i, count - i));
  return sum_of_lanes(sums);
}

template <class Scale>
void sum_row(const float* row, std::int64_t width, Scale scale, float shift, float* sums) {
  const Vec::R at = Vec::set(shift);
  for (std::int64_t block = 0; block < num_row_blocks(width); ++block) {
    const std::int64_t begin = block * kRowBlock;
    sums[block] = sum_of_weights(row + begin, least(kRowBlock, width - begin), scale, at);
  }
}

inline void sum_blocks(const float* row, std::int64_t width, float temperature, float shift,
                       float* sums) {
  if (temperature == 1.0F) {
    sum_row(row, width, Unscaled(temperature), shift, sums);
  } else {
    sum_row(row, width, Divided(temperature), shift, sums);
  }
}

inline void weights(const float* values, std::int64_t count, float temperature, float shift,
                    float* out) {
  const Divided scale(temperature);
  for (std::int64_t i = 0; i < count; i += Vec::kWidth) {
    const Vec::R x = load_or_lowest(values + i, count - i);
    const Vec::R weight = exp_of(Vec::sub(scale(x), Vec::set(shift)));
    if (i + Vec::kWidth <= count) {
      Vec::store(out + i, weight);
    } else {
      float lanes[Vec::kWidth];
      Vec::store(lanes, weight);
      for (std::int64_t lane = 0; i + lane < count; ++lane) out[i + lane] = lanes[lane];
    }
  }
}

inline float survey(const float* row, std::int64_t width, float* maxima) {
  float maximum = -INFINITY;
  // -inf while all values are finite or -inf, else NaN.
  Vec::R sound = Vec::set(-INFINITY);
  for (std::int64_t block = 0; block < num_row_blocks(width); ++block) {
    const std::int64_t begin = block * kRowBlock, end = least(begin + kRowBlock, width);
    Vec::R best = Vec::set(-INFINITY);
    for (std::int64_t i = begin; i < end; i += Vec::kWidth) {
      const Vec::R x = load_or_lowest(row + i, end - i);
      best = Vec::max(x, best);
      sound = Vec::add(sound, x);
    }
    maxima[block] = Vec::reduce_max(best);
    maximum = most(maximum, maxima[block]);
  }
  const float sum = Vec::reduce_add(sound);
  return sum == sum ? maximum : NAN;
}

template <class Scale>
std::int64_t gather(const float* row, std::int64_t width, const float* maxima, Scale scale,
                    float floor, std::int32_t* ids, float* values) {
  const Vec::R least_kept = Vec::set(floor);
  std::int64_t num = 0;
  for (std::int64_t block = 0; block < num_row_blocks(width); ++block) {
    if (Vec::at_least(scale(Vec::set(maxima[block])), least_kept) == 0) continue;
    const std::int64_t begin = block * kRowBlock, end = least(begin + kRowBlock, width);
    for (std::int64_t i = begin; i < end; i += Vec::kWidth) {
      const Vec::R x = scale(load_or_lowest(row + i, end - i));
      unsigned found = Vec::at_least(x, least_kept);
      // Lanes after the end are -inf, which is not below a floor of -inf.
      if (end - i < Vec::kWidth) found &= (1U << (end - i)) - 1U;
      if (found == 0) continue;
      float lanes[Vec::kWidth];
      Vec::store(lanes, x);
      for (; found != 0; found &= found - 1, ++num) {
        const int lane = __builtin_ctz(found);
        ids[num] = static_cast<std::int32_t>(i) + lane;
        values[num] = lanes[lane];
      }
    }
  }
  return num;
}

inline std::int64_t at_least(const float* row, std::int64_t width, const float* maxima,
                             float temperature, float floor, std::int32_t* ids, float* values) {
  if (temperature == 1.0F) {
    return gather(row, width, maxima, Unscaled(temperature), floor, ids, values);
  }
  return gather(row, width, maxima, Divided(temperature), floor, ids, values);
}

inline std::int64_t num_before(const float* row, std::int64_t width, const float* maxima,
                               std::int64_t id) {
  const float own = row[id];
  std::int64_t num = 0;
  for (std::int64_t begin = 0; begin < width; begin += kRowBlock) {
    if (maxima[begin / kRowBlock] < own) continue;
    const std::int64_t end = least(begin + kRowBlock, width);
    const std::int64_t middle = least(most(id, begin), end);
    std::int32_t in_block = 0;
    for (std::int64_t i = begin; i < middle; ++i) in_block += row[i] >= own ? 1 : 0;
    for (std::int64_t i = middle; i < end; ++i) in_block += row[i] > own ? 1 : 0;
    num += in_block;
  }
  return num;
}

inline void widen(const Bf16* row, std::int64_t width, float* out) {
  for (std::int64_t i = 0; i < width; ++i) {
    const std::uint32_t bits = static_cast<std::uint32_t>(row[i].bits) << 16;
    memcpy(out + i, &bits, sizeof bits);
  }
}

constexpr RowKernels row_kernels() {
  return {&widen, &survey, &sum_blocks, &weights, &at_least, &num_before};
}

}  // namespace
}  // namespace vmserve::cpu
