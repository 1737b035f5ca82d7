// Many query rows of one KV head over a stretch of positions: bound by arithmetic.
//
// FlashAttention (Dao et al. 2022) with everything transposed: the rows (new tokens times the
// heads of a group) lie across the lanes, kPanelVectors vectors to a panel, so that K and V are
// broadcast operands as they are, no product needs a horizontal sum, and the softmax runs down
// the columns. S = K . Q^T and O = V^T . P are the same register-blocked product of kRows rows.
// Positions are taken in tiles that begin at multiples of kKeys: what a row's result is does not
// depend on which other rows are computed with it.
#pragma once

#include "kernel_common.h"

namespace vmserve::cpu {
namespace {

constexpr int kKeys = 64;
constexpr int kPanelVectors = 3;
constexpr int kPanelLanes = kPanelVectors * Vec::kWidth;

struct Product {
  const float* a;  // a[row * a_row + k * a_k]
  std::int64_t a_row, a_k;
  const float* b;  // [depth, kVectors * kWidth]
  float* c;        // [rows, kVectors * kWidth]
  int rows, depth;
  const float* factors;  // c = c * factors[lane] + a . b; null: c = a . b
};

// Whole blocks of kRows: `rows` is rounded up, a and c have that many.
template <int kVectors>
void multiply(const Product& m) {
  constexpr int kRows = Vec::kRows, kLanes = kVectors * Vec::kWidth;
  for (int row = 0; row < m.rows; row += kRows) {
    Vec::R acc[kRows][kVectors];
    float* const c = m.c + row * kLanes;
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 8
      for (int v = 0; v < kVectors; ++v) {
        acc[r][v] = m.factors == nullptr ? Vec::zero()
                                         : Vec::mul(Vec::load(m.factors + v * Vec::kWidth),
                                                    Vec::load(c + r * kLanes + v * Vec::kWidth));
      }
    }
    const float* a = m.a + row * m.a_row;
    const float* b = m.b;
    for (int k = 0; k < m.depth; ++k, a += m.a_k, b += kLanes) {
      Vec::R lanes[kVectors];
#pragma GCC unroll 8
      for (int v = 0; v < kVectors; ++v) lanes[v] = Vec::load(b + v * Vec::kWidth);
#pragma GCC unroll 8
      for (int r = 0; r < kRows; ++r) {
        const Vec::R x = Vec::set(a[r * m.a_row]);
#pragma GCC unroll 8
        for (int v = 0; v < kVectors; ++v) acc[r][v] = Vec::fma(x, lanes[v], acc[r][v]);
      }
    }
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 8
      for (int v = 0; v < kVectors; ++v) Vec::store(c + r * kLanes + v * Vec::kWidth, acc[r][v]);
    }
  }
}

// The rows of one panel: which positions its lanes see, and its running softmax.
struct Panel {
  int lanes, vectors;
  std::int64_t first_position, last_position;  // of its first and its last row
  float *q, *sums;                             // [padded, vectors * kWidth]
  float *maxima, *totals, *factors;            // [kPanelLanes]
  float *newest, *oldest;                      // [kPanelLanes]: positions seen, less `base`
};

struct TileScratch {
  float *keys, *values, *scores, *panels;
  static constexpr int panel_floats(int stride) { return (2 * stride + 5) * kPanelLanes; }

  TileScratch(float* base, int stride) {
    keys = base;
    values = keys + kKeys * stride;
    scores = values + kKeys * stride;
    panels = scores + kKeys * kPanelLanes;
  }
};

inline size_t tile_scratch(std::int32_t rows_and_heads, std::int32_t head_dim) {
  const int stride = padded(head_dim);
  const int num_panels = (rows_and_heads + kPanelLanes - 1) / kPanelLanes;
  return static_cast<size_t>(2 * kKeys * stride + kKeys * kPanelLanes) +
         static_cast<size_t>(num_panels) * static_cast<size_t>(TileScratch::panel_floats(stride));
}

inline Panel panel_at(const TileArgs& a, const TileScratch& s, int stride, int index) {
  Panel p;
  const int first = index * kPanelLanes;
  p.lanes = least(kPanelLanes, a.rows * a.group - first);
  p.vectors = (p.lanes + Vec::kWidth - 1) / Vec::kWidth;
  p.first_position = a.first_position + first / a.group;
  p.last_position = a.first_position + (first + p.lanes - 1) / a.group;
  p.q = s.panels + index * TileScratch::panel_floats(stride);
  p.sums = p.q + stride * kPanelLanes;
  p.maxima = p.sums + stride * kPanelLanes;
  p.totals = p.maxima + kPanelLanes;
  p.factors = p.totals + kPanelLanes;
  p.newest = p.factors + kPanelLanes;
  p.oldest = p.newest + kPanelLanes;
  return p;
}

