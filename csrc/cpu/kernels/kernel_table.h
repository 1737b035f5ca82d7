// Builds the table of one instruction set. VMSERVE_VEC is the header of its `Vec`.
#pragma once

#include "decode.h"
#include "linear.h"
#include "rows.h"
#include "tile.h"
#include "write.h"

namespace vmserve::cpu {
namespace {

template <class T>
constexpr Kernels kernels_of() {
  return {&decode<T>, &tile<T>, &write<T>, &combine<T>};
}

constexpr KernelTable table_of(const char* isa) {
  return {isa,           kernels_of<float>(), kernels_of<Bf16>(), linear_kernels(),
          row_kernels(), &decode_scratch,     &tile_scratch};
}

}  // namespace
}  // namespace vmserve::cpu
