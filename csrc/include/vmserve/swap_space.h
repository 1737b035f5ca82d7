// Blocks in host memory for swapped-out sequences.
//
// Memory is allocated from the driver (page-locked if the device requires it) when needed and freed
// when nothing is swapped out. Adjacent ids are handed out if possible, so that a sequence is
// copied in few runs.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "vmserve/driver.h"
#include "vmserve/page_set.h"

namespace vmserve {

using SwapId = std::int32_t;

constexpr SwapId kNoSwap = -1;

class SwapSpace {
 public:
  SwapSpace(std::shared_ptr<PageDriver> driver, std::int32_t num_groups, std::size_t block_bytes,
            std::int64_t capacity);
  ~SwapSpace();
  SwapSpace(const SwapSpace&) = delete;
  SwapSpace& operator=(const SwapSpace&) = delete;

  std::int64_t capacity() const { return capacity_; }
  std::int64_t num_used() const { return used_.size(); }
  std::int64_t num_free() const { return capacity_ - num_used(); }

  // Allocates memory for every used block. Throws OutOfMemoryError without effect; a later call may
  // succeed.
  void back();
  // Pre: num_free() > 0. The block has no memory until back() is called.
  SwapId take() noexcept;
  void share(SwapId id) noexcept { ++refs_[id]; }
  void drop(SwapId id) noexcept;
  std::int32_t refs(SwapId id) const { return refs_[id]; }

  Address address(std::int32_t group, SwapId id) const;
  // Frees the host memory. Pre: nothing is used. After an error no block has memory; the next call
  // frees the rest.
  void release_memory();

 private:
  // Memory for ids `first` .. `first + count - 1`: [group][block].
  struct Chunk {
    std::int64_t first;
    std::int64_t count;
    Address base;
  };

  std::int64_t num_backed() const;
  void add_chunk(std::int64_t count);
  void free_leftovers();

  std::shared_ptr<PageDriver> driver_;
  std::int32_t num_groups_;
  std::size_t block_bytes_;
  std::int64_t capacity_;
  PageSet used_;
  std::vector<std::int32_t> refs_;
  std::vector<Chunk> chunks_;       // in order of ids
  std::vector<Address> leftovers_;  // allocations that the driver refused to free; unused
};

}  // namespace vmserve
