// Blocks in host memory, for sequences that wait their turn.
//
// Memory is taken from the driver (page-locked where the device wants it so) when it is needed, and
// goes back when nothing is swapped. Adjacent ids are handed out where possible, so that a sequence
// is copied in few runs.
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

  // Memory behind every used block, or OutOfMemoryError and nothing changed: what the system does
  // not have now it may have later.
  void back();
  // Pre: num_free() > 0. Nothing is behind it until back() has seen to it.
  SwapId take() noexcept;
  void share(SwapId id) noexcept { ++refs_[id]; }
  void drop(SwapId id) noexcept;
  std::int32_t refs(SwapId id) const { return refs_[id]; }

  Address address(std::int32_t group, SwapId id) const;
  // Gives the host memory back. Pre: nothing is used. After an error no block is backed any more;
  // what is left goes back with the next call.
  void release_memory();

 private:
  // Memory behind `count` ids from `first` on: [group][block].
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
  std::vector<Chunk> chunks_;       // by their ids
  std::vector<Address> leftovers_;  // back no block: the driver refused to free them
};

}  // namespace vmserve
