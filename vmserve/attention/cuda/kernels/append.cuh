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

template <class KV, int kHeadDim>
struct AppendMemory {
  using Tile = TileMemory<KV, kHeadDim, kTileTokens>;
  static constexpr int kQueryBytes = kAppendRows<kHeadDim> * kHeadDim * 2;
  static constexpr int kBytes = kQueryBytes + kAppendStages * Tile::kBytes;

  char* const base;
  VMS_DEVICE char* queries() const { return base; }
  VMS_DEVICE Tile tile(int stage) const { return {base + kQueryBytes + stage * Tile::kBytes}; }
};

// What a thread has of the parts so far, in global memory: registers have no room for it beside
// what it has of a part. [blocks of rows][head_dim / 8 and one more][2][threads]
template <int kHeadDim>
VMS_DEVICE Pair* scratch_at(const AttendArgs& args, int b, int n, int half) {
  constexpr int kSlots = kAppendBlocks<kHeadDim> * (kHeadDim / 8 + 1) * 2;
  const int slot = (b * (kHeadDim / 8 + 1) + n) * 2 + half;
  return args.scratch + (static_cast<i64>(ptx::block()) * kSlots + slot) * (32 * kAppendWarps) +
         ptx::thread();
}

// Ends the part that the tile from `begin` on belongs to, for the warp's block b of rows.
template <class T, class KV, int kHeadDim>
VMS_DEVICE void end_part_of_block(const ItemRows& rows, int first, int b, int begin,
                                  RowSums<kHeadDim>& sums) {
  const int index = begin / kPartTokens - rows.item.kv_begin / kPartTokens;
  const bool last = begin + kTileTokens >= rows.item.kv_end;
  if (rows.exported()) {
    store_part<KV, kHeadDim>(rows, sums, first, 0, index);
  } else {
    Parts parts[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      parts[half].clear();
      if (index == 0) continue;
      const Pair sum = ptx::load(scratch_at<kHeadDim>(rows.args, b, kHeadDim / 8, half));
      parts[half] = Parts{sum.x, sum.y};
    }
    end_part(sums, parts, [&](int n, int half, float of_old, float of_new) {
      float* const part = sums.out[n] + 2 * half;
      Pair* const at = scratch_at<kHeadDim>(rows.args, b, n, half);
      const Pair old = index > 0 ? ptx::load(at) : Pair{0.0F, 0.0F};
      part[0] = Parts::folded(old.x, of_old, part[0], of_new);
      part[1] = Parts::folded(old.y, of_old, part[1], of_new);
      if (!last) ptx::store(at, Pair{part[0], part[1]});
    });
    if (last) {
      store_rows<T, KV, kHeadDim>(rows, sums, parts, first, 0);
    } else {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        ptx::store(scratch_at<kHeadDim>(rows.args, b, kHeadDim / 8, half),
                   Pair{parts[half].maximum, parts[half].total});
      }
    }
  }
  if (!last) sums.clear();
}

template <class T, class KV, int kHeadDim, bool kPaged, int kBlocks>
VMS_DEVICE void append_item(const ItemRows& rows, int work,
                            const AppendMemory<KV, kHeadDim>& memory) {
  // Queries of two blocks of long heads would need too many registers.
  constexpr bool kHeld = kHeadDim * kBlocks <= 128;
  const int lane = ptx::thread() & 31, first = (ptx::thread() >> 5) * 16;
  const WorkItem& item = rows.item;  // read again where it is seldom needed: registers are scarce

  auto start = [&](int begin, int stage) {
    if (begin < item.kv_end) {
      start_tile<KV, kHeadDim, kPaged, kTileTokens, 32 * kAppendWarps>(
          rows.args.kv, item.row, rows.head_offset(), rows.scale_offset(), begin, item.kv_end,
          ptx::thread(), memory.tile(stage));
    }
    ptx::copy_commit();
  };
  start(item.kv_begin, item.kv_begin / kTileTokens & 1);
  load_queries<T, KV, kHeadDim, 16 * kAppendWarps * kBlocks, 32 * kAppendWarps>(rows,
                                                                                memory.queries());
  ptx::sync_block();
  int lowest, highest;  // of all of the warp's rows
  rows.span(first, first + (kBlocks - 1) * kBlockStride + 15, lowest, highest);
  QueryRows<T, kHeadDim, kHeld> queries[kBlocks];
  RowSums<kHeadDim> sums[kBlocks];
#pragma unroll
  for (int b = 0; b < kBlocks; ++b) {
    queries[b].take(memory.queries() + b * kBlockStride * kHeadDim * 2, first, lane);
    sums[b].clear();
  }
  for (int begin = item.kv_begin; begin < item.kv_end; begin += kTileTokens) {
    const int stage = begin / kTileTokens & 1;
    ptx::copy_wait<0>();
    ptx::sync_block();  // the tile has arrived, and no warp still uses the one before
    start(begin + kTileTokens, stage ^ 1);
    // Skips warps without rows, and tiles that none of the warp's rows attends to.
    if (first < rows.num_rows && begin <= highest &&
        (rows.args.window == 0 || begin + kTileTokens + rows.args.window > lowest + 1)) {
      float scores[kBlocks][kTileTokens / 8][4];
      score<T>(queries, memory.tile(stage), lane, scores);
#pragma unroll
      for (int b = 0; b < kBlocks; ++b) {
        weights_of(rows.args, item.kv_end, first + b * kBlockStride, lowest, highest, begin,
                   scores[b], sums[b],
                   [&](int row, int& low, int& high) { rows.visible(row, low, high); });
      }
      weigh<T>(scores, memory.tile(stage), lane, 0, sums);
    }
    if (!rows.ends_part(begin)) continue;
    const ItemRows again(rows.args, work);
#pragma unroll
    for (int b = 0; b < kBlocks; ++b) {
      const int row = first + b * kBlockStride;
      if (row < again.num_rows) end_part_of_block<T, KV>(again, row, b, begin, sums[b]);
    }
  }
}

template <class T, class KV, int kHeadDim, bool kPaged>
VMS_DEVICE void attend_append(const AttendArgs& args) {
  const AppendMemory<KV, kHeadDim> memory{ptx::shared()};
  // Reads num_items again each time, because registers are scarce.
  for (int work = ptx::block(); work < ptx::load(args.num_items) * args.kv_heads;
       work += ptx::num_blocks()) {
    const ItemRows rows(args, work);
    if (kAppendBlocks<kHeadDim> > 1 && rows.num_rows > 16 * kAppendWarps) {
      append_item<T, KV, kHeadDim, kPaged, kAppendBlocks<kHeadDim>>(rows, work, memory);
    } else {
      append_item<T, KV, kHeadDim, kPaged, 1>(rows, work, memory);
    }
    ptx::sync_block();  // all warps are done before queries and tiles are overwritten
  }
}
