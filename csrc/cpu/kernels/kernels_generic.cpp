#define VMSERVE_VEC "vec_generic.h"
#include "kernel_table.h"

namespace vmserve::cpu {
namespace {

constexpr KernelTable kTable = table_of("generic");

}  // namespace

const KernelTable& generic_kernels() {
  return kTable;
}

}  // namespace vmserve::cpu
