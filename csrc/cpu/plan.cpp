#include "plan.h"

#include <algorithm>

#include "kernels/kernels.h"

namespace vmserve::cpu {
namespace {

// Rows times heads of a tile item. If a prompt has fewer items than kEnoughTiles, its positions are
// split too, into items of at least kMinTileParts parts. Latents have many more products.
constexpr std::int32_t kTileRows = 96;
constexpr std::int64_t kEnoughTiles = 8, kMinTileParts = 4, kMinLatentParts = 1;
// A chunk, such as a short draft, with at most so many rows times heads of a group is decoded. A
// tile costs as much as with all lanes.
constexpr std::int64_t kDecodedLanes = 32;

std::int64_t round_up(std::int64_t n, std::int64_t multiple) {
  return (n + multiple - 1) / multiple * multiple;
}
std::int64_t divide_up(std::int64_t n, std::int64_t by) {
  return (n + by - 1) / by;
}
std::int64_t num_parts(const WorkItem& item) {
  return divide_up(item.end, kPartTokens) - item.begin / kPartTokens;
}

}  // namespace

Plan::Plan(const CpuBatch& batch, std::int64_t window, std::int64_t q_heads,
           std::int64_t num_threads)
    : window(window),
      q_heads(q_heads),
      kv_heads_(static_cast<std::int32_t>(batch.view().kv_heads())),
      group_(static_cast<std::int32_t>(q_heads / batch.view().kv_heads())),
      head_dim_(static_cast<std::int32_t>(batch.view().head_dim())) {
  // All query heads share a latent, so even a single token has rows enough for a tile.
  const bool latent = batch.view().values_in_keys();
  if (!latent) add_decodes(batch, num_threads);
  for (std::int32_t seq = 0; seq < batch.num_sequences(); ++seq) {
    if (latent || !is_decoded(batch.num_new(seq))) add_tiles(batch, seq);
  }
  const auto cost = [](const WorkItem& item) {
    return (item.end - item.begin) * item.rows * item.kv_heads;
  };
  std::stable_sort(items.begin(), items.end(),
                   [&](const auto& a, const auto& b) { return cost(a) > cost(b); });
  for (const WorkItem& item : items) work += cost(item) * group_ * head_dim_ * 2;
  left_ = std::make_unique<std::atomic<std::int32_t>[]>(merges.size());
}

bool Plan::is_decoded(std::int64_t num_new) const {
  return num_new == 1 || num_new * group_ <= kDecodedLanes;
}

void Plan::add_decodes(const CpuBatch& batch, std::int64_t num_threads) {
  std::vector<WorkItem> decodes;
  std::int64_t parts = 0;
  for (std::int32_t seq = 0; seq < batch.num_sequences(); ++seq) {
    if (!is_decoded(batch.num_new(seq))) continue;
    WorkItem item;
    item.seq = seq;
    item.decode = true;
    item.rows = static_cast<std::int32_t>(batch.num_new(seq));
    item.begin = batch.first_seen(seq, window);
    item.end = batch.num_past(seq) + item.rows;
    max_decode_rows = std::max(max_decode_rows, item.rows);
    parts += num_parts(item);
    decodes.push_back(item);
  }
  // All heads together are read fastest.
  const auto heads = static_cast<std::int32_t>(
      std::min<std::int64_t>(kv_heads_, divide_up(kv_heads_ * parts, num_threads)));
  for (WorkItem item : decodes) {
    for (; item.kv_head < kv_heads_; item.kv_head += heads) {
      item.kv_heads = std::min(heads, kv_heads_ - item.kv_head);
      add_items(item, 1);
    }
  }
}

void Plan::add_tiles(const CpuBatch& batch, std::int32_t seq) {
  const std::int64_t past = batch.num_past(seq), num_new = batch.num_new(seq);
  const std::int64_t tile_rows = std::max(1, kTileRows / group_);
  const std::int64_t num_tiles = divide_up(num_new, tile_rows) * kv_heads_;
  const bool latent = batch.view().values_in_keys();
  // With latents, every sequence has tiles, even one that decodes.
  const std::int64_t all_tiles = latent ? num_tiles * batch.num_sequences() : num_tiles;
  const std::int64_t splits = divide_up(kEnoughTiles, all_tiles);
  const std::int64_t min_parts = latent ? kMinLatentParts : kMinTileParts;
  for (std::int64_t row = 0; row < num_new; row += tile_rows) {
    for (std::int32_t head = 0; head < kv_heads_; ++head) {
      WorkItem item;
      item.seq = seq;
      item.kv_head = head;
      item.row = static_cast<std::int32_t>(row);
      item.rows = static_cast<std::int32_t>(std::min(tile_rows, num_new - row));
      item.begin = window == 0 ? 0 : std::max<std::int64_t>(0, past + row + 1 - window);
      item.end = past + row + item.rows;
      max_rows_and_heads = std::max(max_rows_and_heads, item.rows * group_);
      add_items(item, std::max(divide_up(num_parts(item), splits), min_parts));
    }
  }
}

void Plan::add_items(WorkItem item, std::int64_t parts_of_item) {
  const std::int64_t begin = item.begin, end = item.end;
  if (num_parts(item) <= parts_of_item) {
    items.push_back(item);
    return;
  }
  Merge merge;
  merge.seq = item.seq;
  merge.kv_head = item.kv_head;
  merge.kv_heads = item.kv_heads;
  merge.row = item.row;
  merge.rows = item.rows;
  merge.num_parts = static_cast<std::int32_t>(num_parts(item));
  merge.partial = partial_floats;
  merge.part_stride =
      round_up(item.rows * item.kv_heads * group_ * cpu::partial_floats(head_dim_), 16);
  for (std::int64_t at = begin; at < end; at = item.end, ++merge.num_items) {
    item.begin = at;
    item.end = std::min(end, (at / kPartTokens + parts_of_item) * kPartTokens);
    item.merge = static_cast<std::int32_t>(merges.size());
    item.partial = partial_floats;
    partial_floats += num_parts(item) * merge.part_stride;
    items.push_back(item);
  }
  merges.push_back(merge);
}

void Plan::restart() {
  for (std::size_t i = 0; i < merges.size(); ++i) {
    left_[i].store(merges[i].num_items, std::memory_order_relaxed);
  }
}

bool Plan::finish_item(std::int32_t merge) {
  return left_[static_cast<std::size_t>(merge)].fetch_sub(1, std::memory_order_acq_rel) == 1;
}

}  // namespace vmserve::cpu
