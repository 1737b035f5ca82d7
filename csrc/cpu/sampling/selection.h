// Limits in an order of values, without sorting them.
#pragma once

#include <cstdint>

namespace vmserve::sampling {

// Room for limit_of, of `capacity` values.
struct SelectionRoom {
  static constexpr int kBinBits = 8;
  struct Bin {
    double mass;
    std::int64_t num;
  };

  std::uint32_t* keys;  // [capacity]
  float* masses;        // [capacity]
  Bin bins[1 << kBinBits];
};

// What comes before the limit: all above `value`, and of its equals the first num_equal.
struct Limit {
  float value;
  std::int64_t num_equal;
};

// The shortest beginning of the values, ordered downwards, that has `mass` or more; everything if
// there is not as much. At least one value. `masses`: of each value, the same for equals, or null
// where each counts 1. No value is NaN; 0 and -0 are equal. Pre: num > 0. Linear in it.
Limit limit_of(const float* values, const float* masses, std::int64_t num, double mass,
               SelectionRoom& room);

}  // namespace vmserve::sampling
