// A store in which blocks of KV memory outlive the process: a map from the digest of a prefix to
// the bytes of its last block. A store never gives bytes that were not put under the digest.
//
// Digests have a generation in their root. So a cache that was cleared finds nothing that was put
// before, in this process or a later one. The store knows which generation is the newest.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "vmserve/prefix_digest.h"

namespace vmserve {

struct StoreStats {
  std::int64_t written_blocks = 0;
  std::int64_t written_bytes = 0;
  std::int64_t read_blocks = 0;
  std::int64_t read_bytes = 0;
  std::int64_t broken_blocks = 0;   // found to differ from what was put, and removed
  std::int64_t refused_writes = 0;  // refused by the system, or not tried shortly after a refusal
  // Totals of all stores with the same limit.
  std::int64_t evicted_blocks = 0;
  std::int64_t bytes = 0;
};

// Thread-safe; no function throws.
class PageStore {
 public:
  virtual ~PageStore() = default;
  // Whether get() may find the block. Reads no content.
  virtual bool has(const Digest& digest) noexcept = 0;
  // Reads the block to `to`. False if it is not there or not whole; then `to` is undefined.
  virtual bool get(const Digest& digest, void* to, std::size_t bytes) noexcept = 0;
  // Keeps the block, unless it is there already. False if the system refused.
  virtual bool put(const Digest& digest, const void* from, std::size_t bytes) noexcept = 0;
  // Asks the system to have the block ready for get().
  virtual void prefetch(const Digest&) noexcept {}
  // Notes that the block was hit without being read.
  virtual void touch(const Digest&) noexcept {}
  // The generation of the digests in use; at first the newest one when the store was opened.
  virtual std::uint64_t generation() const noexcept = 0;
  // Begins another one, for later processes too; returns it. If another process has begun one
  // since, takes that: engines of one server clear their caches together, and go on sharing.
  virtual std::uint64_t begin_generation() noexcept = 0;
  // Removes blocks that were last used before the generation began.
  virtual void remove_older() noexcept = 0;
  virtual StoreStats stats() const = 0;
  // A new reason why something was not kept or found; empty if there is none. Each is returned
  // once.
  virtual std::string take_message() = 0;
};

}  // namespace vmserve
