// Attention of many query rows of one KV head over a range of positions. Bound by arithmetic.
//
// FlashAttention (Dao et al. 2022), transposed: rows (new tokens times the heads of a group) lie
// across the lanes, kPanelVectors vectors to a panel. So K and V are broadcast unchanged, products
// need no horizontal sums, and the softmax runs down the columns. S = K . Q^T and O = V^T . P are
// the same register-blocked product of kRows rows. If pairs of bfloat16 are multiplied (kDots), the
// depth of both products is pairs: two elements of the head dimension, or two tokens. Weights of
// tokens are then rounded to bfloat16. Tiles of positions begin at multiples of kKeys and parts at
// multiples of kPartTokens, so a row's result does not depend on the other rows.
#pragma once

#include "kernel_common.h"

namespace vmserve::cpu {
namespace {

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

// Multiplies whole blocks of kRows rows: `rows` is rounded up, and a and c have that many. Paired:
// elements of a and b are pairs of bfloat16. `V` is `Vec`.
template <class V, int kVectors, bool kPaired>
void multiply(const Product& m) {
  using R = typename V::R;
  constexpr int kRows = V::kRows, kLanes = kVectors * V::kWidth;
  for (int row = 0; row < m.rows; row += kRows) {
    R acc[kRows][kVectors];
    float* const c = m.c + row * kLanes;
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 8
      for (int v = 0; v < kVectors; ++v) {
        acc[r][v] = m.factors == nullptr ? V::zero()
                                         : V::mul(V::load(m.factors + v * V::kWidth),
                                                  V::load(c + r * kLanes + v * V::kWidth));
      }
    }
    const float* a = m.a + row * m.a_row;
    const float* b = m.b;
    for (int k = 0; k < m.depth; ++k, a += m.a_k, b += kLanes) {
      R lanes[kVectors];
#pragma GCC unroll 8
      for (int v = 0; v < kVectors; ++v) lanes[v] = V::load(b + v * V::kWidth);
#pragma GCC unroll 8
      for (int r = 0; r < kRows; ++r) {
        R x;
        if constexpr (kPaired) {
          x = V::set_pair(a + r * m.a_row);
        } else {
          x = V::set(a[r * m.a_row]);
        }
#pragma GCC unroll 8
        for (int v = 0; v < kVectors; ++v) {
          if constexpr (kPaired) {
            acc[r][v] = V::dot_pairs(x, lanes[v], acc[r][v]);
          } else {
            acc[r][v] = V::fma(x, lanes[v], acc[r][v]);
          }
        }
      }
    }
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 8
      for (int v = 0; v < kVectors; ++v) V::store(c + r * kLanes + v * V::kWidth, acc[r][v]);
    }
  }
}

// The rows of one panel: the positions its lanes attend to, and its running softmax.
struct Panel {
  int lanes, vectors;
  std::int64_t first_position, last_position;     // of its first and last row
  float* q;                                       // [padded, vectors * kWidth]
  float *sums, *maxima, *totals;                  // of the current part: [padded, vectors * kWidth]
  float *folded, *folded_maxima, *folded_totals;  // sums of the parts before it
  float* factors;                                 // [kPanelLanes], as all that follow
  float *newest, *oldest;                         // range attended to, minus `base`
  float *q_scales, *weight_scales;                // of integers (tile_int8.h)
};

struct TileScratch {
  float *keys, *values, *scores, *panels;
  int stride, v_stride;  // lengths of a row of keys and of values

  TileScratch(float* base, int head_dim, int value_dim)
      : stride(padded(head_dim)), v_stride(padded(value_dim)) {
    keys = base;
    values = keys + kKeys * stride;
    scores = values + kKeys * v_stride;
    panels = scores + kKeys * kPanelLanes;
  }
  int panel_floats() const { return (stride + 2 * v_stride + 9) * kPanelLanes; }
};

