// Attention, rotation and write position by position: slow and simple.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

#include "attention.h"
#include "kernels/kernels.h"

namespace vmserve {
namespace {

float widen(std::uint16_t bits) {
  const std::uint32_t wide = static_cast<std::uint32_t>(bits) << 16;
  float x;
  std::memcpy(&x, &wide, sizeof x);
  return x;
}

// Rounds to nearest, ties to even.
std::uint16_t narrow(float x) {
  std::uint32_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  if (std::isnan(x)) return 0x7fc0;
  const std::uint32_t rest = bits & 0xffff, upper = bits >> 16;
  const bool up = rest > 0x8000 || (rest == 0x8000 && upper % 2 == 1);
  return static_cast<std::uint16_t>(upper + (up ? 1 : 0));
}

float get(const char* row, std::int64_t i, DType dtype) {
  const char* at = row + i * item_bytes(dtype);
  if (dtype == DType::kFloat32) {
    float x;
    std::memcpy(&x, at, sizeof x);
    return x;
  }
  std::uint16_t bits;
  std::memcpy(&bits, at, sizeof bits);
  return widen(bits);
}

void put(char* row, std::int64_t i, DType dtype, float x) {
  char* at = row + i * item_bytes(dtype);
  if (dtype == DType::kFloat32) {
    std::memcpy(at, &x, sizeof x);
  } else {
    const std::uint16_t bits = narrow(x);
    std::memcpy(at, &bits, sizeof bits);
  }
}

// Writes a row of the KV cache, of the type of `from` or of 8 bits.
void put_row(char* row, DType cache, const char* from, DType dtype, std::int64_t dim) {
  if (cache != DType::kInt8) {
    std::memcpy(row, from, static_cast<std::size_t>(dim * item_bytes(dtype)));
    return;
  }
  float largest = 0.0F;
  bool finite = true;
  for (std::int64_t d = 0; d < dim; ++d) {
    const float x = get(from, d, dtype);
    finite = finite && std::isfinite(x);
    largest = std::max(largest, std::fabs(x));
  }
  const bool empty = !finite || largest < std::ldexp(1.0F, -100);
  for (std::int64_t d = 0; d < dim; ++d) {
    const float whole = empty ? 0.0F : std::nearbyint(get(from, d, dtype) * (127.0F / largest));
    row[d] = static_cast<char>(static_cast<std::uint8_t>(static_cast<int>(whole) + 128));
  }
  float scale = empty ? 0.0F : largest / 127.0F;
  if (!finite) scale = std::numeric_limits<float>::quiet_NaN();
  std::memcpy(row + dim, &scale, sizeof scale);
}

// A number of a row of the KV cache.
double get_cached(const char* row, std::int64_t d, DType cache, std::int64_t dim) {
  if (cache != DType::kInt8) return get(row, d, cache);
  float scale;
  std::memcpy(&scale, row + dim, sizeof scale);
  return static_cast<double>(scale) * (static_cast<std::uint8_t>(row[d]) - 128);
}

float rounded(float x, DType dtype) {
  return dtype == DType::kFloat32 ? x : widen(narrow(x));
}

// Address of `head` at `position`.
char* cache_row(const cpu::Sequence& seq, const cpu::Plane& plane, std::int64_t position,
                std::int64_t head, DType dtype) {
  std::int64_t row = seq.row, token = position;
  if (seq.blocks != nullptr) {
    const std::int32_t block = seq.blocks[position / seq.block_tokens];
    row = block / seq.blocks_per_page;
    token = block % seq.blocks_per_page * seq.block_tokens + position % seq.block_tokens;
  }
  const std::int64_t offset =
      row * plane.row_stride + token * plane.token_stride + head * plane.head_stride;
  return plane.data + offset * item_bytes(dtype);
}

const char* row_of(const TensorRef& tensor, std::int64_t token, std::int64_t head) {
  return tensor.data +
         (token * tensor.strides[0] + head * tensor.strides[1]) * item_bytes(tensor.dtype);
}

void rotate(const CpuLayerCall& call, std::int64_t token, const char* from, std::int64_t head_dim,
            char* to) {
  const DType dtype = call.q.dtype;
  const std::int64_t rotary_dim = call.cos ? call.cos->shape[2] : 0, half = rotary_dim / 2;
  for (std::int64_t i = 0; i < head_dim; ++i) {
    float x = get(from, i, dtype);
    if (i < rotary_dim) {
      const float partner = get(from, i < half ? i + half : i - half, dtype);
      const float cos = get(row_of(*call.cos, token, 0), i, dtype);
      const float sin = get(row_of(*call.sin, token, 0), i, dtype);
      x = rounded(x * cos, dtype) + rounded(partner * sin, dtype);
    }
    put(to, i, dtype, x);
  }
}

struct Query {
  std::vector<double> scores, sums;

