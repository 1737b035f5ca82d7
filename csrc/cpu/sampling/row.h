// Samples from one row of logits: block maxima, sums of weights by blocks, the choice, and
// log-probabilities. Passes over the whole row are kernels (kernels/rows.h); this file works with
// the block values and the few tokens that can be chosen.
#pragma once

#include <algorithm>
#include <cfloat>
#include <cmath>
#include <functional>
#include <memory>
#include <optional>
#include <vector>

#include "../kernels/kernels.h"
#include "logit_changes.h"
#include "row_sampler.h"
#include "selection.h"

namespace vmserve::sampling {

// The same division as in the kernels.
inline float scaled(float x, float temperature) {
  return temperature == 1.0F ? x : std::min(x / temperature, FLT_MAX);
}

inline double total_of(const float* values, std::int64_t num) {
  double total = 0.0;
  for (std::int64_t i = 0; i < num; ++i) total += static_cast<double>(values[i]);
  return total;
}

struct Place {
  std::int64_t at;
  double before;  // sum of the values before it
};

// The first value whose cumulative sum is above `target`, else the last value above 0.
inline Place locate(const float* values, std::int64_t num, double target) {
  Place last{0, 0.0};
  double upto = 0.0;
  for (std::int64_t i = 0; i < num; ++i) {
    if (values[i] > 0.0F) last = {i, upto};
    upto += static_cast<double>(values[i]);
    if (upto > target) break;
  }
  return last;
}

// Buffers of one thread, reused for each row. Most are touched only by rare requests.
struct Workspace {
  explicit Workspace(std::int64_t vocab)
      : num_blocks(cpu::num_row_blocks(vocab)),
        maxima(new float[num_blocks]),
        sums(new float[num_blocks]),
        changed_maxima(new float[num_blocks]),
        changed_sums(new float[num_blocks]),
        ranked_maxima(new float[num_blocks]),
        repaired(new float[vocab]),
        changed(new float[vocab]),
        ids(new std::int32_t[vocab]),
        values(new float[vocab]),
        weights(new float[vocab]),
        order(new std::int64_t[vocab]),
        keys(new std::uint32_t[vocab]),
        masses(new float[vocab]) {
    selection.keys = keys.get();
    selection.masses = masses.get();
  }

  // Allocates for the changes of these requests, so that nothing is allocated while rows are
  // sampled.
  void make_room(const std::vector<RowRequest>& requests, std::int64_t vocab) {
    for (const RowRequest& request : requests) {
      if (!request.changes) continue;
      changes.counts.resize(static_cast<std::size_t>(vocab), 0);
      changes.saved.reserve(
          std::max(request.changes->fixed->allowed.size(), request.changes->banned.size()));
    }
  }

  using Floats = std::unique_ptr<float[]>;

  std::int64_t num_blocks;
  Floats maxima, sums, changed_maxima, changed_sums, ranked_maxima;  // [num_blocks]
  Floats repaired, changed;                                          // [vocab]
  // Candidates or ranked tokens: columns, logits (divided by the temperature), weights, order.
  std::unique_ptr<std::int32_t[]> ids;
  Floats values, weights;
  std::unique_ptr<std::int64_t[]> order;
  std::unique_ptr<std::uint32_t[]> keys;
  Floats masses;
  SelectionRoom selection;
  ChangesRoom changes;
};

// Samples one row.
class Row {
 public:
  Row(const cpu::RowKernels& kernels, std::int64_t vocab, Workspace& work)
      : kernels_(kernels), vocab_(vocab), work_(work) {}

  void run(const TensorRef& logits, std::int64_t row, const RowRequest& request,
           RowResult& result) {
    const std::int64_t offset = row * logits.strides[0];
    const float* given = reinterpret_cast<const float*>(logits.data) + offset;
    if (logits.dtype == DType::kBFloat16) {
      given = work_.repaired.get();
      kernels_.widen(reinterpret_cast<const cpu::Bf16*>(logits.data) + offset, vocab_,
                     work_.repaired.get());
    }
    own_ = surveyed(given, work_.maxima.get());
    result.was_repaired = !(own_.maximum > -INFINITY);
    if (result.was_repaired) repair(given);
    weigh(own_, 1.0F, work_.sums.get());
    log_total_ = std::log(total_of(work_.sums.get(), work_.num_blocks));
    result.token = request.given ? *request.given : choose(request);
    result.logprob = logprob(result.token);
    if (!result.ranked.empty()) rank(request, result);
  }

