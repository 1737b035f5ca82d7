// Kernel arguments: plain structs, 8-byte fields first, without padding. They mirror
// vmserve/attention/cuda/params.py; both check the sizes.
#pragma once

#include "ptx.h"

// K and V of one layer. Position p of the sequence in row r:
// - paged: block b = table[r * table_width + (p >> block_shift)], token p % 2^block_shift of part
//   b % blocks_per_page of page b / blocks_per_page;
// - in slots: token p of slot r. The table is not read; page_stride is the distance of slots.
// Where K and V are codes, the float scales of all heads follow the codes of the last one.
struct KvLayer {
  char* keys;    // position 0 of page 0 (slot 0), head 0
  char* values;  // the same; K and V share the strides
  const int* table;
  i64 page_stride, token_stride, head_stride;  // bytes, multiples of 16
  int table_width, block_shift, blocks_per_page, reserved;
};
static_assert(sizeof(KvLayer) == 64, "as in params.py");

// Queries of some tokens with a range of one sequence's keys; the same for each KV head.
struct alignas(16) WorkItem {
  int row;    // of the table, or a slot
  int token;  // first token in the ragged batch, at consecutive positions; or -1 - i: tokens
              // lists[i ..] at any positions >= kv_end
  int num_tokens;
  int kv_begin, kv_end;            // begin: a multiple of kTileTokens; where a token has several
                                   // items, they meet at multiples of kPartTokens
  int part;                        // index of the first among its tokens' parts
  int min_position, max_position;  // among the tokens
};
static_assert(sizeof(WorkItem) == 32, "as in plan.py");

struct AttendArgs {
  KvLayer kv;
  const char* q;                      // [tokens, q_heads, head_dim]
  char* out;                          // [tokens, q_heads, head_dim], contiguous
  float* lse;                         // [tokens, q_heads] or null: natural logarithms
  float* parts;                       // [parts, q_heads, head_dim]: sums over weighted values
  Pair* part_sums;                    // [parts, q_heads]: maximum in base-2 logarithms, weights
  Pair* scratch;                      // append.cuh: [blocks of the grid, ...]
  const WorkItem* items;              // [num_items]
  const int* num_items;               // [1]
  const int* lists;                   // token indices
  const int* positions;               // [tokens]
  const int* part_starts;             // [tokens]: the first of a token's parts; -1: in one item
  const float* sinks;                 // [q_heads] or null: scores of one more key, whose value is 0
  i64 q_token_stride, q_head_stride;  // bytes, multiples of 16
  float scale;    // to base-2 logarithms; with a softcap: of the argument of tanh, times 2
  float softcap;  // in base-2 logarithms; 0: none
  int window;     // positions a query attends to, its own included; 0: all
  int kv_heads, group, reserved;
};
static_assert(sizeof(AttendArgs) == 64 + 96 + 16 + 24, "as in params.py");

struct CombineArgs {
  const float* parts;
  const Pair* part_sums;
  char* out;
  float* lse;            // or null
  const int* split;      // [num_split, 4]: token, first part, parts, unused
  const int* num_split;  // [1]
  const float* sinks;    // as in AttendArgs
  int q_heads, reserved;
};
static_assert(sizeof(CombineArgs) == 64, "as in params.py");

struct WriteArgs {
  KvLayer kv;
  const char* q;  // read only if there is a rotation
  const char* k;
  const char* v;
  const char* cos;       // [tokens, rotary_dim]
  const char* sin;       // signed, as in vmserve/attention/rotary.py
  char* q_out;           // [tokens, q_heads, head_dim], contiguous
  const int* rows;       // [tokens]: of the table, or a slot; negative: no token
  const int* positions;  // [tokens]
  i64 q_token_stride, q_head_stride, k_token_stride, k_head_stride, v_token_stride, v_head_stride;
  i64 cos_stride, sin_stride;  // all in bytes
  int q_heads, kv_heads, rotary_dim;
  int pieces;  // blocks that share a token
};
static_assert(sizeof(WriteArgs) == 64 + 64 + 64 + 16, "as in params.py");

// Contiguous rows of `size` elements: x += residual, if there is one; then out = RMSNorm of x.
struct NormArgs {
  char* x;  // [rows, size], 16-byte aligned, like all here; written if there is a residual
  const char* residual;  // the same, or null
  const char* weight;    // [size]
  char* out;             // as x
  float eps;
  int size, reserved, reserved_too;  // size: a multiple of 8
};
static_assert(sizeof(NormArgs) == 48, "as in params.py");

constexpr int kSilu = 0, kGeluTanh = 1;

// Rows of `size` elements, any distance apart: out = activation(gate) * up.
struct GateArgs {
  const char* gate;  // [rows, size], 16-byte aligned, like all here
  const char* up;
  char* out;                               // may be gate
  i64 gate_stride, up_stride, out_stride;  // bytes, multiples of 16
  int size, activation;                    // size: a multiple of 8
  int pieces, reserved;  // blocks that share a row, kGateThreads units of 8 elements each
};
static_assert(sizeof(GateArgs) == 64, "as in params.py");

// Copies or zero fills: runs[i] = {destination, source, bytes, unused}; runs do not overlap.
struct MoveArgs {
  const i64* runs;
  const int* num_runs;   // [1]
  int pieces, reserved;  // blocks that share a run
};
static_assert(sizeof(MoveArgs) == 24, "as in params.py");
