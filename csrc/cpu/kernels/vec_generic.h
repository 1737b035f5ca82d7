// Eight floats in plain C++, for every processor, or sixteen with VMSERVE_GENERIC_WIDTH 16
// (kernels_generic16.cpp). vec_avx2.h documents the members. Made of the compiler's vectors of 16
// bytes, which almost every processor has: lanes that are variables of their own take the compiler
// minutes.
#pragma once

#include <string.h>

#include "half.h"
#include "kernels.h"

#ifndef VMSERVE_GENERIC_WIDTH
#define VMSERVE_GENERIC_WIDTH 8
#endif

namespace vmserve::cpu {
namespace {

// Four lanes, and the same 16 bytes as integers. The processor is little-endian.
using Four = float __attribute__((vector_size(16)));
using Four32 = std::int32_t __attribute__((vector_size(16)));
using FourU32 = std::uint32_t __attribute__((vector_size(16)));
using Eight16 = std::int16_t __attribute__((vector_size(16)));
using EightU16 = std::uint16_t __attribute__((vector_size(16)));

struct Vec {
  static constexpr int kWidth = VMSERVE_GENERIC_WIDTH;
  static constexpr int kParts = kWidth / 4;
  static constexpr int kRows = kWidth / 2;
  static constexpr int kLinearRows = 4;
  static constexpr bool kDotsPairs = kWidth == 16;
  struct R {
    Four x[kParts];
  };

  static Four four(float value) { return Four{value, value, value, value}; }
  static R zero() { return set(0.0F); }
  static R set(float value) {
    R r;
    for (Four& x : r.x) x = four(value);
    return r;
  }
  static R load(const float* from) { return loaded<R>(from); }
  static void store(float* to, R r) { memcpy(to, r.x, sizeof r.x); }

#define VMSERVE_LANES(name, expression)  \
  static R name(R a, R b) {              \
    R r;                                 \
    for (int i = 0; i < kParts; ++i) {   \
      const Four x = a.x[i], y = b.x[i]; \
      r.x[i] = expression;               \
    }                                    \
    return r;                            \
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
    for (int i = 0; i < kWidth; ++i) {
      c.x[i / 4][i % 4] = fused_of(a.x[i / 4][i % 4], b.x[i / 4][i % 4], c.x[i / 4][i % 4]);
    }
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
    for (Four& x : a.x) x = Four(Four32(x) & 0x7fffffff);
    return a;
  }
  static R with_sign_of(R magnitude, R sign) {
    const R size = abs(magnitude);
    for (int i = 0; i < kParts; ++i) {
      sign.x[i] = Four((FourU32(sign.x[i]) & 0x80000000U) | FourU32(size.x[i]));
    }
    return sign;
  }
  static R where_less(R a, R b, R yes, R no) {
    for (int i = 0; i < kParts; ++i) no.x[i] = a.x[i] < b.x[i] ? yes.x[i] : no.x[i];
    return no;
  }
  static unsigned at_least(R a, R b) {
    unsigned mask = 0;
    for (int i = 0; i < kWidth; ++i) {
      mask |= static_cast<unsigned>(a.x[i / 4][i % 4] >= b.x[i / 4][i % 4]) << i;
    }
    return mask;
  }
  static R round(R a) {
    // Exact for |x| < 2^22; ties to even, as the vector instructions do.
    constexpr float kShift = 12582912.0F;
    for (Four& x : a.x) x = (x + kShift) - kShift;
    return a;
  }
  static R scale_by_power(R a, R n) {
    for (int i = 0; i < kParts; ++i) {
      const auto power = FourU32(__builtin_convertvector(n.x[i], Four32)) << 23;
      a.x[i] = Four(FourU32(a.x[i]) + (power & FourU32(n.x[i] == n.x[i])));
    }
    return a;
  }
  static float reduce_max(R a) {
    float best = a.x[0][0];
    for (int i = 0; i < kWidth; ++i) best = a.x[i / 4][i % 4] > best ? a.x[i / 4][i % 4] : best;
    return best;
  }
  static float reduce_add(R a) {
    for (int half = kParts / 2; half > 0; half /= 2) {
      for (int i = 0; i < half; ++i) a.x[i] += a.x[half + i];
    }
    return (a.x[0][0] + a.x[0][2]) + (a.x[0][1] + a.x[0][3]);
  }
  static void load_transposed(const float* const (&rows)[kWidth], R (&r)[kWidth]) {
    for (int i = 0; i < kParts; ++i) {
      for (int j = 0; j < kParts; ++j) {
        const Four a = loaded<Four>(rows[4 * i] + 4 * j), b = loaded<Four>(rows[4 * i + 1] + 4 * j);
        const Four c = loaded<Four>(rows[4 * i + 2] + 4 * j),
                   d = loaded<Four>(rows[4 * i + 3] + 4 * j);
        const Four ab = __builtin_shuffle(a, b, Four32{0, 4, 1, 5});
        const Four cd = __builtin_shuffle(c, d, Four32{0, 4, 1, 5});
        const Four ab_high = __builtin_shuffle(a, b, Four32{2, 6, 3, 7});
        const Four cd_high = __builtin_shuffle(c, d, Four32{2, 6, 3, 7});
        r[4 * j].x[i] = __builtin_shuffle(ab, cd, Four32{0, 1, 4, 5});
        r[4 * j + 1].x[i] = __builtin_shuffle(ab, cd, Four32{2, 3, 6, 7});
        r[4 * j + 2].x[i] = __builtin_shuffle(ab_high, cd_high, Four32{0, 1, 4, 5});
        r[4 * j + 3].x[i] = __builtin_shuffle(ab_high, cd_high, Four32{2, 3, 6, 7});
      }
    }
  }

