#include <algorithm>
#include <limits>
#include <string>
#include <utility>

#include "attention.h"
#include "kernels/kernels.h"
#include "plan.h"
#include "vmserve/errors.h"
#include "vmserve/text.h"

namespace vmserve {
namespace {

constexpr std::int64_t kHeadDimStep = 8;
constexpr std::int64_t kMaxTokens = std::numeric_limits<std::int32_t>::max();

std::string text(std::int64_t n) {
  return with_commas(n);
}

void require(bool condition, const std::string& what) {
  if (!condition) throw MisuseError(what);
}

// `text` builds the message only if the check fails, because every sequence of a step is checked.
template <typename Text>
void require_each(bool condition, Text what) {
  if (!condition) throw MisuseError(what());
}

}  // namespace

CpuKvView::CpuKvView(std::vector<TensorRef> keys, std::vector<TensorRef> values)
    : keys_(std::move(keys)), values_(std::move(values)) {
  check_tensors();
}

CpuKvView::CpuKvView(std::vector<TensorRef> keys, std::vector<TensorRef> values,
                     std::vector<const std::int32_t*> tables, std::vector<std::size_t> layer_tables,
                     std::int64_t table_rows, std::int64_t table_width, std::int64_t block_tokens)
    : keys_(std::move(keys)),
      values_(std::move(values)),
      tables_(std::move(tables)),
      layer_tables_(std::move(layer_tables)),
      num_blocks_(tables_.size()),
      table_rows_(table_rows),
      table_width_(table_width),
      block_tokens_(block_tokens) {
  require(!tables_.empty() && table_rows > 0 && table_width > 0, "the block tables are empty");
  require(layer_tables_.size() == keys_.size() &&
              *std::max_element(layer_tables_.begin(), layer_tables_.end()) < tables_.size(),
          "each layer needs one of the block tables");
  check_tensors();
  const std::int64_t page_tokens = keys_[0].shape[1];
  require(
      block_tokens > 0 && page_tokens % block_tokens == 0,
      "pages of " + text(page_tokens) + " tokens are not whole blocks of " + text(block_tokens));
  blocks_per_page_ = page_tokens / block_tokens;
  for (std::size_t layer = 0; layer < keys_.size(); ++layer) {
    std::int64_t& blocks = num_blocks_[layer_tables_[layer]];
    const std::int64_t here = keys_[layer].shape[0] * blocks_per_page_;
    require(blocks == 0 || blocks == here, "layers of one block table differ in pages");
    blocks = here;
    require(blocks <= std::numeric_limits<std::int32_t>::max() && max_len() <= kMaxTokens,
            "an arena of " + text(blocks) + " blocks is more than block ids can name");
  }
}

void CpuKvView::check_tensors() const {
  require(!keys_.empty() && keys_.size() == values_.size(),
          text(static_cast<std::int64_t>(keys_.size())) + " key and " +
              text(static_cast<std::int64_t>(values_.size())) +
              " value tensors: one of each for every layer is needed");
  for (const auto* tensors : {&keys_, &values_}) {
    for (std::size_t layer = 0; layer < tensors->size(); ++layer) {
      const TensorRef& tensor = (*tensors)[layer];
      // Layers of other block tables may have more pages, or fewer.
      const std::vector<std::int64_t>& like = keys_[paged() ? layer : 0].shape;
      require(tensor.shape.size() == 4 && tensor.strides.size() == 4 && like.size() == 4,
              "keys and values are [rows, tokens, kv_heads, head_dim]");
      require(tensor.shape == like && tensor.dtype == keys_[0].dtype &&
                  std::equal(like.begin() + 1, like.end(), keys_[0].shape.begin() + 1),
              "keys and values of all layers must have one shape and dtype");
      require(tensor.strides[3] == 1, "head_dim of keys and values must be contiguous");
      require(
          tensor.dtype != DType::kInt8 || tensor.strides[2] >= tensor.shape[3] + cpu::kScaleBytes,
          "rows of 8 bits need 4 bytes behind them for their scale");
    }
  }
  for (const TensorRef& tensor : keys_) {
    require(*std::min_element(tensor.shape.begin(), tensor.shape.end()) > 0,
            "keys and values are empty");
  }
  require(head_dim() % kHeadDimStep == 0 && head_dim() <= cpu::kMaxHeadDim,
          "head_dim " + text(head_dim()) + " is not a multiple of " + text(kHeadDimStep) +
              " up to " + text(cpu::kMaxHeadDim));
  require(keys_[0].shape[1] <= kMaxTokens && kv_heads() <= 4096,
          "keys and values of " + text(keys_[0].shape[1]) + " tokens and " + text(kv_heads()) +
              " heads are more than the kernels count");
}

void CpuKvView::set_states(const TensorRef& pages, const std::int32_t* table,
                           std::int64_t table_rows, std::int64_t table_width) {
  require(pages.dtype == DType::kFloat32 && pages.shape.size() == 2 && pages.strides[1] == 1 &&
              pages.shape[0] > 0 && pages.shape[1] > 0,
          "pages of states are float32 [pages, floats]");
  require(table_rows > 0 && table_width > 0, "the table of states is empty");
  states_ = pages;
  state_table_ = table;
  state_table_rows_ = table_rows;
  state_table_width_ = table_width;
}

CpuBatch::CpuBatch(std::shared_ptr<const CpuKvView> view, std::vector<std::int64_t> places,
                   std::vector<std::int64_t> num_past, std::vector<std::int64_t> num_new,
                   const std::vector<std::int64_t>& state_places)
    : view_(std::move(view)),
      places_(std::move(places)),
      num_past_(std::move(num_past)),
      num_new_(std::move(num_new)) {
  check_sequences();
  starts_.reserve(num_new_.size());
  for (const std::int64_t count : num_new_) {
    starts_.push_back(num_tokens_);
    num_tokens_ += count;
  }
  require(num_tokens_ <= kMaxTokens, text(num_tokens_) + " tokens are more than a batch holds");
  if (view_->paged()) copy_tables();
  if (view_->state_floats() > 0) find_states(state_places.empty() ? places_ : state_places);
}

CpuBatch::~CpuBatch() = default;

std::int64_t CpuBatch::last_position() const {
  std::int64_t last = -1;
  for (std::int64_t i = 0; i < num_sequences(); ++i) {
    last = std::max(last, num_past(i) + num_new(i) - 1);
  }
  return last;
}

void CpuBatch::check_sequences() const {
  require(places_.size() == num_past_.size() && places_.size() == num_new_.size(),
          "places, num_past and num_new differ in length");
  for (std::size_t i = 0; i < places_.size(); ++i) {
    require_each(places_[i] >= 0 && places_[i] < view_->num_places(), [&] {
      return "place " + text(places_[i]) + " is outside 0 .. " + text(view_->num_places() - 1);
    });
    require_each(num_past_[i] >= 0 && num_new_[i] > 0 && num_past_[i] <= view_->max_len() &&
                     num_new_[i] <= view_->max_len() - num_past_[i],
                 [&] {
                   return text(num_past_[i]) + " past and " + text(num_new_[i]) +
                          " new tokens in place " + text(places_[i]) + ", which holds 1 to " +
                          text(view_->max_len());
                 });
  }
  std::vector<std::int64_t> sorted = places_;
  std::sort(sorted.begin(), sorted.end());
  const auto twice = std::adjacent_find(sorted.begin(), sorted.end());
  require(twice == sorted.end(),
          "place " + text(twice == sorted.end() ? 0 : *twice) + " is there twice in one batch");
}

void CpuBatch::copy_tables() {
  const std::int64_t block_tokens = view_->block_tokens_;
  for (std::size_t table = 0; table < view_->tables_.size(); ++table) {
    const std::int64_t num_blocks = view_->num_blocks_[table];
    for (std::size_t i = 0; i < places_.size(); ++i) {
      const std::int64_t count = (num_past_[i] + num_new_[i] + block_tokens - 1) / block_tokens;
      const std::int32_t* const row = view_->tables_[table] + places_[i] * view_->table_width_;
      block_starts_.push_back(static_cast<std::int64_t>(blocks_.size()));
      blocks_.insert(blocks_.end(), row, row + count);
      std::int64_t usable = count;
      while (usable > 0 && row[usable - 1] >= 0 && row[usable - 1] < num_blocks) --usable;
      usable_from_.push_back(usable * block_tokens);
    }
  }
}

void CpuBatch::find_states(const std::vector<std::int64_t>& state_places) {
  require(state_places.size() == places_.size(), "places and state_places differ in length");
  const std::int64_t num_pages = view_->states_.shape[0];
  for (const std::int64_t place : state_places) {
    require_each(place >= 0 && place < view_->state_table_rows_, [&] {
      return "state place " + text(place) + " is outside 0 .. " +
             text(view_->state_table_rows_ - 1);
    });
    const std::int64_t page = view_->state_table_[place * view_->state_table_width_];
    require_each(page >= 0 && page < num_pages, [&] {
      return "the state of place " + text(place) + " is page " + std::to_string(page) +
             ", outside 0 .. " + text(num_pages - 1);
    });
    state_pages_.push_back(page);
  }
  std::vector<std::int64_t> sorted = state_pages_;
  std::sort(sorted.begin(), sorted.end());
  require(std::adjacent_find(sorted.begin(), sorted.end()) == sorted.end(),
          "two sequences of a batch have one state");
}

float* CpuBatch::states(std::int64_t i) const {
  return reinterpret_cast<float*>(view_->states_.data) +
         state_pages_[static_cast<std::size_t>(i)] * view_->states_.strides[0];
}

std::size_t CpuBatch::table_of(std::int64_t layer) const {
  return view_->paged() ? view_->layer_tables_[static_cast<std::size_t>(layer)] : 0;
}

cpu::Sequence CpuBatch::sequence(std::int64_t layer, std::int64_t i,
                                 std::int64_t value_offset) const {
  const auto plane = [](const TensorRef& tensor) {
    return cpu::Plane{tensor.data, tensor.strides[0], tensor.strides[1], tensor.strides[2]};
  };
  const auto at = static_cast<std::size_t>(i);
  cpu::Sequence seq{plane(view_->keys_[static_cast<std::size_t>(layer)]),
                    plane(view_->values_[static_cast<std::size_t>(layer)]),
                    places_[at],
                    nullptr,
                    0,
                    0};
  seq.v.data += value_offset * item_bytes(view_->dtype());
  if (view_->paged()) {
    seq.blocks = blocks_.data() + block_starts_[table_of(layer) * places_.size() + at];
    seq.block_tokens = static_cast<std::int32_t>(view_->block_tokens_);
    seq.blocks_per_page = static_cast<std::int32_t>(view_->blocks_per_page_);
  }
  return seq;
}

std::int64_t CpuBatch::first_seen(std::int64_t i, std::int64_t window) const {
  const std::int64_t past = num_past_[static_cast<std::size_t>(i)];
  return window == 0 ? 0 : std::max<std::int64_t>(0, past + 1 - window);
}

cpu::Plan& CpuBatch::plan(std::int64_t layer, std::int64_t window, std::int64_t q_heads,
                          std::int64_t num_threads) {
  const std::size_t table = table_of(layer);
  for (const auto& [of, plan] : plans_) {
    if (of == table && plan->window == window && plan->q_heads == q_heads) return *plan;
  }
  check_blocks(table, window);
  plans_.emplace_back(table, std::make_unique<cpu::Plan>(*this, window, q_heads, num_threads));
  return *plans_.back().second;
}

void CpuBatch::check_blocks(std::size_t table, std::int64_t window) const {
  for (std::size_t i = 0; view_->paged() && i < places_.size(); ++i) {
    const std::size_t at = table * places_.size() + i;
    if (first_seen(static_cast<std::int64_t>(i), window) >= usable_from_[at]) continue;
    const std::int64_t index = usable_from_[at] / view_->block_tokens_ - 1;
    const std::int32_t block = blocks_[static_cast<std::size_t>(block_starts_[at] + index)];
    // The kernels read a block even if only part of it is inside the window.
    throw MisuseError("block table row " + text(places_[i]) + ": entry " + text(index) + " is " +
                      std::to_string(block) + ", outside the arena's 0 .. " +
                      text(view_->num_blocks_[table] - 1));
  }
}

}  // namespace vmserve
