// Linear layers with weights of float32 or bfloat16, and rows of float32.
//
// If the processor multiplies pairs of bfloat16 (Vec::kDotsPairs), rows can be rounded to bfloat16
// too. Two successive elements then share a lane, as two weights do anyway, and one instruction
// adds both products.
#pragma once

#include "linear_panels.h"

namespace vmserve::cpu {
namespace {

template <>
struct Stored<float> {
  using Row = float;
  static constexpr int kStep = 1;
  static constexpr bool kOutputScales = false;
  static constexpr bool kPaired = false;
  template <int i>
  static Vec::R part(const float* from) {
    return Vec::load(from);
  }
};
template <>
struct Stored<Bf16> {
  using Row = float;
  static constexpr int kStep = 2;
  static constexpr bool kOutputScales = false;
  static constexpr bool kPaired = false;
  template <int i>
  static Vec::R part(const Bf16* from) {
    return Vec::template part<i>(from);
  }
};

// bfloat16 weights for rows of bfloat16.
struct PairedBf16 {
  std::uint16_t bits;
};
template <>
struct Stored<PairedBf16> {
  using Row = Bf16;
  static constexpr int kStep = 2;
  static constexpr bool kOutputScales = false;
  static constexpr bool kPaired = true;
};

// Adds the products of word i of a chunk and of the words after it.
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

// Adds the products of a chunk of paired rows. `V` is `Vec`: only some have pairs.
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

// Multiplies a block of rows by kPanels panels: `panel`, panel + apart, ... `weights`: of `panel`.
template <int kRows, int kPanels, class W>
void panels(const LinearArgs& a, const W* weights, std::int32_t first_row, std::int32_t panel,
            std::int32_t apart) {
  using Row = typename Stored<W>::Row;
  constexpr int kChunkDepth = kChunkWords * kWordDepth<W>;
  const std::int64_t panel_stride = apart * a.depth * kPanelOutputs;
  const Row* const block = static_cast<const Row*>(a.rows) + block_at(first_row, a.depth);
  const auto* x = reinterpret_cast<const float*>(block);
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
  for (int p = 0; p < kPanels; ++p)
    finish<kRows>(a, {first_row, kRows, 0}, panel + p * apart, sums.at[p]);
}

template <class W>
constexpr bool kWidens = false;
template <>
constexpr bool kWidens<Bf16> = true;

template <class W, int i>
inline void widen_step(const W* from, float* to) {
  if constexpr (i < Stored<W>::kStep) {
    Vec::store(to, Stored<W>::template part<i>(from));
    Vec::store(to + Vec::kWidth,
               Stored<W>::template part<i>(from + Vec::kWidth * Stored<W>::kStep));
    widen_step<W, i + 1>(from, to + kPanelOutputs);
  }
}

}  // namespace
}  // namespace vmserve::cpu
