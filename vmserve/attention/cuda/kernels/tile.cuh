// Computes blocks of 16 query rows with a tile of keys and values in shared memory: one warp.
//
// Thread t of the warp holds, of every 16 x 8 block of scores or output, columns 2 (t % 4) and the
// next of rows t / 4 (elements 0 and 1) and t / 4 + 8 (elements 2 and 3). Of codes, what a thread
// loads of a row is four bytes side by side, which become elements of two blocks: so columns of
// queries, and those of the output, are permuted within each 16 (store_permuted, for_columns).
//
// A row has the same bits whatever it is computed beside. Both kernels compute one expression of
// it: tiles of kTileTokens positions and parts of kPartTokens, at multiples of them, each part from
// nothing. A tile in which a row sees no key changes nothing of it: its factor is exactly 1, its
// weights are 0. The row is the sum of its parts in their order (Parts). No product here may be
// contracted in one kernel and not in the other: products that are added to something are spelled
// out in ptx's terms.
#pragma once

#include "kv.cuh"

constexpr int kTileTokens = 32;
constexpr int kPartTokens = VMS_PART_TOKENS;  // a multiple of kTileTokens

// State of the online softmax (Milakov and Gimelshein 2018) of two rows, in one part of the keys,
// for kColumns of the output.
template <int kColumns>
struct RowSums {
  float out[kColumns / 8][4];
  float maximum[2];  // of the scores times `scale`; -infinity: no key yet
  float total[2];    // over this thread's keys only

  VMS_DEVICE void clear() {
#pragma unroll
    for (int n = 0; n < kColumns / 8; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) out[n][i] = 0.0F;
    }
    maximum[0] = maximum[1] = -ptx::infinity();
    total[0] = total[1] = 0.0F;
  }
};

// 16 query rows as fragments: in registers, or in shared memory if they need too many registers.
// T: of their elements.
template <class T, int kHeadDim, bool kHeld = kHeadDim <= 128>
struct QueryRows {
  u32 held[kHeld ? kHeadDim / 16 : 1][4];
  const char* tile;
  int row, unit;

  // `first`: the first of the warp's 16 rows in the tile.
  VMS_DEVICE void take(const char* queries, int first, int lane) {
    tile = queries;
    row = first + (lane & 15);
    unit = lane >> 4;
    if (!kHeld) return;
#pragma unroll
    for (int k = 0; k < kHeadDim / 16; ++k) {
      if (kHeld)
        ptx::load_matrices(held[kHeld ? k : 0], tile + tile_offset<T, kHeadDim>(row, 2 * k + unit));
    }
  }
  VMS_DEVICE void fragment(int k, u32 (&to)[4]) const {
    if (kHeld) {
#pragma unroll
      for (int i = 0; i < 4; ++i) to[i] = held[kHeld ? k : 0][i];
    } else {
      ptx::load_matrices(to, tile + tile_offset<T, kHeadDim>(row, 2 * k + unit));
    }
  }
};

// Scales of the keys, or values, of columns n .. n + 7 of a tile that are this thread's.
VMS_DEVICE Pair scales_of(const char* scales, int n, int lane) {
  return ptx::load_copied(reinterpret_cast<const Pair*>(scales + (n + 2 * (lane & 3)) * 4));
}

// Multiplies scores with the scales of their keys.
template <int kCount>
VMS_DEVICE void scale_scores(float (&scores)[kCount][4], const char* scales, int lane) {
#pragma unroll
  for (int n = 0; n < kCount; ++n) {
    const Pair scale = scales_of(scales, 8 * n, lane);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      scores[n][2 * half] = ptx::product(scores[n][2 * half], scale.x);
      scores[n][2 * half + 1] = ptx::product(scores[n][2 * half + 1], scale.y);
    }
  }
}

