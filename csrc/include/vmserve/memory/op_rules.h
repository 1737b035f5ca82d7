// The rules of ops, whatever the kinds of layers.
#pragma once

#include <vector>

#include "vmserve/memory/kind.h"

namespace vmserve {

// Throws MisuseError unless the merged ops follow the rules of `Op`.
void validate(const std::vector<Op>& ops, const Books& books, const Kinds& kinds);
// One kGrow per sequence, after all other ops; parents of forks last. Returns whether `merged` is
// what `ops` was. Throws MisuseError for sequences that are not open.
bool merge_grows(const std::vector<Op>& ops, const Books& books, std::vector<Op>& merged);
// Compacting evicts cached blocks of split pages, which an attach relies on.
bool has_attach(const std::vector<Op>& ops);

}  // namespace vmserve