inline size_t tile_scratch(std::int32_t rows_and_heads, std::int32_t head_dim,
                           std::int32_t value_dim) {
  const TileScratch s(nullptr, head_dim, value_dim);
  const int num_panels = (rows_and_heads + kPanelLanes - 1) / kPanelLanes;
  return static_cast<size_t>(kKeys * (s.stride + s.v_stride + kPanelLanes)) +
         static_cast<size_t>(num_panels) * static_cast<size_t>(s.panel_floats());
}

inline Panel panel_at(const TileArgs& a, const TileScratch& s, int index) {
  Panel p;
  const int first = index * kPanelLanes;
  p.lanes = least(kPanelLanes, a.rows * a.group - first);
  p.vectors = (p.lanes + Vec::kWidth - 1) / Vec::kWidth;
  p.first_position = a.first_position + first / a.group;
  p.last_position = a.first_position + (first + p.lanes - 1) / a.group;
  p.q = s.panels + index * s.panel_floats();
  p.sums = p.q + s.stride * kPanelLanes;
  p.folded = p.sums + s.v_stride * kPanelLanes;
  p.maxima = p.folded + s.v_stride * kPanelLanes;
  p.totals = p.maxima + kPanelLanes;
  p.folded_maxima = p.totals + kPanelLanes;
  p.folded_totals = p.folded_maxima + kPanelLanes;
  p.factors = p.folded_totals + kPanelLanes;
  p.newest = p.factors + kPanelLanes;
  p.oldest = p.newest + kPanelLanes;
  p.q_scales = p.oldest + kPanelLanes;
  p.weight_scales = p.q_scales + kPanelLanes;
  return p;
}

inline void start_part(const Panel& p, int stride) {
  memset(p.sums, 0, sizeof(float) * static_cast<size_t>(stride * p.vectors * Vec::kWidth));
  for (int lane = 0; lane < kPanelLanes; ++lane) {
    p.maxima[lane] = kLowest;
    p.totals[lane] = 0.0F;
  }
}

// Adds the current part to the parts before it, and starts the next one.
inline void end_part(const Panel& p, int stride) {
  const int width = p.vectors * Vec::kWidth;
  for (int v = 0; v < width; v += Vec::kWidth) {
    const Fold fold(Vec::load(p.folded_maxima + v), Vec::load(p.maxima + v));
    const auto add = [&](float* to, const float* from) {
      Vec::store(to + v, fold(Vec::load(to + v), Vec::load(from + v)));
    };
    for (int d = 0; d < stride; ++d) add(p.folded + d * width, p.sums + d * width);
    add(p.folded_totals, p.totals);
    Vec::store(p.folded_maxima + v, fold.maximum);
  }
  start_part(p, stride);
}

// The row of q of a lane.
template <class T>
const T* query_row(const TileArgs& a, int index, int lane) {
  const int row = index * kPanelLanes + lane;
  return static_cast<const T*>(a.q) + row / a.group * a.q_row_stride +
         row % a.group * a.q_head_stride;
}

// Initialises a panel; q becomes zero.
inline void start_lanes(const TileArgs& a, const Panel& p, const TileScratch& s, int index,
                        std::int64_t base) {
  const int width = p.vectors * Vec::kWidth;
  start_part(p, s.v_stride);
  memset(p.q, 0, sizeof(float) * static_cast<size_t>(s.stride * width));
  memset(p.folded, 0, sizeof(float) * static_cast<size_t>(s.v_stride * width));
  for (int lane = 0; lane < width; ++lane) {
    const int r = (index * kPanelLanes + least(lane, p.lanes - 1)) / a.group;
    const std::int64_t position = a.first_position + r;
    p.newest[lane] = static_cast<float>(position - base);
    p.oldest[lane] = static_cast<float>(position - base - (a.window - 1));
    p.folded_maxima[lane] = kLowest;
    p.folded_totals[lane] = 0.0F;
  }
}

