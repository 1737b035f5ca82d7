// Sixteen floats in an AVX-512 register (F, BW, DQ, VL; BF16 with VMSERVE_DOTS_PAIRS, VNNI with
// VMSERVE_DOTS_BYTES). vec_avx2.h documents the members.
#pragma once

#ifdef VMSERVE_EMULATED_AVX512  // scripts/emulate-avx512
#include VMSERVE_EMULATED_AVX512
#else
#include <immintrin.h>
#endif

#include "kernels.h"

namespace vmserve::cpu {
namespace {

struct Vec {
  static constexpr int kWidth = 16;
  static constexpr int kRows = 8;
  static constexpr int kLinearRows = 12;
  using R = __m512;
#ifdef VMSERVE_DOTS_PAIRS
  static constexpr bool kDotsPairs = true;
  static R set_pair(const float* from) { return _mm512_set1_ps(*from); }
  // Adds both products one after the other; denormals count as zero.
  static R dot_pairs(R a, R b, R sum) {
    return _mm512_dpbf16_ps(sum, reinterpret_cast<__m512bh>(a), reinterpret_cast<__m512bh>(b));
  }
  static R dot_pairs(R a, const float* pair, R sum) {
#ifdef VMSERVE_EMULATED_AVX512
    return dot_pairs(a, set_pair(pair), sum);
#else
    // GCC 12 would broadcast in an instruction of its own.
    asm("vdpbf16ps %2%{1to16%}, %1, %0" : "+v"(sum) : "v"(a), "m"(*pair));
    return sum;
#endif
  }
  // Flushes denormals, which weights never are.
  static R narrow(R a, R b) { return reinterpret_cast<R>(_mm512_cvtne2ps_pbh(b, a)); }
  // Indices of words: lane i has the pair `constant` + i * `step`.
  static __m512i lanes_times(int step, int constant) {
    const __m512i lane = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    return _mm512_add_epi32(_mm512_mullo_epi32(lane, _mm512_set1_epi32(step)),
                            _mm512_set1_epi32(constant));
  }
  static void interleave(R a, R b, R& even, R& odd) {
    const __m512i x = _mm512_castps_si512(a), y = _mm512_castps_si512(b);
    even =
        _mm512_castsi512_ps(_mm512_permutex2var_epi16(x, lanes_times(0x00020002, 0x00200000), y));
    odd = _mm512_castsi512_ps(_mm512_permutex2var_epi16(x, lanes_times(0x00020002, 0x00210001), y));
  }
  static R join(R a, R b) {
    const __m512i words = _mm512_castps_si512(narrow(a, b));
    return _mm512_castsi512_ps(
        _mm512_permutexvar_epi16(lanes_times(0x00010001, 0x00100000), words));
  }
#else
  static constexpr bool kDotsPairs = false;
#endif

  static R zero() { return _mm512_setzero_ps(); }
  static R set(float x) { return _mm512_set1_ps(x); }
  static R load(const float* from) { return _mm512_loadu_ps(from); }
  static void store(float* to, R a) { _mm512_storeu_ps(to, a); }
  static R add(R a, R b) { return _mm512_add_ps(a, b); }
  static R sub(R a, R b) { return _mm512_sub_ps(a, b); }
  static R mul(R a, R b) { return _mm512_mul_ps(a, b); }
  static R div(R a, R b) { return _mm512_div_ps(a, b); }
  static R max(R a, R b) { return _mm512_max_ps(a, b); }
  static R min(R a, R b) { return _mm512_min_ps(a, b); }
  static R fma(R a, R b, R c) { return _mm512_fmadd_ps(a, b, c); }
  static R fused(R a, R b, R c) { return fma(a, b, c); }
  static R abs(R a) { return _mm512_andnot_ps(set(-0.0F), a); }
  static R with_sign_of(R magnitude, R sign) {
    return _mm512_or_ps(magnitude, _mm512_and_ps(sign, set(-0.0F)));
  }
  static R where_less(R a, R b, R yes, R no) {
    return _mm512_mask_blend_ps(_mm512_cmp_ps_mask(a, b, _CMP_LT_OQ), no, yes);
  }
  static unsigned at_least(R a, R b) { return _mm512_cmp_ps_mask(a, b, _CMP_GE_OQ); }
  static R round(R a) {
    return _mm512_roundscale_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  }
  static R scale_by_power(R a, R n) {
    const __m512i exponent = _mm512_slli_epi32(_mm512_cvtps_epi32(n), 23);
    return _mm512_castsi512_ps(_mm512_add_epi32(_mm512_castps_si512(a), exponent));
  }
  static float reduce_max(R a) { return _mm512_reduce_max_ps(a); }
  static float reduce_add(R a) { return _mm512_reduce_add_ps(a); }
  static R both(const float* low, const float* high) {
    return _mm512_insertf32x8(_mm512_castps256_ps512(_mm256_loadu_ps(low)), _mm256_loadu_ps(high),
                              1);
  }
  static void load_transposed(const float* const (&rows)[kWidth], R (&r)[kWidth]) {
    // Halves of rows i and i + 4: the first ones in t[i], the second ones in t[i + 8].
    R t[kWidth];
#pragma GCC unroll 8
    for (int i = 0; i < 8; ++i) {
      const float *const row = rows[i + i / 4 * 4], *const other = rows[i + i / 4 * 4 + 4];
      t[i] = both(row, other);
      t[i + 8] = both(row + 8, other + 8);
    }
    // t[i + j]: element j of each quarter.
#pragma GCC unroll 4
    for (int i = 0; i < kWidth; i += 4) {
      const R a = _mm512_unpacklo_ps(t[i], t[i + 1]), b = _mm512_unpackhi_ps(t[i], t[i + 1]);
      const R c = _mm512_unpacklo_ps(t[i + 2], t[i + 3]),
              d = _mm512_unpackhi_ps(t[i + 2], t[i + 3]);
      t[i] = _mm512_shuffle_ps(a, c, 0x44);
      t[i + 1] = _mm512_shuffle_ps(a, c, 0xee);
      t[i + 2] = _mm512_shuffle_ps(b, d, 0x44);
      t[i + 3] = _mm512_shuffle_ps(b, d, 0xee);
    }
#pragma GCC unroll 8
    for (int j = 0; j < 8; ++j) {
      const int i = j + j / 4 * 4;
      r[i] = _mm512_shuffle_f32x4(t[i], t[i + 4], 0x88);
      r[i + 4] = _mm512_shuffle_f32x4(t[i], t[i + 4], 0xdd);
    }
  }