// Scores of all blocks of rows; each key is loaded once.
template <class T, class KV, int kHeadDim, int kTokens, int kBlocks, bool kHeld>
VMS_DEVICE void score(const QueryRows<T, kHeadDim, kHeld> (&queries)[kBlocks],
                      const TileMemory<KV, kHeadDim, kTokens>& tile, int lane,
                      float (&scores)[kBlocks][kTokens / 8][4]) {
#pragma unroll
  for (int b = 0; b < kBlocks; ++b) {
#pragma unroll
    for (int n = 0; n < kTokens / 8; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) scores[b][n][i] = 0.0F;
    }
  }
  const int row = ((lane >> 4) << 3) + (lane & 7), unit = (lane >> 3) & 1;
  // Codes want a few registers more than there are for all columns at once.
#pragma unroll(kCoded<KV> && !kHeld ? 4 : kHeadDim / 16)
  for (int k = 0; k < kHeadDim / 16; ++k) {
    u32 q[kBlocks][4];
#pragma unroll
    for (int b = 0; b < kBlocks; ++b) queries[b].fragment(k, q[b]);
    if constexpr (kCoded<KV>) {
      static_assert(kTokens == 32, "a load of codes has 32 rows of 16 columns");
      u32 keys[4];
      ptx::load_matrices(keys, tile.keys() + tile_offset<KV, kHeadDim>(lane, k));
#pragma unroll
      for (int n = 0; n < kTokens / 8; ++n) {
        u32 even, odd;
        widen_codes<T>(keys[n], even, odd);
#pragma unroll
        for (int b = 0; b < kBlocks; ++b) ptx::multiply_add<T>(scores[b][n], q[b], even, odd);
      }
    } else {
#pragma unroll
      for (int n = 0; n < kTokens / 16; ++n) {
        u32 keys[4];
        ptx::load_matrices(keys,
                           tile.keys() + tile_offset<KV, kHeadDim>(16 * n + row, 2 * k + unit));
#pragma unroll
        for (int b = 0; b < kBlocks; ++b) {
          ptx::multiply_add<T>(scores[b][2 * n], q[b], keys[0], keys[1]);
          ptx::multiply_add<T>(scores[b][2 * n + 1], q[b], keys[2], keys[3]);
        }
      }
    }
  }
  if constexpr (kCoded<KV>) {
#pragma unroll
    for (int b = 0; b < kBlocks; ++b) scale_scores(scores[b], tile.key_scales(), lane);
  }
}

// softcap * tanh(score / softcap) in base-2 logarithms: tanh x = 1 - 2 / (1 + e^2x).
template <int kCount>
VMS_DEVICE void cap(float (&scores)[kCount][4], float scale, float softcap) {
#pragma unroll
  for (int n = 0; n < kCount; ++n) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float e = ptx::exp2(scores[n][i] * scale);
      scores[n][i] = ptx::multiply_add(-2.0F * softcap, ptx::reciprocal(1.0F + e), softcap);
    }
  }
}

// Masks scores outside [low, high) of each of the two rows. `first`: this thread's first column.
template <int kCount>
VMS_DEVICE void mask(float (&scores)[kCount][4], int first, const int (&low)[2],
                     const int (&high)[2]) {
#pragma unroll
  for (int n = 0; n < kCount; ++n) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int position = first + 8 * n + (i & 1);
      if (position < low[i >> 1] || position >= high[i >> 1]) scores[n][i] = -ptx::infinity();
    }
  }
}

VMS_DEVICE float quad_maximum(float x) {
  x = ptx::larger(x, ptx::shuffle_xor(x, 1));
  return ptx::larger(x, ptx::shuffle_xor(x, 2));
}
VMS_DEVICE float quad_sum(float x) {
  x += ptx::shuffle_xor(x, 1);
  return x + ptx::shuffle_xor(x, 2);
}

// Turns scores into weights relative to the new maximum, and rescales the sums so far.
template <int kColumns, int kCount>
VMS_DEVICE void soften(float (&scores)[kCount][4], float scale, RowSums<kColumns>& sums) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    float best = scores[0][2 * half];
#pragma unroll
    for (int n = 0; n < kCount; ++n) {
      best = ptx::larger(best, ptx::larger(scores[n][2 * half], scores[n][2 * half + 1]));
    }
    best = ptx::larger(sums.maximum[half], ptx::product(quad_maximum(best), scale));
    // If a row has no key yet, its weights are 0 instead of NaN.
    const float shift = best == -ptx::infinity() ? 0.0F : best;
    const float factor = ptx::exp2(sums.maximum[half] - shift);
    sums.maximum[half] = best;
    float total = ptx::product(sums.total[half], factor);