// Tokens of a tile with values that are not finite. A row that does not attend to such a token
// gives it the weight 0, but 0 times NaN is NaN. That NaN would reach earlier rows, whose blocks
// other requests may share. So the product takes zeros instead, and the values are added afterwards
// to the rows that attend to them.
struct Broken {
  int count = 0;
  int tokens[kKeys];
};

template <class T>
Broken find_broken(const TileArgs& a, const T* const* v, int count) {
  Broken found;
  for (int t = 0; t < count; ++t) {
    const T* const row = v[t];
    Vec::R rest = Vec::zero();  // x - x is 0 or NaN
    for (int d = 0; d < a.value_dim; d += kPair) {
      Vec::R x, y;
      load_upto(row + d, a.value_dim - d, x, y);
      rest = Vec::add(rest, Vec::add(Vec::sub(x, x), Vec::sub(y, y)));
    }
    float lanes[Vec::kWidth];
    Vec::store(lanes, rest);
    bool finite = true;
    for (const float lane : lanes) finite = finite && lane == 0.0F;
    if (!finite) found.tokens[found.count++] = t;
  }
  return found;
}

// Fills with zeros after `count` rows of `width` floats, up to a whole block.
inline void fill_block(float* rows, int count, int width) {
  const int whole = (count + Vec::kRows - 1) / Vec::kRows * Vec::kRows;
  memset(rows + count * width, 0, sizeof(float) * static_cast<size_t>((whole - count) * width));
}

// A row of zeros.
template <class T>
constexpr T kNoRow[kMaxHeadDim] = {};

// Converts `count` token rows of one head.
template <class T>
void widen_rows(const T* const* rows, int count, int head_dim, int stride, float* to) {
  for (int t = 0; t < count; ++t) {
    const T* from = rows[t];
    for (int d = 0; d < head_dim; d += kPair) {
      Vec::R x, y;
      load_upto(from + d, head_dim - d, x, y);
      Vec::store(to + t * stride + d, x);
      Vec::store(to + t * stride + d + Vec::kWidth, y);
    }
  }
}

// Converts keys for the product: [tokens, floats or pairs of the head dimension].
template <class V, class T>
void copy_keys(const TileArgs& a, const T* const* k, int count, int stride, float* to) {
  if constexpr (kDots<T>) {
    for (int t = 0; t < count; ++t) {
      for (int d = 0; d < a.head_dim; d += kPair) {
        V::store(to + (t * stride + d) / 2, load_bits_upto<V>(k[t] + d, a.head_dim - d));
      }
    }
    fill_block(to, count, stride / 2);
  } else {
    widen_rows(k, count, a.head_dim, stride, to);
    fill_block(to, count, stride);
  }
}

// Converts values: [tokens or pairs of them, head dimension in the order of lane_of]. `hidden`:
// tokens that are replaced by zeros.
template <class V, class T>
void copy_values(const TileArgs& a, const T* const* v, int count, int stride, const Broken& hidden,
                 float* to) {
  if constexpr (kDots<T>) {
    const T* rows[kKeys + 1];
    memcpy(rows, v, sizeof(T*) * static_cast<size_t>(count));
    for (int i = 0; i < hidden.count; ++i) rows[hidden.tokens[i]] = kNoRow<T>;
    rows[count] = kNoRow<T>;
    for (int t = 0; t < count; t += 2) {
      float* const words = to + t / 2 * stride;
      for (int d = 0; d < a.value_dim; d += kPair) {
        typename V::R even, odd;
        V::interleave(load_bits_upto<V>(rows[t] + d, a.value_dim - d),
                      load_bits_upto<V>(rows[t + 1] + d, a.value_dim - d), even, odd);
        V::store(words + d, even);
        V::store(words + d + V::kWidth, odd);
      }
    }
  } else {
    widen_rows(v, count, a.value_dim, stride, to);
    for (int i = 0; i < hidden.count; ++i) {
      memset(to + hidden.tokens[i] * stride, 0, sizeof(float) * static_cast<size_t>(stride));
    }
  }
}

