// AVX-512 with VPDPWSSD and VPDPBUSD (Cascade Lake, Zen 4 and later): replaces products of int8
// weights, and attention over a KV cache of 8 bits, in the table of avx512.
#define VMSERVE_DOTS_BYTES
#define VMSERVE_VEC "vec_avx512.h"
#include "decode_int8.h"
#include "linear.h"
#include "tile_int8.h"

namespace vmserve::cpu {
namespace {

KernelTable with_bytes(KernelTable table) {
  table.isa = "avx512_vnni";
  table.linear.forms[kWeightsInt8] = form_of<Int8<std::int16_t>>();
  table.linear.forms[kWeightsInt8Bytes] = form_of<Int8<std::int8_t>, Int8<std::int16_t>>();
  table.linear.pack_rows[kRowsInt8] = &pack_rows<std::int8_t>;
  set_grouped_forms(table.linear);
  table.f32_int8.decode = &decode_codes<float>;
  table.f32_int8.tile = &tile_codes<float>;
  table.bf16_int8.decode = &decode_codes<Bf16>;
  table.bf16_int8.tile = &tile_codes<Bf16>;
  return table;
}

}  // namespace

const KernelTable& avx512_vnni_kernels() {
  static const KernelTable table = with_bytes(avx512_kernels());
  return table;
}

}  // namespace vmserve::cpu