template <class T>
void start_panel(const TileArgs& a, const Panel& p, int index, int stride, std::int64_t base) {
  const int width = p.vectors * Vec::kWidth;
  memset(p.q, 0, sizeof(float) * static_cast<size_t>(2 * stride * kPanelLanes));
  const float factor = prescale(a.scale, a.softcap);
  float row[512];
  for (int lane = 0; lane < p.lanes; ++lane) {
    const int r = (index * kPanelLanes + lane) / a.group;
    const int g = (index * kPanelLanes + lane) % a.group;
    const T* from = static_cast<const T*>(a.q) + r * a.q_row_stride + g * a.q_head_stride;
    for (int d = 0; d < a.head_dim; d += kPair) {
      Vec::R x, y;
      load_upto(from + d, a.head_dim - d, x, y);
      Vec::store(row + d, x);
      Vec::store(row + d + Vec::kWidth, y);
    }
    for (int d = 0; d < stride; ++d) p.q[d * width + lane] = row[d] * factor;
    const std::int64_t position = a.first_position + r;
    p.newest[lane] = static_cast<float>(position - base);
    p.oldest[lane] = static_cast<float>(position - base - (a.window - 1));
  }
  for (int lane = 0; lane < width; ++lane) {
    p.maxima[lane] = kLowest;
    p.totals[lane] = 0.0F;
    if (lane >= p.lanes) {
      p.newest[lane] = p.newest[p.lanes - 1];
      p.oldest[lane] = p.oldest[p.lanes - 1];
    }
  }
}

// Converts `count` token rows of one head; rows up to a whole block are zero.
template <class T>
void widen_rows(const T* const* rows, std::int64_t offset, int count, int head_dim, int stride,
                float* to) {
  for (int t = 0; t < count; ++t) {
    const T* from = rows[t] + offset;
    for (int d = 0; d < head_dim; d += kPair) {
      Vec::R x, y;
      load_upto(from + d, head_dim - d, x, y);
      Vec::store(to + t * stride + d, x);
      Vec::store(to + t * stride + d + Vec::kWidth, y);
    }
  }
  const int whole = (count + Vec::kRows - 1) / Vec::kRows * Vec::kRows;
  memset(to + count * stride, 0, sizeof(float) * static_cast<size_t>((whole - count) * stride));
}

// Scores of `count` tokens (the first one `first` behind the base) become weights.
inline void soften_panel(const TileArgs& a, const Panel& p, float* scores, int count, float first,
                         bool masked) {
  const int width = p.vectors * Vec::kWidth;
  const Vec::R hidden = Vec::set(-INFINITY);
  for (int v = 0; v < width; v += Vec::kWidth) {
    float* const column = scores + v;
    const Vec::R maximum = Vec::load(p.maxima + v);
    Vec::R best = maximum;
    if (masked || a.softcap > 0.0F) {
      const Vec::R newest = Vec::load(p.newest + v), oldest = Vec::load(p.oldest + v);
      for (int t = 0; t < count; ++t) {
        Vec::R x = Vec::load(column + t * width);
        if (a.softcap > 0.0F) x = capped(x, a.softcap);
        const Vec::R position = Vec::set(first + static_cast<float>(t));
        x = Vec::where_less(newest, position, hidden, x);
        x = Vec::where_less(position, oldest, hidden, x);
        Vec::store(column + t * width, x);
        best = Vec::max(x, best);
      }
    } else {
      for (int t = 0; t < count; ++t) best = Vec::max(Vec::load(column + t * width), best);
    }
    Vec::R sum = Vec::zero();
    for (int t = 0; t < count; ++t) {
      const Vec::R weight = exp2(Vec::sub(Vec::load(column + t * width), best));
      Vec::store(column + t * width, weight);
      sum = Vec::add(sum, weight);
    }
    const Vec::R factor = exp2(Vec::sub(maximum, best));
    Vec::store(p.factors + v, factor);
    Vec::store(p.totals + v, Vec::fma(Vec::load(p.totals + v), factor, sum));
    Vec::store(p.maxima + v, best);
  }
}

// Tokens of a tile whose values are not all finite. A row that does not see one gives it the
// weight 0, and 0 times NaN is NaN: it would spread to rows before it, whose blocks other requests
// may share. So the product takes zeros in their place, and the rows that see them add them after.
struct Broken {
  int count = 0;
  int tokens[kKeys];
};

inline Broken find_broken(const float* values, int count, int stride) {
  Broken found;
  for (int t = 0; t < count; ++t) {
    Vec::R rest = Vec::zero();  // x - x is 0, or NaN
    for (int d = 0; d < stride; d += Vec::kWidth) {
      const Vec::R x = Vec::load(values + t * stride + d);
      rest = Vec::add(rest, Vec::sub(x, x));
    }
    float lanes[Vec::kWidth];
    Vec::store(lanes, rest);
    bool finite = true;
    for (const float lane : lanes) finite = finite && lane == 0.0F;
    if (!finite) found.tokens[found.count++] = t;
  }
  return found;
}

