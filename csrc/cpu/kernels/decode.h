// Decode: one query row over a range of positions. Bound by memory bandwidth.
//
// Takes kTile tokens at a time: scores of all heads, running softmax (Milakov and Gimelshein 2018),
// weighted sum. A K or V row is loaded once for all query heads of its group. Both passes read the
// rows of kBlock tokens side by side from the first head to the last: eight streams that the
// hardware prefetchers follow, as fast as a plain read (head by head over more tokens is half as
// fast; docs/log.md). Both views become addresses of token rows, so the arithmetic and all bits of
// the result are the same. Products of bfloat16 pairs: decode_pairs.h.
#pragma once

#include "decode_pairs.h"
#include "kernel_common.h"

namespace vmserve::cpu {
namespace {

constexpr int kTile = 32;
constexpr int kBlock = 8;
// A line is prefetched this many tokens before it is used.
constexpr int kAhead = 16;

template <class T>
struct TileRows {
  const T* k[kTile + kAhead];
  const T* v[kTile + kAhead];
  int count;
};

template <class T>
void fill(TileRows<T>& rows, const Sequence& seq, std::int64_t begin, std::int64_t end) {
  rows.count = static_cast<int>(least<std::int64_t>(kTile, end - begin));
  const int located = static_cast<int>(least<std::int64_t>(kTile + kAhead, end - begin));
  locate(seq, begin, located, rows.k, rows.v);
  // Whole blocks are scored and prefetched: repeat the last token in place of missing ones.
  for (int i = located; i < kTile + kAhead; ++i) {
    rows.k[i] = rows.k[located - 1];
    rows.v[i] = rows.v[located - 1];
  }
}

template <int kHeads>
constexpr int tokens_of() {
  return 8 / kHeads;
}

// sums[g * kTokens + t] += q[g] . k[t] over one pair of vectors. Keeps the smaller operand in
// registers: the tokens for four heads, else the heads.
template <int kHeads>
void add_products(const float* q, int q_stride, const Vec::R (*k)[2], Vec::R* sums) {
  constexpr int kTokens = tokens_of<kHeads>();
#pragma GCC unroll 8
  for (int g = 0; g < kHeads; ++g) {
    const Vec::R a = Vec::load(q + g * q_stride), b = Vec::load(q + g * q_stride + Vec::kWidth);
#pragma GCC unroll 8
    for (int t = 0; t < kTokens; ++t) {
      Vec::R& sum = sums[g * kTokens + t];
      sum = Vec::fma(a, k[t][0], sum);
      sum = Vec::fma(b, k[t][1], sum);
    }
  }
}

// Prefetches the cache lines of one pair of vectors.
template <class T>
inline void prefetch_pair(const T* at) {
  constexpr int kBytes = kPair * static_cast<int>(sizeof(T)), kLine = 64;
#pragma GCC unroll 2
  for (int i = 0; i < kBytes; i += kLine) prefetch_line(reinterpret_cast<const char*>(at) + i);
}

// Scores of kTokens tokens times kHeads query heads (8 products), which share the loads of both.
template <class T, int kHeads>
void scores_block(const float* q, int q_stride, const T* const* k, std::int64_t k_offset,
                  int head_dim, float* scores) {
  constexpr int kTokens = tokens_of<kHeads>();
  Vec::R sums[8];
#pragma GCC unroll 8
  for (int i = 0; i < 8; ++i) sums[i] = Vec::zero();
  const T* rows[kTokens];
#pragma GCC unroll 8
  for (int t = 0; t < kTokens; ++t) rows[t] = k[t] + k_offset;
  int d = 0;
  for (; d + kPair <= head_dim; d += kPair) {
    if (kHeads == 4) {
      Vec::R pairs[kTokens][2];
#pragma GCC unroll 8
      for (int t = 0; t < kTokens; ++t) {
        Vec::load_pair(rows[t] + d, pairs[t][0], pairs[t][1]);
        prefetch_pair(k[kAhead + t] + k_offset + d);
      }
      add_products<kHeads>(q + d, q_stride, pairs, sums);
    } else {
      Vec::R heads[kHeads][2];
#pragma GCC unroll 8
      for (int g = 0; g < kHeads; ++g) {
        heads[g][0] = Vec::load(q + g * q_stride + d);
        heads[g][1] = Vec::load(q + g * q_stride + d + Vec::kWidth);
      }
#pragma GCC unroll 8
      for (int t = 0; t < kTokens; ++t) {
        Vec::R a, b;
        Vec::load_pair(rows[t] + d, a, b);
        prefetch_pair(k[kAhead + t] + k_offset + d);
#pragma GCC unroll 8
        for (int g = 0; g < kHeads; ++g) {
          Vec::R& sum = sums[g * kTokens + t];
          sum = Vec::fma(a, heads[g][0], sum);
          sum = Vec::fma(b, heads[g][1], sum);
        }
      }
    }
  }
  if (d < head_dim) {
    Vec::R pairs[kTokens][2];
    for (int t = 0; t < kTokens; ++t) {
      Vec::load_some(rows[t] + d, head_dim - d, pairs[t][0], pairs[t][1]);
    }
    add_products<kHeads>(q + d, q_stride, pairs, sums);
  }
  float out[8];
  Vec::reduce8(sums, out);
#pragma GCC unroll 8
  for (int g = 0; g < kHeads; ++g) {
    memcpy(scores + g * kTile, out + g * kTokens, kTokens * sizeof(float));
  }
}

// sums[g] = sums[g] * factors[g] + weights[g] . V for kPairs pairs of vectors from element d on.
template <class T, int kHeads, int kPairs, bool kWhole>
void weigh_block(float* sums, int stride, const float* factors, const float* weights,
                 const T* const* v, int count, std::int64_t v_offset, int d, int head_dim) {
  Vec::R acc[kHeads][2 * kPairs];
#pragma GCC unroll 8
  for (int g = 0; g < kHeads; ++g) {
#pragma GCC unroll 8
    for (int i = 0; i < 2 * kPairs; ++i) {
      acc[g][i] = Vec::load(sums + g * stride + d + i * Vec::kWidth);
      if (factors != nullptr) acc[g][i] = Vec::mul(Vec::set(factors[g]), acc[g][i]);
    }
  }
  for (int t = 0; t < count; ++t) {
    const T* row = v[t] + v_offset + d;
#pragma GCC unroll 8
    for (int p = 0; p < kPairs; ++p) {
      Vec::R a, b;
      if (kWhole) {
        Vec::load_pair(row + p * kPair, a, b);
        prefetch_pair(v[kAhead + t] + v_offset + d + p * kPair);
      } else {
        Vec::load_some(row + p * kPair, head_dim - d, a, b);
      }
#pragma GCC unroll 8
      for (int g = 0; g < kHeads; ++g) {
        const Vec::R weight = Vec::set(weights[g * kTile + t]);
        acc[g][2 * p] = Vec::fma(weight, a, acc[g][2 * p]);
        acc[g][2 * p + 1] = Vec::fma(weight, b, acc[g][2 * p + 1]);
      }
    }
  }
#pragma GCC unroll 8
  for (int g = 0; g < kHeads; ++g) {
#pragma GCC unroll 8
    for (int i = 0; i < 2 * kPairs; ++i) {
      Vec::store(sums + g * stride + d + i * Vec::kWidth, acc[g][i]);
    }
  }
}

template <class T, int kHeads>
void weigh(float* sums, int stride, const float* factors, const float* weights, const T* const* v,
           int count, std::int64_t v_offset, int head_dim) {
  constexpr int kPairs = 4 / kHeads;  // 8 sums
  int d = 0;
  for (; d + kPairs * kPair <= head_dim; d += kPairs * kPair) {
    weigh_block<T, kHeads, kPairs, true>(sums, stride, factors, weights, v, count, v_offset, d,
                                         head_dim);
  }
  for (; d + kPair <= head_dim; d += kPair) {
    weigh_block<T, kHeads, 1, true>(sums, stride, factors, weights, v, count, v_offset, d,
                                    head_dim);
  }
  if (d < head_dim) {
    weigh_block<T, kHeads, 1, false>(sums, stride, factors, weights, v, count, v_offset, d,
                                     head_dim);
  }
}

// Turns a tile's scores into weights relative to the new maximum (paired: bfloat16, two in a
// float). Returns the factor for sums relative to the old maximum.
template <class V, bool kPaired>
float soften(float* scores, int count, float softcap, float& maximum, float& total) {
  constexpr int kVectors = kTile / Vec::kWidth;
  for (int i = count; i < kTile; ++i) scores[i] = -INFINITY;
  Vec::R x[kVectors];
  Vec::R best = Vec::set(maximum);
  for (int i = 0; i < kVectors; ++i) {
    x[i] = Vec::load(scores + i * Vec::kWidth);
    if (softcap > 0.0F) {
      // After the softcap: tanh would make masked lanes finite.
      const Vec::R lowest = Vec::set(kLowest);
      x[i] = Vec::where_less(x[i], lowest, x[i], capped(x[i], softcap));
    }
    best = Vec::max(x[i], best);
  }
  const float new_maximum = Vec::reduce_max(best);
  const Vec::R shift = Vec::set(new_maximum);
  Vec::R sum = Vec::zero();
  for (int i = 0; i < kVectors; ++i) {
    x[i] = exp2(Vec::sub(x[i], shift));
    sum = Vec::add(sum, x[i]);
  }
  if constexpr (kPaired) {
    for (int i = 0; i < kVectors; i += 2) {
      Vec::store(scores + i / 2 * Vec::kWidth, V::narrow(x[i], x[i + 1]));
    }
  } else {
    for (int i = 0; i < kVectors; ++i) Vec::store(scores + i * Vec::kWidth, x[i]);
  }
  const float factor = new_maximum == maximum ? 1.0F : exp2_of(maximum - new_maximum);
  total = total * factor + Vec::reduce_add(sum);
  maximum = new_maximum;
  return factor;
}

// Converts q of all heads: unchanged for pairs, else scaled and in the order in which K is loaded.
template <class T>
void prepare_queries(const DecodeArgs& a, float* to, int stride) {
  if constexpr (kDots<T>) {
    T* row = reinterpret_cast<T*>(to);
    memset(row, 0, sizeof(T) * static_cast<size_t>(a.kv_heads * a.group * stride));
    for (int h = 0; h < a.kv_heads * a.group; ++h, row += stride) {
      memcpy(row, static_cast<const T*>(a.q) + h * a.q_head_stride,
             sizeof(T) * static_cast<size_t>(a.head_dim));
    }
  } else {
    const Vec::R factor = Vec::set(prescale(a.scale, a.softcap));
    for (int h = 0; h < a.kv_heads * a.group; ++h) {
      const T* from = static_cast<const T*>(a.q) + h * a.q_head_stride;
      for (int d = 0; d < a.head_dim; d += kPair) {
        Vec::R x, y;
        load_upto(from + d, a.head_dim - d, x, y);
        Vec::store(to + h * stride + d, Vec::mul(x, factor));
        Vec::store(to + h * stride + d + Vec::kWidth, Vec::mul(y, factor));
      }
    }
  }
}

struct DecodeScratch {
  float *q, *sums, *maxima, *totals, *scores, *factors;
  static constexpr int rounded(int n) { return (n + 15) / 16 * 16; }