 private:
  struct Logits {
    const float* row;
    const float* maxima;
    float maximum;
  };

  Logits surveyed(const float* row, float* maxima) const {
    return {row, maxima, kernels_.survey(row, vocab_, maxima)};
  }

  void weigh(const Logits& logits, float temperature, float* sums) const {
    kernels_.sum_blocks(logits.row, vocab_, temperature, scaled(logits.maximum, temperature), sums);
  }

  double logprob(std::int64_t id) const {
    return static_cast<double>(own_.row[id] - own_.maximum) - log_total_;
  }

  void repair(const float* given) {
    float* const row = work_.repaired.get();
    float maximum = -INFINITY;
    for (std::int64_t i = 0; i < vocab_; ++i) {
      row[i] = std::isnan(given[i]) ? -INFINITY : std::min(given[i], FLT_MAX);
      maximum = std::max(maximum, row[i]);
    }
    if (maximum == -INFINITY) std::fill_n(row, vocab_, 0.0F);
    own_ = surveyed(row, work_.maxima.get());
  }

  // -- choosing -------------------------------------------------------------------------

  std::int64_t choose(const RowRequest& request) {
    if (!request.changes) return choose_from(own_, request, work_.sums.get());
    float* const row = work_.changed.get();
    std::copy_n(own_.row, vocab_, row);
    apply_changes(*request.changes, row, vocab_, work_.changes);
    const Logits changed = surveyed(row, work_.changed_maxima.get());
    // Nothing is left if a grammar allows only tokens that the model gives -inf.
    if (!(changed.maximum > -INFINITY)) return 0;
    return choose_from(changed, request, nullptr);
  }

  // `sums`: of the row's weights at temperature 1, or null if unknown.
  std::int64_t choose_from(const Logits& logits, const RowRequest& request, const float* sums) {
    if (request.temperature == 0.0F) return likeliest(logits);
    const double uniform = uniform_of(request.seed, request.index, request.position);
    const bool limited = 0 < request.top_k && request.top_k < vocab_;
    const bool cut = limited || request.top_p < 1.0 || request.min_p > 0.0;
    const bool needs_sums = !cut || (request.top_p < 1.0 && !limited);
    if (needs_sums && (sums == nullptr || request.temperature != 1.0F)) {
      weigh(logits, request.temperature, work_.changed_sums.get());
      sums = work_.changed_sums.get();
    }
    if (!cut) return draw(logits, request.temperature, sums, uniform);
    return draw_cut(logits, request, limited, sums, uniform);
  }

  std::int64_t likeliest(const Logits& logits) const {
    const float* const maxima = logits.maxima;
    const float* const block = std::find(maxima, maxima + work_.num_blocks, logits.maximum);
    std::int64_t id = (block - maxima) * cpu::kRowBlock;
    while (id + 1 < vocab_ && logits.row[id] != logits.maximum) ++id;
    return id;
  }

  // Inverse CDF in the order of ids: finds the block, then the token.
  std::int64_t draw(const Logits& logits, float temperature, const float* sums,
                    double uniform) const {
    const double target = uniform * total_of(sums, work_.num_blocks);
    const Place block = locate(sums, work_.num_blocks, target);
    const std::int64_t begin = block.at * cpu::kRowBlock;
    const std::int64_t num = std::min(cpu::kRowBlock, vocab_ - begin);
    float weights[cpu::kRowBlock];
    kernels_.weights(logits.row + begin, num, temperature, scaled(logits.maximum, temperature),
                     weights);
    return begin + locate(weights, num, std::max(target - block.before, 0.0)).at;
  }

