#include "decoder.h"

#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cmath>
#include <cstring>
#include <functional>
#include <limits>
#include <stdexcept>
#include <utility>

#include "kernels/isa.h"
#include "vmserve/errors.h"

namespace vmserve {
namespace {

void require(bool condition, const std::string& what) {
  if (!condition) throw MisuseError(what);
}

std::vector<float> copy_vector(const TensorRef& tensor, const char* name, std::int64_t size) {
  require(tensor.shape == std::vector<std::int64_t>{size} &&
              tensor.strides == std::vector<std::int64_t>{1} && tensor.dtype == DType::kFloat32,
          std::string(name) + " is not [" + std::to_string(size) + "] in contiguous float32");
  const auto* const from = reinterpret_cast<const float*>(tensor.data);
  return {from, from + size};
}

template <class Number>
void grow(std::vector<Number>& buffer, std::int64_t size) {
  if (buffer.size() < static_cast<std::size_t>(size)) buffer.resize(static_cast<std::size_t>(size));
}

std::uint16_t narrow_bits(float x) {
  std::uint32_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  const bool is_nan = (bits & 0x7fffffffU) > 0x7f800000U;
  return static_cast<std::uint16_t>(is_nan ? 0x7fc0U
                                           : (bits + 0x7fffU + ((bits >> 16) & 1U)) >> 16);
}

void read_exactly(int descriptor, char* to, std::int64_t bytes, std::int64_t at) {
  while (bytes > 0) {
    const ssize_t found = pread(descriptor, to, static_cast<std::size_t>(bytes), at);
    if (found < 0 && errno == EINTR) continue;
    if (found <= 0) {
      throw std::runtime_error(std::string("the model's file can no longer be read: ") +
                               (found < 0 ? std::strerror(errno) : "it has been cut"));
    }
    to += found;
    at += found;
    bytes -= found;
  }
}

float sigmoid(float x) {
  return 1.0F / (1.0F + std::exp(-x));
}

class Stopwatch {
 public:
  double seconds() const {
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - began_).count();
  }

 private:
  std::chrono::steady_clock::time_point began_ = std::chrono::steady_clock::now();
};

}  // namespace

struct CpuDecoder::Mlp {
  LinearLayer gate_up, down;

  std::size_t weight_bytes() const { return gate_up.weight_bytes() + down.weight_bytes(); }
};

struct CpuDecoder::Experts {
  LinearLayer router;  // the last output: of the shared expert's gate
  std::int64_t count, chosen;
  bool normalised, sigmoid;
  std::vector<float> correction;
  std::int64_t groups, chosen_groups, group_best;
  float scale;
  bool shared, shared_gate;

  // Whether scores that choose are other numbers than the products.
  bool scores() const { return sigmoid || !correction.empty() || groups > 1; }
  std::size_t num_mlps() const { return static_cast<std::size_t>(count + (shared ? 1 : 0)); }
};

struct CpuDecoder::Latent {
  std::vector<float> q_norm, kv_norm;
  float norm_eps;
  std::optional<LinearLayer> q;               // behind q_norm
  std::vector<LinearLayer> key_up, value_up;  // of each head
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

  // Whether what enters the output product is float32, not of the KV cache's type.
  bool mixes_floats() const { return gated || delta || latent; }
};

CpuDecoder::CpuDecoder(const DecoderShape& shape, DType kv_dtype, Quantization quantization,
                       int num_threads, const std::string& isa)
    : shape_(shape),
      kv_dtype_(kv_dtype),
      pool_(std::make_shared<ThreadPool>(num_threads)),
      products_(cpu::choose_table(isa).linear, pool_, quantization, kv_dtype == DType::kBFloat16),
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
  check_matrix(from.output, "output", hidden, q_size);
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
  products_.set_bias(layer.output, {from.output_bias}, {hidden}, false);
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
  check_matrix(from.key_up, "key_up", heads * shape.rank, shape.plain);
  check_matrix(from.value_up, "value_up", heads * shape.value, shape.rank);
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
  const auto add_head = [&](std::vector<LinearLayer>& to, TensorRef all, std::int64_t rows,
                            std::int64_t head) {
    all.data += head * rows * all.strides[0] * (all.dtype == DType::kBFloat16 ? 2 : 4);
    all.shape[0] = rows;
    const WeightRef one = all;
    to.push_back(products_.pack({&one}, false));
  };
  for (std::int64_t head = 0; head < heads; ++head) {
    add_head(latent.key_up, from.key_up, shape.rank, head);
  }
  for (std::int64_t head = 0; head < heads; ++head) {
    add_head(latent.value_up, from.value_up, shape.value, head);
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
  // They say how much a state keeps: rounding would add up over all tokens.
  layer.delta_gates = products_.pack({&from.gates}, false, true);
  layer.output = products_.pack({&from.output}, false);
  layer.delta = from.weights;
  layer.index = num_deltas_++;
  layers_.push_back(std::move(layer));
}

