// Stands in for <immintrin.h> where scripts/emulate-avx512 builds the AVX-512 kernels for a
// processor with AVX2 only. Vectors of 64 bytes are two of 32 to GCC; the functions hide those of
// the same name in <immintrin.h>, which need AVX-512, and do what Intel's Intrinsics Guide says.
#pragma once

#include <immintrin.h>

#include <cstdint>
#include <cstring>

#undef _mm512_setr_epi32  // a macro of other intrinsics

namespace vmserve::cpu {
namespace {

using Ints = std::int32_t __attribute__((vector_size(64)));
using Words = std::uint32_t __attribute__((vector_size(64)));
using Shorts = std::int16_t __attribute__((vector_size(64)));
using ShortWords = std::uint16_t __attribute__((vector_size(64)));

template <class To, class From>
inline To bits_of(const From& from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  std::memcpy(&to, &from, sizeof to);
  return to;
}

template <class Half>
struct Halves {
  Half low, high;
};

// Applies `op` to both halves of the arguments.
template <class Half, class Op, class... From>
inline auto by_halves(Op op, const From&... from) {
  using To = decltype(op(bits_of<Halves<Half>>(from).low...));
  return Halves<To>{op(bits_of<Halves<Half>>(from).low...),
                    op(bits_of<Halves<Half>>(from).high...)};
}
template <class Op, class... From>
inline __m512 floats_by_halves(Op op, const From&... from) {
  return bits_of<__m512>(by_halves<__m256>(op, from...));
}

inline __m512i _mm512_castps_si512(__m512 a) {
  return bits_of<__m512i>(a);
}
inline __m512 _mm512_castsi512_ps(__m512i a) {
  return bits_of<__m512>(a);
}
inline __m512 _mm512_castps256_ps512(__m256 a) {
  return bits_of<__m512>(Halves<__m256>{a, a});
}
inline __m512 _mm512_insertf32x8(__m512 a, __m256 b, int) {
  return bits_of<__m512>(Halves<__m256>{bits_of<Halves<__m256>>(a).low, b});
}

inline __m512 _mm512_setzero_ps() {
  return __m512{};
}
inline __m512i _mm512_setzero_si512() {
  return __m512i{};
}
inline __m512 _mm512_set1_ps(float x) {
  return __m512{x, x, x, x, x, x, x, x, x, x, x, x, x, x, x, x};
}
inline __m512i _mm512_set1_epi32(std::int32_t x) {
  return bits_of<__m512i>(Ints{} + x);
}
inline __m512i _mm512_set1_epi16(std::int16_t x) {
  return bits_of<__m512i>(Shorts{} + x);
}
inline __m512i _mm512_set1_epi8(char x) {
  return _mm512_set1_epi32(static_cast<std::uint8_t>(x) * 0x01010101);
}
template <class... Lanes>
inline __m512i _mm512_setr_epi32(Lanes... lanes) {
  return bits_of<__m512i>(Ints{lanes...});
}

inline __m512 _mm512_loadu_ps(const void* from) {
  __m512 to;
  std::memcpy(&to, from, sizeof to);
  return to;
}
inline __m512i _mm512_loadu_si512(const void* from) {
  return _mm512_castps_si512(_mm512_loadu_ps(from));
}
inline void _mm512_storeu_ps(void* to, __m512 a) {
  std::memcpy(to, &a, sizeof a);
}
inline void _mm512_storeu_si512(void* to, __m512i a) {
  std::memcpy(to, &a, sizeof a);
}
// Masks here choose the first lanes; what follows them may not be readable.
inline __m512i first_bytes(const void* from, int count) {
  __m512i to = {};
  std::memcpy(&to, from, static_cast<std::size_t>(count));
  return to;
}
inline __m512 _mm512_maskz_loadu_ps(__mmask16 mask, const void* from) {
  return _mm512_castsi512_ps(first_bytes(from, 4 * __builtin_popcount(mask)));
}
inline __m512i _mm512_maskz_loadu_epi16(__mmask32 mask, const void* from) {
  return first_bytes(from, 2 * __builtin_popcount(mask));
}

inline __m512 _mm512_add_ps(__m512 a, __m512 b) {
  return a + b;
}
inline __m512 _mm512_sub_ps(__m512 a, __m512 b) {
  return a - b;
}
inline __m512 _mm512_mul_ps(__m512 a, __m512 b) {
  return a * b;
}
inline __m512 _mm512_div_ps(__m512 a, __m512 b) {
  return a / b;
}
inline __m512 _mm512_max_ps(__m512 a, __m512 b) {
  return a > b ? a : b;
}
inline __m512 _mm512_min_ps(__m512 a, __m512 b) {
  return a < b ? a : b;
}
inline __m512 _mm512_fmadd_ps(__m512 a, __m512 b, __m512 c) {
  return floats_by_halves([](__m256 x, __m256 y, __m256 z) { return _mm256_fmadd_ps(x, y, z); }, a,
                          b, c);
}
inline __m512 _mm512_roundscale_ps(__m512 a, int) {
  return floats_by_halves(
      [](__m256 x) { return _mm256_round_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); },
      a);
}
// The guide leaves the order open; GCC adds halves.
inline float _mm512_reduce_add_ps(__m512 a) {
  for (int width = 8; width > 0; width /= 2) {
    for (int i = 0; i < width; ++i) a[i] += a[i + width];
  }
  return a[0];
}
inline float _mm512_reduce_max_ps(__m512 a) {
  float most = a[0];
  for (int i = 1; i < 16; ++i) most = a[i] > most ? a[i] : most;
  return most;
}

inline __m512i _mm512_and_si512(__m512i a, __m512i b) {
  return a & b;
}
inline __m512i _mm512_or_si512(__m512i a, __m512i b) {
  return a | b;
}
inline __m512 _mm512_and_ps(__m512 a, __m512 b) {
  return bits_of<__m512>(bits_of<Ints>(a) & bits_of<Ints>(b));
}
inline __m512 _mm512_or_ps(__m512 a, __m512 b) {
  return bits_of<__m512>(bits_of<Ints>(a) | bits_of<Ints>(b));
}
inline __m512 _mm512_andnot_ps(__m512 a, __m512 b) {
  return bits_of<__m512>(~bits_of<Ints>(a) & bits_of<Ints>(b));
}
// `table` has a bit for each combination of the three bits, a's counted as 4.
inline __m512i _mm512_ternarylogic_epi32(__m512i a, __m512i b, __m512i c, int table) {
  __m512i to = {};
  for (int bits = 0; bits < 8; ++bits) {
    if (table >> bits & 1) to |= (bits & 4 ? a : ~a) & (bits & 2 ? b : ~b) & (bits & 1 ? c : ~c);
  }
  return to;
}

inline __m512i _mm512_broadcast_i32x4(__m128i a) {
  const __m256i half = _mm256_broadcastsi128_si256(a);
  return bits_of<__m512i>(Halves<__m256i>{half, half});
}
inline __m512i _mm512_shuffle_epi8(__m512i a, __m512i places) {
  const auto shuffle = [](__m256i x, __m256i y) { return _mm256_shuffle_epi8(x, y); };
  return bits_of<__m512i>(by_halves<__m256i>(shuffle, a, places));
}

inline __mmask16 mask_of(Ints lanes) {
  unsigned mask = 0;
  for (int i = 0; i < 16; ++i) mask |= lanes[i] != 0 ? 1U << i : 0;
  return static_cast<__mmask16>(mask);
}
inline Ints lanes_of(__mmask16 mask) {
  Ints lanes;
  for (int i = 0; i < 16; ++i) lanes[i] = -(mask >> i & 1);
  return lanes;
}
inline __mmask16 _mm512_cmp_ps_mask(__m512 a, __m512 b, int how) {
  if (how == _CMP_LT_OQ) return mask_of(a < b);
  if (how == _CMP_GE_OQ) return mask_of(a >= b);
  if (how == _CMP_UNORD_Q) return mask_of((a != a) | (b != b));
  __builtin_trap();
}
inline __m512i _mm512_mask_blend_epi32(__mmask16 mask, __m512i no, __m512i yes) {
  return bits_of<__m512i>(lanes_of(mask) ? bits_of<Ints>(yes) : bits_of<Ints>(no));
}
inline __m512 _mm512_mask_blend_ps(__mmask16 mask, __m512 no, __m512 yes) {
  return lanes_of(mask) ? yes : no;
}

inline __m512i _mm512_add_epi32(__m512i a, __m512i b) {
  return bits_of<__m512i>(bits_of<Words>(a) + bits_of<Words>(b));
}
inline __m512i _mm512_mullo_epi32(__m512i a, __m512i b) {
  return bits_of<__m512i>(bits_of<Words>(a) * bits_of<Words>(b));
}
inline __m512i _mm512_slli_epi32(__m512i a, int count) {
  return bits_of<__m512i>(bits_of<Words>(a) << count);
}
inline __m512i _mm512_srli_epi32(__m512i a, int count) {
  return bits_of<__m512i>(bits_of<Words>(a) >> count);
}
inline __m512i _mm512_slli_epi16(__m512i a, int count) {
  return bits_of<__m512i>(bits_of<ShortWords>(a) << count);
}
inline __m512i _mm512_srli_epi16(__m512i a, int count) {
  return bits_of<__m512i>(bits_of<ShortWords>(a) >> count);
}
inline __m512i _mm512_unpacklo_epi16(__m512i a, __m512i b) {
  return bits_of<__m512i>(
      by_halves<__m256i>([](__m256i x, __m256i y) { return _mm256_unpacklo_epi16(x, y); }, a, b));
}
inline __m512i _mm512_unpackhi_epi16(__m512i a, __m512i b) {
  return bits_of<__m512i>(
      by_halves<__m256i>([](__m256i x, __m256i y) { return _mm256_unpackhi_epi16(x, y); }, a, b));
}
inline __m512i _mm512_madd_epi16(__m512i a, __m512i b) {
  return bits_of<__m512i>(
      by_halves<__m256i>([](__m256i x, __m256i y) { return _mm256_madd_epi16(x, y); }, a, b));
}
inline __m512i _mm512_maddubs_epi16(__m512i a, __m512i b) {
  return bits_of<__m512i>(
      by_halves<__m256i>([](__m256i x, __m256i y) { return _mm256_maddubs_epi16(x, y); }, a, b));
}
inline __m512i _mm512_dpwssd_epi32(__m512i sums, __m512i a, __m512i b) {
  return _mm512_add_epi32(sums, _mm512_madd_epi16(a, b));
}
// Bytes of a are unsigned, of b signed. Two products of 16 bits would saturate, one fits.
inline __m512i _mm512_dpbusd_epi32(__m512i sums, __m512i a, __m512i b) {
  const Shorts even = (bits_of<Shorts>(a) & 0xff) * (bits_of<Shorts>(b) << 8 >> 8);
  const Shorts odd = bits_of<Shorts>(bits_of<ShortWords>(a) >> 8) * (bits_of<Shorts>(b) >> 8);
  const __m512i ones = _mm512_set1_epi16(1);
  sums = _mm512_add_epi32(sums, _mm512_madd_epi16(bits_of<__m512i>(even), ones));
  return _mm512_add_epi32(sums, _mm512_madd_epi16(bits_of<__m512i>(odd), ones));
}

inline __m512 _mm512_cvtepi32_ps(__m512i a) {
  return __builtin_convertvector(bits_of<Ints>(a), __m512);
}
inline __m512i _mm512_cvtps_epi32(__m512 a) {
  return bits_of<__m512i>(by_halves<__m256>([](__m256 x) { return _mm256_cvtps_epi32(x); }, a));
}
inline __m512i _mm512_cvtepu16_epi32(__m256i a) {
  return bits_of<__m512i>(
      by_halves<__m128i>([](__m128i x) { return _mm256_cvtepu16_epi32(x); }, a));
}
inline __m512i _mm512_cvtepi8_epi32(__m128i a) {
  return bits_of<__m512i>(
      Halves<__m256i>{_mm256_cvtepi8_epi32(a), _mm256_cvtepi8_epi32(_mm_srli_si128(a, 8))});
}
inline __m512 _mm512_cvtph_ps(__m256i a) {
  return bits_of<__m512>(by_halves<__m128i>([](__m128i x) { return _mm256_cvtph_ps(x); }, a));
}
inline __m256i _mm512_cvtepi32_epi16(__m512i a) {  // the lower halves
  using To = std::int16_t __attribute__((vector_size(32)));
  return bits_of<__m256i>(__builtin_convertvector(bits_of<Ints>(a), To));
}
inline Ints limited(__m512i a, std::int32_t least, std::int32_t most) {
  const Ints lanes = bits_of<Ints>(a), low = Ints{} + least, high = Ints{} + most;
  const Ints raised = lanes < low ? low : lanes;
  return raised > high ? high : raised;
}
inline __m256i _mm512_cvtsepi32_epi16(__m512i a) {
  return _mm512_cvtepi32_epi16(bits_of<__m512i>(limited(a, -32768, 32767)));
}
inline __m128i _mm512_cvtsepi32_epi8(__m512i a) {
  using To = std::int8_t __attribute__((vector_size(16)));
  return bits_of<__m128i>(__builtin_convertvector(limited(a, -128, 127), To));
}

inline __m512 _mm512_unpacklo_ps(__m512 a, __m512 b) {
  return floats_by_halves([](__m256 x, __m256 y) { return _mm256_unpacklo_ps(x, y); }, a, b);
}
inline __m512 _mm512_unpackhi_ps(__m512 a, __m512 b) {
  return floats_by_halves([](__m256 x, __m256 y) { return _mm256_unpackhi_ps(x, y); }, a, b);
}
// In each group of four lanes: two of a, then two of b.
inline __m512 _mm512_shuffle_ps(__m512 a, __m512 b, int which) {
  Ints from;
  for (int i = 0; i < 16; ++i) {
    from[i] = i / 4 * 4 + (which >> (i % 4 * 2) & 3) + (i % 4 < 2 ? 0 : 16);
  }
  return __builtin_shuffle(a, b, from);
}
// Groups of four lanes: two of a, then two of b.
inline __m512 _mm512_shuffle_f32x4(__m512 a, __m512 b, int which) {
  Ints from;
  for (int i = 0; i < 16; ++i) {
    from[i] = (which >> (i / 4 * 2) & 3) * 4 + i % 4 + (i < 8 ? 0 : 16);
  }
  return __builtin_shuffle(a, b, from);
}
inline __m512i _mm512_permutexvar_epi16(__m512i from, __m512i a) {
  return bits_of<__m512i>(__builtin_shuffle(bits_of<Shorts>(a), bits_of<Shorts>(from)));
}
inline __m512i _mm512_permutex2var_epi16(__m512i a, __m512i from, __m512i b) {
  return bits_of<__m512i>(
      __builtin_shuffle(bits_of<Shorts>(a), bits_of<Shorts>(b), bits_of<Shorts>(from)));
}

inline __m512 flushed(__m512 a) {  // denormals count as zero, whatever MXCSR says
  const Words bits = bits_of<Words>(a);
  return bits_of<__m512>((bits & 0x7f800000) == 0 ? bits & 0x80000000 : bits);
}
// Two numbers of each lane, the odd one first, each product fused with its addition.
inline __m512 _mm512_dpbf16_ps(__m512 sums, __m512bh a, __m512bh b) {
  const Words x = bits_of<Words>(a), y = bits_of<Words>(b);
  sums = _mm512_fmadd_ps(flushed(bits_of<__m512>(x & 0xffff0000)),
                         flushed(bits_of<__m512>(y & 0xffff0000)), flushed(sums));
  sums = _mm512_fmadd_ps(flushed(bits_of<__m512>(x << 16)), flushed(bits_of<__m512>(y << 16)),
                         flushed(sums));
  return flushed(sums);
}
inline Words narrowed(__m512 a) {
  const Words bits = bits_of<Words>(flushed(a));
  const Words nearest = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
  return bits_of<Words>(a != a) != 0 ? bits >> 16 | 0x40 : nearest;
}
inline __m512bh _mm512_cvtne2ps_pbh(__m512 a, __m512 b) {  // the second, then the first
  return bits_of<__m512bh>(Halves<__m256i>{_mm512_cvtepi32_epi16(bits_of<__m512i>(narrowed(b))),
                                           _mm512_cvtepi32_epi16(bits_of<__m512i>(narrowed(a)))});
}

}  // namespace
}  // namespace vmserve::cpu
