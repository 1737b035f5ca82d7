#include "attention.h"

#include <algorithm>
#include <cmath>
#include <string>
#include <utility>

#include "kernels/isa.h"
#include "kernels/kernels.h"
#include "plan.h"
#include "vmserve/errors.h"
#include "vmserve/text.h"

namespace vmserve {
namespace {

constexpr std::size_t kAlignFloats = 16;
// Below this many multiplications (kSerialWork) or copied elements, waking a thread costs more than
// it saves. The limits are lower if workers spin.
constexpr std::int64_t kSerialWork = 1 << 18, kSerialElements = 1 << 16;
constexpr std::int64_t kSerialWorkAwake = 1 << 16, kSerialElementsAwake = 1 << 13;
// No window: larger than any distance between two positions.
constexpr std::int64_t kNoWindow = std::int64_t{1} << 40;
// Tokens of one item of the write.
constexpr std::int64_t kWriteTokens = 16;

const cpu::Kernels& kernels_for(const cpu::KernelTable& table, DType rows, DType cache) {
  if (cache == DType::kInt8) return rows == DType::kFloat32 ? table.f32_int8 : table.bf16_int8;
  return rows == DType::kFloat32 ? table.f32 : table.bf16;
}

void require(bool condition, const std::string& what) {
  if (!condition) throw MisuseError(what);
}

std::string shape_text(const std::vector<std::int64_t>& shape) {
  std::string text = "[";
  for (const std::int64_t n : shape) text += (text.size() > 1 ? ", " : "") + std::to_string(n);
  return text + "]";
}

void check_tensor(const TensorRef& tensor, const char* name, DType dtype,
                  const std::vector<std::int64_t>& shape) {
  if (tensor.shape != shape) {
    throw MisuseError(std::string(name) + " is " + shape_text(tensor.shape) + ", not " +
                      shape_text(shape));
  }
  require(tensor.dtype == dtype, std::string(name) + " and q differ in dtype");
  require(tensor.strides.size() == shape.size() && tensor.strides.back() == 1,
          std::string(name) + ": the last dimension must be contiguous");
}

std::int64_t width_of(const TensorRef& tensor) {
  return tensor.shape.empty() ? 0 : tensor.shape.back();
}

void check_call(const CpuBatch& batch, const CpuLayerCall& call) {
  const CpuKvView& view = batch.view();
  const std::int64_t tokens = batch.num_tokens(), dim = view.head_dim();
  require(call.layer >= 0 && call.layer < view.num_layers(),
          "layer " + std::to_string(call.layer) + " is outside 0 .. " +
              std::to_string(view.num_layers() - 1));
  require(call.q.shape.size() == 3, "q is not [tokens, q_heads, head_dim]");
  const std::int64_t q_heads = call.q.shape[1];
  require(q_heads > 0 && q_heads % view.kv_heads() == 0 && q_heads <= 1 << 16,
          std::to_string(q_heads) + " query heads are no multiple of " +
              std::to_string(view.kv_heads()) + " KV heads");
  const DType dtype = call.q.dtype;
  require(view.takes(dtype), "q and the KV cache differ in dtype");
  check_tensor(call.q, "q", dtype, {tokens, q_heads, dim});
  check_tensor(call.k, "k", dtype, {tokens, view.kv_heads(), dim});
  if (!view.values_in_keys()) {
    check_tensor(call.v, "v", dtype, {tokens, view.kv_heads(), dim});
  }
  const std::int64_t value_dim = view.values_in_keys() ? width_of(call.out) : dim;
  require(value_dim > 0 && value_dim <= dim && value_dim % 8 == 0,
          "values of " + std::to_string(value_dim) + " elements in keys of " + std::to_string(dim));
  check_tensor(call.out, "out", dtype, {tokens, q_heads, value_dim});
  require(call.out.strides[1] == value_dim && call.out.strides[0] >= q_heads * value_dim,
          "the heads of a row of out must be contiguous");
  require(std::isfinite(call.scale) && std::isfinite(call.softcap) && call.softcap >= 0.0F,
          "scale and softcap must be finite, softcap not negative");
  require(call.window >= 0 && call.window <= kNoWindow,
          "a window of " + std::to_string(call.window) + " positions");
  require(call.cos.has_value() == call.sin.has_value(), "cos and sin go together");
  if (!call.cos) return;
  const std::int64_t rotary_dim = call.cos->shape.empty() ? 0 : call.cos->shape.back();
  require(rotary_dim > 0 && rotary_dim % 2 == 0 && rotary_dim <= dim,
          "a rotation of " + std::to_string(rotary_dim) + " of " + std::to_string(dim) +
              " components: it must be even");
  check_tensor(*call.cos, "cos", dtype, {tokens, 1, rotary_dim});
  check_tensor(*call.sin, "sin", dtype, {tokens, 1, rotary_dim});
}

struct WriteItem {
  std::int32_t seq;
  std::int64_t token;  // index among the sequence's new tokens
};

struct WriteRun {
  const CpuBatch& batch;
  const CpuLayerCall& call;
  const cpu::Kernels& kernels;
  char* rotated;
  std::vector<WriteItem> items;
};

const char* row_of(const TensorRef& tensor, std::int64_t row) {
  return tensor.data + row * tensor.strides[0] * item_bytes(tensor.dtype);
}

void do_write(void* context, std::int64_t index, int) {
  const auto& run = *static_cast<const WriteRun*>(context);
  const CpuLayerCall& call = run.call;
  const auto [seq, token] = run.items[static_cast<std::size_t>(index)];
  const std::int64_t row = run.batch.start(seq) + token;
  cpu::WriteArgs args{};
  args.seq = run.batch.sequence(call.layer, seq);
  args.position = run.batch.num_past(seq) + token;
  args.num_tokens =
      static_cast<std::int32_t>(std::min(kWriteTokens, run.batch.num_new(seq) - token));
  args.q_heads = static_cast<std::int32_t>(call.q.shape[1]);
  args.kv_heads = static_cast<std::int32_t>(call.k.shape[1]);
  args.head_dim = static_cast<std::int32_t>(call.q.shape[2]);
  args.q = row_of(call.q, row);
  args.k = row_of(call.k, row);
  args.q_token_stride = call.q.strides[0];
  args.q_head_stride = call.q.strides[1];
  args.k_token_stride = call.k.strides[0];
  args.k_head_stride = call.k.strides[1];
  if (!run.batch.view().values_in_keys()) {
    args.v = row_of(call.v, row);
    args.v_token_stride = call.v.strides[0];
    args.v_head_stride = call.v.strides[1];
  }
  if (call.cos) {
    args.rotary_dim = static_cast<std::int32_t>(call.cos->shape[2]);
    args.cos = row_of(*call.cos, row);
    args.sin = row_of(*call.sin, row);
    args.cos_stride = call.cos->strides[0];
    args.sin_stride = call.sin->strides[0];
    args.q_out = run.rotated + row * args.q_heads * args.head_dim * item_bytes(call.q.dtype);
  }
  run.kernels.write(args);
}

struct AttendRun {
  const CpuBatch& batch;
  const CpuLayerCall& call;
  const cpu::Kernels& kernels;
  cpu::Plan& plan;
  TensorRef q;  // rotated
  float* partials;
  float* scratch;  // scratch of worker 0
  std::size_t scratch_floats;
};

// Output of rows from `row` on of sequence `seq`, heads from `head` on.
cpu::Output output_at(const AttendRun& run, std::int64_t seq, std::int64_t row, std::int64_t head) {
  const std::int64_t q_heads = run.plan.q_heads, dim = width_of(run.call.out);
  const std::int64_t stride = run.call.out.strides[0], at = run.batch.start(seq) + row;
  const std::int64_t first = at * q_heads + head;
  cpu::Output out{};
  out.rows = run.call.out.data + (at * stride + head * dim) * item_bytes(run.call.out.dtype);
  out.sinks = run.call.sinks == nullptr ? nullptr : run.call.sinks + head;
  out.lse = run.call.lse == nullptr ? nullptr : run.call.lse + first;
  out.row_stride = stride;
  out.lse_stride = q_heads;
  return out;
}

void do_decode(const AttendRun& run, const cpu::WorkItem& item, cpu::Output out, float* scratch) {
  const CpuKvView& view = run.batch.view();
  cpu::DecodeArgs args{};
  args.seq = run.batch.sequence(run.call.layer, item.seq);
  args.group = static_cast<std::int32_t>(run.plan.q_heads / view.kv_heads());
  args.seq.k.data += item.kv_head * args.seq.k.head_stride * item_bytes(view.dtype());
  args.seq.v.data += item.kv_head * args.seq.v.head_stride * item_bytes(view.dtype());
  args.q = row_of(run.q, run.batch.start(item.seq)) +
           item.kv_head * args.group * run.q.strides[1] * item_bytes(run.q.dtype);
  args.q_row_stride = run.q.strides[0];
  args.q_head_stride = run.q.strides[1];
  args.kv_heads = item.kv_heads;
  args.head_dim = static_cast<std::int32_t>(view.head_dim());
  args.rows = item.rows;
  args.first_position = run.batch.num_past(item.seq);
  args.window = run.plan.window == 0 ? kNoWindow : run.plan.window;
  args.begin = item.begin;
  args.end = item.end;
  args.scale = run.call.scale;
  args.softcap = run.call.softcap;
  args.scratch = scratch;
  args.out = out;
  run.kernels.decode(args);
}

void do_tile(const AttendRun& run, const cpu::WorkItem& item, cpu::Output out, float* scratch) {
  const CpuKvView& view = run.batch.view();
  cpu::TileArgs args{};
  args.seq = run.batch.sequence(run.call.layer, item.seq, view.head_dim() - width_of(run.call.out));
  args.kv_head = item.kv_head;
  args.group = static_cast<std::int32_t>(run.plan.q_heads / view.kv_heads());
  args.head_dim = static_cast<std::int32_t>(view.head_dim());
  args.value_dim = static_cast<std::int32_t>(width_of(run.call.out));
  args.rows = item.rows;
  args.q = row_of(run.q, run.batch.start(item.seq) + item.row) +
           item.kv_head * args.group * run.q.strides[1] * item_bytes(run.q.dtype);
  args.q_row_stride = run.q.strides[0];
  args.q_head_stride = run.q.strides[1];
  args.first_position = run.batch.num_past(item.seq) + item.row;
  args.begin = item.begin;
  args.end = item.end;
  args.window = run.plan.window == 0 ? kNoWindow : run.plan.window;
  args.scale = run.call.scale;
  args.softcap = run.call.softcap;
  args.scratch = scratch;
  args.out = out;
  run.kernels.tile(args);
}

void do_merge(const AttendRun& run, const cpu::Merge& merge, cpu::Output out) {
  const CpuKvView& view = run.batch.view();
  cpu::CombineArgs args{};
  args.parts = run.partials + merge.partial;
  args.part_stride = merge.part_stride;
  args.num_parts = merge.num_parts;
  args.num_rows = merge.rows;
  args.heads = merge.kv_heads * static_cast<std::int32_t>(run.plan.q_heads / view.kv_heads());
  args.head_dim = static_cast<std::int32_t>(width_of(run.call.out));
  args.out = out;
  run.kernels.combine(args);
}

void do_attend(void* context, std::int64_t index, int worker) {
  const auto& run = *static_cast<const AttendRun*>(context);
  const cpu::WorkItem& item = run.plan.items[static_cast<std::size_t>(index)];
  const std::int64_t group = run.plan.q_heads / run.batch.view().kv_heads();
  const cpu::Output finished = output_at(run, item.seq, item.row, item.kv_head * group);
  cpu::Output out = finished;
  if (item.merge >= 0) {
    out.partial = run.partials + item.partial;
    out.part_stride = run.plan.merges[static_cast<std::size_t>(item.merge)].part_stride;
  }
  float* const scratch = run.scratch + static_cast<std::size_t>(worker) * run.scratch_floats;
  if (item.decode) {
    do_decode(run, item, out, scratch);
  } else {
    do_tile(run, item, out, scratch);
  }
  if (item.merge >= 0 && run.plan.finish_item(item.merge)) {
    do_merge(run, run.plan.merges[static_cast<std::size_t>(item.merge)], finished);
  }
}

float* aligned(std::vector<float>& buffer, std::size_t floats) {
  if (buffer.size() < floats + kAlignFloats) buffer.resize(floats + kAlignFloats);
  const auto address = reinterpret_cast<std::uintptr_t>(buffer.data());
  const std::size_t bytes = kAlignFloats * sizeof(float);
  return reinterpret_cast<float*>((address + bytes - 1) / bytes * bytes);
}

}  // namespace

std::vector<std::string> cpu_isas() {
  std::vector<std::string> names;
  for (const cpu::KernelTable* table : cpu::usable_tables()) names.emplace_back(table->isa);
  return names;
}

CpuAttention::CpuAttention(int num_threads, const std::string& isa)
    : CpuAttention(std::make_shared<ThreadPool>(num_threads), isa) {}

CpuAttention::CpuAttention(std::shared_ptr<ThreadPool> pool, const std::string& isa)
    : table_(&cpu::choose_table(isa)), pool_(std::move(pool)) {}

CpuAttention::~CpuAttention() = default;

std::string CpuAttention::isa() const {
  return table_->isa;
}

int CpuAttention::num_threads() const {
  const std::lock_guard lock(mutex_);
  return pool_->num_threads();
}

void CpuAttention::set_num_threads(int num_threads) {
  const std::lock_guard lock(mutex_);
  if (num_threads != pool_->num_threads()) pool_ = std::make_shared<ThreadPool>(num_threads);
}

void CpuAttention::set_pool(std::shared_ptr<ThreadPool> pool) {
  const std::lock_guard lock(mutex_);
  pool_ = std::move(pool);
}

void CpuAttention::run(CpuBatch& batch, const CpuLayerCall& call) {
  check_call(batch, call);
  if (batch.num_tokens() == 0) return;
  const std::lock_guard lock(mutex_);
  // Throws before anything is written.
  cpu::Plan& plan = batch.plan(call.layer, call.window, call.q.shape[1], pool_->num_threads());
  write(batch, call);
  attend(batch, call, plan);
}

std::uint64_t CpuAttention::fold(const char* data, std::size_t bytes) const {
  const std::lock_guard lock(mutex_);
  return fold_memory(*pool_, data, bytes);
}

void CpuAttention::write(const CpuBatch& batch, const CpuLayerCall& call) {
  const DType dtype = call.q.dtype;
  const std::int64_t row_elements = call.q.shape[1] * call.q.shape[2];
  if (call.cos) {
    const auto bytes =
        static_cast<std::size_t>(batch.num_tokens() * row_elements * item_bytes(dtype));
    if (rotated_.size() < bytes) rotated_.resize(bytes);
  }
  WriteRun run{batch, call, kernels_for(*table_, dtype, batch.view().dtype()), rotated_.data(), {}};
  for (std::int32_t seq = 0; seq < batch.num_sequences(); ++seq) {
    for (std::int64_t token = 0; token < batch.num_new(seq); token += kWriteTokens) {
      run.items.push_back({seq, token});
    }
  }
  const std::int64_t serial_elements = pool_->is_awake() ? kSerialElementsAwake : kSerialElements;
  const bool serial = batch.num_tokens() * row_elements < serial_elements;
  pool_->run(static_cast<std::int64_t>(run.items.size()), serial ? 1 : ThreadPool::kMaxThreads,
             &do_write, &run);
}

void CpuAttention::attend(const CpuBatch& batch, const CpuLayerCall& call, cpu::Plan& plan) {
  const auto head_dim = static_cast<std::int32_t>(batch.view().head_dim());
  const std::size_t floats =
      std::max(table_->decode_scratch(
                   static_cast<std::int32_t>(plan.q_heads) * plan.max_decode_rows, head_dim),
               table_->tile_scratch(plan.max_rows_and_heads, head_dim,
                                    static_cast<std::int32_t>(width_of(call.out))));
  const std::size_t scratch_floats = (floats + kAlignFloats - 1) / kAlignFloats * kAlignFloats;
  float* const scratch =
      aligned(scratch_, scratch_floats * static_cast<std::size_t>(pool_->num_threads()));
  float* const partials = aligned(partials_, static_cast<std::size_t>(plan.partial_floats));
  TensorRef q = call.q;
  if (call.cos) {
    q.data = rotated_.data();
    q.strides = {call.q.shape[1] * call.q.shape[2], call.q.shape[2], 1};
  }
  AttendRun run{batch,
                call,
                kernels_for(*table_, q.dtype, batch.view().dtype()),
                plan,
                q,
                partials,
                scratch,
                scratch_floats};
  plan.restart();
  const std::int64_t serial_work = pool_->is_awake() ? kSerialWorkAwake : kSerialWork;
  pool_->run(static_cast<std::int64_t>(plan.items.size()),
             plan.work < serial_work ? 1 : ThreadPool::kMaxThreads, &do_attend, &run);
}

}  // namespace vmserve
