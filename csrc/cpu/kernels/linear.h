// Linear layers: y = x W^T with weights in float32, bfloat16, int8 or grouped
// integers of 4, 5, 6 or 8 bits, and sums in float32.
//
// linear_panels.h says how weights and rows lie. linear_float.h, linear_int8.h and linear_grouped.h
// multiply a block of rows by a few panels. linear_pack.h brings weights and rows into that layout.
// This file has the loops over rows and panels, and the table of weight forms. Every output is one
// sum in the order of the depth, so its bits do not depend on the other rows.
//
// To add a weight form:
// 1. kernels.h: its name in WeightForm. If its rows are rounded in a new way, a RowType too.
// 2. linear_<form>.h: a struct for the stored weights, its Stored<> (linear_panels.h), and either
//    `panels`, which the loops below call, or a `multiply` of its own. Weights that lie otherwise
//    than in equal elements (scales among them) need a panel_bytes and a `pack` of their own too;
//    `pack` also reads the checkpoint's format if that is already quantised.
// 3. linear_kernels() below: the entry. An instruction set that does better replaces the entry in
//    its own file (kernels_avx512_vnni.cpp).
// 4. CpuDecoder::form_for (decoder.cpp): when a layer uses it.
#pragma once

#include "linear_float.h"
#include "linear_grouped.h"
#include "linear_int8.h"
#include "linear_pack.h"

