// See delta_kernels.h. Sums have one order for any number of tokens in a call. So a state and its
// outputs have the same bits for any chunks of a prompt.
#pragma once

#include "delta_kernels.h"
#include "linear_panels.h"

namespace vmserve::cpu {
namespace {

static_assert(kDeltaUnit % Vec::kWidth == 0);

inline void convolve(const ConvolveArgs& a) {
  for (std::int64_t c = 0; c < a.channels; c += Vec::kWidth) {
    Vec::R sum = Vec::zero();
    for (int tap = 0; tap < a.taps; ++tap) {
      if (a.inputs[tap] == nullptr) continue;
      sum =
          Vec::fma(Vec::load(a.inputs[tap] + c), Vec::load(a.weights + tap * a.channels + c), sum);
    }
    Vec::store(a.out + c, silu(sum));
  }
}

inline float sum_of_squares(const float* x, std::int64_t size) {
  Vec::R sum = Vec::zero();
  for (std::int64_t i = 0; i < size; i += Vec::kWidth) {
    const Vec::R at = Vec::load(x + i);
    sum = Vec::fma(at, at, sum);
  }
  return Vec::reduce_add(sum);
}

inline void normalise(float* x, std::int64_t size, float scale) {
  const Vec::R factor = Vec::set(scale / sqrtf(sum_of_squares(x, size) + 1e-6F));
  for (std::int64_t i = 0; i < size; i += Vec::kWidth) {
    Vec::store(x + i, Vec::mul(Vec::load(x + i), factor));
  }
}

inline void gated_norm(float* x, const float* gate, const float* norm, std::int64_t size,
                       float eps) {
  const float mean = sum_of_squares(x, size) / static_cast<float>(size);
  const Vec::R factor = Vec::set(1.0F / sqrtf(mean + eps));
  for (std::int64_t i = 0; i < size; i += Vec::kWidth) {
    const Vec::R normalised = Vec::mul(Vec::mul(Vec::load(x + i), factor), Vec::load(norm + i));
    Vec::store(x + i, Vec::mul(normalised, silu(Vec::load(gate + i))));
  }
}

template <class T>
void gate_row(const T* x, const float* gate, std::int64_t size, float* out) {
  const Vec::R one = Vec::set(1.0F);
  for (std::int64_t i = 0; i < size; i += Vec::kWidth) {
    const Vec::R power =
        Vec::min(Vec::mul(Vec::load(gate + i), Vec::set(-kLog2E)), Vec::set(126.0F));
    Vec::store(out + i, Vec::div(Vec::load(x + i), Vec::add(one, exp2(power))));
  }
}

// Two sums, of even and of odd rows of the state, so that products do not wait for each other.
template <int kVectors>
void recur_columns(const DeltaArgs& a) {
  constexpr std::int64_t stride = kVectors * Vec::kWidth;
  const std::int64_t rows = a.key_dim;
  float* const state = a.state;
  for (std::int64_t i = 0; a.is_fresh && i < rows; ++i) {
    for (int c = 0; c < kVectors; ++c)
      Vec::store(state + i * stride + c * Vec::kWidth, Vec::zero());
  }
  for (std::int64_t token = 0; token < a.num_tokens; ++token) {
    const float* const q = a.q + token * a.row_stride;
    const float* const k = a.k + token * a.row_stride;
    const float* const v = a.v + token * a.row_stride;
    const Vec::R decay = Vec::set(a.decay[token * a.gate_stride]);
    const Vec::R beta = Vec::set(a.beta[token * a.gate_stride]);
    Vec::R even[kVectors], odd[kVectors], change[kVectors];
    const auto clear = [&] {
      for (int c = 0; c < kVectors; ++c) even[c] = odd[c] = Vec::zero();
    };
    clear();
    const auto add_key = [&](std::int64_t i, Vec::R* sums) {
      const Vec::R key = Vec::set(k[i]);
#pragma GCC unroll 8
      for (int c = 0; c < kVectors; ++c) {
        sums[c] = Vec::fma(Vec::load(state + i * stride + c * Vec::kWidth), key, sums[c]);
      }
    };
    for (std::int64_t i = 0; i < rows; i += 2) {
      add_key(i, even);
      add_key(i + 1, odd);
    }
    for (int c = 0; c < kVectors; ++c) {
      const Vec::R known = Vec::mul(Vec::add(even[c], odd[c]), decay);
      change[c] = Vec::mul(Vec::sub(Vec::load(v + c * Vec::kWidth), known), beta);
    }
    clear();
    const auto update = [&](std::int64_t i, Vec::R* sums) {
      const Vec::R key = Vec::set(k[i]), query = Vec::set(q[i]);
#pragma GCC unroll 8
      for (int c = 0; c < kVectors; ++c) {
        float* const at = state + i * stride + c * Vec::kWidth;
        const Vec::R now = Vec::fma(key, change[c], Vec::mul(Vec::load(at), decay));
        Vec::store(at, now);
        sums[c] = Vec::fma(now, query, sums[c]);
      }
    };
    for (std::int64_t i = 0; i < rows; i += 2) {
      update(i, even);
      update(i + 1, odd);
    }
    for (int c = 0; c < kVectors; ++c) {
      Vec::store(a.out + token * a.out_stride + c * Vec::kWidth, Vec::add(even[c], odd[c]));
    }
  }
}

inline void recur(const DeltaArgs& a) {
  if (a.num_columns == kDeltaColumns) {
    recur_columns<kDeltaColumns / Vec::kWidth>(a);
  } else {
    recur_columns<kDeltaUnit / Vec::kWidth>(a);
  }
}

constexpr DeltaKernels delta_kernels() {
  return {&convolve, &normalise, &recur, &gated_norm, &gate_row<float>, &gate_row<Bf16>};
}

}  // namespace
}  // namespace vmserve::cpu
