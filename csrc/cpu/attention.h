// Attention on the CPU over either view of the KV memory.
//
// A CpuKvView holds the addresses of K and V and is made once. A CpuBatch lays out the sequences of
// one step. CpuAttention::run executes one layer: it rotates q and k, writes k and v, and attends.
// Bad arguments raise MisuseError before anything is written.
//
// All kernels add in one order, and a row is the sum of parts at fixed positions (kPartTokens). So
// the result has the same bits for any batch, chunk of a prompt, number of threads and view.
#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "thread_pool.h"

namespace vmserve {

namespace cpu {
class Plan;
struct KernelTable;
struct Sequence;
}  // namespace cpu

// kInt8 is for KV caches only; a scale follows each row (cpu::Code).
enum class DType { kFloat32, kBFloat16, kInt8 };

constexpr std::int64_t item_bytes(DType dtype) {
  return dtype == DType::kFloat32 ? 4 : dtype == DType::kBFloat16 ? 2 : 1;
}

// A strided tensor that the caller owns. Strides in elements.
struct TensorRef {
  char* data = nullptr;
  DType dtype = DType::kFloat32;
  std::vector<std::int64_t> shape, strides;
};

// Instruction sets that this processor can execute, best first. "generic" and "generic16" are
// always among them. "generic16" is plain C++ in the shape of the AVX-512 kernels, for tests.
std::vector<std::string> cpu_isas();

// K and V of every layer that attends, and states of the others. The caller owns the memory and
// keeps it alive longer than the view.
class CpuKvView {
 public:
  // Virtual view: keys and values [slots, max_len, kv_heads, head_dim] of each layer. Values at
  // the addresses of keys are the last value_dim elements of these.
  CpuKvView(std::vector<TensorRef> keys, std::vector<TensorRef> values);
  // Paged view: keys and values [pages, page_tokens, kv_heads, head_dim] of each layer, and block
  // tables int32 [rows, table_width]. Layer i is read through tables[layer_tables[i]]; layers of
  // one table have equally many pages. Tables may change between batches.
  CpuKvView(std::vector<TensorRef> keys, std::vector<TensorRef> values,
            std::vector<const std::int32_t*> tables, std::vector<std::size_t> layer_tables,
            std::int64_t table_rows, std::int64_t table_width, std::int64_t block_tokens);

  // States of constant size, in either view: pages float32 [pages, floats] and a block table int32
  // [table_rows, table_width]. A page has a sequence's states of all layers without K and V. A
  // block is a page; a sequence's first block has its states.
  void set_states(const TensorRef& pages, const std::int32_t* table, std::int64_t table_rows,
                  std::int64_t table_width);

  bool paged() const { return !tables_.empty(); }
  // 0 if there are no states.
  std::int64_t state_floats() const { return states_.shape.empty() ? 0 : states_.shape[1]; }
  std::int64_t num_layers() const { return static_cast<std::int64_t>(keys_.size()); }
  DType dtype() const { return keys_[0].dtype; }
  // Whether it takes keys and values of this type, which are rounded if it has 8 bits.
  bool takes(DType rows) const {
    return rows == dtype() || (dtype() == DType::kInt8 && rows != DType::kInt8);
  }
  std::int64_t kv_heads() const { return keys_[0].shape[2]; }
  std::int64_t head_dim() const { return keys_[0].shape[3]; }
  // Whether values are parts of the keys' rows: latents. They are not written.
  bool values_in_keys() const { return values_[0].data == keys_[0].data; }
  std::int64_t num_places() const { return paged() ? table_rows_ : keys_[0].shape[0]; }
  std::int64_t max_len() const {
    return paged() ? table_width_ * block_tokens_ : keys_[0].shape[1];
  }

 private:
  friend class CpuBatch;
  void check_tensors() const;

  std::vector<TensorRef> keys_, values_;
  TensorRef states_;
  const std::int32_t* state_table_ = nullptr;
  std::int64_t state_table_rows_ = 0, state_table_width_ = 0;
  std::vector<const std::int32_t*> tables_;
  std::vector<std::size_t> layer_tables_;
  std::vector<std::int64_t> num_blocks_;  // in the arena of each table
  std::int64_t table_rows_ = 0, table_width_ = 0;
  std::int64_t block_tokens_ = 0, blocks_per_page_ = 0;
};

// The sequences of one step, in the order of their rows in q, k and v.
class CpuBatch {
 public:
  // Sequence i is in slot or table row places[i], has num_past[i] tokens and adds num_new[i] > 0.
  // Copies the rows of the block tables. state_places: rows of the table of states; none: places.
  CpuBatch(std::shared_ptr<const CpuKvView> view, std::vector<std::int64_t> places,
           std::vector<std::int64_t> num_past, std::vector<std::int64_t> num_new,
           const std::vector<std::int64_t>& state_places = {});
  ~CpuBatch();

