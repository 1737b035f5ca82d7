// A decoder of the Llama family on the CPU: one call computes a step's forward pass.
//
// Weights are packed once for the instruction set, in their stored type or in int8. Activations and
// sums are float32; K and V have the type of the KV cache. Rows that enter a linear layer with int8
// weights are rounded to int16 or int8, with a scale for each row and group of elements. They are
// rounded to bfloat16 if weights and KV cache are bfloat16 and the processor multiplies pairs of
// bfloat16. Norms, rotations, the write of K and V, residuals and the gated MLP are fused into the
// products around them. So a layer takes few runs of the thread pool.
//
// A row's result has the same bits in any batch, in any chunk of its prompt and on any number of
// threads.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "attention.h"
#include "gated_delta.h"
#include "linear_layer.h"
#include "rank_group.h"

namespace vmserve {

// Sizes of attention over latents (multi-head latent attention, DeepSeek-V2, 2024). A key has
// `plain` elements, a product with the latent, and `rotated` elements, which all heads share. So a
// row of the KV cache has the rotated elements, then the latent of `rank` elements, and no values.
struct LatentShape {
  std::int64_t q_rank = 0;  // rank of latent queries; 0: queries are not latent
  std::int64_t rank = 0, plain = 0, rotated = 0, value = 0;

  std::int64_t query_dim() const { return plain + rotated; }
};

// Sizes and constants common to all layers.
struct DecoderShape {
  std::int64_t vocab_size = 0, hidden_size = 0;
  std::int64_t q_heads = 0, kv_heads = 0, head_dim = 0;
  float norm_eps = 0.0F;
  float embedding_scale = 1.0F;  // factor of the embedding's rows
  float logits_softcap = 0.0F;   // 0: none
  DeltaShape delta;              // layers without attention; no value heads: none
  LatentShape latent;            // attention of all layers; no rank: none has latents
};

// One layer's tensors, as in the checkpoint. Weights [outputs, inputs] are float32 or bfloat16,
// contiguous in their last dimension, or grouped integers. Norms and biases are float32,
// contiguous.
struct DecoderLayer {
  TensorRef attention_norm, mlp_norm;
  WeightRef q, k, v, output;
  // Attention is multiplied by the sigmoid of gates [q_heads * head_dim]. Their outputs in q
  // precede those of the queries. A gated layer has norms of q and k.
  bool gated = false;
  const float *q_bias = nullptr, *k_bias = nullptr, *v_bias = nullptr, *output_bias = nullptr;
  const float* sinks = nullptr;                      // [q_heads]: see CpuLayerCall
  const float *q_norm = nullptr, *k_norm = nullptr;  // [head_dim]; both or none
  // Norms of the results of attention and MLP, before the residual: [hidden_size] or null.
  const float *attention_out_norm = nullptr, *mlp_out_norm = nullptr;
  std::int64_t rotation = 0;  // index in set_rotations
  float scale = 1.0F;
  std::int64_t window = 0;
  float softcap = 0.0F;
};

// A gated delta layer's tensors, in place of attention's. qkv [channels, hidden]: q, k and v of all
// heads. z [value_size, hidden]: the gates of the norm. gates [2 * value_heads, hidden]: b, then a.
struct DecoderDelta {
  TensorRef attention_norm, mlp_norm;
  WeightRef qkv, z, gates, output;
  DeltaWeights weights;
};

// A layer with attention over latents, which are never expanded. In each head, key_up [rank, plain]
// multiplies queries, and value_up [value, rank] the result of attention. q [q_heads * query_dim,
// hidden or q_rank] and kv_down [rank + rotated, hidden] have the rotated elements last.
struct DecoderLatent {
  TensorRef attention_norm, mlp_norm;
  std::optional<WeightRef> q_down;                    // [q_rank, hidden]; none if q_rank is 0
  const float *q_norm = nullptr, *kv_norm = nullptr;  // [q_rank], null if that is 0; [rank]
  float norm_eps = 0.0F;                              // eps of these two norms
  WeightRef q, kv_down, output;
  std::vector<WeightRef> key_up, value_up;
  std::int64_t rotation = 0;
  float scale = 1.0F;
};

// Cosines and signed sines of positions 0, 1, ...: [positions, 1, rotary_dim] in the KV cache's
// type, contiguous.
struct Rotations {
  TensorRef cos, sin;
};

// A gated MLP: gate and up [size, hidden], down [hidden, size].
struct DecoderMlp {
  WeightRef gate, up, down;
  const float *gate_bias = nullptr, *up_bias = nullptr, *down_bias = nullptr;
  cpu::Gate activation;
};

// A router over MLPs (experts). It chooses `chosen` of `count` for a row by the largest scores; of
// equal ones, the first. A score is the softmax or the sigmoid of the router's products. The
// expert's result is multiplied by the score and by `scale`. If `normalised`, the chosen scores are
// first divided by their sum.
struct DecoderRouter {
  WeightRef weights;  // [count, hidden]
  const float* bias = nullptr;
  std::int64_t count = 0, chosen = 0;
  bool normalised = false, sigmoid = false;
  const float* correction = nullptr;  // [count], or null: added to scores only for the choice
  // Only experts of the best groups are chosen. The best groups are those with the largest sum of
  // their `group_best` largest scores.
  std::int64_t groups = 1, chosen_groups = 1, group_best = 1;
  float scale = 1.0F;
  // Whether one more MLP computes every row, with the weight 1, or the sigmoid of the row's product
  // with `shared_gate` [1, hidden].
  bool shared = false;
  std::optional<WeightRef> shared_gate;
};

// A matrix of float32 or bfloat16 in a file, without gaps, from byte `start` on. The caller keeps
// the descriptor open. Rows are read one by one: pages of a mapping would stay in memory.
struct FileRows {
  int descriptor = -1;
  std::int64_t start = 0;
  DType dtype{};
};

// A buffer of rows of a step: of this decoder, or a place in the memory of its group.
class StepRows {
 public:
  float* data() { return place_ != nullptr ? place_ : own_.data(); }
  void place(float* place) { place_ = place; }
  // A place has room for all that a step writes.
  void grow(std::int64_t size) {
    if (place_ == nullptr && own_.size() < static_cast<std::size_t>(size)) {
      own_.resize(static_cast<std::size_t>(size));
    }
  }

