// Attention of many query rows over keys and values of 8 bits: tile.h with products of integers
// (int8.h). Both products take pairs of int16 in place of floats: two elements of the head
// dimension, or two tokens. Codes are widened once for all rows of a tile.
#pragma once

#include "int8.h"
#include "tile.h"

namespace vmserve::cpu {
namespace {

// A Product of pairs of int16, exact: c = (a . b) * row_scales[row] * lane_scales[lane] or, with
// `factors`, c = c * factors[lane] + (a . b) * lane_scales[lane].
struct CodeProduct {
  Product of;
  const float *row_scales, *lane_scales;
};

template <int kVectors>
void multiply_codes(const CodeProduct& p) {
  constexpr int kRows = Vec::kRows, kLanes = kVectors * Vec::kWidth;
  const Product& m = p.of;
  for (int row = 0; row < m.rows; row += kRows) {
    Vec::I acc[kRows][kVectors];
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 8
      for (int v = 0; v < kVectors; ++v) acc[r][v] = Vec::set_int(0);
    }
    const float* a = m.a + row * m.a_row;
    const float* b = m.b;
    for (int k = 0; k < m.depth; ++k, a += m.a_k, b += kLanes) {
      Vec::S lanes[kVectors];
#pragma GCC unroll 8
      for (int v = 0; v < kVectors; ++v) lanes[v] = Vec::load_bytes(b + v * Vec::kWidth);
#pragma GCC unroll 8
      for (int r = 0; r < kRows; ++r) {
        const auto* const pair = reinterpret_cast<const std::int16_t*>(a + r * m.a_row);
#pragma GCC unroll 8
        for (int v = 0; v < kVectors; ++v) {
          acc[r][v] = Vec::add_products(acc[r][v], lanes[v], pair);
        }
      }
    }
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 8
      for (int v = 0; v < kVectors; ++v) {
        float* const c = m.c + (row + r) * kLanes + v * Vec::kWidth;
        const Vec::R sum = Vec::to_float(acc[r][v]),
                     scale = Vec::load(p.lane_scales + v * Vec::kWidth);
        if (m.factors == nullptr) {
          Vec::store(c, Vec::mul(Vec::mul(sum, scale), Vec::set(p.row_scales[row + r])));
        } else {
          const Vec::R factor = Vec::load(m.factors + v * Vec::kWidth);
          Vec::store(c, Vec::fma(sum, scale, Vec::mul(factor, Vec::load(c))));
        }
      }
    }
  }
}

// Turns the weights of `count` tokens into integers, two tokens in a word.
inline void round_panel(const Panel& p, float* weights, const float* v_scales, int count) {
  const int width = p.vectors * Vec::kWidth;
  for (int v = 0; v < width; v += Vec::kWidth) {
    float* const column = weights + v;
    Vec::R largest = Vec::zero(), rest = Vec::zero();
    for (int t = 0; t < count; ++t) {
      const Vec::R x = scaled_weight(Vec::load(column + t * width), Vec::set(v_scales[t]));
      Vec::store(column + t * width, x);
      largest = Vec::max(x, largest);
      rest = Vec::fma(x, Vec::zero(), rest);
    }
    const Vec::R inverse = inverse_of(largest);
    for (int t = 0; t < count; t += 2) {
      const Vec::R even = whole_weight(Vec::load(column + t * width), inverse);
      const Vec::R odd =
          t + 1 < count ? whole_weight(Vec::load(column + (t + 1) * width), inverse) : Vec::zero();
      Vec::store_bytes(column + t / 2 * width, Vec::pair_whole(even, odd));
    }
    Vec::store(p.weight_scales + v, weight_scale(largest));
    Vec::store(p.totals + v, Vec::add(Vec::load(p.totals + v), rest));
  }
}

