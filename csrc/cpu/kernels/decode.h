// Decode: one query row over a range of positions, or a few of a draft. Bound by memory bandwidth.
//
// Takes kKeys positions at a time: scores of all heads, running softmax (Milakov and Gimelshein
// 2018), weighted sum. The order of all sums is that of tile.h, so a row has the same bits in
// either. There, rows lie across the lanes, and a score is one chain of sums along the head
// dimension. Here, tokens lie across the lanes, so blocks of K are transposed in registers, once
// for all query heads of a group and all rows. A K or V row is loaded once for all query heads of
// its group. Both passes read the rows of a block of tokens side by side from the first head to the
// last. The hardware prefetchers follow these streams, as fast as a plain read (head by head over
// more tokens is half as fast; docs/log). Both views become addresses of token rows, so the
// arithmetic and all bits of the result are the same. Weighted sums of bfloat16 pairs:
// decode_pairs.h.
#pragma once

#include "decode_pairs.h"
#include "kernel_common.h"

namespace vmserve::cpu {
namespace {

// Tokens of a block of V and of K.
constexpr int kBlock = 8, kSide = 16, kSideVectors = kSide / Vec::kWidth;
// A line is prefetched this many tokens before it is used.
constexpr int kAhead = 16;

// The token rows of a tile: positions from a multiple of kKeys on.
template <class T>
struct TileRows {
  const T* k[kKeys + kAhead];
  const T* v[kKeys + kAhead];
  int begin, end;  // the tokens that are attended to
};

template <class T>
void fill(TileRows<T>& rows, const Sequence& seq, std::int64_t first, std::int64_t begin,
          std::int64_t end) {
  rows.begin = static_cast<int>(begin - first);
  rows.end = static_cast<int>(least<std::int64_t>(kKeys, end - first));
  const int located = static_cast<int>(least<std::int64_t>(kKeys + kAhead, end - first));
  locate(seq, begin, located - rows.begin, rows.k + rows.begin, rows.v + rows.begin);
  // Whole blocks are scored, weighted and prefetched. In place of tokens that are not attended to,
  // whose weight is 0, they read attended tokens, whose NaN reaches the result anyway.
  const auto repeat = [&](int from, int to, int index) {
    for (int i = from; i < to; ++i) {
      rows.k[i] = rows.k[index];
      rows.v[i] = rows.v[index];
    }
  };
  repeat(0, rows.begin, rows.begin);
  repeat(located, kKeys + kAhead, located - 1);
}

// Prefetches the cache lines of one pair of vectors.
template <class T>
inline void prefetch_pair(const T* at) {
  constexpr int kBytes = kPair * static_cast<int>(sizeof(T)), kLine = 64;
#pragma GCC unroll 2
  for (int i = 0; i < kBytes; i += kLine) prefetch_line(reinterpret_cast<const char*>(at) + i);
}

// Loads the first `left` elements of kWidth rows as words: a float or two bfloat16. Lane i of
// vector j gets word j of row i. Prefetches later rows.
template <class T, bool kWhole>
void load_words(const T* const* rows, std::int64_t offset, int left, Vec::R (&words)[Vec::kWidth]) {
  float copies[kWhole ? 1 : Vec::kWidth][Vec::kWidth] = {};
  const float* from[Vec::kWidth];
#pragma GCC unroll 16
  for (int i = 0; i < Vec::kWidth; ++i) {
    const T* const row = rows[i] + offset;
    prefetch_line(rows[kAhead + i] + offset);
    from[i] = reinterpret_cast<const float*>(row);
    if constexpr (!kWhole) {
      memcpy(copies[i], row, sizeof(T) * static_cast<size_t>(left));
      from[i] = copies[i];
    }
  }
  Vec::load_transposed(from, words);
}

// Query heads whose sums are in registers at a time. Plain C++ keeps few there, and takes long to
// compile for more heads.
constexpr int kMostHeads = Vec::kLinearRows < 6 ? 2 : 4;
template <int kHeads>
struct Heads {
  static constexpr int kCount = kHeads;
};

// scores[g * kKeys + t] += q[g] . k[t] over the elements in `words`, of kSide tokens.
template <class V, class T, int kHeads>
void score_words(const Vec::R (&words)[kSideVectors][Vec::kWidth], const float* q, bool is_first,
                 float* scores) {
  Vec::R sums[kHeads][kSideVectors];
#pragma GCC unroll 4
  for (int g = 0; g < kHeads; ++g) {
#pragma GCC unroll 2
    for (int v = 0; v < kSideVectors; ++v) {
      sums[g][v] = is_first ? Vec::zero() : Vec::load(scores + g * kKeys + v * Vec::kWidth);
    }
  }
  constexpr int kElements = sizeof(T) == sizeof(Bf16) && !kDots<T> ? 2 : 1;  // of q in a word
#pragma GCC unroll 2
  for (int element = 0; element < kElements; ++element) {
#pragma GCC unroll 16
    for (int j = 0; j < Vec::kWidth; ++j) {
      Vec::R x[kSideVectors];
#pragma GCC unroll 2
      for (int v = 0; v < kSideVectors; ++v) {
        x[v] = words[v][j];
        if (kElements == 2) x[v] = element == 0 ? Vec::first_of(x[v]) : Vec::second_of(x[v]);
      }
#pragma GCC unroll 4
      for (int g = 0; g < kHeads; ++g) {
        const float* const y = q + (element * Vec::kWidth + j) * kHeads + g;
#pragma GCC unroll 2
        for (int v = 0; v < kSideVectors; ++v) {
          if constexpr (kDots<T>) {
            sums[g][v] = V::dot_pairs(x[v], y, sums[g][v]);
          } else {
            sums[g][v] = Vec::fma(x[v], Vec::set(*y), sums[g][v]);
          }
        }
      }
    }
  }
#pragma GCC unroll 4
  for (int g = 0; g < kHeads; ++g) {
#pragma GCC unroll 2
    for (int v = 0; v < kSideVectors; ++v) {
      Vec::store(scores + g * kKeys + v * Vec::kWidth, sums[g][v]);
    }
  }
}

// Scores of kSide tokens for the query heads of one KV head, of `rows` rows.
template <class T>
void score_group(const float* q, int q_stride, int group, int rows, const T* const* k,
                 std::int64_t offset, int head_dim, float* scores) {
  // Elements of K in a vector, and their floats of q.
  constexpr int kElements = Vec::kWidth * static_cast<int>(sizeof(float) / sizeof(T));
  constexpr int kFloats = kDots<T> ? Vec::kWidth : kElements;
  for (int d = 0, q_at = 0; d < head_dim; d += kElements, q_at += kFloats) {
    Vec::R words[kSideVectors][Vec::kWidth];
    for (int v = 0; v < kSideVectors; ++v) {
      if (d + kElements <= head_dim) {
        load_words<T, true>(k + v * Vec::kWidth, offset + d, 0, words[v]);
      } else {
        load_words<T, false>(k + v * Vec::kWidth, offset + d, head_dim - d, words[v]);
      }
    }
    int g = 0;
    const auto score = [&](auto heads) {
      constexpr int kHeads = decltype(heads)::kCount;
      score_words<Vec, T, kHeads>(words, q + g * q_stride + q_at * kHeads, d == 0,
                                  scores + g * kKeys);
      g += kHeads;
    };
    for (int end = group; end <= rows * group; end += group) {
      while (g + kMostHeads <= end) score(Heads<kMostHeads>{});
      if (kMostHeads > 3 && end - g == 3) score(Heads<3>{});
      if (end - g == 2) score(Heads<2>{});
      if (end - g == 1) score(Heads<1>{});
    }
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
        const Vec::R weight = Vec::set(weights[g * kKeys + t]);
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
// float). Returns the new maximum and the sum of the weights.
struct Softened {
  float maximum, sum;
};

template <class V, bool kPaired>
Softened soften(float* scores, int begin, int end, float scale, float softcap, float maximum) {
  constexpr int kVectors = kKeys / Vec::kWidth;
  const Vec::R hidden = Vec::set(-INFINITY);
  float lanes[Vec::kWidth];
  for (int i = 0; i < Vec::kWidth; ++i) lanes[i] = static_cast<float>(i);
  Vec::R x[kVectors];
  Vec::R best = Vec::set(maximum);
  for (int i = 0; i < kVectors; ++i) {
    x[i] = Vec::load(scores + i * Vec::kWidth);
    if (kPaired) x[i] = Vec::mul(x[i], Vec::set(prescale(scale, softcap)));
    if (softcap > 0.0F) x[i] = capped(x[i], softcap);
    if (begin > 0 || end < kKeys) {
      const auto bound = [&](int token) {
        return Vec::set(static_cast<float>(token - i * Vec::kWidth));
      };
      x[i] = Vec::where_less(Vec::load(lanes), bound(begin), hidden, x[i]);
      x[i] = Vec::where_less(Vec::load(lanes), bound(end), x[i], hidden);
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
  return {new_maximum, Vec::reduce_add(sum)};
}

// Converts q: unchanged for pairs, else scaled and in the order of load_pair. Heads are in the
// order [kv_heads, rows, group], as in all of the scratch. Those of a group and a row lie side by
// side, as score_words takes them: [q_stride, heads].
template <class T>
void prepare_queries(const DecodeArgs& a, float* to, int q_stride) {
  const Vec::R factor = Vec::set(prescale(a.scale, a.softcap));
  float row[kMaxHeadDim];
  for (int h = 0; h < a.kv_heads * a.rows * a.group; ++h) {
    const int head = h / (a.rows * a.group) * a.group + h % a.group, place = h / a.group % a.rows;
    const T* const from =
        static_cast<const T*>(a.q) + place * a.q_row_stride + head * a.q_head_stride;
    for (int d = 0; d < a.head_dim; d += kPair) {
      if constexpr (kDots<T>) {
        Vec::store(row + d / 2, load_bits_upto<Vec>(from + d, a.head_dim - d));
      } else {
        Vec::R x, y;
        load_upto(from + d, a.head_dim - d, x, y);
        Vec::store(row + d, Vec::mul(x, factor));
        Vec::store(row + d + Vec::kWidth, Vec::mul(y, factor));
      }
    }
    const int first = h % a.group / kMostHeads * kMostHeads;
    const int heads = least(kMostHeads, a.group - first), lane = h % a.group - first;
    for (int i = 0; i < q_stride; ++i) to[(h - lane) * q_stride + i * heads + lane] = row[i];
  }
}

struct DecodeScratch {
  float *q, *sums, *maxima, *new_maxima, *totals, *added, *factors, *scores;
  static constexpr int rounded(int n) { return (n + 15) / 16 * 16; }

  DecodeScratch(float* base, int q_heads, int stride) {
    q = base;
    sums = q + q_heads * stride;
    maxima = sums + q_heads * stride;
    new_maxima = maxima + rounded(q_heads);
    totals = new_maxima + rounded(q_heads);
    added = totals + rounded(q_heads);
    factors = added + rounded(q_heads);
    scores = factors + rounded(q_heads);
  }
};

inline size_t decode_scratch(std::int32_t q_heads, std::int32_t head_dim) {
  return static_cast<size_t>(2 * q_heads * padded(head_dim) + 5 * DecodeScratch::rounded(q_heads) +
                             q_heads * kKeys);
}

// Query rows that attend to the same tokens of a tile.
struct QueryRows {
  int begin, end;
};

template <class T>
void score_tokens(const DecodeArgs& a, const DecodeScratch& s, QueryRows queries,
                  const TileRows<T>& rows, int q_stride) {
  for (int t = rows.begin / kSide * kSide; t < rows.end; t += kSide) {
    for (int h = 0; h < a.kv_heads; ++h) {
      const int first = (h * a.rows + queries.begin) * a.group;
      score_group(s.q + first * q_stride, q_stride, a.group, queries.end - queries.begin,
                  rows.k + t, h * a.seq.k.head_stride, a.head_dim, s.scores + first * kKeys + t);
    }
  }
}

template <class Scratch>
void start_sums(const Scratch& s, int q_heads, int stride) {
  memset(s.sums, 0, sizeof(float) * static_cast<size_t>(q_heads * stride));
  for (int h = 0; h < DecodeScratch::rounded(q_heads); ++h) {
    s.maxima[h] = s.new_maxima[h] = kLowest;
    s.totals[h] = s.added[h] = 0.0F;
  }
}

// After a tile: factors for the sums of the tiles before it, and the sums of weights.
template <class Scratch>
void update_totals(const Scratch& s, int q_heads) {
  for (int h = 0; h < q_heads; h += Vec::kWidth) {
    const Vec::R maxima = Vec::load(s.new_maxima + h);
    const Vec::R factors = exp2(Vec::sub(Vec::load(s.maxima + h), maxima));
    Vec::store(s.maxima + h, maxima);
    Vec::store(s.factors + h, factors);
    Vec::store(s.totals + h, Vec::fma(Vec::load(s.totals + h), factors, Vec::load(s.added + h)));
  }
}

// Softmax of a tile: weights in place of scores, and factors for the sums of the tiles before it.
template <class T>
void soften_heads(const DecodeArgs& a, const DecodeScratch& s, QueryRows queries, int begin,
                  int end) {
  const int q_heads = a.kv_heads * a.rows * a.group;
  for (int h = 0; h < q_heads; ++h) {
    const int row = h / a.group % a.rows;
    if (row < queries.begin || row >= queries.end) {
      s.added[h] = 0.0F;  // with the same maximum as before: nothing changes
      continue;
    }
    const Softened softened =
        soften<Vec, kDots<T>>(s.scores + h * kKeys, begin, end, a.scale, a.softcap, s.maxima[h]);
    s.new_maxima[h] = softened.maximum;
    s.added[h] = softened.sum;
  }
  update_totals(s, q_heads);
}

template <class T, int kHeads>
void weigh_heads(const DecodeArgs& a, const DecodeScratch& s, const T* const* v, int count,
                 int kv_head, int q_head, int at, bool is_first, int stride) {
  const float* const factors = is_first ? s.factors + q_head : nullptr;
  const std::int64_t offset = kv_head * a.seq.v.head_stride;
  if constexpr (kDots<T>) {
    weigh_pairs<Vec, kHeads>(s.sums + q_head * stride, stride,
                             {s.scores + q_head * kKeys + at / 2, kKeys, factors},
                             {v, v + kAhead, offset}, count, a.head_dim);
  } else {
    weigh<T, kHeads>(s.sums + q_head * stride, stride, factors, s.scores + q_head * kKeys + at, v,
                     count, offset, a.head_dim);
  }
}

template <class T>
void weigh_tokens(const DecodeArgs& a, const DecodeScratch& s, QueryRows queries,
                  const TileRows<T>& rows, int stride) {
  const int begin = rows.begin / kBlock * kBlock;
  for (int t = begin; t < rows.end; t += kBlock) {
    const int count = least(kBlock, rows.end - t);
    for (int h = 0; h < a.kv_heads; ++h) {
      int q_head = (h * a.rows + queries.begin) * a.group;
      const int end = (h * a.rows + queries.end) * a.group;
      const auto add = [&](auto heads) {
        constexpr int kHeads = decltype(heads)::kCount;
        weigh_heads<T, kHeads>(a, s, rows.v + t, count, h, q_head, t, t == begin, stride);
        q_head += kHeads;
      };
      while (q_head + kMostHeads <= end) add(Heads<kMostHeads>{});
      if (q_head + 2 <= end) add(Heads<2>{});
      if (q_head < end) add(Heads<1>{});
    }
  }
}

// Calls `attend` with the rows of each tile and the query rows that attend to the same of them.
template <class T, class Attend>
void for_each_tile(const DecodeArgs& a, Attend attend) {
  for (std::int64_t at = a.begin, next = 0; at < a.end; at = next) {
    next = (at / kKeys + 1) * kKeys;
    const auto begin_of = [&](int row) {
      return most<std::int64_t>(at, a.first_position + row + 1 - a.window);
    };
    const auto end_of = [&](int row) {
      return least<std::int64_t>(a.end, a.first_position + row + 1);
    };
    for (QueryRows q{0, 0}; q.begin < a.rows; q.begin = q.end) {
      const std::int64_t begin = begin_of(q.begin), end = end_of(q.begin);
      const auto sees_the_same = [&](int row) {
        return begin_of(row) == begin && (end_of(row) == end || end >= next);
      };
      q.end = q.begin + 1;
      while (q.end < a.rows && sees_the_same(q.end)) ++q.end;
      if (begin >= least(end, next)) continue;
      TileRows<T> rows;
      fill(rows, a.seq, at / kKeys * kKeys, begin, end);
      attend(q, rows);
    }
  }
}

template <class T>
void decode(const DecodeArgs& a) {
  const int q_heads = a.kv_heads * a.rows * a.group, stride = padded(a.head_dim);
  const int q_stride = kDots<T> ? stride / 2 : stride;  // floats
  const DecodeScratch s(a.scratch, q_heads, stride);
  prepare_queries<T>(a, s.q, q_stride);
  start_sums(s, q_heads, stride);
  for_each_tile<T>(a, [&](QueryRows queries, const TileRows<T>& rows) {
    score_tokens(a, s, queries, rows, q_stride);
    soften_heads<T>(a, s, queries, rows.begin, rows.end);
    weigh_tokens(a, s, queries, rows, stride);
  });
  for (int h = 0; h < q_heads; ++h) {
    const int head = h / (a.rows * a.group) * a.group + h % a.group;
    emit<T>(a.out, h / a.group % a.rows, head, a.kv_heads * a.group, a.head_dim,
            s.sums + h * stride, s.maxima[h], s.totals[h]);
  }
}

}  // namespace
}  // namespace vmserve::cpu
