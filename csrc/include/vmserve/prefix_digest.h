// Names of prefixes: SHA-256 (FIPS 180-4) chains over blocks of tokens.
//
// digest(block k) = SHA-256(digest(block k - 1) || tokens of block k), and the chain starts from a
// root made of tenant, salt and the epoch of the weights: equal digests mean equal prefixes in an
// equal context, and nobody can make two that collide.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string>

#include "vmserve/types.h"

namespace vmserve {

using Digest = std::array<std::uint8_t, 32>;

// A digest is uniform already: its first bytes are a good hash.
struct DigestHash {
  std::size_t operator()(const Digest& digest) const {
    std::size_t value = 0;
    std::memcpy(&value, digest.data(), sizeof(value));
    return value;
  }
};

Digest sha256(const void* data, std::size_t bytes);

Digest prefix_root(Tenant tenant, std::uint64_t weights_epoch, const std::string& salt);
Digest prefix_next(const Digest& parent, const std::int32_t* tokens, std::int32_t num_tokens);

}  // namespace vmserve
