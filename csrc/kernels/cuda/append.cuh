// Many query rows: chunks of a prompt, and shared prefixes. Bound by arithmetic.
//
// An item has up to 64 rows (tokens x group), 16 for each of the four warps, which share the tiles
// of K and V: while they work on one, the next is in flight.
#pragma once

#include "tile.cuh"

constexpr int kAppendRows = 64;
constexpr int kAppendWarps = 4;
constexpr int kAppendStages = 2;

template <int kHeadDim>
constexpr int kAppendTokens = kHeadDim == 256 ? 32 : 64;

template <int kHeadDim>
struct AppendMemory {
  static constexpr int kTileBytes = kAppendTokens<kHeadDim> * kHeadDim * 2;
  static constexpr int kQueryBytes = kAppendRows * kHeadDim * 2;
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

template <class T, int kHeadDim, bool kPaged>
VMS_DEVICE void append_item(const ItemRows& rows, const AppendMemory<kHeadDim>& memory) {
  constexpr int kTokens = kAppendTokens<kHeadDim>;
  const int lane = ptx::thread() & 31, first = (ptx::thread() >> 5) * 16;
  const WorkItem& item = rows.item;
  const int count = (item.kv_end - item.kv_begin + kTokens - 1) / kTokens;

  auto start = [&](int tile) {
    if (tile < count) {
      start_tiles<kHeadDim, kPaged, kTokens, 32 * kAppendWarps>(
          rows.args.kv, item.row, rows.head_offset(), item.kv_begin + tile * kTokens, item.kv_end,
          ptx::thread(), memory.k_tile(tile & 1), memory.v_tile(tile & 1));
    }
    ptx::copy_commit();
  };
  start(0);
  load_queries<kHeadDim, kAppendRows, 32 * kAppendWarps>(rows, memory.queries());
  int low[2], high[2], lowest, highest;
  rows.visible(first + (lane >> 2), low[0], high[0]);
  rows.visible(first + (lane >> 2) + 8, low[1], high[1]);
  rows.span(first, lowest, highest);
  ptx::sync_block();
  QueryRows<kHeadDim> queries;
  queries.take(memory.queries(), first, lane);
  RowSums<kHeadDim> sums;
  sums.clear();

  for (int tile = 0; tile < count; ++tile) {
    ptx::copy_wait<0>();
    ptx::sync_block();  // the tile is there, and every warp is done with the one before
    start(tile + 1);
    const int begin = item.kv_begin + tile * kTokens;
    // Warps without rows, and tiles that none of the warp's rows sees.
    const bool seen = begin <= highest && (rows.args.window == 0 ||
                                           begin + kTokens + rows.args.window > lowest + 1);
    if (first < rows.num_rows && seen) {
      attend_tile<T, kHeadDim, kTokens>(rows, queries, memory.k_tile(tile & 1),
                                        memory.v_tile(tile & 1), begin, lowest, highest, low, high,
                                        sums);
    }
  }
  store_rows<T>(rows, sums, first, rows.args.softcap > 0.0F ? 1.0F : rows.args.scale);
}

template <class T, int kHeadDim, bool kPaged>
VMS_DEVICE void attend_append(const AttendArgs& args) {
  const AppendMemory<kHeadDim> memory{ptx::shared()};
  const int num_work = ptx::load(args.num_items) * args.kv_heads;
  for (int work = ptx::block(); work < num_work; work += ptx::num_blocks()) {
    append_item<T, kHeadDim, kPaged>(ItemRows(args, work), memory);
    ptx::sync_block();  // before queries and tiles are overwritten
  }
}
