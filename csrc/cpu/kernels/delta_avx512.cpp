#define VMSERVE_VEC "vec_avx512.h"
#include "delta.h"

namespace vmserve::cpu {

const DeltaKernels& delta_avx512() {
  static constexpr DeltaKernels kernels = delta_kernels();
  return kernels;
}

}  // namespace vmserve::cpu