  // The bits of the nearest bfloat16.
  static FourU32 nearest_bf16(Four x) {
    const FourU32 bits = FourU32(x);
    const FourU32 nearest = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
    return x == x ? nearest : FourU32{} + 0x7fc0;
  }
  static R load(const Bf16* from) {
    R r;
    for (int i = 0; i < kParts; ++i) {
      const auto bits = loaded<std::uint16_t __attribute__((vector_size(8)))>(from + 4 * i);
      r.x[i] = Four(__builtin_convertvector(bits, FourU32) << 16);
    }
    return r;
  }
  static void store(Bf16* to, R r) {
    for (int i = 0; i < kWidth; ++i) {
      to[i].bits = static_cast<std::uint16_t>(nearest_bf16(r.x[i / 4])[i % 4]);
    }
  }
  static R set_pair(const float* from) { return set(*from); }
  static R dot_pairs(R a, R b, R sum) {
    const R x = second_of(a), y = second_of(b), z = first_of(a), w = first_of(b);
    return add(add(sum, mul(x, y)), mul(z, w));
  }
  static R dot_pairs(R a, const float* pair, R sum) { return dot_pairs(a, set_pair(pair), sum); }
  static R load_bits(const Bf16* from) { return loaded<R>(from); }
  static R load_some_bits(const Bf16* from, int count) {
    R r = zero();
    memcpy(r.x, from, static_cast<size_t>(count) * sizeof(Bf16));
    return r;
  }
  static R first_of(R pairs) {
    for (Four& x : pairs.x) x = Four(FourU32(x) << 16);
    return pairs;
  }
  static R second_of(R pairs) {
    for (Four& x : pairs.x) x = Four(FourU32(x) & 0xffff0000U);
    return pairs;
  }
  static R narrow(R a, R b) {
    Bf16 x[2 * kWidth];
    store(x, a);
    store(x + kWidth, b);
    return load_bits(x);
  }
  static void interleave(R a, R b, R& even, R& odd) {
    for (int i = 0; i < kParts; ++i) {
      const FourU32 x = FourU32(a.x[i]), y = FourU32(b.x[i]);
      even.x[i] = Four((x & 0xffff) | y << 16);
      odd.x[i] = Four(x >> 16 | (y & 0xffff0000U));
    }
  }
  static R join(R a, R b) {
    for (int i = 0; i < kParts; ++i) {
      a.x[i] = Four(nearest_bf16(a.x[i]) | nearest_bf16(b.x[i]) << 16);
    }
    return a;
  }
  static R round_bf16(R a) {
    for (Four& x : a.x) x = Four(nearest_bf16(x) << 16);
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
    const R pairs = load_bits(from);
    a = first_of(pairs);
    b = second_of(pairs);
  }
  static void store_pair(Bf16* to, R a, R b) {
    const R pairs = join(a, b);
    memcpy(to, pairs.x, sizeof pairs.x);
  }
  template <int i>
  static R part(const Bf16* from) {
    const R pairs = load_bits(from);
    return i == 0 ? first_of(pairs) : second_of(pairs);
  }

