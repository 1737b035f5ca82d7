// Addresses of K and V in either view, and what their elements are.
//
// K and V have elements of type KV: that of the queries, T, or E4m3. Then a head's row of a token
// has a scale, and stands for code / 256 * scale. The scales of all heads are behind the codes of
// the last one. No code is NaN; a row with a number that is not finite has the scale NaN.
#pragma once

#include "params.h"

// Offset in bytes from position 0 of page 0 to `position`; reads its entry of the block table.
template <bool kPaged>
VMS_DEVICE i64 kv_offset(const KvLayer& kv, int row, int position) {
  if (!kPaged) return row * kv.page_stride + position * kv.token_stride;
  const int block =
      ptx::load(kv.table + static_cast<i64>(row) * kv.table_width + (position >> kv.block_shift));
  const int token = position & ((1 << kv.block_shift) - 1);
  if (kv.blocks_per_page == 1) return block * kv.page_stride + token * kv.token_stride;
  const int page = block / kv.blocks_per_page;
  const int part = block - page * kv.blocks_per_page;
  return page * kv.page_stride +
         (static_cast<i64>(part << kv.block_shift) + token) * kv.token_stride;
}

template <class KV>
constexpr bool kCoded = sizeof(KV) == 1;

// What a multiprocessor takes of a tile of K and V: the elements, then scales, if there are any.
template <class KV, int kHeadDim, int kTokens>
struct TileMemory {
  static constexpr int kRowsBytes = kTokens * kHeadDim * static_cast<int>(sizeof(KV));
  static constexpr int kScaleBytes = kCoded<KV> ? kTokens * 4 : 0;
  static constexpr int kBytes = 2 * (kRowsBytes + kScaleBytes);

  char* const base;
  VMS_DEVICE char* keys() const { return base; }
  VMS_DEVICE char* values() const { return base + kRowsBytes; }
  VMS_DEVICE char* key_scales() const { return base + 2 * kRowsBytes; }
  VMS_DEVICE char* value_scales() const { return key_scales() + kScaleBytes; }
};

// Address of 16 bytes of a tile's row in shared memory. Rows have kHeadDim elements; their units
// are swizzled, so that the eight rows of a fragment are in different banks.
template <class Element, int kHeadDim>
VMS_DEVICE int tile_offset(int row, int unit) {
  constexpr int kRowBytes = kHeadDim * static_cast<int>(sizeof(Element));
  const int swizzled = kRowBytes >= 128 ? unit ^ (row & 7) : unit ^ (row >> 1 & 3);
  return row * kRowBytes + (swizzled << 4);
}

// Turns four codes into elements of type T that are 2^-8 of what the codes are: bytes 0 and 2, and
// 1 and 3. Moves bits; zeros and subnormals come right of themselves.
template <class T>
VMS_DEVICE u32 widened_pair(u32 codes);  // in the high byte of each half
template <>
VMS_DEVICE u32 widened_pair<Fp16>(u32 codes) {
  return (codes & 0x80008000U) | (codes >> 1 & 0x3f803f80U);
}
template <>
VMS_DEVICE u32 widened_pair<Bf16>(u32 codes) {
  // These bits are 2^-120 of it; the factor is 2^112.
  return ptx::product_of_pairs((codes & 0x80008000U) | (codes >> 4 & 0x07f007f0U), 0x77807780U);
}
template <class T>
VMS_DEVICE void widen_codes(u32 codes, u32& even, u32& odd) {
  even = widened_pair<T>(codes << 8);
  odd = widened_pair<T>(codes);
}

// Starts to copy kTokens positions from `begin` on into a tile, 16 at a time, each 16 in one block.
// Positions from `end` (> begin) on become zeros and are not read.
template <class KV, int kHeadDim, bool kPaged, int kTokens, int kThreads>
VMS_DEVICE void start_tile(const KvLayer& kv, int row, i64 head_offset, i64 scale_offset, int begin,
                           int end, int thread, const TileMemory<KV, kHeadDim, kTokens>& tile) {
  constexpr int kUnits = kHeadDim * static_cast<int>(sizeof(KV)) / 16;  // in a row
  constexpr int kRows = kThreads / kUnits;                              // copied at once
  constexpr int kSteps = kRows < 16 ? 16 / kRows : 1;                   // for 16 rows
  constexpr int kAtOnce = kRows > 16 ? kRows / 16 : 1;  // threads that copy different 16 rows
  constexpr int kSixteens = kTokens / 16 / kAtOnce;     // of a thread
  const int unit = thread % kUnits;
  const int first = kAtOnce > 1 ? thread / kUnits % 16 : thread / kUnits;
  const int own = kAtOnce > 1 ? thread / (16 * kUnits) : 0;
  i64 offsets[kSixteens];
#pragma unroll
  for (int i = 0; i < kSixteens; ++i) {
    // Table entries after the end are undefined: skipped copies use the first, a valid address.
    if (i > 0) offsets[i] = offsets[0];
    const int at = begin + 16 * (kAtOnce * i + own);
    if (at < end || (i == 0 && own == 0)) {
      offsets[i] = kv_offset<kPaged>(kv, row, at);
    } else if (i == 0) {
      offsets[i] = kv_offset<kPaged>(kv, row, begin);
    }
  }
#pragma unroll
  for (int i = 0; i < kSixteens; ++i) {
    const i64 base = offsets[i] + head_offset + unit * 16;
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      const int sixteen = 16 * (kAtOnce * i + own), r = first + step * kRows;
      const bool valid = begin + sixteen + r < end;
      const i64 from = base + (valid ? r * kv.token_stride : 0);
      const int to = tile_offset<KV, kHeadDim>(sixteen + r, unit);
      ptx::copy_async(tile.keys() + to, kv.keys + from, valid);
      ptx::copy_async(tile.values() + to, kv.values + from, valid);
      if (kCoded<KV> && unit < 2) {  // one thread for K's scale, one for V's
        const i64 scale = from + scale_offset - unit * 16;
        ptx::copy_async_word(
            (unit == 0 ? tile.key_scales() : tile.value_scales()) + (sixteen + r) * 4,
            (unit == 0 ? kv.keys : kv.values) + scale, valid);
      }
    }
  }
}