 private:
  std::vector<float> own_;
  float* place_ = nullptr;
};

class CpuDecoder {
 public:
  // `isa`: as for CpuAttention. `group`: ranks that compute together, each with its slices; null:
  // one rank. Matrices are divided by outputs only, so each output is the same sum, and logits have
  // the same bits. `shape` has the heads of this rank, and so have q, k, v, their biases and sinks;
  // all ranks have equally many query heads. A rank has RankGroup::slice of `output`, `down`,
  // `gate` and `up`, of their biases, and of the head. Norms and routers are whole. `row_dtype`:
  // type of the rows of q, k and v, and of the KV cache if it has not 8 bits. A group refuses gated
  // attention, latents and delta layers.
  CpuDecoder(const DecoderShape& shape, DType row_dtype, Quantization quantization, int num_threads,
             const std::string& isa, std::shared_ptr<RankGroup> group = nullptr);
  ~CpuDecoder();

  // Call add_layer, add_latent or add_delta for each layer in order, then set_ends. After it comes
  // add_mlp, or add_router with an add_mlp for each expert and, last, the shared one. The rows of
  // `embedding` [vocab, hidden] are read when they are needed; everything else is copied. Without
  // an embedding, forward() takes the rows. `head` [vocab, hidden].
  void add_layer(const DecoderLayer& layer);
  void add_latent(const DecoderLatent& layer);
  void add_delta(const DecoderDelta& layer);
  void add_mlp(const DecoderMlp& mlp);
  void add_router(const DecoderRouter& router);
  void set_ends(const std::optional<FileRows>& embedding, const TensorRef& final_norm,
                const WeightRef& head);