#pragma unroll
    for (int n = 0; n < kCount; ++n) {
#pragma unroll
      for (int i = 2 * half; i < 2 * half + 2; ++i) {
        scores[n][i] = ptx::exp2(ptx::multiply_add(scores[n][i], scale, -shift));
        total += scores[n][i];
      }
    }
    sums.total[half] = total;
#pragma unroll
    for (int n = 0; n < kColumns / 8; ++n) {
      sums.out[n][2 * half] *= factor;
      sums.out[n][2 * half + 1] *= factor;
    }
  }
}

// Adds values times weights, in the columns from `column` on.
template <class T, int kHeadDim, int kTokens, int kColumns, int kBlocks>
VMS_DEVICE void weigh(const float (&weights)[kBlocks][kTokens / 8][4],
                      const TileMemory<T, kHeadDim, kTokens>& tile, int lane, int column,
                      RowSums<kColumns> (&sums)[kBlocks]) {
  const int row = lane & 15, unit = column / 8 + (lane >> 4);
#pragma unroll
  for (int k = 0; k < kTokens / 16; ++k) {
    u32 w[kBlocks][4];
#pragma unroll
    for (int b = 0; b < kBlocks; ++b) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float (&from)[4] = weights[b][2 * k + (i >> 1)];
        w[b][i] = ptx::pack<T>(from[2 * (i & 1)], from[2 * (i & 1) + 1]);
      }
    }
#pragma unroll
    for (int n = 0; n < kColumns / 16; ++n) {
      u32 values[4];
      ptx::load_matrices_transposed(
          values, tile.values() + tile_offset<T, kHeadDim>(16 * k + row, 2 * n + unit));
#pragma unroll
      for (int b = 0; b < kBlocks; ++b) {
        ptx::multiply_add<T>(sums[b].out[2 * n], w[b], values[0], values[1]);
        ptx::multiply_add<T>(sums[b].out[2 * n + 1], w[b], values[2], values[3]);
      }
    }
  }
}

// A weight times the scale of its value. One that is 0 adds nothing, even to a value that is NaN.
VMS_DEVICE float scaled(float weight, float scale) {
  return weight == 0.0F ? 0.0F : ptx::product(weight, scale);
}

// The same of codes.
template <class T, int kHeadDim, int kTokens, int kColumns, int kBlocks>
VMS_DEVICE void weigh(const float (&weights)[kBlocks][kTokens / 8][4],
                      const TileMemory<E4m3, kHeadDim, kTokens>& tile, int lane, int column,
                      RowSums<kColumns> (&sums)[kBlocks]) {
  constexpr int kUnits = kColumns < 32 ? 1 : 2;  // of 16 columns, in a load of values
  const int row = lane & 15, unit = column / 16 + (kUnits > 1 ? lane >> 4 : 0);
#pragma unroll
  for (int k = 0; k < kTokens / 16; ++k) {
    u32 w[kBlocks][4];
#pragma unroll
    for (int n = 0; n < 2; ++n) {
      const Pair scale = scales_of(tile.value_scales(), 16 * k + 8 * n, lane);
#pragma unroll
      for (int b = 0; b < kBlocks; ++b) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const float (&from)[4] = weights[b][2 * k + n];
          w[b][2 * n + half] =
              ptx::pack<T>(scaled(from[2 * half], scale.x), scaled(from[2 * half + 1], scale.y));
        }
      }
    }