  const CpuKvView& view() const { return *view_; }
  std::int64_t num_sequences() const { return static_cast<std::int64_t>(places_.size()); }
  std::int64_t num_tokens() const { return num_tokens_; }
  std::int64_t num_past(std::int64_t i) const { return num_past_[i]; }
  std::int64_t num_new(std::int64_t i) const { return num_new_[i]; }
  std::int64_t start(std::int64_t i) const { return starts_[i]; }
  // The highest position of a new token, or -1 if there is none.
  std::int64_t last_position() const;

  // Addresses of sequence i in a layer. Values in keys begin at element `value_offset`.
  cpu::Sequence sequence(std::int64_t layer, std::int64_t i, std::int64_t value_offset = 0) const;
  // The page of sequence i's states.
  float* states(std::int64_t i) const;
  // The first position that sequence i's new tokens attend to through a window.
  std::int64_t first_seen(std::int64_t i, std::int64_t window) const;
  // The work items of a layer, computed for the first layer that asks. Throws MisuseError if a
  // block inside the window is not in the arena.
  cpu::Plan& plan(std::int64_t layer, std::int64_t window, std::int64_t q_heads,
                  std::int64_t num_threads);

 private:
  void check_sequences() const;
  void check_blocks(std::size_t table, std::int64_t window) const;
  std::size_t table_of(std::int64_t layer) const;
  void copy_tables();
  void find_states(const std::vector<std::int64_t>& state_places);

  std::shared_ptr<const CpuKvView> view_;
  std::vector<std::int64_t> places_, num_past_, num_new_, starts_;
  std::int64_t num_tokens_ = 0;
  std::vector<std::int32_t> blocks_;  // rows of the tables
  std::vector<std::int64_t> state_pages_;
  // For each table, one number per sequence:
  std::vector<std::int64_t> block_starts_;  // where their blocks begin in blocks_
  std::vector<std::int64_t> usable_from_;   // position after the last block outside the arena
  std::vector<std::pair<std::size_t, std::unique_ptr<cpu::Plan>>> plans_;  // by table
};

// One layer of one step.
struct CpuLayerCall {
  std::int64_t layer = 0;
  TensorRef q;                        // [tokens, q_heads, head_dim]
  TensorRef k, v;                     // [tokens, kv_heads, head_dim]; v is unused if it is in k
  std::optional<TensorRef> cos, sin;  // [tokens, 1, rotary_dim]
  TensorRef out;  // [tokens, q_heads, value_dim], contiguous; head_dim if values are not in keys
  float* lse = nullptr;  // [tokens, q_heads], contiguous, or null
  float scale = 1.0F;
  std::int64_t window = 0;  // positions a query attends to, its own included; 0: all
  float softcap = 0.0F;     // 0: none
  // Null, or [q_heads]: the score of one more token, whose value is 0. lse has it too.
  const float* sinks = nullptr;
};

class CpuAttention {
 public:
  // `isa`: one of cpu_isas(), or empty for the first of them.
  CpuAttention(int num_threads, const std::string& isa);
  // Shares the threads of `pool`.
  CpuAttention(std::shared_ptr<ThreadPool> pool, const std::string& isa);
  ~CpuAttention();

  std::string isa() const;
  int num_threads() const;
  void set_num_threads(int num_threads);
  void set_pool(std::shared_ptr<ThreadPool> pool);

  void run(CpuBatch& batch, const CpuLayerCall& call);

  // XOR of all whole 8-byte words, read by all threads.
  std::uint64_t fold(const char* data, std::size_t bytes) const;

 private:
  void write(const CpuBatch& batch, const CpuLayerCall& call);
  void attend(const CpuBatch& batch, const CpuLayerCall& call, cpu::Plan& plan);

  const cpu::KernelTable* table_;
  mutable std::mutex mutex_;  // one call at a time
  std::shared_ptr<ThreadPool> pool_;
  std::vector<float> scratch_, partials_;  // grow as needed
  std::vector<char> rotated_;              // q after its rotation
};

// Reads every byte once, as fast as memory allows. Benchmarks compare kernels with it.
std::uint64_t fold_memory(ThreadPool& pool, const char* data, std::size_t bytes);

// Reference implementations: simple loops on the calling thread, which tests compare kernels with.
// Rotates and writes. q_out [tokens, q_heads, head_dim] in the dtype of q.
void write_reference(const CpuBatch& batch, const CpuLayerCall& call, char* q_out);
// Attends in float64 with q as given (already rotated): float64 out [tokens, q_heads, head_dim] and
// lse [tokens, q_heads].
void attend_reference(const CpuBatch& batch, const CpuLayerCall& call, double* out, double* lse);

}  // namespace vmserve
