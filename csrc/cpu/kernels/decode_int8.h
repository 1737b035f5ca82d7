// Decode over keys and values of 8 bits: decode.h with products of integers (int8.h).
//
// Keys: four codes of a token are a word, so that a block of them is transposed as floats are.
// Values: the same elements of two tokens are paired, and multiplied by two weights. Codes are
// multiplied as they are stored (+ 128), so sums begin with a correction.
#pragma once

#include "decode.h"
#include "int8.h"

namespace vmserve::cpu {
namespace {

// Query heads whose weighted sums are in registers at a time: four vectors each.
constexpr int kMostWeighed = Vec::kWidth == 16 ? 4 : 2;

struct CodeScratch {
  float *sums, *maxima, *new_maxima, *totals, *added, *factors, *scores;
  float *q_scales, *weight_scales;
  std::int32_t *q_offsets, *weight_offsets, *whole_sums;
  std::int16_t *q, *weights;

  CodeScratch(float* base, int q_heads, int stride) {
    const int each = DecodeScratch::rounded(q_heads);
    const auto take = [&](int floats) {
      float* const at = base;
      base += floats;
      return at;
    };
    sums = take(q_heads * stride);
    whole_sums = reinterpret_cast<std::int32_t*>(take(q_heads * stride));
    q = reinterpret_cast<std::int16_t*>(take(q_heads * stride / 2));
    scores = take(q_heads * kKeys);
    weights = reinterpret_cast<std::int16_t*>(take(q_heads * kKeys / 2));
    float** const of_heads[] = {&maxima,  &new_maxima, &totals,       &added,
                                &factors, &q_scales,   &weight_scales};
    for (float** at : of_heads) *at = take(each);
    q_offsets = reinterpret_cast<std::int32_t*>(take(each));
    weight_offsets = reinterpret_cast<std::int32_t*>(take(each));
  }
};

inline size_t decode_codes_scratch(std::int32_t q_heads, std::int32_t head_dim) {
  return static_cast<size_t>(q_heads) *
             static_cast<size_t>(padded_codes(head_dim) * 5 / 2 + kKeys * 3 / 2) +
         static_cast<size_t>(9 * DecodeScratch::rounded(q_heads));
}

inline Vec::I load_sums(const std::int32_t* from) {
  Vec::I sums;
  memcpy(&sums, from, sizeof sums);
  return sums;
}
inline void store_sums(std::int32_t* to, Vec::I sums) {
  memcpy(to, &sums, sizeof sums);
}

// sums[g * kKeys + t] += q[g] . (codes of token t) over the elements in `words`, of kSide tokens.
template <int kHeads>
void score_codes(const Vec::R (&words)[kSideVectors][Vec::kWidth], const std::int16_t* q,
                 const std::int32_t* offsets, bool is_first, std::int32_t* sums) {
  Vec::I acc[kHeads][kSideVectors];
#pragma GCC unroll 4
  for (int g = 0; g < kHeads; ++g) {
#pragma GCC unroll 2
    for (int v = 0; v < kSideVectors; ++v) {
      acc[g][v] =
          is_first ? Vec::set_int(offsets[g]) : load_sums(sums + g * kKeys + v * Vec::kWidth);
    }
  }
#pragma GCC unroll 16
  for (int j = 0; j < Vec::kWidth; ++j) {
#pragma GCC unroll 2
    for (int v = 0; v < kSideVectors; ++v) {
      const Vec::S codes = Vec::bits_of(words[v][j]);
      const Vec::S even = Vec::even_bytes(codes), odd = Vec::odd_bytes(codes);
#pragma GCC unroll 4
      for (int g = 0; g < kHeads; ++g) {
        const std::int16_t* const quad = q + (j * kHeads + g) * 4;
        acc[g][v] = Vec::add_products(acc[g][v], even, quad);
        acc[g][v] = Vec::add_products(acc[g][v], odd, quad + 2);
      }
    }
  }
#pragma GCC unroll 4
  for (int g = 0; g < kHeads; ++g) {
#pragma GCC unroll 2
    for (int v = 0; v < kSideVectors; ++v) {
      store_sums(sums + g * kKeys + v * Vec::kWidth, acc[g][v]);
    }
  }
}

// Scores of kSide tokens from `t` on for the query heads of one KV head, of some rows; `first`: the
// first of these heads.
inline void score_code_group(const DecodeArgs& a, const CodeScratch& s, int first, int heads,
                             const Code* const* k, std::int64_t offset, int t, int stride) {
  auto* const sums = reinterpret_cast<std::int32_t*>(s.scores + first * kKeys + t);
  for (int d = 0; d < a.head_dim; d += kVectorCodes) {
    Vec::R words[kSideVectors][Vec::kWidth];
    for (int v = 0; v < kSideVectors; ++v) {
      const Code* const* const rows = k + v * Vec::kWidth;
      if (d + kVectorCodes <= a.head_dim) {
        load_words<Code, true>(rows, offset + d, 0, words[v]);
      } else {
        load_words<Code, false>(rows, offset + d, a.head_dim - d, words[v]);
      }
    }
    int g = 0;
    const auto score = [&](auto some) {
      constexpr int kHeads = decltype(some)::kCount;
      score_codes<kHeads>(words, s.q + (first + g) * stride + d * kHeads, s.q_offsets + first + g,
                          d == 0, sums + g * kKeys);
      g += kHeads;
    };
    for (int end = a.group; end <= heads; end += a.group) {
      while (g + kMostHeads <= end) score(Heads<kMostHeads>{});
      if (kMostHeads > 3 && end - g == 3) score(Heads<3>{});
      if (end - g == 2) score(Heads<2>{});
      if (end - g == 1) score(Heads<1>{});
    }
  }
  float scales[kSide];
  for (int i = 0; i < kSide; ++i) scales[i] = scale_of(k[i] + offset, a.head_dim);
  for (int g = 0; g < heads; ++g) {
    for (int i = 0; i < kSide; i += Vec::kWidth) {
      const Vec::R whole = Vec::to_float(load_sums(sums + g * kKeys + i));
      Vec::store(s.scores + (first + g) * kKeys + t + i,
                 Vec::mul(Vec::mul(whole, Vec::set(s.q_scales[first + g])), Vec::load(scales + i)));
    }
  }
}

// sums[g] += weights[g] . codes over an even number of tokens, of kVectorCodes elements.
template <int kHeads, bool kWhole>
void weigh_codes(std::int32_t* sums, int stride, const std::int32_t* offsets,
                 const std::int16_t* weights, const Code* const* v, int count, std::int64_t offset,
                 int left) {
  Vec::I acc[kHeads][4];
#pragma GCC unroll 4
  for (int g = 0; g < kHeads; ++g) {
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {
      acc[g][i] = offsets != nullptr ? Vec::set_int(offsets[g])
                                     : load_sums(sums + g * stride + i * Vec::kWidth);
    }
  }
  const auto codes_at = [&](int t) {
    prefetch_line(v[kAhead + t] + offset);
    const Code* const row = v[t] + offset;
    if constexpr (kWhole) return Vec::load_bytes(row);
    Code some[kVectorCodes] = {};
    for (int i = 0; i < left; i += 8) memcpy(some + i, row + i, 8);
    return Vec::load_bytes(some);
  };
  for (int t = 0; t < count; t += 2) {
    Vec::S pairs[4];
    Vec::pair_rows(codes_at(t), codes_at(t + 1), pairs);
#pragma GCC unroll 4
    for (int g = 0; g < kHeads; ++g) {
#pragma GCC unroll 4
      for (int i = 0; i < 4; ++i) {
        acc[g][i] = Vec::add_products(acc[g][i], pairs[i], weights + g * kKeys + t);
      }
    }
  }
#pragma GCC unroll 4
  for (int g = 0; g < kHeads; ++g) {
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) store_sums(sums + g * stride + i * Vec::kWidth, acc[g][i]);
  }
}

// Turns the weights of a tile into integers; returns 0, or NaN if a value with a weight is broken.
inline float round_weights(const CodeScratch& s, int head, const float* scales) {
  const float* const weights = s.scores + head * kKeys;
  Vec::R scaled[kKeys / Vec::kWidth], largest = Vec::zero(), rest = Vec::zero();
  for (int i = 0; i < kKeys / Vec::kWidth; ++i) {
    scaled[i] =
        scaled_weight(Vec::load(weights + i * Vec::kWidth), Vec::load(scales + i * Vec::kWidth));
    largest = Vec::max(scaled[i], largest);
    rest = Vec::fma(scaled[i], Vec::zero(), rest);
  }
  const Vec::R most = Vec::set(Vec::reduce_max(largest)), inverse = inverse_of(most);
  Vec::R sum = Vec::zero();
  for (int i = 0; i < kKeys / Vec::kWidth; ++i) {
    const Vec::R whole = whole_weight(scaled[i], inverse);
    sum = Vec::add(sum, whole);
    Vec::store_integers(s.weights + head * kKeys + i * Vec::kWidth, whole);
  }
  s.weight_scales[head] = first_lane(weight_scale(most));
  s.weight_offsets[head] = -128 * static_cast<std::int32_t>(Vec::reduce_add(sum));
  return Vec::reduce_add(rest);
}

inline void soften_code_heads(const DecodeArgs& a, const CodeScratch& s, QueryRows queries,
                              const TileRows<Code>& rows) {
  const int heads = a.rows * a.group, q_heads = a.kv_heads * heads;
  float scales[kKeys];
  for (int h = 0; h < q_heads; ++h) {
    if (h % heads == 0) {
      const std::int64_t offset = h / heads * a.seq.v.head_stride;
      for (int t = 0; t < kKeys; ++t) scales[t] = scale_of(rows.v[t] + offset, a.head_dim);
    }
    const int row = h / a.group % a.rows;
    if (row < queries.begin || row >= queries.end) {
      s.added[h] = 0.0F;  // with the same maximum as before: nothing changes
      continue;
    }
    const Softened softened = soften<Vec, false>(s.scores + h * kKeys, rows.begin, rows.end,
                                                 a.scale, a.softcap, s.maxima[h]);
    s.new_maxima[h] = softened.maximum;
    s.added[h] = softened.sum + round_weights(s, h, scales);
  }
  update_totals(s, q_heads);
}

// Adds a tile's weighted codes to the sums of the tiles before it.
inline void weigh_code_tokens(const DecodeArgs& a, const CodeScratch& s, QueryRows queries,
                              const TileRows<Code>& rows, int stride) {
  const int begin = rows.begin / kBlock * kBlock;
  for (int t = begin; t < rows.end; t += kBlock) {
    const int count = (least(kBlock, rows.end - t) + 1) / 2 * 2;
    for (int h = 0; h < a.kv_heads; ++h) {
      const int end = (h * a.rows + queries.end) * a.group;
      const std::int64_t offset = h * a.seq.v.head_stride;
      for (int d = 0; d < a.head_dim; d += kVectorCodes) {
        int head = (h * a.rows + queries.begin) * a.group;
        const auto add = [&](auto some) {
          constexpr int kHeads = decltype(some)::kCount;
          const auto weigh = d + kVectorCodes <= a.head_dim ? &weigh_codes<kHeads, true>
                                                            : &weigh_codes<kHeads, false>;
          weigh(s.whole_sums + head * stride + d, stride,
                t == begin ? s.weight_offsets + head : nullptr, s.weights + head * kKeys + t,
                rows.v + t, count, offset + d, a.head_dim - d);
          head += kHeads;
        };
        if constexpr (kMostWeighed == 4) {
          while (head + 4 <= end) add(Heads<4>{});
        }
        while (head + 2 <= end) add(Heads<2>{});
        if (head < end) add(Heads<1>{});
      }
    }
  }
  for (int h = 0; h < a.kv_heads; ++h) {
    for (int head = (h * a.rows + queries.begin) * a.group;
         head < (h * a.rows + queries.end) * a.group; ++head) {
      const Vec::R factor = Vec::set(s.factors[head]), scale = Vec::set(s.weight_scales[head]);
      for (int d = head * stride; d < (head + 1) * stride; d += Vec::kWidth) {
        Vec::store(s.sums + d, Vec::fma(Vec::to_float(load_sums(s.whole_sums + d)), scale,
                                        Vec::mul(factor, Vec::load(s.sums + d))));
      }
    }
  }
}

// Integers of the query heads, in the order in which score_codes takes them.
template <class T>
void prepare_code_queries(const DecodeArgs& a, const CodeScratch& s, int stride) {
  const float factor = prescale(a.scale, a.softcap);
  for (int h = 0; h < a.kv_heads * a.rows * a.group; ++h) {
    std::int16_t row[kMaxHeadDim + kVectorCodes] = {};
    const int head = h / (a.rows * a.group) * a.group + h % a.group, place = h / a.group % a.rows;
    const T* const from =
        static_cast<const T*>(a.q) + place * a.q_row_stride + head * a.q_head_stride;
    s.q_scales[h] = encode_query(from, a.head_dim, factor, row);
    std::int32_t sum = 0;
    for (int d = 0; d < a.head_dim; ++d) sum += row[d];
    s.q_offsets[h] = -128 * sum;
    const int first = h % a.group / kMostHeads * kMostHeads;
    const int heads = least(kMostHeads, a.group - first), lane = h % a.group - first;
    std::int16_t* const to = s.q + (h - lane) * stride + lane * 4;
    for (int d = 0; d < stride; d += 4) {
      std::int16_t* const quad = to + d * heads;
      quad[0] = row[d];
      quad[1] = row[d + 2];
      quad[2] = row[d + 1];
      quad[3] = row[d + 3];
    }
  }
}

template <class T>
void emit_codes(const DecodeArgs& a, const CodeScratch& s, int h, int stride) {
  float row[kMaxHeadDim] = {};
  for (int at = 0; at < stride; ++at) {
    const int rest = at % kVectorCodes;
    const int d = at - rest + paired_element(rest / Vec::kWidth, rest % Vec::kWidth);
    if (d < a.head_dim) row[lane_of<T>(d)] = s.sums[h * stride + at];
  }
  const int head = h / (a.rows * a.group) * a.group + h % a.group;
  emit<T>(a.out, h / a.group % a.rows, head, a.kv_heads * a.group, a.head_dim, row, s.maxima[h],
          s.totals[h]);
}

template <class T>
void decode_codes(const DecodeArgs& a) {
  const int q_heads = a.kv_heads * a.rows * a.group, stride = padded_codes(a.head_dim);
  const CodeScratch s(a.scratch, q_heads, stride);
  prepare_code_queries<T>(a, s, stride);
  start_sums(s, q_heads, stride);
  for_each_tile<Code>(a, [&](QueryRows queries, const TileRows<Code>& rows) {
    for (int t = rows.begin / kSide * kSide; t < rows.end; t += kSide) {
      for (int h = 0; h < a.kv_heads; ++h) {
        score_code_group(a, s, (h * a.rows + queries.begin) * a.group,
                         (queries.end - queries.begin) * a.group, rows.k + t,
                         h * a.seq.k.head_stride, t, stride);
      }
    }
    soften_code_heads(a, s, queries, rows);
    weigh_code_tokens(a, s, queries, rows, stride);
  });
  for (int h = 0; h < q_heads; ++h) emit_codes<T>(a, s, h, stride);
}

}  // namespace
}  // namespace vmserve::cpu