#pragma unroll
    for (int n = 0; n < kColumns / 16; n += kUnits) {
      u32 values[4];
      ptx::load_matrices_transposed(
          values, tile.values() + tile_offset<E4m3, kHeadDim>(16 * k + row, unit + n));
#pragma unroll
      for (int u = 0; u < kUnits; ++u) {
        u32 even[2], odd[2];
#pragma unroll
        for (int i = 0; i < 2; ++i) widen_codes<T>(values[2 * u + i], even[i], odd[i]);
#pragma unroll
        for (int b = 0; b < kBlocks; ++b) {
          ptx::multiply_add<T>(sums[b].out[2 * (n + u)], w[b], even[0], even[1]);
          ptx::multiply_add<T>(sums[b].out[2 * (n + u) + 1], w[b], odd[0], odd[1]);
        }
      }
    }
  }
}

// The rows of an item: row r is query head `head * group + r % group` of the item's token
// r / group.
struct ItemRows {
  const AttendArgs& args;
  const WorkItem item;
  const int head, num_rows;

  VMS_DEVICE ItemRows(const AttendArgs& a, int work)
      : args(a),
        item(fetch(a.items + work / a.kv_heads)),
        head(work % a.kv_heads),
        num_rows(item.num_tokens * a.group) {}

  VMS_DEVICE static WorkItem fetch(const WorkItem* from) {
    const Unit* const halves = reinterpret_cast<const Unit*>(from);
    const Unit a = ptx::load(halves), b = ptx::load(halves + 1);
    return {static_cast<int>(a.x), static_cast<int>(a.y), static_cast<int>(a.z),
            static_cast<int>(a.w), static_cast<int>(b.x), static_cast<int>(b.y),
            static_cast<int>(b.z), static_cast<int>(b.w)};
  }

  VMS_DEVICE int token(int index) const {
    return item.token >= 0 ? item.token + index : ptx::load(args.lists + (-1 - item.token) + index);
  }
  VMS_DEVICE int q_head(int row) const { return head * args.group + row % args.group; }
  VMS_DEVICE i64 head_offset() const { return head * args.kv.head_stride; }
  // From a head's row of a token to its scale, which is behind the codes of all heads.
  VMS_DEVICE i64 scale_offset() const {
    return args.kv_heads * args.kv.head_stride - head_offset() + head * 4;
  }

  // Whether the item's parts are combined by another kernel: all of its tokens have parts, or none.
  VMS_DEVICE bool exported() const { return ptx::load(args.part_starts + token(0)) >= 0; }
  // Whether the tile from `begin` on is the last of a part, or of the item.
  VMS_DEVICE bool ends_part(int begin) const {
    const int end = begin + kTileTokens;
    return end >= item.kv_end || end % kPartTokens == 0;
  }

  // Range [low, high) of keys that `row` attends to. Rows after the last one get all keys.
  VMS_DEVICE void visible(int row, int& low, int& high) const {
    low = 0;
    high = item.kv_end;
    if (row >= num_rows) return;
    const int index = row / args.group;
    const int position =
        item.token >= 0 ? item.min_position + index : ptx::load(args.positions + token(index));
    if (position + 1 < high) high = position + 1;
    if (args.window > 0 && position + 1 - args.window > low) low = position + 1 - args.window;
  }

  // Lowest and highest position of the rows from `first` up to `last`, if there is one.
  VMS_DEVICE void span(int first, int last, int& lowest, int& highest) const {
    lowest = item.min_position;
    highest = item.max_position;
    if (item.token < 0) return;
    if (last >= num_rows) last = num_rows - 1;
    lowest = item.min_position + first / args.group;
    highest = item.min_position + last / args.group;
  }
};

// Stores a unit of a row of queries for keys that are codes: elements 4 t and 4 t + 2 of each 16 go
// where a fragment's columns 2 t and the next are, 4 t + 1 and 4 t + 3 eight columns behind.
template <class T, int kHeadDim>
VMS_DEVICE void store_permuted(char* tile, int row, int unit, const Unit& value) {
  const auto low = [](u32 x, u32 y) { return (x & 0xffffU) | y << 16; };
  const auto high = [](u32 x, u32 y) { return x >> 16 | (y & 0xffff0000U); };
  const auto at = [&](int of_pair) {
    return reinterpret_cast<Codes*>(tile + tile_offset<T, kHeadDim>(row, (unit & ~1) + of_pair)) +
           (unit & 1);
  };
  *at(0) = Codes{low(value.x, value.y), low(value.z, value.w)};
  *at(1) = Codes{high(value.x, value.y), high(value.z, value.w)};
}

