// Products of decode.h for processors that multiply pairs of bfloat16 (Vec::kDotsPairs).
//
// Scores: K and q are read as pairs along the head dimension, so nothing is widened and q keeps its
// precision; the scale is applied to the product. Weighted sums: the elements of two tokens are
// interleaved in registers and multiplied by weights rounded to bfloat16, as in FlashAttention.
// `V` is `Vec`: a template parameter, because only some have pairs.
#pragma once

#include "kernel_common.h"

namespace vmserve::cpu {
namespace {

// Token rows of one head, and later rows to prefetch.
struct PairRows {
  const Bf16 *const *now, *const *ahead;
  std::int64_t offset;  // of the head and the element
};

// sums[g * kTokens + t] += q[g] . k[t] over one pair of vectors, or the rest of the head dimension.
template <class V, int kHeads, int kTokens, bool kWhole>
void add_pairs(const Bf16* q, int q_stride, const PairRows& k, int d, int head_dim,
               typename V::R* sums) {
  typename V::R heads[kHeads];
#pragma GCC unroll 4
  for (int g = 0; g < kHeads; ++g) heads[g] = V::load_bits(q + g * q_stride + d);
#pragma GCC unroll 8
  for (int t = 0; t < kTokens; ++t) {
    const typename V::R x = load_bits_of<V, kWhole>(k.now[t] + k.offset + d, head_dim - d);
    prefetch_line(k.ahead[t] + k.offset + d);
#pragma GCC unroll 4
    for (int g = 0; g < kHeads; ++g) {
      sums[g * kTokens + t] = V::dot_pairs(x, heads[g], sums[g * kTokens + t]);
    }
  }
}

// Scores of kTokens tokens times kHeads query heads, scores[g * score_stride + t].
template <class V, int kHeads, int kTokens>
void score_pairs(const Bf16* q, int q_stride, const PairRows& k, int head_dim, float factor,
                 float* scores, int score_stride) {
  constexpr int kSums = kHeads * kTokens;
  typename V::R sums[kSums];
#pragma GCC unroll 16
  for (int i = 0; i < kSums; ++i) sums[i] = V::zero();
  int d = 0;
  for (; d + kPair <= head_dim; d += kPair) {
    add_pairs<V, kHeads, kTokens, true>(q, q_stride, k, d, head_dim, sums);
  }
  if (d < head_dim) add_pairs<V, kHeads, kTokens, false>(q, q_stride, k, d, head_dim, sums);
  float out[kSums];
  if constexpr (kSums == 16) {
    V::store(out, V::mul(V::reduce16(sums), V::set(factor)));
  } else {
    V::reduce8(sums, out);
    for (float& x : out) x *= factor;
  }
#pragma GCC unroll 4
  for (int g = 0; g < kHeads; ++g) {
    memcpy(scores + g * score_stride, out + g * kTokens, kTokens * sizeof(float));
  }
}

// Weights of one query head: two tokens in a word.
struct PairWeights {
  const float* words;
  int stride;            // from head to head
  const float* factors;  // of the sums so far; null: 1
};

// acc[g] += weights[g] . V over token t and, if `both`, the next one.
template <class V, int kHeads, int kPairs, bool kWhole>
void weigh_two(const PairWeights& weights, const PairRows& v, int t, bool both, int left,
               typename V::R (&acc)[kHeads][2 * kPairs]) {
#pragma GCC unroll 8
  for (int p = 0; p < kPairs; ++p) {
    const std::int64_t at = v.offset + p * kPair;
    const typename V::R a = load_bits_of<V, kWhole>(v.now[t] + at, left);
    prefetch_line(v.ahead[t] + at);
    typename V::R b = V::zero();
    if (both) {
      b = load_bits_of<V, kWhole>(v.now[t + 1] + at, left);
      prefetch_line(v.ahead[t + 1] + at);
    }
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
  int t = 0;
  for (; t + 2 <= count; t += 2) {
    weigh_two<V, kHeads, kPairs, kWhole>(weights, v, t, true, left, acc);
  }
  if (t < count) weigh_two<V, kHeads, kPairs, kWhole>(weights, v, t, false, left, acc);
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
