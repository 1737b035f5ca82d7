// Weighted sums of decode.h for processors that multiply pairs of bfloat16 (Vec::kDotsPairs).
//
// The elements of two tokens are interleaved in registers and multiplied by weights rounded to
// bfloat16, as in FlashAttention. `V` is `Vec`: a template parameter, because only some have pairs.
#pragma once

#include "kernel_common.h"

namespace vmserve::cpu {
namespace {

// Token rows of one head, and later rows to prefetch.
struct PairRows {
  const Bf16 *const *now, *const *ahead;
  std::int64_t offset;  // offset of the head and the element
};

// Weights of one query head: two tokens in a word.
struct PairWeights {
  const float* words;
  int stride;            // from head to head
  const float* factors;  // factors of the sums so far; null: 1
};

// acc[g] += weights[g] . V over token t and the next one.
template <class V, int kHeads, int kPairs, bool kWhole>
void weigh_two(const PairWeights& weights, const PairRows& v, int t, int left,
               typename V::R (&acc)[kHeads][2 * kPairs]) {
#pragma GCC unroll 8
  for (int p = 0; p < kPairs; ++p) {
    const std::int64_t at = v.offset + p * kPair;
    const typename V::R a = load_bits_of<V, kWhole>(v.now[t] + at, left);
    const typename V::R b = load_bits_of<V, kWhole>(v.now[t + 1] + at, left);
    prefetch_line(v.ahead[t] + at);
    prefetch_line(v.ahead[t + 1] + at);
    typename V::R even, odd;
    V::interleave(a, b, even, odd);
#pragma GCC unroll 8
    for (int g = 0; g < kHeads; ++g) {
      const typename V::R pair = V::set_pair(weights.words + g * weights.stride + t / 2);
      acc[g][2 * p] = V::dot_pairs(even, pair, acc[g][2 * p]);
      acc[g][2 * p + 1] = V::dot_pairs(odd, pair, acc[g][2 * p + 1]);
    }
  }
}

// sums[g] = sums[g] * factors[g] + weights[g] . V for kPairs pairs of vectors from element d on.
template <class V, int kHeads, int kPairs, bool kWhole>
void weigh_pairs_block(float* sums, int stride, const PairWeights& weights, const PairRows& v,
                       int count, int left) {
  typename V::R acc[kHeads][2 * kPairs];
#pragma GCC unroll 8
  for (int g = 0; g < kHeads; ++g) {
#pragma GCC unroll 8
    for (int i = 0; i < 2 * kPairs; ++i) {
      acc[g][i] = V::load(sums + g * stride + i * V::kWidth);
      if (weights.factors != nullptr) acc[g][i] = V::mul(V::set(weights.factors[g]), acc[g][i]);
    }
  }
  for (int t = 0; t < count; t += 2) {
    weigh_two<V, kHeads, kPairs, kWhole>(weights, v, t, left, acc);
  }
#pragma GCC unroll 8
  for (int g = 0; g < kHeads; ++g) {
#pragma GCC unroll 8
    for (int i = 0; i < 2 * kPairs; ++i) {
      V::store(sums + g * stride + i * V::kWidth, acc[g][i]);
    }
  }
}

template <class V, int kHeads>
void weigh_pairs(float* sums, int stride, const PairWeights& weights, const PairRows& v, int count,
                 int head_dim) {
  constexpr int kPairs = least(4, 8 / kHeads);
  const auto rows_at = [&](int d) { return PairRows{v.now, v.ahead, v.offset + d}; };
  int d = 0;
  for (; d + kPairs * kPair <= head_dim; d += kPairs * kPair) {
    weigh_pairs_block<V, kHeads, kPairs, true>(sums + d, stride, weights, rows_at(d), count,
                                               head_dim - d);
  }
  for (; d + kPair <= head_dim; d += kPair) {
    weigh_pairs_block<V, kHeads, 1, true>(sums + d, stride, weights, rows_at(d), count,
                                          head_dim - d);
  }
  if (d < head_dim) {
    weigh_pairs_block<V, kHeads, 1, false>(sums + d, stride, weights, rows_at(d), count,
                                           head_dim - d);
  }
}

}  // namespace
}  // namespace vmserve::cpu
