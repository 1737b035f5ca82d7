// Addresses of K and V in either view.
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

// Address of 16 bytes of a tile's row in shared memory. Rows have kHeadDim elements; their units
// are swizzled, so that the eight rows of a fragment are in different banks.
template <int kHeadDim>
VMS_DEVICE int tile_offset(int row, int unit) {
  return row * kHeadDim * 2 + ((unit ^ (row & 7)) << 4);
}

// Starts to copy kTokens positions from `begin` on into a K and a V tile, 16 at a time, each 16 in
// one block. Positions from `end` (> begin) on become zeros and are not read.
template <int kHeadDim, bool kPaged, int kTokens, int kThreads>
VMS_DEVICE void start_tiles(const KvLayer& kv, int row, i64 head_offset, int begin, int end,
                            int thread, char* k_tile, char* v_tile) {
  constexpr int kUnits = kHeadDim / 8;                 // in a row
  constexpr int kRows = kThreads / kUnits;             // copied at once
  constexpr int kSteps = kRows < 16 ? 16 / kRows : 1;  // for 16 rows
  constexpr int kSixteens = kTokens / 16;
  static_assert(kRows <= 16, "more threads than 16 rows have units");
  i64 offsets[kSixteens];
#pragma unroll
  for (int i = 0; i < kSixteens; ++i) {
    // Table entries after the end are undefined: skipped copies use the first, a valid address.
    if (i > 0) offsets[i] = offsets[0];
    if (i == 0 || begin + 16 * i < end) offsets[i] = kv_offset<kPaged>(kv, row, begin + 16 * i);
  }
  const int unit = thread % kUnits, first = thread / kUnits;
#pragma unroll
  for (int i = 0; i < kSixteens; ++i) {
    const i64 base = offsets[i] + head_offset + unit * 16;
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      const int r = first + step * kRows;
      const bool valid = begin + 16 * i + r < end;
      const i64 from = base + (valid ? r * kv.token_stride : 0);
      const int to = tile_offset<kHeadDim>(16 * i + r, unit);
      ptx::copy_async(k_tile + to, kv.keys + from, valid);
      ptx::copy_async(v_tile + to, kv.values + from, valid);
    }
  }
}
