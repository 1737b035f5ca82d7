// Attention of few query rows over many keys. Bound by memory bandwidth.
//
// The rows of an item (tokens x group, at most 16) are one fragment. The four warps of a block take
// tiles of 16 positions in turn. Each warp has its own ring of tiles in flight and waits for no
// other warp until the end, when their sums are merged in shared memory.
#pragma once

#include "tile.cuh"

constexpr int kDecodeRows = 16;
constexpr int kDecodeTokens = 16;
constexpr int kDecodeWarps = 4;

template <int kHeadDim, int kStages>
struct DecodeMemory {
  static constexpr int kTileBytes = kDecodeTokens * kHeadDim * 2;
  static constexpr int kRingBytes = kStages * 2 * kTileBytes;  // for each warp
  static constexpr int kQueryBytes = kDecodeRows * kHeadDim * 2;
  static constexpr int kStatBytes = kDecodeWarps * kDecodeRows * 2 * 4;
  static constexpr int kBytes = kQueryBytes + kStatBytes + kDecodeWarps * kRingBytes;
  // Stride in floats of a warp's sums, which replace its ring: the rows of a fragment are in
  // different banks.
  static constexpr int kSumStride = kHeadDim + 8;
  static_assert(kDecodeRows * kSumStride * 4 <= kRingBytes, "two stages at least");

  char* const base;
  VMS_DEVICE char* queries() const { return base; }
  VMS_DEVICE float* maxima(int warp) const {
    return reinterpret_cast<float*>(base + kQueryBytes) + warp * kDecodeRows * 2;
  }
  VMS_DEVICE float* totals(int warp) const { return maxima(warp) + kDecodeRows; }
  VMS_DEVICE char* ring(int warp) const {
    return base + kQueryBytes + kStatBytes + warp * kRingBytes;
  }
  VMS_DEVICE char* k_tile(int warp, int stage) const { return ring(warp) + stage * 2 * kTileBytes; }
  VMS_DEVICE char* v_tile(int warp, int stage) const { return k_tile(warp, stage) + kTileBytes; }
  VMS_DEVICE float* sums(int warp) const { return reinterpret_cast<float*>(ring(warp)); }
};

// Processes this warp's tiles of the item, every fourth. `ready`: the block's queries are in shared
// memory.
template <class T, int kHeadDim, bool kPaged, int kStages>
VMS_DEVICE void decode_tiles(const ItemRows& rows, const DecodeMemory<kHeadDim, kStages>& memory,
                             RowSums<kHeadDim> (&sums)[1]) {
  const int warp = ptx::thread() >> 5, lane = ptx::thread() & 31;
  const WorkItem& item = rows.item;
  const int tiles = (item.kv_end - item.kv_begin + kDecodeTokens - 1) / kDecodeTokens;
  const int count = (tiles - warp + kDecodeWarps - 1) / kDecodeWarps;
  const int first = item.kv_begin + warp * kDecodeTokens;
  constexpr int kStep = kDecodeWarps * kDecodeTokens;

  auto start = [&](int tile, int stage) {
    if (tile < count) {
      start_tiles<kHeadDim, kPaged, kDecodeTokens, 32>(
          rows.args.kv, item.row, rows.head_offset(), first + tile * kStep, item.kv_end, lane,
          memory.k_tile(warp, stage), memory.v_tile(warp, stage));
    }
    ptx::copy_commit();  // even if empty: waits count commits
  };
#pragma unroll
  for (int stage = 0; stage < kStages; ++stage) start(stage, stage);

  load_queries<kHeadDim, kDecodeRows, 32 * kDecodeWarps>(rows, memory.queries());
  Sight sight[1];
  sight[0].take(rows, 0);
  ptx::sync_block();
  QueryRows<kHeadDim> queries[1];
  queries[0].take(memory.queries(), 0, lane);
  sums[0].clear();

  int stage = 0;
  for (int tile = 0; tile < count; ++tile) {
    ptx::copy_wait<kStages - 1>();
    ptx::sync_warp();
    attend_tile<T, kHeadDim, kDecodeTokens>(rows, queries, memory.k_tile(warp, stage),
                                            memory.v_tile(warp, stage), first + tile * kStep, sight,
                                            sums);
    ptx::sync_warp();  // every lane has read the stage before it is overwritten
    start(tile + kStages, stage);
    stage = stage + 1 == kStages ? 0 : stage + 1;
  }
}