void CpuDecoder::add_mlp(const DecoderMlp& from) {
  const std::int64_t hidden = shape_.hidden_size, size = outputs_of(from.gate);
  check_matrix(from.gate, "gate", size, hidden);
  check_matrix(from.up, "up", size, hidden);
  check_matrix(from.down, "down", hidden, size);
  const std::lock_guard lock(mutex_);
  require(!layers_.empty(), "there is no layer yet");
  Layer& layer = layers_.back();
  const std::size_t most = layer.experts ? layer.experts->num_mlps() : 1;
  require(layer.mlps.size() < most, "the layer has all its MLPs");
  const bool shared = layer.experts && layer.experts->shared && layer.mlps.size() + 1 == most;
  Mlp mlp{products_.pack({&from.gate, &from.up}, true), products_.pack({&from.down}, false)};
  products_.set_bias(mlp.gate_up, {from.gate_bias, from.up_bias}, {size, size}, true);
  products_.set_bias(mlp.down, {from.down_bias}, {hidden}, false);
  mlp.gate_up.gate = from.activation;
  if (!layer.mlps.empty() && !shared) {
    const Mlp& first = layer.mlps.front();
    require(mlp.gate_up.outputs == first.gate_up.outputs &&
                mlp.gate_up.form->rows == first.gate_up.form->rows &&
                mlp.down.form->rows == first.down.form->rows,
            "the experts of a layer differ in size or in the bits of their weights");
  }
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
  // Its products choose: they are not rounded as others may be.
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
  layers_.back().experts = std::move(experts);
}