// What the rows that see a broken token get of it: numbers that are none.
template <class T>
void add_broken(const TileArgs& a, const Panel& p, const float* scores, const Broken& broken,
                const T* const* rows, int seen, float first) {
  const int width = p.vectors * Vec::kWidth;
  const int stride = padded(a.head_dim);  // pairs of bfloat16 are apart, up to there
  float value[512];
  for (int i = 0; i < broken.count && broken.tokens[i] < seen; ++i) {
    const int t = broken.tokens[i];
    const T* from = rows[t] + a.kv_head * a.seq.v.head_stride;
    for (int d = 0; d < a.head_dim; d += kPair) {
      Vec::R x, y;
      load_upto(from + d, a.head_dim - d, x, y);
      Vec::store(value + d, x);
      Vec::store(value + d + Vec::kWidth, y);
    }
    const float position = first + static_cast<float>(t);
    for (int lane = 0; lane < p.lanes; ++lane) {
      if (position > p.newest[lane] || position < p.oldest[lane]) continue;
      const float weight = scores[t * width + lane];
      for (int d = 0; d < stride; ++d) p.sums[d * width + lane] += weight * value[d];
    }
  }
}

template <int kVectors>
void attend_panel(const TileArgs& a, const Panel& p, const TileScratch& s, int stride,
                  std::int64_t at, int count, std::int64_t base) {
  multiply<kVectors>({s.keys, stride, 1, p.q, s.scores, count, stride, nullptr});
  const bool masked = at + count - 1 > p.first_position || at <= p.last_position - a.window;
  soften_panel(a, p, s.scores, count, static_cast<float>(at - base), masked);
  multiply<kVectors>({s.values, 1, stride, s.scores, p.sums, stride, count, p.factors});
}

// The positions of [at, end of its tile) that some row of the panel sees are [at, at + count).
inline int visible(const TileArgs& a, const Panel& p, std::int64_t at, int count) {
  if (at + count - 1 <= p.first_position - a.window) return 0;
  return static_cast<int>(least<std::int64_t>(count, p.last_position + 1 - at));
}

template <class T>
void finish_panel(const TileArgs& a, const Panel& p, int index, int stride) {
  const int width = p.vectors * Vec::kWidth;
  float row[512];
  for (int lane = 0; lane < p.lanes; ++lane) {
    for (int d = 0; d < stride; ++d) row[d] = p.sums[d * width + lane];
    const int r = (index * kPanelLanes + lane) / a.group;
    const int g = (index * kPanelLanes + lane) % a.group;
    emit<T>(a.out, r, g, a.group, a.head_dim, row, p.maxima[lane], p.totals[lane]);
  }
}

template <class T>
void tile(const TileArgs& a) {
  const int stride = padded(a.head_dim);
  const TileScratch s(a.scratch, stride);
  const int num_panels = (a.rows * a.group + kPanelLanes - 1) / kPanelLanes;
  // Positions are compared as floats relative to this one: small numbers, hence exact ones.
  const std::int64_t base = a.first_position;
  for (int i = 0; i < num_panels; ++i) {
    start_panel<T>(a, panel_at(a, s, stride, i), i, stride, base);
  }
  for (std::int64_t at = a.begin; at < a.end;) {
    const std::int64_t tile_end = least<std::int64_t>(a.end, (at / kKeys + 1) * kKeys);
    const int count = static_cast<int>(tile_end - at);
    const T *k[kKeys], *v[kKeys];
    locate(a.seq, at, count, k, v);
    widen_rows(k, a.kv_head * a.seq.k.head_stride, count, a.head_dim, stride, s.keys);
    widen_rows(v, a.kv_head * a.seq.v.head_stride, count, a.head_dim, stride, s.values);
    // Only where some row does not see some token.
    const bool hides =
        tile_end - 1 > a.first_position || at <= a.first_position + a.rows - 1 - a.window;
    const Broken broken = hides ? find_broken(s.values, count, stride) : Broken{};
    for (int i = 0; i < broken.count; ++i) {
      memset(s.values + broken.tokens[i] * stride, 0, sizeof(float) * static_cast<size_t>(stride));
    }
    for (int i = 0; i < num_panels; ++i) {
      const Panel p = panel_at(a, s, stride, i);
      const int seen = visible(a, p, at, count);
      if (seen <= 0) continue;
      if (p.vectors == 3) attend_panel<3>(a, p, s, stride, at, seen, base);
      if (p.vectors == 2) attend_panel<2>(a, p, s, stride, at, seen, base);
      if (p.vectors == 1) attend_panel<1>(a, p, s, stride, at, seen, base);
      add_broken(a, p, s.scores, broken, v, seen, static_cast<float>(at - base));
    }
    at = tile_end;
  }
  for (int i = 0; i < num_panels; ++i) {
    finish_panel<T>(a, panel_at(a, s, stride, i), i, stride);
  }
}

}  // namespace
}  // namespace vmserve::cpu
