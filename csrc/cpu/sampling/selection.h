// Limits in an ordered list of values, found without sorting.
#pragma once

#include <cstdint>

namespace vmserve::sampling {

// Buffers of limit_of for `capacity` values.
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

// Keeps all values above `value` and the first num_equal that are equal to it.
struct Limit {
  float value;
  std::int64_t num_equal;
};

// The limit of the shortest prefix of the values, in descending order, with at least `mass`; all
// values if there is less. At least one value. `masses`: one for each value, the same for equal
// values; null: each counts 1. No value is NaN; 0 and -0 are equal. Pre: num > 0. Takes linear
// time.
Limit limit_of(const float* values, const float* masses, std::int64_t num, double mass,
               SelectionRoom& room);

}  // namespace vmserve::sampling