  // Draws from what top-k, then top-p (relative to the rest), then min-p keep. Among equal logits
  // at a limit, the lowest ids are kept.
  std::int64_t draw_cut(const Logits& logits, const RowRequest& request, bool limited,
                        const float* sums, double uniform) {
    const float highest = scaled(logits.maximum, request.temperature);
    double total = 0.0;  // weight that top-p is relative to
    std::int64_t num = 0;
    if (limited) {
      num = find_top_k(logits, request.top_k, request.temperature);
      weigh_found(num, highest);
      total = total_of(work_.weights.get(), num);
    } else if (request.top_p < 1.0) {
      total = total_of(sums, work_.num_blocks);
      num = find_nucleus(logits, request, highest, total);
    } else {
      num = find(logits, request.temperature, min_p_floor(request, highest));
      weigh_found(num, highest);
    }
    if (request.top_p < 1.0) {
      num = keep(num, limit_of(work_.values.get(), work_.weights.get(), num, request.top_p * total,
                               work_.selection));
    }
    if (request.min_p > 0.0) num = keep(num, {min_p_floor(request, highest), num});
    const double target = uniform * total_of(work_.weights.get(), num);
    return work_.ids[locate(work_.weights.get(), num, target).at];
  }

  static float min_p_floor(const RowRequest& request, float highest) {
    return highest + static_cast<float>(std::log(request.min_p));
  }

  // Collects the tokens that are at least `floor` after division by the temperature; returns how
  // many.
  std::int64_t find(const Logits& logits, float temperature, float floor) {
    return kernels_.at_least(logits.row, vocab_, logits.maxima, temperature, floor, work_.ids.get(),
                             work_.values.get());
  }

  void weigh_found(std::int64_t num, float highest) {
    kernels_.weights(work_.values.get(), num, 1.0F, highest, work_.weights.get());
  }

  // Collects the `top_k` largest; returns top_k.
  std::int64_t find_top_k(const Logits& logits, std::int64_t top_k, float temperature) {
    const std::int64_t num = find_at_least(logits, top_k, temperature);
    if (num <= top_k) return num;
    const auto wanted = static_cast<double>(top_k);
    return keep(num, limit_of(work_.values.get(), nullptr, num, wanted, work_.selection));
  }

  // Collects all tokens that top-p can keep, and some more, with their weights. Tokens with less
  // than (1 - top_p) / vocab of the weight have less than 1 - top_p together. So all kept tokens
  // are above that (the factor covers rounding). They are usually far above: a higher floor is
  // enough if the tokens over it have all the weight that top-p keeps.
  std::int64_t find_nucleus(const Logits& logits, const RowRequest& request, float highest,
                            double total) {
    const double left_out = (1.0 - request.top_p) * total;
    std::int64_t num = 0;
    for (const double parts : {1024.0, static_cast<double>(vocab_) / 0.999}) {
      const double floor = static_cast<double>(highest) + std::log(left_out / parts);
      num = find(logits, request.temperature, std::min(static_cast<float>(floor), highest));
      weigh_found(num, highest);
      if (total_of(work_.weights.get(), num) >= request.top_p * total) break;
    }
    return num;
  }

  // Collects at least the `num` largest. The floor is the num-th largest block maximum, which `num`
  // blocks reach; with fewer blocks, it is the smallest, and most blocks have several.
  std::int64_t find_at_least(const Logits& logits, std::int64_t num, float temperature) {
    const std::int64_t rank = std::min(num, work_.num_blocks);
    float* const sorted = work_.ranked_maxima.get();
    std::copy_n(logits.maxima, work_.num_blocks, sorted);
    std::nth_element(sorted, sorted + rank - 1, sorted + work_.num_blocks, std::greater<>());
    const std::int64_t found = find(logits, temperature, scaled(sorted[rank - 1], temperature));
    return found >= num ? found : find(logits, temperature, -INFINITY);
  }

