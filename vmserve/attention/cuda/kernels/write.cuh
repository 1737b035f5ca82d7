// Rotary embedding of q and k and the write of k and v to their positions, in one pass; and memory
// moves for the KV cache.
//
// Rotations round where separate tensor operations in the element type would: after each product
// and after the sum (vmserve/attention/rotary.py). Where K and V are codes, rows are rounded to
// them after that.
#pragma once

#include "kv.cuh"

constexpr int kWriteThreads = 128;
constexpr int kMoveThreads = 256;

template <class T>
VMS_DEVICE float rounded(float x) {
  const u32 bits = ptx::pack<T>(x, 0.0F);
  return ptx::widen(T{static_cast<u16>(bits & 0xffffU)});
}

union Words {
  Unit unit;
  u32 words[4];
};

// Both elements of word i of a unit.
template <class T>
VMS_DEVICE Pair widened(const u32* words, int i) {
  return Pair{ptx::widen(T{static_cast<u16>(words[i] & 0xffffU)}),
              ptx::widen(T{static_cast<u16>(words[i] >> 16)})};
}

// Both products, rounded.
template <class T>
VMS_DEVICE Pair products(Pair x, Pair y) {
  const u32 bits = ptx::pack<T>(ptx::product(x.x, y.x), ptx::product(x.y, y.y));
  return widened<T>(&bits, 0);
}

template <class T>
VMS_DEVICE float rotated(T x, T partner, T cos, T sin) {
  return ptx::sum(rounded<T>(ptx::product(ptx::widen(x), ptx::widen(cos))),
                  rounded<T>(ptx::product(ptx::widen(partner), ptx::widen(sin))));
}

// A unit rotated, whose partners are one unit, too.
template <class T>
VMS_DEVICE Unit rotate_unit(const Words& own, const Words& partner, const Words& cos,
                            const Words& sin) {
  Words to;
#pragma unroll
  for (int w = 0; w < 4; ++w) {
    const Pair x = products<T>(widened<T>(own.words, w), widened<T>(cos.words, w));
    const Pair y = products<T>(widened<T>(partner.words, w), widened<T>(sin.words, w));
    to.words[w] = ptx::pack<T>(ptx::sum(x.x, y.x), ptx::sum(x.y, y.y));
  }
  return to.unit;
}

// The same one by one, for units of which a part is rotated, or whose partners are in two units:
// elements from d on of `row`, of which `own` are.
template <class T>
VMS_DEVICE Unit rotate_elements(const Words& own, const T* row, const T* cos, const T* sin, int d,
                                int rotary_dim) {
  const int half = rotary_dim / 2;
  Words to;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    float x[2];
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      const int e = d + 2 * i + j;
      const T element = {static_cast<u16>(own.words[i] >> (16 * j))};
      x[j] = ptx::widen(element);
      if (e >= rotary_dim) continue;
      const T partner = ptx::load(row + (e < half ? e + half : e - half));
      x[j] = rotated<T>(element, partner, ptx::load(cos + e), ptx::load(sin + e));
    }
    to.words[i] = ptx::pack<T>(x[0], x[1]);
  }
  return to.unit;
}

constexpr float kMostCode = 448.0F;
constexpr float kLeastRow = 0x1p-110F;  // rows below it are zeros: so 448 / largest is finite

// The code of e4m3 nearest to x, halves to even; 448 at most. In integers, so that every device
// has the same bits.
VMS_DEVICE u32 code_of(float x) {
  const u32 bits = ptx::bits_of(x), size = bits & 0x7fffffffU;
  u32 code;
  if (size <
      0x3c800000U) {  // below 2^-6: multiples of 2^-9, the last place of numbers from 2^14 on
    code = ptx::bits_of(ptx::sum(ptx::float_of(size), 0x1p14F)) & 0xffU;
  } else {
    const u32 nearest = (size + 0x7ffffU + (size >> 20 & 1)) >> 20;  // the exponent's bias is 127
    code = nearest < 0x43fU ? nearest - 960 : 0x7eU;
  }
  return code | (bits >> 24 & 0x80U);
}

