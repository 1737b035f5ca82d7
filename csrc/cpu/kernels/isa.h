// Which instruction set's kernels run.
#pragma once

#include <string>
#include <vector>

#include "kernels.h"

namespace vmserve::cpu {

// Those that this processor executes, best first.
std::vector<const KernelTable*> usable_tables();

// The one of that name, or the best (""). Throws MisuseError for one that it does not execute.
const KernelTable& choose_table(const std::string& isa);

}  // namespace vmserve::cpu
