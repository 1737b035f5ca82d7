// Linear layers whose weights are packed for an instruction set, and their products on a pool of
// threads. kernels/linear.h has the forms of weights.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <type_traits>
#include <variant>
#include <vector>

#include "attention.h"
#include "kernels/kernels.h"
#include "thread_pool.h"

namespace vmserve {

// How weights in floating point are stored. kInt8: int8 weights with a scale for each output, rows
// of int16. kInt8Dynamic: rows of int8 too if the processor multiplies those faster, else the same
// as kInt8. Grouped integers keep their codes and scales; kInt8Dynamic rounds their rows to int8,
// the others to int16.
enum class Quantization { kNone, kInt8, kInt8Dynamic };

// Memory of packed weights, in huge pages if the system has them, because weights are read from end
// to end. Layers follow each other, because many are smaller than a huge page. All memory is freed
// together.
class WeightArena {
 public:
  WeightArena() = default;
  ~WeightArena();
  WeightArena(const WeightArena&) = delete;
  WeightArena& operator=(const WeightArena&) = delete;

  // Returns zeroed memory.
  char* take(std::size_t bytes);

 private:
  struct Block {
    char* data;
    std::size_t bytes, taken;
  };
  void add_block(std::size_t least_bytes);

  std::vector<Block> blocks_;
};

// A matrix [outputs, inputs] of a checkpoint: floats, contiguous in the last dimension, or grouped
// integers. The caller keeps the memory while it is packed.
using WeightRef = std::variant<TensorRef, cpu::GroupedTensor>;

std::int64_t outputs_of(const WeightRef& matrix);
std::int64_t inputs_of(const WeightRef& matrix);

// Packed weights of one or several matrices with the same inputs.
struct LinearLayer {
  const char* weights = nullptr;    // owned by the LinearProducts that packed them
  std::vector<float> scales, bias;  // in the order of the lanes, for all panels
  cpu::ScaleFormat scale_format{};
  const cpu::LinearForm* form = nullptr;
  cpu::Gate gate;
  float softcap = 0.0F;  // softcap of its outputs; 0: none
  std::int64_t inputs = 0, depth = 0, outputs = 0, num_panels = 0, panel_bytes = 0;

  std::size_t weight_bytes() const { return static_cast<std::size_t>(num_panels * panel_bytes); }
  const cpu::RowFormat& row_format() const { return cpu::kRowFormats[form->rows]; }
};

// One layer's part of a product: rows [packed_row, packed_row + num_rows) of the packed ones,
// results from `row` on, in columns from out_column on. Blocks of rows begin with it. They are
// packed from columns from in_column on.
struct LinearShare {
  const LinearLayer* layer = nullptr;
  std::int64_t packed_row = 0, row = 0, num_rows = 0;
  std::int64_t in_column = 0, out_column = 0;
};

// Items [first, end) of one thread, which takes them from the front to read weights from end to
// end. Threads that have none left take them from the back.
class alignas(64) ItemRange {
 public:
  void set(std::int64_t first, std::int64_t end) {
    ends_.store(static_cast<std::uint64_t>(first) << 32 | static_cast<std::uint64_t>(end),
                std::memory_order_relaxed);
  }
  // False if none is left.
  bool take(bool at_front, std::int64_t& item);

 private:
  std::atomic<std::uint64_t> ends_ = 0;
};

// Packs layers and multiplies rows by them. One call at a time.
class LinearProducts {
 public:
  // bf16_rows: rows for bfloat16 weights are rounded to bfloat16 if that is faster.
  LinearProducts(const cpu::LinearKernels& kernels, std::shared_ptr<ThreadPool> pool,
                 Quantization quantization, bool bf16_rows);

  const cpu::LinearKernels& kernels() const { return kernels_; }
  ThreadPool& pool() const { return *pool_; }
  void set_pool(std::shared_ptr<ThreadPool> pool);