  // Sets all layers' rotations, for equally many positions. The caller keeps them alive until the
  // next call.
  void set_rotations(const std::vector<Rotations>& rotations);
  std::int64_t num_positions() const;

  std::int64_t vocab_size() const { return shape_.vocab_size; }
  std::int64_t hidden_size() const { return shape_.hidden_size; }
  const LatentShape& latent() const { return shape_.latent; }
  // The rank's part of `count` outputs; all if there is no group.
  Slice slice(std::int64_t count) const { return group_ ? group_->slice(count) : Slice{0, count}; }
  // Whether this rank returns logits and hidden states.
  bool is_first() const { return !group_ || group_->rank() == 0; }
  // Size of the packed weights.
  std::size_t weight_bytes() const;
  // Size of the weights that a single row reads, with its chosen experts only.
  std::size_t row_weight_bytes() const;
  // Experts whose weights were read, and rows that they computed, in all calls so far.
  std::int64_t expert_reads() const { return expert_reads_; }
  std::int64_t expert_rows() const { return expert_rows_; }
  // Time spent in delta layers between their projections, in all calls so far.
  double delta_seconds() const { return delta_seconds_; }
  // The type that rows of a layer's products are rounded to: "float32" (not rounded), "bfloat16",
  // "int16" or "int8".
  const char* row_type() const;
  int num_threads() const;
  void set_num_threads(int num_threads);

  // Sequences of one regime. Their rows follow those of the part before.
  struct Part {
    CpuBatch* batch;
    double seconds;  // out: time spent in attention
  };

  // token_ids [tokens]; `wanted`: rows whose logits [wanted, vocab] to compute, in any order. The
  // last num_hidden of them return final hidden states instead, [num_hidden, hidden_size] after the
  // last norm. `embedded` [tokens, hidden_size]: the embedding's rows of the tokens, if the decoder
  // has no embedding. Throws MisuseError before anything is written if an id, row or position is
  // out of range. All ranks of a group are called with the same rows; only the first reads
  // `embedded` and writes logits and hidden states. Any other error ends the group.
  void forward(const std::vector<std::int64_t>& token_ids, std::vector<Part>& parts,
               const std::vector<std::int64_t>& wanted, float* logits, std::int64_t num_hidden = 0,
               float* hidden = nullptr, const float* embedded = nullptr);

 private:
  struct Mlp;
  struct Experts;
  struct Latent;
  struct Layer;

