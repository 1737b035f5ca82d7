// Chooses the instruction set at run time.
#pragma once

#include <string>
#include <vector>

#include "kernels.h"

namespace vmserve::cpu {

// Tables that this processor can execute, best first.
std::vector<const KernelTable*> usable_tables();

// The table named `isa`, or the best if it is "". Throws MisuseError if the processor cannot
// execute it.
const KernelTable& choose_table(const std::string& isa);

}  // namespace vmserve::cpu
