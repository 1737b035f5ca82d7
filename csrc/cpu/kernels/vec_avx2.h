// Eight floats in an AVX2 register. Members that are not plain arithmetic:
//
//   fused       a * b + c, rounded once (fma may round twice)
//   load_pair   loads 2 * kWidth consecutive elements into two vectors: the first and second half
//               of floats, the even and odd elements of bfloat16 (a shift and a mask, no shuffle).
//               store_pair is its inverse and rounds to nearest even as torch does (VCVTNEPS2BF16
//               would flush denormals). `lane_of` in kernel_common.h has the order.
//   load, store kWidth consecutive elements; bfloat16 is rounded in the same way
//   load_some   load_pair of fewer than 2 * kWidth elements, with zeros after them
//   reduce_add  adds the upper half of the lanes to the lower, until one is left
//   load_transposed  lane i of vector j: element j of row i
//   load_bits   2 * kWidth consecutive bfloat16, two to a lane, the first in its lower half;
//               load_some_bits: fewer, and zeros
//   first_of, second_of  the first or second bfloat16 of each lane, as floats
//   at_least    bit i: whether lane i of the first is at least lane i of the second
//   kRows       rows of a block of a matrix product: kRows * 3 sums stay in registers
//   kLinearRows rows of a block of a linear layer: kLinearRows * 2 sums stay in registers
//   part<i>     element i of each lane's kWidth groups of 2 bfloat16
//   S, I        weights in 4 * kWidth bytes, four to a lane; kWidth int32
//   even_bytes  the first and third byte of each lane as 16 bits; odd_bytes: the others
//   add_products  adds the products of a lane's two 16-bit weights and two int16 (the same in all
//               lanes), one of each two in -255 .. 255; with kDotsBytes, also of four unsigned
//               bytes and four int8
//   N           sums of products of bytes below 16 and int8, for up to eight calls of add_products;
//               int16 if the processor does not add four such products in int32 (kDotsBytes).
//               no_short_sums: zeros. widen_sums: a lane's sum as int32, and an offset
//   store_integers  stores whole numbers as int16, or as int8 in the order of the products: the
//               second and third of each four exchanged
//   masked      those bits of each byte; merged: all of a, and those bits of b
//   shifted     words of 16 bits, to the left
//   looked_up   a byte of the table for each byte of `places`, which are below 16
//   bits_of     the bits of each lane
//   pair_rows   two rows of bytes as words of 16 bits, lane by lane (a byte of a, a byte of b); in
//               the order of paired_element (int8.h)
//   pair_whole  lane i of both, whole numbers that are not negative, as a pair of int16
//   load_halves, load_int8  kWidth numbers of half precision, or int8
//
// With kDotsPairs, a lane has two bfloat16 as load_bits loads them:
//
//   dot_pairs   adds both products of each lane
//   set_pair    the same pair in every lane
//   narrow      the lanes of the first, then those of the second, rounded to bfloat16
//   join        lane i of both, rounded, as one pair
//   interleave  elements i of both as pairs: of even i, and of odd i
#pragma once

#include <immintrin.h>
#include <string.h>

#include "kernels.h"

namespace vmserve::cpu {
namespace {

struct Vec {
  static constexpr int kWidth = 8;
  static constexpr int kRows = 4;
  static constexpr int kLinearRows = 6;
  static constexpr bool kDotsPairs = false;
  using R = __m256;

