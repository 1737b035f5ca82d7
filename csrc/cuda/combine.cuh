// Adds the parts of tokens whose keys were split over work items, in their order: split keys and
// shared prefixes. One warp for each row of the output.
#pragma once

#include "tile.cuh"

constexpr int kCombineWarps = 4;

template <class T, int kHeadDim>
VMS_DEVICE void combine_row(const CombineArgs& args, const int* split, int q_head, int lane) {
  constexpr int kPairs = kHeadDim / 64;  // for each lane
  const int token = ptx::load(split), start = ptx::load(split + 1), count = ptx::load(split + 2);
  Parts row;
  row.clear();
  Pair sums[kPairs];
#pragma unroll
  for (int p = 0; p < kPairs; ++p) sums[p] = Pair{0.0F, 0.0F};
  for (int i = 0; i < count; ++i) {
    const i64 at = static_cast<i64>(start + i) * args.q_heads + q_head;
    float of_old, of_new;
    row.add(ptx::load(args.part_sums + at), of_old, of_new);
#pragma unroll
    for (int p = 0; p < kPairs; ++p) {
      const float* const from = args.parts + at * kHeadDim + 2 * (lane + 32 * p);
      const Pair pair = ptx::load(reinterpret_cast<const Pair*>(from));
      sums[p].x = Parts::folded(sums[p].x, of_old, pair.x, of_new);
      sums[p].y = Parts::folded(sums[p].y, of_old, pair.y, of_new);
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
