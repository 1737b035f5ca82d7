// One query row over a stretch of positions: bound by how fast K and V come from memory.
//
// Tokens are taken kTile at a time. For each KV head of the tile: scores of the whole group, so
// that a K row is loaded once for all of its query heads; the running softmax (Milakov and
// Gimelshein 2018); the weighted sum of the V rows with the sums in registers. Meanwhile the next
// tile is prefetched in the order of its addresses. Both views end up as pointers to token rows:
// the arithmetic, and so every bit of the result, is the same.
#pragma once

#include "kernel_common.h"

namespace vmserve::cpu {
namespace {

constexpr int kTile = 16;

template <class T>
struct TileRows {
  const T* k[kTile];
  const T* v[kTile];
  int count;
};

template <class T>
void fill(TileRows<T>& rows, const Sequence& seq, std::int64_t begin, std::int64_t end) {
  rows.count = begin < end ? static_cast<int>(least<std::int64_t>(kTile, end - begin)) : 0;
  locate(seq, begin, rows.count, rows.k, rows.v);
  // Scores are computed for whole tiles: the last token stands in for those that are not there.
  for (int i = rows.count; i < kTile && rows.count > 0; ++i) {
    rows.k[i] = rows.k[rows.count - 1];
    rows.v[i] = rows.v[rows.count - 1];
  }
}

// kTokens tokens times kHeads query heads (8 products), which share the loads of both.
template <class T, int kHeads>
void scores_block(const float* q, int q_stride, const T* const* k, std::int64_t k_offset,
                  int head_dim, float* scores) {
  constexpr int kTokens = 8 / kHeads;
  Vec::R sums[8];
  for (Vec::R& sum : sums) sum = Vec::zero();
  const T* rows[kTokens];
  for (int t = 0; t < kTokens; ++t) rows[t] = k[t] + k_offset;
  int d = 0;
  for (; d + kPair <= head_dim; d += kPair) {
#pragma GCC unroll 8
    for (int t = 0; t < kTokens; ++t) {
      Vec::R a, b;
      Vec::load_pair(rows[t] + d, a, b);
#pragma GCC unroll 8
      for (int g = 0; g < kHeads; ++g) {
        Vec::R& sum = sums[g * kTokens + t];
        sum = Vec::fma(a, Vec::load(q + g * q_stride + d), sum);
        sum = Vec::fma(b, Vec::load(q + g * q_stride + d + Vec::kWidth), sum);
      }
    }
  }
  if (d < head_dim) {
    for (int t = 0; t < kTokens; ++t) {
      Vec::R a, b;
      load_some(rows[t] + d, head_dim - d, a, b);
      for (int g = 0; g < kHeads; ++g) {
        Vec::R& sum = sums[g * kTokens + t];
        sum = Vec::fma(a, Vec::load(q + g * q_stride + d), sum);
        sum = Vec::fma(b, Vec::load(q + g * q_stride + d + Vec::kWidth), sum);
      }
    }
  }
  float out[8];
  Vec::reduce8(sums, out);
  for (int g = 0; g < kHeads; ++g) {
    memcpy(scores + g * kTile, out + g * kTokens, kTokens * sizeof(float));
  }
}

template <class T, int kHeads>
void scores_of(const float* q, int q_stride, const TileRows<T>& rows, std::int64_t k_offset,
               int head_dim, float* scores) {
  constexpr int kTokens = 8 / kHeads;
  for (int t = 0; t < rows.count; t += kTokens) {
    scores_block<T, kHeads>(q, q_stride, rows.k + t, k_offset, head_dim, scores + t);
  }
}

// sums[g] = sums[g] * factors[g] + weights[g] . V for kPairs pairs of vectors from element d on.
template <class T, int kHeads, int kPairs, bool kWhole>
void weigh_block(float* sums, int stride, const float* factors, const float* weights,
                 const TileRows<T>& rows, std::int64_t v_offset, int d, int head_dim) {
  Vec::R acc[kHeads][2 * kPairs];
#pragma GCC unroll 8
  for (int g = 0; g < kHeads; ++g) {
    const Vec::R factor = Vec::set(factors[g]);
#pragma GCC unroll 8
    for (int i = 0; i < 2 * kPairs; ++i) {
      acc[g][i] = Vec::mul(factor, Vec::load(sums + g * stride + d + i * Vec::kWidth));
    }
  }
  for (int t = 0; t < rows.count; ++t) {
    const T* row = rows.v[t] + v_offset + d;
#pragma GCC unroll 8
    for (int p = 0; p < kPairs; ++p) {
      Vec::R a, b;
      if (kWhole) {
        Vec::load_pair(row + p * kPair, a, b);
      } else {
        load_some(row + p * kPair, head_dim - d, a, b);
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
void weigh(float* sums, int stride, const float* factors, const float* weights,
           const TileRows<T>& rows, std::int64_t v_offset, int head_dim) {
  constexpr int kPairs = 4 / kHeads;  // 8 sums
  int d = 0;
  for (; d + kPairs * kPair <= head_dim; d += kPairs * kPair) {
    weigh_block<T, kHeads, kPairs, true>(sums, stride, factors, weights, rows, v_offset, d,
                                         head_dim);
  }
  for (; d + kPair <= head_dim; d += kPair) {
    weigh_block<T, kHeads, 1, true>(sums, stride, factors, weights, rows, v_offset, d, head_dim);
  }
  if (d < head_dim) {
    weigh_block<T, kHeads, 1, false>(sums, stride, factors, weights, rows, v_offset, d, head_dim);
  }
}

// Turns the scores of a tile into weights relative to the new maximum; returns the factor that
// brings what was summed before to it.
inline float soften(float* scores, int count, float softcap, float& maximum, float& total) {
  constexpr int kVectors = kTile / Vec::kWidth;
  for (int i = count; i < kTile; ++i) scores[i] = -INFINITY;
  Vec::R x[kVectors];
  Vec::R best = Vec::set(maximum);
  for (int i = 0; i < kVectors; ++i) {
    x[i] = Vec::load(scores + i * Vec::kWidth);
    if (softcap > 0.0F) {
      // tanh would make the masked lanes finite again
      const Vec::R lowest = Vec::set(kLowest);
      x[i] = Vec::where_less(x[i], lowest, x[i], capped(x[i], softcap));
    }
    best = Vec::max(x[i], best);
  }
  const float new_maximum = Vec::reduce_max(best);
  const Vec::R shift = Vec::set(new_maximum);
  Vec::R sum = Vec::zero();
  for (int i = 0; i < kVectors; ++i) {
    const Vec::R weight = exp2(Vec::sub(x[i], shift));
    Vec::store(scores + i * Vec::kWidth, weight);
    sum = Vec::add(sum, weight);
  }
  const float factor = new_maximum == maximum ? 1.0F : exp2_of(maximum - new_maximum);
  total = total * factor + Vec::reduce_add(sum);
  maximum = new_maximum;
  return factor;
}

// The next tile, piece by piece in the order of its addresses.
template <class T>
void prefetch(const TileRows<T>& next, int kv_heads, int unit, int head_dim, std::int64_t k_stride,
              std::int64_t v_stride) {
  const int token = unit / kv_heads, head = unit - token * kv_heads;
  if (token >= next.count) return;
  const T* k = next.k[token] + head * k_stride;
  const T* v = next.v[token] + head * v_stride;
  constexpr int kLine = 64 / sizeof(T);
  for (int d = 0; d < head_dim; d += kLine) {
    __builtin_prefetch(k + d, 0, 2);
    __builtin_prefetch(v + d, 0, 2);
  }
}

// q of all heads, times the scale, in the order in which K is loaded.
template <class T>
void prepare_queries(const DecodeArgs& a, float* to, int stride) {
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

template <class T, int kHeads>
void attend_heads(const DecodeArgs& a, const DecodeScratch& s, const TileRows<T>& rows, int kv_head,
                  int q_head, int stride) {
  float* scores = s.scores;
  scores_of<T, kHeads>(s.q + q_head * stride, stride, rows, kv_head * a.seq.k.head_stride,
                       a.head_dim, scores);
  for (int g = 0; g < kHeads; ++g) {
    s.factors[g] = soften(scores + g * kTile, rows.count, a.softcap, s.maxima[q_head + g],
                          s.totals[q_head + g]);
  }
  weigh<T, kHeads>(s.sums + q_head * stride, stride, s.factors, scores, rows,
                   kv_head * a.seq.v.head_stride, a.head_dim);
}

template <class T>
void decode(const DecodeArgs& a) {
  const int q_heads = a.kv_heads * a.group, stride = padded(a.head_dim);
  const DecodeScratch s(a.scratch, q_heads, stride);
  prepare_queries<T>(a, s.q, stride);
  memset(s.sums, 0, sizeof(float) * static_cast<size_t>(q_heads * stride));
  for (int h = 0; h < q_heads; ++h) s.maxima[h] = kLowest;
  for (int h = 0; h < q_heads; ++h) s.totals[h] = 0.0F;

  TileRows<T> tiles[2];
  fill(tiles[0], a.seq, a.begin, a.end);
  int current = 0;
  for (std::int64_t at = a.begin; at < a.end; at += kTile, current = 1 - current) {
    const TileRows<T>& rows = tiles[current];
    TileRows<T>& next = tiles[1 - current];
    fill(next, a.seq, at + kTile, a.end);
    for (int h = 0; h < a.kv_heads; ++h) {
      for (int i = 0; i < kTile; ++i) {
        prefetch(next, a.kv_heads, h * kTile + i, a.head_dim, a.seq.k.head_stride,
                 a.seq.v.head_stride);
      }
      int g = 0;
      for (; g + 4 <= a.group; g += 4) attend_heads<T, 4>(a, s, rows, h, h * a.group + g, stride);
      for (; g + 2 <= a.group; g += 2) attend_heads<T, 2>(a, s, rows, h, h * a.group + g, stride);
      if (g < a.group) attend_heads<T, 1>(a, s, rows, h, h * a.group + g, stride);
    }
  }
  for (int h = 0; h < q_heads; ++h) {
    emit<T>(a.out, 0, h, q_heads, a.head_dim, s.sums + h * stride, s.maxima[h], s.totals[h]);
  }
}

}  // namespace
}  // namespace vmserve::cpu
