// AVX-512 with VPDPWSSD and VPDPBUSD (Cascade Lake, Zen 4 and later): products of int8 weights, the
// rest as without them.
#define VMSERVE_DOTS_BYTES
#define VMSERVE_VEC "vec_avx512.h"
#include "linear.h"

namespace vmserve::cpu {
namespace {

KernelTable with_bytes(KernelTable table) {
  table.isa = "avx512_vnni";
  table.linear.linear[static_cast<int>(WeightType::kInt8)] = &linear<Int8<std::int16_t>>;
  table.linear.linear_bytes = &linear<Int8<std::int8_t>>;
  table.linear.pack_rows = &pack_rows;
  return table;
}

}  // namespace

const KernelTable& avx512_vnni_kernels() {
  static const KernelTable table = with_bytes(avx512_kernels());
  return table;
}

}  // namespace vmserve::cpu
