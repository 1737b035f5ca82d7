// The parts of a decoder's layers. Only decoder*.cpp include this.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "decoder.h"
#include "vmserve/errors.h"

namespace vmserve {

inline void require(bool condition, const std::string& what) {
  if (!condition) throw MisuseError(what);
}

template <class Number>
void grow(std::vector<Number>& buffer, std::int64_t size) {
  if (buffer.size() < static_cast<std::size_t>(size)) buffer.resize(static_cast<std::size_t>(size));
}

inline void grow(StepRows& buffer, std::int64_t size) {
  buffer.grow(size);
}

struct CpuDecoder::Mlp {
  LinearLayer gate_up, down;

  std::size_t weight_bytes() const { return gate_up.weight_bytes() + down.weight_bytes(); }
};

struct CpuDecoder::Experts {
  LinearLayer router;  // the last output is the shared expert's gate
  std::int64_t count, chosen;
  bool normalised, sigmoid;
  std::vector<float> correction;
  std::int64_t groups, chosen_groups, group_best;
  float scale;
  bool shared, shared_gate;

  // Whether experts are chosen by scores that differ from the products.
  bool scores() const { return sigmoid || !correction.empty() || groups > 1; }
  std::size_t num_mlps() const { return static_cast<std::size_t>(count + (shared ? 1 : 0)); }
};

struct CpuDecoder::Latent {
  std::vector<float> q_norm, kv_norm;
  float norm_eps;
  std::optional<LinearLayer> q;               // applied after q_norm
  std::vector<LinearLayer> key_up, value_up;  // one for each head
};

struct CpuDecoder::Layer {
  std::vector<float> attention_norm, mlp_norm, q_norm, k_norm, sinks;
  std::vector<float> attention_out_norm, mlp_out_norm;
  std::vector<LinearLayer> qkv;  // one, or more where queries, keys and values are not stored alike
  LinearLayer output;
  std::optional<DeltaWeights> delta;  // in place of attention; qkv then has its projections
  LinearLayer delta_gates;
  std::optional<Latent> latent;  // qkv then has q or q_down, and kv_down
  std::int64_t index = 0;        // among the layers with attention, or with a delta rule
  bool gated = false;
  std::vector<Mlp> mlps;  // one, or the experts, the shared one last
  std::optional<Experts> experts;
  std::size_t rotation = 0;
  float scale = 1.0F;
  std::int64_t window = 0;
  float softcap = 0.0F;

  // Whether the input of the output product is float32 instead of the KV cache's type.
  bool mixes_floats() const { return gated || delta || latent; }
};

}  // namespace vmserve