// Turns the scores of `count` tokens (the first at base + first) into weights: floats, or pairs of
// two tokens.
template <class V, bool kPaired>
void soften_panel(const TileArgs& a, const Panel& p, float* scores, int count, float first,
                  bool masked) {
  const int width = p.vectors * Vec::kWidth;
  const Vec::R hidden = Vec::set(-INFINITY);
  const Vec::R scale = Vec::set(prescale(a.scale, a.softcap));
  for (int v = 0; v < width; v += Vec::kWidth) {
    float* const column = scores + v;
    const Vec::R maximum = Vec::load(p.maxima + v);
    Vec::R best = maximum;
    if (masked || a.softcap > 0.0F) {
      const Vec::R newest = Vec::load(p.newest + v), oldest = Vec::load(p.oldest + v);
      for (int t = 0; t < count; ++t) {
        Vec::R x = Vec::load(column + t * width);
        if (kPaired) x = Vec::mul(x, scale);
        if (a.softcap > 0.0F) x = capped(x, a.softcap);
        const Vec::R position = Vec::set(first + static_cast<float>(t));
        x = Vec::where_less(newest, position, hidden, x);
        x = Vec::where_less(position, oldest, hidden, x);
        Vec::store(column + t * width, x);
        best = Vec::max(x, best);
      }
    } else {
      for (int t = 0; t < count; ++t) {
        Vec::R x = Vec::load(column + t * width);
        if (kPaired) {
          x = Vec::mul(x, scale);
          Vec::store(column + t * width, x);
        }
        best = Vec::max(x, best);
      }
    }
    // The order of decode.h, which has the tokens across its lanes.
    Vec::R sums[Vec::kWidth];
    for (Vec::R& sum : sums) sum = Vec::zero();
    const auto add = [&](int t, Vec::R weight) {
      Vec::R& sum = sums[t % Vec::kWidth];
      sum = Vec::add(sum, weight);
    };
    if constexpr (kPaired) {
      for (int t = 0; t < count; t += 2) {
        const Vec::R even = exp2(Vec::sub(Vec::load(column + t * width), best));
        const Vec::R odd =
            t + 1 < count ? exp2(Vec::sub(Vec::load(column + (t + 1) * width), best)) : Vec::zero();
        Vec::store(column + t / 2 * width, V::join(even, odd));
        add(t, even);
        add(t + 1, odd);
      }
    } else {
      for (int t = 0; t < count; ++t) {
        const Vec::R weight = exp2(Vec::sub(Vec::load(column + t * width), best));
        Vec::store(column + t * width, weight);
        add(t, weight);
      }
    }
    for (int half = Vec::kWidth / 2; half > 0; half /= 2) {
      for (int i = 0; i < half; ++i) sums[i] = Vec::add(sums[i], sums[half + i]);
    }
    const Vec::R factor = exp2(Vec::sub(maximum, best));
    Vec::store(p.factors + v, factor);
    Vec::store(p.totals + v, Vec::fma(Vec::load(p.totals + v), factor, sums[0]));
    Vec::store(p.maxima + v, best);
  }
}

// The weight of a token of the tile for one row.
template <class T>
float weight_at(const float* weights, int width, int t, int lane) {
  if constexpr (kDots<T>) {
    std::uint32_t both;
    memcpy(&both, weights + t / 2 * width + lane, sizeof both);
    both = t % 2 == 0 ? both << 16 : both & 0xffff0000U;
    float weight;
    memcpy(&weight, &both, sizeof weight);
    return weight;
  } else {
    return weights[t * width + lane];
  }
}

