#include "vmserve/prefix_digest.h"

#include <algorithm>
#include <vector>

namespace vmserve {
namespace {

// FIPS 180-4, 4.2.2: the first 32 bits of the fractional parts of the cube roots of the first 64
// primes.
constexpr std::uint32_t kRound[64] = {
    0x428a2f98, 0x71374491, 0xb5c0fbcf, 0xe9b5dba5, 0x3956c25b, 0x59f111f1, 0x923f82a4, 0xab1c5ed5,
    0xd807aa98, 0x12835b01, 0x243185be, 0x550c7dc3, 0x72be5d74, 0x80deb1fe, 0x9bdc06a7, 0xc19bf174,
    0xe49b69c1, 0xefbe4786, 0x0fc19dc6, 0x240ca1cc, 0x2de92c6f, 0x4a7484aa, 0x5cb0a9dc, 0x76f988da,
    0x983e5152, 0xa831c66d, 0xb00327c8, 0xbf597fc7, 0xc6e00bf3, 0xd5a79147, 0x06ca6351, 0x14292967,
    0x27b70a85, 0x2e1b2138, 0x4d2c6dfc, 0x53380d13, 0x650a7354, 0x766a0abb, 0x81c2c92e, 0x92722c85,
    0xa2bfe8a1, 0xa81a664b, 0xc24b8b70, 0xc76c51a3, 0xd192e819, 0xd6990624, 0xf40e3585, 0x106aa070,
    0x19a4c116, 0x1e376c08, 0x2748774c, 0x34b0bcb5, 0x391c0cb3, 0x4ed8aa4a, 0x5b9cca4f, 0x682e6ff3,
    0x748f82ee, 0x78a5636f, 0x84c87814, 0x8cc70208, 0x90befffa, 0xa4506ceb, 0xbef9a3f7, 0xc67178f2};

std::uint32_t rotate(std::uint32_t x, int bits) {
  return (x >> bits) | (x << (32 - bits));
}

using State = std::array<std::uint32_t, 8>;

// 6.2.2: one 64-byte block of the message.
void compress(State& state, const std::uint8_t* block) {
  std::uint32_t w[64];
  for (int t = 0; t < 16; ++t) {
    w[t] = std::uint32_t{block[4 * t]} << 24 | std::uint32_t{block[4 * t + 1]} << 16 |
           std::uint32_t{block[4 * t + 2]} << 8 | std::uint32_t{block[4 * t + 3]};
  }
  for (int t = 16; t < 64; ++t) {
    const std::uint32_t s0 = rotate(w[t - 15], 7) ^ rotate(w[t - 15], 18) ^ (w[t - 15] >> 3);
    const std::uint32_t s1 = rotate(w[t - 2], 17) ^ rotate(w[t - 2], 19) ^ (w[t - 2] >> 10);
    w[t] = w[t - 16] + s0 + w[t - 7] + s1;
  }
  State v = state;  // the working variables a .. h
  for (int t = 0; t < 64; ++t) {
    const std::uint32_t s1 = rotate(v[4], 6) ^ rotate(v[4], 11) ^ rotate(v[4], 25);
    const std::uint32_t choice = (v[4] & v[5]) ^ (~v[4] & v[6]);
    const std::uint32_t t1 = v[7] + s1 + choice + kRound[t] + w[t];
    const std::uint32_t s0 = rotate(v[0], 2) ^ rotate(v[0], 13) ^ rotate(v[0], 22);
    const std::uint32_t majority = (v[0] & v[1]) ^ (v[0] & v[2]) ^ (v[1] & v[2]);
    v = {t1 + s0 + majority, v[0], v[1], v[2], v[3] + t1, v[4], v[5], v[6]};
  }
  for (int i = 0; i < 8; ++i) state[i] += v[i];
}

template <typename T>
void append(std::vector<std::uint8_t>& message, T value) {
  for (std::size_t i = 0; i < sizeof(T); ++i) {
    message.push_back(static_cast<std::uint8_t>(static_cast<std::uint64_t>(value) >> (8 * i)));
  }
}

}  // namespace

Digest sha256(const void* data, std::size_t bytes) {
  const auto* message = static_cast<const std::uint8_t*>(data);
  State state = {0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a,
                 0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19};
  std::size_t done = 0;
  for (; bytes - done >= 64; done += 64) compress(state, message + done);
  // 5.1.1: a one bit, zeros, and the length in bits.
  std::uint8_t tail[128] = {};
  const std::size_t rest = bytes - done;
  std::copy(message + done, message + bytes, tail);
  tail[rest] = 0x80;
  const std::size_t tail_bytes = rest < 56 ? 64 : 128;
  const std::uint64_t bits = static_cast<std::uint64_t>(bytes) * 8;
  for (int i = 0; i < 8; ++i) {
    tail[tail_bytes - 1 - i] = static_cast<std::uint8_t>(bits >> (8 * i));
  }
  for (std::size_t at = 0; at < tail_bytes; at += 64) compress(state, tail + at);
  Digest digest;
  for (int i = 0; i < 32; ++i) {
    digest[i] = static_cast<std::uint8_t>(state[i / 4] >> (24 - 8 * (i % 4)));
  }
  return digest;
}

Digest prefix_root(Tenant tenant, std::uint64_t generation, const std::string& salt) {
  std::vector<std::uint8_t> message;
  append(message, tenant);
  append(message, generation);
  message.insert(message.end(), salt.begin(), salt.end());
  return sha256(message.data(), message.size());
}

Digest prefix_next(const Digest& parent, const std::int32_t* tokens, std::int32_t num_tokens) {
  std::vector<std::uint8_t> message(parent.begin(), parent.end());
  message.reserve(parent.size() + static_cast<std::size_t>(num_tokens) * 4);
  for (std::int32_t i = 0; i < num_tokens; ++i) append(message, tokens[i]);
  return sha256(message.data(), message.size());
}

}  // namespace vmserve