  // Packs up to three matrices, one after the other, or the two of a gated MLP (`gated`). Layers
  // that are packed in the order of their products are read as one stream. Grouped integers that
  // differ in size are stored in the larger one. Throws MisuseError if floats differ in type or are
  // mixed with integers. `exact`: floats stay floats, and so do their rows.
  LinearLayer pack(const std::vector<const WeightRef*>& matrices, bool gated, bool exact = false);
  // Packs one layer for each run of matrices that are stored alike: none is widened for another.
  std::vector<LinearLayer> pack_alike(const std::vector<const WeightRef*>& matrices);
  // Sets the biases of each packed matrix; null: zeros.
  void set_bias(LinearLayer& layer, const std::vector<const float*>& biases,
                const std::vector<std::int64_t>& sizes, bool gated) const;
  // Rounds rows [num_rows, next.inputs] and packs them for the product with `next`. `norm`: of an
  // RMSNorm before, or null.
  void pack_rows(const LinearLayer& next, const void* rows, bool bf16, std::int64_t num_rows,
                 const float* norm, float eps);
  // The same in the blocks of `shares`: row `row + i` becomes packed row `packed_row + i`.
  // `row_stride`: elements from row to row; 0: next.inputs.
  void pack_rows(const LinearLayer& next, const void* rows, bool bf16,
                 const std::vector<LinearShare>& shares, const float* norm, float eps,
                 std::int64_t row_stride = 0);
  // Packed row sources[row + i], which is a block of its own, becomes packed row `packed_row + i`
  // of a share. Shares of one row are left out.
  void gather_rows(const LinearLayer& next, const std::vector<LinearShare>& shares,
                   const std::vector<std::int64_t>& sources);
  // rows: packed; null: those of the last pack_rows. `next`: the layer of the next product with as
  // many rows, or null; its weights are prefetched.
  void multiply(const LinearLayer& layer, const LinearLayer* next, const void* rows,
                std::int64_t num_rows, cpu::Epilogue epilogue, void* out, std::int64_t out_stride,
                bool pairs_out = false);
  // Multiplies several layers of one shape in one run of the pool. Their weights are read as one
  // stream.
  void multiply(const LinearShare* shares, std::int64_t num_shares, const LinearLayer* next,
                const void* rows, cpu::Epilogue epilogue, void* out, std::int64_t out_stride,
                bool pairs_out = false);

  // Calls body(item) or body(item, worker) for each item. `work`: multiplications of all.
  template <class Body>
  void parallel(std::int64_t num_items, std::int64_t work, const Body& body,
                const ReadAhead& ahead = {}) const {
    const auto call = [](void* context, std::int64_t item, int worker) {
      const Body& body = *static_cast<const Body*>(context);
      if constexpr (std::is_invocable_v<Body, std::int64_t, int>) {
        body(item, worker);
      } else {
        body(item);
      }
    };
    // const_cast: the pool passes the pointer through unchanged.
    pool_->run(num_items, work < kSerialWork ? 1 : ThreadPool::kMaxThreads, call,
               const_cast<Body*>(&body), ahead);
  }

 private:
  // Below this many multiplications, waking another thread costs more than it saves.
  static constexpr std::int64_t kSerialWork = 1 << 15;

  struct Split {
    std::int64_t panels, num_items;  // panels of an item; items of a layer
  };
  struct Block {
    std::int64_t from, column, to, num_rows;
  };

  Split split(const LinearLayer& layer, std::int64_t num_rows, std::int64_t num_layers) const;
  void add_blocks(std::vector<Block>& blocks, const LinearShare& share) const;
  void pack_blocks(const LinearLayer& next, const void* rows, bool bf16,
                   const std::vector<Block>& blocks, const float* norm, float eps,
                   std::int64_t row_stride);
  // The epilogue, its output and the size of an element of it are those of `args`.
  void fill_args(cpu::LinearArgs& args, const LinearShare& share, const void* rows,
                 void* out) const;
  const cpu::LinearForm& float_form(bool bf16_weights, bool exact) const;
  const cpu::LinearForm& grouped_form(const std::vector<cpu::GroupedTensor>& tensors,
                                      bool minima) const;

  const cpu::LinearKernels& kernels_;
  std::shared_ptr<ThreadPool> pool_;
  Quantization quantization_;
  bool bf16_rows_;
  WeightArena arena_;
  std::unique_ptr<ItemRange[]> ranges_;  // one for each thread
  // Buffers of a step; grow as needed.
  std::vector<char> packed_;  // rows, packed for the next product
  std::vector<cpu::RowGroup> row_groups_;
  std::vector<float> scratch_;
};

// The depth of packed weights and rows that have this many inputs.
std::int64_t padded_depth(std::int64_t inputs);

// Throws MisuseError unless the matrix is [outputs, inputs] and its parts fit one another.
void check_matrix(const WeightRef& matrix, const char* name, std::int64_t outputs,
                  std::int64_t inputs);

}  // namespace vmserve
