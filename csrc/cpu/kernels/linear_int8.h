// Linear layers with int8 weights and rows of int16 or int8, which have a scale for each row and
// group of the depth. A lane takes two or four integer products, weights are not converted, and the
// sum of a group is exact.
//
// A weight w is stored as the byte w + 128: widening needs no sign extension, and VPDPBUSD takes
// one unsigned factor. The surplus, 128 times the sum of the row's elements, is subtracted before
// the first product (RowGroup::offset). A lane has four elements of the depth in the order 0, 2, 1,
// 3: a mask extracts the first two as 16 bits, a shift the others.
#pragma once

#include "linear_panels.h"

namespace vmserve::cpu {
namespace {

template <class R>
struct Int8 {
  std::uint8_t byte;
};
template <class R>
struct Stored<Int8<R>> {
  using Row = R;
  static constexpr int kStep = 4;
  static constexpr bool kOutputScales = true;
};

template <int kRows, int kPanels>
struct WholeSums {
  Vec::I at[kPanels][2][kRows];
};

// The weights for word `word` of a step.
template <class Row>
inline Vec::S factors(const Int8<Row>* weights, int word) {
  const Vec::S bytes = Vec::load_bytes(weights);
  if (sizeof(Row) == 1) return bytes;
  return word == 0 ? Vec::even_bytes(bytes) : Vec::odd_bytes(bytes);
}

// Sums of one group of the depth, or of the `count` elements that are left.
// groups: of the first row; those of row r begin r * group_stride later.
template <class Row, int kRows, int kPanels>
inline WholeSums<kRows, kPanels> group_sums(const Int8<Row>* weights, std::int64_t panel_stride,
                                            const Row* x, const RowGroup* groups,
                                            std::int64_t group_stride, std::int64_t count) {
  constexpr int kDepth = kWordDepth<Int8<Row>>, kWords = Stored<Int8<Row>>::kStep / kDepth;
  WholeSums<kRows, kPanels> sums;
#pragma GCC unroll 16
  for (int r = 0; r < kRows; ++r) {
    const Vec::I offset = Vec::set_int(groups[r * group_stride].offset);
#pragma GCC unroll 8
    for (int p = 0; p < kPanels; ++p) sums.at[p][0][r] = sums.at[p][1][r] = offset;
  }
  for (std::int64_t k = 0; k < count; k += kDepth * kChunkWords) {
// Not unrolled: GCC 12 would compute all words' products before adding them and spill registers.
#pragma GCC unroll 1
    for (int i = 0; i < kChunkWords; i += kWords) {
#pragma GCC unroll 2
      for (int word = 0; word < kWords; ++word) {
        Vec::S w[kPanels][2];
#pragma GCC unroll 8
        for (int p = 0; p < kPanels; ++p) {
          w[p][0] = factors<Row>(weights + p * panel_stride, word);
          w[p][1] = factors<Row>(weights + p * panel_stride + 4 * Vec::kWidth, word);
        }
#pragma GCC unroll 16
        for (int r = 0; r < kRows; ++r) {
          const Row* const elements = x + kDepth * (r * kChunkWords + i + word);
#pragma GCC unroll 8
          for (int p = 0; p < kPanels; ++p) {
            sums.at[p][0][r] = Vec::add_products(sums.at[p][0][r], w[p][0], elements);
            sums.at[p][1][r] = Vec::add_products(sums.at[p][1][r], w[p][1], elements);
          }
        }
      }
      prefetch_weights<kPanels, 4 * kPanelOutputs>(weights, panel_stride);
      weights += 4 * kPanelOutputs;
    }
    x += kDepth * kChunkWords * kRows;
  }
  return sums;
}

template <int kRows, int kPanels, class Row>
void panels(const LinearArgs& a, const Int8<Row>* weights, std::int32_t first_row,
            std::int32_t panel, std::int32_t apart) {
  const std::int64_t panel_stride = apart * a.depth * kPanelOutputs;
  const std::int64_t groups = num_groups(a.depth, kRowType<Row>);
  const Row* const x = static_cast<const Row*>(a.rows) + block_at(first_row, a.depth);
  const RowGroup* const row_groups = a.row_groups + first_row * groups;
  Sums<kRows, kPanels> sums = no_sums<kRows, kPanels>();
  for (std::int64_t g = 0; g < groups; ++g) {
    const std::int64_t first = g * kGroupDepth<Row>;
    const std::int64_t count = least(kGroupDepth<Row>, a.depth - first);
    const auto whole =
        group_sums<Row, kRows, kPanels>(weights + first * kPanelOutputs, panel_stride,
                                        x + first * kRows, row_groups + g, groups, count);
#pragma GCC unroll 16
    for (int r = 0; r < kRows; ++r) {
      const Vec::R scale = Vec::set(row_groups[r * groups + g].scale);
#pragma GCC unroll 8
      for (int p = 0; p < kPanels; ++p) {
        Vec::R(&at)[2][kRows] = sums.at[p];
        at[0][r] = Vec::fma(Vec::to_float(whole.at[p][0][r]), scale, at[0][r]);
        at[1][r] = Vec::fma(Vec::to_float(whole.at[p][1][r]), scale, at[1][r]);
      }
    }
  }
#pragma GCC unroll 8
  for (int p = 0; p < kPanels; ++p)
    finish<kRows>(a, {first_row, kRows, 0}, panel + p * apart, sums.at[p]);
}

}  // namespace
}  // namespace vmserve::cpu
