// Attention of many query rows: chunks of a prompt, and shared prefixes. Bound by arithmetic.
//
// An item has up to 128 rows (tokens x group), in blocks of 16. Each of the four warps takes two
// blocks, or one if there are at most 64 rows, or if heads are so long that two blocks do not fit
// in registers. The warps share tiles of K and V; the next tile is loaded while they work on one.
// What a warp loads from a tile serves both of its blocks, because shared memory limits the tensor
// cores.
#pragma once

#include "tile.cuh"

constexpr int kAppendWarps = 4;
constexpr int kAppendStages = 2;
constexpr int kBlockStride = 16 * kAppendWarps;  // a warp takes every fourth block of rows

// The most blocks of rows of a warp, and rows of an item.
template <int kHeadDim>
constexpr int kAppendBlocks = kHeadDim == 256 ? 1 : 2;
template <int kHeadDim>
constexpr int kAppendRows = 16 * kAppendWarps * kAppendBlocks<kHeadDim>;
constexpr int kAppendTokens = 32;

template <int kHeadDim>
struct AppendMemory {
  static constexpr int kTileBytes = kAppendTokens * kHeadDim * 2;
  static constexpr int kQueryBytes = kAppendRows<kHeadDim> * kHeadDim * 2;
  static constexpr int kBytes = kQueryBytes + kAppendStages * 2 * kTileBytes;

  char* const base;
  VMS_DEVICE char* queries() const { return base; }
  VMS_DEVICE char* k_tile(int stage) const { return base + kQueryBytes + stage * 2 * kTileBytes; }
  VMS_DEVICE char* v_tile(int stage) const { return k_tile(stage) + kTileBytes; }
};

template <class T, int kHeadDim>
VMS_DEVICE void store_rows(const ItemRows& rows, const RowSums<kHeadDim>& sums, int first,
                           float scale) {
  const int lane = ptx::thread() & 31;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int row = first + (lane >> 2) + 8 * half;
    const float total = quad_sum(sums.total[half]);
    if (row >= rows.num_rows) continue;
    const float inverse = total > 0.0F ? 1.0F / total : 0.0F;
    const RowTarget target(rows, row);
#pragma unroll
    for (int n = 0; n < kHeadDim / 8; ++n) {
      store_pair<T, kHeadDim>(rows.args, target, 8 * n + 2 * (lane & 3),
                              sums.out[n][2 * half] * inverse, sums.out[n][2 * half + 1] * inverse);
    }
    const float shift = total > 0.0F ? sums.maximum[half] * scale : 0.0F;
    if ((lane & 3) == 0) store_lse(rows.args, target, shift + ptx::log2(total));
  }
}

template <class T, int kHeadDim, bool kPaged, int kBlocks>
VMS_DEVICE void append_item(const ItemRows& rows, const AppendMemory<kHeadDim>& memory) {
  constexpr int kTokens = kAppendTokens;
  // Queries of two blocks of long heads would need too many registers.
  constexpr bool kHeld = kHeadDim * kBlocks <= 128;
  const int lane = ptx::thread() & 31, first = (ptx::thread() >> 5) * 16;
  const WorkItem& item = rows.item;

  auto start = [&](int begin, int stage) {
    if (begin < item.kv_end) {
      start_tiles<kHeadDim, kPaged, kTokens, 32 * kAppendWarps>(
          rows.args.kv, item.row, rows.head_offset(), begin, item.kv_end, ptx::thread(),
          memory.k_tile(stage), memory.v_tile(stage));
    }
    ptx::copy_commit();
  };
  start(item.kv_begin, 0);
  load_queries<kHeadDim, 16 * kAppendWarps * kBlocks, 32 * kAppendWarps>(rows, memory.queries());
  ptx::sync_block();
  Sight sight[kBlocks];
  QueryRows<kHeadDim, kHeld> queries[kBlocks];
  RowSums<kHeadDim> sums[kBlocks];
#pragma unroll
  for (int b = 0; b < kBlocks; ++b) {
    const int row = first + b * kBlockStride;
    sight[b].take(rows, row);
    queries[b].take(memory.queries(), row, lane);
    sums[b].clear();
  }

  int stage = 0;
  for (int begin = item.kv_begin; begin < item.kv_end; begin += kTokens, stage ^= 1) {
    ptx::copy_wait<0>();
    ptx::sync_block();  // the tile has arrived, and no warp still uses the one before
    start(begin + kTokens, stage ^ 1);
    // Skips warps without rows, and tiles that none of the warp's rows attends to.
    bool seen = false;
#pragma unroll
    for (int b = 0; b < kBlocks; ++b) {
      seen |= first + b * kBlockStride < rows.num_rows && begin <= sight[b].highest &&
              (rows.args.window == 0 || begin + kTokens + rows.args.window > sight[b].lowest + 1);
    }
    if (seen) {
      attend_tile<T, kHeadDim, kTokens>(rows, queries, memory.k_tile(stage), memory.v_tile(stage),
                                        begin, sight, sums);
    }
  }
#pragma unroll
  for (int b = 0; b < kBlocks; ++b) {
    store_rows<T>(rows, sums[b], first + b * kBlockStride,
                  rows.args.softcap > 0.0F ? 1.0F : rows.args.scale);
  }
}

template <class T, int kHeadDim, bool kPaged>
VMS_DEVICE void attend_append(const AttendArgs& args) {
  const AppendMemory<kHeadDim> memory{ptx::shared()};
  // Reads num_items again each time, because registers are scarce.
  for (int work = ptx::block(); work < ptx::load(args.num_items) * args.kv_heads;
       work += ptx::num_blocks()) {
    const ItemRows rows(args, work);
    if (kAppendBlocks<kHeadDim> > 1 && rows.num_rows > 16 * kAppendWarps) {
      append_item<T, kHeadDim, kPaged, kAppendBlocks<kHeadDim>>(rows, memory);
    } else {
      append_item<T, kHeadDim, kPaged, 1>(rows, memory);
    }
    ptx::sync_block();  // all warps are done before queries and tiles are overwritten
  }
}
