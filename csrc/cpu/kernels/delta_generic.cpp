#define VMSERVE_VEC "vec_generic.h"
#include "delta.h"

namespace vmserve::cpu {

const DeltaKernels& delta_generic() {
  static constexpr DeltaKernels kernels = delta_kernels();
  return kernels;
}

}  // namespace vmserve::cpu
