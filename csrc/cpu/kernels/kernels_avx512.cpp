#define VMSERVE_VEC "vec_avx512.h"
#include "kernel_table.h"

namespace vmserve::cpu {
namespace {

constexpr KernelTable kTable = table_of("avx512");

}  // namespace

const KernelTable& avx512_kernels() {
  return kTable;
}

}  // namespace vmserve::cpu
