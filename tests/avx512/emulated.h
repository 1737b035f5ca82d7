// Stands in for <immintrin.h> where scripts/emulate-avx512 builds the AVX-512 kernels for a
// processor without it: SIMDe (Debian: libsimde-dev) has most of the intrinsics, the rest are here,
// by what Intel's Intrinsics Guide says of them.
#pragma once

#define SIMDE_ENABLE_NATIVE_ALIASES
#include <simde/x86/avx512.h>
#include <simde/x86/fma.h>

#include <cmath>
#include <cstdint>
#include <cstring>

namespace emulated {

template <class To, class From>
inline To bits_of(const From& from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  std::memcpy(&to, &from, sizeof to);
  return to;
}

struct Floats {
  float at[16];
};
struct Ints {
  std::int32_t at[16];
};
struct Shorts {
  std::uint16_t at[32];
};

inline float reduce_max(simde__m512 a) {
  const auto lanes = bits_of<Floats>(a);
  float most = lanes.at[0];
  for (const float lane : lanes.at) most = lane > most ? lane : most;
  return most;
}

// The guide leaves the order open; GCC adds halves.
inline float reduce_add(simde__m512 a) {
  auto lanes = bits_of<Floats>(a);
  for (int width = 8; width > 0; width /= 2) {
    for (int i = 0; i < width; ++i) lanes.at[i] += lanes.at[i + width];
  }
  return lanes.at[0];
}

inline simde__m512 maskz_loadu_ps(std::uint16_t mask, const void* from) {
  Floats lanes = {};
  for (int i = 0; i < 16; ++i) {
    if ((mask >> i) & 1) std::memcpy(&lanes.at[i], static_cast<const float*>(from) + i, 4);
  }
  return bits_of<simde__m512>(lanes);
}

inline simde__m512i maskz_loadu_epi16(std::uint32_t mask, const void* from) {
  Shorts lanes = {};
  for (int i = 0; i < 32; ++i) {
    if ((mask >> i) & 1) std::memcpy(&lanes.at[i], static_cast<const std::uint16_t*>(from) + i, 2);
  }
  return bits_of<simde__m512i>(lanes);
}

inline simde__m512 insert(simde__m512 a, simde__m256 b, int half) {
  auto lanes = bits_of<Floats>(a);
  std::memcpy(lanes.at + 8 * half, &b, sizeof b);
  return bits_of<simde__m512>(lanes);
}

inline simde__m512 cvtepi32_ps(simde__m512i a) {
  const auto from = bits_of<Ints>(a);
  Floats to;
  for (int i = 0; i < 16; ++i) to.at[i] = static_cast<float>(from.at[i]);
  return bits_of<simde__m512>(to);
}

inline simde__m512i cvtps_epi32(simde__m512 a) {  // to the nearest, ties to even
  const auto from = bits_of<Floats>(a);
  Ints to;
  for (int i = 0; i < 16; ++i) to.at[i] = static_cast<std::int32_t>(std::nearbyintf(from.at[i]));
  return bits_of<simde__m512i>(to);
}

inline simde__m512i srai_epi32(simde__m512i a, unsigned count) {
  auto lanes = bits_of<Ints>(a);
  for (std::int32_t& lane : lanes.at) lane >>= count;
  return bits_of<simde__m512i>(lanes);
}

inline simde__m512i cvtepu16_epi32(simde__m256i a) {
  std::uint16_t from[16];
  std::memcpy(from, &a, sizeof from);
  Ints to;
  for (int i = 0; i < 16; ++i) to.at[i] = from[i];
  return bits_of<simde__m512i>(to);
}

inline simde__m512i cvtepi8_epi32(simde__m128i a) {
  std::int8_t from[16];
  std::memcpy(from, &a, sizeof from);
  Ints to;
  for (int i = 0; i < 16; ++i) to.at[i] = from[i];
  return bits_of<simde__m512i>(to);
}

inline simde__m512 cvtph_ps(simde__m256i a) {
  std::uint16_t from[16];
  std::memcpy(from, &a, sizeof from);
  Floats to;
  for (int i = 0; i < 16; ++i) {
    const int exponent = from[i] >> 10 & 0x1f, mantissa = from[i] & 0x3ff;
    float x = exponent == 0 ? std::ldexp(static_cast<float>(mantissa), -24)
                            : std::ldexp(static_cast<float>(mantissa | 0x400), exponent - 25);
    if (exponent == 31) x = mantissa == 0 ? INFINITY : NAN;
    to.at[i] = (from[i] & 0x8000) != 0 ? -x : x;
  }
  return bits_of<simde__m512>(to);
}

// Bytes of the first are unsigned, of the second signed; the sums of two products saturate.
inline simde__m512i maddubs_epi16(simde__m512i a, simde__m512i b) {
  struct Bytes {
    std::uint8_t at[64];
  };
  const auto x = bits_of<Bytes>(a), y = bits_of<Bytes>(b);
  Shorts to;
  for (int i = 0; i < 32; ++i) {
    int sum = x.at[2 * i] * static_cast<std::int8_t>(y.at[2 * i]) +
              x.at[2 * i + 1] * static_cast<std::int8_t>(y.at[2 * i + 1]);
    sum = sum > 32767 ? 32767 : sum < -32768 ? -32768 : sum;
    to.at[i] = static_cast<std::uint16_t>(sum);
  }
  return bits_of<simde__m512i>(to);
}

inline simde__m256i cvtepi32_epi16(simde__m512i a) {  // the lower halves
  const auto from = bits_of<Ints>(a);
  std::uint16_t lanes[16];
  for (int i = 0; i < 16; ++i) lanes[i] = static_cast<std::uint16_t>(from.at[i]);
  simde__m256i to;
  std::memcpy(&to, lanes, sizeof to);
  return to;
}

// Groups of four lanes: two of a, then two of b.
inline simde__m512 shuffle_f32x4(simde__m512 a, simde__m512 b, int which) {
  const auto low = bits_of<Floats>(a), high = bits_of<Floats>(b);
  Floats to;
  for (int group = 0; group < 4; ++group) {
    const Floats& from = group < 2 ? low : high;
    std::memcpy(&to.at[4 * group], &from.at[4 * ((which >> (2 * group)) & 3)], 4 * sizeof(float));
  }
  return bits_of<simde__m512>(to);
}

inline float widened(std::uint16_t half) {
  const std::uint32_t bits = static_cast<std::uint32_t>(half) << 16;
  return bits_of<float>(bits);
}

inline float flushed(float x) {  // denormals count as zero, whatever MXCSR says
  return std::fpclassify(x) == FP_SUBNORMAL ? std::copysign(0.0F, x) : x;
}

// Two numbers of each lane, the odd one first, each product fused with its addition.
inline simde__m512 dot_pairs(simde__m512 sums, __m512bh a, __m512bh b) {
  auto to = bits_of<Floats>(sums);
  const auto x = bits_of<Shorts>(a), y = bits_of<Shorts>(b);
  for (int i = 0; i < 16; ++i) {
    for (const int k : {2 * i + 1, 2 * i}) {
      to.at[i] = flushed(
          std::fmaf(flushed(widened(x.at[k])), flushed(widened(y.at[k])), flushed(to.at[i])));
    }
  }
  return bits_of<simde__m512>(to);
}

inline std::uint16_t narrowed(float x) {
  const auto bits = bits_of<std::uint32_t>(flushed(x));
  if (x != x) return 0x7fc0;
  return static_cast<std::uint16_t>((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

// The second, then the first.
inline __m512bh narrow_both(simde__m512 a, simde__m512 b) {
  const auto high = bits_of<Floats>(a), low = bits_of<Floats>(b);
  Shorts to;
  for (int i = 0; i < 16; ++i) {
    to.at[i] = narrowed(low.at[i]);
    to.at[16 + i] = narrowed(high.at[i]);
  }
  return bits_of<__m512bh>(to);
}

}  // namespace emulated

#define _mm512_reduce_max_ps(a) ::emulated::reduce_max(a)
#define _mm512_reduce_add_ps(a) ::emulated::reduce_add(a)
#define _mm512_maskz_loadu_ps(mask, from) ::emulated::maskz_loadu_ps(mask, from)
#define _mm512_maskz_loadu_epi16(mask, from) ::emulated::maskz_loadu_epi16(mask, from)
#define _mm512_insertf32x8(a, b, half) ::emulated::insert(a, b, half)
#define _mm512_cvtepi32_ps(a) ::emulated::cvtepi32_ps(a)
#define _mm512_cvtps_epi32(a) ::emulated::cvtps_epi32(a)
#define _mm512_cvtepu16_epi32(a) ::emulated::cvtepu16_epi32(a)
#undef _mm512_cvtepi8_epi32
#define _mm512_cvtepi8_epi32(a) ::emulated::cvtepi8_epi32(a)
#undef _mm512_cvtph_ps
#define _mm512_cvtph_ps(a) ::emulated::cvtph_ps(a)
#undef _mm512_maddubs_epi16
#define _mm512_maddubs_epi16(a, b) ::emulated::maddubs_epi16(a, b)
#define _mm512_cvtepi32_epi16(a) ::emulated::cvtepi32_epi16(a)
#define _mm512_shuffle_f32x4(a, b, which) ::emulated::shuffle_f32x4(a, b, which)
#define _mm512_srai_epi32(a, count) ::emulated::srai_epi32(a, count)
#undef _mm512_dpbf16_ps
#define _mm512_dpbf16_ps(sums, a, b) ::emulated::dot_pairs(sums, a, b)
#undef _mm512_cvtne2ps_pbh
#define _mm512_cvtne2ps_pbh(a, b) ::emulated::narrow_both(a, b)
// SIMDe 0.7.4 gives this name the arguments of the masked one.
#undef _mm512_madd_epi16
#define _mm512_madd_epi16(a, b) simde_mm512_madd_epi16(a, b)
