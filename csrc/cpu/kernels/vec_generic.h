// Eight floats in plain C++, for every processor, or sixteen with VMSERVE_GENERIC_WIDTH 16
// (kernels_generic16.cpp). vec_avx2.h documents the members.
#pragma once

#include <string.h>

#include "half.h"
#include "kernels.h"

#ifndef VMSERVE_GENERIC_WIDTH
#define VMSERVE_GENERIC_WIDTH 8
#endif

namespace vmserve::cpu {
namespace {

struct Vec {
  static constexpr int kWidth = VMSERVE_GENERIC_WIDTH;
  static constexpr int kRows = kWidth / 2;
  static constexpr int kLinearRows = 4;
  static constexpr bool kDotsPairs = kWidth == 16;
  struct R {
    float x[kWidth];
  };

  static R zero() { return set(0.0F); }
  static R set(float value) {
    R r;
    for (float& x : r.x) x = value;
    return r;
  }
  static R load(const float* from) {
    R r;
    memcpy(r.x, from, sizeof r.x);
    return r;
  }
  static void store(float* to, R r) { memcpy(to, r.x, sizeof r.x); }

#define VMSERVE_LANES(name, expression)   \
  static R name(R a, R b) {               \
    R r;                                  \
    for (int i = 0; i < kWidth; ++i) {    \
      const float x = a.x[i], y = b.x[i]; \
      r.x[i] = expression;                \
    }                                     \
    return r;                             \
  }
  VMSERVE_LANES(add, x + y)
  VMSERVE_LANES(sub, x - y)
  VMSERVE_LANES(mul, x* y)
  VMSERVE_LANES(div, x / y)
  VMSERVE_LANES(max, x > y ? x : y)
  VMSERVE_LANES(min, x < y ? x : y)
#undef VMSERVE_LANES
  static R fma(R a, R b, R c) { return add(mul(a, b), c); }
  static R fused(R a, R b, R c) {
    for (int i = 0; i < kWidth; ++i) c.x[i] = fused_of(a.x[i], b.x[i], c.x[i]);
    return c;
  }
#ifdef __FP_FAST_FMAF
  static float fused_of(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
#else
  // The product is exact in double. A sum that is rounded to odd can be rounded to float as if it
  // were exact (Boldo and Melquiond, "Emulation of a FMA", 2008).
  static float fused_of(float a, float b, float c) {
    const double product = static_cast<double>(a) * static_cast<double>(b);
    const double sum = product + static_cast<double>(c), part = sum - product;
    const double error = (product - (sum - part)) + (static_cast<double>(c) - part);
    std::int64_t bits;
    memcpy(&bits, &sum, sizeof bits);
    const std::int64_t is_inexact = error != 0.0 ? 1 : 0, is_beyond = error * sum < 0.0 ? 1 : 0;
    bits = (bits - is_beyond) | is_inexact;
    double odd;
    memcpy(&odd, &bits, sizeof odd);
    return static_cast<float>(odd);
  }
#endif

  static R abs(R a) {
    for (float& x : a.x) x = __builtin_fabsf(x);
    return a;
  }
  static R with_sign_of(R magnitude, R sign) {
    for (int i = 0; i < kWidth; ++i)
      magnitude.x[i] = __builtin_copysignf(magnitude.x[i], sign.x[i]);
    return magnitude;
  }
  static R where_less(R a, R b, R yes, R no) {
    for (int i = 0; i < kWidth; ++i) no.x[i] = a.x[i] < b.x[i] ? yes.x[i] : no.x[i];
    return no;
  }
  static unsigned at_least(R a, R b) {
    unsigned mask = 0;
    for (int i = 0; i < kWidth; ++i) mask |= static_cast<unsigned>(a.x[i] >= b.x[i]) << i;
    return mask;
  }
  static R round(R a) {
    // Exact for |x| < 2^22; ties to even, as the vector instructions do.
    constexpr float kShift = 12582912.0F;
    for (float& x : a.x) x = (x + kShift) - kShift;
    return a;
  }
  static R scale_by_power(R a, R n) {
    for (int i = 0; i < kWidth; ++i) {
      std::uint32_t bits;
      memcpy(&bits, &a.x[i], sizeof bits);
      if (n.x[i] == n.x[i])
        bits += static_cast<std::uint32_t>(static_cast<std::int32_t>(n.x[i])) << 23;
      memcpy(&a.x[i], &bits, sizeof bits);
    }
    return a;
  }
  static float reduce_max(R a) {
    float best = a.x[0];
    for (const float x : a.x) best = x > best ? x : best;
    return best;
  }
  static float reduce_add(R a) {
    for (int half = kWidth / 2; half > 0; half /= 2) {
      for (int i = 0; i < half; ++i) a.x[i] += a.x[half + i];
    }
    return a.x[0];
  }
  static void load_transposed(const float* const (&rows)[kWidth], R (&r)[kWidth]) {
    for (int i = 0; i < kWidth; ++i) {
      for (int j = 0; j < kWidth; ++j) memcpy(&r[j].x[i], rows[i] + j, sizeof(float));
    }
  }

  static float widen(Bf16 value) {
    const std::uint32_t bits = static_cast<std::uint32_t>(value.bits) << 16;
    float x;
    memcpy(&x, &bits, sizeof x);
    return x;
  }
  static Bf16 narrow(float x) {
    std::uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    if (x != x) return {0x7fc0};
    return {static_cast<std::uint16_t>((bits + 0x7fff + ((bits >> 16) & 1)) >> 16)};
  }
  static R load(const Bf16* from) {
    R r;
    for (int i = 0; i < kWidth; ++i) r.x[i] = widen(from[i]);
    return r;
  }
  static void store(Bf16* to, R r) {
    for (int i = 0; i < kWidth; ++i) to[i] = narrow(r.x[i]);
  }
  static R set_pair(const float* from) { return set(*from); }
  static R dot_pairs(R a, R b, R sum) {
    Bf16 x[2 * kWidth], y[2 * kWidth];
    memcpy(x, a.x, sizeof x);
    memcpy(y, b.x, sizeof y);
    for (int i = 0; i < kWidth; ++i) {
      sum.x[i] += widen(x[2 * i + 1]) * widen(y[2 * i + 1]);
      sum.x[i] += widen(x[2 * i]) * widen(y[2 * i]);
    }
    return sum;
  }
  static R dot_pairs(R a, const float* pair, R sum) { return dot_pairs(a, set_pair(pair), sum); }
  static R load_bits(const Bf16* from) { return load_some_bits(from, 2 * kWidth); }
  static R load_some_bits(const Bf16* from, int count) {
    R r = zero();
    memcpy(r.x, from, static_cast<size_t>(count) * sizeof(Bf16));
    return r;
  }
  static R first_of(R pairs) { return half_of(pairs, 0); }
  static R second_of(R pairs) { return half_of(pairs, 1); }
  static R half_of(R pairs, int i) {
    Bf16 x[2 * kWidth];
    memcpy(x, pairs.x, sizeof x);
    for (int lane = 0; lane < kWidth; ++lane) pairs.x[lane] = widen(x[2 * lane + i]);
    return pairs;
  }
  static R narrow(R a, R b) {
    Bf16 x[2 * kWidth];
    for (int i = 0; i < kWidth; ++i) {
      x[i] = narrow(a.x[i]);
      x[kWidth + i] = narrow(b.x[i]);
    }
    return load_bits(x);
  }
  static void interleave(R a, R b, R& even, R& odd) {
    Bf16 x[2 * kWidth], y[2 * kWidth], e[2 * kWidth], o[2 * kWidth];
    memcpy(x, a.x, sizeof x);
    memcpy(y, b.x, sizeof y);
    for (int i = 0; i < 2 * kWidth; i += 2) {
      e[i] = x[i];
      e[i + 1] = y[i];
      o[i] = x[i + 1];
      o[i + 1] = y[i + 1];
    }
    even = load_bits(e);
    odd = load_bits(o);
  }
  static R join(R a, R b) {
    Bf16 x[2 * kWidth];
    for (int i = 0; i < kWidth; ++i) {
      x[2 * i] = narrow(a.x[i]);
      x[2 * i + 1] = narrow(b.x[i]);
    }
    return load_bits(x);
  }
  static R round_bf16(R a) {
    for (float& x : a.x) x = widen(narrow(x));
    return a;
  }

  static void load_pair(const float* from, R& a, R& b) {
    a = load(from);
    b = load(from + kWidth);
  }
  static void store_pair(float* to, R a, R b) {
    store(to, a);
    store(to + kWidth, b);
  }
  static void load_pair(const Bf16* from, R& a, R& b) {
    for (int i = 0; i < kWidth; ++i) {
      a.x[i] = widen(from[2 * i]);
      b.x[i] = widen(from[2 * i + 1]);
    }
  }
  template <int i>
  static R part(const Bf16* from) {
    R r;
    for (int lane = 0; lane < kWidth; ++lane) r.x[lane] = widen(from[2 * lane + i]);
    return r;
  }

  static constexpr bool kDotsBytes = kWidth == 16;
  struct S {
    std::uint16_t x[2 * kWidth];
  };
  struct I {
    std::int32_t x[kWidth];
  };
  static I set_int(std::int32_t value) {
    I r;
    for (std::int32_t& x : r.x) x = value;
    return r;
  }
  static S load_bytes(const void* from) {
    const auto* const bytes = static_cast<const std::uint8_t*>(from);
    S s;
    for (int i = 0; i < 2 * kWidth; ++i) {
      s.x[i] = static_cast<std::uint16_t>(bytes[2 * i] | bytes[2 * i + 1] << 8);
    }
    return s;
  }
  static S even_bytes(S a) {
    for (std::uint16_t& x : a.x) x &= 0xff;
    return a;
  }
  static S odd_bytes(S a) {
    for (std::uint16_t& x : a.x) x >>= 8;
    return a;
  }
  static I add_products(I sum, S weights, const std::int16_t* pair) {
    for (int i = 0; i < 2 * kWidth; ++i) {
      sum.x[i / 2] += static_cast<std::int16_t>(weights.x[i]) * pair[i % 2];
    }
    return sum;
  }
  static I add_products(I sum, S weights, const std::int8_t* quad) {
    for (int i = 0; i < 2 * kWidth; ++i) {
      sum.x[i / 2] += (weights.x[i] & 0xff) * quad[i % 2 * 2];
      sum.x[i / 2] += (weights.x[i] >> 8) * quad[i % 2 * 2 + 1];
    }
    return sum;
  }
  struct N {
    std::int16_t x[2 * kWidth];
  };
  static N no_short_sums() { return {}; }
  static N add_products(N sum, S weights, const std::int8_t* quad) {
    for (int i = 0; i < 2 * kWidth; ++i) {
      const int low = (weights.x[i] & 0xff) * quad[i % 2 * 2];
      const int high = (weights.x[i] >> 8) * quad[i % 2 * 2 + 1];
      sum.x[i] = static_cast<std::int16_t>(sum.x[i] + low + high);
    }
    return sum;
  }
  static I widen_sums(N sum, I offset) {
    for (int i = 0; i < 2 * kWidth; ++i) offset.x[i / 2] += sum.x[i];
    return offset;
  }
  static void store_bytes(void* to, S a) {
    auto* const bytes = static_cast<std::uint8_t*>(to);
    for (int i = 0; i < 2 * kWidth; ++i) {
      bytes[2 * i] = static_cast<std::uint8_t>(a.x[i]);
      bytes[2 * i + 1] = static_cast<std::uint8_t>(a.x[i] >> 8);
    }
  }
  static S masked(S a, char mask) {
    for (std::uint16_t& x : a.x) x &= mask * 0x0101;
    return a;
  }
  static S merged(S a, S b, char mask) {
    const S some = masked(b, mask);
    for (int i = 0; i < 2 * kWidth; ++i) a.x[i] |= some.x[i];
    return a;
  }
  template <int kLeft>
  static S shifted(S a) {
    for (std::uint16_t& x : a.x) {
      x = static_cast<std::uint16_t>(kLeft < 0 ? x >> (kLeft < 0 ? -kLeft : 0)
                                               : x << (kLeft < 0 ? 0 : kLeft));
    }
    return a;
  }
  static S looked_up(const std::uint8_t (&table)[16], S places) {
    for (std::uint16_t& x : places.x) {
      x = static_cast<std::uint16_t>(table[x & 15] | table[x >> 8 & 15] << 8);
    }
    return places;
  }
  static S bits_of(R a) {
    S s;
    memcpy(s.x, a.x, sizeof s.x);
    return s;
  }
  static void pair_rows(S a, S b, S (&to)[4]) {
    for (int i = 0; i < 4; ++i) {
      for (int lane = 0; lane < kWidth; ++lane) {
        const int word = lane / 4 * 8 + i / 2 * 4 + lane % 4, shift = i % 2 * 8;
        to[i].x[2 * lane] = a.x[word] >> shift & 0xff;
        to[i].x[2 * lane + 1] = b.x[word] >> shift & 0xff;
      }
    }
  }
  static S pair_whole(R a, R b) {
    S s;
    for (int lane = 0; lane < kWidth; ++lane) {
      s.x[2 * lane] = static_cast<std::uint16_t>(a.x[lane]);
      s.x[2 * lane + 1] = static_cast<std::uint16_t>(b.x[lane]);
    }
    return s;
  }
  static R load_halves(const void* from) {
    R r;
    for (int i = 0; i < kWidth; ++i) {
      std::uint16_t half;
      memcpy(&half, static_cast<const char*>(from) + 2 * i, sizeof half);
      r.x[i] = widened_half(half);
    }
    return r;
  }
  static R load_int8(const void* from) {
    R r;
    for (int i = 0; i < kWidth; ++i) r.x[i] = static_cast<const std::int8_t*>(from)[i];
    return r;
  }
  static R to_float(I a) {
    R r;
    for (int i = 0; i < kWidth; ++i) r.x[i] = static_cast<float>(a.x[i]);
    return r;
  }
  static void store_integers(std::int16_t* to, R a) {
    for (int i = 0; i < kWidth; ++i) to[i] = static_cast<std::int16_t>(a.x[i]);
  }
  static void store_integers(std::int8_t* to, R a) {
    constexpr int kOrder[] = {0, 2, 1, 3};
    for (int i = 0; i < kWidth; ++i) {
      to[i] = static_cast<std::int8_t>(a.x[i / 4 * 4 + kOrder[i % 4]]);
    }
  }

  template <class T>
  static void load_some(const T* from, int count, R& a, R& b) {
    T whole[2 * kWidth] = {};
    memcpy(whole, from, static_cast<size_t>(count) * sizeof(T));
    load_pair(whole, a, b);
  }
  static void store_pair(Bf16* to, R a, R b) {
    for (int i = 0; i < kWidth; ++i) {
      to[2 * i] = narrow(a.x[i]);
      to[2 * i + 1] = narrow(b.x[i]);
    }
  }
};

}  // namespace
}  // namespace vmserve::cpu
