#define VMSERVE_VEC "vec_avx2.h"
#include "delta.h"

namespace vmserve::cpu {

const DeltaKernels& delta_avx2() {
  static constexpr DeltaKernels kernels = delta_kernels();
  return kernels;
}

}  // namespace vmserve::cpu
