// Kernels that depend on the instruction set: parameter structs, and one table of functions for
// each instruction set. To change or add
// - a weight form of linear layers (4 bit, say): linear.h
// - an instruction set: a `Vec` (vec_avx2.h documents its members), kernels_<isa>.cpp with its
//   compiler flags in CMakeLists.txt, and the choice in isa.cpp
//
// The files that implement kernels are compiled with -m flags of their own. They include nothing of
// the C++ library and keep every function in an unnamed namespace. Otherwise the linker would keep
// one copy of an inline function for all files, perhaps one that this processor cannot execute.
#pragma once

#include <cstddef>
#include <cstdint>

namespace vmserve::cpu {

constexpr std::int32_t kMaxHeadDim = 576;

struct Bf16 {
  std::uint16_t bits;
};

// An element of a KV cache of 8 bits: an integer + 128. A row of head_dim elements (one token, one
// head, keys or values) is followed by its float32 scale: element = scale * (bits - 128).
struct Code {
  std::uint8_t bits;
};
constexpr std::int64_t kScaleBytes = 4;

// K or V of one layer. Strides in elements; head_dim is contiguous.
struct Plane {
  char* data;                 // [rows, tokens, kv_heads, head_dim]: rows are slots or arena pages
  std::int64_t row_stride;    // from slot to slot, or from page to page
  std::int64_t token_stride;  // from token to token
  std::int64_t head_stride;   // from KV head to KV head
};

// Addresses of one sequence's tokens. Contiguous: `blocks` is null and the sequence is in slot
// `row`. Paged: position p is in block b = blocks[p / block_tokens], which is part
// b % blocks_per_page of page (row) b / blocks_per_page. Only positions passed to a kernel are
// looked up.
struct Sequence {
  Plane k, v;
  std::int64_t row;
  const std::int32_t* blocks;
  std::int32_t block_tokens;
  std::int32_t blocks_per_page;
};

// Positions of a part; parts begin at multiples of it. The attention of a row is the sum of its
// parts in order, each computed from nothing. So its bits do not depend on the rows and positions
// of a work item.
constexpr std::int64_t kPartTokens = 256;

// The result of a work item: finished rows or, if `partial` is not null, parts, which `combine`
// adds up.
struct Output {
  void* rows;          // row r, head g of `heads`: rows + r * row_stride + g * head_dim
  float* lse;          // null, or natural log-sum-exp: lse + r * lse_stride + g
  float* partial;      // part i: partial + i * part_stride, partial_floats of a row and head
  const float* sinks;  // null, or of each head: the score of one more token, without a value
  std::int64_t part_stride;
  std::int64_t row_stride;  // elements
  std::int64_t lse_stride;
};

// One or few consecutive query rows over positions [begin, end) of one part. All heads are computed
// together, so that a token's memory is read as one stream. Row r has position first_position + r
// and attends to (that - window, that].
struct DecodeArgs {
  Sequence seq;
  const void* q;  // [rows, q_heads, head_dim]
  std::int64_t q_row_stride, q_head_stride;
  std::int32_t kv_heads, group, head_dim, rows;
  std::int64_t first_position, begin, end, window;
  float scale, softcap;  // softcap 0: none
  float* scratch;        // decode_scratch floats, 64-byte aligned
  Output out;            // heads: kv_heads * group
};

// `rows` consecutive query rows over positions [begin, end), for one KV head and its group.
// Row r has position first_position + r and attends to (that - window, that]. Values, and the rows
// of `out`, have value_dim elements.
struct TileArgs {
  Sequence seq;
  const void* q;  // [rows, group, head_dim] of this KV head
  std::int64_t q_row_stride, q_head_stride;
  std::int32_t kv_head, group, head_dim, value_dim, rows;
  std::int64_t first_position, begin, end, window;
  float scale, softcap;
  float* scratch;  // tile_scratch floats, 64-byte aligned
  Output out;      // heads: group
};

// Rotates q and k of consecutive tokens of one sequence, and writes k and v to their positions.
struct WriteArgs {
  Sequence seq;
  std::int64_t position;
  std::int32_t num_tokens, q_heads, kv_heads, head_dim, rotary_dim;  // rotary_dim 0: no rotation
  // [num_tokens, heads, head_dim], strides below, in elements; v null: not written, a part of k.
  const void *q, *k, *v;
  std::int64_t q_token_stride, q_head_stride, k_token_stride, k_head_stride, v_token_stride,
      v_head_stride;
  const void *cos, *sin;  // [num_tokens, rotary_dim]; the sine of the first half is negated
  std::int64_t cos_stride, sin_stride;
  void* q_out;  // [num_tokens, q_heads, head_dim], contiguous; unused without a rotation
};

// Adds up `num_parts` parts of the same rows, in order.
struct CombineArgs {
  const float* parts;        // part i: parts + i * part_stride
  std::int64_t part_stride;  // floats
  std::int32_t num_parts, num_rows, heads, head_dim;
  Output out;
};

// The type that rows of a linear layer are rounded to. Sums are float32.
enum RowType : std::int32_t {
  kRowsFloat32,
  kRowsBFloat16,
  kRowsInt16,
  kRowsInt8,
  // For weights with scales for groups of the depth: rows have the same groups.
  kRowsInt16By32,
  kRowsInt8By32,
  kRowsInt16By16,
  kRowsInt8By16,
  kNumRowTypes
};

struct RowFormat {
  const char* name;
  std::int64_t element_bytes;
  std::int64_t group_depth;  // elements that share a scale (RowGroup); 0: there are no scales
};

// Shorter groups lose less precision to one large element, which matters for int8. At most 512
// int16: 512 products of 128 and 32,767 are just below 2^31, so sums in int32 are exact.
constexpr RowFormat kRowFormats[kNumRowTypes] = {
    {"float32", 4, 0}, {"bfloat16", 2, 0}, {"int16", 2, 512}, {"int8", 1, 128},
    {"int16", 2, 32},  {"int8", 1, 32},    {"int16", 2, 16},  {"int8", 1, 16}};

// The storage of a linear layer's weights and the type of the rows they are multiplied by: the
// index of LinearKernels::forms.
enum WeightForm : std::int32_t {
  kWeightsFloat32,        // rows of float32
  kWeightsBFloat16,       // rows of float32
  kWeightsBFloat16Pairs,  // the same weights, rows of bfloat16
  kWeightsInt8,           // a scale for each output; rows of int16
  kWeightsInt8Bytes,      // the same weights, rows of int8
  // Integers as in a quantized checkpoint (linear_grouped.h). Each output and group of 32 or 16
  // elements has a scale, and perhaps a minimum. Rows of int16, or of int8 (...Bytes).
  kWeightsGrouped4,
  kWeightsGrouped4Bytes,
  kWeightsGroupedTable,  // codes that are numbers of MXFP4, in 4 bits
  kWeightsGroupedTableBytes,
  kWeightsGrouped5,
  kWeightsGrouped5Bytes,
  kWeightsGrouped8,
  kWeightsGrouped8Bytes,
  kWeightsGrouped6By16,
  kWeightsGrouped6By16Bytes,
  kWeightsGrouped8By16,
  kWeightsGrouped8By16Bytes,
  kNumWeightForms
};

// One group of a row of integers. Sums of its products are exact, in int32.
struct RowGroup {
  float scale;
  std::int32_t offset;  // -128 times the sum of the elements: weights are stored as w + 128
  float sum;            // scale times the sum of the elements: for the minima of grouped weights
};

// How the scales and minima of grouped weights are stored: the smallest type that has them exactly.
// kSteps: int8 multiples of a half-precision step for each output and groups_per_step groups.
enum class ScaleType : std::int32_t { kSteps, kFloat16, kFloat32 };

struct ScaleFormat {
  ScaleType type;
  bool minima;
  std::int32_t groups_per_step;
};

// A matrix of integer codes, as in a quantized checkpoint: w = scale * code + minimum. It is stored
// in as few bits as the largest of its codes takes.
struct GroupedTensor {
  int bits;                   // 4: codes 0 .. 15, one to a byte; 8: int8
  std::int64_t group;         // elements of a group of the depth
  const std::uint8_t* codes;  // [outputs, inputs]
  const float* scales;        // [outputs, groups]
  const float* minima;        // likewise; null: -8 * scale with 4 bits, 0 with 8
  // [outputs, steps] in half precision, or null. The scales of groups / steps successive groups are
  // whole multiples of a step. Packed weights are smaller with steps.
  const float *scale_steps, *minimum_steps;
  std::int64_t outputs, inputs, groups, steps;
};

// Activations of a gated MLP. kSilu: silu(gate) * up. kGelu: gelu(gate) * up, by a tanh (Hendrycks
// and Gimpel 2016). kClamped: (up + 1) * gate * sigmoid(alpha * gate), with gate at most `limit`,
// and up between -limit and limit.
enum class Activation : std::int32_t { kSilu, kGelu, kClamped };

struct Gate {
  Activation activation = Activation::kSilu;
  float alpha = 0.0F, limit = 0.0F;
};

// The use of a product's sums; see LinearArgs.
enum class Epilogue : std::int32_t {
  kStore,    // written as rows of float32
  kNarrow,   // written as rows of bfloat16
  kAdd,      // added to rows of float32
  kGate,     // a gated MLP, written as packed rows
  kGateRows  // a gated MLP, written as rows of float32
};

// y = x W^T for some outputs of a linear layer, all rows.
//
// Weights are packed in panels of panel_outputs outputs, each [depth, panel_outputs] in the order
// in which the instruction set reads them (linear_panels.h). `depth` is padded to a multiple of
// kDepthUnit with zeros. Rows are packed in blocks; block_rows says how many rows a block has. The
// block whose first row is r begins at element r * depth and has chunks of kChunkBytes: [depth /
// elements of a chunk, rows of the block, elements of a chunk].
struct LinearArgs {
  const char* weights;
  const float* scales;       // one for each output, or null
  const float* bias;         // one for each output, or null
  ScaleFormat scale_format;  // only for grouped weights
  std::int64_t depth;
  const void* rows;
  const RowGroup* row_groups;  // [num_rows, num_groups(depth, type)]; none for rows of floats
  std::int32_t num_rows;
  std::int32_t first_panel, num_panels;
  std::int32_t num_outputs;  // the last panel may be partly filled
  Epilogue epilogue;
  Gate gate;
  float softcap;            // not 0: outputs become softcap * tanh(output / softcap)
  bool pairs_out;           // kGate: packs bfloat16 instead of float32
  void* out;                // row r, output n: out + r * out_stride + n; kGate: packed rows
  std::int64_t out_stride;  // elements; kGate: the padded depth of the packed rows
  float* scratch;           // for widened weights; may hold fewer than a panel's, or none
  std::int64_t scratch_floats;
};

// Packs weights [outputs, depth] into panels: up to three tensors one after the other. If gated,
// the two tensors of a gated MLP alternate vector by vector.
struct PackArgs {
  const void* tensors[3];
  GroupedTensor grouped[3];  // instead of `tensors`; `weights` is zero before
  ScaleFormat scale_format;
  std::int64_t row_strides[3];  // elements; the depth is contiguous
  std::int32_t outputs[3];      // outputs of each tensor
  std::int32_t num_tensors;
  bool from_bf16, gated;
  std::int64_t depth;  // depth of the tensors, not padded
  std::int32_t first_panel, num_panels;
  char* weights;
  float* scales;  // one for each output; written if the form has output_scales
};

// Packs rows of float32 or bfloat16 into one block. If `norm` is not null, normalises them first:
// x * norm / sqrt(mean(x^2) + eps) (RMSNorm, Zhang and Sennrich 2019).
struct PackRowsArgs {
  const void* rows;
  bool from_bf16;
  std::int64_t row_stride;  // elements
  std::int32_t num_rows;    // rows of the block
  std::int64_t depth;       // the block pads it to a multiple of kDepthUnit
  const float* norm;
  float eps;
  void* block;
  RowGroup* groups;  // rows of integers: [num_rows, num_groups]; scale NaN if an element is NaN
};

constexpr int kChunkBytes = 16;
constexpr std::int64_t kDepthUnit = 16;  // a chunk of 8-bit elements
constexpr std::int64_t num_groups(std::int64_t depth, RowType type) {
  const std::int64_t group = kRowFormats[type].group_depth;
  return group == 0 ? 0 : (depth + group - 1) / group;
}

// Elements of a row of logits that share a maximum and a sum of weights.
constexpr std::int64_t kRowBlock = 128;
constexpr std::int64_t num_row_blocks(std::int64_t width) {
  return (width + kRowBlock - 1) / kRowBlock;
}

// Operations on a row of `width` logits for sampling. All instruction sets give the same bits
// (rows.h). Logits are divided by `temperature` first, in float32, and limited to the largest
// finite number; 1 leaves them unchanged.
struct RowKernels {
  void (*widen)(const Bf16* row, std::int64_t width, float* out);
  // Returns the largest value, or NaN if a value is NaN or +inf. maxima[b]: the maximum of block b.
  float (*survey)(const float* row, std::int64_t width, float* maxima);
  // sums[b] = sum of exp(x / temperature - shift) over block b. Pre: x / temperature <= shift.
  void (*sum_blocks)(const float* row, std::int64_t width, float temperature, float shift,
                     float* sums);
  // exp(x / temperature - shift) of each value: relative error below 2^-23, exactly 0 below
  // exp(-87).
  void (*weights)(const float* values, std::int64_t count, float temperature, float shift,
                  float* out);
  // Writes the columns, ascending, and values of x / temperature that are at least `floor`; returns
  // how many. `ids` and `values` have room for `width`.
  std::int64_t (*at_least)(const float* row, std::int64_t width, const float* maxima,
                           float temperature, float floor, std::int32_t* ids, float* values);
  // The number of columns before `id` in the order of values (largest first), then of columns.
  std::int64_t (*num_before)(const float* row, std::int64_t width, const float* maxima,
                             std::int64_t id);
};

// One weight form of one instruction set.
struct LinearForm {
  RowType rows;
  bool output_scales;  // PackArgs::scales and LinearArgs::scales, one float for each output
  std::int64_t (*panel_bytes)(std::int64_t depth, ScaleFormat scale_format);
  void (*pack)(const PackArgs&);
  void (*multiply)(const LinearArgs&);  // null if another form of the same weights is as fast
};

struct LinearKernels {
  std::int32_t panel_outputs;
  // Rows of a packed block, given how many rows are left.
  std::int32_t (*block_rows)(std::int32_t rows_left);
  LinearForm forms[kNumWeightForms];
  void (*pack_rows[kNumRowTypes])(const PackRowsArgs&);  // null if no form reads such rows
};

// One instruction set, for one element type of q, k, v and the result, and one of the KV cache.
struct Kernels {
  void (*decode)(const DecodeArgs&);
  void (*tile)(const TileArgs&);
  void (*write)(const WriteArgs&);
  void (*combine)(const CombineArgs&);
};

struct KernelTable {
  const char* isa;
  Kernels f32, bf16;
  Kernels f32_int8, bf16_int8;  // with a KV cache of Code
  LinearKernels linear;
  RowKernels rows;
  std::size_t (*decode_scratch)(std::int32_t q_heads, std::int32_t head_dim);  // floats
  std::size_t (*tile_scratch)(std::int32_t rows_and_heads, std::int32_t head_dim,
                              std::int32_t value_dim);
};

const KernelTable& generic_kernels();
const KernelTable& generic16_kernels();
#ifdef VMSERVE_X86_KERNELS
const KernelTable& avx2_kernels();
const KernelTable& avx512_kernels();
const KernelTable& avx512_vnni_kernels();
const KernelTable& avx512_bf16_kernels();
#endif

// Floats of one row and head of a part: sums (head_dim, padded by the kernels), the maximum and the
// sum of weights.
constexpr std::int64_t partial_floats(std::int32_t head_dim) {
  return (head_dim + 31) / 32 * 32 + 2;
}

}  // namespace vmserve::cpu
