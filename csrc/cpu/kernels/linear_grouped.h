// Linear layers with integer weights that have a scale, and perhaps a minimum, for each output and
// group of the depth: w = scale * code + minimum. Codes have 4, 5, 6 or 8 bits, rows are int16 or
// int8 with a scale for each of the same groups. Scales, minima and codes are what the checkpoint
// has; only rows are rounded.
//
// A sum over a group is scale * row scale * (sum of code * element) + minimum * (sum of the row).
// The sum of the products is exact, in int32, and so is what the codes' zero adds to it. Codes are
// unsigned; without minima the middle one (8 of 4 bits) stands for zero. So a sum has the same bits
// for every size of the stored codes.
//
// A panel is one stream. For each group of the depth it has: steps, at the first of groups_per_step
// groups; scales of the panel's outputs; minima; codes. See ScaleFormat. A code word is four
// elements of the depth in the order 0, 2, 1, 3 (linear_int8.h), a byte for each. A lane stores
// those of a group in words of 4 bytes:
//
//   4 bits  lower halves of the bytes are one code word, upper halves the next; of codes by a table
//           (MXFP4: kTableCodes) they are places in it
//   5 bits  likewise, and one word more: bit i of its bytes is the fifth of code word i
//   6 bits  one code word each, three times; the fourth is in their upper two bits, lowest first
//
// Without VPDPBUSD, the products of 4 bits and int8 are added in int16. A lane half takes two
// products of 15 * 127 from each of eight words, which is below 2^15.
#pragma once

#include "half.h"
#include "linear_pack.h"