  static R zero() { return _mm256_setzero_ps(); }
  static R set(float x) { return _mm256_set1_ps(x); }
  static R load(const float* from) { return _mm256_loadu_ps(from); }
  static void store(float* to, R a) { _mm256_storeu_ps(to, a); }
  static R add(R a, R b) { return _mm256_add_ps(a, b); }
  static R sub(R a, R b) { return _mm256_sub_ps(a, b); }
  static R mul(R a, R b) { return _mm256_mul_ps(a, b); }
  static R div(R a, R b) { return _mm256_div_ps(a, b); }
  static R max(R a, R b) { return _mm256_max_ps(a, b); }
  static R min(R a, R b) { return _mm256_min_ps(a, b); }
  static R fma(R a, R b, R c) { return _mm256_fmadd_ps(a, b, c); }
  static R fused(R a, R b, R c) { return fma(a, b, c); }
  static R abs(R a) { return _mm256_andnot_ps(set(-0.0F), a); }
  static R with_sign_of(R magnitude, R sign) {
    return _mm256_or_ps(magnitude, _mm256_and_ps(sign, set(-0.0F)));
  }
  static R where_less(R a, R b, R yes, R no) {
    return _mm256_blendv_ps(no, yes, _mm256_cmp_ps(a, b, _CMP_LT_OQ));
  }
  static unsigned at_least(R a, R b) {
    return static_cast<unsigned>(_mm256_movemask_ps(_mm256_cmp_ps(a, b, _CMP_GE_OQ)));
  }
  static R round(R a) { return _mm256_round_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
  static R scale_by_power(R a, R n) {
    const __m256i exponent = _mm256_slli_epi32(_mm256_cvtps_epi32(n), 23);
    return _mm256_castsi256_ps(_mm256_add_epi32(_mm256_castps_si256(a), exponent));
  }
  static float reduce_max(R a) {
    __m128 x = _mm_max_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
    x = _mm_max_ps(x, _mm_movehl_ps(x, x));
    return _mm_cvtss_f32(_mm_max_ss(x, _mm_movehdup_ps(x)));
  }
  static float reduce_add(R a) {
    __m128 x = _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
    x = _mm_add_ps(x, _mm_movehl_ps(x, x));
    return _mm_cvtss_f32(_mm_add_ss(x, _mm_movehdup_ps(x)));
  }
  static R both(const float* low, const float* high) {
    return _mm256_insertf128_ps(_mm256_castps128_ps256(_mm_loadu_ps(low)), _mm_loadu_ps(high), 1);
  }
  static void load_transposed(const float* const (&rows)[kWidth], R (&r)[kWidth]) {
    // Halves of rows i and i + 4: the first ones in t[i], the second ones in t[i + 4].
    R t[kWidth];
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {
      t[i] = both(rows[i], rows[i + 4]);
      t[i + 4] = both(rows[i] + 4, rows[i + 4] + 4);
    }
#pragma GCC unroll 2
    for (int i = 0; i < kWidth; i += 4) {
      const R a = _mm256_unpacklo_ps(t[i], t[i + 1]), b = _mm256_unpackhi_ps(t[i], t[i + 1]);
      const R c = _mm256_unpacklo_ps(t[i + 2], t[i + 3]),
              d = _mm256_unpackhi_ps(t[i + 2], t[i + 3]);
      r[i] = _mm256_shuffle_ps(a, c, 0x44);
      r[i + 1] = _mm256_shuffle_ps(a, c, 0xee);
      r[i + 2] = _mm256_shuffle_ps(b, d, 0x44);
      r[i + 3] = _mm256_shuffle_ps(b, d, 0xee);
    }
  }

  // The bits of the nearest bfloat16, in the upper half of each lane.
  static __m256i nearest_bf16(R a) {
    const __m256i bits = _mm256_castps_si256(a);
    const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    const __m256i bias = _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff));
    const __m256i rounded = _mm256_add_epi32(bits, bias);
    const R is_nan = _mm256_cmp_ps(a, a, _CMP_UNORD_Q);
    const R nan = _mm256_castsi256_ps(_mm256_set1_epi32(0x7fc00000));
    return _mm256_castps_si256(_mm256_blendv_ps(_mm256_castsi256_ps(rounded), nan, is_nan));
  }
  static R load(const Bf16* from) {
    const __m128i bits = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from));
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(bits), 16));
  }
  static void store(Bf16* to, R a) {
    const __m256i bits = _mm256_srli_epi32(nearest_bf16(a), 16);
    const __m128i low = _mm256_castsi256_si128(bits), high = _mm256_extracti128_si256(bits, 1);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to), _mm_packus_epi32(low, high));
  }
  static __m256i upper() { return _mm256_set1_epi32(static_cast<int>(0xffff0000U)); }
  static R round_bf16(R a) {
    return _mm256_castsi256_ps(_mm256_and_si256(nearest_bf16(a), upper()));
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
    const __m256i bits = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
    a = _mm256_castsi256_ps(_mm256_slli_epi32(bits, 16));
    b = _mm256_castsi256_ps(_mm256_and_si256(bits, upper()));
  }
  static R load_bits(const Bf16* from) {
    return _mm256_loadu_ps(reinterpret_cast<const float*>(from));
  }
  static R load_some_bits(const Bf16* from, int count) {
    if (count == kWidth) {
      const __m128i half = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from));
      return _mm256_castsi256_ps(_mm256_zextsi128_si256(half));
    }
    Bf16 whole[2 * kWidth] = {};
    memcpy(whole, from, static_cast<size_t>(count) * sizeof(Bf16));
    return load_bits(whole);
  }
  static R first_of(R pairs) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_castps_si256(pairs), 16));
  }
  static R second_of(R pairs) {
    return _mm256_castsi256_ps(_mm256_and_si256(_mm256_castps_si256(pairs), upper()));
  }
  static void store_pair(Bf16* to, R a, R b) {
    const __m256i even = _mm256_srli_epi32(nearest_bf16(a), 16);
    const __m256i odd = _mm256_and_si256(nearest_bf16(b), upper());
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), _mm256_or_si256(even, odd));
  }
  template <int i>
  static R part(const Bf16* from) {
    const __m256i bits = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
    return _mm256_castsi256_ps(i == 0 ? _mm256_slli_epi32(bits, 16)
                                      : _mm256_and_si256(bits, upper()));
  }

  using S = __m256i;
  // Not __m256i, a vector of long long: GCC 12 does not keep arrays of those in registers.
  using I = std::int32_t __attribute__((vector_size(32)));
  static constexpr bool kDotsBytes = false;
  static I set_int(std::int32_t a) { return reinterpret_cast<I>(_mm256_set1_epi32(a)); }
  static S load_bytes(const void* from) {
    return _mm256_loadu_si256(static_cast<const __m256i*>(from));
  }
  static S even_bytes(S a) { return _mm256_and_si256(a, _mm256_set1_epi16(0xff)); }
  static S odd_bytes(S a) { return _mm256_srli_epi16(a, 8); }
  static I add_products(I sum, S weights, const std::int16_t* pair) {
    std::int32_t lane;
    memcpy(&lane, pair, sizeof lane);
    sum += reinterpret_cast<I>(_mm256_madd_epi16(weights, _mm256_set1_epi32(lane)));
    // Orders the additions: GCC 12 would delay those of several words and spill registers.
    asm("" : "+x"(sum));
    return sum;
  }
  using N = std::int16_t __attribute__((vector_size(32)));
  static N no_short_sums() { return reinterpret_cast<N>(_mm256_setzero_si256()); }
  static N add_products(N sum, S weights, const std::int8_t* quad) {
    std::int32_t lane;
    memcpy(&lane, quad, sizeof lane);
    sum += reinterpret_cast<N>(_mm256_maddubs_epi16(weights, _mm256_set1_epi32(lane)));
    asm("" : "+x"(sum));
    return sum;
  }
  static I widen_sums(N sum, I offset) {
    const S ones = _mm256_set1_epi16(1);
    return offset + reinterpret_cast<I>(_mm256_madd_epi16(reinterpret_cast<__m256i>(sum), ones));
  }
  static void store_integers(std::int8_t* to, R a) {
    const __m256i whole = _mm256_cvtps_epi32(a);
    const __m128i low = _mm256_castsi256_si128(whole), high = _mm256_extracti128_si256(whole, 1);
    const __m128i words = _mm_packs_epi32(low, high);
    const __m128i order = _mm_setr_epi8(0, 2, 1, 3, 4, 6, 5, 7, 0, 0, 0, 0, 0, 0, 0, 0);
    const __m128i bytes = _mm_shuffle_epi8(_mm_packs_epi16(words, words), order);
    _mm_storel_epi64(reinterpret_cast<__m128i*>(to), bytes);
  }
  static void store_bytes(void* to, S a) { _mm256_storeu_si256(static_cast<__m256i*>(to), a); }
  static S masked(S a, char mask) { return _mm256_and_si256(a, _mm256_set1_epi8(mask)); }
  static S merged(S a, S b, char mask) { return _mm256_or_si256(a, masked(b, mask)); }
  template <int kLeft>
  static S shifted(S a) {
    return kLeft < 0 ? _mm256_srli_epi16(a, kLeft < 0 ? -kLeft : 0)
                     : _mm256_slli_epi16(a, kLeft < 0 ? 0 : kLeft);
  }
  static S looked_up(const std::uint8_t (&table)[16], S places) {
    const __m128i entries = _mm_loadu_si128(reinterpret_cast<const __m128i*>(table));
    return _mm256_shuffle_epi8(_mm256_broadcastsi128_si256(entries), places);
  }
  static S bits_of(R a) { return _mm256_castps_si256(a); }
  static void pair_rows(S a, S b, S (&to)[4]) {
    const S low = _mm256_unpacklo_epi16(a, b), high = _mm256_unpackhi_epi16(a, b);
    to[0] = even_bytes(low);
    to[1] = odd_bytes(low);
    to[2] = even_bytes(high);
    to[3] = odd_bytes(high);
  }
  static S pair_whole(R a, R b) {
    return _mm256_or_si256(_mm256_cvtps_epi32(a), _mm256_slli_epi32(_mm256_cvtps_epi32(b), 16));
  }
  static R load_halves(const void* from) {
    return _mm256_cvtph_ps(_mm_loadu_si128(static_cast<const __m128i*>(from)));
  }
  static R load_int8(const void* from) {
    return _mm256_cvtepi32_ps(
        _mm256_cvtepi8_epi32(_mm_loadl_epi64(static_cast<const __m128i*>(from))));
  }
  static R to_float(I a) { return _mm256_cvtepi32_ps(reinterpret_cast<__m256i>(a)); }
  static void store_integers(std::int16_t* to, R a) {
    const __m256i whole = _mm256_cvtps_epi32(a);
    const __m128i low = _mm256_castsi256_si128(whole), high = _mm256_extracti128_si256(whole, 1);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to), _mm_packs_epi32(low, high));
  }

  static void load_some(const float* from, int count, R& a, R& b) {
    if (count == kWidth) {
      a = load(from);
      b = zero();
    } else {
      float whole[2 * kWidth] = {};
      memcpy(whole, from, static_cast<size_t>(count) * sizeof(float));
      load_pair(whole, a, b);
    }
  }
  static void load_some(const Bf16* from, int count, R& a, R& b) {
    const R pairs = load_some_bits(from, count);
    a = first_of(pairs);
    b = second_of(pairs);
  }
};

}  // namespace
}  // namespace vmserve::cpu
