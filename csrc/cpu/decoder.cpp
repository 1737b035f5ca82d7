#include "decoder.h"

#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cmath>
#include <cstring>
#include <stdexcept>
#include <utility>

#include "decoder_layers.h"

namespace vmserve {
namespace {

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

class Stopwatch {
 public:
  double seconds() const {
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - began_).count();
  }

 private:
  std::chrono::steady_clock::time_point began_ = std::chrono::steady_clock::now();
};

}  // namespace

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
    require(view.takes(row_dtype_) && view.kv_heads() == shape_.kv_heads &&
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
    float* const to = x_.data();
    for (std::int64_t i = 0; i < num_rows * hidden; ++i) to[i] = embedded[i] * scale;
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
  // A table's rows take at most whole heads, whatever the rotary dimensions are.
  const std::int64_t item = row_dtype_ == DType::kBFloat16 ? 2 : 4;
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
  return 2 * num_rows * shape_.head_dim * (row_dtype_ == DType::kBFloat16 ? 2 : 4);
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

// Returns the address of q, k and v of the rows, in the KV cache's type. If the layer is gated,
// gates precede them.
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
      tensor.dtype = row_dtype_;
      tensor.shape = {rows, heads, dim};
      tensor.strides = {row_size, dim, 1};
      return tensor;
    };
    const auto rotation_at = [&](std::int64_t row) {
      TensorRef tensor;
      tensor.data = rotations + row * rotary_dim * item;
      tensor.dtype = row_dtype_;
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
    const std::int64_t out_size = all_heads() * out_dim;
    const std::int64_t own = group_ ? group_->rank() * q_heads * out_dim : 0;
    call.out.data = reinterpret_cast<char*>(attended_.data()) + (first * out_size + own) * item;
    call.out.dtype = row_dtype_;
    call.out.shape = {rows, q_heads, out_dim};
    call.out.strides = {out_size, out_dim, 1};
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

// Moves the wanted rows to the front, because only they are read later. Copies `bytes` of each row,
// from byte `first` on.
void CpuDecoder::keep(StepRows& rows, std::int64_t row_bytes, std::int64_t first,
                      std::int64_t bytes, const std::vector<std::int64_t>& wanted) {
  const auto num_wanted = static_cast<std::int64_t>(wanted.size());
  // Rows may be wanted in any order, so they are gathered in another buffer first.
  grow(kept_, num_wanted * bytes);
  const auto copy = [&](char* to, const char* from) {
    std::memcpy(to, from, static_cast<std::size_t>(bytes));
  };
  const auto* const from = reinterpret_cast<const char*>(rows.data()) + first;
  for (std::int64_t i = 0; i < num_wanted; ++i) {
    copy(kept_.data() + i * bytes, from + wanted[static_cast<std::size_t>(i)] * row_bytes);
  }
  grow(rows, (num_wanted * row_bytes + 3) / 4);
  auto* const to = reinterpret_cast<char*>(rows.data()) + first;
  for (std::int64_t i = 0; i < num_wanted; ++i) {
    copy(to + i * row_bytes, kept_.data() + i * bytes);
  }
}

// Adds the rows of product_, normalised, to the residual.
void CpuDecoder::add_normalised(const std::vector<float>& norm, std::int64_t num_rows) {
  const std::int64_t hidden = shape_.hidden_size;
  products_.parallel(num_rows, num_rows * hidden, [&](std::int64_t row) {
    std::vector<float> room(static_cast<std::size_t>(padded_depth(hidden)));
    normalise(product_.data() + row * hidden, hidden, norm.data(), shape_.norm_eps, room.data());
    float* const to = x_.data() + row * hidden;
    const std::int64_t end = own_hidden_.first + own_hidden_.count;
    for (std::int64_t i = own_hidden_.first; i < end; ++i) to[i] += room[i];
  });
  meet();
}

void CpuDecoder::finish_layer(const Layer& layer, const LinearLayer& next, std::int64_t num_rows) {
  products_.pack_rows(layer.output, attended_.data(), is_narrow() && !layer.mixes_floats(),
                      num_rows, nullptr, shape_.norm_eps);
  const bool adds = layer.attention_out_norm.empty();
  if (!adds) grow(product_, num_rows * shape_.hidden_size);
  products_.multiply(layer.output, layer.experts ? &layer.experts->router : &layer.mlps[0].gate_up,
                     nullptr, num_rows, adds ? cpu::Epilogue::kAdd : cpu::Epilogue::kStore,
                     (adds ? x_ : product_).data() + own_hidden_.first, shape_.hidden_size);
  meet();
  if (!adds) add_normalised(layer.attention_out_norm, num_rows);
  if (layer.experts) {
    add_experts_of(layer, next, num_rows);
  } else {
    add_mlp_of(layer, next, num_rows);
  }
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
  require(!is_first() || embedding_.has_value() == (embedded == nullptr),
          "embedded rows are for a decoder without an embedding, which needs them");
  require(num_hidden >= 0 && num_hidden <= static_cast<std::int64_t>(wanted.size()),
          std::to_string(num_hidden) + " hidden states are more than the rows wanted");
  if (token_ids.empty()) return;
  place_rows(static_cast<std::int64_t>(token_ids.size()), static_cast<std::int64_t>(wanted.size()));
  try {
    compute(token_ids, parts, wanted, logits, num_hidden, hidden, embedded);
  } catch (...) {
    if (group_) group_->fail();  // the others would wait for ever
    throw;
  }
}

void CpuDecoder::compute(const std::vector<std::int64_t>& token_ids, std::vector<Part>& parts,
                         const std::vector<std::int64_t>& wanted, float* logits,
                         std::int64_t num_hidden, float* hidden, const float* embedded) {
  auto num_rows = static_cast<std::int64_t>(token_ids.size());
  const ThreadPool::Awake awake(*pool_);
  if (is_first()) embed(token_ids, embedded);
  meet();
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
      const std::int64_t item = is_narrow() && !layer.mixes_floats() ? 2 : 4;
      const std::int64_t own = layer.output.inputs / num_ranks() * item;
      keep(attended_, layer.output.inputs * item, group_ ? group_->rank() * own : 0, own, wanted);
    }
    meet();
    if (is_last) {
      // Other ranks read the rows of x_ until they meet.
      keep(x_, shape_.hidden_size * 4, own_hidden_.first * 4, own_hidden_.count * 4, wanted);
      num_rows = static_cast<std::int64_t>(wanted.size());
      if (num_rows == 0) return;
    }
    finish_layer(layer, is_last ? *head_ : layers_[static_cast<std::size_t>(index + 1)].qkv.front(),
                 num_rows);
  }
  num_rows -= num_hidden;
  if (is_first()) norm_rows(x_.data() + num_rows * shape_.hidden_size, num_hidden, hidden);
  if (num_rows > 0) multiply_head(num_rows, logits);
  meet();
  if (group_ && is_first()) std::copy_n(logits_.data(), num_rows * shape_.vocab_size, logits);
}

