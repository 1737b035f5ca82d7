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

}  // namespace vmserve
