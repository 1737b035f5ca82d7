#include "vmserve/swap_space.h"

#include <algorithm>

#include "vmserve/errors.h"

namespace vmserve {

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
    driver_->fence();  // copies may still be on their way, also those of plans that were undone
    release_memory();
  } catch (const Error&) {
    // In a fork, or with the device lost: the driver frees it when it goes.
  }
}

void SwapSpace::reserve(std::int64_t count) {
  const auto backed = [&] { return static_cast<std::int64_t>(chunks_.size()) * kChunkBlocks; };
  while (std::min(backed(), capacity_) - num_used() < count) {
    std::vector<Address> chunk;
    chunk.reserve(static_cast<std::size_t>(num_groups_));
    chunks_.reserve(chunks_.size() + 1);
    leftovers_.reserve(leftovers_.size() + chunk.capacity());
    try {
      for (std::int32_t group = 0; group < num_groups_; ++group) {
        chunk.push_back(driver_->alloc_host(block_bytes_ * kChunkBlocks));
      }
    } catch (const Error&) {
      leftovers_.insert(leftovers_.end(), chunk.begin(), chunk.end());
      try {
        free_leftovers();
      } catch (const Error&) {
        // Why the memory was not to be had is what the caller wants to know.
      }
      throw;
    }
    chunks_.push_back(std::move(chunk));
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
  return chunks_[id / kChunkBlocks][group] +
         static_cast<std::size_t>(id % kChunkBlocks) * block_bytes_;
}

void SwapSpace::release_memory() {
  // A chunk that is freed in part backs nothing: none counts any more before the first one goes.
  for (const std::vector<Address>& chunk : chunks_) {
    leftovers_.insert(leftovers_.end(), chunk.begin(), chunk.end());
  }
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
