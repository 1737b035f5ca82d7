// Attention on the CPU over either view of the KV memory.
//
// A CpuKvView says where K and V lie, once; a CpuBatch lays out one step's sequences, once a step;
// CpuAttention::run does one layer: rotate q and k, write k and v, attend. What is wrong with the
// arguments is a MisuseError before anything is touched.
//
// How a sequence is cut into work items depends on that sequence alone, and every item's result
// goes to a place of its own: the result has the same bits whatever else is in the batch, however
// many threads there are, and in whichever view the sequence lies.
#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "thread_pool.h"

namespace vmserve {

namespace cpu {
class Plan;
struct KernelTable;
struct Sequence;
}  // namespace cpu

enum class DType { kFloat32, kBFloat16 };

// A strided tensor of somebody else's. Strides in elements.
struct TensorRef {
  char* data = nullptr;
  DType dtype = DType::kFloat32;
  std::vector<std::int64_t> shape, strides;
};

// The instruction sets that this processor executes, best first; "generic" and "generic16" (for
// tests: the shape of the AVX-512 kernels) are always there.
std::vector<std::string> cpu_isas();

// K and V of every layer. The memory is the caller's and must outlive the view.
class CpuKvView {
 public:
  // Keys and values [slots, max_len, kv_heads, head_dim] of each layer.
  CpuKvView(std::vector<TensorRef> keys, std::vector<TensorRef> values);
  // Keys and values [pages, page_tokens, kv_heads, head_dim] of each layer, and block tables
  // int32 [rows, table_width] with rows table_stride apart, which may change between batches.
  CpuKvView(std::vector<TensorRef> keys, std::vector<TensorRef> values, const std::int32_t* tables,
            std::int64_t table_rows, std::int64_t table_width, std::int64_t table_stride,
            std::int64_t block_tokens);

  bool paged() const { return tables_ != nullptr; }
  std::int64_t num_layers() const { return static_cast<std::int64_t>(keys_.size()); }
  DType dtype() const { return keys_[0].dtype; }
  std::int64_t kv_heads() const { return keys_[0].shape[2]; }
  std::int64_t head_dim() const { return keys_[0].shape[3]; }
  std::int64_t num_places() const { return paged() ? table_rows_ : keys_[0].shape[0]; }
  std::int64_t max_len() const {
    return paged() ? table_width_ * block_tokens_ : keys_[0].shape[1];
  }

 private:
  friend class CpuBatch;
  void check_tensors() const;

  std::vector<TensorRef> keys_, values_;
  const std::int32_t* tables_ = nullptr;
  std::int64_t table_rows_ = 0, table_width_ = 0, table_stride_ = 0;
  std::int64_t block_tokens_ = 0, blocks_per_page_ = 0, num_blocks_ = 0;
};

// The sequences of one step, in the order of their rows in q, k and v.
class CpuBatch {
 public:
  // Sequence i lies at places[i], has num_past[i] tokens and brings num_new[i] > 0. The rows of
  // the block tables are copied.
  CpuBatch(std::shared_ptr<const CpuKvView> view, std::vector<std::int64_t> places,
           std::vector<std::int64_t> num_past, std::vector<std::int64_t> num_new);
  ~CpuBatch();

  const CpuKvView& view() const { return *view_; }
  std::int64_t num_sequences() const { return static_cast<std::int64_t>(places_.size()); }
  std::int64_t num_tokens() const { return num_tokens_; }
  std::int64_t num_past(std::int64_t i) const { return num_past_[i]; }
  std::int64_t num_new(std::int64_t i) const { return num_new_[i]; }
  std::int64_t start(std::int64_t i) const { return starts_[i]; }
  // The highest position of a new token; -1 without any.
  std::int64_t last_position() const;

  // Where sequence i's tokens lie in a layer.
  cpu::Sequence sequence(std::int64_t layer, std::int64_t i) const;
  // The first position that the sequence's new tokens see through a window.
  std::int64_t first_seen(std::int64_t i, std::int64_t window) const;
  // The work items of a layer; made for the first layer that asks.
  // Throws if a block that the window shows is no block of the arena.
  cpu::Plan& plan(std::int64_t window, std::int64_t q_heads);

 private:
  void check_sequences() const;
  void check_blocks(std::int64_t window) const;
  void copy_tables();

  std::shared_ptr<const CpuKvView> view_;
  std::vector<std::int64_t> places_, num_past_, num_new_, starts_;
  std::int64_t num_tokens_ = 0;
  std::vector<std::int32_t> blocks_;        // all sequences' rows of the tables
  std::vector<std::int64_t> block_starts_;  // where each sequence's begin
  std::vector<std::int64_t> usable_from_;   // position behind the last id outside the arena
  std::vector<std::unique_ptr<cpu::Plan>> plans_;
};

// One layer of one step.
struct CpuLayerCall {
  std::int64_t layer = 0;
  TensorRef q;                        // [tokens, q_heads, head_dim]
  TensorRef k, v;                     // [tokens, kv_heads, head_dim]
  std::optional<TensorRef> cos, sin;  // [tokens, 1, rotary_dim]
  TensorRef out;                      // [tokens, q_heads, head_dim], contiguous
  float* lse = nullptr;               // [tokens, q_heads], contiguous, or null
  float scale = 1.0F;
  std::int64_t window = 0;  // positions a query sees, itself included; 0: all
  float softcap = 0.0F;     // 0: none
};

class CpuAttention {
 public:
  // `isa`: one of cpu_isas(), or empty for the first of them.
  CpuAttention(int num_threads, const std::string& isa);
  // On threads that others use too.
  CpuAttention(std::shared_ptr<ThreadPool> pool, const std::string& isa);
  ~CpuAttention();

  std::string isa() const;
  int num_threads() const;
  void set_num_threads(int num_threads);
  void set_pool(std::shared_ptr<ThreadPool> pool);

  // Rotates q and k, writes k and v, attends.
  void run(CpuBatch& batch, const CpuLayerCall& call);

  // The exclusive or of all whole words of 8 bytes, by the same threads.
  std::uint64_t fold(const char* data, std::size_t bytes) const;

 private:
  void write(const CpuBatch& batch, const CpuLayerCall& call);
  void attend(const CpuBatch& batch, const CpuLayerCall& call, cpu::Plan& plan);

  const cpu::KernelTable* table_;
  mutable std::mutex mutex_;  // one call at a time
  std::shared_ptr<ThreadPool> pool_;
  std::vector<float> scratch_, partials_;  // grown as needed, kept
  std::vector<char> rotated_;              // q after its rotation
};

// Every byte is read once, as fast as that goes: what benchmarks compare kernels with.
std::uint64_t fold_memory(ThreadPool& pool, const char* data, std::size_t bytes);

// The same by simple loops on the caller's thread: what the kernels are tested against.
// Rotation and write; q_out [tokens, q_heads, head_dim] in the dtype of q.
void write_reference(const CpuBatch& batch, const CpuLayerCall& call, char* q_out);
// Attention in float64 of q as it is, over what the view holds: float64 out [tokens, q_heads,
// head_dim] and lse [tokens, q_heads].
void attend_reference(const CpuBatch& batch, const CpuLayerCall& call, double* out, double* lse);

}  // namespace vmserve
