// Identifiers of the memory core: small integers that are reused.
#pragma once

#include <cstdint>
#include <limits>

namespace vmserve {

using PageId = std::int32_t;
using BlockId = std::int32_t;
using SlotId = std::int32_t;
using SeqId = std::int32_t;
using Tenant = std::int64_t;
using Epoch = std::uint64_t;

constexpr PageId kNoPage = -1;
constexpr BlockId kNoBlock = -1;
constexpr SlotId kNoSlot = -1;
constexpr SeqId kNoSeq = -1;
// Owner of data that must be cleared before any tenant can read it.
constexpr Tenant kNobody = std::numeric_limits<Tenant>::min();

struct PageRun {
  PageId first;
  PageId count;
};

}  // namespace vmserve
