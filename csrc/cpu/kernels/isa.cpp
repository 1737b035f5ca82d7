#include "isa.h"

#ifdef VMSERVE_X86_KERNELS
#include <cpuid.h>
#endif

#include "delta_kernels.h"
#include "vmserve/errors.h"

namespace vmserve::cpu {

#ifdef VMSERVE_X86_KERNELS
namespace {

// AVX512_BF16. Asks CPUID because not every compiler has a name for it.
bool multiplies_bf16() {
  unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
  return __get_cpuid_count(7, 1, &eax, &ebx, &ecx, &edx) != 0 && (eax & (1U << 5)) != 0;
}

}  // namespace
#endif

std::vector<const KernelTable*> usable_tables() {
  std::vector<const KernelTable*> tables;
#ifdef VMSERVE_EMULATED_AVX512
  tables = {&avx512_bf16_kernels(), &avx512_vnni_kernels(), &avx512_kernels()};
#endif
#ifdef VMSERVE_X86_KERNELS
  // __builtin_cpu_supports also checks that the system saves the registers.
  __builtin_cpu_init();
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
                    __builtin_cpu_supports("f16c");
  const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") &&
                      __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
                      __builtin_cpu_supports("avx512vl");
  const bool vnni = avx512 && __builtin_cpu_supports("avx512vnni");
  if (vnni && multiplies_bf16()) tables.push_back(&avx512_bf16_kernels());
  if (vnni) tables.push_back(&avx512_vnni_kernels());
  if (avx512) tables.push_back(&avx512_kernels());
  if (avx2) tables.push_back(&avx2_kernels());
#endif
  tables.push_back(&generic_kernels());
  tables.push_back(&generic16_kernels());
  return tables;
}

const KernelTable& choose_table(const std::string& isa) {
  std::string names;
  for (const KernelTable* table : usable_tables()) {
    if (isa.empty() || isa == table->isa) return *table;
    names += (names.empty() ? "" : ", ") + std::string(table->isa);
  }
  throw MisuseError("instruction set '" + isa + "': this processor has kernels for " + names);
}

const DeltaKernels& choose_delta_kernels([[maybe_unused]] const std::string& isa) {
#ifdef VMSERVE_X86_KERNELS
  if (isa.rfind("avx512", 0) == 0) return delta_avx512();
  if (isa == "avx2") return delta_avx2();
#endif
  return delta_generic();
}

}  // namespace vmserve::cpu
