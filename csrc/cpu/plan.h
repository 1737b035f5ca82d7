// The work items of one step's attention.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <vector>

#include "attention.h"

namespace vmserve::cpu {

// A decode item is one query row with all its heads; any other item is `rows` rows of one KV head.
// Both cover positions [begin, end).
struct WorkItem {
  std::int32_t seq = 0, kv_head = 0, row = 0, rows = 1;
  bool decode = false;
  std::int64_t begin = 0, end = 0;
  std::int32_t merge = -1;    // index of the merge of its part; -1: it has no other parts
  std::int64_t partial = -1;  // offset in the partial outputs, in floats
};

// Parts of the same rows. The thread that finishes the last part merges all of them, in order.
struct Merge {
  std::int32_t seq = 0, kv_head = 0, row = 0, rows = 1;
  bool decode = false;
  std::int32_t num_parts = 0;
  std::int64_t partial = 0, part_stride = 0;
};

class Plan {
 public:
  Plan(const CpuBatch& batch, std::int64_t window, std::int64_t q_heads);

  std::int64_t window, q_heads;
  std::vector<WorkItem> items;  // most work first
  std::vector<Merge> merges;
  std::int64_t partial_floats = 0;
  std::int32_t max_rows_and_heads = 0;  // of items that are not decodes
  std::int64_t work = 0;                // multiplications

  void restart();
  // Counts a finished part. True for the last one of its merge.
  bool finish_part(std::int32_t merge);

 private:
  void add_decode(const CpuBatch& batch, std::int32_t seq);
  void add_tiles(const CpuBatch& batch, std::int32_t seq);
  void add_parts(WorkItem item, std::int64_t part_tokens, std::int64_t align);

  std::int32_t kv_heads_, group_, head_dim_;
  std::unique_ptr<std::atomic<std::int32_t>[]> left_;
};

}  // namespace vmserve::cpu