// Copies the item's queries into shared memory; missing rows become zeros.
template <class T, class KV, int kHeadDim, int kRows, int kThreads>
VMS_DEVICE void load_queries(const ItemRows& rows, char* tile) {
  constexpr int kUnits = kHeadDim / 8;
  for (int i = ptx::thread(); i < kRows * kUnits; i += kThreads) {
    const int row = i / kUnits, unit = i % kUnits;
    Unit value = {0, 0, 0, 0};
    if (row < rows.num_rows) {
      const char* const from = rows.args.q +
                               rows.token(row / rows.args.group) * rows.args.q_token_stride +
                               rows.q_head(row) * rows.args.q_head_stride + unit * 16;
      value = ptx::load(reinterpret_cast<const Unit*>(from));
    }
    if constexpr (kCoded<KV>) {
      store_permuted<T, kHeadDim>(tile, row, unit, value);
    } else {
      *reinterpret_cast<Unit*>(tile + tile_offset<T, kHeadDim>(row, unit)) = value;
    }
  }
}

// Caps and masks the scores of a tile for rows from `first` on, and makes them weights. `lowest`
// and `highest`: of the rows' positions, or beyond. `visible`: as ItemRows has it.
template <int kColumns, int kCount, class Visible>
VMS_DEVICE void weights_of(const AttendArgs& args, int kv_end, int first, int lowest, int highest,
                           int begin, float (&scores)[kCount][4], RowSums<kColumns>& sums,
                           Visible visible) {
  const int lane = ptx::thread() & 31;
  float scale = args.scale;
  if (args.softcap > 0.0F) {
    cap(scores, scale, args.softcap);
    scale = 1.0F;
  }
  // Masks only tiles at an edge; for those, the rows' ranges are computed again.
  const int end = begin + 8 * kCount;
  if (end > kv_end || end > lowest + 1 || (args.window > 0 && begin + args.window <= highest)) {
    const int row = first + (lane >> 2);
    int low[2], high[2];
    visible(row, low[0], high[0]);
    visible(row + 8, low[1], high[1]);
    mask(scores, begin + 2 * (lane & 3), low, high);
  }
  soften(scores, scale, sums);
}

constexpr float kLn2 = 0.6931471805599453F;
constexpr float kLog2e = 1.4426950408889634F;

// Maximum and total of the parts of a row so far: a row is the sum of its parts, from the first to
// the last, whoever adds them. A part without a visible key changes nothing.
struct Parts {
  float maximum, total;

  VMS_DEVICE void clear() {
    maximum = -ptx::infinity();
    total = 0.0F;
  }
  // Adds a part. The sums over values are then folded(so far, of_old, the part's, of_new).
  VMS_DEVICE void add(const Pair& part, float& of_old, float& of_new) {
    const float best = ptx::larger(maximum, part.x);
    const float shift = best == -ptx::infinity() ? 0.0F : best;
    of_old = ptx::exp2(maximum - shift);
    of_new = ptx::exp2(part.x - shift);
    maximum = best;
    total = folded(total, of_old, part.y, of_new);
  }
  VMS_DEVICE static float folded(float old, float of_old, float part, float of_new) {
    return ptx::multiply_add(old, of_old, ptx::product(part, of_new));
  }
  // What the sums over values are multiplied by. A sink counts in the last total alone, so that it
  // has one place in the order; one that is beyond floats makes that infinite, and the row 0.
  VMS_DEVICE float inverse(const float* sinks, int q_head) const {
    float all = total;
    if (sinks != nullptr) {
      const float sink = ptx::product(ptx::load(sinks + q_head), kLog2e);
      all = ptx::sum(all, ptx::exp2(ptx::sum(sink, -maximum)));
    }
    return all > 0.0F ? 1.0F / all : 0.0F;
  }
  // The natural logarithm of the sum of exponentials, without a sink's.
  VMS_DEVICE float lse() const {
    return ptx::product((total > 0.0F ? maximum : 0.0F) + ptx::log2(total), kLn2);
  }
};

