// Packs weights into panels and rows into blocks; linear_panels.h has the layouts.
#pragma once

#include "linear_float.h"
#include "linear_int8.h"

namespace vmserve::cpu {
namespace {

inline float widened(Bf16 value) {
  const std::uint32_t bits = static_cast<std::uint32_t>(value.bits) << 16;
  float x;
  memcpy(&x, &bits, sizeof x);
  return x;
}

inline float as_float(float x) {
  return x;
}
inline float as_float(Bf16 x) {
  return widened(x);
}

// The weights of one lane, or null if there is no such output.
template <class From>
const From* lane_weights(const PackArgs& a, std::int32_t panel, int lane) {
  std::int32_t tensor = 0, output = panel * kPanelOutputs + lane;
  if (a.gated) {
    tensor = lane / Vec::kWidth;
    output = panel * Vec::kWidth + lane % Vec::kWidth;
  }
  for (; tensor < a.num_tensors; ++tensor) {
    if (output < a.outputs[tensor]) {
      return static_cast<const From*>(a.tensors[tensor]) + output * a.row_strides[tensor];
    }
    if (a.gated) return nullptr;
    output -= a.outputs[tensor];
  }
  return nullptr;
}

// The symmetric scale of an output: its largest weight becomes 127.
template <class From>
float scale_of(const From* lane, std::int64_t depth) {
  float largest = 0.0F;
  for (std::int64_t k = 0; k < depth; ++k) {
    largest = most(largest, __builtin_fabsf(as_float(lane[k])));
  }
  return largest / 127.0F;
}

// Elements of a word that lie in the order 0, 2, 1, 3.
inline std::uint32_t interleaved(std::uint32_t bytes) {
  return (bytes & 0xff0000ff) | (bytes >> 8 & 0xff00) | (bytes << 8 & 0xff0000);
}

// The stored form of successive weights of a lane: 4 bytes of it.
template <class W, class From>
std::uint32_t weight_word(const From* from, float inverse) {
  std::uint32_t word;
  if constexpr (Stored<W>::kOutputScales) {
    std::uint8_t codes[4];
    for (int k = 0; k < 4; ++k) {
      codes[k] = static_cast<std::uint8_t>(__builtin_rintf(as_float(from[k]) * inverse) + 128.0F);
    }
    memcpy(&word, codes, sizeof word);
    return interleaved(word);
  } else {
    static_assert(sizeof(W) == sizeof(From));
    memcpy(&word, from, sizeof word);
    return word;
  }
}

// A panel is words of 4 bytes, [depth / kStep, outputs].
template <class W, class From>
void pack_panel(const PackArgs& a, std::int32_t panel) {
  constexpr int kStep = Stored<W>::kStep;
  static_assert(kStep * sizeof(W) == sizeof(std::uint32_t));
  constexpr std::int64_t kAtOnce = 64;  // words of a lane: what is written stays in the cache
  const std::int64_t words = (a.depth + kDepthUnit - 1) / kDepthUnit * kDepthUnit / kStep;
  const std::int64_t whole = a.depth / kStep;
  auto* const to = reinterpret_cast<std::uint32_t*>(a.weights) + panel * words * kPanelOutputs;
  const From* lanes[kPanelOutputs];
  float inverses[kPanelOutputs];
  for (int lane = 0; lane < kPanelOutputs; ++lane) {
    lanes[lane] = lane_weights<From>(a, panel, lane);
    if constexpr (Stored<W>::kOutputScales) {
      const float scale = lanes[lane] == nullptr ? 0.0F : scale_of(lanes[lane], a.depth);
      a.scales[panel * kPanelOutputs + lane] = scale;
      inverses[lane] = scale > 0.0F ? 1.0F / scale : 0.0F;
    }
  }
  for (std::int64_t first = 0; first < words; first += kAtOnce) {
    const std::int64_t end = least(first + kAtOnce, words);
    for (int lane = 0; lane < kPanelOutputs; ++lane) {
      const From* const from = lanes[lane];
      std::int64_t word = first;
      for (; from != nullptr && word < least(end, whole); ++word) {
        to[word * kPanelOutputs + lane] = weight_word<W>(from + word * kStep, inverses[lane]);
      }
      for (; word < end; ++word) {
        From padded[kStep] = {};
        for (std::int64_t k = word * kStep; from != nullptr && k < a.depth; ++k) {
          padded[k - word * kStep] = from[k];
        }
        to[word * kPanelOutputs + lane] = weight_word<W>(padded, inverses[lane]);
      }
    }
  }
}

template <class W>
void pack(const PackArgs& a) {
  for (std::int32_t panel = a.first_panel; panel < a.first_panel + a.num_panels; ++panel) {
    if constexpr (Stored<W>::kOutputScales) {
      a.from_bf16 ? pack_panel<W, Bf16>(a, panel) : pack_panel<W, float>(a, panel);
    } else {
      pack_panel<W, W>(a, panel);  // LinearProducts::float_form keeps the type
    }
  }
}

// -- rows ------------------------------------------------------------------------------------

template <class T>
float factor_of(const T* row, std::int64_t depth, float eps) {
  Vec::R even = Vec::zero(), odd = Vec::zero();
  for (std::int64_t k = 0; k < depth; k += kPair) {
    Vec::R x, y;
    load_upto(row + k, static_cast<int>(least<std::int64_t>(kPair, depth - k)), x, y);
    even = Vec::fma(x, x, even);
    odd = Vec::fma(y, y, odd);
  }
  const float mean = Vec::reduce_add(Vec::add(even, odd)) / static_cast<float>(depth);
  return 1.0F / __builtin_sqrtf(mean + eps);
}

// Loads `count` elements of a row from `first` on, normalised if there is a norm. Fills up to
// `padded_count` with zeros.
template <class T>
void take_row(const PackRowsArgs& a, const T* row, float factor, std::int64_t first,
              std::int64_t count, std::int64_t padded_count, float* values) {
  const T* const from = row + first;
  const float* const norm = a.norm == nullptr ? nullptr : a.norm + first;
  std::int64_t k = 0;
  for (; k + Vec::kWidth <= count; k += Vec::kWidth) {
    Vec::R x = Vec::load(from + k);
    if (norm != nullptr) x = Vec::mul(Vec::mul(x, Vec::set(factor)), Vec::load(norm + k));
    Vec::store(values + k, x);
  }
  for (; k < count; ++k) {
    const float x = as_float(from[k]);
    values[k] = norm == nullptr ? x : x * factor * norm[k];
  }
  for (; k < padded_count; ++k) values[k] = 0.0F;
}

// Rounds `count` values (whole vectors) to integers in [-kMost, kMost], with the largest absolute
// value as kMost.
template <class Row>
RowGroup to_integers(const float* values, std::int64_t count, Row* to) {
  constexpr float kMost = sizeof(Row) == 1 ? 127.0F : 32767.0F;
  Vec::R largest = Vec::zero(), sound = Vec::zero();
  for (std::int64_t k = 0; k < count; k += Vec::kWidth) {
    const Vec::R x = Vec::load(values + k);
    largest = Vec::max(Vec::abs(x), largest);
    sound = Vec::add(sound, Vec::sub(x, x));  // NaN if x is infinite or NaN
  }
  const float highest = Vec::reduce_max(largest);
  const Vec::R inverse = Vec::set(highest > 1.0e-30F ? kMost / highest : 0.0F);
  const Vec::R lowest = Vec::set(-kMost);  // replaces NaN
  Vec::R sum = Vec::zero();                // exact: below 2^24
  for (std::int64_t k = 0; k < count; k += Vec::kWidth) {
    const Vec::R x = Vec::mul(Vec::load(values + k), inverse);
    const Vec::R whole = Vec::round(Vec::max(x, lowest));
    sum = Vec::add(sum, whole);
    Vec::store_integers(to + k, whole);
  }
  const float scale = highest / kMost + Vec::reduce_add(sound), total = Vec::reduce_add(sum);
  return {scale, -128 * static_cast<std::int32_t>(total), scale * total};
}

template <class T, class Row, RowType kType>
void pack_row(const PackRowsArgs& a, std::int64_t r) {
  const T* const row = static_cast<const T*>(a.rows) + r * a.row_stride;
  const float factor = a.norm == nullptr ? 1.0F : factor_of(row, a.depth, a.eps);
  const std::int64_t padded_depth = (a.depth + kDepthUnit - 1) / kDepthUnit * kDepthUnit;
  constexpr bool kGrouped = kRowFormats[kType].group_depth > 0;
  constexpr std::int64_t kPiece = kGrouped ? kRowFormats[kType].group_depth : 512;
  for (std::int64_t first = 0; first < padded_depth; first += kPiece) {
    const std::int64_t count = least(kPiece, a.depth - first);
    const std::int64_t padded_count = least(kPiece, padded_depth - first);
    float values[kPiece];
    take_row(a, row, factor, first, count, padded_count, values);
    Row* const block = static_cast<Row*>(a.block);
    Row rounded[kPiece];
    if constexpr (kGrouped) {
      a.groups[r * num_groups(padded_depth, kType) + first / kPiece] =
          to_integers(values, padded_count, rounded);
    } else {
      for (std::int64_t k = 0; k < padded_count; k += Vec::kWidth) {
        Vec::store(rounded + k, Vec::load(values + k));
      }
    }
    put_packed(block, first, r, a.num_rows, rounded, padded_count);
  }
}

template <class Row, RowType kType = kRowType<Row>>
void pack_rows(const PackRowsArgs& a) {
  for (int r = 0; r < a.num_rows; ++r) {
    a.from_bf16 ? pack_row<Bf16, Row, kType>(a, r) : pack_row<float, Row, kType>(a, r);
  }
}

}  // namespace
}  // namespace vmserve::cpu
