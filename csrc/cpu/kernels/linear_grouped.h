// Linear layers with integer weights that have a scale, and perhaps a minimum, for each output and
// group of the depth: w = scale * code + minimum. Codes have 4 or 8 bits, rows are int16 or int8
// with a scale for each of the same groups. Scales, minima and codes are what the checkpoint has;
// only rows are rounded.
//
// A sum over a group is scale * row scale * (sum of code * element) + minimum * (sum of the row).
// The sum of the products is exact, in int32, and so is what the codes' zero adds to it: codes are
// unsigned, and without minima 8 or 128 stands for zero.
//
// A panel is one stream. For each group of the depth it has: steps, at the first of groups_per_step
// groups; scales of the panel's outputs; minima; codes. See ScaleFormat. Within the codes, a lane
// has words of four elements of the depth in the order 0, 2, 1, 3 (linear_int8.h); with 4 bits the
// lower halves of its bytes are one word, the upper halves the next.
//
// Where VPDPBUSD is missing, the products of 4 bits and int8 are added in int16: a lane half takes
// two products of 15 * 127 from each of eight words, which is below 2^15.
#pragma once

#include "half.h"
#include "linear_pack.h"

namespace vmserve::cpu {
namespace {

template <class R, int kBits, int kGroup>
struct Grouped {
  using Row = R;
  static constexpr int kNumBits = kBits;
  static constexpr std::int64_t kDepth = kGroup;
  static constexpr bool kOfBytes = sizeof(R) == 1;
  static constexpr RowType kRows = kGroup == 32 ? (kOfBytes ? kRowsInt8By32 : kRowsInt16By32)
                                                : (kOfBytes ? kRowsInt8By16 : kRowsInt16By16);
  static constexpr std::int64_t kCodeBytes = kDepth * kPanelOutputs * kBits / 8;
  // Whether products are added in int16 first.
  static constexpr bool kShortSums = kOfBytes && kBits == 4 && !Vec::kDotsBytes;
};

inline std::int64_t scale_bytes(ScaleFormat format) {
  const std::int64_t size = format.type == ScaleType::kFloat32   ? 4
                            : format.type == ScaleType::kFloat16 ? 2
                                                                 : 1;
  return size * kPanelOutputs * (format.minima ? 2 : 1);
}

inline std::int64_t step_bytes(ScaleFormat format) {
  return format.type == ScaleType::kSteps ? 2 * kPanelOutputs * (format.minima ? 2 : 1) : 0;
}

template <class G>
std::int64_t grouped_panel_bytes(std::int64_t depth, ScaleFormat format) {
  const std::int64_t groups = num_groups(depth, G::kRows);
  const std::int64_t steps =
      format.type == ScaleType::kSteps
          ? (groups + format.groups_per_step - 1) / format.groups_per_step * step_bytes(format)
          : 0;
  return groups * (scale_bytes(format) + G::kCodeBytes) + steps;
}

// Scales of a vector of outputs. `lane`: first of them; minima are kPanelOutputs further on.
inline Vec::R load_scales(ScaleType type, const char* scales, const char* steps, int lane) {
  if (type == ScaleType::kFloat32) return Vec::load(reinterpret_cast<const float*>(scales) + lane);
  if (type == ScaleType::kFloat16) return Vec::load_halves(scales + 2 * lane);
  return Vec::mul(Vec::load_int8(scales + lane), Vec::load_halves(steps + 2 * lane));
}

template <bool kShort>
struct SumType {
  using T = Vec::I;
};
template <>
struct SumType<true> {
  using T = Vec::N;
};

template <class G, int kRows, int kPanels>
struct GroupSums {
  typename SumType<G::kShortSums>::T at[kPanels][2][kRows];
};

// The weights of word `word` (of `kWords`) of half `half` of the stored bytes.
template <class G>
inline Vec::S grouped_factors(Vec::S bytes, int half, int word) {
  if (G::kNumBits == 4) bytes = half == 0 ? Vec::low_halves(bytes) : Vec::high_halves(bytes);
  if (G::kOfBytes) return bytes;
  return word == 0 ? Vec::even_bytes(bytes) : Vec::odd_bytes(bytes);
}

template <class G, int kRows, int kPanels>
inline void add_group(const char* codes, std::int64_t panel_stride, const typename G::Row* x,
                      std::int64_t count, GroupSums<G, kRows, kPanels>& sums) {
  constexpr int kWords = G::kOfBytes ? 1 : 2, kHalves = 8 / G::kNumBits;
  constexpr int kWordDepth = 4 / static_cast<int>(sizeof(typename G::Row));
  constexpr int kLoads = kChunkWords / (kWords * kHalves);
  for (std::int64_t k = 0; k < count; k += kWordDepth * kChunkWords) {
// Not unrolled: see linear_int8.h.
#pragma GCC unroll 1
    for (int load = 0; load < kLoads; ++load) {
#pragma GCC unroll 2
      for (int half = 0; half < kHalves; ++half) {
#pragma GCC unroll 2
        for (int word = 0; word < kWords; ++word) {
          Vec::S w[kPanels][2];
#pragma GCC unroll 8
          for (int p = 0; p < kPanels; ++p) {
            const char* const from = codes + p * panel_stride;
            w[p][0] = grouped_factors<G>(Vec::load_bytes(from), half, word);
            w[p][1] = grouped_factors<G>(Vec::load_bytes(from + 4 * Vec::kWidth), half, word);
          }
          const int i = (load * kHalves + half) * kWords + word;
#pragma GCC unroll 16
          for (int r = 0; r < kRows; ++r) {
            const typename G::Row* const elements = x + kWordDepth * (r * kChunkWords + i);
#pragma GCC unroll 8
            for (int p = 0; p < kPanels; ++p) {
              sums.at[p][0][r] = Vec::add_products(sums.at[p][0][r], w[p][0], elements);
              sums.at[p][1][r] = Vec::add_products(sums.at[p][1][r], w[p][1], elements);
            }
          }
        }
      }
      prefetch_weights<kPanels, 4 * kPanelOutputs>(codes, panel_stride);
      codes += 4 * kPanelOutputs;
    }
    x += kWordDepth * kChunkWords * kRows;
  }
}

// The products of one group, with the zero of the codes subtracted.
template <class G, int kRows, int kPanels>
inline WholeSums<kRows, kPanels> grouped_sums(const char* codes, std::int64_t panel_stride,
                                              const typename G::Row* x, const RowGroup* groups,
                                              std::int64_t group_stride, std::int64_t count,
                                              bool has_zero) {
  GroupSums<G, kRows, kPanels> sums;
  WholeSums<kRows, kPanels> whole;
  Vec::I offsets[kRows];
#pragma GCC unroll 16
  for (int r = 0; r < kRows; ++r) {
    // RowGroup::offset is for a zero of 128; that of 4 bits is 8.
    const std::int32_t offset = groups[r * group_stride].offset;
    offsets[r] = Vec::set_int(!has_zero ? 0 : G::kNumBits == 4 ? offset / 16 : offset);
#pragma GCC unroll 8
    for (int p = 0; p < kPanels; ++p) {
      if constexpr (G::kShortSums) {
        sums.at[p][0][r] = sums.at[p][1][r] = Vec::no_short_sums();
      } else {
        sums.at[p][0][r] = sums.at[p][1][r] = offsets[r];
      }
    }
  }
  add_group<G, kRows, kPanels>(codes, panel_stride, x, count, sums);
#pragma GCC unroll 16
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 8
    for (int p = 0; p < kPanels; ++p) {
#pragma GCC unroll 2
      for (int v = 0; v < 2; ++v) {
        if constexpr (G::kShortSums) {
          whole.at[p][v][r] = Vec::widen_sums(sums.at[p][v][r], offsets[r]);
        } else {
          whole.at[p][v][r] = sums.at[p][v][r];
        }
      }
    }
  }
  return whole;
}

// Multiplies a block of rows by kPanels panels: `panel`, panel + apart, ... `weights`: of `panel`;
// the others are panel_stride apart.
template <class G, int kRows, int kPanels>
void grouped_panels(const LinearArgs& a, const char* weights, std::int64_t panel_stride,
                    std::int32_t first_row, std::int32_t panel, std::int32_t apart) {
  const std::int64_t groups = num_groups(a.depth, G::kRows);
  const auto* x = static_cast<const typename G::Row*>(a.rows) + block_at(first_row, a.depth);
  const RowGroup* const row_groups = a.row_groups + first_row * groups;
  const ScaleFormat format = a.scale_format;
  const std::int64_t group_bytes = scale_bytes(format);
  const int minima_lanes = kPanelOutputs;
  const char* steps = nullptr;
  std::int64_t until_steps = 0;
  Sums<kRows, kPanels> sums = no_sums<kRows, kPanels>();
  for (std::int64_t g = 0; g < groups; ++g) {
    if (format.type == ScaleType::kSteps && until_steps-- == 0) {
      steps = weights;
      weights += step_bytes(format);
      until_steps = format.groups_per_step - 1;
    }
    const char* const scales = weights;
    weights += group_bytes;
    for (std::int64_t line = 0; line < group_bytes; line += kLine) {
      prefetch_weights<kPanels, kLine>(scales + line, panel_stride);
    }
    const std::int64_t count = least(G::kDepth, a.depth - g * G::kDepth);
    const auto whole =
        grouped_sums<G, kRows, kPanels>(weights, panel_stride, x, row_groups + g, groups, count,
                                        G::kNumBits == 8 || !format.minima);
    weights += G::kCodeBytes;
    x += G::kDepth * kRows;
#pragma GCC unroll 8
    for (int p = 0; p < kPanels; ++p) {
#pragma GCC unroll 2
      for (int v = 0; v < 2; ++v) {
        const int lane = v * Vec::kWidth;
        const char* const at = scales + p * panel_stride;
        const char* const step = steps + p * panel_stride;
        const Vec::R scale = load_scales(format.type, at, step, lane);
#pragma GCC unroll 16
        for (int r = 0; r < kRows; ++r) {
          const Vec::R factor = Vec::mul(scale, Vec::set(row_groups[r * groups + g].scale));
          sums.at[p][v][r] = Vec::fma(Vec::to_float(whole.at[p][v][r]), factor, sums.at[p][v][r]);
        }
        if (!format.minima) continue;
        const Vec::R minimum = load_scales(format.type, at, step, lane + minima_lanes);
#pragma GCC unroll 16
        for (int r = 0; r < kRows; ++r) {
          const Vec::R sum = Vec::set(row_groups[r * groups + g].sum);
          sums.at[p][v][r] = Vec::fma(minimum, sum, sums.at[p][v][r]);
        }
      }
    }
  }
#pragma GCC unroll 8
  for (int p = 0; p < kPanels; ++p) finish<kRows>(a, first_row, panel + p * apart, sums.at[p]);
}

// -- packing ---------------------------------------------------------------------------------

// One output of a tensor.
struct GroupedLane {
  const GroupedTensor* tensor = nullptr;  // null: there is no such output
  std::int64_t output = 0;