// Adds broken tokens to the rows that attend to them: the results are not finite.
template <class T>
void add_broken(const TileArgs& a, const Panel& p, const float* scores, const Broken& broken,
                const T* const* rows, int seen, float first) {
  const int width = p.vectors * Vec::kWidth;
  const int stride = padded(a.value_dim);  // load_pair separates the elements of bfloat16 pairs
  float value[kMaxHeadDim];
  for (int i = 0; i < broken.count && broken.tokens[i] < seen; ++i) {
    const int t = broken.tokens[i];
    const T* from = rows[t];
    for (int d = 0; d < a.value_dim; d += kPair) {
      Vec::R x, y;
      load_upto(from + d, a.value_dim - d, x, y);
      Vec::store(value + d, x);
      Vec::store(value + d + Vec::kWidth, y);
    }
    const float position = first + static_cast<float>(t);
    for (int lane = 0; lane < p.lanes; ++lane) {
      if (position > p.newest[lane] || position < p.oldest[lane]) continue;
      const float weight = weight_at<T>(scores, width, t, lane);
      for (int d = 0; d < stride; ++d) p.sums[d * width + lane] += weight * value[d];
    }
  }
}

template <class T, int kVectors>
void attend_panel(const TileArgs& a, const Panel& p, const TileScratch& s, std::int64_t at,
                  int count, std::int64_t base) {
  constexpr bool kPaired = kDots<T>;
  constexpr int kStep = kPaired ? 2 : 1;
  const int depth = s.stride / kStep;
  multiply<Vec, kVectors, kPaired>({s.keys, depth, 1, p.q, s.scores, count, depth, nullptr});
  const bool masked = at + count - 1 > p.first_position || at <= p.last_position - a.window;
  soften_panel<Vec, kPaired>(a, p, s.scores, count, static_cast<float>(at - base), masked);
  multiply<Vec, kVectors, kPaired>({s.values, 1, s.v_stride, s.scores, p.sums, s.v_stride,
                                    (count + kStep - 1) / kStep, p.factors});
}

// Number of positions from `at` to the end of its tile that some row of the panel attends to.
inline int visible(const TileArgs& a, const Panel& p, std::int64_t at, int count) {
  if (at + count - 1 <= p.first_position - a.window) return 0;
  return static_cast<int>(least<std::int64_t>(count, p.last_position + 1 - at));
}

template <class T, class Tokens>
void emit_panel(const TileArgs& a, const Output& out, const Panel& p, int index, int stride) {
  const bool is_part = out.partial != nullptr;
  const float* const sums = is_part ? p.sums : p.folded;
  const float* const maxima = is_part ? p.maxima : p.folded_maxima;
  const float* const totals = is_part ? p.totals : p.folded_totals;
  const int width = p.vectors * Vec::kWidth;
  float row[kMaxHeadDim];
  for (int lane = 0; lane < p.lanes; ++lane) {
    for (int d = 0; d < stride; ++d) row[d] = sums[Tokens::sums_of(d) * width + lane];
    const int r = (index * kPanelLanes + lane) / a.group;
    const int g = (index * kPanelLanes + lane) % a.group;
    emit<T>(out, r, g, a.group, a.value_dim, row, maxima[lane], totals[lane]);
  }
}

// Addresses of the head's rows from position `at` on; the first `lead` are rows of zeros.
template <class T>
void locate_head(const TileArgs& a, std::int64_t at, int lead, int count, const T** k,
                 const T** v) {
  locate(a.seq, at + lead, count - lead, k + lead, v + lead);
  for (int t = 0; t < count; ++t) {
    k[t] = t < lead ? kNoRow<T> : k[t] + a.kv_head * a.seq.k.head_stride;
    v[t] = t < lead ? kNoRow<T> : v[t] + a.kv_head * a.seq.v.head_stride;
  }
}

