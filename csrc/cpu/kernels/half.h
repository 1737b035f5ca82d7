// IEEE half-precision numbers as bits.
#pragma once

#include <string.h>

#include <cstdint>

namespace vmserve::cpu {
namespace {

// Writes the half-precision number that equals x; returns false if there is none.
[[maybe_unused]] bool exact_half(float x, std::uint16_t& half) {
  std::uint32_t bits;
  memcpy(&bits, &x, sizeof bits);
  const std::uint32_t sign = bits >> 16 & 0x8000, mantissa = bits & 0x7fffff;
  const int exponent = static_cast<int>(bits >> 23 & 0xff) - 127;
  half = static_cast<std::uint16_t>(sign);
  if ((bits & 0x7fffffff) == 0) return true;
  if (exponent > 15 || exponent < -24) return false;
  // A subnormal number has fewer bits, among them the leading one.
  const int lost = exponent < -14 ? 13 - 14 - exponent : 13;
  const std::uint32_t whole = exponent < -14 ? mantissa | 0x800000 : mantissa;
  if ((whole & ((1U << lost) - 1)) != 0) return false;
  const std::uint32_t biased = exponent < -14 ? 0 : static_cast<std::uint32_t>(exponent + 15);
  half = static_cast<std::uint16_t>(sign | biased << 10 | whole >> lost);
  return true;
}

[[maybe_unused]] float widened_half(std::uint16_t half) {
  const std::uint32_t magnitude = static_cast<std::uint32_t>(half & 0x7fff) << 13;
  float x;
  memcpy(&x, &magnitude, sizeof x);
  x *= 5.192296858534828e33F;  // 2^112: the exponents' biases differ by so much
  return (half & 0x8000) != 0 ? -x : x;
}

}  // namespace
}  // namespace vmserve::cpu