// The tokens of a tile, as codes. Positions before the first window are not read: they are zero.
template <class T>
class Codes {
 public:
  // The integers of a panel's rows, two elements in a word.
  static void start(const TileArgs& a, const Panel& p, const TileScratch&, int index) {
    const int width = p.vectors * Vec::kWidth;
    const float factor = prescale(a.scale, a.softcap);
    for (int lane = 0; lane < p.lanes; ++lane) {
      std::int16_t row[kMaxHeadDim];
      p.q_scales[lane] = encode_query(query_row<T>(a, index, lane), a.head_dim, factor, row);
      for (int d = 0; d < a.head_dim; d += 2) memcpy(p.q + d / 2 * width + lane, row + d, 4);
    }
    for (int lane = p.lanes; lane < width; ++lane) p.q_scales[lane] = 0.0F;
  }

  static int sums_of(int place) {
    return lane_of<T>(1) == 1
               ? place
               : place / kPair * kPair + place % Vec::kWidth * 2 + place % kPair / Vec::kWidth;
  }

  void load(const TileArgs& a, const TileScratch& s, std::int64_t at, int lead, int count, bool) {
    const Code *k[kKeys], *v[kKeys];
    locate(a.seq, at + lead, count - lead, k + lead, v + lead);
    memset(k_scales_, 0, sizeof k_scales_);
    memset(v_scales_, 0, sizeof v_scales_);
    for (int t = lead; t < count; ++t) {
      k[t] += a.kv_head * a.seq.k.head_stride;
      v[t] += a.kv_head * a.seq.v.head_stride;
      k_scales_[t] = scale_of(k[t], a.head_dim);
      v_scales_[t] = scale_of(v[t], a.value_dim);
    }
    widen_keys(k, lead, count, a.head_dim, s.stride / 2, s.keys);
    pair_values(v, lead, count, a.value_dim, s.v_stride, s.values);
  }

  template <int kVectors>
  void attend(const TileArgs& a, const Panel& p, const TileScratch& s, std::int64_t at, int seen,
              std::int64_t base) const {
    const int depth = s.stride / 2;
    multiply_codes<kVectors>(
        {{s.keys, depth, 1, p.q, s.scores, seen, depth, nullptr}, k_scales_, p.q_scales});
    const bool masked = at + seen - 1 > p.first_position || at <= p.last_position - a.window;
    soften_panel<Vec, false>(a, p, s.scores, seen, static_cast<float>(at - base), masked);
    round_panel(p, s.scores, v_scales_, seen);
    multiply_codes<kVectors>(
        {{s.values, 1, s.v_stride, s.scores, p.sums, s.v_stride, (seen + 1) / 2, p.factors},
         nullptr,
         p.weight_scales});
  }

 private:
  // As words of two elements: [tokens, width], with zeros up to whole blocks of tokens.
  static void widen_keys(const Code* const* k, int lead, int count, int head_dim, int width,
                         float* to) {
    const int whole = (count + Vec::kRows - 1) / Vec::kRows * Vec::kRows;
    memset(to, 0, sizeof(float) * static_cast<size_t>(whole * width));
    for (int t = lead; t < count; ++t) {
      auto* const row = reinterpret_cast<std::int16_t*>(to + t * width);
      for (int d = 0; d < head_dim; ++d) row[d] = static_cast<std::int16_t>(k[t][d].bits - 128);
    }
  }

  // As words of two tokens: [tokens / 2, width].
  static void pair_values(const Code* const* v, int lead, int count, int value_dim, int width,
                          float* to) {
    memset(to, 0, sizeof(float) * static_cast<size_t>((count + 1) / 2 * width));
    for (int t = lead; t < count; ++t) {
      auto* const row = reinterpret_cast<std::int16_t*>(to + t / 2 * width) + t % 2;
      for (int d = 0; d < value_dim; ++d) {
        row[2 * d] = static_cast<std::int16_t>(v[t][d].bits - 128);
      }
    }
  }

  float k_scales_[kKeys], v_scales_[kKeys];
};

template <class T>
void tile_codes(const TileArgs& a) {
  tile_over<T, Codes<T>>(a);
}

}  // namespace
}  // namespace vmserve::cpu
