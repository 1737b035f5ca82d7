// Attention of few query rows over many keys. Bound by memory bandwidth.
//
// The rows of an item (tokens x group, at most 16) are one fragment, and the four warps of a block
// share a ring of tiles in flight. Each scores eight positions of a tile; all take the scores of
// all, do the same softmax, and add a quarter of the columns of the values. So the tiles of a row
// are added in their order, as the append kernel adds them.
#pragma once

#include "tile.cuh"

constexpr int kDecodeRows = 16;
constexpr int kDecodeWarps = kTileTokens / 8;

template <class KV, int kHeadDim, int kStages>
struct DecodeMemory {
  using Tile = TileMemory<KV, kHeadDim, kTileTokens>;
  static constexpr int kQueryBytes = kDecodeRows * kHeadDim * 2;
  // Stride in floats of a row of scores: four rows that are accessed at once are in different
  // banks.
  static constexpr int kScoreStride = kTileTokens + 8;
  static constexpr int kScoreBytes = kDecodeRows * kScoreStride * 4;
  static constexpr int kBytes = kQueryBytes + kScoreBytes + kStages * Tile::kBytes;

  char* const base;
  VMS_DEVICE char* queries() const { return base; }
  VMS_DEVICE Pair* scores(int row, int column) const {
    return reinterpret_cast<Pair*>(base + kQueryBytes + (row * kScoreStride + column) * 4);
  }
  VMS_DEVICE Tile tile(int stage) const {
    return {base + kQueryBytes + kScoreBytes + stage * Tile::kBytes};
  }
};

// Scores of the warp's eight positions, which all warps need.
template <class T, class KV, int kHeadDim, int kStages>
VMS_DEVICE void share_scores(const QueryRows<T, kHeadDim, true>& queries, int stage,
                             const DecodeMemory<KV, kHeadDim, kStages>& memory) {
  const int warp = ptx::thread() >> 5, lane = ptx::thread() & 31;
  const auto tile = memory.tile(stage);
  float scores[1][4] = {{0.0F, 0.0F, 0.0F, 0.0F}};
  if constexpr (kCoded<KV>) {
#pragma unroll
    for (int k = 0; k < kHeadDim / 16; k += 4) {
      u32 keys[4];
      ptx::load_matrices(
          keys, tile.keys() + tile_offset<KV, kHeadDim>(8 * warp + (lane & 7), k + (lane >> 3)));
#pragma unroll
      for (int step = 0; step < 4; ++step) {
        u32 even, odd;
        widen_codes<T>(keys[step], even, odd);
        ptx::multiply_add<T>(scores[0], queries.held[k + step], even, odd);
      }
    }
    scale_scores(scores, tile.key_scales() + 8 * warp * 4, lane);
  } else {
#pragma unroll
    for (int k = 0; k < kHeadDim / 16; k += 2) {
      u32 keys[4];
      ptx::load_matrices(keys, tile.keys() + tile_offset<KV, kHeadDim>(8 * warp + (lane & 7),
                                                                       2 * k + (lane >> 3)));
      ptx::multiply_add<T>(scores[0], queries.held[k], keys[0], keys[1]);
      ptx::multiply_add<T>(scores[0], queries.held[k + 1], keys[2], keys[3]);
    }
  }
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    *memory.scores((lane >> 2) + 8 * half, 8 * warp + 2 * (lane & 3)) =
        Pair{scores[0][2 * half], scores[0][2 * half + 1]};
  }
}

template <class T, class KV, int kHeadDim, bool kPaged, int kStages>
VMS_DEVICE void decode_item(const ItemRows& rows,
                            const DecodeMemory<KV, kHeadDim, kStages>& memory) {
  constexpr int kColumns = kHeadDim / kDecodeWarps, kCount = kTileTokens / 8;
  const int warp = ptx::thread() >> 5, lane = ptx::thread() & 31, column = warp * kColumns;
  const WorkItem& item = rows.item;

  auto start = [&](int begin, int stage) {
    if (begin < item.kv_end) {
      start_tile<KV, kHeadDim, kPaged, kTileTokens, 32 * kDecodeWarps>(
          rows.args.kv, item.row, rows.head_offset(), rows.scale_offset(), begin, item.kv_end,
          ptx::thread(), memory.tile(stage));
    }
    ptx::copy_commit();  // even if empty: waits count commits
  };
#pragma unroll
  for (int stage = 0; stage + 1 < kStages; ++stage) {
    start(item.kv_begin + stage * kTileTokens, stage);
  }

  load_queries<T, KV, kHeadDim, kDecodeRows, 32 * kDecodeWarps>(rows, memory.queries());
  int lowest, highest;
  rows.span(0, kDecodeRows - 1, lowest, highest);
  ptx::sync_block();
  QueryRows<T, kHeadDim, true> queries;
  queries.take(memory.queries(), 0, lane);
  RowSums<kColumns> sums[1], row;
  Parts parts[2];
  sums[0].clear();
  row.clear();
  parts[0].clear();
  parts[1].clear();
  const bool exported = rows.exported();
  int stage = 0, next = kStages - 1, index = 0;
  for (int begin = item.kv_begin; begin < item.kv_end; begin += kTileTokens) {
    ptx::copy_wait<kStages - 2>();
    ptx::sync_block();  // the tile has arrived, and no warp still uses the one before
    start(begin + (kStages - 1) * kTileTokens, next);
    share_scores<T>(queries, stage, memory);
    ptx::sync_block();
    float scores[1][kCount][4];
#pragma unroll
    for (int n = 0; n < kCount; ++n) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const Pair pair = *memory.scores((lane >> 2) + 8 * half, 8 * n + 2 * (lane & 3));
        scores[0][n][2 * half] = pair.x;
        scores[0][n][2 * half + 1] = pair.y;
      }
    }
    weights_of(rows.args, item.kv_end, 0, lowest, highest, begin, scores[0], sums[0],
               [&](int row_of, int& low, int& high) { rows.visible(row_of, low, high); });
    weigh<T>(scores, memory.tile(stage), lane, column, sums);
    next = stage;
    stage = stage + 1 == kStages ? 0 : stage + 1;
    if (!rows.ends_part(begin)) continue;
    if (exported) {
      store_part<KV, kHeadDim>(rows, sums[0], 0, column, index++);
    } else {
      end_part(sums[0], parts, [&](int n, int half, float of_old, float of_new) {
#pragma unroll
        for (int i = 2 * half; i < 2 * half + 2; ++i) {
          row.out[n][i] = Parts::folded(row.out[n][i], of_old, sums[0].out[n][i], of_new);
        }
      });
    }
    sums[0].clear();
  }
  if (!exported) store_rows<T, KV, kHeadDim>(rows, row, parts, 0, column);
}

template <class T, class KV, int kHeadDim, bool kPaged, int kStages>
VMS_DEVICE void attend_decode(const AttendArgs& args) {
  const DecodeMemory<KV, kHeadDim, kStages> memory{ptx::shared()};
  const int num_work = ptx::load(args.num_items) * args.kv_heads;
  for (int work = ptx::block(); work < num_work; work += ptx::num_blocks()) {
    decode_item<T, KV, kHeadDim, kPaged, kStages>(ItemRows(args, work), memory);
    ptx::sync_block();  // all warps are done before queries and tiles are overwritten
  }
}