// A finished element. The sign of a sum that is 0 depends on tiles without weight.
VMS_DEVICE float finished(float sum, float inverse) {
  return ptx::sum(ptx::product(sum, inverse), 0.0F);
}

// Adds what a warp's rows have in one part of the keys to the parts before, and begins the next.
// `fold(n, half, of_old, of_new)` does so with a pair of elements of sums.out.
template <int kColumns, class FoldPair>
VMS_DEVICE void end_part(RowSums<kColumns>& sums, Parts (&parts)[2], FoldPair fold) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    float of_old, of_new;
    parts[half].add(Pair{sums.maximum[half], quad_sum(sums.total[half])}, of_old, of_new);
#pragma unroll
    for (int n = 0; n < kColumns / 8; ++n) fold(n, half, of_old, of_new);
  }
}

// Calls `store(i, x, y)` for all pairs of neighbours among a thread's columns of a row, of which
// the first is i.
template <class KV, int kColumns, class Store>
VMS_DEVICE void for_columns(const RowSums<kColumns>& sums, int half, int lane, Store store) {
  constexpr int kTogether = kCoded<KV> ? 2 : 1;  // blocks of eight columns
#pragma unroll
  for (int n = 0; n < kColumns / 8; n += kTogether) {
#pragma unroll
    for (int i = 0; i < kTogether; ++i) {
      // Of codes, even columns are in one block and odd ones in the next (weigh).
      const float next = kCoded<KV> ? sums.out[n + 1][2 * half + i] : sums.out[n][2 * half + 1];
      store(8 * n + 2 * kTogether * (lane & 3) + 2 * i, sums.out[n][2 * half + i], next);
    }
  }
}

// Stores a part of a warp's rows from `first` on for the combination, in the columns from `column`
// on. `index`: of the part within the item.
template <class KV, int kHeadDim, int kColumns>
VMS_DEVICE void store_part(const ItemRows& rows, const RowSums<kColumns>& sums, int first,
                           int column, int index) {
  const AttendArgs& args = rows.args;
  const int lane = ptx::thread() & 31;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int row = first + (lane >> 2) + 8 * half;
    const float total = quad_sum(sums.total[half]);
    if (row >= rows.num_rows) continue;
    const int start = ptx::load(args.part_starts + rows.token(row / args.group));
    const i64 at = static_cast<i64>(start + rows.item.part + index) * args.kv_heads * args.group +
                   rows.q_head(row);
    for_columns<KV>(sums, half, lane, [&](int i, float x, float y) {
      float* const to = args.parts + at * kHeadDim + column + i;
      ptx::store(reinterpret_cast<Pair*>(to), Pair{x, y});
    });
    if ((lane & 3) == 0 && column == 0) {
      ptx::store(args.part_sums + at, Pair{sums.maximum[half], total});
    }
  }
}

// Stores a warp's finished rows.
template <class T, class KV, int kHeadDim, int kColumns>
VMS_DEVICE void store_rows(const ItemRows& rows, const RowSums<kColumns>& sums,
                           const Parts (&parts)[2], int first, int column) {
  const AttendArgs& args = rows.args;
  const int lane = ptx::thread() & 31;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int row = first + (lane >> 2) + 8 * half;
    if (row >= rows.num_rows) continue;
    const float inverse = parts[half].inverse(args.sinks, rows.q_head(row));
    const i64 at = static_cast<i64>(rows.token(row / args.group)) * args.kv_heads * args.group +
                   rows.q_head(row);
    for_columns<KV>(sums, half, lane, [&](int i, float x, float y) {
      char* const to = args.out + (at * kHeadDim + column + i) * 2;
      ptx::store(reinterpret_cast<u32*>(to),
                 ptx::pack<T>(finished(x, inverse), finished(y, inverse)));
    });
    if (args.lse != nullptr && (lane & 3) == 0 && column == 0) {
      ptx::store(args.lse + at, parts[half].lse());
    }
  }
}