namespace vmserve::cpu {
namespace {

// With few rows, two panels at a time: independent sums hide latency. Each reads its half of a
// stretch of panels in order, so prefetching past a panel reaches the next one. One row of wide
// vectors needs no more sums, and one stream has fewer ends.
constexpr int panels_together(int rows) {
  if (Vec::kLinearRows < 6) return 1;  // plain C++ keeps no sums in registers
  if (rows == 1 && Vec::kWidth >= 16) return 1;
  return 2 * rows <= Vec::kLinearRows ? 2 : 1;
}

// Rows of a block, given how many rows are left. The first block is the largest, because weights
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
  const std::int64_t panel_elements = a.depth * kPanelOutputs;
  const std::int32_t apart = num_panels / kTogether;
  for (std::int32_t i = 0; i < apart; ++i) {
    panels<kRows, kTogether>(a, weights + i * panel_elements, first_row, panel + i, apart);
  }
  for (std::int32_t i = apart * kTogether; i < num_panels; ++i) {
    panels<kRows, 1>(a, weights + i * panel_elements, first_row, panel + i, 1);
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

// With blocks of twelve rows, widening in registers is cheap, and reads half as much.
constexpr bool kWidensOnce = Vec::kLinearRows < 12;

// With many rows, weights are widened once for all of them into a buffer that stays in the cache.
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
void multiply(const LinearArgs& a) {
  if constexpr (kWidensOnce && kWidens<W>) {
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

// Rows whose sums, and those of a group, stay in registers: a store of wide vectors takes as long
// as their products.
constexpr int kTileRows = Vec::kWidth >= 16 ? Vec::kLinearRows / 2 : Vec::kLinearRows;
constexpr int tiles_together(int rows) {
  return 2 * rows <= kTileRows ? panels_together(rows) : 1;
}

// `apart`: panels from the first to the second; 0: no second.
template <class G, int kRows>
void grouped_tile(const LinearArgs& a, const char* weights, std::int64_t panel_bytes, RowTile tile,
                  std::int32_t rows, std::int32_t panel, std::int32_t apart) {
  if (rows != kRows) {
    if constexpr (kRows > 1) {
      grouped_tile<G, kRows - 1>(a, weights, panel_bytes, tile, rows, panel, apart);
    }
    return;
  }
  if constexpr (tiles_together(kRows) > 1) {
    if (apart > 0) {
      grouped_panels<G, kRows, 2>(a, weights, apart * panel_bytes, tile, panel, apart);
      return;
    }
  }
  grouped_panels<G, kRows, 1>(a, weights, 0, tile, panel, 1);
}

// Multiplies all rows by panels [first_panel, first_panel + num_panels), which begin at `weights`.
template <class G>
void grouped_rows(const LinearArgs& a, const char* weights, std::int32_t first_panel,
                  std::int32_t num_panels) {
  const std::int64_t panel_bytes = grouped_panel_bytes<G>(a.depth, a.scale_format);
  for (std::int32_t first = 0; first < a.num_rows;) {
    const std::int32_t rows = block_rows(a.num_rows - first);
    const std::int32_t together = tiles_together(rows);
    const std::int32_t apart = num_panels / together, paired = together > 1 ? apart : 0;
    for (std::int32_t i = 0; i < num_panels - paired; ++i) {
      const std::int32_t panel = i < apart ? i : i + paired;
      for (std::int32_t row = 0; row < rows; row += kTileRows) {
        grouped_tile<G, kTileRows>(a, weights + panel * panel_bytes, panel_bytes,
                                   {first, rows, row}, least(kTileRows, rows - row),
                                   first_panel + panel, i < paired ? apart : 0);
      }
    }
    first += rows;
  }
}

// Wide vectors unpack codes while they compute products.
template <class G>
constexpr bool kWidensCodes =
    (G::kNumBits == 5 || G::kNumBits == 6 || G::kByTable) && Vec::kWidth < 16;

template <class G>
void multiply_grouped(const LinearArgs& a) {
  using Wide = typename G::Widened;
  const std::int64_t bytes = grouped_panel_bytes<G>(a.depth, a.scale_format);
  const char* from = a.weights + a.first_panel * bytes;
  if constexpr (kWidensCodes<G>) {
    const std::int64_t wide_bytes = grouped_panel_bytes<Wide>(a.depth, a.scale_format);
    const auto fitting = static_cast<std::int32_t>(a.scratch_floats * 4 / wide_bytes);
    if (a.num_rows >= 2 * Vec::kLinearRows && fitting > 0) {
      char* const wide = reinterpret_cast<char*>(a.scratch);
      for (std::int32_t i = 0; i < a.num_panels; i += fitting) {
        const std::int32_t count = least(fitting, a.num_panels - i);
        for (std::int32_t panel = 0; panel < count; ++panel, from += bytes) {
          widen_panel<G>(from, a.depth, a.scale_format, wide + panel * wide_bytes);
        }
        grouped_rows<Wide>(a, wide, a.first_panel + i, count);
      }
      return;
    }
  }
  grouped_rows<G>(a, from, a.first_panel, a.num_panels);
}

template <class Row, int kBits, int kGroup, int kZeroBits = kBits>
constexpr LinearForm grouped_form() {
  using G = Grouped<Row, kBits, kGroup, kZeroBits>;
  return {G::kRows, false, &grouped_panel_bytes<G>, &pack_grouped<G>, &multiply_grouped<G>};
}

constexpr void set_grouped_forms(LinearKernels& kernels) {
  kernels.forms[kWeightsGrouped4] = grouped_form<std::int16_t, 4, 32>();
  kernels.forms[kWeightsGrouped4Bytes] = grouped_form<std::int8_t, 4, 32>();
  kernels.forms[kWeightsGroupedTable] = grouped_form<std::int16_t, 4, 32, 5>();
  kernels.forms[kWeightsGrouped5] = grouped_form<std::int16_t, 5, 32>();
  kernels.forms[kWeightsGrouped8] = grouped_form<std::int16_t, 8, 32>();
  kernels.forms[kWeightsGrouped6By16] = grouped_form<std::int16_t, 6, 16>();
  kernels.forms[kWeightsGrouped8By16] = grouped_form<std::int16_t, 8, 16>();
  if constexpr (Vec::kDotsBytes) {
    kernels.forms[kWeightsGroupedTableBytes] = grouped_form<std::int8_t, 4, 32, 5>();
    kernels.forms[kWeightsGrouped5Bytes] = grouped_form<std::int8_t, 5, 32>();
    kernels.forms[kWeightsGrouped8Bytes] = grouped_form<std::int8_t, 8, 32>();
    kernels.forms[kWeightsGrouped6By16Bytes] = grouped_form<std::int8_t, 6, 16>();
    kernels.forms[kWeightsGrouped8By16Bytes] = grouped_form<std::int8_t, 8, 16>();
  }
  kernels.pack_rows[kRowsInt16By32] = &pack_rows<std::int16_t, kRowsInt16By32>;
  kernels.pack_rows[kRowsInt16By16] = &pack_rows<std::int16_t, kRowsInt16By16>;
  kernels.pack_rows[kRowsInt8By32] = &pack_rows<std::int8_t, kRowsInt8By32>;
  kernels.pack_rows[kRowsInt8By16] = &pack_rows<std::int8_t, kRowsInt8By16>;
}

// `Packed`: a form with the same layout of panels as W.
template <class W, class Packed = W>
constexpr LinearForm form_of() {
  return {kRowType<typename Stored<W>::Row>, Stored<W>::kOutputScales, &panel_bytes<W>,
          &pack<Packed>, &multiply<W>};
}

constexpr LinearKernels linear_kernels() {
  LinearKernels kernels = {};
  kernels.panel_outputs = kPanelOutputs;
  kernels.block_rows = &block_rows;
  kernels.forms[kWeightsFloat32] = form_of<float>();
  kernels.forms[kWeightsBFloat16] = form_of<Bf16>();
  kernels.forms[kWeightsInt8] = form_of<Int8<std::int16_t>>();
  kernels.pack_rows[kRowsFloat32] = &pack_rows<float>;
  kernels.pack_rows[kRowsBFloat16] = &pack_rows<Bf16>;
  kernels.pack_rows[kRowsInt16] = &pack_rows<std::int16_t>;
  if constexpr (Vec::kDotsPairs) {
    kernels.forms[kWeightsBFloat16Pairs] = form_of<PairedBf16, Bf16>();
  }
  if constexpr (Vec::kDotsBytes) {
    kernels.forms[kWeightsInt8Bytes] = form_of<Int8<std::int8_t>, Int8<std::int16_t>>();
    kernels.pack_rows[kRowsInt8] = &pack_rows<std::int8_t>;
  }
  set_grouped_forms(kernels);
  return kernels;
}

}  // namespace
}  // namespace vmserve::cpu
