#include "vmserve/text.h"

#include <array>
#include <cstdio>
#include <system_error>

namespace vmserve {

std::string with_commas(std::int64_t n) {
  std::string digits = std::to_string(n);
  const std::size_t stop = n < 0 ? 1 : 0;
  for (std::size_t at = digits.size(); at > stop + 3;) digits.insert(at -= 3, ",");
  return digits;
}

std::string human_bytes(std::uint64_t bytes) {
  static constexpr std::array<const char*, 6> kUnits = {"B", "KiB", "MiB", "GiB", "TiB", "PiB"};
  double value = static_cast<double>(bytes);
  std::size_t unit = 0;
  while (value >= 1024 && unit + 1 < kUnits.size()) {
    value /= 1024;
    ++unit;
  }
  std::array<char, 32> text{};
  std::snprintf(text.data(), text.size(), unit == 0 ? "%.0f %s" : "%.1f %s", value, kUnits[unit]);
  return text.data();
}

std::string errno_text(int code) {
  return std::generic_category().message(code);
}

}  // namespace vmserve