  // Attends with one head of one row over positions [begin, end).
  double attend(const cpu::Sequence& seq, const CpuLayerCall& call, const char* q,
                std::int64_t head, std::int64_t kv_head, std::int64_t begin, std::int64_t end,
                std::int64_t dim, DType cache) {
    const DType dtype = call.q.dtype;
    double maximum = -std::numeric_limits<double>::infinity(), total = 0;
    scores.clear();
    for (std::int64_t t = begin; t < end; ++t) {
      const char* k = cache_row(seq, seq.k, t, kv_head, cache);
      double score = 0;
      for (std::int64_t d = 0; d < dim; ++d) {
        score += static_cast<double>(get(q, d, dtype)) * get_cached(k, d, cache, dim);
      }
      score *= call.scale;
      if (call.softcap > 0) score = call.softcap * std::tanh(score / call.softcap);
      scores.push_back(score);
      maximum = std::max(maximum, score);
    }
    if (call.sinks != nullptr) maximum = std::max<double>(maximum, call.sinks[head]);
    for (double& score : scores) total += score = std::exp(score - maximum);
    if (call.sinks != nullptr) total += std::exp(call.sinks[head] - maximum);
    sums.assign(static_cast<std::size_t>(dim), 0.0);
    for (std::int64_t t = begin; t < end; ++t) {
      const char* v = cache_row(seq, seq.v, t, kv_head, cache);
      const double weight = scores[static_cast<std::size_t>(t - begin)] / total;
      for (std::int64_t d = 0; d < dim; ++d) {
        sums[static_cast<std::size_t>(d)] += weight * get_cached(v, d, cache, dim);
      }
    }
    return maximum + std::log(total);
  }
};

}  // namespace

void write_reference(const CpuBatch& batch, const CpuLayerCall& call, char* q_out) {
  const DType dtype = call.q.dtype, cache = batch.view().dtype();
  std::vector<char> rotated(static_cast<std::size_t>(batch.view().head_dim() * item_bytes(dtype)));
  const std::int64_t kv_heads = batch.view().kv_heads(), dim = batch.view().head_dim();
  const std::int64_t q_heads = call.q.shape[1];
  for (std::int64_t i = 0; i < batch.num_sequences(); ++i) {
    const cpu::Sequence seq = batch.sequence(call.layer, i);
    for (std::int64_t n = 0; n < batch.num_new(i); ++n) {
      const std::int64_t token = batch.start(i) + n, position = batch.num_past(i) + n;
      for (std::int64_t h = 0; h < kv_heads; ++h) {
        rotate(call, token, row_of(call.k, token, h), dim, rotated.data());
        put_row(cache_row(seq, seq.k, position, h, cache), cache, rotated.data(), dtype, dim);
        put_row(cache_row(seq, seq.v, position, h, cache), cache, row_of(call.v, token, h), dtype,
                dim);
      }
      for (std::int64_t h = 0; h < q_heads; ++h) {
        rotate(call, token, row_of(call.q, token, h), dim,
               q_out + (token * q_heads + h) * dim * item_bytes(dtype));
      }
    }
  }
}

void attend_reference(const CpuBatch& batch, const CpuLayerCall& call, double* out, double* lse) {
  const std::int64_t dim = batch.view().head_dim(), q_heads = call.q.shape[1];
  const std::int64_t group = q_heads / batch.view().kv_heads();
  Query query;
  for (std::int64_t i = 0; i < batch.num_sequences(); ++i) {
    const cpu::Sequence seq = batch.sequence(call.layer, i);
    for (std::int64_t n = 0; n < batch.num_new(i); ++n) {
      const std::int64_t token = batch.start(i) + n, end = batch.num_past(i) + n + 1;
      const std::int64_t begin = call.window > 0 ? std::max<std::int64_t>(0, end - call.window) : 0;
      for (std::int64_t h = 0; h < q_heads; ++h) {
        const std::int64_t row = token * q_heads + h;
        lse[row] = query.attend(seq, call, row_of(call.q, token, h), h, h / group, begin, end, dim,
                                batch.view().dtype());
        std::copy(query.sums.begin(), query.sums.end(), out + row * dim);
      }
    }
  }
}

}  // namespace vmserve
