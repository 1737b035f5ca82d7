// The second half of a layer: one MLP, or experts that a router chooses for each row.
#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>

#include "decoder_layers.h"

namespace vmserve {
namespace {

float sigmoid(float x) {
  return 1.0F / (1.0F + std::exp(-x));
}

}  // namespace

void CpuDecoder::add_mlp_of(const Layer& layer, const LinearLayer& next, std::int64_t num_rows) {
  const Mlp& mlp = layer.mlps[0];
  const float* const norm = layer.mlp_norm.data();
  if (layer.mlp_out_norm.empty()) {
    multiply_mlp(mlp, norm, &next, num_rows, cpu::Epilogue::kAdd, x_.data());
    return;
  }
  grow(product_, num_rows * shape_.hidden_size);
  multiply_mlp(mlp, norm, &next, num_rows, cpu::Epilogue::kStore, product_.data());
  add_normalised(layer.mlp_out_norm, num_rows);
}

// Multiplies the rows of x_, normalised.
void CpuDecoder::multiply_mlp(const Mlp& mlp, const float* norm, const LinearLayer* next,
                              std::int64_t num_rows, cpu::Epilogue epilogue, float* out) {
  products_.pack_rows(mlp.gate_up, x_.data(), false, num_rows, norm, shape_.norm_eps);
  gate_up_shares_ = {{&mlp.gate_up, 0, 0, num_rows}};
  down_shares_ = {{&mlp.down, 0, 0, num_rows}};
  multiply_mlps(&mlp.down, next, num_rows, epilogue, out);
}

void CpuDecoder::multiply_mlps(const LinearLayer* down, const LinearLayer* next,
                               std::int64_t num_rows, cpu::Epilogue epilogue, float* out) {
  const std::int64_t hidden = shape_.hidden_size;
  const auto num_shares = static_cast<std::int64_t>(gate_up_shares_.size());
  const LinearShare* const first = gate_up_shares_.data();
  const LinearShare* const second = down_shares_.data();
  const LinearLayer& to = *second->layer;
  out += own_hidden_.first;
  grow(gated_, num_rows * to.depth);
  if (group_ || to.row_format().group_depth > 0) {
    // Products are stored first, then packed: scales need the maximum of a whole group, and each
    // rank makes only a part of a row.
    products_.multiply(first, num_shares, down, nullptr, cpu::Epilogue::kGateRows,
                       gated_.data() + slice(to.inputs).first, to.inputs);
    meet();
    products_.pack_rows(to, gated_.data(), false, down_shares_, nullptr, shape_.norm_eps);
    products_.multiply(second, num_shares, next, nullptr, epilogue, out, hidden);
  } else {
    products_.multiply(first, num_shares, down, nullptr, cpu::Epilogue::kGate, gated_.data(),
                       to.depth, to.form->rows == cpu::kRowsBFloat16);
    products_.multiply(second, num_shares, next, gated_.data(), epilogue, out, hidden);
  }
  meet();
}

void CpuDecoder::add_experts_of(const Layer& layer, const LinearLayer& next,
                                std::int64_t num_rows) {
  const Experts& experts = *layer.experts;
  const std::int64_t hidden = shape_.hidden_size, chosen = experts.chosen;
  const float* const norm = layer.mlp_norm.data();
  products_.pack_rows(experts.router, x_.data(), false, num_rows, norm, shape_.norm_eps);
  const std::int64_t logits = experts.router.outputs;
  grow(router_logits_, num_rows * logits);
  products_.multiply(experts.router, nullptr, nullptr, num_rows, cpu::Epilogue::kStore,
                     router_logits_.data(), logits);
  choose_experts(experts, num_rows);
  if (experts.shared) {
    grow(product_, num_rows * hidden);
    multiply_mlp(layer.mlps.back(), norm, nullptr, num_rows, cpu::Epilogue::kStore,
                 product_.data());
  }
  sort_by_expert(layer, num_rows);
  // Rows are rounded once. Then the rows of an expert with several are gathered.
  single_rows_.clear();
  for (std::int64_t row = 0; row < num_rows; ++row) single_rows_.push_back({nullptr, row, row, 1});
  const LinearLayer& any = layer.mlps[0].gate_up;
  products_.pack_rows(any, x_.data(), false, single_rows_, norm, shape_.norm_eps);
  products_.gather_rows(any, gate_up_shares_, slot_rows_);
  grow(expert_out_, num_rows * chosen * hidden);
  multiply_mlps(nullptr, &next, num_rows * chosen, cpu::Epilogue::kStore, expert_out_.data());
  const std::int64_t own = own_hidden_.first, end = own + own_hidden_.count;
  products_.parallel(num_rows, num_rows * chosen * hidden, [&](std::int64_t row) {
    // The order is the same for every batch: by the router's products.
    float* const sum = expert_out_.data() + slots_[row * chosen] * hidden;
    const float* const weights = expert_weights_.data() + row * chosen;
    for (std::int64_t i = own; i < end; ++i) sum[i] *= weights[0];
    for (std::int64_t rank = 1; rank < chosen; ++rank) {
      const float* const from = expert_out_.data() + slots_[row * chosen + rank] * hidden;
      for (std::int64_t i = own; i < end; ++i) sum[i] += weights[rank] * from[i];
    }
    if (experts.shared) {
      const float* const from = product_.data() + row * hidden;
      float weight = 1.0F;
      if (experts.shared_gate) weight = sigmoid(router_logits_[(row + 1) * logits - 1]);
      for (std::int64_t i = own; i < end; ++i) sum[i] += weight * from[i];
    }
    float* const to = x_.data() + row * hidden;
    for (std::int64_t i = own; i < end; ++i) to[i] += sum[i];
  });
  meet();
}

// Writes the scores for the choice; -inf for experts of groups that are not chosen.
void CpuDecoder::score_experts(const Experts& experts, const float* logits, float* scores) const {
  for (std::int64_t id = 0; id < experts.count; ++id) {
    scores[id] = experts.sigmoid ? sigmoid(logits[id]) : logits[id];
    if (!experts.correction.empty()) scores[id] += experts.correction[id];
  }
  if (experts.groups == 1) return;
  const std::int64_t size = experts.count / experts.groups;
  std::vector<std::pair<float, std::int64_t>> best;  // the sum with its sign changed, the group
  std::vector<float> sorted(static_cast<std::size_t>(size));
  for (std::int64_t group = 0; group < experts.groups; ++group) {
    std::copy_n(scores + group * size, size, sorted.data());
    std::partial_sort(sorted.begin(), sorted.begin() + experts.group_best, sorted.end(),
                      std::greater<>());
    float sum = 0.0F;
    for (std::int64_t i = 0; i < experts.group_best; ++i) sum += sorted[i];
    best.emplace_back(-sum, group);
  }
  std::sort(best.begin(), best.end());
  for (std::size_t i = static_cast<std::size_t>(experts.chosen_groups); i < best.size(); ++i) {
    std::fill_n(scores + best[i].second * size, size, -std::numeric_limits<float>::infinity());
  }
}

// Fills expert_ids_ and expert_weights_.
void CpuDecoder::choose_experts(const Experts& experts, std::int64_t num_rows) {
  const std::int64_t count = experts.count, chosen = experts.chosen;
  grow(expert_ids_, num_rows * chosen);
  grow(expert_weights_, num_rows * chosen);
  if (experts.scores()) grow(expert_scores_, num_rows * count);
  products_.parallel(num_rows, num_rows * count * chosen, [&](std::int64_t row) {
    const float* const logits = router_logits_.data() + row * experts.router.outputs;
    const float* scores = logits;
    if (experts.scores()) {
      float* const own = expert_scores_.data() + row * count;
      score_experts(experts, logits, own);
      scores = own;
    }
    std::int32_t* const ids = expert_ids_.data() + row * chosen;
    float* const weights = expert_weights_.data() + row * chosen;
    for (std::int64_t rank = 0; rank < chosen; ++rank) {
      std::int32_t best = -1;
      for (std::int32_t id = 0; id < count; ++id) {
        if (best >= 0 && !(scores[id] > scores[best])) continue;
        if (std::find(ids, ids + rank, id) == ids + rank) best = id;
      }
      ids[rank] = best;
    }
    float sum = 0.0F;
    const float largest = *std::max_element(logits, logits + count);
    const auto score = [&](std::int64_t id) {
      return experts.sigmoid ? sigmoid(logits[id]) : std::exp(logits[id] - largest);
    };
    for (std::int64_t rank = 0; rank < chosen; ++rank) {
      weights[rank] = score(ids[rank]);
      sum += weights[rank];
    }
    if (experts.sigmoid) {
      sum = experts.normalised ? sum + 1e-20F : 1.0F;
    } else if (!experts.normalised) {
      sum = 0.0F;
      for (std::int64_t id = 0; id < count; ++id) sum += score(id);
    }
    for (std::int64_t rank = 0; rank < chosen; ++rank) {
      weights[rank] = weights[rank] / sum * experts.scale;
    }
  });
}

// Fills slots_, slot_rows_ and the shares of the experts that rows chose.
void CpuDecoder::sort_by_expert(const Layer& layer, std::int64_t num_rows) {
  const Experts& experts = *layer.experts;
  const std::int64_t chosen = experts.chosen, num_slots = num_rows * chosen;
  std::vector<std::int64_t> ends(static_cast<std::size_t>(experts.count + 1));
  for (std::int64_t i = 0; i < num_slots; ++i) ++ends[static_cast<std::size_t>(expert_ids_[i]) + 1];
  gate_up_shares_.clear();
  down_shares_.clear();
  for (std::size_t id = 0; id + 1 < ends.size(); ++id) {
    const std::int64_t rows = ends[id + 1];
    ends[id + 1] += ends[id];
    if (rows == 0) continue;
    // A single row is read where it is packed (below).
    gate_up_shares_.push_back({&layer.mlps[id].gate_up, num_rows + ends[id], ends[id], rows});
    down_shares_.push_back({&layer.mlps[id].down, ends[id], ends[id], rows});
  }
  grow(slots_, num_slots);
  grow(slot_rows_, num_slots);
  for (std::int64_t i = 0; i < num_slots; ++i) {
    const std::int64_t slot = ends[static_cast<std::size_t>(expert_ids_[i])]++;
    slots_[i] = slot;
    slot_rows_[slot] = i / chosen;
  }
  for (LinearShare& share : gate_up_shares_) {
    if (share.num_rows == 1) share.packed_row = slot_rows_[share.row];
  }
  expert_reads_ += static_cast<std::int64_t>(gate_up_shares_.size());
  expert_rows_ += num_slots;
}

}  // namespace vmserve
