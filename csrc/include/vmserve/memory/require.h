// Preconditions of the callers.
#pragma once

#include "vmserve/errors.h"

namespace vmserve {

// Throws MisuseError. `text` is a function: nobody builds a message that nobody reads.
template <typename Text>
void require(bool holds, Text text) {
  if (!holds) throw MisuseError(text());
}

}  // namespace vmserve
