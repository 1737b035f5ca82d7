// The work items of one step's attention.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <vector>

#include "attention.h"

namespace vmserve::cpu {

// A decode item is one or few query rows over positions [begin, end) of one part. It has all heads
// or, if there are more threads than parts, some. Any other item is `rows` rows of one KV head over
// positions [begin, end). Latents have no decode items.
struct WorkItem {
  std::int32_t seq = 0, kv_head = 0, kv_heads = 1, row = 0, rows = 1;
  bool decode = false;
  std::int64_t begin = 0, end = 0;
  std::int32_t merge = -1;    // index of the merge of its parts; -1: it covers all of them
  std::int64_t partial = -1;  // offset of its first part in the partial outputs, in floats
};

// Parts of the same rows. The thread that finishes the last item merges all of them, in order.
struct Merge {
  std::int32_t seq = 0, kv_head = 0, kv_heads = 1, row = 0, rows = 1;
  std::int32_t num_items = 0, num_parts = 0;
  std::int64_t partial = 0, part_stride = 0;
};

class Plan {
 public:
  // The result of attention does not depend on num_threads.
  Plan(const CpuBatch& batch, std::int64_t window, std::int64_t q_heads, std::int64_t num_threads);

  std::int64_t window, q_heads;
  std::vector<WorkItem> items;  // most work first
  std::vector<Merge> merges;
  std::int64_t partial_floats = 0;
  std::int32_t max_decode_rows = 1, max_rows_and_heads = 0;  // maxima of decodes, of other items
  std::int64_t work = 0;                                     // multiplications

  void restart();
  // Counts a finished item. True for the last one of its merge.
  bool finish_item(std::int32_t merge);

 private:
  bool is_decoded(std::int64_t num_new) const;
  void add_decodes(const CpuBatch& batch, std::int64_t num_threads);
  void add_tiles(const CpuBatch& batch, std::int32_t seq);
  void add_items(WorkItem item, std::int64_t parts_of_item);

  std::int32_t kv_heads_, group_, head_dim_;
  std::unique_ptr<std::atomic<std::int32_t>[]> left_;
};

}  // namespace vmserve::cpu
