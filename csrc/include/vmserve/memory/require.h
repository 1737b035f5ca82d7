// Checks of callers' preconditions.
#pragma once

#include "vmserve/errors.h"

namespace vmserve {

// Throws MisuseError unless `holds`. `text` is a function, so that a message is built only for an
// error.
template <typename Text>
void require(bool holds, Text text) {
  if (!holds) throw MisuseError(text());
}

// For a plan that is to be applied and was made for another state of the memory.
[[noreturn]] inline void refuse_stale() {
  throw MisuseError("the plan is stale: something was changed or released since; plan again");
}

}  // namespace vmserve
