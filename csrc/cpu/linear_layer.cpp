#include "linear_layer.h"

#include <sys/mman.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <string>
#include <utility>

#include "kernels/half.h"
#include "vmserve/errors.h"
#include "vmserve/text.h"

namespace vmserve {
namespace {

using cpu::GroupedTensor;

// Weights of a work item: as many panels as stay in a core's own cache while all rows are computed.
// Fewer if threads would not have several items each.
constexpr std::int64_t kItemBytes = 192 << 10;
constexpr std::int64_t kItemsPerThread = 4;
// With so few rows products wait for memory, and kernels compute up to two panels side by side.
constexpr std::int64_t kFewRows = 8, kPanelsOfFewRows = 2;
// Weights of an item that are widened at a time.
constexpr std::int64_t kWidenedBytes = 192 << 10;
constexpr std::size_t kBigPage = std::size_t{2} << 20;
// Size of an arena's blocks, and alignment within one.
constexpr std::size_t kArenaBlock = std::size_t{64} << 20, kArenaAlign = 128;

std::int64_t round_up(std::int64_t n, std::int64_t unit) {
  return (n + unit - 1) / unit * unit;
}

void require(bool condition, const std::string& what) {
  if (!condition) throw MisuseError(what);
}

template <class Number>
void grow(std::vector<Number>& buffer, std::int64_t size) {
  if (buffer.size() < static_cast<std::size_t>(size)) buffer.resize(static_cast<std::size_t>(size));
}

bool is_half(float x) {
  std::uint16_t half;
  return cpu::exact_half(x, half);
}

// Whether `value` is a multiple of `step` that int8 holds.
bool is_step(float value, float step) {
  if (step == 0.0F) return value == 0.0F;
  const float factor = value / step;
  return factor >= -128.0F && factor <= 127.0F &&
         static_cast<float>(static_cast<int>(factor)) == factor && factor * step == value;
}

// Whether packed minima are needed, given the size of packed codes.
bool has_minima(const GroupedTensor& tensor) {
  if (tensor.minima == nullptr) return false;
  const std::int64_t count = tensor.outputs * tensor.groups;
  const float zero = tensor.bits == 4 ? -8.0F : 0.0F;
  for (std::int64_t i = 0; i < count; ++i) {
    if (tensor.minima[i] != zero * tensor.scales[i]) return true;
  }
  return false;
}

bool fits_steps(const GroupedTensor& tensor, bool minima) {
  const bool own_minima = minima && tensor.minima != nullptr;
  if (tensor.steps == 0 || tensor.scale_steps == nullptr) return false;
  if (minima && (!own_minima || tensor.minimum_steps == nullptr)) return false;
  const std::int64_t per_step = tensor.groups / tensor.steps;
  for (std::int64_t i = 0; i < tensor.outputs * tensor.groups; ++i) {
    if (!is_step(tensor.scales[i], tensor.scale_steps[i / per_step])) return false;
    if (minima && !is_step(tensor.minima[i], tensor.minimum_steps[i / per_step])) return false;
  }
  for (std::int64_t i = 0; i < tensor.outputs * tensor.steps; ++i) {
    if (!is_half(tensor.scale_steps[i])) return false;
    if (minima && !is_half(tensor.minimum_steps[i])) return false;
  }
  return true;
}

bool fits_halves(const GroupedTensor& tensor, bool minima) {
  for (std::int64_t i = 0; i < tensor.outputs * tensor.groups; ++i) {
    if (!is_half(tensor.scales[i])) return false;
    if (!minima) continue;
    const float least = tensor.bits == 4 ? -8.0F * tensor.scales[i] : 0.0F;
    if (!is_half(tensor.minima == nullptr ? least : tensor.minima[i])) return false;
  }
  return true;
}

// Leaves out minima that say no more than the codes' zero. Returns whether a tensor has others.
bool keep_minima(std::vector<GroupedTensor>& tensors) {
  bool any = false;
  for (GroupedTensor& tensor : tensors) {
    if (has_minima(tensor)) {
      any = true;
    } else {
      tensor.minima = nullptr;
    }
  }
  return any;
}

// Bits of the shortest codes that hold those of the tensors. 4 only if all tensors have 4, so that
// the type of the rows depends on no weight.
int bits_of(const std::vector<GroupedTensor>& tensors, bool minima) {
  const auto is_short = [](const GroupedTensor& tensor) { return tensor.bits == 4; };
  if (std::all_of(tensors.begin(), tensors.end(), is_short)) return 4;
  int least = 0, most = 0;
  for (const GroupedTensor& tensor : tensors) {
    // Codes are compared as unsigned numbers, for which there are vector instructions.
    const std::uint8_t sign = tensor.bits == 8 ? 0x80 : 0;
    std::uint8_t low = 0xff, high = 0;
    for (std::int64_t i = 0; i < tensor.outputs * tensor.inputs; ++i) {
      const auto code = static_cast<std::uint8_t>(tensor.codes[i] ^ sign);
      low = std::min(low, code);
      high = std::max(high, code);
    }
    const int zero = tensor.bits == 8 ? 128 : minima ? 0 : 8;
    least = std::min(least, low - zero);
    most = std::max(most, high - zero);
  }
  for (const int bits : {5, 6}) {
    const int lowest = minima ? 0 : -(1 << (bits - 1));
    if (least >= lowest && most < lowest + (1 << bits)) return bits;
  }
  return 8;
}

// Whether 5-bit codes are all numbers of MXFP4, which the table has.
bool fits_table(const std::vector<GroupedTensor>& tensors, bool minima) {
  constexpr std::uint32_t kMagnitudes =
      1U << 0 | 1U << 1 | 1U << 2 | 1U << 3 | 1U << 4 | 1U << 6 | 1U << 8 | 1U << 12;
  return !minima && std::all_of(tensors.begin(), tensors.end(), [](const GroupedTensor& tensor) {
    const int zero = tensor.bits == 8 ? 0 : 8;
    const auto is_known = [&](std::uint8_t code) {
      return (kMagnitudes >> std::abs(static_cast<std::int8_t>(code) - zero) & 1U) != 0;
    };
    return std::all_of(tensor.codes, tensor.codes + tensor.outputs * tensor.inputs, is_known);
  });
}

// The smallest format that has the tensors' scales and minima exactly. `group`: of the form.
cpu::ScaleFormat format_of(const std::vector<GroupedTensor>& tensors, std::int64_t group,
                           bool minima) {
  cpu::ScaleFormat format{cpu::ScaleType::kFloat32, minima, 1};
  const auto all = [&](auto&& fits) { return std::all_of(tensors.begin(), tensors.end(), fits); };
  if (all([&](const GroupedTensor& tensor) {
        return tensor.group == group && tensor.steps > 0 &&
               tensor.groups / tensor.steps == tensors[0].groups / tensors[0].steps &&
               fits_steps(tensor, format.minima);
      })) {
    format.type = cpu::ScaleType::kSteps;
    format.groups_per_step = static_cast<std::int32_t>(tensors[0].groups / tensors[0].steps);
  } else if (all([&](const GroupedTensor& tensor) { return fits_halves(tensor, format.minima); })) {
    format.type = cpu::ScaleType::kFloat16;
  }
  return format;
}

void check_grouped(const GroupedTensor& tensor, const std::string& name) {
  require(tensor.bits == 4 || tensor.bits == 8,
          name + " has codes of " + std::to_string(tensor.bits) + " bits: 4 and 8 are supported");
  const std::int64_t unit = tensor.bits == 4 ? 32 : 16;
  require(tensor.group > 0 && tensor.group % unit == 0,
          name + " has groups of " + std::to_string(tensor.group) + ": multiples of " +
              std::to_string(unit) + " are supported");
  require(tensor.groups == (tensor.inputs + tensor.group - 1) / tensor.group,
          name + " has scales of " + std::to_string(tensor.groups) + " groups of " +
              std::to_string(tensor.group) + " for " + std::to_string(tensor.inputs) + " inputs");
  require(tensor.steps == 0 || tensor.groups % tensor.steps == 0,
          name + " has " + std::to_string(tensor.steps) + " steps for " +
              std::to_string(tensor.groups) + " groups");
  if (tensor.bits == 8) return;
  const std::int64_t count = tensor.outputs * tensor.inputs;
  require(
      std::all_of(tensor.codes, tensor.codes + count, [](std::uint8_t code) { return code < 16; }),
      name + " has a code of 4 bits above 15");
}

}  // namespace

std::int64_t outputs_of(const WeightRef& matrix) {
  if (const auto* grouped = std::get_if<GroupedTensor>(&matrix)) return grouped->outputs;
  return std::get<TensorRef>(matrix).shape.at(0);
}

std::int64_t inputs_of(const WeightRef& matrix) {
  if (const auto* grouped = std::get_if<GroupedTensor>(&matrix)) return grouped->inputs;
  return std::get<TensorRef>(matrix).shape.at(1);
}

char* WeightArena::take(std::size_t bytes) {
  const std::size_t rounded = (bytes + kArenaAlign - 1) / kArenaAlign * kArenaAlign;
  if (blocks_.empty() || blocks_.back().bytes - blocks_.back().taken < rounded) add_block(rounded);
  Block& block = blocks_.back();
  block.taken += rounded;
  return block.data + block.taken - rounded;
}

void WeightArena::add_block(std::size_t least_bytes) {
  // Bytes that are never taken are never touched, and use no memory.
  const std::size_t bytes =
      (std::max(least_bytes, kArenaBlock) + kBigPage - 1) / kBigPage * kBigPage;
  // Aligned by hand: mmap does not align to huge pages.
  const std::size_t reserved = bytes + kBigPage;
  void* const at = mmap(nullptr, reserved, PROT_READ | PROT_WRITE,
                        MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (at == MAP_FAILED) {
    throw OutOfMemoryError("the system has no " + human_bytes(bytes) +
                           " for packed weights: use --quantization int8 or a smaller model");
  }
  const auto first = reinterpret_cast<std::uintptr_t>(at);
  const std::uintptr_t data = (first + kBigPage - 1) / kBigPage * kBigPage;
  const std::uintptr_t end = data + bytes;
  if (data > first) munmap(at, data - first);
  if (first + reserved > end) munmap(reinterpret_cast<void*>(end), first + reserved - end);
  auto* const block = reinterpret_cast<char*>(data);
  madvise(block, bytes, MADV_HUGEPAGE);
  blocks_.push_back({block, bytes, 0});
}

WeightArena::~WeightArena() {
  for (const Block& block : blocks_) munmap(block.data, block.bytes);
}

bool ItemRange::take(bool at_front, std::int64_t& item) {
  constexpr std::uint64_t kFront = std::uint64_t{1} << 32;
  std::uint64_t seen = ends_.load(std::memory_order_relaxed);
  for (;;) {
    const std::uint64_t first = seen / kFront, end = seen % kFront;
    if (first == end) return false;
    item = static_cast<std::int64_t>(at_front ? first : end - 1);
    const std::uint64_t left = at_front ? seen + kFront : seen - 1;
    if (ends_.compare_exchange_weak(seen, left, std::memory_order_relaxed)) return true;
  }
}

std::int64_t padded_depth(std::int64_t inputs) {
  return round_up(inputs, cpu::kDepthUnit);
}

void check_matrix(const WeightRef& matrix, const char* name, std::int64_t outputs,
                  std::int64_t inputs) {
  const std::string shape = "[" + std::to_string(outputs) + ", " + std::to_string(inputs) + "]";
  if (const auto* grouped = std::get_if<GroupedTensor>(&matrix)) {
    require(grouped->outputs == outputs && grouped->inputs == inputs,
            std::string(name) + " is not " + shape);
    check_grouped(*grouped, name);
    return;
  }
  const auto& tensor = std::get<TensorRef>(matrix);
  require(tensor.shape == std::vector<std::int64_t>{outputs, inputs} &&
              tensor.strides.size() == 2 && tensor.strides[1] == 1,
          std::string(name) + " is not " + shape + " with contiguous rows");
}

LinearProducts::LinearProducts(const cpu::LinearKernels& kernels, std::shared_ptr<ThreadPool> pool,
                               Quantization quantization, bool bf16_rows)
    : kernels_(kernels), quantization_(quantization), bf16_rows_(bf16_rows) {
  set_pool(std::move(pool));
}

void LinearProducts::set_pool(std::shared_ptr<ThreadPool> pool) {
  pool_ = std::move(pool);
  ranges_ = std::make_unique<ItemRange[]>(static_cast<std::size_t>(pool_->num_threads()));
}

const cpu::LinearForm& LinearProducts::float_form(bool bf16_weights, bool exact) const {
  const auto faster_of = [&](cpu::WeightForm first, cpu::WeightForm second) {
    return kernels_.forms[first].multiply != nullptr ? first : second;
  };
  cpu::WeightForm form = bf16_weights ? cpu::kWeightsBFloat16 : cpu::kWeightsFloat32;
  if (exact) return kernels_.forms[form];
  if (quantization_ == Quantization::kInt8Dynamic) {
    form = faster_of(cpu::kWeightsInt8Bytes, cpu::kWeightsInt8);
  } else if (quantization_ == Quantization::kInt8) {
    form = cpu::kWeightsInt8;
  } else if (bf16_weights && bf16_rows_) {
    // Rows are rounded only if the model computes in bfloat16.
    form = faster_of(cpu::kWeightsBFloat16Pairs, cpu::kWeightsBFloat16);
  }
  return kernels_.forms[form];
}

const cpu::LinearForm& LinearProducts::grouped_form(const std::vector<GroupedTensor>& tensors,
                                                    bool minima) const {
  // Groups of 32 are two of 16.
  const bool short_groups = std::any_of(tensors.begin(), tensors.end(),
                                        [](const auto& tensor) { return tensor.group % 32 != 0; });
  const int bits = bits_of(tensors, minima);
  cpu::WeightForm form = cpu::kWeightsGrouped8, bytes = cpu::kWeightsGrouped8Bytes;
  if (short_groups) {
    form = bits <= 6 ? cpu::kWeightsGrouped6By16 : cpu::kWeightsGrouped8By16;
    bytes = bits <= 6 ? cpu::kWeightsGrouped6By16Bytes : cpu::kWeightsGrouped8By16Bytes;
  } else if (bits == 4) {
    form = cpu::kWeightsGrouped4;
    bytes = cpu::kWeightsGrouped4Bytes;
  } else if (bits == 5 && fits_table(tensors, minima)) {
    form = cpu::kWeightsGroupedTable;
    bytes = cpu::kWeightsGroupedTableBytes;
  } else if (bits == 5) {
    form = cpu::kWeightsGrouped5;
    bytes = cpu::kWeightsGrouped5Bytes;
  }
  const bool rounds_more = quantization_ == Quantization::kInt8Dynamic;
  return kernels_.forms[rounds_more && kernels_.forms[bytes].multiply != nullptr ? bytes : form];
}

LinearLayer LinearProducts::pack(const std::vector<const WeightRef*>& matrices, bool gated,
                                 bool exact) {
  cpu::PackArgs args{};
  LinearLayer linear;
  linear.inputs = inputs_of(*matrices[0]);
  linear.depth = padded_depth(linear.inputs);
  std::int64_t lanes = 0;
  std::vector<GroupedTensor> grouped;
  for (std::size_t i = 0; i < matrices.size(); ++i) {
    require(matrices[i]->index() == matrices[0]->index(),
            "the weights of a layer are partly quantized");
    args.outputs[i] = static_cast<std::int32_t>(outputs_of(*matrices[i]));
    lanes += args.outputs[i];
    if (const auto* tensor = std::get_if<TensorRef>(matrices[i])) {
      const auto& first = std::get<TensorRef>(*matrices[0]);
      require(tensor->dtype == first.dtype, "the weights of a layer differ in dtype");
      args.from_bf16 = first.dtype == DType::kBFloat16;
      args.tensors[i] = tensor->data;
      args.row_strides[i] = tensor->strides[0];
    } else {
      grouped.push_back(std::get<GroupedTensor>(*matrices[i]));
    }
  }
  const std::int64_t width = kernels_.panel_outputs;
  linear.outputs = gated ? lanes / 2 : lanes;
  linear.num_panels =
      gated ? round_up(linear.outputs, width / 2) / (width / 2) : round_up(lanes, width) / width;
  args.num_tensors = static_cast<std::int32_t>(matrices.size());
  args.gated = gated;
  if (grouped.empty()) {
    linear.form = &float_form(args.from_bf16, exact);
  } else {
    const bool minima = keep_minima(grouped);
    linear.form = &grouped_form(grouped, minima);
    linear.scale_format = format_of(grouped, linear.row_format().group_depth, minima);
    std::copy(grouped.begin(), grouped.end(), args.grouped);
  }
  args.scale_format = linear.scale_format;
  linear.panel_bytes = linear.form->panel_bytes(linear.depth, linear.scale_format);
  args.depth = linear.inputs;
  args.num_panels = 1;
  args.weights = arena_.take(linear.weight_bytes());
  linear.weights = args.weights;
  if (linear.form->output_scales) {
    linear.scales.resize(static_cast<std::size_t>(linear.num_panels * width));
  }
  args.scales = linear.scales.data();
  parallel(linear.num_panels, lanes * linear.inputs, [&](std::int64_t panel) {
    cpu::PackArgs mine = args;
    mine.first_panel = static_cast<std::int32_t>(panel);
    linear.form->pack(mine);
  });
  return linear;
}

std::vector<LinearLayer> LinearProducts::pack_alike(const std::vector<const WeightRef*>& matrices) {
  const auto form_of = [&](const WeightRef& matrix) -> const cpu::LinearForm* {
    if (std::holds_alternative<TensorRef>(matrix)) return nullptr;
    std::vector<GroupedTensor> alone = {std::get<GroupedTensor>(matrix)};
    return &grouped_form(alone, keep_minima(alone));
  };
  std::vector<std::vector<const WeightRef*>> runs;
  const cpu::LinearForm* form = nullptr;
  for (const WeightRef* matrix : matrices) {
    const cpu::LinearForm* const own = form_of(*matrix);
    if (runs.empty() || own != form) runs.emplace_back();
    runs.back().push_back(matrix);
    form = own;
  }
  std::vector<LinearLayer> layers;
  for (const auto& run : runs) layers.push_back(pack(run, false));
  return layers;
}

void LinearProducts::set_bias(LinearLayer& layer, const std::vector<const float*>& biases,
                              const std::vector<std::int64_t>& sizes, bool gated) const {
  const std::int64_t width = kernels_.panel_outputs, half = width / 2;
  std::int64_t first = 0;
  for (std::size_t i = 0; i < biases.size(); first += sizes[i++]) {
    if (biases[i] == nullptr) continue;
    layer.bias.resize(static_cast<std::size_t>(layer.num_panels * width));
    for (std::int64_t output = 0; output < sizes[i]; ++output) {
      // Gate and up alternate vector by vector.
      const std::int64_t lane =
          gated ? output / half * width + static_cast<std::int64_t>(i) * half + output % half
                : first + output;
      layer.bias[static_cast<std::size_t>(lane)] = biases[i][output];
    }
  }
}

void LinearProducts::add_blocks(std::vector<Block>& blocks, const LinearShare& share) const {
  for (std::int64_t done = 0; done < share.num_rows;) {
    const std::int64_t rows = kernels_.block_rows(static_cast<std::int32_t>(share.num_rows - done));
    blocks.push_back({share.row + done, share.in_column, share.packed_row + done, rows});
    done += rows;
  }
}

void LinearProducts::pack_rows(const LinearLayer& next, const void* rows, bool bf16,
                               std::int64_t num_rows, const float* norm, float eps) {
  std::vector<Block> blocks;
  add_blocks(blocks, {&next, 0, 0, num_rows});
  pack_blocks(next, rows, bf16, blocks, norm, eps, next.inputs);
}

void LinearProducts::pack_rows(const LinearLayer& next, const void* rows, bool bf16,
                               const std::vector<LinearShare>& shares, const float* norm, float eps,
                               std::int64_t row_stride) {
  std::vector<Block> blocks;
  for (const LinearShare& share : shares) add_blocks(blocks, share);
  pack_blocks(next, rows, bf16, blocks, norm, eps, row_stride == 0 ? next.inputs : row_stride);
}

void LinearProducts::pack_blocks(const LinearLayer& next, const void* rows, bool bf16,
                                 const std::vector<Block>& blocks, const float* norm, float eps,
                                 std::int64_t row_stride) {
  const std::int64_t depth = next.inputs, block_depth = next.depth;
  const std::int64_t groups = cpu::num_groups(block_depth, next.form->rows);
  const std::int64_t size = next.row_format().element_bytes;
  std::int64_t num_rows = 0, end = 0;
  for (const Block& block : blocks) {
    num_rows += block.num_rows;
    end = std::max(end, block.to + block.num_rows);
  }
  grow(packed_, end * block_depth * size);
  grow(row_groups_, end * groups);
  const auto num_blocks = static_cast<std::int64_t>(blocks.size());
  parallel(num_blocks, num_rows * depth, [&](std::int64_t item) {
    const Block& block = blocks[static_cast<std::size_t>(item)];
    cpu::PackRowsArgs args{};
    args.rows =
        static_cast<const char*>(rows) + (block.from * row_stride + block.column) * (bf16 ? 2 : 4);
    args.from_bf16 = bf16;
    args.row_stride = row_stride;
    args.num_rows = static_cast<std::int32_t>(block.num_rows);
    args.depth = depth;
    args.norm = norm;
    args.eps = eps;
    args.block = packed_.data() + block.to * block_depth * size;
    args.groups = row_groups_.data() + block.to * groups;
    kernels_.pack_rows[next.form->rows](args);
  });
}

void LinearProducts::gather_rows(const LinearLayer& next, const std::vector<LinearShare>& shares,
                                 const std::vector<std::int64_t>& sources) {
  const std::int64_t groups = cpu::num_groups(next.depth, next.form->rows);
  const std::int64_t row_bytes = next.depth * next.row_format().element_bytes;
  std::vector<Block> blocks;
  std::int64_t num_rows = 0, end = 0;
  for (const LinearShare& share : shares) {
    if (share.num_rows == 1) continue;
    add_blocks(blocks, share);
    num_rows += share.num_rows;
    end = std::max(end, share.packed_row + share.num_rows);
  }
  grow(packed_, end * row_bytes);
  grow(row_groups_, end * groups);
  const auto num_blocks = static_cast<std::int64_t>(blocks.size());
  parallel(num_blocks, num_rows * next.depth, [&](std::int64_t item) {
    const Block& block = blocks[static_cast<std::size_t>(item)];
    char* const to = packed_.data() + block.to * row_bytes;
    for (std::int64_t row = 0; row < block.num_rows; ++row) {
      const std::int64_t source = sources[static_cast<std::size_t>(block.from + row)];
      const char* const from = packed_.data() + source * row_bytes;
      for (std::int64_t at = 0; at < row_bytes; at += cpu::kChunkBytes) {
        std::memcpy(to + at * block.num_rows + row * cpu::kChunkBytes, from + at, cpu::kChunkBytes);
      }
      std::copy_n(row_groups_.data() + source * groups, groups,
                  row_groups_.data() + (block.to + row) * groups);
    }
  });
}

LinearProducts::Split LinearProducts::split(const LinearLayer& linear, std::int64_t num_rows,
                                            std::int64_t num_layers) const {
  const std::int64_t all = linear.num_panels * num_layers;
  const std::int64_t share = std::clamp<std::int64_t>(
      all / (kItemsPerThread * pool_->num_threads()), 1, linear.num_panels);
  std::int64_t panels = std::clamp<std::int64_t>(kItemBytes / linear.panel_bytes, 1, share);
  if (num_rows <= kFewRows) panels = std::max(panels, kPanelsOfFewRows);
  if (panels >= 2) panels = panels / 2 * 2;
  return {panels, (linear.num_panels + panels - 1) / panels};
}

void LinearProducts::multiply(const LinearLayer& linear, const LinearLayer* next, const void* rows,
                              std::int64_t num_rows, cpu::Epilogue epilogue, void* out,
                              std::int64_t out_stride, bool pairs_out) {
  const LinearShare all{&linear, 0, 0, num_rows};
  multiply(&all, 1, next, rows, epilogue, out, out_stride, pairs_out);
}

void LinearProducts::fill_args(cpu::LinearArgs& args, const LinearShare& share, const void* rows,
                               void* out) const {
  const LinearLayer& linear = *share.layer;
  const std::int64_t groups = cpu::num_groups(linear.depth, linear.form->rows);
  const std::int64_t row_bytes = linear.depth * linear.row_format().element_bytes;
  const bool narrow = args.epilogue == cpu::Epilogue::kNarrow || args.pairs_out;
  args.weights = linear.weights;
  args.scales = linear.scales.empty() ? nullptr : linear.scales.data();
  args.bias = linear.bias.empty() ? nullptr : linear.bias.data();
  args.scale_format = linear.scale_format;
  args.depth = linear.depth;
  args.num_outputs = static_cast<std::int32_t>(linear.outputs);
  args.gate = linear.gate;
  args.rows = static_cast<const char*>(rows) + share.packed_row * row_bytes;
  args.row_groups = row_groups_.data() + share.packed_row * groups;
  args.num_rows = static_cast<std::int32_t>(share.num_rows);
  args.out =
      static_cast<char*>(out) + (share.row * args.out_stride + share.out_column) * (narrow ? 2 : 4);
}

void LinearProducts::multiply(const LinearShare* shares, std::int64_t num_shares,
                              const LinearLayer* next, const void* rows, cpu::Epilogue epilogue,
                              void* out, std::int64_t out_stride, bool pairs_out) {
  const LinearLayer& first = *shares[0].layer;
  std::int64_t num_rows = 0, most_rows = 0;
  for (std::int64_t i = 0; i < num_shares; ++i) {
    num_rows += shares[i].num_rows;
    most_rows = std::max(most_rows, shares[i].num_rows);
  }
  cpu::LinearArgs args{};
  args.epilogue = epilogue;
  args.softcap = first.softcap;
  args.pairs_out = pairs_out;
  args.out_stride = out_stride;
  const auto [panels, items_each] = split(first, most_rows, num_shares);
  const std::int64_t num_items = items_each * num_shares;
  const int num_threads = pool_->num_threads();
  for (int i = 0; i < num_threads; ++i) {
    ranges_[i].set(num_items * i / num_threads, num_items * (i + 1) / num_threads);
  }
  ReadAhead ahead;
  if (next != nullptr && most_rows <= kFewRows) {
    const Split other = split(*next, most_rows, 1);
    ahead = {next->weights, other.panels * next->panel_bytes, other.num_items};
  }
  const std::int64_t work = num_rows * first.num_panels * kernels_.panel_outputs * first.depth;
  const std::int64_t panel_floats = kernels_.panel_outputs * first.depth;
  args.scratch_floats =
      std::max(kWidenedBytes / static_cast<std::int64_t>(sizeof(float)), panel_floats);
  grow(scratch_, args.scratch_floats * num_threads);
  const void* const from = rows == nullptr ? packed_.data() : rows;
  const auto compute = [&, panels = panels, items_each = items_each](std::int64_t, int worker) {
    cpu::LinearArgs mine = args;
    mine.scratch = scratch_.data() + worker * args.scratch_floats;
    const LinearShare* last = nullptr;
    for (int i = 0; i < num_threads; ++i) {
      ItemRange& range = ranges_[(worker + i) % num_threads];
      for (std::int64_t item; range.take(i == 0, item);) {
        const LinearShare& share = shares[item / items_each];
        if (&share != last) fill_args(mine, share, from, out);
        last = &share;
        const std::int64_t panel = item % items_each * panels;
        mine.first_panel = static_cast<std::int32_t>(panel);
        mine.num_panels =
            static_cast<std::int32_t>(std::min(panels, share.layer->num_panels - panel));
        share.layer->form->multiply(mine);
      }
    }
  };
  parallel(num_threads, work, compute, ahead);
}

}  // namespace vmserve
