// AVX-512 with VDPBF16PS (Cooper Lake, Zen 4 and later): one more product, the rest as without it.
#define VMSERVE_DOTS_PAIRS
#define VMSERVE_VEC "vec_avx512.h"
#include "linear.h"

namespace vmserve::cpu {
namespace {

KernelTable with_pairs(KernelTable table) {
  table.isa = "avx512_bf16";
  table.linear.linear_pairs = &linear<PairedBf16>;
  return table;
}

}  // namespace

const KernelTable& avx512_bf16_kernels() {
  static const KernelTable table = with_pairs(avx512_kernels());
  return table;
}

}  // namespace vmserve::cpu
