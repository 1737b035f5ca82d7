#include "gguf_codes.h"

#include <cstring>
#include <map>

namespace vmserve {
namespace {

using Byte = std::uint8_t;

// The low halves of `count` bytes, then the high ones.
void split(const Byte* from, int count, Byte* codes) {
  for (int i = 0; i < count; ++i) {
    codes[i] = from[i] & 15;
    codes[count + i] = static_cast<Byte>(from[i] >> 4);
  }
}

// 32 codes of 4 bits after `kFirst` bytes of scales.
template <int kFirst>
void unpack_4(const Byte* block, Byte* codes) {
  split(block + kFirst, 16, codes);
}

// 32 codes of 5 bits: 32 high bits, then the low halves. A code of 0 stands for -kZero.
template <int kFirst, int kZero>
void unpack_5(const Byte* block, Byte* codes) {
  std::uint32_t high;
  std::memcpy(&high, block + kFirst, sizeof high);
  split(block + kFirst + 4, 16, codes);
  for (int i = 0; i < 32; ++i) {
    codes[i] = static_cast<Byte>((codes[i] | (high >> i & 1) << 4) - kZero);
  }
}

void unpack_8(const Byte* block, Byte* codes) {
  std::memcpy(codes, block + 2, 32);
}

// 32 bytes have one group in their low halves and the next in their high ones.
void unpack_q4_k(const Byte* block, Byte* codes) {
  for (int pair = 0; pair < 4; ++pair) split(block + 16 + 32 * pair, 32, codes + 64 * pair);
}

// As above; byte i of 32 has the high bits of element i of all eight groups.
void unpack_q5_k(const Byte* block, Byte* codes) {
  for (int pair = 0; pair < 4; ++pair) split(block + 48 + 32 * pair, 32, codes + 64 * pair);
  for (int group = 0; group < 8; ++group) {
    for (int i = 0; i < 32; ++i) {
      codes[32 * group + i] |= static_cast<Byte>((block[16 + i] >> group & 1) << 4);
    }
  }
}

// Two halves of 128 columns: four stretches of 32, whose low bits are in 64 bytes and whose pairs
// of high bits are in 32.
void unpack_q6_k(const Byte* block, Byte* codes) {
  for (int half = 0; half < 2; ++half, codes += 128) {
    split(block + 64 * half, 64, codes);
    const Byte* const high = block + 128 + 32 * half;
    for (int stretch = 0; stretch < 4; ++stretch) {
      for (int i = 0; i < 32; ++i) {
        Byte& code = codes[32 * stretch + i];
        code = static_cast<Byte>((code | (high[i] >> 2 * stretch & 3) << 4) - 32);
      }
    }
  }
}

}  // namespace

const GgufBlocks* gguf_blocks(const std::string& name) {
  static const std::map<std::string, GgufBlocks> kTypes = {
      {"Q4_0", {32, 18, &unpack_4<2>}},     {"Q4_1", {32, 20, &unpack_4<4>}},
      {"Q5_0", {32, 22, &unpack_5<2, 16>}}, {"Q5_1", {32, 24, &unpack_5<4, 0>}},
      {"Q8_0", {32, 34, &unpack_8}},        {"Q4_K", {256, 144, &unpack_q4_k}},
      {"Q5_K", {256, 176, &unpack_q5_k}},   {"Q6_K", {256, 210, &unpack_q6_k}},
  };
  const auto found = kTypes.find(name);
  return found == kTypes.end() ? nullptr : &found->second;
}

}  // namespace vmserve