// The largest magnitude among the kUnits units of a head, which as many lanes side by side have.
// NaN is larger than infinity, which is larger than numbers: bits tell.
template <class T, int kUnits>
VMS_DEVICE float largest_of_head(const Unit& unit) {
  const u32 words[4] = {unit.x, unit.y, unit.z, unit.w};
  u32 largest = 0;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const u32 low = words[i] & 0x7fffU, high = words[i] >> 16 & 0x7fffU;
    if (low > largest) largest = low;
    if (high > largest) largest = high;
  }
#pragma unroll
  for (int mask = kUnits / 2; mask > 0; mask /= 2) {
    const u32 other = ptx::shuffle_xor(largest, mask);
    if (other > largest) largest = other;
  }
  return ptx::widen(T{static_cast<u16>(largest)});
}

template <class T>
VMS_DEVICE Codes codes_of(const Unit& unit, float inverse) {
  const u32 words[4] = {unit.x, unit.y, unit.z, unit.w};
  u32 codes[2] = {0, 0};
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const T x = {static_cast<u16>(words[i / 2] >> (16 * (i & 1)))};
    codes[i / 4] |= code_of(ptx::product(ptx::widen(x), inverse)) << (8 * (i & 3));
  }
  return {codes[0], codes[1]};
}

// Unit i of what a token has: of all heads of q if there is a rotation, then of k and v. Where it
// goes is known late (the token's row, then the table), so all that is written is read before, and
// nothing branches on the row until the end.
template <class T, class KV, int kHeadDim, bool kPaged>
VMS_DEVICE void write_unit(const WriteArgs& args, int token, int i, int q_heads, bool is_none) {
  constexpr int kUnits = kHeadDim / 8;
  const int row = ptx::load_now(args.rows + token);
  const int position = ptx::load_now(args.positions + token);
  int head = is_none ? 0 : i / kUnits;
  const int unit = i % kUnits, d = unit * 8;
  const bool is_query = head < q_heads, is_key = !is_query && head < q_heads + args.kv_heads;
  const char* from;
  if (is_query) {
    from = args.q + token * args.q_token_stride + head * args.q_head_stride;
  } else if (is_key) {
    head -= q_heads;
    from = args.k + token * args.k_token_stride + head * args.k_head_stride;
  } else {
    head -= q_heads + args.kv_heads;
    from = args.v + token * args.v_token_stride + head * args.v_head_stride;
  }
  const T* const elements = reinterpret_cast<const T*>(from);
  Words own;
  own.unit = ptx::load_now(reinterpret_cast<const Unit*>(from) + unit);

  const bool rotates = (is_query || is_key) && d < args.rotary_dim;
  const char* const cos = args.cos + token * args.cos_stride;
  const char* const sin = args.sin + token * args.sin_stride;
  const bool by_unit = args.rotary_dim % 16 == 0 &&
                       ((reinterpret_cast<i64>(cos) | reinterpret_cast<i64>(sin)) & 15) == 0;
  Words partner = {{0, 0, 0, 0}}, own_cos = partner, own_sin = partner;
  if (rotates && by_unit) {
    const int half = args.rotary_dim / 2;
    partner.unit =
        ptx::load_now(reinterpret_cast<const Unit*>(elements + (d < half ? d + half : d - half)));
    own_cos.unit = ptx::load_now(reinterpret_cast<const Unit*>(cos) + unit);
    own_sin.unit = ptx::load_now(reinterpret_cast<const Unit*>(sin) + unit);
  }
  // What is no token is not written; until then it stands for the first one.
  const bool is_token = row >= 0;
  const i64 offset = kv_offset<kPaged>(args.kv, is_token ? row : 0, is_token ? position : 0);
  if (rotates) {
    own.unit = by_unit ? rotate_unit<T>(own, partner, own_cos, own_sin)
                       : rotate_elements<T>(own, elements, reinterpret_cast<const T*>(cos),
                                            reinterpret_cast<const T*>(sin), d, args.rotary_dim);
  }
  char* to = args.q_out + (static_cast<i64>(token) * args.q_heads + head) * kHeadDim * 2;
  if (!is_query) {
    to = (is_key ? args.kv.keys : args.kv.values) + offset + head * args.kv.head_stride;
  }
  if constexpr (kCoded<KV>) {
    const float largest = largest_of_head<T, kUnits>(own.unit);
    if (is_none || !is_token) return;
    if (!is_query) {
      const bool is_zero = largest < kLeastRow;
      const Codes codes = codes_of<T>(own.unit, is_zero ? 0.0F : kMostCode / largest);
      ptx::store(reinterpret_cast<Codes*>(to) + unit, codes);
      // Of what is not finite the scale is NaN: so is infinity times 0.
      const float scale = is_zero ? 0.0F : ptx::product(largest, 256.0F / kMostCode);
      if (unit == 0) {
        char* const scales = to + (args.kv_heads - head) * args.kv.head_stride;
        ptx::store(reinterpret_cast<float*>(scales) + head,
                   ptx::sum(scale, ptx::product(largest, 0.0F)));
      }
      return;
    }
  }
  if (is_token) ptx::store(reinterpret_cast<Unit*>(to) + unit, own.unit);
}