namespace vmserve::cpu {
namespace {

// The numbers of MXFP4 (e2m1) times 2, in its order, with a zero in the middle of 5 bits.
constexpr std::uint8_t kTableCodes[16] = {16, 17, 18, 19, 20, 22, 24, 28,
                                          16, 15, 14, 13, 12, 10, 8,  4};

// kZeroBits: bits of the codes, if they are stored in others: widened, or as 4-bit places in the
// table.
template <class R, int kBits, int kGroup, int kZeroBits = kBits>
struct Grouped {
  using Row = R;
  static constexpr int kNumBits = kBits;
  static constexpr int kCodeBits = kBits == 8 ? 8 : kZeroBits;  // bits of codes for packing
  static constexpr std::int64_t kDepth = kGroup;
  static constexpr int kZero = 1 << (kZeroBits - 1);   // the zero of codes without minima
  static constexpr bool kAlwaysZero = kZeroBits == 8;  // codes with minima have this zero too
  static constexpr bool kByTable = kBits == 4 && kZeroBits == 5;
  using Widened = Grouped<R, 8, kGroup, kZeroBits>;
  static constexpr bool kOfBytes = sizeof(R) == 1;
  static constexpr RowType kRows = kGroup == 32 ? (kOfBytes ? kRowsInt8By32 : kRowsInt16By32)
                                                : (kOfBytes ? kRowsInt8By16 : kRowsInt16By16);
  static constexpr std::int64_t kCodeBytes = kDepth * kPanelOutputs * kBits / 8;
  // Whether products are added in int16 first.
  static constexpr bool kShortSums = kOfBytes && kBits == 4 && !kByTable && !Vec::kDotsBytes;
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

// Scales, or minima, of a vector of outputs. `step`: of kSteps.
inline Vec::R load_scales(ScaleType type, const char* from, int lane, Vec::R step) {
  if (type == ScaleType::kFloat32) return Vec::load(reinterpret_cast<const float*>(from) + lane);
  if (type == ScaleType::kFloat16) return Vec::load_halves(from + 2 * lane);
  return Vec::mul(Vec::load_int8(from + lane), step);
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

// Functions that take or make sums are inlined, or sums would go through memory. In plain C++ they
// do so anyway, and inlining eight words takes the compiler minutes.
#ifdef VMSERVE_GENERIC_WIDTH
#define VMSERVE_WITH_SUMS [[gnu::noinline]] inline
#else
#define VMSERVE_WITH_SUMS [[gnu::always_inline]] inline
#endif

// Codes of four elements of the depth, the kWord-th of a group, one to a byte. `codes`: of the
// group and the vector of outputs.
template <class G, int kWord>
VMSERVE_WITH_SUMS Vec::S code_word(const char* codes) {
  const auto stored = [&](int i) { return Vec::load_bytes(codes + 4 * kPanelOutputs * i); };
  if constexpr (G::kNumBits == 8) {
    return stored(kWord);
  } else if constexpr (G::kNumBits == 6) {
    // Loads again what the words before have loaded, or GCC 12 keeps that in registers.
    asm volatile("" : "+r"(codes));
    if constexpr (kWord % 4 < 3) return Vec::masked(stored(kWord), 0x3f);
    const Vec::S low = Vec::masked(Vec::shifted<-6>(stored(0)), 0x03);
    const Vec::S more = Vec::merged(low, Vec::shifted<-4>(stored(1)), 0x0c);
    return Vec::merged(more, Vec::shifted<-2>(stored(2)), 0x30);
  } else {
    const Vec::S low = Vec::masked(Vec::shifted<kWord % 2 * -4>(stored(kWord / 2)), 0x0f);
    if constexpr (G::kByTable) return Vec::looked_up(kTableCodes, low);
    if constexpr (G::kNumBits == 4) return low;
    return Vec::merged(low, Vec::shifted<4 - kWord>(stored(4)), 0x10);
  }
}

// Adds the products of a code word. `chunk_stride`: from chunk to chunk of the block's rows.
template <class G, int kRows, int kPanels, int kWord>
VMSERVE_WITH_SUMS void add_word(const char* codes, std::int64_t panel_stride,
                                const typename G::Row* x, std::int64_t chunk_stride,
                                GroupSums<G, kRows, kPanels>& sums) {
  constexpr int kWords = G::kOfBytes ? 1 : 2;  // words of a row for four codes
  constexpr int kWordDepth = 4 / kWords;
  Vec::S bytes[kPanels][2];
#pragma GCC unroll 8
  for (int p = 0; p < kPanels; ++p) {
    bytes[p][0] = code_word<G, kWord>(codes + p * panel_stride);
    bytes[p][1] = code_word<G, kWord>(codes + p * panel_stride + 4 * Vec::kWidth);
  }
#pragma GCC unroll 2
  for (int word = 0; word < kWords; ++word) {
    Vec::S w[kPanels][2];
#pragma GCC unroll 8
    for (int p = 0; p < kPanels; ++p) {
#pragma GCC unroll 2
      for (int v = 0; v < 2; ++v) {
        w[p][v] = G::kOfBytes ? bytes[p][v]
                  : word == 0 ? Vec::even_bytes(bytes[p][v])
                              : Vec::odd_bytes(bytes[p][v]);
      }
    }
    const int i = kWord * kWords + word;
    const typename G::Row* const chunk = x + i / kChunkWords * chunk_stride;
#pragma GCC unroll 16
    for (int r = 0; r < kRows; ++r) {
      const typename G::Row* const elements =
          chunk + kWordDepth * (r * kChunkWords + i % kChunkWords);
#pragma GCC unroll 8
      for (int p = 0; p < kPanels; ++p) {
        sums.at[p][0][r] = Vec::add_products(sums.at[p][0][r], w[p][0], elements);
        sums.at[p][1][r] = Vec::add_products(sums.at[p][1][r], w[p][1], elements);
      }
    }
  }
}

// Sixteen elements of the depth: words kWord to kWord + 3.
template <class G, int kRows, int kPanels, int kWord>
VMSERVE_WITH_SUMS void add_words(const char* codes, std::int64_t panel_stride,
                                 const typename G::Row* x, std::int64_t chunk_stride,
                                 GroupSums<G, kRows, kPanels>& sums) {
  add_word<G, kRows, kPanels, kWord>(codes, panel_stride, x, chunk_stride, sums);
  add_word<G, kRows, kPanels, kWord + 1>(codes, panel_stride, x, chunk_stride, sums);
  add_word<G, kRows, kPanels, kWord + 2>(codes, panel_stride, x, chunk_stride, sums);
  add_word<G, kRows, kPanels, kWord + 3>(codes, panel_stride, x, chunk_stride, sums);
}

template <class G, int kRows, int kPanels>
VMSERVE_WITH_SUMS void add_group(const char* codes, std::int64_t panel_stride,
                                 const typename G::Row* x, std::int64_t chunk_stride,
                                 std::int64_t count, GroupSums<G, kRows, kPanels>& sums) {
#pragma GCC unroll 16
  for (std::int64_t line = 0; line < G::kCodeBytes; line += kLine) {
    prefetch_weights<kPanels, kLine>(codes + line, panel_stride);
  }
  add_words<G, kRows, kPanels, 0>(codes, panel_stride, x, chunk_stride, sums);
  if constexpr (G::kDepth > kDepthUnit) {
    if (count > kDepthUnit)
      add_words<G, kRows, kPanels, 4>(codes, panel_stride, x, chunk_stride, sums);
  }
}

// Begins the sums of a group. Sums that are not short begin with the codes' zero subtracted.
template <class G, int kRows, int kPanels>
VMSERVE_WITH_SUMS void begin_group(const RowGroup* groups, std::int64_t group_stride, bool has_zero,
                                   Vec::I (&offsets)[kRows], GroupSums<G, kRows, kPanels>& sums) {
#pragma GCC unroll 16
  for (int r = 0; r < kRows; ++r) {
    // RowGroup::offset is for a zero of 128.
    const std::int32_t offset = groups[r * group_stride].offset / (128 / G::kZero);
    offsets[r] = Vec::set_int(has_zero ? offset : 0);
#pragma GCC unroll 8
    for (int p = 0; p < kPanels; ++p) {
      if constexpr (G::kShortSums) {
        sums.at[p][0][r] = sums.at[p][1][r] = Vec::no_short_sums();
      } else {
        sums.at[p][0][r] = sums.at[p][1][r] = offsets[r];
      }
    }
  }
}

// Adds the sums of a group, each times the scales of output and row, and the minima times the sums
// of the row.
template <class G, bool kMinima, int kRows, class Sum>
VMSERVE_WITH_SUMS void end_group(const RowGroup* groups, std::int64_t group_stride,
                                 const Vec::I (&offsets)[kRows], const Sum (&whole)[kRows],
                                 Vec::R scale, Vec::R minimum, Vec::R (&sums)[kRows]) {
#pragma GCC unroll 16
  for (int r = 0; r < kRows; ++r) {
    const RowGroup& row = groups[r * group_stride];
    Vec::I products;
    if constexpr (G::kShortSums) {
      products = Vec::widen_sums(whole[r], offsets[r]);
    } else {
      products = whole[r];
    }
    const Vec::R factor = Vec::mul(scale, Vec::set(row.scale));
    Vec::R sum = Vec::fma(Vec::to_float(products), factor, sums[r]);
    if (kMinima) sum = Vec::fma(minimum, Vec::set(row.sum), sum);
    sums[r] = sum;
  }
}

// Multiplies rows by kPanels panels: `panel`, panel + apart, ... `weights`: of `panel`; the others
// are panel_stride apart.
template <class G, int kRows, int kPanels>
void grouped_panels(const LinearArgs& a, const char* weights, std::int64_t panel_stride,
                    RowTile tile, std::int32_t panel, std::int32_t apart) {
  const std::int64_t groups = num_groups(a.depth, G::kRows);
  constexpr int kChunk = kChunkBytes / static_cast<int>(sizeof(typename G::Row));
  const auto* x = static_cast<const typename G::Row*>(a.rows) + block_at(tile.first_row, a.depth) +
                  tile.row * kChunk;
  const RowGroup* row_groups = a.row_groups + (tile.first_row + tile.row) * groups;
  const ScaleFormat format = a.scale_format;
  const std::int64_t group_bytes = scale_bytes(format);
  const int vectors = format.minima ? 4 : 2;
  Vec::R steps[kPanels][4] = {};  // steps of scales, then of minima
  std::int64_t until_steps = 0;
  Sums<kRows, kPanels> sums = no_sums<kRows, kPanels>();
  for (std::int64_t g = 0; g < groups; ++g, ++row_groups) {
    if (format.type == ScaleType::kSteps && until_steps-- == 0) {
#pragma GCC unroll 8
      for (int p = 0; p < kPanels; ++p) {
        for (int i = 0; i < vectors; ++i)
          steps[p][i] = Vec::load_halves(weights + p * panel_stride + 2 * Vec::kWidth * i);
      }
      weights += step_bytes(format);
      until_steps = format.groups_per_step - 1;
    }
    const char* const scales = weights;
    weights += group_bytes;
    for (std::int64_t line = 0; line < group_bytes; line += kLine) {
      prefetch_weights<kPanels, kLine>(scales + line, panel_stride);
    }
    Vec::I offsets[kRows];
    GroupSums<G, kRows, kPanels> whole;
    begin_group<G, kRows, kPanels>(row_groups, groups, G::kAlwaysZero || !format.minima, offsets,
                                   whole);
    add_group<G, kRows, kPanels>(weights, panel_stride, x, tile.block_rows * kChunk,
                                 a.depth - g * G::kDepth, whole);
    weights += G::kCodeBytes;
    x += G::kDepth * tile.block_rows;
#pragma GCC unroll 8
    for (int p = 0; p < kPanels; ++p) {
#pragma GCC unroll 2
      for (int v = 0; v < 2; ++v) {
        const int lane = v * Vec::kWidth;
        const char* const at = scales + p * panel_stride;
        const Vec::R scale = load_scales(format.type, at, lane, steps[p][v]);
        if (format.minima) {
          const Vec::R minimum =
              load_scales(format.type, at, lane + kPanelOutputs, steps[p][2 + v]);
          end_group<G, true, kRows>(row_groups, groups, offsets, whole.at[p][v], scale, minimum,
                                    sums.at[p][v]);
        } else {
          end_group<G, false, kRows>(row_groups, groups, offsets, whole.at[p][v], scale, scale,
                                     sums.at[p][v]);
        }
      }
    }
  }
#pragma GCC unroll 8
  for (int p = 0; p < kPanels; ++p) finish<kRows>(a, tile, panel + p * apart, sums.at[p]);
}

template <class G, int kWord>
inline void widen_words(const char* codes, char* to) {
  Vec::store_bytes(to, code_word<G, kWord>(codes));
  Vec::store_bytes(to + 4 * Vec::kWidth, code_word<G, kWord>(codes + 4 * Vec::kWidth));
  if constexpr (kWord + 1 < G::kDepth / 4) {
    widen_words<G, kWord + 1>(codes, to + 4 * kPanelOutputs);
  }
}

// The same panel with a byte for each code.
template <class G>
void widen_panel(const char* from, std::int64_t depth, ScaleFormat format, char* to) {
  const std::int64_t groups = num_groups(depth, G::kRows);
  for (std::int64_t g = 0; g < groups; ++g) {
    const bool begins = format.type == ScaleType::kSteps && g % format.groups_per_step == 0;
    const std::int64_t bytes = scale_bytes(format) + (begins ? step_bytes(format) : 0);
    memcpy(to, from, static_cast<size_t>(bytes));
    widen_words<G, 0>(from + bytes, to + bytes);
    from += bytes + G::kCodeBytes;
    to += bytes + G::Widened::kCodeBytes;
  }
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
  // The stored form of four codes from k on, the first in the lowest byte; 0 after the depth. The
  // zero is in the middle of `bits`, except for short codes with minima.
  std::uint32_t codes(std::int64_t k, int bits, bool minima) const {
    constexpr std::uint32_t kBytes = 0x01010101U;
    const std::uint8_t* const from = tensor->codes + output * tensor->inputs + k;
    std::uint32_t found = 0, mask = ~0U;
    if (const std::int64_t left = tensor->inputs - k; left >= 4) {
      memcpy(&found, from, sizeof found);
    } else {
      mask = left <= 0 ? 0 : ~0U >> (32 - 8 * left);
      for (int i = 0; i < left; ++i) found |= std::uint32_t{from[i]} << 8 * i;
    }
    const std::uint32_t zero = minima && bits < 8 ? 0 : kBytes << (bits - 1);
    if (tensor->bits == 8) return (found ^ zero) & ((1U << bits) - 1) * kBytes & mask;
    return (found + zero - (minima ? 0 : 8 * kBytes)) & mask;
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

// Places of four codes in the table.
inline std::uint32_t table_places(std::uint32_t codes) {
  std::uint32_t places = 0;
  for (int i = 0; i < 32; i += 8) {
    std::uint32_t place = 0;
    while (place < 16 && kTableCodes[place] != (codes >> i & 0xff)) ++place;
    places |= place % 16 << i;  // 0 after the depth
  }
  return places;
}

// Stores code word `word` of a group. `lane`: the stored words of the group and lane.
template <class G>
void put_codes(char* lane, std::int64_t word, std::uint32_t codes) {
  const auto add = [&](std::int64_t stored, std::uint32_t bits) {
    char* const to = lane + 4 * kPanelOutputs * stored;
    std::uint32_t there;
    memcpy(&there, to, sizeof there);
    there |= bits;
    memcpy(to, &there, sizeof there);
  };
  if constexpr (G::kNumBits == 8) {
    add(word, codes);
  } else if constexpr (G::kNumBits == 6) {
    if (word % 4 < 3) return add(word, codes);
    for (int i = 0; i < 3; ++i) add(i, (codes >> 2 * i & 0x03030303U) << 6);
  } else {
    if (G::kByTable) codes = table_places(codes);
    add(word / 2, (codes & 0x0f0f0f0fU) << word % 2 * 4);
    if (G::kNumBits == 5) add(4, (codes >> 4 & 0x01010101U) << word);
  }
}

template <class G>
void pack_grouped_lane(const PackArgs& a, const GroupedLane& from, int lane, char* at) {
  const std::int64_t depth = (a.depth + kDepthUnit - 1) / kDepthUnit * kDepthUnit;
  const ScaleFormat format = a.scale_format;
  const int vector = lane / Vec::kWidth, i = lane % Vec::kWidth;
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
    for (std::int64_t word = 0; inside && word < G::kDepth / 4; ++word) {
      put_codes<G>(at + (vector * Vec::kWidth + i) * 4, word,
                   interleaved(from.codes(first + 4 * word, G::kCodeBits, format.minima)));
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
