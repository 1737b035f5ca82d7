// Plain C++ in the shape of the AVX-512 kernels, for tests on processors without AVX-512.
#define VMSERVE_GENERIC_WIDTH 16
#define VMSERVE_VEC "vec_generic.h"
#include "kernel_table.h"

namespace vmserve::cpu {
namespace {

constexpr KernelTable kTable = table_of("generic16");

}  // namespace

const KernelTable& generic16_kernels() {
  return kTable;
}

}  // namespace vmserve::cpu
