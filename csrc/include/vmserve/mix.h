// Hashes many values into one, to compare two states of the ledger. Not cryptographic: see
// prefix_digest.h.
#pragma once

#include <cstdint>

namespace vmserve {

class Mix {
 public:
  template <typename... Values>
  void add(Values... values) {
    (add_one(static_cast<std::uint64_t>(values)), ...);
  }
  std::uint64_t value() const { return value_; }

 private:
  void add_one(std::uint64_t x) {
    x = (x ^ value_) * 0x9E3779B97F4A7C15u;
    value_ = (x ^ (x >> 29)) * 0xBF58476D1CE4E5B9u + 1;
  }

  std::uint64_t value_ = 0;
};

}  // namespace vmserve
