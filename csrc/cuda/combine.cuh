// Merges the parts of tokens whose keys were split, by the logarithms of their sums: split keys and
// shared prefixes. One warp for each row of the output.
#pragma once

#include "tile.cuh"

constexpr int kCombineWarps = 4;

template <class T, int kHeadDim>
VMS_DEVICE void combine_row(const CombineArgs& args, const int* split, int q_head, int lane) {
  constexpr int kPairs = kHeadDim / 64;  // for each lane
  const int token = ptx::load(split), start = ptx::load(split + 1), count = ptx::load(split + 2);
  const float* const lse = args.part_lse + static_cast<i64>(start) * args.q_heads + q_head;
  float maximum = -ptx::infinity();
  for (int i = 0; i < count; ++i) {
    maximum = ptx::larger(maximum, ptx::load(lse + static_cast<i64>(i) * args.q_heads));
  }
  const float shift = maximum == -ptx::infinity() ? 0.0F : maximum;
  float total = 0.0F;
  Pair sums[kPairs];
#pragma unroll
  for (int p = 0; p < kPairs; ++p) sums[p] = Pair{0.0F, 0.0F};
  for (int i = 0; i < count; ++i) {
    const i64 row = static_cast<i64>(start + i) * args.q_heads + q_head;
    const float weight = ptx::exp2(ptx::load(args.part_lse + row) - shift);
    total += weight;
#pragma unroll
    for (int p = 0; p < kPairs; ++p) {
      const float* const from = args.parts + row * kHeadDim + 2 * (lane + 32 * p);
      const Pair pair = ptx::load(reinterpret_cast<const Pair*>(from));
      sums[p].x = ptx::multiply_add(weight, pair.x, sums[p].x);
      sums[p].y = ptx::multiply_add(weight, pair.y, sums[p].y);
    }
  }
  const float inverse = total > 0.0F ? 1.0F / total : 0.0F;
  const i64 at = static_cast<i64>(token) * args.q_heads + q_head;
#pragma unroll
  for (int p = 0; p < kPairs; ++p) {
    ptx::store(reinterpret_cast<u32*>(args.out + (at * kHeadDim + 2 * (lane + 32 * p)) * 2),
               ptx::pack<T>(sums[p].x * inverse, sums[p].y * inverse));
  }
  if (args.lse != nullptr && lane == 0) {
    ptx::store(args.lse + at, (shift + ptx::log2(total)) * kLn2);
  }
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
