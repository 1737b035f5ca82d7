// RMSNorm over rows of the hidden size, after adding a residual, in one pass.
//
// Rounds where separate tensor operations in the element type would: after the sum, after the
// normalisation and after the weight (vmserve/models/blocks.py).
#pragma once

#include "write.cuh"

constexpr int kNormThreads = 256;
constexpr int kNormUnits = 8;  // of 8 elements, for each thread: at most 16,384 in a row

VMS_DEVICE float warp_sum(float x) {
#pragma unroll
  for (int mask = 16; mask > 0; mask /= 2) x = ptx::sum(x, ptx::shuffle_xor(x, mask));
  return x;
}

// One block per row.
template <class T>
VMS_DEVICE void norm_row(const NormArgs& args) {
  constexpr int kWarps = kNormThreads / 32;
  const int num_units = args.size / 8, thread = ptx::thread();
  const i64 start = static_cast<i64>(ptx::block()) * num_units;
  Unit* const x = reinterpret_cast<Unit*>(args.x) + start;
  const Unit* const residual = reinterpret_cast<const Unit*>(args.residual) + start;
  Words held[kNormUnits];
  float squares = 0.0F;
#pragma unroll
  for (int u = 0; u < kNormUnits; ++u) {
    const int i = thread + u * kNormThreads;
    if (i >= num_units) break;
    held[u].unit = ptx::load(x + i);
    if (args.residual != nullptr) {
      Words other;
      other.unit = ptx::load(residual + i);
#pragma unroll
      for (int w = 0; w < 4; ++w) {
        const Pair a = widened<T>(held[u].words, w), b = widened<T>(other.words, w);
        held[u].words[w] = ptx::pack<T>(ptx::sum(a.x, b.x), ptx::sum(a.y, b.y));
      }
      ptx::store(x + i, held[u].unit);
    }
#pragma unroll
    for (int w = 0; w < 4; ++w) {
      const Pair a = widened<T>(held[u].words, w);
      squares = ptx::multiply_add(a.x, a.x, squares);
      squares = ptx::multiply_add(a.y, a.y, squares);
    }
  }
  float* const sums = reinterpret_cast<float*>(ptx::shared());  // [kWarps]
  squares = warp_sum(squares);
  if ((thread & 31) == 0) sums[thread >> 5] = squares;
  ptx::sync_block();
  float total = 0.0F;
#pragma unroll
  for (int i = 0; i < kWarps; ++i) total = ptx::sum(total, sums[i]);
  const float scale = ptx::inverse_root(total / static_cast<float>(args.size) + args.eps);
#pragma unroll
  for (int u = 0; u < kNormUnits; ++u) {
    const int i = thread + u * kNormThreads;
    if (i >= num_units) break;
    Words weight;
    weight.unit = ptx::load(reinterpret_cast<const Unit*>(args.weight) + i);
#pragma unroll
    for (int w = 0; w < 4; ++w) {
      const Pair a = widened<T>(held[u].words, w), b = widened<T>(weight.words, w);
      held[u].words[w] = ptx::pack<T>(ptx::product(rounded<T>(ptx::product(a.x, scale)), b.x),
                                      ptx::product(rounded<T>(ptx::product(a.y, scale)), b.y));
    }
    ptx::store(reinterpret_cast<Unit*>(args.out) + start + i, held[u].unit);
  }
}
