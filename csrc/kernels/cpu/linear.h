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
// Packed rows lie in chunks of 16 bytes, those of a block's rows side by side: a vector of a row's
// elements is stored as it is, and what is broadcast lies at constant offsets from one pointer.
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

// A word of packed rows is what a lane is multiplied by: a float, or a pair of shorter elements.
// kWordDepth: elements of the depth in it.
constexpr int kChunkWords = kChunkBytes / 4;

template <class W>
struct Stored;
template <>
struct Stored<float> {
  static constexpr int kStep = 1, kWordDepth = 1;
  static constexpr bool kShort = false, kPaired = false;
  template <int i>
  static Vec::R part(const float* from) {
    return Vec::load(from);
  }
};
template <>
struct Stored<Bf16> {
  static constexpr int kStep = 2, kWordDepth = 1;
  static constexpr bool kShort = false, kPaired = false;
  template <int i>
  static Vec::R part(const Bf16* from) {
    return Vec::template part<i>(from);
  }
};
template <>
struct Stored<std::int8_t> {
  static constexpr int kStep = 2, kWordDepth = 2;
  static constexpr bool kShort = true, kPaired = false;
};

// Weights of bfloat16 for rows of bfloat16.
struct PairedBf16 {
  std::uint16_t bits;
};
template <>
struct Stored<PairedBf16> {
  static constexpr int kStep = 2, kWordDepth = 2;
  static constexpr bool kShort = false, kPaired = true;
};

// Weights come from memory in the order in which they lie there, panel after panel: so many bytes
// ahead they are asked for, twice as many where one panel is read alone. One stream without that
// keeps the bus less than half busy.
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

template <int kPanels, int kBytes>
inline void prefetch_weights(const void* weights, std::int64_t panel_bytes) {
#pragma GCC unroll 8
  for (int p = 0; p < kPanels; ++p) {
#pragma GCC unroll 4
    for (int line = 0; line < kBytes; line += kLine) {
      __builtin_prefetch(static_cast<const char*>(weights) + p * panel_bytes +
                         (kPanels == 1 ? 2 : 1) * kWeightsAhead + line);
    }
  }
}

// Word i of a chunk and those after it.
template <class W, int kRows, int kPanels, int i = 0>
inline void accumulate(const W* weights, std::int64_t panel_stride, const float* x,
                       Sums<kRows, kPanels>& sums) {
  constexpr int kStep = Stored<W>::kStep;
  Vec::R w[kPanels][2];
#pragma GCC unroll 8
  for (int p = 0; p < kPanels; ++p) {
    const W* const from = weights + p * panel_stride + i / kStep * kStep * kPanelOutputs;
    w[p][0] = Stored<W>::template part<i % kStep>(from);
    w[p][1] = Stored<W>::template part<i % kStep>(from + Vec::kWidth * kStep);
  }
#pragma GCC unroll 16
  for (int r = 0; r < kRows; ++r) {
    const Vec::R lanes = Vec::set(x[r * kChunkWords + i]);
#pragma GCC unroll 8
    for (int p = 0; p < kPanels; ++p) {
      sums.at[p][0][r] = Vec::fma(lanes, w[p][0], sums.at[p][0][r]);
      sums.at[p][1][r] = Vec::fma(lanes, w[p][1], sums.at[p][1][r]);
    }
  }
  prefetch_weights<kPanels, kPanelOutputs* static_cast<int>(sizeof(W))>(
      weights + i * kPanelOutputs, panel_stride * static_cast<std::int64_t>(sizeof(W)));
  if constexpr (i + 1 < kChunkWords) {
    accumulate<W, kRows, kPanels, i + 1>(weights, panel_stride, x, sums);
  }
}