  void compute(const std::vector<std::int64_t>& token_ids, std::vector<Part>& parts,
               const std::vector<std::int64_t>& wanted, float* logits, std::int64_t num_hidden,
               float* hidden, const float* embedded);
  // Waits for the other ranks. Post: every rank's writes are visible to all.
  void meet() {
    if (group_) group_->wait();
  }
  int num_ranks() const { return group_ ? group_->size() : 1; }
  // Query heads of all ranks.
  std::int64_t all_heads() const { return shape_.q_heads * num_ranks(); }
  void place_rows(std::int64_t num_rows, std::int64_t num_wanted);
  void multiply_head(std::int64_t num_rows, float* logits);
  void check_call(const std::vector<std::int64_t>& token_ids, const std::vector<Part>& parts,
                  const std::vector<std::int64_t>& wanted) const;
  void check_positions(const CpuBatch& batch) const;
  void embed(const std::vector<std::int64_t>& token_ids, const float* embedded);
  void gather_rotations(const std::vector<Part>& parts, std::int64_t num_rows);
  std::int64_t rotation_bytes(std::int64_t num_rows) const;
  bool is_narrow() const { return row_dtype_ == DType::kBFloat16; }
  void multiply_projections(const Layer& layer, std::int64_t num_rows, bool narrow);
  char* project(const Layer& layer, std::int64_t num_rows);
  char* project_latent(const Layer& layer, std::int64_t num_rows);
  void expand_values(const Layer& layer, std::int64_t num_rows);
  void normalise_heads(const Layer& layer, std::int64_t num_rows);
  void normalise(const float* row, std::int64_t size, const float* norm, float eps,
                 float* out) const;
  void attend(const Layer& layer, char* qkv, std::vector<Part>& parts);
  void gate_attention(const Layer& layer, std::int64_t num_rows);
  void mix_delta(const Layer& layer, const std::vector<Part>& parts, std::int64_t num_rows);
  void keep(StepRows& rows, std::int64_t row_bytes, std::int64_t first, std::int64_t bytes,
            const std::vector<std::int64_t>& wanted);
  void norm_rows(const float* rows, std::int64_t num_rows, float* out) const;
  void add_normalised(const std::vector<float>& norm, std::int64_t num_rows);
  // next: the layer of the next product.
  void finish_layer(const Layer& layer, const LinearLayer& next, std::int64_t num_rows);
  void add_mlp_of(const Layer& layer, const LinearLayer& next, std::int64_t num_rows);
  void multiply_mlp(const Mlp& mlp, const float* norm, const LinearLayer* next,
                    std::int64_t num_rows, cpu::Epilogue epilogue, float* out);
  void add_experts_of(const Layer& layer, const LinearLayer& next, std::int64_t num_rows);
  void choose_experts(const Experts& experts, std::int64_t num_rows);
  void score_experts(const Experts& experts, const float* logits, float* scores) const;
  void sort_by_expert(const Layer& layer, std::int64_t num_rows);
  // Multiplies the packed rows by gate_up_shares_, then down_shares_, which are not empty. `down`
  // and `next`: layers whose weights are prefetched, or null.
  void multiply_mlps(const LinearLayer* down, const LinearLayer* next, std::int64_t num_rows,
                     cpu::Epilogue epilogue, float* out);

  DecoderShape shape_;
  DType row_dtype_;
  std::shared_ptr<RankGroup> group_;  // null: one rank
  Slice own_hidden_;
  std::shared_ptr<ThreadPool> pool_;
  LinearProducts products_;
  std::unique_ptr<CpuAttention> attention_;
  const cpu::DeltaKernels& mixing_;
  std::unique_ptr<GatedDelta> delta_;  // null: no layer has one
  std::vector<Layer> layers_;
  std::int64_t num_deltas_ = 0;  // delta layers so far
  std::optional<FileRows> embedding_;
  std::vector<Rotations> tables_;
  std::vector<float> final_norm_;
  std::unique_ptr<LinearLayer> head_;
  std::mutex mutex_;  // one call at a time
  // Buffers of a step; grow as needed. attended_ has the KV cache's type, or float32 after gates
  // and delta layers. A rank writes its columns of x_, gated_, attended_ and product_, and reads
  // all after the ranks have met.
  StepRows x_, gated_, attended_, ungated_, product_, logits_;
  std::vector<float> qkv_, delta_gates_;
  std::vector<char> kept_;
  std::int64_t widest_mlp_ = 0, most_chosen_ = 1;
  std::vector<DeltaSequence> sequences_;
  std::vector<float> queries_, latent_rows_;
  StepRows values_;
  std::vector<std::uint16_t> narrow_qkv_;
  std::vector<char> rotations_;  // for each table: cosines, then sines, of the step's rows
  // The chosen experts of each row: [rows, chosen], largest score first. A slot is a row of an
  // expert; slots are in the order of experts, then of rows.
  std::vector<float> router_logits_, expert_scores_, expert_weights_, expert_out_;
  std::vector<std::int32_t> expert_ids_;
  std::vector<std::int64_t> slots_, slot_rows_;  // slots_: [rows, chosen]
  std::vector<LinearShare> single_rows_, gate_up_shares_, down_shares_, head_shares_;
  std::int64_t expert_reads_ = 0, expert_rows_ = 0;
  double delta_seconds_ = 0.0;
};

}  // namespace vmserve
