// Adds the parts of tokens whose keys were split over work items, in their order: split keys and
// shared prefixes. One warp for each row of the output.
#pragma once

#include "tile.cuh"

constexpr int kCombineWarps = 4;
constexpr int kCombineAhead = 8;  // parts in flight

template <class T, int kHeadDim>
VMS_DEVICE void combine_row(const CombineArgs& args, const int* split, int q_head, int lane) {
  constexpr int kPairs = kHeadDim / 64;  // for each lane
  const int token = ptx::load(split), start = ptx::load(split + 1), count = ptx::load(split + 2);
  Parts row;
  row.clear();
  Pair sums[kPairs];
#pragma unroll
  for (int p = 0; p < kPairs; ++p) sums[p] = Pair{0.0F, 0.0F};
  for (int i = 0; i < count; i += kCombineAhead) {
    // Loads that wait for nothing but each other; those past the end load the last part again.
    Pair of_part[kCombineAhead], values[kCombineAhead][kPairs];
#pragma unroll
    for (int j = 0; j < kCombineAhead; ++j) {
      const int part = start + (i + j < count ? i + j : count - 1);
      const i64 at = static_cast<i64>(part) * args.q_heads + q_head;
      of_part[j] = ptx::load(args.part_sums + at);
#pragma unroll
      for (int p = 0; p < kPairs; ++p) {
        const float* const from = args.parts + at * kHeadDim + 2 * (lane + 32 * p);
        values[j][p] = ptx::load(reinterpret_cast<const Pair*>(from));
      }
    }
#pragma unroll
    for (int j = 0; j < kCombineAhead; ++j) {
      if (i + j >= count) break;
      float of_old, of_new;
      row.add(of_part[j], of_old, of_new);
#pragma unroll
      for (int p = 0; p < kPairs; ++p) {
        sums[p].x = Parts::folded(sums[p].x, of_old, values[j][p].x, of_new);
        sums[p].y = Parts::folded(sums[p].y, of_old, values[j][p].y, of_new);
      }
    }
  }
  const float inverse = row.inverse(args.sinks, q_head);
  const i64 at = static_cast<i64>(token) * args.q_heads + q_head;
#pragma unroll
  for (int p = 0; p < kPairs; ++p) {
    ptx::store(reinterpret_cast<u32*>(args.out + (at * kHeadDim + 2 * (lane + 32 * p)) * 2),
               ptx::pack<T>(finished(sums[p].x, inverse), finished(sums[p].y, inverse)));
  }
  if (args.lse != nullptr && lane == 0) ptx::store(args.lse + at, row.lse());
}

template <class T, int kHeadDim>
VMS_DEVICE void combine_parts(const CombineArgs& args) {
  const int warp = ptx::thread() >> 5, lane = ptx::thread() & 31;
  const int num_rows = ptx::load(args.num_split) * args.q_heads;
  for (int row = ptx::block() * kCombineWarps + warp; row < num_rows;
       row += ptx::num_blocks() * kCombineWarps) {
    combine_row<T, kHeadDim>(args, args.split + 4 * (row / args.q_heads), row % args.q_heads, lane);
  }
}
