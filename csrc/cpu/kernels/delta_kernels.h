// Kernels of gated delta layers and of gated attention, with a table for each instruction set.
// Numbers are float32; sizes are multiples of kDeltaUnit.
#pragma once

#include <cstdint>
#include <string>

#include "kernels.h"

namespace vmserve::cpu {

constexpr std::int64_t kDeltaUnit = 16;
// The most columns of a state in one call of `recur`. They are adjacent, because L1 keeps few rows
// that are a whole head, a power of two, apart.
constexpr std::int64_t kDeltaColumns = 32;
constexpr std::int64_t kMaxTaps = 8;

// A causal convolution of one row, each channel by itself, then silu.
struct ConvolveArgs {
  const float* inputs[kMaxTaps];  // the last `taps` rows, oldest first; null: zeros
  std::int32_t taps;
  const float* weights;  // [taps, channels]
  std::int64_t channels;
  float* out;
};

// Some columns of one head's state, and successive tokens. Per token (Yang et al. 2024, equation
// 10): S *= decay; S += k (beta (v - S^T k))^T; out = S^T q.
struct DeltaArgs {
  float* state;  // [key_dim, num_columns]
  std::int64_t key_dim, num_columns;
  bool is_fresh;  // the state counts as zeros
  std::int64_t num_tokens;
  const float *q, *k, *v;  // of the first token: [key_dim], [key_dim], [num_columns]
  std::int64_t row_stride;
  const float *decay, *beta;
  std::int64_t gate_stride;
  float* out;  // [num_columns]
  std::int64_t out_stride;
};

struct DeltaKernels {
  void (*convolve)(const ConvolveArgs&);
  // x *= scale / sqrt(sum(x^2) + 1e-6)
  void (*normalise)(float* x, std::int64_t size, float scale);
  void (*recur)(const DeltaArgs&);
  // x = x * norm / sqrt(mean(x^2) + eps) * silu(gate)
  void (*gated_norm)(float* x, const float* gate, const float* norm, std::int64_t size, float eps);
  // out = x * sigmoid(gate)
  void (*gate)(const float* x, const float* gate, std::int64_t size, float* out);
  void (*gate_bf16)(const Bf16* x, const float* gate, std::int64_t size, float* out);
};

// For the instruction set of a KernelTable.
const DeltaKernels& choose_delta_kernels(const std::string& isa);

const DeltaKernels& delta_generic();
#ifdef VMSERVE_X86_KERNELS
const DeltaKernels& delta_avx2();
const DeltaKernels& delta_avx512();
#endif

}  // namespace vmserve::cpu