// `pieces` blocks share a token's units; with enough blocks a thread has one.
template <class T, class KV, int kHeadDim, bool kPaged>
VMS_DEVICE void write_token(const WriteArgs& args) {
  const int token = ptx::block() / args.pieces, piece = ptx::block() - token * args.pieces;
  const int q_heads = args.rotary_dim > 0 ? args.q_heads : 0;
  const int num_units = (q_heads + 2 * args.kv_heads) * (kHeadDim / 8);
  // All threads of a warp go on while one does: they look for the largest of a head together.
  for (int first = piece * kWriteThreads; first < num_units; first += args.pieces * kWriteThreads) {
    const int i = first + ptx::thread();
    const bool is_none = i >= num_units;
    if (!kCoded<KV> && is_none) return;
    write_unit<T, KV, kHeadDim, kPaged>(args, token, i, q_heads, is_none);
  }
}

// `pieces` blocks share each run, 16 bytes at a time if both ends are aligned.
template <bool kZero>
VMS_DEVICE void move_runs(const MoveArgs& args) {
  const int run = ptx::block() / args.pieces, piece = ptx::block() % args.pieces;
  if (run >= ptx::load(args.num_runs)) return;
  const i64* const entry = args.runs + 4 * static_cast<i64>(run);
  char* const to = reinterpret_cast<char*>(ptx::load(entry));
  const char* const from = kZero ? nullptr : reinterpret_cast<const char*>(ptx::load(entry + 1));
  const i64 bytes = ptx::load(entry + 2);
  const i64 first = static_cast<i64>(piece) * kMoveThreads + ptx::thread();
  const i64 step = static_cast<i64>(args.pieces) * kMoveThreads;
  const bool aligned = ((reinterpret_cast<i64>(to) | reinterpret_cast<i64>(from)) & 15) == 0;
  const i64 units = aligned ? bytes / 16 : 0;
  for (i64 i = first; i < units; i += step) {
    Unit value = {0, 0, 0, 0};
    if (!kZero) value = ptx::load(reinterpret_cast<const Unit*>(from) + i);
    ptx::store(reinterpret_cast<Unit*>(to) + i, value);
  }
  for (i64 i = 16 * units + first; i < bytes; i += step) {
    ptx::store(to + i, kZero ? '\0' : ptx::load(from + i));
  }
}
