// Codes of quantized blocks in GGUF files, one to a byte, as GroupedTensor has them.
#pragma once

#include <cstdint>
#include <string>

namespace vmserve {

// A type of blocks. `unpack` writes `elements` codes of a block of `bytes`; scales are left out.
struct GgufBlocks {
  std::int64_t elements, bytes;
  void (*unpack)(const std::uint8_t* block, std::uint8_t* codes);
};

// Null for a type that is not quantized or not known.
const GgufBlocks* gguf_blocks(const std::string& name);

}  // namespace vmserve