  DecodeScratch(float* base, int q_heads, int stride) {
    q = base;
    sums = q + q_heads * stride;
    maxima = sums + q_heads * stride;
    totals = maxima + rounded(q_heads);
    factors = totals + rounded(q_heads);
    scores = factors + rounded(q_heads);
  }
};

inline size_t decode_scratch(std::int32_t q_heads, std::int32_t head_dim) {
  return static_cast<size_t>(2 * q_heads * padded(head_dim) + 3 * DecodeScratch::rounded(q_heads) +
                             q_heads * kTile);
}

// Scores of kBlock tokens.
template <class T, int kHeads>
void score_heads(const DecodeArgs& a, const DecodeScratch& s, const T* const* k, int kv_head,
                 int q_head, int at, int stride) {
  if constexpr (kDots<T>) {
    constexpr int kTokens = least(kBlock, 16 / kHeads);
    const T* const q = reinterpret_cast<const T*>(s.q) + q_head * stride;
    for (int t = 0; t < kBlock; t += kTokens) {
      score_pairs<Vec, kHeads, kTokens>(
          q, stride, {k + t, k + t + kAhead, kv_head * a.seq.k.head_stride}, a.head_dim,
          prescale(a.scale, a.softcap), s.scores + q_head * kTile + at + t, kTile);
    }
  } else {
#pragma GCC unroll 8
    for (int t = 0; t < kBlock; t += tokens_of<kHeads>()) {
      scores_block<T, kHeads>(s.q + q_head * stride, stride, k + t, kv_head * a.seq.k.head_stride,
                              a.head_dim, s.scores + q_head * kTile + at + t);
    }
  }
}

template <class T>
void score_tokens(const DecodeArgs& a, const DecodeScratch& s, const T* const* k, int at,
                  int stride) {
  for (int h = 0; h < a.kv_heads; ++h) {
    int g = 0;
    const int first = h * a.group;
    for (; g + 4 <= a.group; g += 4) score_heads<T, 4>(a, s, k, h, first + g, at, stride);
    for (; g + 2 <= a.group; g += 2) score_heads<T, 2>(a, s, k, h, first + g, at, stride);
    if (g < a.group) score_heads<T, 1>(a, s, k, h, first + g, at, stride);
  }
}

template <class T, int kHeads>
void weigh_heads(const DecodeArgs& a, const DecodeScratch& s, const T* const* v, int count,
                 int kv_head, int q_head, int at, int stride) {
  const float* const factors = at == 0 ? s.factors + q_head : nullptr;
  const std::int64_t offset = kv_head * a.seq.v.head_stride;
  if constexpr (kDots<T>) {
    weigh_pairs<Vec, kHeads>(s.sums + q_head * stride, stride,
                             {s.scores + q_head * kTile + at / 2, kTile, factors},
                             {v, v + kAhead, offset}, count, a.head_dim);
  } else {
    weigh<T, kHeads>(s.sums + q_head * stride, stride, factors, s.scores + q_head * kTile + at, v,
                     count, offset, a.head_dim);
  }
}

template <class T>
void weigh_tokens(const DecodeArgs& a, const DecodeScratch& s, const T* const* v, int count, int at,
                  int stride) {
  for (int h = 0; h < a.kv_heads; ++h) {
    int g = 0;
    const int first = h * a.group;
    for (; g + 4 <= a.group; g += 4) weigh_heads<T, 4>(a, s, v, count, h, first + g, at, stride);
    for (; g + 2 <= a.group; g += 2) weigh_heads<T, 2>(a, s, v, count, h, first + g, at, stride);
    if (g < a.group) weigh_heads<T, 1>(a, s, v, count, h, first + g, at, stride);
  }
}

template <class T>
void decode(const DecodeArgs& a) {
  const int q_heads = a.kv_heads * a.group, stride = padded(a.head_dim);
  const DecodeScratch s(a.scratch, q_heads, stride);
  prepare_queries<T>(a, s.q, stride);
  memset(s.sums, 0, sizeof(float) * static_cast<size_t>(q_heads * stride));
  for (int h = 0; h < q_heads; ++h) s.maxima[h] = kLowest;
  for (int h = 0; h < q_heads; ++h) s.totals[h] = 0.0F;

  for (std::int64_t at = a.begin; at < a.end; at += kTile) {
    TileRows<T> rows;
    fill(rows, a.seq, at, a.end);
    for (int t = 0; t < rows.count; t += kBlock) score_tokens(a, s, rows.k + t, t, stride);
    for (int h = 0; h < q_heads; ++h) {
      s.factors[h] = soften<Vec, kDots<T>>(s.scores + h * kTile, rows.count, a.softcap, s.maxima[h],
                                           s.totals[h]);
    }
    for (int t = 0; t < rows.count; t += kBlock) {
      weigh_tokens(a, s, rows.v + t, least(kBlock, rows.count - t), t, stride);
    }
  }
  for (int h = 0; h < q_heads; ++h) {
    emit<T>(a.out, 0, h, q_heads, a.head_dim, s.sums + h * stride, s.maxima[h], s.totals[h]);
  }
}

}  // namespace
}  // namespace vmserve::cpu
