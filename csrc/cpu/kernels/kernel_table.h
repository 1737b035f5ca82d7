// Builds the table of one instruction set. VMSERVE_VEC is the header of its `Vec`.
#pragma once

#include "decode.h"
#include "decode_int8.h"
#include "linear.h"
#include "rows.h"
#include "tile.h"
#include "tile_int8.h"
#include "write.h"

namespace vmserve::cpu {
namespace {

template <class T>
constexpr Kernels kernels_of() {
  return {&decode<T>, &tile<T>, &write<T, T>, &combine<T>};
}

template <class T>
constexpr Kernels code_kernels_of() {
  return {&decode_codes<T>, &tile_codes<T>, &write<T, Code>, &combine<T>};
}

inline size_t most_decode_scratch(std::int32_t q_heads, std::int32_t head_dim) {
  return most(decode_scratch(q_heads, head_dim), decode_codes_scratch(q_heads, head_dim));
}

constexpr KernelTable table_of(const char* isa) {
  return {isa,
          kernels_of<float>(),
          kernels_of<Bf16>(),
          code_kernels_of<float>(),
          code_kernels_of<Bf16>(),
          linear_kernels(),
          row_kernels(),
          &most_decode_scratch,
          &tile_scratch};
}

}  // namespace
}  // namespace vmserve::cpu
