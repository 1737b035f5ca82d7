// The layouts of weights and rows, and the epilogues, of all linear layers.
//
// Outputs lie across the lanes, two vectors to a panel; elements of x are broadcast. A panel is
// read once for each block of up to kLinearRows rows, as one stream, and widened in registers. Few
// rows are bound by memory bandwidth, many by arithmetic. Within a panel, `kStep` successive
// elements of a lane's weights are adjacent, so that widening takes shifts and masks but no
// shuffles.
//
// Packed rows are cut into chunks of 16 bytes; chunks of a block's rows are adjacent. So a vector
// of a row's elements is stored unchanged, and broadcasts read at constant offsets from one
// pointer.
#pragma once

#include "kernel_common.h"

namespace vmserve::cpu {
namespace {

constexpr int kPanelOutputs = 2 * Vec::kWidth;

// A chunk has words of 4 bytes, which a lane is multiplied by: a float, or several shorter
// elements.
constexpr int kChunkWords = kChunkBytes / 4;

// How the weights of a form are stored. Row: element of the rows they are multiplied by; kStep;
// kOutputScales: LinearForm::output_scales.
template <class W>
struct Stored;

template <class Row>
constexpr RowType kRowType = kNumRowTypes;
template <>
constexpr RowType kRowType<float> = kRowsFloat32;
template <>
constexpr RowType kRowType<Bf16> = kRowsBFloat16;
template <>
constexpr RowType kRowType<std::int16_t> = kRowsInt16;
template <>
constexpr RowType kRowType<std::int8_t> = kRowsInt8;

template <class Row>
constexpr std::int64_t kGroupDepth = kRowFormats[kRowType<Row>].group_depth;

// Elements of the depth in a word of the rows.
template <class W>
constexpr int kWordDepth = 4 / static_cast<int>(sizeof(typename Stored<W>::Row));

template <class W>
std::int64_t panel_bytes(std::int64_t depth, ScaleFormat) {
  return depth * kPanelOutputs * static_cast<std::int64_t>(sizeof(W));
}

// Prefetch distance of weights, which are read in memory order; twice that if a single panel is
// read. Without prefetching, one stream uses less than half of the memory bandwidth.
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

// Loads the first `count` lanes and zeros after them.
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

inline Vec::R clamped(const Gate& how, Vec::R gate, Vec::R up) {
  // NaN stays NaN: it is the second operand.
  gate = Vec::min(Vec::set(how.limit), gate);
  up = Vec::max(Vec::set(-how.limit), Vec::min(Vec::set(how.limit), up));
  const Vec::R power = Vec::min(Vec::mul(gate, Vec::set(-how.alpha * kLog2E)), Vec::set(126.0F));
  const Vec::R passed = Vec::div(gate, Vec::add(Vec::set(1.0F), exp2(power)));
  return Vec::mul(Vec::add(up, Vec::set(1.0F)), passed);
}

// x / 2 * (1 + tanh(y)) = x / (1 + e^(-2 y)), with y = sqrt(2 / pi) * (x + 0.044715 x^3).
inline Vec::R gelu(Vec::R x) {
  const Vec::R cubic = Vec::fma(Vec::mul(x, x), Vec::set(0.044715F), Vec::set(1.0F));
  const Vec::R inner = Vec::mul(Vec::mul(x, cubic), Vec::set(-2.0F * 0.7978845608F * kLog2E));
  const Vec::R power = Vec::min(inner, Vec::set(126.0F));
  return Vec::div(x, Vec::add(Vec::set(1.0F), exp2(power)));
}

inline Vec::R soft_capped(Vec::R x, float cap) {
  const Vec::R found = Vec::mul(Vec::set(cap), tanh(Vec::div(x, Vec::set(cap))));
  return Vec::add(found, Vec::sub(x, x));  // NaN stays NaN
}

// Offset of a block of packed rows, in elements.
inline std::int64_t block_at(std::int32_t first_row, std::int64_t depth) {
  return static_cast<std::int64_t>(first_row) * depth;
}

// Writes elements of a row, from `first` on, into row r of a block of `rows` rows: whole chunks.
template <class T>
inline void put_packed(T* block, std::int64_t first, std::int64_t r, std::int64_t rows,
                       const T* elements, std::int64_t count) {
  constexpr int kChunk = kChunkBytes / static_cast<int>(sizeof(T));
  T* to = block + first * rows + r * kChunk;
  for (std::int64_t k = 0; k < count; k += kChunk, to += rows * kChunk) {
    memcpy(to, elements + k, kChunkBytes);
  }
}

static_assert(Vec::kWidth <= kDepthUnit);

// Rows [row, row + kRows) of a block, which has block_rows.
struct RowTile {
  std::int32_t first_row, block_rows, row;
};

template <class T, int kRows>
void put_gated(const LinearArgs& a, RowTile tile, std::int32_t first,
               const Vec::R (&gated)[kRows]) {
  T* const block = static_cast<T*>(a.out) + block_at(tile.first_row, a.out_stride);
  const int count = least(Vec::kWidth, a.num_outputs - first);
  // The last panel also writes the zeros that pad the depth of the next product.
  const bool is_last = first + Vec::kWidth >= a.num_outputs;
  const int padded_count = is_last ? static_cast<int>(a.out_stride - first) : Vec::kWidth;
#pragma GCC unroll 16
  for (int r = 0; r < kRows; ++r) {
    T lanes[kDepthUnit];
    Vec::store(lanes, gated[r]);
    for (int i = count; i < padded_count; ++i) lanes[i] = T{};
    put_packed(block, first, tile.row + r, tile.block_rows, lanes, padded_count);
  }
}

template <int kRows>
void gate(const LinearArgs& a, RowTile tile, std::int32_t panel, Vec::R (&sums)[2][kRows]) {
  const std::int32_t first = panel * Vec::kWidth;
  Vec::R gated[kRows];
  if (a.gate.activation == Activation::kSilu) {
#pragma GCC unroll 16
    for (int r = 0; r < kRows; ++r) gated[r] = Vec::mul(silu(sums[0][r]), sums[1][r]);
  } else if (a.gate.activation == Activation::kGelu) {
    for (int r = 0; r < kRows; ++r) gated[r] = Vec::mul(gelu(sums[0][r]), sums[1][r]);
  } else {
    for (int r = 0; r < kRows; ++r) gated[r] = clamped(a.gate, sums[0][r], sums[1][r]);
  }
  if (a.epilogue == Epilogue::kGateRows) {
    const int count = least(Vec::kWidth, a.num_outputs - first);
    const std::int64_t at = (tile.first_row + tile.row) * a.out_stride + first;
    float* const to = static_cast<float*>(a.out) + at;
    for (int r = 0; r < kRows; ++r) store_first(to + r * a.out_stride, count, gated[r]);
  } else if (a.pairs_out) {
    put_gated<Bf16>(a, tile, first, gated);
  } else {
    put_gated<float>(a, tile, first, gated);
  }
}

template <int kRows>
void finish(const LinearArgs& a, RowTile tile, std::int32_t panel, Vec::R (&sums)[2][kRows]) {
  const bool gated = a.epilogue == Epilogue::kGate || a.epilogue == Epilogue::kGateRows;
  const std::int32_t first = panel * kPanelOutputs;
  const int packed_outputs = gated ? 2 * a.num_outputs : a.num_outputs;
  const int count = least(kPanelOutputs, packed_outputs - first);
#pragma GCC unroll 2
  for (int v = 0; v < 2; ++v) {
    // Scales and biases are in the order of the lanes, and padded to whole panels.
    const std::int32_t lane = first + v * Vec::kWidth;
#pragma GCC unroll 16
    for (int r = 0; r < kRows; ++r) {
      if (a.scales != nullptr) sums[v][r] = Vec::mul(sums[v][r], Vec::load(a.scales + lane));
      if (a.bias != nullptr) sums[v][r] = Vec::add(sums[v][r], Vec::load(a.bias + lane));
    }
  }
  if (gated) {
    gate<kRows>(a, tile, panel, sums);
    return;
  }
  const int low = least(count, Vec::kWidth), high = most(0, count - Vec::kWidth);
  for (int r = 0; r < kRows; ++r) {
    if (a.softcap != 0.0F) {
      for (int v = 0; v < 2; ++v) sums[v][r] = soft_capped(sums[v][r], a.softcap);
    }
    const std::int64_t at = (tile.first_row + tile.row + r) * a.out_stride + first;
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

}  // namespace
}  // namespace vmserve::cpu