// In a group, rows are written to the shared memory.
void CpuDecoder::multiply_head(std::int64_t num_rows, float* logits) {
  products_.pack_rows(*head_, x_.data(), false, num_rows, final_norm_.data(), shape_.norm_eps);
  if (group_) logits = logits_.data() + slice(shape_.vocab_size).first;
  products_.multiply(*head_, &layers_.front().qkv.front(), nullptr, num_rows, cpu::Epilogue::kStore,
                     logits, shape_.vocab_size);
}

// All ranks compute the same places.
void CpuDecoder::place_rows(std::int64_t num_rows, std::int64_t num_wanted) {
  if (!group_) return;
  const std::int64_t most = std::max(num_rows, num_wanted);
  const std::pair<StepRows*, std::int64_t> sizes[] = {
      {&x_, most * shape_.hidden_size},
      {&product_, most * shape_.hidden_size},
      {&attended_, most * all_heads() * shape_.head_dim},
      {&gated_, most * most_chosen_ * widest_mlp_},
      {&logits_, num_wanted * shape_.vocab_size}};
  auto* to = reinterpret_cast<float*>(group_->data());
  const float* const end = to + group_->bytes() / sizeof(float);
  for (const auto& [rows, size] : sizes) {
    rows->place(to);
    to += (size + 15) / 16 * 16;
  }
  require(to <= end, std::to_string(num_rows) + " rows do not fit the memory of the group");
}

}  // namespace vmserve
