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

// The weights of one lane, or null if there is no such output.
inline const char* lane_weights(const PackArgs& a, std::int32_t panel, int lane) {
  const int item = a.from_bf16 ? 2 : 4;
  std::int32_t tensor = 0, output = panel * kPanelOutputs + lane;
  if (a.gated) {
    tensor = lane / Vec::kWidth;
    output = panel * Vec::kWidth + lane % Vec::kWidth;
  }
  for (; tensor < a.num_tensors; ++tensor) {
    if (output < a.outputs[tensor]) {
      return static_cast<const char*>(a.tensors[tensor]) + output * a.row_strides[tensor] * item;
    }
    if (a.gated) return nullptr;
    output -= a.outputs[tensor];
  }
  return nullptr;
}

inline float weight_at(const PackArgs& a, const char* lane, std::int64_t k) {
  if (lane == nullptr || k >= a.depth) return 0.0F;
  return a.from_bf16 ? widened(reinterpret_cast<const Bf16*>(lane)[k])
                     : reinterpret_cast<const float*>(lane)[k];
}

inline std::uint16_t narrow_bits(float x) {
  std::uint32_t bits;
  memcpy(&bits, &x, sizeof bits);
  if (x != x) return 0x7fc0;
  return static_cast<std::uint16_t>((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

inline void store_weight(float* to, float value, float) {
  *to = value;
}
inline void store_weight(Bf16* to, float value, float) {
  *to = {narrow_bits(value)};
}
template <class Row>
void store_weight(Int8<Row>* to, float value, float inverse) {
  *to = {static_cast<std::uint8_t>(__builtin_rintf(value * inverse) + 128.0F)};
}

// Position of element k within a step.
template <class W>
std::int64_t place_of(std::int64_t k) {
  if (Stored<W>::kStep != 4) return k;
  return k % 2 * 2 + k / 2;
}

// The symmetric scale of an output: its largest weight becomes 127.
inline float scale_of(const PackArgs& a, const char* lane) {
  float largest = 0.0F;
  for (std::int64_t k = 0; k < a.depth; ++k) {
    largest = most(largest, __builtin_fabsf(weight_at(a, lane, k)));
  }
  return largest / 127.0F;
}

template <class W>
void pack_panel(const PackArgs& a, std::int32_t panel) {
  constexpr int kStep = Stored<W>::kStep;
  const std::int64_t depth = (a.depth + kDepthUnit - 1) / kDepthUnit * kDepthUnit;
  W* const to = reinterpret_cast<W*>(a.weights) + panel * depth * kPanelOutputs;
  for (int lane = 0; lane < kPanelOutputs; ++lane) {
    const char* const from = lane_weights(a, panel, lane);
    float inverse = 1.0F;
    if constexpr (Stored<W>::kOutputScales) {
      const float scale = from == nullptr ? 0.0F : scale_of(a, from);
      a.scales[panel * kPanelOutputs + lane] = scale;
      inverse = scale > 0.0F ? 1.0F / scale : 0.0F;
    }
    const int vector = lane / Vec::kWidth, i = lane % Vec::kWidth;
    for (std::int64_t k = 0; k < depth; ++k) {
      const std::int64_t at =
          ((k / kStep) * 2 + vector) * Vec::kWidth * kStep + i * kStep + place_of<W>(k % kStep);
      store_weight(to + at, weight_at(a, from, k), inverse);
    }
  }
}

template <class W>
void pack(const PackArgs& a) {
  for (std::int32_t i = 0; i < a.num_panels; ++i) pack_panel<W>(a, a.first_panel + i);
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

inline float as_float(float x) {
  return x;
}
inline float as_float(Bf16 x) {
  return widened(x);
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
