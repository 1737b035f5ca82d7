// AVX-512 with VDPBF16PS (Cooper Lake, Zen 4 and later): adds products of bfloat16 pairs in linear
// layers and attention to the table of avx512_vnni.
#define VMSERVE_DOTS_PAIRS
#define VMSERVE_VEC "vec_avx512.h"
#include "decode.h"
#include "linear.h"
#include "tile.h"

namespace vmserve::cpu {
namespace {

KernelTable with_pairs(KernelTable table) {
  table.isa = "avx512_bf16";
  table.bf16.decode = &decode<Bf16>;
  table.bf16.tile = &tile<Bf16>;
  table.linear.forms[kWeightsBFloat16Pairs] = form_of<PairedBf16, Bf16>();
  return table;
}

}  // namespace

const KernelTable& avx512_bf16_kernels() {
  static const KernelTable table = with_pairs(avx512_vnni_kernels());
  return table;
}

}  // namespace vmserve::cpu
