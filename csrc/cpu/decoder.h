// A whole decoder of the Llama family on the CPU: one call for a step's forward pass.
//
// Weights are packed once, for the instruction set at hand, in the type that they are stored in
// (or in int8); activations and sums are float32, K and V are written and read in the type of the
// KV cache. What enters a linear layer is rounded before int8 weights (to int16 or int8, with a
// scale for each row and group of elements), and to bfloat16 where both the weights and the KV
// cache are bfloat16 and the processor multiplies pairs of it. Norms, rotations, the write of K and
// V, residuals and the gated MLP are part of the products around them, and nothing but the pool's
// own wake-ups lies between two of them.
//
// A row's result has the same bits whatever other rows are in the batch, on any number of threads.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "attention.h"

namespace vmserve {

namespace cpu {
struct LinearForm;
struct LinearKernels;
struct RowGroup;
enum class Epilogue : std::int32_t;
}  // namespace cpu

// Of linear layers. Int8: weights with a scale for each output, rows of int16; kInt8Dynamic: rows
// of int8 too, on a processor that multiplies those faster, else as kInt8.
enum class Quantization { kNone, kInt8, kInt8Dynamic };

// Sizes and constants that all layers share.
struct DecoderShape {
  std::int64_t vocab_size = 0, hidden_size = 0, mlp_size = 0;
  std::int64_t q_heads = 0, kv_heads = 0, head_dim = 0;
  float norm_eps = 0.0F;
};

// One layer's tensors, as in the checkpoint: weights [outputs, inputs] in float32 or bfloat16,
// contiguous in their last dimension; norms and biases in float32, contiguous.
struct DecoderLayer {
  TensorRef attention_norm, q, k, v, output, mlp_norm, gate, up, down;
  const float *q_bias = nullptr, *k_bias = nullptr, *v_bias = nullptr;
  const float *q_norm = nullptr, *k_norm = nullptr;  // [head_dim], both or none
  float scale = 1.0F;
  std::int64_t window = 0;
  float softcap = 0.0F;
};

// Memory that big pages back where the system has them: weights are read from end to end.
class BigBuffer {
 public:
  BigBuffer() = default;
  explicit BigBuffer(std::size_t bytes);
  ~BigBuffer();
  BigBuffer(BigBuffer&& other) noexcept;
  BigBuffer& operator=(BigBuffer&& other) noexcept;

  char* data() const { return data_; }
  std::size_t bytes() const { return bytes_; }

 private:
  char* data_ = nullptr;
  std::size_t bytes_ = 0;
};

class CpuDecoder {
 public:
  // `isa` as for CpuAttention.
  CpuDecoder(const DecoderShape& shape, DType kv_dtype, Quantization quantization, int num_threads,
             const std::string& isa);
  ~CpuDecoder();

  // The layers in their order, then the ends. `embedding` [vocab, hidden] is the caller's and must
  // outlive the decoder; everything else is copied. `head` [vocab, hidden].
  void add_layer(const DecoderLayer& layer);
  void set_ends(const TensorRef& embedding, const TensorRef& final_norm, const TensorRef& head);

  // Cosines and signed sines of positions 0, 1, ...: [positions, 1, head_dim] in the KV cache's
  // type, contiguous; the caller's, until others are set.
  void set_rotations(const TensorRef& cos, const TensorRef& sin);
  std::int64_t num_positions() const;

  std::int64_t vocab_size() const { return shape_.vocab_size; }
  std::int64_t hidden_size() const { return shape_.hidden_size; }
  // Bytes of the packed weights.
  std::size_t weight_bytes() const;
  // What enters the layers' linear layers is rounded to: "float32" (not at all), "bfloat16",
  // "int16" or "int8".
  const char* row_type() const;
  int num_threads() const;
  void set_num_threads(int num_threads);

  // One regime's sequences: their rows follow those of the part before.
  struct Part {
    CpuBatch* batch;
    double seconds;  // out: what attention took
  };

  // token_ids [tokens]; `wanted`: the rows whose logits [wanted, vocab] are asked for, in any
  // order. The last num_hidden of them give their final hidden states instead, [num_hidden,
  // hidden_size] behind the last norm. Throws MisuseError for ids, rows or positions out of range
  // before anything is written.
  void forward(const std::vector<std::int64_t>& token_ids, std::vector<Part>& parts,
               const std::vector<std::int64_t>& wanted, float* logits, std::int64_t num_hidden = 0,
               float* hidden = nullptr);

 private:
  struct Linear;
  struct Layer;

  void check_call(const std::vector<std::int64_t>& token_ids, const std::vector<Part>& parts,
                  const std::vector<std::int64_t>& wanted) const;
  void check_positions(const CpuBatch& batch) const;
  const cpu::LinearForm& form_for(bool bf16_weights) const;
  Linear pack(const std::vector<const TensorRef*>& tensors, bool gated);
  void embed(const std::vector<std::int64_t>& token_ids);
  void gather_rotations(const std::vector<Part>& parts, std::int64_t num_rows);
  char* project(const Layer& layer, std::int64_t num_rows);
  void normalise_heads(const Layer& layer, std::int64_t num_rows);
  void normalise_head(float* head, const float* norm, float* room) const;
  void attend(const Layer& layer, std::int64_t index, char* qkv, std::vector<Part>& parts);
  void keep(const std::vector<std::int64_t>& wanted);
  void norm_rows(const float* rows, std::int64_t num_rows, float* out) const;
  void finish_layer(const Layer& layer, std::int64_t num_rows);
  // To the form in which `next` reads its rows.
  void pack_rows(const Linear& next, const void* rows, bool bf16, std::int64_t num_rows,
                 const float* norm);
  void multiply(const Linear& linear, const void* rows, std::int64_t num_rows,
                cpu::Epilogue epilogue, void* out, std::int64_t out_stride, bool pairs_out = false);
  template <class Body>
  void parallel(std::int64_t num_items, std::int64_t work, const Body& body);

  DecoderShape shape_;
  DType kv_dtype_;
  Quantization quantization_;
  const cpu::LinearKernels* kernels_;
  std::shared_ptr<ThreadPool> pool_;
  std::unique_ptr<CpuAttention> attention_;
  std::vector<Layer> layers_;
  TensorRef embedding_, cos_, sin_;
  std::vector<float> final_norm_;
  std::unique_ptr<Linear> head_;
  std::mutex mutex_;  // one call at a time
  // Of a step; grown as needed, kept.
  std::vector<float> x_, kept_, gated_, qkv_, attended_, scratch_;
  std::vector<std::uint16_t> narrow_qkv_;
  std::vector<char> packed_;  // rows as the next product reads them
  std::vector<cpu::RowGroup> row_groups_;
  std::vector<char> rotations_;  // cosines, then sines, of the step's rows
};

}  // namespace vmserve
