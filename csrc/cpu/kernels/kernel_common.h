// Helpers for all kernels, over the `Vec` of one instruction set (VMSERVE_VEC is its header).
#pragma once

#include <math.h>
#include <string.h>

#include "kernels.h"
#include VMSERVE_VEC

namespace vmserve::cpu {
namespace {

// Less than any score, and finite, so that differences are numbers.
constexpr float kLowest = -1.0e30F;
constexpr float kLog2E = 1.4426950408889634F;
constexpr float kLn2 = 0.6931471805599453F;

constexpr int kPair = 2 * Vec::kWidth;

template <class I>
constexpr I least(I a, I b) {
  return a < b ? a : b;
}
template <class I>
constexpr I most(I a, I b) {
  return a > b ? a : b;
}

// Positions that share a step of the running softmax: tiles begin at multiples of it.
constexpr int kKeys = 64;
static_assert(kPartTokens % kKeys == 0);

// head_dim rounded up to whole pairs of vectors. The rest of a scratch row is zero.
constexpr int padded(int head_dim) {
  return (head_dim + kPair - 1) / kPair * kPair;
}

// Position of element d after load_pair has stored its two vectors one after the other.
template <class T>
int lane_of(int d);
template <>
[[maybe_unused]] int lane_of<float>(int d) {
  return d;
}
template <>
[[maybe_unused]] int lane_of<Bf16>(int d) {
  const int pair = d / kPair * kPair, rest = d - pair;
  return pair + (rest % 2) * Vec::kWidth + rest / 2;
}

// Loads the first `count` elements of a pair of vectors and zeros after them. Reads no more.
template <class T>
void load_upto(const T* from, int count, Vec::R& a, Vec::R& b) {
  if (count >= kPair) {
    Vec::load_pair(from, a, b);
  } else {
    Vec::load_some(from, count, a, b);
  }
}

// Whether the processor multiplies pairs of T as they are in memory (Vec::kDotsPairs).
template <class T>
constexpr bool kDots = false;
template <>
constexpr bool kDots<Bf16> = Vec::kDotsPairs;

// Loads bfloat16 without converting, with zeros after `count` elements. `V` is `Vec`: a template
// parameter, because only some have pairs.
template <class V, bool kWhole>
typename V::R load_bits_of(const Bf16* from, int count) {
  return kWhole ? V::load_bits(from) : V::load_some_bits(from, count);
}

template <class V>
typename V::R load_bits_upto(const Bf16* from, int count) {
  return count >= kPair ? V::load_bits(from) : V::load_some_bits(from, count);
}

template <class T>
void store_upto(T* to, int count, Vec::R a, Vec::R b) {
  if (count >= kPair) {
    Vec::store_pair(to, a, b);
  } else {
    T whole[kPair];
    Vec::store_pair(whole, a, b);
    memcpy(to, whole, static_cast<size_t>(count) * sizeof(T));
  }
}

// 2^x for x <= 126, relative error below 2^-23 (minimax polynomial of degree 6 on [-1/2, 1/2]).
// Exactly 0 below -126, so that a masked position has no weight.
inline Vec::R exp2(Vec::R x) {
  const Vec::R floor = Vec::set(-126.0F);
  const Vec::R clipped = Vec::max(floor, x);  // the second if one is NaN
  const Vec::R n = Vec::round(clipped);
  const Vec::R f = Vec::sub(clipped, n);
  Vec::R p = Vec::set(0.00015345808060F);
  p = Vec::fma(p, f, Vec::set(0.00133999320678F));
  p = Vec::fma(p, f, Vec::set(0.00961848907173F));
  p = Vec::fma(p, f, Vec::set(0.05550328642130F));
  p = Vec::fma(p, f, Vec::set(0.24022646248341F));
  p = Vec::fma(p, f, Vec::set(0.69314718246460F));
  p = Vec::fma(p, f, Vec::set(1.0F));
  return Vec::where_less(x, floor, Vec::zero(), Vec::scale_by_power(p, n));
}

// Relative error below 2^-21: an odd minimax polynomial up to 5/8, exponentials above.
inline Vec::R tanh(Vec::R x) {
  const Vec::R size = Vec::abs(x);
  const Vec::R z = Vec::mul(x, x);
  Vec::R p = Vec::set(-0.00566011993214F);
  p = Vec::fma(p, z, Vec::set(0.02059113048017F));
  p = Vec::fma(p, z, Vec::set(-0.05372112244367F));
  p = Vec::fma(p, z, Vec::set(0.13331128656864F));
  p = Vec::fma(p, z, Vec::set(-0.33333259820938F));
  p = Vec::fma(Vec::mul(p, z), x, x);
  const Vec::R twice = Vec::min(Vec::mul(size, Vec::set(2.0F * kLog2E)), Vec::set(60.0F));
  const Vec::R one = Vec::set(1.0F);
  const Vec::R big = Vec::sub(one, Vec::div(Vec::set(2.0F), Vec::add(exp2(twice), one)));
  return Vec::where_less(size, Vec::set(0.625F), p, Vec::with_sign_of(big, x));
}

inline float first_lane(Vec::R x) {
  float lanes[Vec::kWidth];
  Vec::store(lanes, x);
  return lanes[0];
}

// Factor of q, so that scores are exponents of 2.
inline float prescale(float scale, float softcap) {
  return softcap > 0.0F ? scale / softcap : scale * kLog2E;
}
inline Vec::R capped(Vec::R x, float softcap) {
  return Vec::mul(tanh(x), Vec::set(softcap * kLog2E));
}

// Adds a part to the sums of the parts before it. Before the first part, the maximum is kLowest and
// the sums are 0; a part without a visible token has the same. Adding either changes nothing.
struct Fold {
  // `maximum`: of the parts before; `next`: of the part.
  Fold(Vec::R maximum, Vec::R next)
      : maximum(Vec::max(next, maximum)),
        of_sum(exp2(Vec::sub(maximum, this->maximum))),
        of_next(exp2(Vec::sub(next, this->maximum))) {}
  Vec::R operator()(Vec::R sum, Vec::R next) const {
    return Vec::fma(next, of_next, Vec::mul(sum, of_sum));
  }
  Vec::R maximum, of_sum, of_next;
};

// Prefetches into L2: rows a power of two apart map to few lines of L1, where prefetched data would
// displace what is in use.
template <class T>
void prefetch_line(const T* at) {
  __builtin_prefetch(at, 0, 2);
}

// Addresses of K and V (head 0) of `count` positions from `first` on.
template <class T>
void locate(const Sequence& s, std::int64_t first, int count, const T** k, const T** v) {
  const T* const k_base = reinterpret_cast<const T*>(s.k.data);
  const T* const v_base = reinterpret_cast<const T*>(s.v.data);
  if (s.blocks == nullptr) {
    const T* k_at = k_base + s.row * s.k.row_stride + first * s.k.token_stride;
    const T* v_at = v_base + s.row * s.v.row_stride + first * s.v.token_stride;
    for (int i = 0; i < count; ++i, k_at += s.k.token_stride, v_at += s.v.token_stride) {
      k[i] = k_at;
      v[i] = v_at;
    }
    return;
  }
  std::int64_t index = first / s.block_tokens;
  auto offset = static_cast<std::int32_t>(first % s.block_tokens);
  for (int i = 0; i < count; ++index, offset = 0) {
    const std::int32_t block = s.blocks[index];
    const std::int64_t page = block / s.blocks_per_page;
    const std::int64_t token =
        static_cast<std::int64_t>(block % s.blocks_per_page) * s.block_tokens + offset;
    const T* k_at = k_base + page * s.k.row_stride + token * s.k.token_stride;
    const T* v_at = v_base + page * s.v.row_stride + token * s.v.token_stride;
    const int last = least(count, i + s.block_tokens - offset);
    for (; i < last; ++i, k_at += s.k.token_stride, v_at += s.v.token_stride) {
      k[i] = k_at;
      v[i] = v_at;
    }
  }
}

// Writes one finished or partial row. `sums`: padded(head_dim), in the order of load_pair.
// `maximum` and `total` of the weights are in powers of 2.
template <class T>
void emit(const Output& out, int row, int head, int heads, int head_dim, const float* sums,
          float maximum, float total) {
  if (out.partial != nullptr) {
    const int stride = padded(head_dim);
    float* to =
        out.partial + (static_cast<std::int64_t>(row) * heads + head) * partial_floats(head_dim);
    memcpy(to, sums, sizeof(float) * static_cast<size_t>(stride));
    to[stride] = maximum;
    to[stride + 1] = total;
    return;
  }
  if (out.sinks != nullptr) total += exp2f(out.sinks[head] * kLog2E - maximum);
  T* to = static_cast<T*>(out.rows) + row * out.row_stride + head * head_dim;
  const Vec::R factor = Vec::set(1.0F / total);
  // The sign of a zero depends on tokens that have no weight: + 0 removes it.
  const auto value = [&](int d) {
    return Vec::add(Vec::mul(Vec::load(sums + d), factor), Vec::zero());
  };
  for (int d = 0; d < head_dim; d += kPair) {
    store_upto(to + d, head_dim - d, value(d), value(d + Vec::kWidth));
  }
  if (out.lse != nullptr) out.lse[row * out.lse_stride + head] = (maximum + log2f(total)) * kLn2;
}

}  // namespace
}  // namespace vmserve::cpu