  static constexpr bool kDotsBytes = kWidth == 16;
  struct S {
    EightU16 x[kParts];
  };
  struct I {
    Four32 x[kParts];
  };
  static I set_int(std::int32_t value) {
    I r;
    for (Four32& x : r.x) x = Four32{value, value, value, value};
    return r;
  }
  static S load_bytes(const void* from) { return loaded<S>(from); }
  static S even_bytes(S a) {
    for (EightU16& x : a.x) x &= 0xff;
    return a;
  }
  static S odd_bytes(S a) {
    for (EightU16& x : a.x) x >>= 8;
    return a;
  }
  // The first and the second int16 of each lane.
  static Four32 low_of(Four32 pairs) { return Four32(FourU32(pairs) << 16) >> 16; }
  static Four32 high_of(Four32 pairs) { return pairs >> 16; }
  // As floats, exactly: a factor of each product is a byte, so sums of two are below 2^24.
  static I add_products(I sum, S weights, const std::int16_t* pair) {
    const Four first = four(pair[0]), second = four(pair[1]);
    for (int i = 0; i < kParts; ++i) {
      const Four32 w = Four32(weights.x[i]);
      const Four low = __builtin_convertvector(low_of(w), Four);
      const Four high = __builtin_convertvector(high_of(w), Four);
      sum.x[i] += __builtin_convertvector(low * first + high * second, Four32);
    }
    return sum;
  }
  // The products of the bytes of even places, or of odd ones: below 2^15.
  static Eight16 byte_products(EightU16 bytes, const std::int8_t* quad) {
    return Eight16(bytes) *
           Eight16{quad[0], quad[2], quad[0], quad[2], quad[0], quad[2], quad[0], quad[2]};
  }
  static I add_products(I sum, S weights, const std::int8_t* quad) {
    for (int i = 0; i < kParts; ++i) {
      const auto even = Four32(byte_products(weights.x[i] & 0xff, quad));
      const auto odd = Four32(byte_products(weights.x[i] >> 8, quad + 1));
      sum.x[i] += low_of(even) + high_of(even) + low_of(odd) + high_of(odd);
    }
    return sum;
  }
  struct N {
    Eight16 x[kParts];
  };
  static N no_short_sums() { return {}; }
  static N add_products(N sum, S weights, const std::int8_t* quad) {
    for (int i = 0; i < kParts; ++i) {
      sum.x[i] +=
          byte_products(weights.x[i] & 0xff, quad) + byte_products(weights.x[i] >> 8, quad + 1);
    }
    return sum;
  }
  static I widen_sums(N sum, I offset) {
    for (int i = 0; i < kParts; ++i) {
      offset.x[i] += low_of(Four32(sum.x[i])) + high_of(Four32(sum.x[i]));
    }
    return offset;
  }
  static void store_bytes(void* to, S a) { memcpy(to, a.x, sizeof a.x); }
  static S masked(S a, char mask) {
    for (EightU16& x : a.x) x &= static_cast<std::uint16_t>(mask * 0x0101);
    return a;
  }
  static S merged(S a, S b, char mask) {
    const S some = masked(b, mask);
    for (int i = 0; i < kParts; ++i) a.x[i] |= some.x[i];
    return a;
  }
  template <int kLeft>
  static S shifted(S a) {
    for (EightU16& x : a.x)
      x = kLeft < 0 ? x >> (kLeft < 0 ? -kLeft : 0) : x << (kLeft < 0 ? 0 : kLeft);
    return a;
  }
  static S looked_up(const std::uint8_t (&table)[16], S places) {
    std::uint8_t bytes[4 * kWidth];
    store_bytes(bytes, places);
    for (std::uint8_t& byte : bytes) byte = table[byte & 15];
    return load_bytes(bytes);
  }
  static S bits_of(R a) { return loaded<S>(a.x); }
  static void pair_rows(S a, S b, S (&to)[4]) {
    for (int i = 0; i < kParts; ++i) {
      const EightU16 low = __builtin_shuffle(a.x[i], b.x[i], EightU16{0, 8, 1, 9, 2, 10, 3, 11});
      const EightU16 high = __builtin_shuffle(a.x[i], b.x[i], EightU16{4, 12, 5, 13, 6, 14, 7, 15});
      to[0].x[i] = low & 0xff;
      to[1].x[i] = low >> 8;
      to[2].x[i] = high & 0xff;
      to[3].x[i] = high >> 8;
    }
  }
  static S pair_whole(R a, R b) {
    S s;
    for (int i = 0; i < kParts; ++i) {
      const auto low = __builtin_convertvector(a.x[i], Four32);
      const auto high = FourU32(__builtin_convertvector(b.x[i], Four32));
      s.x[i] = EightU16(FourU32(low & 0xffff) | high << 16);
    }
    return s;
  }
  static R load_halves(const void* from) {
    float x[kWidth];
    for (int i = 0; i < kWidth; ++i) {
      x[i] = widened_half(loaded<std::uint16_t>(static_cast<const char*>(from) + 2 * i));
    }
    return load(x);
  }
  static R load_int8(const void* from) {
    float x[kWidth];
    for (int i = 0; i < kWidth; ++i) x[i] = static_cast<const std::int8_t*>(from)[i];
    return load(x);
  }
  static R to_float(I a) {
    R r;
    for (int i = 0; i < kParts; ++i) r.x[i] = __builtin_convertvector(a.x[i], Four);
    return r;
  }
  static I to_integers(R a) {
    I r;
    for (int i = 0; i < kParts; ++i) r.x[i] = __builtin_convertvector(a.x[i], Four32);
    return r;
  }
  static void store_integers(std::int16_t* to, R a) {
    const I whole = to_integers(a);
    for (int i = 0; i < kWidth; ++i) to[i] = static_cast<std::int16_t>(whole.x[i / 4][i % 4]);
  }
  static void store_integers(std::int8_t* to, R a) {
    constexpr int kOrder[] = {0, 2, 1, 3};
    const I whole = to_integers(a);
    for (int i = 0; i < kWidth; ++i) {
      to[i] = static_cast<std::int8_t>(whole.x[i / 4][kOrder[i % 4]]);
    }
  }

  template <class T>
  static void load_some(const T* from, int count, R& a, R& b) {
    T whole[2 * kWidth] = {};
    memcpy(whole, from, static_cast<size_t>(count) * sizeof(T));
    load_pair(whole, a, b);
  }
  template <class T>
  static T loaded(const void* from) {
    T t;
    memcpy(&t, from, sizeof t);
    return t;
  }
};

}  // namespace
}  // namespace vmserve::cpu
