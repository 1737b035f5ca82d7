#include "vmserve/checksum.h"

#include <algorithm>
#include <cstring>

namespace vmserve {
namespace {

constexpr std::uint32_t kPolynomial = 0x82f63b78;  // 0x1edc6f41 with its bits reversed

using Tables = std::array<std::array<std::uint32_t, 256>, 8>;

Tables make_tables() {
  Tables tables{};
  for (std::uint32_t i = 0; i < 256; ++i) {
    std::uint32_t crc = i;
    for (int bit = 0; bit < 8; ++bit) crc = (crc >> 1) ^ ((crc & 1) != 0 ? kPolynomial : 0);
    tables[0][i] = crc;
  }
  for (std::size_t k = 1; k < 8; ++k) {
    for (std::size_t i = 0; i < 256; ++i) {
      const std::uint32_t before = tables[k - 1][i];
      tables[k][i] = (before >> 8) ^ tables[0][before & 0xff];
    }
  }
  return tables;
}

std::uint32_t next_by_table(std::uint32_t crc, std::uint64_t word) {
  static const Tables tables = make_tables();
  word ^= crc;
  std::uint32_t result = 0;
  for (int k = 0; k < 8; ++k) {
    result ^= tables[static_cast<std::size_t>(7 - k)][(word >> (8 * k)) & 0xff];
  }
  return result;
}

#if defined(__x86_64__)
__attribute__((target("sse4.2"))) Checksum checksum_by_instruction(const void* data,
                                                                   std::size_t bytes) {
  const auto* at = static_cast<const std::uint8_t*>(data);
  std::uint64_t a = ~0u, b = ~0u, c = ~0u, d = ~0u;
  std::uint64_t words[4];
  std::size_t left = bytes;
  for (; left >= sizeof(words); left -= sizeof(words), at += sizeof(words)) {
    std::memcpy(words, at, sizeof(words));
    a = __builtin_ia32_crc32di(a, words[0]);
    b = __builtin_ia32_crc32di(b, words[1]);
    c = __builtin_ia32_crc32di(c, words[2]);
    d = __builtin_ia32_crc32di(d, words[3]);
  }
  if (left > 0) {
    std::memset(words, 0, sizeof(words));
    std::memcpy(words, at, left);
    a = __builtin_ia32_crc32di(a, words[0]);
    b = __builtin_ia32_crc32di(b, words[1]);
    c = __builtin_ia32_crc32di(c, words[2]);
    d = __builtin_ia32_crc32di(d, words[3]);
  }
  return {~static_cast<std::uint32_t>(a), ~static_cast<std::uint32_t>(b),
          ~static_cast<std::uint32_t>(c), ~static_cast<std::uint32_t>(d)};
}
#endif

}  // namespace

Checksum checksum_by_table(const void* data, std::size_t bytes) {
  const auto* at = static_cast<const std::uint8_t*>(data);
  Checksum lanes{~0u, ~0u, ~0u, ~0u};
  for (std::size_t done = 0; done < bytes; done += 32) {
    std::uint64_t words[4] = {};  // the last group is filled up with zeros
    std::memcpy(words, at + done, std::min<std::size_t>(32, bytes - done));
    for (std::size_t i = 0; i < 4; ++i) lanes[i] = next_by_table(lanes[i], words[i]);
  }
  for (std::uint32_t& lane : lanes) lane = ~lane;
  return lanes;
}

Checksum checksum(const void* data, std::size_t bytes) {
#if defined(__x86_64__)
  static const bool has_instruction = __builtin_cpu_supports("sse4.2") != 0;
  if (has_instruction) return checksum_by_instruction(data, bytes);
#endif
  return checksum_by_table(data, bytes);
}

}  // namespace vmserve
