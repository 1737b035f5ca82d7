// Radix selection over the bits of floats, highest bits first. Sums the mass of each bin, then
// continues with the next bits of the values in the limit's bin. Linear for all inputs.
#include "selection.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <utility>

namespace vmserve::sampling {
namespace {

// An unsigned number with the order of the floats.
std::uint32_t key_of(float value) {
  const float unsigned_zero = value + 0.0F;
  std::uint32_t bits;
  std::memcpy(&bits, &unsigned_zero, sizeof bits);
  return (bits >> 31) != 0 ? ~bits : bits | 0x80000000U;
}

float value_of(std::uint32_t key) {
  const std::uint32_t bits = (key >> 31) != 0 ? key & 0x7fffffffU : ~key;
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

struct Found {
  std::uint32_t bin;
  double above;  // mass of the bins above
};

// The bin where the mass from above reaches `mass`, else the lowest bin that is not empty; and
// whether it was reached.
std::pair<Found, bool> find_bin(const SelectionRoom::Bin* bins, std::uint32_t last_bin,
                                double above, double mass) {
  Found lowest{0, above};
  for (std::uint32_t i = 0; i <= last_bin; ++i) {
    const std::uint32_t bin = last_bin - i;
    if (bins[bin].num == 0) continue;
    lowest = {bin, above};
    if (above + bins[bin].mass >= mass) return {lowest, true};
    above += bins[bin].mass;
  }
  return {lowest, false};
}

}  // namespace

Limit limit_of(const float* values, const float* masses, std::int64_t num, double mass,
               SelectionRoom& room) {
  std::uint32_t lowest = UINT32_MAX, highest = 0;
  for (std::int64_t i = 0; i < num; ++i) {
    const std::uint32_t key = key_of(values[i]);
    lowest = std::min(lowest, key);
    highest = std::max(highest, key);
    room.keys[i] = key;
    room.masses[i] = masses == nullptr ? 1.0F : masses[i];
  }
  // Bins cover the range between the smallest and largest key; else most values would share a few.
  int num_bits = 0;
  while (num_bits < 32 && (highest - lowest) >> num_bits != 0) ++num_bits;
  std::int64_t left = num;
  double above = 0.0;
  for (bool is_first = true; num_bits > 0; is_first = false) {
    const int level_bits = std::min(num_bits, SelectionRoom::kBinBits);
    num_bits -= level_bits;
    const std::uint32_t last_bin = (1U << level_bits) - 1U;
    const auto bin_of = [=](std::uint32_t key) { return (key - lowest) >> num_bits & last_bin; };
    std::fill_n(room.bins, last_bin + 1, SelectionRoom::Bin{0.0, 0});
    for (std::int64_t i = 0; i < left; ++i) {
      SelectionRoom::Bin& bin = room.bins[bin_of(room.keys[i])];
      bin.mass += static_cast<double>(room.masses[i]);
      ++bin.num;
    }
    const auto [found, is_reached] = find_bin(room.bins, last_bin, above, mass);
    // At later levels, sums in another order may miss `mass` by a rounding error: use the lowest
    // bin.
    if (!is_reached && is_first) return {-INFINITY, num};
    above = found.above;
    std::int64_t kept = 0;
    for (std::int64_t i = 0; i < left; ++i) {
      room.keys[kept] = room.keys[i];
      room.masses[kept] = room.masses[i];
      kept += bin_of(room.keys[i]) == found.bin ? 1 : 0;
    }
    left = kept;
  }
  const auto each = static_cast<double>(room.masses[0]);
  const double wanted = each > 0.0 ? std::ceil((mass - above) / each) : 1.0;
  const double num_equal = std::clamp(wanted, 1.0, static_cast<double>(left));
  return {value_of(room.keys[0]), static_cast<std::int64_t>(num_equal)};
}

}  // namespace vmserve::sampling
