#define VMSERVE_VEC "vec_avx2.h"
#include "kernel_table.h"

namespace vmserve::cpu {
namespace {

constexpr KernelTable kTable = table_of("avx2");

}  // namespace

const KernelTable& avx2_kernels() {
  return kTable;
}

}  // namespace vmserve::cpu