// The same of paired rows. `V` is `Vec`, where that has pairs.
template <class V, int kRows, int kPanels>
inline void accumulate_dots(const PairedBf16* weights, std::int64_t panel_stride, const float* x,
                            Sums<kRows, kPanels>& sums) {
#pragma GCC unroll 8
  for (int i = 0; i < kChunkWords; ++i) {
    typename V::R w[kPanels][2];
#pragma GCC unroll 8
    for (int p = 0; p < kPanels; ++p) {
      const auto* const from = reinterpret_cast<const float*>(weights + p * panel_stride);
      w[p][0] = V::load(from);
      w[p][1] = V::load(from + V::kWidth);
    }
#pragma GCC unroll 16
    for (int r = 0; r < kRows; ++r) {
      const typename V::R lanes = V::set_pair(x + r * kChunkWords + i);
#pragma GCC unroll 8
      for (int p = 0; p < kPanels; ++p) {
        sums.at[p][0][r] = V::dot_pairs(lanes, w[p][0], sums.at[p][0][r]);
        sums.at[p][1][r] = V::dot_pairs(lanes, w[p][1], sums.at[p][1][r]);
      }
    }
    prefetch_weights<kPanels, 4 * kPanelOutputs>(weights, 2 * panel_stride);
    weights += 2 * kPanelOutputs;
  }
}

// The first `count` lanes, zeros behind them.
inline Vec::R load_first(const float* from, int count) {
  if (count == Vec::kWidth) return Vec::load(from);
  float lanes[Vec::kWidth] = {};
  memcpy(lanes, from, static_cast<size_t>(count) * sizeof(float));
  return Vec::load(lanes);
}

template <class T>
inline void store_first(T* to, int count, Vec::R x) {
  if (count == Vec::kWidth) {
    Vec::store(to, x);
    return;
  }
  T lanes[Vec::kWidth];
  Vec::store(lanes, x);
  memcpy(to, lanes, static_cast<size_t>(count) * sizeof(T));
}

inline Vec::R silu(Vec::R x) {
  const Vec::R power = Vec::min(Vec::mul(x, Vec::set(-kLog2E)), Vec::set(126.0F));
  return Vec::div(x, Vec::add(Vec::set(1.0F), exp2(power)));
}

// Where a block of packed rows begins, in floats.
inline std::int64_t block_at(std::int32_t first_row, std::int64_t depth) {
  return static_cast<std::int64_t>(first_row) * depth;
}

// Elements of a row, from `first` on, into row r of a block of `rows` packed rows: whole chunks.
template <class T>
inline void put_packed(T* block, std::int64_t first, std::int64_t r, std::int64_t rows,
                       const T* elements, std::int64_t count) {
  constexpr int kChunk = kChunkBytes / static_cast<int>(sizeof(T));
  T* to = block + first * rows + r * kChunk;
  for (std::int64_t k = 0; k < count; k += kChunk, to += rows * kChunk) {
    memcpy(to, elements + k, kChunkBytes);
  }
}

template <class T, int kRows>
void put_gated(const LinearArgs& a, std::int32_t first_row, std::int32_t first,
               const Vec::R (&gated)[kRows]) {
  T* const block =
      reinterpret_cast<T*>(static_cast<float*>(a.out) + block_at(first_row, a.out_stride));
  const int count = least(Vec::kWidth, a.num_outputs - first);
  // The depth of what comes next is padded.
  const int padded_count = static_cast<int>(least<std::int64_t>(Vec::kWidth, a.out_stride - first));
#pragma GCC unroll 16
  for (int r = 0; r < kRows; ++r) {
    T lanes[Vec::kWidth];
    Vec::store(lanes, gated[r]);
    for (int i = count; i < Vec::kWidth; ++i) lanes[i] = T{};
    put_packed(block, first, r, kRows, lanes, padded_count);
  }
}

