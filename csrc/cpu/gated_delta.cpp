#include "gated_delta.h"

#include <algorithm>
#include <cmath>

#include "vmserve/errors.h"

namespace vmserve {
namespace {

constexpr float kSoftplusLinear = 20.0F;  // above, softplus(x) is x

float softplus(float x) {
  return x > kSoftplusLinear ? x : std::log1p(std::exp(x));
}

void grow(std::vector<float>& buffer, std::int64_t size) {
  if (buffer.size() < static_cast<std::size_t>(size)) buffer.resize(static_cast<std::size_t>(size));
}

}  // namespace

GatedDelta::GatedDelta(const DeltaShape& shape, const std::string& isa)
    : shape_(shape), kernels_(cpu::choose_delta_kernels(isa)) {
  if (shape.key_heads < 1 || shape.value_heads < 1 || shape.value_heads % shape.key_heads != 0) {
    throw MisuseError("the value heads of a delta layer are a multiple of its key heads");
  }
  if (shape.key_dim < 1 || shape.value_dim < 1 || shape.key_dim % cpu::kDeltaUnit != 0 ||
      shape.value_dim % cpu::kDeltaUnit != 0) {
    throw MisuseError("heads of a delta layer are multiples of " + std::to_string(cpu::kDeltaUnit));
  }
  if (shape.taps < 2 || shape.taps > cpu::kMaxTaps) {
    throw MisuseError("a convolution has 2 to " + std::to_string(cpu::kMaxTaps) + " taps");
  }
}

void GatedDelta::run(const LinearProducts& parallel, const DeltaWeights& weights,
                     const std::vector<DeltaSequence>& sequences, const float* projected,
                     const float* gates, float eps, float* out) {
  prepare(parallel, weights, sequences, projected, gates);
  const std::int64_t key_dim = shape_.key_dim, value_dim = shape_.value_dim;
  const std::int64_t heads = shape_.value_heads;
  const std::int64_t channels = shape_.channels(), value_size = shape_.value_size();
  const std::int64_t strips = (value_dim + cpu::kDeltaColumns - 1) / cpu::kDeltaColumns;
  const auto num_rows = static_cast<std::int64_t>(sequence_of_.size());
  const std::int64_t items = heads * strips + 1;  // per sequence: strips of columns, the window
  parallel.parallel(items * static_cast<std::int64_t>(sequences.size()),
                    3 * num_rows * value_size * key_dim, [&](std::int64_t item) {
                      const DeltaSequence& seq = sequences[static_cast<std::size_t>(item / items)];
                      const std::int64_t head = item % items / strips;
                      if (head == heads) return keep_window(seq, projected);
                      const std::int64_t column = item % items % strips * cpu::kDeltaColumns;
                      const float* const row = mixed_.data() + seq.first_row * channels;
                      cpu::DeltaArgs args;
                      args.state = seq.state + shape_.window_floats() +
                                   (head * value_dim + column) * key_dim;
                      args.key_dim = key_dim;
                      args.num_columns = std::min(value_dim - column, cpu::kDeltaColumns);
                      args.is_fresh = seq.is_fresh;
                      args.num_tokens = seq.num_rows;
                      args.q = row + shape_.key_head(head) * key_dim;
                      args.k = args.q + shape_.key_size();
                      args.v = row + 2 * shape_.key_size() + head * value_dim + column;
                      args.row_stride = channels;
                      args.decay = decays_.data() + seq.first_row * 2 * heads + head;
                      args.beta = args.decay + heads;
                      args.gate_stride = 2 * heads;
                      args.out = out + seq.first_row * value_size + head * value_dim + column;
                      args.out_stride = value_size;
                      kernels_.recur(args);
                    });
  parallel.parallel(num_rows, 8 * num_rows * value_size, [&](std::int64_t row) {
    const float* const z = projected + row * projected_size() + channels;
    for (std::int64_t head = 0; head < heads; ++head) {
      kernels_.gated_norm(out + row * value_size + head * value_dim, z + head * value_dim,
                          weights.norm.data(), value_dim, eps);
    }
  });
}

void GatedDelta::prepare(const LinearProducts& parallel, const DeltaWeights& weights,
                         const std::vector<DeltaSequence>& sequences, const float* projected,
                         const float* gates) {
  sequence_of_.clear();
  for (std::size_t i = 0; i < sequences.size(); ++i) {
    sequence_of_.insert(sequence_of_.end(), static_cast<std::size_t>(sequences[i].num_rows),
                        static_cast<std::int64_t>(i));
  }
  const auto num_rows = static_cast<std::int64_t>(sequence_of_.size());
  grow(mixed_, num_rows * shape_.channels());
  grow(decays_, num_rows * 2 * shape_.value_heads);
  parallel.parallel(num_rows, num_rows * shape_.channels() * 16, [&](std::int64_t row) {
    const auto seq = static_cast<std::size_t>(sequence_of_[static_cast<std::size_t>(row)]);
    prepare_row(weights, sequences[seq], row - sequences[seq].first_row, projected, gates);
  });
}

// Row `index` of the sequence.
void GatedDelta::prepare_row(const DeltaWeights& weights, const DeltaSequence& seq,
                             std::int64_t index, const float* projected, const float* gates) {
  const std::int64_t channels = shape_.channels(), heads = shape_.value_heads;
  const std::int64_t before = shape_.taps - 1, row = seq.first_row + index;
  cpu::ConvolveArgs args;
  args.taps = static_cast<std::int32_t>(shape_.taps);
  args.weights = weights.taps.data();
  args.channels = channels;
  args.out = mixed_.data() + row * channels;
  for (std::int64_t tap = 0; tap <= before; ++tap) {
    const std::int64_t at = index - before + tap;  // in the rows of this step
    const float* const known = seq.is_fresh ? nullptr : seq.state + (index + tap) * channels;
    args.inputs[tap] = at < 0 ? known : projected + (seq.first_row + at) * projected_size();
  }
  kernels_.convolve(args);
  const float scale = 1.0F / std::sqrt(static_cast<float>(shape_.key_dim));
  for (std::int64_t head = 0; head < 2 * shape_.key_heads; ++head) {
    kernels_.normalise(args.out + head * shape_.key_dim, shape_.key_dim,
                       head < shape_.key_heads ? scale : 1.0F);
  }
  float* const decays = decays_.data() + row * 2 * heads;
  const float* const b = gates + row * 2 * heads;
  for (std::int64_t head = 0; head < heads; ++head) {
    const auto at = static_cast<std::size_t>(head);
    decays[head] = std::exp(weights.decay_rate[at] * softplus(b[heads + head] + weights.bias[at]));
    decays[heads + head] = 1.0F / (1.0F + std::exp(-b[head]));
  }
}

void GatedDelta::keep_window(const DeltaSequence& seq, const float* projected) const {
  const std::int64_t channels = shape_.channels(), before = shape_.taps - 1;
  for (std::int64_t i = 0; i < before; ++i) {
    float* const to = seq.state + i * channels;
    const std::int64_t at = seq.num_rows - before + i;  // in the rows of this step
    if (at >= 0) {
      std::copy_n(projected + (seq.first_row + at) * projected_size(), channels, to);
    } else if (seq.is_fresh) {
      std::fill_n(to, channels, 0.0F);
    } else {
      std::copy_n(to + seq.num_rows * channels, channels, to);
    }
  }
}

}  // namespace vmserve