void CpuDecoder::set_ends(const std::optional<FileRows>& embedding, const TensorRef& final_norm,
                          const WeightRef& head) {
  check_matrix(head, "head", shape_.vocab_size, shape_.hidden_size);
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
      require(tensor->dtype == kv_dtype_ && tensor->shape.size() == 3 &&
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

std::int64_t CpuDecoder::num_positions() const {
  return tables_.empty() ? 0 : tables_[0].cos.shape[0];
}

void CpuDecoder::check_positions(const CpuBatch& batch) const {
  for (std::int64_t i = 0; i < batch.num_sequences(); ++i) {
    const std::int64_t end = batch.num_past(i) + batch.num_new(i);
    require(end <= num_positions(), "position " + std::to_string(end - 1) +
                                        " has no rotation: there are " +
                                        std::to_string(num_positions()));
  }
}

void CpuDecoder::check_call(const std::vector<std::int64_t>& token_ids,
                            const std::vector<Part>& parts,
                            const std::vector<std::int64_t>& wanted) const {
  require(head_ != nullptr && !layers_.empty(), "the decoder has no weights yet");
  const auto num_rows = static_cast<std::int64_t>(token_ids.size());
  for (const std::int64_t id : token_ids) {
    require(id >= 0 && id < shape_.vocab_size, "token id " + std::to_string(id) +
                                                   " is outside 0 .. " +
                                                   std::to_string(shape_.vocab_size - 1));
  }
  for (const std::int64_t row : wanted) {
    require(row >= 0 && row < num_rows,
            "row " + std::to_string(row) + " of " + std::to_string(num_rows) + " has no logits");
  }
  std::int64_t rows = 0;
  for (const Part& part : parts) {
    rows += part.batch->num_tokens();
    const CpuKvView& view = part.batch->view();
    require(view.dtype() == kv_dtype_ && view.kv_heads() == shape_.kv_heads &&
                view.values_in_keys() == (shape_.latent.rank > 0) &&
                view.head_dim() == shape_.head_dim &&
                view.num_layers() + num_deltas_ == static_cast<std::int64_t>(layers_.size()) &&
                (!delta_ || view.state_floats() >= num_deltas_ * delta_->shape().state_floats()),
            "the KV cache is not this decoder's");
    check_positions(*part.batch);
  }
  require(rows == num_rows, std::to_string(num_rows) + " token ids for batches of " +
                                std::to_string(rows) + " tokens");
}

void CpuDecoder::embed(const std::vector<std::int64_t>& token_ids, const float* embedded) {
  const std::int64_t hidden = shape_.hidden_size;
  const auto num_rows = static_cast<std::int64_t>(token_ids.size());
  grow(x_, num_rows * hidden);
  const float scale = shape_.embedding_scale;
  if (!embedding_) {
    for (std::int64_t i = 0; i < num_rows * hidden; ++i) x_[i] = embedded[i] * scale;
    return;
  }
  const bool bf16 = embedding_->dtype == DType::kBFloat16;
  const std::int64_t row_bytes = hidden * (bf16 ? 2 : 4);
  float* to = x_.data();
  for (const std::int64_t id : token_ids) {
    // A narrow row lies in the upper half at first: each number is read before it is overwritten.
    char* const row = reinterpret_cast<char*>(to + hidden) - row_bytes;
    read_exactly(embedding_->descriptor, row, row_bytes, embedding_->start + id * row_bytes);
    for (std::int64_t i = 0; bf16 && i < hidden; ++i) {
      std::uint16_t bits;
      std::memcpy(&bits, row + 2 * i, sizeof bits);
      const std::uint32_t wide = static_cast<std::uint32_t>(bits) << 16;
      std::memcpy(to + i, &wide, sizeof wide);
    }
    for (std::int64_t i = 0; scale != 1.0F && i < hidden; ++i) to[i] *= scale;
    to += hidden;
  }
}

// `out` has room for padded_depth(size).
void CpuDecoder::normalise(const float* row, std::int64_t size, const float* norm, float eps,
                           float* out) const {
  // Packing a block of one row keeps the order of elements.
  cpu::PackRowsArgs args{};
  args.rows = row;
  args.row_stride = size;
  args.num_rows = 1;
  args.depth = size;
  args.norm = norm;
  args.eps = eps;
  args.block = out;
  products_.kernels().pack_rows[cpu::kRowsFloat32](args);
}

void CpuDecoder::normalise_heads(const Layer& layer, std::int64_t num_rows) {
  const std::int64_t dim = shape_.head_dim, q_heads = shape_.q_heads, kv_heads = shape_.kv_heads;
  const std::int64_t gates = layer.gated ? q_heads * dim : 0;
  const std::int64_t row_size = gates + (q_heads + 2 * kv_heads) * dim;
  const bool narrow = is_narrow();
  if (narrow) grow(narrow_qkv_, num_rows * row_size);
  products_.parallel(num_rows, num_rows * row_size, [&](std::int64_t row) {
    std::vector<float> room(static_cast<std::size_t>(padded_depth(dim)));
    float* const at = qkv_.data() + row * row_size + gates;
    for (std::int64_t head = 0; head < q_heads + kv_heads; ++head) {
      const auto& norm = head < q_heads ? layer.q_norm : layer.k_norm;
      normalise(at + head * dim, dim, norm.data(), shape_.norm_eps, room.data());
      std::copy_n(room.data(), dim, at + head * dim);
    }
    std::uint16_t* const to = narrow_qkv_.data() + row * row_size + gates;
    for (std::int64_t i = 0; narrow && i < row_size - gates; ++i) to[i] = narrow_bits(at[i]);
  });
}

void CpuDecoder::gather_rotations(const std::vector<Part>& parts, std::int64_t num_rows) {
  // Whatever the rotary dimensions are, a table's rows take no more than whole heads.
  const std::int64_t item = kv_dtype_ == DType::kBFloat16 ? 2 : 4;
  const std::int64_t table_bytes = rotation_bytes(num_rows);
  grow(rotations_, static_cast<std::int64_t>(tables_.size()) * table_bytes);
  for (std::size_t index = 0; index < tables_.size(); ++index) {
    char* to = rotations_.data() + static_cast<std::int64_t>(index) * table_bytes;
    for (const TensorRef* table : {&tables_[index].cos, &tables_[index].sin}) {
      const std::int64_t bytes = table->shape[2] * item;
      for (const Part& part : parts) {
        for (std::int64_t i = 0; i < part.batch->num_sequences(); ++i) {
          const auto size = static_cast<std::size_t>(part.batch->num_new(i) * bytes);
          std::memcpy(to, table->data + part.batch->num_past(i) * bytes, size);
          to += size;
        }
      }
    }
  }
}

// Room for the rows of one table.
std::int64_t CpuDecoder::rotation_bytes(std::int64_t num_rows) const {
  return 2 * num_rows * shape_.head_dim * (kv_dtype_ == DType::kBFloat16 ? 2 : 4);
}

// Writes the rows of all of layer.qkv to qkv_.
void CpuDecoder::multiply_projections(const Layer& layer, std::int64_t num_rows, bool narrow) {
  std::int64_t row_size = 0;
  for (const LinearLayer& part : layer.qkv) row_size += part.outputs;
  grow(qkv_, num_rows * row_size);
  const auto epilogue = narrow ? cpu::Epilogue::kNarrow : cpu::Epilogue::kStore;
  auto* to = reinterpret_cast<char*>(qkv_.data());
  for (std::size_t i = 0; i < layer.qkv.size(); ++i) {
    const LinearLayer& part = layer.qkv[i];
    if (i == 0 || part.form->rows != layer.qkv[i - 1].form->rows) {
      products_.pack_rows(part, x_.data(), false, num_rows, layer.attention_norm.data(),
                          shape_.norm_eps);
    }
    const LinearLayer& next =
        i + 1 < layer.qkv.size() ? layer.qkv[i + 1]
        : layer.delta            ? layer.delta_gates
        : layer.latent           ? layer.latent->q ? *layer.latent->q : layer.latent->key_up.front()
                                 : layer.output;
    products_.multiply(part, &next, nullptr, num_rows, epilogue, to, row_size);
    to += part.outputs * (narrow ? 2 : 4);
  }
}

// Returns the address of q, k and v of the rows, in the KV cache's type, behind gates if the layer
// is gated.
char* CpuDecoder::project(const Layer& layer, std::int64_t num_rows) {
  const bool normalises = !layer.q_norm.empty();
  multiply_projections(layer, num_rows, is_narrow() && !normalises);
  if (!normalises) return reinterpret_cast<char*>(qkv_.data());
  normalise_heads(layer, num_rows);
  return is_narrow() ? reinterpret_cast<char*>(narrow_qkv_.data())
                     : reinterpret_cast<char*>(qkv_.data());
}

// The same for a layer with latents, whose rows have q and k.
char* CpuDecoder::project_latent(const Layer& layer, std::int64_t num_rows) {
  const Latent& latent = *layer.latent;
  const LatentShape& shape = shape_.latent;
  const std::int64_t heads = shape_.q_heads, dim = shape_.head_dim, each = shape.query_dim();
  const std::int64_t kv_size = shape.rank + shape.rotated;
  multiply_projections(layer, num_rows, false);
  const float* queries = qkv_.data();
  std::int64_t stride = heads * each + kv_size;
  const std::int64_t first_size = latent.q ? shape.q_rank : heads * each;
  const std::int64_t row_size = first_size + kv_size;
  if (latent.q) {
    stride = heads * each;
    grow(queries_, num_rows * stride);
    head_shares_ = {{&*latent.q, 0, 0, num_rows}};
    products_.pack_rows(*latent.q, qkv_.data(), false, head_shares_, latent.q_norm.data(),
                        latent.norm_eps, row_size);
    products_.multiply(*latent.q, &latent.key_up[0], nullptr, num_rows, cpu::Epilogue::kStore,
                       queries_.data(), stride);
    queries = queries_.data();
  }
  const std::int64_t out_size = (heads + 1) * dim;
  grow(latent_rows_, num_rows * out_size);
  head_shares_.clear();
  for (std::int64_t head = 0; head < heads; ++head) {
    head_shares_.push_back({&latent.key_up[static_cast<std::size_t>(head)], head * num_rows, 0,
                            num_rows, head * each, head * dim + shape.rotated});
  }
  products_.pack_rows(latent.key_up[0], queries, false, head_shares_, nullptr, 0.0F, stride);
  products_.multiply(head_shares_.data(), heads, nullptr, nullptr,
                     is_narrow() ? cpu::Epilogue::kNarrow : cpu::Epilogue::kStore,
                     latent_rows_.data(), out_size);
  products_.parallel(num_rows, num_rows * out_size, [&](std::int64_t row) {
    const auto write = [&](const float* from, std::int64_t count, std::int64_t column) {
      const std::int64_t at = row * out_size + column;
      if (!is_narrow()) {
        std::copy_n(from, count, latent_rows_.data() + at);
        return;
      }
      auto* const to = reinterpret_cast<std::uint16_t*>(latent_rows_.data()) + at;
      for (std::int64_t i = 0; i < count; ++i) to[i] = narrow_bits(from[i]);
    };
    for (std::int64_t head = 0; head < heads; ++head) {
      write(queries + row * stride + head * each + shape.plain, shape.rotated, head * dim);
    }
    const float* const kv = qkv_.data() + row * row_size + first_size;
    std::vector<float> room(static_cast<std::size_t>(padded_depth(shape.rank)));
    normalise(kv, shape.rank, latent.kv_norm.data(), latent.norm_eps, room.data());
    write(kv + shape.rank, shape.rotated, heads * dim);
    write(room.data(), shape.rank, heads * dim + shape.rotated);
  });
  return reinterpret_cast<char*>(latent_rows_.data());
}

// Multiplies attended_, latents of each head, to values in float32.
void CpuDecoder::expand_values(const Layer& layer, std::int64_t num_rows) {
  const Latent& latent = *layer.latent;
  const LatentShape& shape = shape_.latent;
  const std::int64_t heads = shape_.q_heads;
  head_shares_.clear();
  for (std::int64_t head = 0; head < heads; ++head) {
    head_shares_.push_back({&latent.value_up[static_cast<std::size_t>(head)], head * num_rows, 0,
                            num_rows, head * shape.rank, head * shape.value});
  }
  products_.pack_rows(latent.value_up[0], attended_.data(), is_narrow(), head_shares_, nullptr,
                      0.0F, heads * shape.rank);
  grow(values_, num_rows * heads * shape.value);
  products_.multiply(head_shares_.data(), heads, &layer.output, nullptr, cpu::Epilogue::kStore,
                     values_.data(), heads * shape.value);
  std::swap(attended_, values_);
}

void CpuDecoder::attend(const Layer& layer, char* qkv, std::vector<Part>& parts) {
  const std::int64_t dim = shape_.head_dim, q_heads = shape_.q_heads, kv_heads = shape_.kv_heads;
  const std::int64_t gates = layer.gated ? q_heads * dim : 0;
  const std::int64_t row_size = gates + (q_heads + (layer.latent ? 1 : 2) * kv_heads) * dim;
  const std::int64_t out_dim = layer.latent ? shape_.latent.rank : dim;
  const std::int64_t item = is_narrow() ? 2 : 4;
  std::int64_t num_rows = 0, first = 0;
  for (const Part& part : parts) num_rows += part.batch->num_tokens();
  const std::int64_t rotary_dim = tables_[layer.rotation].cos.shape[2];
  char* const rotations =
      rotations_.data() + static_cast<std::int64_t>(layer.rotation) * rotation_bytes(num_rows);
  for (Part& part : parts) {
    const Stopwatch watch;
    const std::int64_t rows = part.batch->num_tokens();
    const auto heads_at = [&](std::int64_t head, std::int64_t heads) {
      TensorRef tensor;
      tensor.data = qkv + (first * row_size + gates + head * dim) * item;
      tensor.dtype = kv_dtype_;
      tensor.shape = {rows, heads, dim};
      tensor.strides = {row_size, dim, 1};
      return tensor;
    };
    const auto rotation_at = [&](std::int64_t row) {
      TensorRef tensor;
      tensor.data = rotations + row * rotary_dim * item;
      tensor.dtype = kv_dtype_;
      tensor.shape = {rows, 1, rotary_dim};
      tensor.strides = {rotary_dim, rotary_dim, 1};
      return tensor;
    };
    CpuLayerCall call;
    call.layer = layer.index;
    call.q = heads_at(0, q_heads);
    call.k = heads_at(q_heads, kv_heads);
    if (!layer.latent) call.v = heads_at(q_heads + kv_heads, kv_heads);
    call.cos = rotation_at(first);
    call.sin = rotation_at(num_rows + first);
    call.out.data = reinterpret_cast<char*>(attended_.data()) + first * q_heads * out_dim * item;
    call.out.dtype = kv_dtype_;
    call.out.shape = {rows, q_heads, out_dim};
    call.out.strides = {q_heads * out_dim, out_dim, 1};
    call.scale = layer.scale;
    call.window = layer.window;
    call.softcap = layer.softcap;
    call.sinks = layer.sinks.empty() ? nullptr : layer.sinks.data();
    attention_->run(*part.batch, call);
    part.seconds += watch.seconds();
    first += rows;
  }
}

// Multiplies attended_ by its gates, in float32.
void CpuDecoder::gate_attention(const Layer& layer, std::int64_t num_rows) {
  const std::int64_t size = layer.output.inputs;
  const std::int64_t row_size = size + (shape_.q_heads + 2 * shape_.kv_heads) * shape_.head_dim;
  std::swap(ungated_, attended_);
  grow(attended_, num_rows * size);
  products_.parallel(num_rows, num_rows * size * 8, [&](std::int64_t row) {
    const float* const gates = qkv_.data() + row * row_size;
    float* const to = attended_.data() + row * size;
    if (is_narrow()) {
      mixing_.gate_bf16(reinterpret_cast<const cpu::Bf16*>(ungated_.data()) + row * size, gates,
                        size, to);
    } else {
      mixing_.gate(ungated_.data() + row * size, gates, size, to);
    }
  });
}

void CpuDecoder::mix_delta(const Layer& layer, const std::vector<Part>& parts,
                           std::int64_t num_rows) {
  multiply_projections(layer, num_rows, false);
  const LinearLayer& gates = layer.delta_gates;
  if (gates.form->rows != layer.qkv.back().form->rows) {
    products_.pack_rows(gates, x_.data(), false, num_rows, layer.attention_norm.data(),
                        shape_.norm_eps);
  }
  grow(delta_gates_, num_rows * gates.outputs);
  products_.multiply(gates, &layer.output, nullptr, num_rows, cpu::Epilogue::kStore,
                     delta_gates_.data(), gates.outputs);
  const Stopwatch watch;
  sequences_.clear();
  std::int64_t first = 0;
  for (const Part& part : parts) {
    const CpuBatch& batch = *part.batch;
    for (std::int64_t i = 0; i < batch.num_sequences(); ++i) {
      sequences_.push_back({batch.states(i) + layer.index * delta_->shape().state_floats(), first,
                            batch.num_new(i), batch.num_past(i) == 0});
      first += batch.num_new(i);
    }
  }
  grow(attended_, num_rows * layer.output.inputs);
  delta_->run(products_, *layer.delta, sequences_, qkv_.data(), delta_gates_.data(),
              shape_.norm_eps, attended_.data());
  delta_seconds_ += watch.seconds();
}

void CpuDecoder::keep(const Layer& layer, const std::vector<std::int64_t>& wanted) {
  const std::int64_t hidden = shape_.hidden_size, size = layer.output.inputs;
  const std::int64_t item = is_narrow() && !layer.mixes_floats() ? 2 : 4;
  const auto num_wanted = static_cast<std::int64_t>(wanted.size());
  // Rows may be wanted in any order, so they are gathered in another buffer first.
  grow(kept_, num_wanted * (hidden + size));
  auto* const attended = reinterpret_cast<char*>(attended_.data());
  auto* const kept = reinterpret_cast<char*>(kept_.data() + num_wanted * hidden);
  for (std::int64_t i = 0; i < num_wanted; ++i) {
    const std::int64_t row = wanted[static_cast<std::size_t>(i)];
    std::copy_n(x_.data() + row * hidden, hidden, kept_.data() + i * hidden);
    std::memcpy(kept + i * size * item, attended + row * size * item,
                static_cast<std::size_t>(size * item));
  }
  grow(x_, num_wanted * hidden);
  grow(attended_, num_wanted * size);
  std::copy_n(kept_.data(), num_wanted * hidden, x_.data());
  std::memcpy(attended_.data(), kept, static_cast<std::size_t>(num_wanted * size * item));
}

// Adds the rows of product_, normalised, to the residual.
void CpuDecoder::add_normalised(const std::vector<float>& norm, std::int64_t num_rows) {
  const std::int64_t hidden = shape_.hidden_size;
  products_.parallel(num_rows, num_rows * hidden, [&](std::int64_t row) {
    std::vector<float> room(static_cast<std::size_t>(padded_depth(hidden)));
    normalise(product_.data() + row * hidden, hidden, norm.data(), shape_.norm_eps, room.data());
    float* const to = x_.data() + row * hidden;
    for (std::int64_t i = 0; i < hidden; ++i) to[i] += room[i];
  });
}

void CpuDecoder::finish_layer(const Layer& layer, const LinearLayer& next, std::int64_t num_rows) {
  products_.pack_rows(layer.output, attended_.data(), is_narrow() && !layer.mixes_floats(),
                      num_rows, nullptr, shape_.norm_eps);
  const bool adds = layer.attention_out_norm.empty();
  if (!adds) grow(product_, num_rows * shape_.hidden_size);
  products_.multiply(layer.output, layer.experts ? &layer.experts->router : &layer.mlps[0].gate_up,
                     nullptr, num_rows, adds ? cpu::Epilogue::kAdd : cpu::Epilogue::kStore,
                     adds ? x_.data() : product_.data(), shape_.hidden_size);
  if (!adds) add_normalised(layer.attention_out_norm, num_rows);
  if (layer.experts) {
    add_experts_of(layer, next, num_rows);
  } else {
    add_mlp_of(layer, next, num_rows);
  }
}

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

// Of the rows of x_, normalised.
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
  grow(gated_, num_rows * to.depth);
  if (to.row_format().group_depth > 0) {
    // Scales need the maximum of a whole group of the row, so products are stored first, then
    // packed.
    products_.multiply(first, num_shares, down, nullptr, cpu::Epilogue::kGateRows, gated_.data(),
                       to.inputs);
    products_.pack_rows(to, gated_.data(), false, down_shares_, nullptr, shape_.norm_eps);
    products_.multiply(second, num_shares, next, nullptr, epilogue, out, hidden);
  } else {
    products_.multiply(first, num_shares, down, nullptr, cpu::Epilogue::kGate, gated_.data(),
                       to.depth, to.form->rows == cpu::kRowsBFloat16);
    products_.multiply(second, num_shares, next, gated_.data(), epilogue, out, hidden);
  }
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
  // Rows are rounded once. Those of an expert with several are then brought side by side.
  single_rows_.clear();
  for (std::int64_t row = 0; row < num_rows; ++row) single_rows_.push_back({nullptr, row, row, 1});
  const LinearLayer& any = layer.mlps[0].gate_up;
  products_.pack_rows(any, x_.data(), false, single_rows_, norm, shape_.norm_eps);
  products_.gather_rows(any, gate_up_shares_, slot_rows_);
  grow(expert_out_, num_rows * chosen * hidden);
  multiply_mlps(nullptr, &next, num_rows * chosen, cpu::Epilogue::kStore, expert_out_.data());
  products_.parallel(num_rows, num_rows * chosen * hidden, [&](std::int64_t row) {
    // One order for every batch: that of the router's products.
    float* const sum = expert_out_.data() + slots_[row * chosen] * hidden;
    const float* const weights = expert_weights_.data() + row * chosen;
    for (std::int64_t i = 0; i < hidden; ++i) sum[i] *= weights[0];
    for (std::int64_t rank = 1; rank < chosen; ++rank) {
      const float* const from = expert_out_.data() + slots_[row * chosen + rank] * hidden;
      for (std::int64_t i = 0; i < hidden; ++i) sum[i] += weights[rank] * from[i];
    }
    if (experts.shared) {
      const float* const from = product_.data() + row * hidden;
      float weight = 1.0F;
      if (experts.shared_gate) weight = sigmoid(router_logits_[(row + 1) * logits - 1]);
      for (std::int64_t i = 0; i < hidden; ++i) sum[i] += weight * from[i];
    }
    float* const to = x_.data() + row * hidden;
    for (std::int64_t i = 0; i < hidden; ++i) to[i] += sum[i];
  });
}

// Writes the scores that choose; -inf for experts of groups that are not chosen.
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
    // A single row is read where it is packed: see below.
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

void CpuDecoder::norm_rows(const float* rows, std::int64_t num_rows, float* out) const {
  const std::int64_t hidden = shape_.hidden_size;
  for (std::int64_t row = 0; row < num_rows; ++row, rows += hidden, out += hidden) {
    double squares = 0.0;
    for (std::int64_t i = 0; i < hidden; ++i) squares += static_cast<double>(rows[i]) * rows[i];
    const auto scale = static_cast<float>(1.0 / std::sqrt(squares / static_cast<double>(hidden) +
                                                          static_cast<double>(shape_.norm_eps)));
    for (std::int64_t i = 0; i < hidden; ++i) out[i] = rows[i] * scale * final_norm_[i];
  }
}

void CpuDecoder::forward(const std::vector<std::int64_t>& token_ids, std::vector<Part>& parts,
                         const std::vector<std::int64_t>& wanted, float* logits,
                         std::int64_t num_hidden, float* hidden, const float* embedded) {
  const std::lock_guard lock(mutex_);
  check_call(token_ids, parts, wanted);
  require(embedding_.has_value() == (embedded == nullptr),
          "embedded rows are for a decoder without an embedding, which needs them");
  require(num_hidden >= 0 && num_hidden <= static_cast<std::int64_t>(wanted.size()),
          std::to_string(num_hidden) + " hidden states are more than the rows wanted");
  auto num_rows = static_cast<std::int64_t>(token_ids.size());
  if (num_rows == 0) return;
  const ThreadPool::Awake awake(*pool_);
  embed(token_ids, embedded);
  gather_rotations(parts, num_rows);
  const auto num_layers = static_cast<std::int64_t>(layers_.size());
  for (std::int64_t index = 0; index < num_layers; ++index) {
    const Layer& layer = layers_[static_cast<std::size_t>(index)];
    if (layer.delta) {
      mix_delta(layer, parts, num_rows);
    } else {
      char* const qkv = layer.latent ? project_latent(layer, num_rows) : project(layer, num_rows);
      grow(attended_,
           num_rows * std::max(layer.output.inputs, shape_.q_heads * shape_.latent.rank));
      attend(layer, qkv, parts);
      if (layer.gated) gate_attention(layer, num_rows);
      if (layer.latent) expand_values(layer, num_rows);
    }
    const bool is_last = index == num_layers - 1;
    if (is_last) {
      // Later operations read only the wanted rows.
      keep(layer, wanted);
      num_rows = static_cast<std::int64_t>(wanted.size());
      if (num_rows == 0) return;
    }
    finish_layer(layer, is_last ? *head_ : layers_[static_cast<std::size_t>(index + 1)].qkv.front(),
                 num_rows);
  }
  num_rows -= num_hidden;
  norm_rows(x_.data() + num_rows * shape_.hidden_size, num_hidden, hidden);
  if (num_rows == 0) return;
  products_.pack_rows(*head_, x_.data(), false, num_rows, final_norm_.data(), shape_.norm_eps);
  products_.multiply(*head_, &layers_.front().qkv.front(), nullptr, num_rows, cpu::Epilogue::kStore,
                     logits, shape_.vocab_size);
}

}  // namespace vmserve
