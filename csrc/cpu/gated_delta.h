// A gated delta layer between its projections (Yang et al. 2024): causal convolution, the delta
// rule over a state of constant size, gated RMSNorm.
//
// A sequence's state in a layer is state_floats() numbers. First the last taps - 1 rows that
// entered the convolution, oldest first (zeros before the first token). Then for each value head
// its matrix [key_dim, value_dim], in strips of kDeltaColumns columns. A row's result and the state
// after it have the same bits in any batch, any chunk of its prompt and any number of threads.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "kernels/delta_kernels.h"
#include "linear_layer.h"

namespace vmserve {

// Value head h has key head h / (value_heads / key_heads), or h % key_heads if they are `tiled`.
struct DeltaShape {
  std::int64_t key_heads = 0, value_heads = 0, key_dim = 0, value_dim = 0, taps = 0;
  bool tiled = false;

  std::int64_t key_head(std::int64_t head) const {
    return tiled ? head % key_heads : head / (value_heads / key_heads);
  }

  std::int64_t key_size() const { return key_heads * key_dim; }
  std::int64_t value_size() const { return value_heads * value_dim; }
  // Channels of the convolution: q, k and v of a row.
  std::int64_t channels() const { return 2 * key_size() + value_size(); }
  std::int64_t window_floats() const { return (taps - 1) * channels(); }
  std::int64_t state_floats() const { return window_floats() + value_size() * key_dim; }
};

// Weights of one layer.
struct DeltaWeights {
  std::vector<float> taps;              // [taps, channels], the oldest row's first
  std::vector<float> decay_rate, bias;  // [value_heads]: -exp(A_log), dt_bias
  std::vector<float> norm;              // [value_dim]
};

// Rows of one sequence, and its state, which the rows update.
struct DeltaSequence {
  float* state;
  std::int64_t first_row, num_rows;
  bool is_fresh;  // no tokens before: the state counts as zeros
};

class GatedDelta {
 public:
  // `isa`: name of the KernelTable. Throws MisuseError for sizes that the kernels do not take.
  GatedDelta(const DeltaShape& shape, const std::string& isa);

  const DeltaShape& shape() const { return shape_; }
  const cpu::DeltaKernels& kernels() const { return kernels_; }

  // projected [rows, channels + value_size]: q, k and v of all heads, then z; gates [rows, 2 *
  // value_heads]: b, then a. out [rows, value_size]. `parallel`: threads.
  void run(const LinearProducts& parallel, const DeltaWeights& weights,
           const std::vector<DeltaSequence>& sequences, const float* projected, const float* gates,
           float eps, float* out);

 private:
  void prepare(const LinearProducts& parallel, const DeltaWeights& weights,
               const std::vector<DeltaSequence>& sequences, const float* projected,
               const float* gates);
  void prepare_row(const DeltaWeights& weights, const DeltaSequence& seq, std::int64_t index,
                   const float* projected, const float* gates);
  void keep_window(const DeltaSequence& seq, const float* projected) const;
  std::int64_t projected_size() const { return shape_.channels() + shape_.value_size(); }

  DeltaShape shape_;
  const cpu::DeltaKernels& kernels_;
  // For each row of a step: the convolution's output; decays, then betas.
  std::vector<float> mixed_, decays_;
  std::vector<std::int64_t> sequence_of_;
};

}  // namespace vmserve
