#include "vmserve/swap_space.h"

#include <algorithm>
#include <iterator>

#include "vmserve/errors.h"

namespace vmserve {
namespace {

// Bytes of one allocation, at least, if available: few allocations with little waste.
constexpr std::size_t kChunkBytes = std::size_t{16} << 20;

}  // namespace

SwapSpace::SwapSpace(std::shared_ptr<PageDriver> driver, std::int32_t num_groups,
                     std::size_t block_bytes, std::int64_t capacity)
    : driver_(std::move(driver)),
      num_groups_(num_groups),
      block_bytes_(block_bytes),
      capacity_(capacity),
      used_(capacity),
      refs_(static_cast<std::size_t>(capacity)) {}

SwapSpace::~SwapSpace() {
  if (chunks_.empty() && leftovers_.empty()) return;
  try {
    driver_->fence();  // copies may be in flight, also those of changes that were undone
    release_memory();
  } catch (const Error&) {
    // In a fork, or if the device is lost, the driver frees the memory.
  }
}

std::int64_t SwapSpace::num_backed() const {
  return chunks_.empty() ? 0 : chunks_.back().first + chunks_.back().count;
}

// One allocation for all groups: the system's limits are checked for all together, and a refusal
// leaves nothing allocated.
void SwapSpace::add_chunk(std::int64_t count) {
  chunks_.reserve(chunks_.size() + 1);
  leftovers_.reserve(leftovers_.size() + chunks_.capacity());
  const std::size_t bytes = block_bytes_ * static_cast<std::size_t>(num_groups_ * count);
  chunks_.push_back({num_backed(), count, driver_->alloc_host(bytes)});
}

void SwapSpace::back() {
  // Ids are taken lowest first: if one has no memory, all before it are used.
  const std::int64_t missing = num_used() - num_backed();
  if (missing <= 0) return;
  const auto bytes = static_cast<std::size_t>(num_groups_) * block_bytes_;
  const std::int64_t more = std::min(
      capacity_ - num_backed(), std::max(missing, static_cast<std::int64_t>(kChunkBytes / bytes)));
  try {
    add_chunk(more);
  } catch (const OutOfMemoryError&) {
    if (more == missing) throw;
    add_chunk(missing);
  }
}

SwapId SwapSpace::take() noexcept {
  const auto id = static_cast<SwapId>(used_.lowest_absent());
  used_.insert(id);
  refs_[id] = 1;
  return id;
}

void SwapSpace::drop(SwapId id) noexcept {
  if (--refs_[id] == 0) used_.erase(id);
}

Address SwapSpace::address(std::int32_t group, SwapId id) const {
  const auto behind =
      std::upper_bound(chunks_.begin(), chunks_.end(), id,
                       [](SwapId wanted, const Chunk& chunk) { return wanted < chunk.first; });
  const Chunk& chunk = *std::prev(behind);
  const std::int64_t place = group * chunk.count + id - chunk.first;
  return chunk.base + static_cast<std::size_t>(place) * block_bytes_;
}

void SwapSpace::release_memory() {
  // Drop all chunks before the first one is freed: an error leaves none in use.
  for (const Chunk& chunk : chunks_) leftovers_.push_back(chunk.base);
  chunks_.clear();
  free_leftovers();
}

void SwapSpace::free_leftovers() {
  while (!leftovers_.empty()) {
    driver_->free_host(leftovers_.back());
    leftovers_.pop_back();
  }
}

}  // namespace vmserve
