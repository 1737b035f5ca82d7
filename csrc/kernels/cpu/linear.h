// Linear layers: y = x W^T with weights in float32, bfloat16 or int8, and sums in float32.
//
// Int8: x as int16 with a scale for each row and group of the depth, as integer products are two
// to a lane and need no conversion of the weights; a group's sum is exact.
//
// Outputs lie across the lanes, two vectors to a panel; the elements of x are broadcast. A panel
// is read once for each block of up to kLinearRows rows, as one stream, and widened in registers:
// with few rows the memory bus is the limit, with many the multipliers are. Within a panel, `kStep`
// successive elements of a lane's weights lie side by side (2 of bfloat16 and of int8), so that
// widening bfloat16 takes a shift or a mask and no shuffle.
//
// Where the processor multiplies pairs of bfloat16 (Vec::kDotsPairs), rows can be rounded to
// bfloat16 too: two successive elements then are one lane, as two of the weights are already, and
// an instruction adds both products.
//
// Every output is one sum in the order of the depth: it has the same bits whatever other rows are
// computed with it.
#pragma once

#include "kernel_common.h"

namespace vmserve::cpu {
namespace {

constexpr int kPanelOutputs = 2 * Vec::kWidth;

template <class W>
struct Stored;
template <>
struct Stored<float> {
  static constexpr int kStep = 1;
  static constexpr bool kShort = false, kPaired = false;
  template <int i>
  static Vec::R part(const float* from) {
    return Vec::load(from);
  }
};
template <>
struct Stored<Bf16> {
  static constexpr int kStep = 2;
  static constexpr bool kShort = false, kPaired = false;
  template <int i>
  static Vec::R part(const Bf16* from) {
    return Vec::template part<i>(from);
  }
};
template <>
struct Stored<std::int8_t> {
  static constexpr int kStep = 2;
  static constexpr bool kShort = true, kPaired = false;
};

// Weights of bfloat16 for rows of bfloat16.
struct PairedBf16 {
  std::uint16_t bits;
};
template <>
struct Stored<PairedBf16> {
  static constexpr int kStep = 2;
  static constexpr bool kShort = false, kPaired = true;
};

// Weights come from memory in the order in which they lie there, panel after panel: so far ahead
// they are asked for. One stream alone keeps the bus less than half busy.
constexpr int kWeightsAhead = 2048, kLine = 64;

template <int kRows, int kPanels>
struct Sums {
  Vec::R at[kPanels][2][kRows];
};

template <int kRows, int kPanels>
inline Sums<kRows, kPanels> no_sums() {
  Sums<kRows, kPanels> sums;
#pragma GCC unroll 8
  for (int p = 0; p < kPanels; ++p) {
#pragma GCC unroll 16
    for (int r = 0; r < kRows; ++r) sums.at[p][0][r] = sums.at[p][1][r] = Vec::zero();
  }
  return sums;
}

// Step i of kStep: one element of the depth.
template <class W, int kRows, int kPanels, int i>
inline void accumulate(const W* weights, std::int64_t panel_stride, const float* x,
                       Sums<kRows, kPanels>& sums) {
  constexpr int kStep = Stored<W>::kStep;
  if constexpr (i < kStep) {
    Vec::R w[kPanels][2];
#pragma GCC unroll 8
    for (int p = 0; p < kPanels; ++p) {
      const W* const from = weights + p * panel_stride;
      w[p][0] = Stored<W>::template part<i>(from);
      w[p][1] = Stored<W>::template part<i>(from + Vec::kWidth * kStep);
    }
#pragma GCC unroll 16
    for (int r = 0; r < kRows; ++r) {
      const Vec::R lanes = Vec::set(x[i * kRows + r]);
#pragma GCC unroll 8
      for (int p = 0; p < kPanels; ++p) {
        sums.at[p][0][r] = Vec::fma(lanes, w[p][0], sums.at[p][0][r]);
        sums.at[p][1][r] = Vec::fma(lanes, w[p][1], sums.at[p][1][r]);
      }
    }
    accumulate<W, kRows, kPanels, i + 1>(weights, panel_stride, x, sums);
  }
}

// A whole step of paired rows: two elements of the depth. `V` is `Vec`, where that has pairs.
template <class V, int kRows, int kPanels>
inline void accumulate_dots(const PairedBf16* weights, std::int64_t panel_stride, const float* x,
                            Sums<kRows, kPanels>& sums) {
  typename V::R w[kPanels][2];
#pragma GCC unroll 8
  for (int p = 0; p < kPanels; ++p) {
    const auto* const from = reinterpret_cast<const float*>(weights + p * panel_stride);
    w[p][0] = V::load(from);
    w[p][1] = V::load(from + V::kWidth);
  }
#pragma GCC unroll 16
  for (int r = 0; r < kRows; ++r) {
    const typename V::R lanes = V::set_pair(x + r);
#pragma GCC unroll 8
    for (int p = 0; p < kPanels; ++p) {
      sums.at[p][0][r] = V::dot_pairs(lanes, w[p][0], sums.at[p][0][r]);
      sums.at[p][1][r] = V::dot_pairs(lanes, w[p][1], sums.at[p][1][r]);
    }
  }
}

inline Vec::R silu(Vec::R x) {
  const Vec::R power = Vec::min(Vec::mul(x, Vec::set(-kLog2E)), Vec::set(126.0F));
  return Vec::div(x, Vec::add(Vec::set(1.0F), exp2(power)));
}

inline std::uint16_t narrow_bits(float x) {
  std::uint32_t bits;
  memcpy(&bits, &x, sizeof bits);
  if (x != x) return 0x7fc0;
  return static_cast<std::uint16_t>((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

// Where a block of packed rows begins, in floats.
inline std::int64_t block_at(std::int32_t first_row, std::int64_t depth) {
  return static_cast<std::int64_t>(first_row) * depth;
}

// Element k of row r of a block of `rows` packed rows.
inline void put_packed(float* block, std::int64_t k, std::int64_t r, std::int64_t rows, bool paired,
                       float x) {
  if (paired) {
    const std::uint16_t bits = narrow_bits(x);
    memcpy(reinterpret_cast<char*>(block + (k / 2) * rows + r) + 2 * (k % 2), &bits, sizeof bits);
  } else {
    block[k * rows + r] = x;
  }
}

template <int kRows>
void gate(const LinearArgs& a, std::int32_t first_row, std::int32_t panel,
          Vec::R (&sums)[2][kRows]) {
  const std::int32_t first = panel * Vec::kWidth;
  const int count = least(Vec::kWidth, a.num_outputs - first);
  float* const to = static_cast<float*>(a.out) + block_at(first_row, a.out_stride);
  const bool as_rows = a.epilogue == Epilogue::kGateRows;
  float lanes[Vec::kWidth];
#pragma GCC unroll 16
  for (int r = 0; r < kRows; ++r) {
    Vec::store(lanes, Vec::mul(silu(sums[0][r]), sums[1][r]));
    if (as_rows) {
      memcpy(to + r * a.out_stride + first, lanes, static_cast<size_t>(count) * sizeof(float));
    } else {
      for (int i = 0; i < count; ++i) put_packed(to, first + i, r, kRows, a.pairs_out, lanes[i]);
    }
  }
  if (as_rows) return;
  // The depth of what comes next is padded.
  const bool last = first + count == a.num_outputs;
  for (std::int64_t k = a.num_outputs; last && k < a.out_stride; ++k) {
    for (int r = 0; r < kRows; ++r) put_packed(to, k, r, kRows, a.pairs_out, 0.0F);
  }
}

template <int kRows>
void finish(const LinearArgs& a, std::int32_t first_row, std::int32_t panel,
            Vec::R (&sums)[2][kRows]) {
  const bool gated = a.epilogue == Epilogue::kGate || a.epilogue == Epilogue::kGateRows;
  const std::int32_t first = panel * kPanelOutputs;
  const int packed_outputs = gated ? 2 * a.num_outputs : a.num_outputs;
  const int count = least(kPanelOutputs, packed_outputs - first);
#pragma GCC unroll 2
  for (int v = 0; v < 2; ++v) {
    // Scales and biases are in the order of the lanes, and as long as all the panels.
    const std::int32_t lane = first + v * Vec::kWidth;
#pragma GCC unroll 16
    for (int r = 0; r < kRows; ++r) {
      if (a.scales != nullptr) sums[v][r] = Vec::mul(sums[v][r], Vec::load(a.scales + lane));
      if (a.bias != nullptr) sums[v][r] = Vec::add(sums[v][r], Vec::load(a.bias + lane));
    }
  }
  if (gated) {
    gate<kRows>(a, first_row, panel, sums);
    return;
  }
#pragma GCC unroll 16
  for (int r = 0; r < kRows; ++r) {
    const std::int64_t at = (first_row + r) * a.out_stride + first;
    if (a.epilogue == Epilogue::kNarrow || count < kPanelOutputs) {
      float lanes[kPanelOutputs];
      Vec::store(lanes, sums[0][r]);
      Vec::store(lanes + Vec::kWidth, sums[1][r]);
      for (int i = 0; i < count; ++i) {
        if (a.epilogue == Epilogue::kNarrow) {
          static_cast<Bf16*>(a.out)[at + i] = {narrow_bits(lanes[i])};
        } else {
          float& to = static_cast<float*>(a.out)[at + i];
          to = a.epilogue == Epilogue::kAdd ? to + lanes[i] : lanes[i];
        }
      }
      continue;
    }
    float* const to = static_cast<float*>(a.out) + at;
    const bool adds = a.epilogue == Epilogue::kAdd;
    const Vec::R low = adds ? Vec::add(Vec::load(to), sums[0][r]) : sums[0][r];
    const Vec::R high = adds ? Vec::add(Vec::load(to + Vec::kWidth), sums[1][r]) : sums[1][r];
    Vec::store(to, low);
    Vec::store(to + Vec::kWidth, high);
  }
}

// Two elements of the depth.
template <int kRows, int kPanels>
inline void accumulate_shorts(const std::int8_t* weights, std::int64_t panel_stride,
                              const std::int16_t* x, Vec::I (&sums)[kPanels][2][kRows]) {
  Vec::S w[kPanels][2];
#pragma GCC unroll 8
  for (int p = 0; p < kPanels; ++p) {
    w[p][0] = Vec::widen_bytes(weights + p * panel_stride);
    w[p][1] = Vec::widen_bytes(weights + p * panel_stride + 2 * Vec::kWidth);
  }
#pragma GCC unroll 16
  for (int r = 0; r < kRows; ++r) {
    const Vec::S pair = Vec::set_pair(x + 2 * r);
#pragma GCC unroll 8
    for (int p = 0; p < kPanels; ++p) {
      sums[p][0][r] = Vec::add_products(sums[p][0][r], pair, w[p][0]);
      sums[p][1][r] = Vec::add_products(sums[p][1][r], pair, w[p][1]);
    }
  }
}

template <int kPanels>
inline void prefetch_weights(const void* weights, std::int64_t panel_bytes, int step_bytes) {
#pragma GCC unroll 8
  for (int p = 0; p < kPanels; ++p) {
#pragma GCC unroll 4
    for (int line = 0; line < step_bytes; line += kLine) {
      __builtin_prefetch(static_cast<const char*>(weights) + p * panel_bytes + kWeightsAhead +
                         line);
    }
  }
}

template <int kRows, int kPanels>
void short_panels(const LinearArgs& a, const std::int8_t* weights, std::int32_t first_row,
                  std::int32_t panel) {
  const std::int64_t panel_stride = a.depth * kPanelOutputs, groups = num_groups(a.depth);
  const std::int16_t* x = a.short_rows + block_at(first_row, a.depth);
  Sums<kRows, kPanels> sums = no_sums<kRows, kPanels>();
  for (std::int64_t g = 0; g < groups; ++g) {
    Vec::I whole[kPanels][2][kRows];
#pragma GCC unroll 8
    for (int p = 0; p < kPanels; ++p) {
#pragma GCC unroll 16
      for (int r = 0; r < kRows; ++r) whole[p][0][r] = whole[p][1][r] = Vec::zero_int();
    }
    const std::int64_t count = least(kGroupDepth, a.depth - g * kGroupDepth);
    // Two pairs at a time, as a line of weights has them.
    for (std::int64_t k = 0; k < count; k += 4) {
      accumulate_shorts<kRows, kPanels>(weights, panel_stride, x, whole);
      accumulate_shorts<kRows, kPanels>(weights + 2 * kPanelOutputs, panel_stride, x + 2 * kRows,
                                        whole);
      prefetch_weights<kPanels>(weights, panel_stride, 4 * kPanelOutputs);
      weights += 4 * kPanelOutputs;
      x += 4 * kRows;
    }
#pragma GCC unroll 16
    for (int r = 0; r < kRows; ++r) {
      const Vec::R scale = Vec::set(a.row_scales[(first_row + r) * groups + g]);
#pragma GCC unroll 8
      for (int p = 0; p < kPanels; ++p) {
        Vec::R(&at)[2][kRows] = sums.at[p];
        at[0][r] = Vec::fma(Vec::to_float(whole[p][0][r]), scale, at[0][r]);
        at[1][r] = Vec::fma(Vec::to_float(whole[p][1][r]), scale, at[1][r]);
      }
    }
  }
#pragma GCC unroll 8
  for (int p = 0; p < kPanels; ++p) finish<kRows>(a, first_row, panel + p, sums.at[p]);
}

// `weights`: of `panel` and those after it.
template <class W, int kRows, int kPanels>
void float_panels(const LinearArgs& a, const W* weights, std::int32_t first_row,
                  std::int32_t panel) {
  constexpr int kStep = Stored<W>::kStep;
  constexpr int kStepBytes = kStep * kPanelOutputs * static_cast<int>(sizeof(W));
  const std::int64_t panel_stride = a.depth * kPanelOutputs;
  const float* x = a.rows + block_at(first_row, a.depth);
  Sums<kRows, kPanels> sums = no_sums<kRows, kPanels>();
  for (std::int64_t k = 0; k < a.depth; k += kStep) {
    if constexpr (Stored<W>::kPaired) {
      accumulate_dots<Vec, kRows, kPanels>(weights, panel_stride, x, sums);
      x += kRows;
    } else {
      accumulate<W, kRows, kPanels, 0>(weights, panel_stride, x, sums);
      x += kStep * kRows;
    }
    prefetch_weights<kPanels>(weights, panel_stride * static_cast<std::int64_t>(sizeof(W)),
                              kStepBytes);
    weights += kStep * kPanelOutputs;
  }
#pragma GCC unroll 8
  for (int p = 0; p < kPanels; ++p) finish<kRows>(a, first_row, panel + p, sums.at[p]);
}

template <class W, int kRows, int kPanels>
void panels(const LinearArgs& a, const W* weights, std::int32_t first_row, std::int32_t panel) {
  if constexpr (Stored<W>::kShort) {
    short_panels<kRows, kPanels>(a, weights, first_row, panel);
  } else {
    float_panels<W, kRows, kPanels>(a, weights, first_row, panel);
  }
}

// With few rows several panels at a time: sums that do not wait for one another.
constexpr int panels_together(int rows) {
  if (Vec::kLinearRows < 6) return 1;  // plain C++: no registers to fill
  return 4 * rows <= Vec::kLinearRows + 2 ? 4 : 2 * rows <= Vec::kLinearRows ? 2 : 1;
}

// Rows of the block that begins where so many are left: the most of a few sizes, so that there are
// few versions of the product.
inline std::int32_t block_rows(std::int32_t rows_left) {
  if (rows_left >= Vec::kLinearRows) return Vec::kLinearRows;
  std::int32_t rows = 1;
  while (2 * rows <= rows_left) rows *= 2;
  return rows;
}

constexpr int next_smaller(int rows) {
  int size = 1;
  while (2 * size < rows) size *= 2;
  return size;
}

template <class W, int kRows>
void row_block(const LinearArgs& a, const W* weights, std::int32_t first_row, std::int32_t rows,
               std::int32_t panel, std::int32_t num_panels) {
  if (rows != kRows) {
    if constexpr (kRows > 1) {
      row_block<W, next_smaller(kRows)>(a, weights, first_row, rows, panel, num_panels);
    }
    return;
  }
  constexpr int kTogether = panels_together(kRows);
  const std::int64_t panel_stride = a.depth * kPanelOutputs;
  std::int32_t i = 0;
  for (; i + kTogether <= num_panels; i += kTogether) {
    panels<W, kRows, kTogether>(a, weights + i * panel_stride, first_row, panel + i);
  }
  if constexpr (kTogether > 1) {
    for (; i < num_panels; ++i) {
      panels<W, kRows, 1>(a, weights + i * panel_stride, first_row, panel + i);
    }
  }
}

template <class W>
void all_rows(const LinearArgs& a, const W* weights, std::int32_t panel, std::int32_t num_panels) {
  for (std::int32_t row = 0; row < a.num_rows;) {
    const std::int32_t rows = block_rows(a.num_rows - row);
    row_block<W, Vec::kLinearRows>(a, weights, row, rows, panel, num_panels);
    row += rows;
  }
}

template <class W, int i>
inline void widen_step(const W* from, float* to) {
  if constexpr (i < Stored<W>::kStep) {
    Vec::store(to, Stored<W>::template part<i>(from));
    Vec::store(to + Vec::kWidth,
               Stored<W>::template part<i>(from + Vec::kWidth * Stored<W>::kStep));
    widen_step<W, i + 1>(from, to + kPanelOutputs);
  }
}

// With many rows the weights are widened once for all of them, into what stays in the cache.
template <class W>
void widened_rows(const LinearArgs& a) {
  constexpr int kStep = Stored<W>::kStep;
  const std::int64_t panel_stride = a.depth * kPanelOutputs;
  const W* from = reinterpret_cast<const W*>(a.weights) + a.first_panel * panel_stride;
  const auto fitting = static_cast<std::int32_t>(a.scratch_floats / panel_stride);
  for (std::int32_t i = 0; i < a.num_panels; i += fitting) {
    const std::int32_t count = least(fitting, a.num_panels - i);
    float* to = a.scratch;
    for (std::int64_t k = 0; k < count * a.depth; k += kStep) {
      widen_step<W, 0>(from, to);
      from += kStep * kPanelOutputs;
      to += kStep * kPanelOutputs;
    }
    all_rows<float>(a, a.scratch, a.first_panel + i, count);
  }
}

template <class W>
void linear(const LinearArgs& a) {
  if constexpr (Stored<W>::kStep > 1 && !Stored<W>::kShort && !Stored<W>::kPaired) {
    const bool fits = a.scratch_floats >= a.depth * kPanelOutputs;
    if (a.num_rows >= 2 * Vec::kLinearRows && fits) {
      widened_rows<W>(a);
      return;
    }
  }
  const W* const weights =
      reinterpret_cast<const W*>(a.weights) + a.first_panel * a.depth * kPanelOutputs;
  all_rows<W>(a, weights, a.first_panel, a.num_panels);
}

// -- packing ---------------------------------------------------------------------------------

inline float widened(Bf16 value) {
  const std::uint32_t bits = static_cast<std::uint32_t>(value.bits) << 16;
  float x;
  memcpy(&x, &bits, sizeof x);
  return x;
}

// The weights of one lane, or null where there is no such output.
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

inline void store_weight(float* to, float value, float) {
  *to = value;
}
inline void store_weight(Bf16* to, float value, float) {
  *to = {narrow_bits(value)};
}
inline void store_weight(std::int8_t* to, float value, float inverse) {
  *to = static_cast<std::int8_t>(__builtin_rintf(value * inverse));
}

// Symmetric, a scale for each output: the largest weight becomes 127.
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
    if (a.type == WeightType::kInt8) {
      const float scale = from == nullptr ? 0.0F : scale_of(a, from);
      a.scales[panel * kPanelOutputs + lane] = scale;
      inverse = scale > 0.0F ? 1.0F / scale : 0.0F;
    }
    const int vector = lane / Vec::kWidth, i = lane % Vec::kWidth;
    for (std::int64_t k = 0; k < depth; ++k) {
      const std::int64_t at =
          ((k / kStep) * 2 + vector) * Vec::kWidth * kStep + i * kStep + k % kStep;
      store_weight(to + at, weight_at(a, from, k), inverse);
    }
  }
}

inline void pack(const PackArgs& a) {
  for (std::int32_t panel = a.first_panel; panel < a.first_panel + a.num_panels; ++panel) {
    switch (a.type) {
      case WeightType::kFloat32:
        pack_panel<float>(a, panel);
        break;
      case WeightType::kBFloat16:
        pack_panel<Bf16>(a, panel);
        break;
      case WeightType::kInt8:
        pack_panel<std::int8_t>(a, panel);
        break;
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

inline float as_float(float x) {
  return x;
}
inline float as_float(Bf16 x) {
  return widened(x);
}

// Rounds to the nearest of 65,535 steps between the largest number and its negative.
// values: as many as whole vectors take, zeros behind the last.
inline float to_shorts(const float* values, std::int64_t count, std::int16_t* to) {
  Vec::R largest = Vec::zero(), sound = Vec::zero();
  for (std::int64_t k = 0; k < count; k += Vec::kWidth) {
    const Vec::R x = Vec::load(values + k);
    largest = Vec::max(Vec::abs(x), largest);
    sound = Vec::add(sound, Vec::sub(x, x));  // of infinities and NaN: NaN
  }
  const float highest = Vec::reduce_max(largest);
  const Vec::R inverse = Vec::set(highest > 1.0e-30F ? 32767.0F / highest : 0.0F);
  const Vec::R limit = Vec::set(32767.0F), lowest = Vec::set(-32767.0F);
  for (std::int64_t k = 0; k < count; k += Vec::kWidth) {
    const Vec::R x = Vec::mul(Vec::load(values + k), inverse);
    Vec::store_shorts(to + k, Vec::min(Vec::max(x, lowest), limit));
  }
  return highest / 32767.0F + Vec::reduce_add(sound);
}

template <class T>
void pack_short_rows(const PackRowsArgs& a) {
  const std::int64_t padded_depth = (a.depth + kDepthUnit - 1) / kDepthUnit * kDepthUnit;
  for (int r = 0; r < a.num_rows; ++r) {
    const T* const row = static_cast<const T*>(a.rows) + r * a.row_stride;
    const float factor = a.norm == nullptr ? 1.0F : factor_of(row, a.depth, a.eps);
    for (std::int64_t first = 0, g = 0; first < padded_depth; first += kGroupDepth, ++g) {
      const std::int64_t count = least(kGroupDepth, a.depth - first);
      const std::int64_t kept = least(kGroupDepth, padded_depth - first);
      float values[kGroupDepth];
      std::int16_t shorts[kGroupDepth];
      for (std::int64_t k = 0; k < count; ++k) values[k] = as_float(row[first + k]);
      for (std::int64_t k = 0; k < count && a.norm != nullptr; ++k) {
        values[k] = values[k] * factor * a.norm[first + k];
      }
      const std::int64_t whole = (kept + Vec::kWidth - 1) / Vec::kWidth * Vec::kWidth;
      for (std::int64_t k = count; k < whole; ++k) values[k] = 0.0F;
      a.scales[r * num_groups(padded_depth) + g] = to_shorts(values, whole, shorts);
      std::int16_t* const to = a.short_block + first * a.num_rows + 2 * r;
      for (std::int64_t k = 0; k < kept; k += 2) {
        memcpy(to + k * a.num_rows, shorts + k, 2 * sizeof(std::int16_t));
      }
    }
  }
}

template <class T, bool kPaired>
void pack_rows_of(const PackRowsArgs& a) {
  if (a.short_block != nullptr) {
    pack_short_rows<T>(a);
    return;
  }
  const std::int64_t padded_depth = (a.depth + kDepthUnit - 1) / kDepthUnit * kDepthUnit;
  for (int r = 0; r < a.num_rows; ++r) {
    const T* const row = static_cast<const T*>(a.rows) + r * a.row_stride;
    const auto put = [&](std::int64_t k, float x) {
      put_packed(a.block, k, r, a.num_rows, kPaired, x);
    };
    if (a.norm == nullptr) {
      for (std::int64_t k = 0; k < a.depth; ++k) put(k, as_float(row[k]));
    } else {
      const float factor = factor_of(row, a.depth, a.eps);
      for (std::int64_t k = 0; k < a.depth; ++k) put(k, as_float(row[k]) * factor * a.norm[k]);
    }
    for (std::int64_t k = a.depth; k < padded_depth; ++k) put(k, 0.0F);
  }
}

inline void pack_rows(const PackRowsArgs& a) {
  if (a.paired) {
    a.from_bf16 ? pack_rows_of<Bf16, true>(a) : pack_rows_of<float, true>(a);
  } else {
    a.from_bf16 ? pack_rows_of<Bf16, false>(a) : pack_rows_of<float, false>(a);
  }
}

constexpr LinearKernels linear_kernels() {
  void (*pairs)(const LinearArgs&) = nullptr;
  if constexpr (Vec::kDotsPairs) pairs = &linear<PairedBf16>;
  return {kPanelOutputs, &block_rows, {&linear<float>, &linear<Bf16>, &linear<std::int8_t>},
          pairs,         &pack,       &pack_rows};
}

}  // namespace
}  // namespace vmserve::cpu