  std::int64_t group_of(std::int64_t k) const {
    return output * tensor->groups + k / tensor->group;
  }
  float scale(std::int64_t k) const { return tensor->scales[group_of(k)]; }
  float minimum(std::int64_t k) const {
    if (tensor->minima != nullptr) return tensor->minima[group_of(k)];
    return tensor->bits == 4 ? -8.0F * scale(k) : 0.0F;
  }
  // What is stored of four codes from k on, the first in the lowest byte; 0 behind the depth.
  // Without minima a code's zero is 8 (of 4 bits) or 128.
  std::uint32_t codes(std::int64_t k, int bits, bool minima) const {
    const std::uint8_t* const from = tensor->codes + output * tensor->inputs + k;
    std::uint32_t found = 0, mask = ~0U;
    if (const std::int64_t left = tensor->inputs - k; left >= 4) {
      memcpy(&found, from, sizeof found);
    } else {
      mask = left <= 0 ? 0 : ~0U >> (32 - 8 * left);
      for (int i = 0; i < left; ++i) found |= std::uint32_t{from[i]} << 8 * i;
    }
    if (tensor->bits == 8) return (found ^ 0x80808080U) & mask;
    if (bits == 4) return found;
    return (found + (minima ? 0x80808080U : 0x78787878U)) & mask;
  }
};

inline GroupedLane grouped_lane(const PackArgs& a, std::int32_t panel, int lane) {
  std::int32_t tensor = 0, output = panel * kPanelOutputs + lane;
  if (a.gated) {
    tensor = lane / Vec::kWidth;
    output = panel * Vec::kWidth + lane % Vec::kWidth;
  }
  for (; tensor < a.num_tensors; ++tensor) {
    if (output < a.outputs[tensor]) return {a.grouped + tensor, output};
    if (a.gated) break;
    output -= a.outputs[tensor];
  }
  return {};
}

inline void put_scale(ScaleType type, char* to, int lane, float value, float step) {
  if (type == ScaleType::kFloat32) {
    memcpy(to + 4 * lane, &value, sizeof value);
  } else if (type == ScaleType::kFloat16) {
    std::uint16_t half;
    exact_half(value, half);
    memcpy(to + 2 * lane, &half, sizeof half);
  } else {
    to[lane] = static_cast<char>(step == 0.0F ? 0 : static_cast<int>(value / step));
  }
}

template <class G>
void pack_grouped_lane(const PackArgs& a, const GroupedLane& from, int lane, char* at) {
  const std::int64_t depth = (a.depth + kDepthUnit - 1) / kDepthUnit * kDepthUnit;
  const ScaleFormat format = a.scale_format;
  const int vector = lane / Vec::kWidth, i = lane % Vec::kWidth;
  constexpr int kHalves = 8 / G::kNumBits;
  float steps[2] = {};
  for (std::int64_t first = 0, g = 0; first < depth; first += G::kDepth, ++g) {
    const bool inside = from.tensor != nullptr && first < a.depth;
    if (format.type == ScaleType::kSteps && g % format.groups_per_step == 0) {
      for (int which = 0; which < (format.minima ? 2 : 1); ++which) {
        const float* const own = !inside      ? nullptr
                                 : which == 0 ? from.tensor->scale_steps
                                              : from.tensor->minimum_steps;
        const std::int64_t index =
            inside ? from.output * from.tensor->steps + g / format.groups_per_step : 0;
        steps[which] = own == nullptr ? 0.0F : own[index];
        put_scale(ScaleType::kFloat16, at, which * kPanelOutputs + lane, steps[which], 0.0F);
      }
      at += step_bytes(format);
    }
    if (inside) {
      put_scale(format.type, at, lane, from.scale(first), steps[0]);
      if (format.minima) {
        put_scale(format.type, at, kPanelOutputs + lane, from.minimum(first), steps[1]);
      }
    }
    at += scale_bytes(format);
    for (std::int64_t word = 0; inside && word < G::kDepth / 4; word += kHalves) {
      std::uint32_t stored = 0;
      for (int half = 0; half < kHalves; ++half) {
        const std::int64_t k = first + 4 * (word + half);
        stored |= interleaved(from.codes(k, G::kNumBits, format.minima)) << 4 * half;
      }
      char* const to = at + ((word / kHalves * 2 + vector) * Vec::kWidth + i) * 4;
      memcpy(to, &stored, sizeof stored);
    }
    at += G::kCodeBytes;
  }
}

// Pre: the memory is zero.
template <class G>
void pack_grouped(const PackArgs& a) {
  const std::int64_t depth = (a.depth + kDepthUnit - 1) / kDepthUnit * kDepthUnit;
  const std::int64_t stride = grouped_panel_bytes<G>(depth, a.scale_format);
  for (std::int32_t panel = a.first_panel; panel < a.first_panel + a.num_panels; ++panel) {
    for (int lane = 0; lane < kPanelOutputs; ++lane) {
      pack_grouped_lane<G>(a, grouped_lane(a, panel, lane), lane, a.weights + panel * stride);
    }
  }
}

}  // namespace
}  // namespace vmserve::cpu