  static __m512i nearest_bf16(R a) {
    const __m512i bits = _mm512_castps_si512(a);
    const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    const __m512i bias = _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff));
    const __mmask16 is_nan = _mm512_cmp_ps_mask(a, a, _CMP_UNORD_Q);
    return _mm512_mask_blend_epi32(is_nan, _mm512_add_epi32(bits, bias),
                                   _mm512_set1_epi32(0x7fc00000));
  }
  static R load(const Bf16* from) {
    const __m256i bits = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(bits), 16));
  }
  static void store(Bf16* to, R a) {
    const __m256i bits = _mm512_cvtepi32_epi16(_mm512_srli_epi32(nearest_bf16(a), 16));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), bits);
  }
  static __m512i upper() { return _mm512_set1_epi32(static_cast<int>(0xffff0000U)); }
  static R round_bf16(R a) {
    return _mm512_castsi512_ps(_mm512_and_si512(nearest_bf16(a), upper()));
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
    const __m512i bits = _mm512_loadu_si512(from);
    a = _mm512_castsi512_ps(_mm512_slli_epi32(bits, 16));
    b = _mm512_castsi512_ps(_mm512_and_si512(bits, upper()));
  }
  static R load_bits(const Bf16* from) { return _mm512_loadu_ps(from); }
  static R load_some_bits(const Bf16* from, int count) {
    return _mm512_castsi512_ps(_mm512_maskz_loadu_epi16((1U << count) - 1, from));
  }
  static R first_of(R pairs) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_castps_si512(pairs), 16));
  }
  static R second_of(R pairs) {
    return _mm512_castsi512_ps(_mm512_and_si512(_mm512_castps_si512(pairs), upper()));
  }
  static void store_pair(Bf16* to, R a, R b) {
    const __m512i even = _mm512_srli_epi32(nearest_bf16(a), 16);
    const __m512i odd = _mm512_and_si512(nearest_bf16(b), upper());
    _mm512_storeu_si512(to, _mm512_or_si512(even, odd));
  }
  template <int i>
  static R part(const Bf16* from) {
    const __m512i bits = _mm512_loadu_si512(from);
    return _mm512_castsi512_ps(i == 0 ? _mm512_slli_epi32(bits, 16)
                                      : _mm512_and_si512(bits, upper()));
  }

  using S = __m512i;
  // Not __m512i, a vector of long long: GCC 12 does not keep arrays of those in registers.
  using I = std::int32_t __attribute__((vector_size(64)));
  static I set_int(std::int32_t a) { return reinterpret_cast<I>(_mm512_set1_epi32(a)); }
  static S load_bytes(const void* from) { return _mm512_loadu_si512(from); }
  static S even_bytes(S a) { return _mm512_and_si512(a, _mm512_set1_epi16(0xff)); }
  static S odd_bytes(S a) { return _mm512_srli_epi16(a, 8); }
  static S in_all_lanes(const void* four_bytes) {
    std::int32_t lane;
    memcpy(&lane, four_bytes, sizeof lane);
    return _mm512_set1_epi32(lane);
  }
  // GCC 12 would delay the additions of several words and spill registers.
  static I in_order(__m512i sum) {
#ifndef VMSERVE_EMULATED_AVX512
    asm("" : "+v"(sum));
#endif
    return reinterpret_cast<I>(sum);
  }