  // Keeps those of the first `num` collected tokens that are before the limit, in order; returns
  // how many.
  std::int64_t keep(std::int64_t num, Limit limit) {
    std::int64_t kept = 0;
    for (std::int64_t i = 0; i < num; ++i) {
      const float value = work_.values[i];
      const bool is_equal = value == limit.value;
      if (!(value > limit.value) && !(is_equal && limit.num_equal > 0)) continue;
      limit.num_equal -= is_equal ? 1 : 0;
      work_.ids[kept] = work_.ids[i];
      work_.values[kept] = value;
      work_.weights[kept] = work_.weights[i];
      ++kept;
    }
    return kept;
  }

  // -- log-probabilities ----------------------------------------------------------------

  void rank(const RowRequest& request, RowResult& result) {
    if (request.listed) {
      rank_listed(*request.listed, result);
    } else {
      rank_likeliest(result);
    }
  }

  RankedToken ranked(std::int64_t id) const {
    const std::int64_t before = kernels_.num_before(own_.row, vocab_, own_.maxima, id);
    return {static_cast<std::int32_t>(id), logprob(id), before + 1};
  }

  void rank_likeliest(RowResult& result) {
    const auto num = static_cast<std::int64_t>(result.ranked.size()) - 1;
    RankedToken* const found = result.ranked.data() + 1;
    if (num > 0) find_likeliest(num, found);
    for (std::int64_t i = 0; i < num; ++i) {
      if (found[i].id == result.token) {
        result.ranked[0] = found[i];
        return;
      }
    }
    result.ranked[0] = ranked(result.token);
  }

  void find_likeliest(std::int64_t num, RankedToken* found) {
    std::int64_t* const order = work_.order.get();
    const std::int64_t num_found = find_at_least(own_, num, 1.0F);
    for (std::int64_t i = 0; i < num_found; ++i) order[i] = i;
    const float* const values = work_.values.get();
    // Equal values are in the order of columns, because columns ascend.
    std::partial_sort(order, order + num, order + num_found,
                      [values](std::int64_t a, std::int64_t b) {
                        return values[a] > values[b] || (values[a] == values[b] && a < b);
                      });
    for (std::int64_t i = 0; i < num; ++i) {
      const std::int32_t id = work_.ids[order[i]];
      found[i] = {id, logprob(id), i + 1};
    }
  }

  // Counts the larger values of each token if they are few. Else finds, for each value of the row,
  // the first of the sorted listed ones that it comes before.
  void rank_listed(const TokenIds& listed, RowResult& result) {
    constexpr std::size_t kFew = 32;
    result.ranked[0] = ranked(result.token);
    if (listed.size() <= kFew) {
      for (std::size_t i = 0; i < listed.size(); ++i) result.ranked[i + 1] = ranked(listed[i]);
      return;
    }
    const auto num = static_cast<std::int64_t>(listed.size());
    std::int64_t* const order = work_.order.get();
    for (std::int64_t i = 0; i < num; ++i) order[i] = i;
    const float* const row = own_.row;
    const auto precedes = [row](std::int64_t a, std::int64_t b) {
      return row[a] > row[b] || (row[a] == row[b] && a < b);
    };
    std::sort(order, order + num,
              [&](std::int64_t a, std::int64_t b) { return precedes(listed[a], listed[b]); });
    std::int32_t* const first_after = work_.ids.get();
    std::fill_n(first_after, num, 0);
    const float least = row[listed[order[num - 1]]];
    for (std::int64_t id = 0; id < vocab_; ++id) {
      if (row[id] < least) continue;
      std::int64_t place = 0;
      for (std::int64_t left = num; left > 0;) {
        const std::int64_t half = left / 2;
        const bool is_behind = !precedes(id, listed[order[place + half]]);
        place += is_behind ? half + 1 : 0;
        left = is_behind ? left - half - 1 : half;
      }
      if (place < num) ++first_after[place];
    }
    std::int64_t before = 0;
    for (std::int64_t i = 0; i < num; ++i) {
      const std::int32_t id = listed[order[i]];
      before += first_after[i];
      result.ranked[order[i] + 1] = {id, logprob(id), before + 1};
    }
  }

  const cpu::RowKernels& kernels_;
  std::int64_t vocab_;
  Workspace& work_;
  Logits own_{};  // the model's logits, repaired
  double log_total_ = 0.0;
};

}  // namespace vmserve::sampling