template <int kRows>
void gate(const LinearArgs& a, std::int32_t first_row, std::int32_t panel,
          Vec::R (&sums)[2][kRows]) {
  const std::int32_t first = panel * Vec::kWidth;
  Vec::R gated[kRows];
#pragma GCC unroll 16
  for (int r = 0; r < kRows; ++r) gated[r] = Vec::mul(silu(sums[0][r]), sums[1][r]);
  if (a.epilogue == Epilogue::kGateRows) {
    const int count = least(Vec::kWidth, a.num_outputs - first);
    float* const to = static_cast<float*>(a.out) + block_at(first_row, a.out_stride) + first;
    for (int r = 0; r < kRows; ++r) store_first(to + r * a.out_stride, count, gated[r]);
  } else if (a.pairs_out) {
    put_gated<Bf16>(a, first_row, first, gated);
  } else {
    put_gated<float>(a, first_row, first, gated);
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
  const int low = least(count, Vec::kWidth), high = most(0, count - Vec::kWidth);
  for (int r = 0; r < kRows; ++r) {
    const std::int64_t at = (first_row + r) * a.out_stride + first;
    if (a.epilogue == Epilogue::kNarrow) {
      Bf16* const to = static_cast<Bf16*>(a.out) + at;
      store_first(to, low, sums[0][r]);
      store_first(to + Vec::kWidth, high, sums[1][r]);
      continue;
    }
    float* const to = static_cast<float*>(a.out) + at;
    if (a.epilogue == Epilogue::kAdd) {
      sums[0][r] = Vec::add(load_first(to, low), sums[0][r]);
      sums[1][r] = Vec::add(load_first(to + Vec::kWidth, high), sums[1][r]);
    }
    store_first(to, low, sums[0][r]);
    store_first(to + Vec::kWidth, high, sums[1][r]);
  }
}

template <int kRows, int kPanels>
struct WholeSums {
  Vec::I at[kPanels][2][kRows];
};

// One group of the depth, or what there is of it.
template <int kRows, int kPanels>
inline WholeSums<kRows, kPanels> group_sums(const std::int8_t* weights, std::int64_t panel_stride,
                                            const std::int16_t* x, std::int64_t count) {
  WholeSums<kRows, kPanels> sums;
#pragma GCC unroll 8
  for (int p = 0; p < kPanels; ++p) {
#pragma GCC unroll 16
    for (int r = 0; r < kRows; ++r) sums.at[p][0][r] = sums.at[p][1][r] = Vec::zero_int();
  }
  for (std::int64_t k = 0; k < count; k += 2 * kChunkWords) {
// Not unrolled: GCC 12 adds the words' products up before it adds them, and has no registers for
// it.
#pragma GCC unroll 1
    for (int i = 0; i < kChunkWords; ++i) {
      Vec::S w[kPanels][2];
#pragma GCC unroll 8
      for (int p = 0; p < kPanels; ++p) {
        w[p][0] = Vec::widen_bytes(weights + p * panel_stride);
        w[p][1] = Vec::widen_bytes(weights + p * panel_stride + 2 * Vec::kWidth);
      }
#pragma GCC unroll 16
      for (int r = 0; r < kRows; ++r) {
        const Vec::S pair = Vec::set_pair(x + 2 * (r * kChunkWords + i));
#pragma GCC unroll 8
        for (int p = 0; p < kPanels; ++p) {
          sums.at[p][0][r] = Vec::add_products(sums.at[p][0][r], pair, w[p][0]);
          sums.at[p][1][r] = Vec::add_products(sums.at[p][1][r], pair, w[p][1]);
        }
      }
      prefetch_weights<kPanels, 2 * kPanelOutputs>(weights, panel_stride);
      weights += 2 * kPanelOutputs;
    }
    x += 2 * kChunkWords * kRows;
  }
  return sums;
}

template <int kRows, int kPanels>
void short_panels(const LinearArgs& a, const std::int8_t* weights, std::int32_t first_row,
                  std::int32_t panel) {
  const std::int64_t panel_stride = a.depth * kPanelOutputs, groups = num_groups(a.depth);
  const std::int16_t* const x = a.short_rows + block_at(first_row, a.depth);
  Sums<kRows, kPanels> sums = no_sums<kRows, kPanels>();
  for (std::int64_t g = 0; g < groups; ++g) {
    const std::int64_t first = g * kGroupDepth, count = least(kGroupDepth, a.depth - first);
    const WholeSums<kRows, kPanels> whole = group_sums<kRows, kPanels>(
        weights + first * kPanelOutputs, panel_stride, x + first * kRows, count);
#pragma GCC unroll 16
    for (int r = 0; r < kRows; ++r) {
      const Vec::R scale = Vec::set(a.row_scales[(first_row + r) * groups + g]);
#pragma GCC unroll 8
      for (int p = 0; p < kPanels; ++p) {
        Vec::R(&at)[2][kRows] = sums.at[p];
        at[0][r] = Vec::fma(Vec::to_float(whole.at[p][0][r]), scale, at[0][r]);
        at[1][r] = Vec::fma(Vec::to_float(whole.at[p][1][r]), scale, at[1][r]);
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
  constexpr int kChunkDepth = kChunkWords * Stored<W>::kWordDepth;
  const std::int64_t panel_stride = a.depth * kPanelOutputs;
  const float* x = a.rows + block_at(first_row, a.depth);
  Sums<kRows, kPanels> sums = no_sums<kRows, kPanels>();
  for (std::int64_t k = 0; k < a.depth; k += kChunkDepth) {
    if constexpr (Stored<W>::kPaired) {
      accumulate_dots<Vec, kRows, kPanels>(weights, panel_stride, x, sums);
    } else {
      accumulate<W, kRows, kPanels>(weights, panel_stride, x, sums);
    }
    weights += kChunkDepth * kPanelOutputs;
    x += kChunkWords * kRows;
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

// Rows of the block that begins where so many are left. The first block takes the most: weights
// come from memory while it is computed.
inline std::int32_t block_rows(std::int32_t rows_left) {
  return least(rows_left, std::int32_t{Vec::kLinearRows});
}

template <class W, int kRows>
void row_block(const LinearArgs& a, const W* weights, std::int32_t first_row, std::int32_t rows,
               std::int32_t panel, std::int32_t num_panels) {
  if (rows != kRows) {
    if constexpr (kRows > 1) {
      row_block<W, kRows - 1>(a, weights, first_row, rows, panel, num_panels);
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

// Twelve rows share what widens a vector in registers, and read half as much.
constexpr bool kWidensOnce = Vec::kLinearRows < 12;

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
  if constexpr (kWidensOnce && Stored<W>::kStep > Stored<W>::kWordDepth) {
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

// `count` elements of a row from `first` on, normalised where there is a norm; zeros up to a whole
// vector.
template <class T>
void take_row(const PackRowsArgs& a, const T* row, float factor, std::int64_t first,
              std::int64_t count, float* values) {
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
  for (; k % Vec::kWidth != 0; ++k) values[k] = 0.0F;
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
void pack_row(const PackRowsArgs& a, std::int64_t r) {
  const T* const row = static_cast<const T*>(a.rows) + r * a.row_stride;
  const float factor = a.norm == nullptr ? 1.0F : factor_of(row, a.depth, a.eps);
  const std::int64_t padded_depth = (a.depth + kDepthUnit - 1) / kDepthUnit * kDepthUnit;
  for (std::int64_t first = 0; first < padded_depth; first += kGroupDepth) {
    const std::int64_t kept = least(kGroupDepth, padded_depth - first);
    float values[kGroupDepth];
    take_row(a, row, factor, first, least(kGroupDepth, a.depth - first), values);
    if (a.short_block != nullptr) {
      std::int16_t shorts[kGroupDepth];
      a.scales[r * num_groups(padded_depth) + first / kGroupDepth] =
          to_shorts(values, kept, shorts);
      put_packed(a.short_block, first, r, a.num_rows, shorts, kept);
    } else if (a.paired) {
      Bf16 narrow[kGroupDepth];
      for (std::int64_t k = 0; k < kept; k += Vec::kWidth) {
        Vec::store(narrow + k, Vec::load(values + k));
      }
      put_packed(reinterpret_cast<Bf16*>(a.block), first, r, a.num_rows, narrow, kept);
    } else {
      put_packed(a.block, first, r, a.num_rows, values, kept);
    }
  }
}

inline void pack_rows(const PackRowsArgs& a) {
  for (int r = 0; r < a.num_rows; ++r) a.from_bf16 ? pack_row<Bf16>(a, r) : pack_row<float>(a, r);
}

constexpr LinearKernels linear_kernels() {
  void (*pairs)(const LinearArgs&) = nullptr;
  if constexpr (Vec::kDotsPairs) pairs = &linear<PairedBf16>;
  return {kPanelOutputs, &block_rows, {&linear<float>, &linear<Bf16>, &linear<std::int8_t>},
          pairs,         &pack,       &pack_rows};
}

}  // namespace
}  // namespace vmserve::cpu
