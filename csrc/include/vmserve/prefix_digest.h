// Digests of prefixes: SHA-256 (FIPS 180-4) chains over blocks of tokens.
//
// digest(block k) = SHA-256(digest(block k - 1) || tokens of block k). The chain starts from a root
// of tenant, salt and generation, which is another one after the cache was cleared. Equal digests
// mean equal prefixes in an equal context, and collisions cannot be constructed.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string>

#include "vmserve/types.h"

namespace vmserve {

using Digest = std::array<std::uint8_t, 32>;

// A digest is uniform: its first bytes are a good hash.
struct DigestHash {
  std::size_t operator()(const Digest& digest) const {
    std::size_t value = 0;
    std::memcpy(&value, digest.data(), sizeof(value));
    return value;
  }
};

Digest sha256(const void* data, std::size_t bytes);

Digest prefix_root(Tenant tenant, std::uint64_t generation, const std::string& salt);
Digest prefix_next(const Digest& parent, const std::int32_t* tokens, std::int32_t num_tokens);

}  // namespace vmserve