#ifdef VMSERVE_DOTS_BYTES
  static constexpr bool kDotsBytes = true;
  static I add_products(I sum, S weights, const std::int16_t* pair) {
    return in_order(
        _mm512_dpwssd_epi32(reinterpret_cast<__m512i>(sum), weights, in_all_lanes(pair)));
  }
  static I add_products(I sum, S weights, const std::int8_t* quad) {
    return in_order(
        _mm512_dpbusd_epi32(reinterpret_cast<__m512i>(sum), weights, in_all_lanes(quad)));
  }
#else
  static constexpr bool kDotsBytes = false;
  static I add_products(I sum, S weights, const std::int16_t* pair) {
    sum += reinterpret_cast<I>(_mm512_madd_epi16(weights, in_all_lanes(pair)));
    return in_order(reinterpret_cast<__m512i>(sum));
  }
#endif
  using N = std::int16_t __attribute__((vector_size(64)));
  static N no_short_sums() { return reinterpret_cast<N>(_mm512_setzero_si512()); }
  static N add_products(N sum, S weights, const std::int8_t* quad) {
    sum += reinterpret_cast<N>(_mm512_maddubs_epi16(weights, in_all_lanes(quad)));
#ifndef VMSERVE_EMULATED_AVX512
    asm("" : "+v"(sum));
#endif
    return sum;
  }
  static I widen_sums(N sum, I offset) {
    const S ones = _mm512_set1_epi16(1);
    return offset + reinterpret_cast<I>(_mm512_madd_epi16(reinterpret_cast<__m512i>(sum), ones));
  }
  static void store_integers(std::int8_t* to, R a) {
    const __m128i whole = _mm512_cvtsepi32_epi8(_mm512_cvtps_epi32(a));
    const __m128i order = _mm_setr_epi8(0, 2, 1, 3, 4, 6, 5, 7, 8, 10, 9, 11, 12, 14, 13, 15);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to), _mm_shuffle_epi8(whole, order));
  }
  static void store_bytes(void* to, S a) { _mm512_storeu_si512(to, a); }
  static S masked(S a, char mask) { return _mm512_and_si512(a, _mm512_set1_epi8(mask)); }
  static S merged(S a, S b, char mask) {
    return _mm512_ternarylogic_epi32(a, b, _mm512_set1_epi8(mask), 0xf8);
  }
  template <int kLeft>
  static S shifted(S a) {
    return kLeft < 0 ? _mm512_srli_epi16(a, kLeft < 0 ? -kLeft : 0)
                     : _mm512_slli_epi16(a, kLeft < 0 ? 0 : kLeft);
  }
  static S looked_up(const std::uint8_t (&table)[16], S places) {
    const __m128i entries = _mm_loadu_si128(reinterpret_cast<const __m128i*>(table));
    return _mm512_shuffle_epi8(_mm512_broadcast_i32x4(entries), places);
  }
  static S bits_of(R a) { return _mm512_castps_si512(a); }
  static void pair_rows(S a, S b, S (&to)[4]) {
    const S low = _mm512_unpacklo_epi16(a, b), high = _mm512_unpackhi_epi16(a, b);
    to[0] = even_bytes(low);
    to[1] = odd_bytes(low);
    to[2] = even_bytes(high);
    to[3] = odd_bytes(high);
  }
  static S pair_whole(R a, R b) {
    return _mm512_or_si512(_mm512_cvtps_epi32(a), _mm512_slli_epi32(_mm512_cvtps_epi32(b), 16));
  }
  static R load_halves(const void* from) {
    return _mm512_cvtph_ps(_mm256_loadu_si256(static_cast<const __m256i*>(from)));
  }
  static R load_int8(const void* from) {
    return _mm512_cvtepi32_ps(
        _mm512_cvtepi8_epi32(_mm_loadu_si128(static_cast<const __m128i*>(from))));
  }
  static R to_float(I a) { return _mm512_cvtepi32_ps(reinterpret_cast<__m512i>(a)); }
  static void store_integers(std::int16_t* to, R a) {
    const __m256i whole = _mm512_cvtsepi32_epi16(_mm512_cvtps_epi32(a));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), whole);
  }

  static void load_some(const float* from, int count, R& a, R& b) {
    const std::uint32_t wanted = (1U << count) - 1;
    a = _mm512_maskz_loadu_ps(static_cast<__mmask16>(wanted), from);
    b = _mm512_maskz_loadu_ps(static_cast<__mmask16>(wanted >> kWidth), from + kWidth);
  }
  static void load_some(const Bf16* from, int count, R& a, R& b) {
    const __m512i bits = _mm512_maskz_loadu_epi16((1U << count) - 1, from);
    a = _mm512_castsi512_ps(_mm512_slli_epi32(bits, 16));
    b = _mm512_castsi512_ps(_mm512_and_si512(bits, upper()));
  }
};

}  // namespace
}  // namespace vmserve::cpu
