// What the host passes to the kernels: plain structures, 8-byte fields first, no padding between.
// vmserve/attention/cuda/params.py has the same; sizes are checked in both.
#pragma once

#include "ptx.h"

// Where one layer's K and V lie. Position p of the sequence in row r:
// - paged: block b = table[r * table_width + (p >> block_shift)], token p % 2^block_shift of part
//   b % blocks_per_page of page b / blocks_per_page;
// - in slots: token p of slot r. The table is not read; page_stride is from slot to slot.
struct KvLayer {
  char* keys;    // of position 0 of page 0 (slot 0), head 0
  char* values;  // the same; K and V share the strides
  const int* table;
  i64 page_stride, token_stride, head_stride;  // bytes, multiples of 16
  int table_width, block_shift, blocks_per_page, reserved;
};
static_assert(sizeof(KvLayer) == 64, "as in params.py");

// Some tokens' queries against one stretch of one sequence's keys; the same for each KV head.
struct alignas(16) WorkItem {
  int row;    // of the table, or the slot
  int token;  // the first of the ragged batch's tokens, at consecutive positions; -1 - i: tokens
              // lists[i ..], whose positions are anywhere at or past kv_end
  int num_tokens;
  int kv_begin, kv_end;            // begin: a multiple of 16
  int part;                        // which of its tokens' parts this is
  int min_position, max_position;  // of the tokens
};
static_assert(sizeof(WorkItem) == 32, "as in plan.py");

struct AttendArgs {
  KvLayer kv;
  const char* q;                      // [tokens, q_heads, head_dim]
  char* out;                          // the same, contiguous
  float* lse;                         // [tokens, q_heads] or null: natural logarithms
  float* parts;                       // [parts, q_heads, head_dim]
  float* part_lse;                    // [parts, q_heads]: binary logarithms
  const WorkItem* items;              // [num_items]
  const int* num_items;               // [1]
  const int* lists;                   // tokens
  const int* positions;               // [tokens]
  const int* part_starts;             // [tokens]: the first part of each; -1 where there is but one
  i64 q_token_stride, q_head_stride;  // bytes, multiples of 16
  float scale;  // to binary logarithms: of the raw score, or if capped of what tanh takes, doubled
  float softcap;  // in binary logarithms; 0: none
  int window;     // positions that a query sees, itself included; 0: all
  int kv_heads, group, reserved;
};
static_assert(sizeof(AttendArgs) == 64 + 80 + 16 + 24, "as in params.py");

struct CombineArgs {
  const float* parts;
  const float* part_lse;
  char* out;
  float* lse;            // or null
  const int* split;      // [num_split, 4]: token, first part, parts, unused
  const int* num_split;  // [1]
  int q_heads, reserved;
};
static_assert(sizeof(CombineArgs) == 56, "as in params.py");

struct WriteArgs {
  KvLayer kv;
  const char* q;  // not read where nothing is rotated
  const char* k;
  const char* v;
  const char* cos;       // [tokens, rotary_dim]
  const char* sin;       // signed, as vmserve/attention/rotary.py says
  char* q_out;           // [tokens, q_heads, head_dim], contiguous
  const int* rows;       // [tokens]: of the table, or the slot; negative: not a token
  const int* positions;  // [tokens]
  i64 q_token_stride, q_head_stride, k_token_stride, k_head_stride, v_token_stride, v_head_stride;
  i64 cos_stride, sin_stride;  // all in bytes
  int q_heads, kv_heads, rotary_dim, reserved;
};
static_assert(sizeof(WriteArgs) == 64 + 64 + 64 + 16, "as in params.py");

// Rows of `size` elements, contiguous: x += residual, which may be null; then out = RMSNorm of x.
struct NormArgs {
  char* x;  // [rows, size], 16-byte aligned, as all here; written where there is a residual
  const char* residual;  // the same, or null
  const char* weight;    // [size]
  char* out;             // as x
  float eps;
  int size, reserved, reserved_too;  // size: a multiple of 8
};
static_assert(sizeof(NormArgs) == 48, "as in params.py");

// Copies, or fills with zeros: runs[i] = {destination, source, bytes, unused}; no two runs overlap.
struct MoveArgs {
  const i64* runs;
  const int* num_runs;   // [1]
  int pieces, reserved;  // blocks that share one run
};
static_assert(sizeof(MoveArgs) == 24, "as in params.py");
