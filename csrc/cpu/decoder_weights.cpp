// How a decoder takes its weights.
#include <utility>

#include "decoder_layers.h"
#include "kernels/isa.h"

namespace vmserve {
namespace {

std::vector<float> copy_vector(const TensorRef& tensor, const char* name, std::int64_t size) {
  require(tensor.shape == std::vector<std::int64_t>{size} &&
              tensor.strides == std::vector<std::int64_t>{1} && tensor.dtype == DType::kFloat32,
          std::string(name) + " is not [" + std::to_string(size) + "] in contiguous float32");
  const auto* const from = reinterpret_cast<const float*>(tensor.data);
  return {from, from + size};
}

}  // namespace

CpuDecoder::CpuDecoder(const DecoderShape& shape, DType row_dtype, Quantization quantization,
                       int num_threads, const std::string& isa, std::shared_ptr<RankGroup> group)
    : shape_(shape),
      row_dtype_(row_dtype),
      group_(std::move(group)),
      own_hidden_(slice(shape.hidden_size)),
      pool_(std::make_shared<ThreadPool>(num_threads)),
      products_(cpu::choose_table(isa).linear, pool_, quantization, row_dtype == DType::kBFloat16),
      attention_(std::make_unique<CpuAttention>(pool_, isa)),
      mixing_(cpu::choose_delta_kernels(attention_->isa())) {
  require(shape.vocab_size > 0 && shape.hidden_size > 0 && shape.kv_heads > 0 &&
              shape.q_heads > 0 && shape.q_heads % shape.kv_heads == 0 && shape.head_dim > 0,
          "the sizes of a decoder are positive, its query heads a multiple of its KV heads");
  const LatentShape& latent = shape.latent;
  require(latent.rank == 0 ||
              (shape.kv_heads == 1 && latent.plain > 0 && latent.rotated > 0 && latent.value > 0 &&
               latent.q_rank >= 0 && shape.head_dim == latent.rank + latent.rotated),
          "latents are the rows of one KV head, with what is rotated");
  require(!group_ || (latent.rank == 0 && shape.delta.value_heads == 0),
          "ranks do not divide latents and delta layers");
  require(shape.hidden_size >= num_ranks() && shape.vocab_size >= num_ranks(),
          "there are more ranks than outputs");
  if (shape.delta.value_heads > 0) {
    delta_ = std::make_unique<GatedDelta>(shape.delta, attention_->isa());
  }
}

CpuDecoder::~CpuDecoder() = default;

std::size_t CpuDecoder::weight_bytes() const {
  std::size_t bytes = head_ ? head_->weight_bytes() : 0;
  for (const Layer& layer : layers_) {
    for (const LinearLayer& part : layer.qkv) bytes += part.weight_bytes();
    bytes += layer.output.weight_bytes() + layer.delta_gates.weight_bytes();
    if (layer.latent) {
      if (layer.latent->q) bytes += layer.latent->q->weight_bytes();
      for (const LinearLayer& head : layer.latent->key_up) bytes += head.weight_bytes();
      for (const LinearLayer& head : layer.latent->value_up) bytes += head.weight_bytes();
    }
    if (layer.experts) bytes += layer.experts->router.weight_bytes();
    for (const Mlp& mlp : layer.mlps) bytes += mlp.weight_bytes();
  }
  return bytes;
}

std::size_t CpuDecoder::row_weight_bytes() const {
  std::size_t bytes = weight_bytes();
  for (const Layer& layer : layers_) {
    if (!layer.experts || layer.mlps.empty()) continue;
    const auto idle = static_cast<std::size_t>(layer.experts->count - layer.experts->chosen);
    bytes -= idle * layer.mlps.front().weight_bytes();
  }
  return bytes;
}

const char* CpuDecoder::row_type() const {
  require(!layers_.empty(), "the decoder has no weights yet");
  return cpu::kRowFormats[layers_.front().qkv.front().form->rows].name;
}

int CpuDecoder::num_threads() const {
  return pool_->num_threads();
}

void CpuDecoder::set_num_threads(int num_threads) {
  const std::lock_guard lock(mutex_);
  if (num_threads == pool_->num_threads()) return;
  pool_ = std::make_shared<ThreadPool>(num_threads);
  products_.set_pool(pool_);
  attention_->set_pool(pool_);
}

void CpuDecoder::add_layer(const DecoderLayer& from) {
  const std::int64_t hidden = shape_.hidden_size, dim = shape_.head_dim;
  const std::int64_t q_size = shape_.q_heads * dim, kv_size = shape_.kv_heads * dim;
  check_matrix(from.q, "q", from.gated ? 2 * q_size : q_size, hidden);
  check_matrix(from.k, "k", kv_size, hidden);
  check_matrix(from.v, "v", kv_size, hidden);
  check_matrix(from.output, "output", own_hidden_.count, q_size * num_ranks());
  require(!group_ || !from.gated, "ranks do not divide gated attention");
  require((from.q_norm == nullptr) == (from.k_norm == nullptr), "q_norm and k_norm go together");
  require(!from.gated ||
              (from.q_norm != nullptr && from.q_bias == nullptr && q_size % cpu::kDeltaUnit == 0),
          "gated attention has norms of q and k, no bias of q, and heads of whole vectors");
  require(from.rotation >= 0 && tables_.empty(), "layers are added before rotations are set");
  const std::lock_guard lock(mutex_);
  Layer layer;
  layer.attention_norm = copy_vector(from.attention_norm, "attention_norm", hidden);
  layer.mlp_norm = copy_vector(from.mlp_norm, "mlp_norm", hidden);
  if (from.q_norm != nullptr) {
    layer.q_norm.assign(from.q_norm, from.q_norm + dim);
    layer.k_norm.assign(from.k_norm, from.k_norm + dim);
  }
  if (from.attention_out_norm != nullptr) {
    layer.attention_out_norm.assign(from.attention_out_norm, from.attention_out_norm + hidden);
  }
  if (from.mlp_out_norm != nullptr) {
    layer.mlp_out_norm.assign(from.mlp_out_norm, from.mlp_out_norm + hidden);
  }
  layer.qkv = products_.pack_alike({&from.q, &from.k, &from.v});
  if (from.q_bias != nullptr || from.k_bias != nullptr || from.v_bias != nullptr) {
    std::vector<float> biases(static_cast<std::size_t>(q_size + 2 * kv_size));
    float* to = biases.data();
    const std::pair<const float*, std::int64_t> sources[] = {
        {from.q_bias, q_size}, {from.k_bias, kv_size}, {from.v_bias, kv_size}};
    for (const auto& [bias, size] : sources) {
      if (bias != nullptr) std::copy(bias, bias + size, to);
      to += size;
    }
    const float* own = biases.data();
    for (LinearLayer& part : layer.qkv) {
      part.bias.assign(own, own + part.outputs);
      part.bias.resize(
          static_cast<std::size_t>(part.num_panels * products_.kernels().panel_outputs));
      own += part.outputs;
    }
  }
  layer.output = products_.pack({&from.output}, false);
  products_.set_bias(layer.output, {from.output_bias}, {own_hidden_.count}, false);
  if (from.sinks != nullptr) layer.sinks.assign(from.sinks, from.sinks + shape_.q_heads);
  layer.rotation = static_cast<std::size_t>(from.rotation);
  layer.scale = from.scale;
  layer.window = from.window;
  layer.softcap = from.softcap;
  layer.gated = from.gated;
  layer.index = static_cast<std::int64_t>(layers_.size()) - num_deltas_;
  layers_.push_back(std::move(layer));
}

void CpuDecoder::add_latent(const DecoderLatent& from) {
  const LatentShape& shape = shape_.latent;
  const std::int64_t hidden = shape_.hidden_size, heads = shape_.q_heads;
  require(shape.rank > 0, "the decoder has no latents");
  require((shape.q_rank > 0) == from.q_down.has_value() &&
              (shape.q_rank > 0) == (from.q_norm != nullptr) && from.kv_norm != nullptr,
          "queries have a rank, a norm and two matrices, or none of these");
  if (from.q_down) check_matrix(*from.q_down, "q_down", shape.q_rank, hidden);
  check_matrix(from.q, "q", heads * shape.query_dim(), from.q_down ? shape.q_rank : hidden);
  check_matrix(from.kv_down, "kv_down", shape.rank + shape.rotated, hidden);
  require(from.key_up.size() == static_cast<std::size_t>(heads) &&
              from.value_up.size() == from.key_up.size(),
          "each head has its matrices of keys and values");
  check_matrix(from.output, "output", hidden, heads * shape.value);
  require(from.rotation >= 0 && tables_.empty(), "layers are added before rotations are set");
  const std::lock_guard lock(mutex_);
  Layer layer;
  layer.attention_norm = copy_vector(from.attention_norm, "attention_norm", hidden);
  layer.mlp_norm = copy_vector(from.mlp_norm, "mlp_norm", hidden);
  layer.qkv = products_.pack_alike({from.q_down ? &*from.q_down : &from.q, &from.kv_down});
  Latent latent;
  latent.norm_eps = from.norm_eps;
  latent.kv_norm.assign(from.kv_norm, from.kv_norm + shape.rank);
  if (from.q_down) {
    latent.q_norm.assign(from.q_norm, from.q_norm + shape.q_rank);
    latent.q = products_.pack({&from.q}, false);
  }
  for (const WeightRef& head : from.key_up) {
    check_matrix(head, "key_up", shape.rank, shape.plain);
    latent.key_up.push_back(products_.pack({&head}, false));
  }
  for (const WeightRef& head : from.value_up) {
    check_matrix(head, "value_up", shape.value, shape.rank);
    latent.value_up.push_back(products_.pack({&head}, false));
  }
  layer.latent = std::move(latent);
  layer.output = products_.pack({&from.output}, false);
  layer.rotation = static_cast<std::size_t>(from.rotation);
  layer.scale = from.scale;
  layer.index = static_cast<std::int64_t>(layers_.size()) - num_deltas_;
  layers_.push_back(std::move(layer));
}

void CpuDecoder::add_delta(const DecoderDelta& from) {
  require(delta_ != nullptr, "the decoder has no delta layers");
  const DeltaShape& shape = delta_->shape();
  const std::int64_t hidden = shape_.hidden_size;
  check_matrix(from.qkv, "qkv", shape.channels(), hidden);
  check_matrix(from.z, "z", shape.value_size(), hidden);
  check_matrix(from.gates, "gates", 2 * shape.value_heads, hidden);
  check_matrix(from.output, "output", hidden, shape.value_size());
  const auto heads = static_cast<std::size_t>(shape.value_heads);
  require(from.weights.taps.size() == static_cast<std::size_t>(shape.taps * shape.channels()) &&
              from.weights.decay_rate.size() == heads && from.weights.bias.size() == heads &&
              from.weights.norm.size() == static_cast<std::size_t>(shape.value_dim),
          "vectors of a delta layer differ from its sizes");
  const std::lock_guard lock(mutex_);
  Layer layer;
  layer.attention_norm = copy_vector(from.attention_norm, "attention_norm", hidden);
  layer.mlp_norm = copy_vector(from.mlp_norm, "mlp_norm", hidden);
  layer.qkv = products_.pack_alike({&from.qkv, &from.z});
  // Gates are not rounded: they say how much a state keeps, so errors would add up over all tokens.
  layer.delta_gates = products_.pack({&from.gates}, false, true);
  layer.output = products_.pack({&from.output}, false);
  layer.delta = from.weights;
  layer.index = num_deltas_++;
  layers_.push_back(std::move(layer));
}

void CpuDecoder::add_mlp(const DecoderMlp& from) {
  const std::int64_t hidden = shape_.hidden_size, size = outputs_of(from.gate);
  const std::int64_t all = inputs_of(from.down);
  require(all >= num_ranks() && size == slice(all).count,
          "gate and up are not the rank's slice of what down reads");
  check_matrix(from.gate, "gate", size, hidden);
  check_matrix(from.up, "up", size, hidden);
  check_matrix(from.down, "down", own_hidden_.count, all);
  const std::lock_guard lock(mutex_);
  require(!layers_.empty(), "there is no layer yet");
  Layer& layer = layers_.back();
  const std::size_t most = layer.experts ? layer.experts->num_mlps() : 1;
  require(layer.mlps.size() < most, "the layer has all its MLPs");
  const bool shared = layer.experts && layer.experts->shared && layer.mlps.size() + 1 == most;
  Mlp mlp{products_.pack({&from.gate, &from.up}, true), products_.pack({&from.down}, false)};
  products_.set_bias(mlp.gate_up, {from.gate_bias, from.up_bias}, {size, size}, true);
  products_.set_bias(mlp.down, {from.down_bias}, {own_hidden_.count}, false);
  mlp.gate_up.gate = from.activation;
  if (!layer.mlps.empty() && !shared) {
    const Mlp& first = layer.mlps.front();
    require(mlp.gate_up.outputs == first.gate_up.outputs &&
                mlp.gate_up.form->rows == first.gate_up.form->rows &&
                mlp.down.form->rows == first.down.form->rows,
            "the experts of a layer differ in size or in the bits of their weights");
  }
  widest_mlp_ = std::max(widest_mlp_, mlp.down.depth);
  layer.mlps.push_back(std::move(mlp));
}

void CpuDecoder::add_router(const DecoderRouter& from) {
  require(from.chosen > 0 && from.chosen <= from.count,
          "a router chooses 1 to " + std::to_string(from.count) + " experts");
  check_matrix(from.weights, "router", from.count, shape_.hidden_size);
  const std::lock_guard lock(mutex_);
  require(!layers_.empty() && layers_.back().mlps.empty(), "a router comes after its layer");
  require(from.groups > 0 && from.count % from.groups == 0 && from.group_best > 0 &&
              from.chosen_groups > 0 && from.chosen_groups <= from.groups &&
              from.group_best <= from.count / from.groups &&
              from.chosen <= from.count / from.groups * from.chosen_groups,
          "the groups of experts that a router chooses from do not fit");
  std::vector<const WeightRef*> matrices = {&from.weights};
  if (from.shared_gate) {
    require(from.shared, "a gate without a shared expert");
    check_matrix(*from.shared_gate, "shared_gate", 1, shape_.hidden_size);
    matrices.push_back(&*from.shared_gate);
  }
  // Rows of the router are never rounded, because its products choose experts.
  Experts experts{products_.pack(matrices, false, true),
                  from.count,
                  from.chosen,
                  from.normalised,
                  from.sigmoid,
                  {},
                  from.groups,
                  from.chosen_groups,
                  from.group_best,
                  from.scale,
                  from.shared,
                  from.shared_gate.has_value()};
  if (from.correction != nullptr) {
    experts.correction.assign(from.correction, from.correction + from.count);
  }
  products_.set_bias(experts.router, {from.bias}, {from.count}, false);
  most_chosen_ = std::max(most_chosen_, from.chosen);
  layers_.back().experts = std::move(experts);
}

void CpuDecoder::set_ends(const std::optional<FileRows>& embedding, const TensorRef& final_norm,
                          const WeightRef& head) {
  check_matrix(head, "head", slice(shape_.vocab_size).count, shape_.hidden_size);
  const std::lock_guard lock(mutex_);
  for (const Layer& layer : layers_) {
    const std::size_t wanted = layer.experts ? layer.experts->num_mlps() : 1;
    require(layer.mlps.size() == wanted, "a layer lacks MLPs");
  }
  final_norm_ = copy_vector(final_norm, "final_norm", shape_.hidden_size);
  head_ = std::make_unique<LinearLayer>(products_.pack({&head}, false));
  head_->softcap = shape_.logits_softcap;
  embedding_ = embedding;
}

void CpuDecoder::set_rotations(const std::vector<Rotations>& rotations) {
  for (const Rotations& table : rotations) {
    for (const TensorRef* tensor : {&table.cos, &table.sin}) {
      require(tensor->dtype == row_dtype_ && tensor->shape.size() == 3 &&
                  tensor->shape == table.cos.shape && tensor->shape[1] == 1 &&
                  tensor->shape[0] == rotations[0].cos.shape[0] &&
                  tensor->shape[2] <= shape_.head_dim && tensor->strides[0] == tensor->shape[2] &&
                  tensor->strides[2] == 1,
              "cosines and sines are [positions, 1, rotary_dim] in the KV cache's dtype, "
              "contiguous");
    }
  }
  for (const Layer& layer : layers_) {
    require(layer.rotation < rotations.size(), "a layer has rotation " +
                                                   std::to_string(layer.rotation) + " of " +
                                                   std::to_string(rotations.size()));
  }
  const std::lock_guard lock(mutex_);
  tables_ = rotations;
}

}  // namespace vmserve