// The tokens of a tile, as numbers. tile_int8.h has another one.
template <class T>
class Numbers {
 public:
  static void start(const TileArgs& a, const Panel& p, const TileScratch& s, int index) {
    const int width = p.vectors * Vec::kWidth;
    const float factor = prescale(a.scale, a.softcap);
    float row[kMaxHeadDim];
    for (int lane = 0; lane < p.lanes; ++lane) {
      const T* from = query_row<T>(a, index, lane);
      if constexpr (kDots<T>) {
        for (int d = 0; d < a.head_dim; d += 2)
          memcpy(p.q + d / 2 * width + lane, from + d, 2 * sizeof(T));
      } else {
        for (int d = 0; d < a.head_dim; d += kPair) {
          Vec::R x, y;
          load_upto(from + d, a.head_dim - d, x, y);
          Vec::store(row + d, x);
          Vec::store(row + d + Vec::kWidth, y);
        }
        for (int d = 0; d < s.stride; ++d) p.q[d * width + lane] = row[d] * factor;
      }
    }
  }

  // Row of a panel's sums that goes to place d of a row of partial sums.
  static int sums_of(int d) { return d; }

  // `hides`: some row does not attend to some token.
  void load(const TileArgs& a, const TileScratch& s, std::int64_t at, int lead, int count,
            bool hides) {
    locate_head(a, at, lead, count, k_, v_);
    copy_keys<Vec>(a, k_, count, s.stride, s.keys);
    broken_ = hides ? find_broken(a, v_, count) : Broken{};
    copy_values<Vec>(a, v_, count, s.v_stride, broken_, s.values);
  }

  template <int kVectors>
  void attend(const TileArgs& a, const Panel& p, const TileScratch& s, std::int64_t at, int seen,
              std::int64_t base) const {
    attend_panel<T, kVectors>(a, p, s, at, seen, base);
    add_broken(a, p, s.scores, broken_, v_, seen, static_cast<float>(at - base));
  }

 private:
  const T *k_[kKeys], *v_[kKeys];
  Broken broken_;
};

template <class T, class Tokens>
void tile_over(const TileArgs& a) {
  const TileScratch s(a.scratch, a.head_dim, a.value_dim);
  const int num_panels = (a.rows * a.group + kPanelLanes - 1) / kPanelLanes;
  // Positions are compared as floats, relative to this one: small integers are exact.
  const std::int64_t base = a.first_position;
  Output out = a.out;
  for (int i = 0; i < num_panels; ++i) {
    const Panel p = panel_at(a, s, i);
    start_lanes(a, p, s, i, base);
    Tokens::start(a, p, s, i);
  }
  for (std::int64_t at = a.begin; at < a.end;) {
    const std::int64_t tile_end = least<std::int64_t>(a.end, (at / kKeys + 1) * kKeys);
    // Sums have their places by position. Positions before the first window are not read.
    const int lead = static_cast<int>(at % Vec::kWidth);
    at -= lead;
    const int count = static_cast<int>(tile_end - at);
    const bool hides =
        tile_end - 1 > a.first_position || at <= a.first_position + a.rows - 1 - a.window;
    Tokens tokens;
    tokens.load(a, s, at, lead, count, hides);
    for (int i = 0; i < num_panels; ++i) {
      const Panel p = panel_at(a, s, i);
      const int seen = visible(a, p, at, count);
      if (seen <= 0) continue;
      if (p.vectors == 3) tokens.template attend<3>(a, p, s, at, seen, base);
      if (p.vectors == 2) tokens.template attend<2>(a, p, s, at, seen, base);
      if (p.vectors == 1) tokens.template attend<1>(a, p, s, at, seen, base);
    }
    at = tile_end;
    if (at % kPartTokens != 0 && at != a.end) continue;
    for (int i = 0; i < num_panels; ++i) {
      const Panel p = panel_at(a, s, i);
      if (out.partial != nullptr) {
        emit_panel<T, Tokens>(a, out, p, i, s.v_stride);
        start_part(p, s.v_stride);
      } else {
        end_part(p, s.v_stride);
        if (at == a.end) emit_panel<T, Tokens>(a, out, p, i, s.v_stride);
      }
    }
    if (out.partial != nullptr) out.partial += out.part_stride;
  }
}

template <class T>
void tile(const TileArgs& a) {
  tile_over<T, Numbers<T>>(a);
}

}  // namespace
}  // namespace vmserve::cpu