// Stores the warp's sums for the other warps, in place of its ring.
template <int kHeadDim, int kStages>
VMS_DEVICE void share_sums(const RowSums<kHeadDim>& sums, float scale,
                           const DecodeMemory<kHeadDim, kStages>& memory) {
  const int warp = ptx::thread() >> 5, lane = ptx::thread() & 31;
  float* const to = memory.sums(warp);
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int row = (lane >> 2) + 8 * half;
    const float total = quad_sum(sums.total[half]);
    if ((lane & 3) == 0) {
      memory.maxima(warp)[row] = sums.maximum[half] * scale;
      memory.totals(warp)[row] = total;
    }
#pragma unroll
    for (int n = 0; n < kHeadDim / 8; ++n) {
      *reinterpret_cast<Pair*>(to + row * memory.kSumStride + 8 * n + 2 * (lane & 3)) =
          Pair{sums.out[n][2 * half], sums.out[n][2 * half + 1]};
    }
  }
}

// Merges the sums of the four warps, two elements at a time, and stores the rows.
template <class T, int kHeadDim, int kStages>
VMS_DEVICE void merge_sums(const ItemRows& rows, const DecodeMemory<kHeadDim, kStages>& memory) {
  for (int i = ptx::thread(); i < rows.num_rows * (kHeadDim / 2); i += 32 * kDecodeWarps) {
    const int row = i / (kHeadDim / 2), d = 2 * (i % (kHeadDim / 2));
    float maximum = -ptx::infinity();
#pragma unroll
    for (int w = 0; w < kDecodeWarps; ++w) maximum = ptx::larger(maximum, memory.maxima(w)[row]);
    const float shift = maximum == -ptx::infinity() ? 0.0F : maximum;
    float total = 0.0F, x = 0.0F, y = 0.0F;
#pragma unroll
    for (int w = 0; w < kDecodeWarps; ++w) {
      const float factor = ptx::exp2(memory.maxima(w)[row] - shift);
      const Pair pair =
          *reinterpret_cast<const Pair*>(memory.sums(w) + row * memory.kSumStride + d);
      total = ptx::multiply_add(factor, memory.totals(w)[row], total);
      x = ptx::multiply_add(factor, pair.x, x);
      y = ptx::multiply_add(factor, pair.y, y);
    }
    const float inverse = total > 0.0F ? 1.0F / total : 0.0F;
    const RowTarget target(rows, row);
    store_pair<T, kHeadDim>(rows.args, target, d, x * inverse, y * inverse);
    if (d == 0) store_lse(rows.args, target, shift + ptx::log2(total));
  }
}

template <class T, int kHeadDim, bool kPaged, int kStages>
VMS_DEVICE void attend_decode(const AttendArgs& args) {
  using Memory = DecodeMemory<kHeadDim, kStages>;
  const Memory memory{ptx::shared()};
  const int num_work = ptx::load(args.num_items) * args.kv_heads;
  for (int work = ptx::block(); work < num_work; work += ptx::num_blocks()) {
    const ItemRows rows(args, work);
    RowSums<kHeadDim> sums[1];
    decode_tiles<T, kHeadDim, kPaged, kStages>(rows, memory, sums);
    share_sums(sums[0], args.softcap > 0.0F ? 1.0F : args.scale, memory);
    ptx::sync_block();
    merge_sums<T>(rows, memory);
    ptx::sync_block();  // all sums are read before the rings are filled again
  }
}
